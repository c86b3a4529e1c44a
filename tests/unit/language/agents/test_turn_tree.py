"""Turn trees: branches, samples, messages, pictures, and the tokens that are shown to a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhpc.language.agents.turn_tree import AgentTurn, Renderer, RequestError, TurnTree, canonical, key_of, keys_of
from rlhpc.language.data.images import PromptImages
from tests.unit.language.agents.pictures import by_url, picture


def test_a_model_of_text_is_shown_nothing() -> None:
    messages = [canonical(by_url(f"data:image/png;base64,{picture()}"))]
    with pytest.raises(RequestError, match="this model reads text alone"):
        Renderer(None).prompt(TurnTree(), messages, keys_of(messages, None), None)


def test_the_same_tokens_with_another_picture_go_on_from_nothing() -> None:
    def seen(*shades: float) -> PromptImages:
        patches = tuple(np.full((4, 2), shade, np.float32) for shade in shades)
        grids = np.asarray([[1, 2, 2]] * len(shades), np.int64)
        return PromptImages(
            patches, grids, 1 + 3 * np.arange(len(shades)), 2, tuple(str(shade).encode() for shade in shades)
        )

    tree = TurnTree([AgentTurn(None, [7, 9], [5], [-0.5], [0], "stop", images=seen(0.0))])
    longer = [7, 9, 5, 8, 9, 6]
    assert tree.find_parent(longer, images=seen(0.0)) == tree.find_parent(longer, images=seen(0.0, 1.0)) == 0
    assert tree.find_parent(longer, images=seen(1.0, 0.0)) is None and tree.find_parent(longer) is None


# -- branches and samples --------------------------------------------------------------------------------------------


def turn(parent: int | None, context: list[int], reply: list[int], **options: Any) -> AgentTurn:
    received = options.pop("received", True)
    return AgentTurn(parent, context, reply, [-float(token) for token in reply], [1] * len(reply), "stop",
                     received=received, **options)  # fmt: skip


def test_the_longest_turn_that_was_read_is_continued() -> None:
    tree = TurnTree([turn(None, [1, 2], [3]), turn(0, [4], [5]), turn(None, [1], [9]), turn(0, [4], [5])])
    assert tree.ids(1) == [1, 2, 3, 4, 5] and tree.path(3) == [0, 3]
    assert tree.find_parent([1, 2, 3, 4, 5, 6]) == 3, "the last of two that are equal"
    assert tree.find_parent([1, 2, 3, 4, 6]) == 0 and tree.find_parent([1, 9, 7]) == 2
    assert tree.find_parent([2, 1]) is None and tree.find_parent([1, 2, 3, 4, 5, 6], role=1) is None
    assert tree.find_parent([1, 2, 3]) is None, "something has to be new"
    assert tree.counts() == {"turns": 4, "branches": 2, "drawn": 4, "not_received": 0}


def test_each_leaf_is_a_sample_and_a_shared_turn_is_trained_once() -> None:
    tree = TurnTree([
        turn(None, [1, 2], [3, 4], reward=0.5), turn(0, [5], [8], reward=1.0), turn(0, [5], [7]),
        turn(None, [1, 2], [6], received=False),
    ])  # fmt: skip
    first, second = tree.samples(9)
    assert (first.id, first.turns, first.prompt_ids) == (9, 2, (1, 2))
    assert [first.token_ids, second.token_ids] == [[3, 4, 5, 7], [3, 4, 5, 8]], "by their tokens, not by their end"
    assert first.loss_mask == [True, True, False, True] and second.loss_mask == [False, False, False, True]
    assert first.rewards == [0.0, 0.5, 0.0, 0.0] and second.rewards == [0.0, 0.0, 0.0, 1.0]
    assert tree.counts()["not_received"] == 1
    assert tree.turns[3].mark_received() is False and tree.turns[3].mark_received(False) is True
    assert TurnTree([turn(None, [1], [2], received=False)]).samples(0) == []


def test_a_turn_that_nobody_received_is_context_of_the_one_that_continues_it() -> None:
    (sample,) = TurnTree([turn(None, [1], [2], received=False), turn(0, [3], [4])]).samples(0)
    assert sample.token_ids == [2, 3, 4] and sample.loss_mask == [False, False, True]


# -- messages --------------------------------------------------------------------------------------------------------


def test_messages_have_one_form() -> None:
    call = {"id": "x", "function": {"name": "add", "arguments": '{"a": 1}'}}
    message = canonical({"role": "assistant", "content": None, "reasoning": "so", "tool_calls": [call]})
    assert message["reasoning_content"] == "so"
    assert message["tool_calls"] == [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert canonical({"role": "developer", "content": "x"})["role"] == "system"
    reply = canonical({"role": "function", "content": "1", "name": "add", "tool_call_id": "x"})
    assert (reply["role"], reply["name"], reply["tool_call_id"]) == ("tool", "add", "x")


def test_ids_and_white_space_do_not_change_a_digest() -> None:
    one, other = ({"role": "tool", "content": text, "tool_call_id": name} for text, name in (("1", "x"), (" 1\n", "y")))
    assert key_of(canonical(one)) == key_of(canonical(other)) != key_of(canonical({**one, "content": "2"}))
    call = {"id": "x", "function": {"name": "add", "arguments": {"a": 1}}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call | {"id": name}]} for name in "xy"]
    assert len({key_of(canonical(message)) for message in calls}) == 1
    messages = [canonical(one)]
    assert keys_of(messages, None) == keys_of(messages, []) != keys_of(messages, [{"type": "function"}])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("hello", "objects with role and content"),
        ({"content": "x"}, "objects with role and content"),
        ({"role": "user", "content": "x", "name": 3}, "name must be a text"),
        ({"role": "user", "content": "x", "function_call": {"name": "f"}}, "functions are tools here"),
        ({"role": "assistant", "content": "", "tool_calls": {"a": 1}}, "tool_calls must be a list"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, "a function with a name"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}, "must be a text"),
    ],
)
def test_messages_that_are_refused(message: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        canonical(message)
