"""Sample groups: batches of episodes, messages of channels, and columns of algorithms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.algorithms.base import ROLLOUT
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.models.moe_routing import EXPERTS
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout.sample_group import (
    BlockChannel,
    SampleGroup,
    build_sample_group,
    column_message,
    read_rollout_columns,
)
from rlhpc.language.scoring.groups import TEACHER_INDEX
from rlhpc.runtime.channel import QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError


def episode(*tokens: int, prompt: tuple[int, ...] = (1, 2), **fields: Any) -> Episode:
    """Returns an episode of one turn."""
    count = len(tokens)
    return Episode(
        0, prompt, token_ids=list(tokens), logprobs=[-0.5] * count, versions=[3] * count, loss_mask=[True] * count,
        turn_ids=[0] * count, finish_reason="stop", **fields,
    )  # fmt: skip


def group(**options: Any) -> SampleGroup:
    """Returns a group of two episodes, the members 0 and 2 of three."""
    episodes = {0: episode(5, 6), 2: episode(7)}
    given: dict[str, Any] = {
        "columns": [{"weight": [0.1, 0.2]}, {"weight": [0.3]}],
        "trained": True,
        "size": 3,
        **options,
    }
    return build_sample_group(4, 10, episodes, np.array([1.0, -1.0], np.float32), **given)


def test_prompts_and_answers_become_one_batch() -> None:
    batch = group().batch
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.ids.tolist() == [1, 2, 5, 6, 1, 2, 7]
    assert batch.mask.tolist() == [False, False, True, True, False, False, True]
    assert batch.columns["rollout_logprobs"].tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5]
    assert batch.columns["versions"].tolist() == [-1, -1, 3, 3, -1, -1, 3]
    assert batch.columns["weight"].tolist() == pytest.approx([0, 0, 0.1, 0.2, 0, 0, 0.3])
    assert batch.episode.tolist() == [30, 32] and batch.group.tolist() == [10, 10]
    assert batch.reward.tolist() == [1.0, -1.0]


def test_branches_of_an_episode_are_samples_with_its_reward_and_that_of_their_role() -> None:
    whole = episode(9, branches=[episode(5), episode(6, prompt=(1, 5), role=1, role_reward_offset=0.5)])
    one = build_sample_group(
        1, 0, {0: whole}, np.array([2.0], np.float32), columns=[{}, {}], trained=True, size=1, agent_weight=10.0
    )
    assert one.batch.ids.tolist() == [1, 2, 5, 1, 5, 6]
    assert one.batch.episode.tolist() == [0, 0] and one.batch.role.tolist() == [0, 1]
    assert one.batch.reward.tolist() == [2.0, 7.0]


def test_only_members_are_trained_on() -> None:
    assert (
        group().trained_samples() is group().batch
        or group().trained_samples().ids.tolist() == group().batch.ids.tolist()
    )
    some = group(trained=[False, True])
    assert some.members.tolist() == [False, True] and some.trained_samples().ids.tolist() == [1, 2, 7]
    assert some.batch.ids.tolist() == group().batch.ids.tolist()  # the others are sent all the same


def test_a_group_goes_through_a_channel() -> None:
    sent = group(trained=[True, False])
    received = SampleGroup.unpack(sent.pack())
    assert (received.step, received.position) == (4, 10) and received.members.tolist() == [True, False]
    assert received.batch.ids.tolist() == sent.batch.ids.tolist()
    assert set(received.batch.columns) == set(sent.batch.columns)
    assert received.answers_digest == sent.answers_digest
    bare = SampleGroup.unpack(sent.pack_without_columns())
    assert bare.batch.columns == {} and bare.answers_digest == sent.answers_digest
    sent.batch.columns[TEACHER_INDEX] = torch.arange(7.0)
    routed = SampleGroup.unpack(sent.pack_without_columns())
    assert list(routed.batch.columns) == [TEACHER_INDEX]
    assert (
        routed.batch.columns[TEACHER_INDEX].tolist() == list(range(7)) and routed.answers_digest == sent.answers_digest
    )


def test_another_set_of_answers_has_another_digest() -> None:
    digests = {
        build_sample_group(
            4, 10, {0: episode(*tokens)}, np.zeros(1, np.float32), [{}], trained=True, size=1
        ).answers_digest
        for tokens in ((5, 6), (5, 7), (5,), (6, 5))
    }
    assert len(digests) == 4


def test_a_column_names_the_answers_that_it_is_of() -> None:
    message = column_message(group(), "critic", torch.arange(7.0))
    assert message["values"].tolist() == list(range(7)) and message["source"] == "critic"
    assert (message["step"], message["position"], message["digest"]) == (4, 10, group().answers_digest)


def test_routers_choices_are_unknown_where_the_engine_has_none() -> None:
    routed = episode(5, 6, experts=np.array([[1, 2], [3, 4], [5, 6]], np.int16))  # the last token was never read
    one = build_sample_group(
        1, 0, {0: routed, 1: episode(7)}, np.zeros(2, np.float32), [{}, {}], trained=True, size=2, num_choices=2
    )
    assert one.batch.columns[EXPERTS].tolist() == [[1, 2], [3, 4], [5, 6], [-1, -1]] + [[-1, -1]] * 3


def algorithm(**columns: list[float]) -> Any:
    """Returns an algorithm that declares `weight` and returns these columns."""
    return SimpleNamespace(
        rollout_columns=lambda sample, score: columns,
        columns=[SimpleNamespace(name="weight", by=ROLLOUT), SimpleNamespace(name="values", by="critic")],
        cfg=SimpleNamespace(algorithm=SimpleNamespace(name="mine")),
    )


def test_an_algorithm_returns_the_columns_that_it_declares() -> None:
    assert read_rollout_columns(algorithm(weight=[1.0, 2.0]), episode(5, 6), Scored(1.0)) == {"weight": [1.0, 2.0]}


def test_a_prompts_column_has_its_value_at_each_token() -> None:
    routed = algorithm()
    routed.prompt_columns = lambda prompt: {"weight": float(prompt.id)}
    assert read_rollout_columns(routed, episode(5, 6), Scored(1.0), Prompt(3, ())) == {"weight": [3.0, 3.0]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, r"rollout_columns gave nothing; wanted: \['weight'\]"),
        (
            {"weight": [1.0]},
            r"gave \['weight'\] of \{1\} values; wanted: \['weight'\], one value for each of the episode's 2",
        ),
        ({"weight": [1.0, 2.0], "more": [1.0, 2.0]}, r"gave \['more', 'weight'\]; wanted: \['weight'\]"),
    ],
)
def test_other_columns_are_refused(columns: dict[str, list[float]], message: str) -> None:
    with pytest.raises(RlhpcError, match=rf"algorithm\.name=mine: .*{message}"):
        read_rollout_columns(algorithm(**columns), episode(5, 6), Scored(1.0))


class BlockRank:
    """Rank of a block of two, whose messages to the other rank are in `sent`."""

    group_name = "actor"

    def __init__(self, rank: int, sent: list[Any]) -> None:
        self.rank, self._sent = rank, sent

    def send(self, message: Any, group: str, rank: int) -> None:
        assert (group, rank) == ("actor", 1)
        self._sent.append(message)

    def recv(self, group: str, rank: int) -> Any:
        assert (group, rank) == ("actor", 0)
        return self._sent.pop(0)


class OneMessage:
    """Channel with one message."""

    def __init__(self) -> None:
        self.messages = [{"step": 1}]

    def get_nowait(self, key: str) -> Any:
        if not self.messages:
            raise QueueEmpty
        return self.messages.pop()

    def get(self, key: str, timeout: float) -> Any:
        raise DeadlineExceeded(f"nothing came within {timeout:g} s")


def test_the_ranks_of_a_block_receive_the_same_messages_and_errors() -> None:
    channel, sent = OneMessage(), list[Any]()
    first, second = (
        BlockChannel(channel, BlockRank(rank, sent), MeshSizes(tensor=2))  # type: ignore[arg-type]
        for rank in range(2)
    )
    assert first.key == second.key == "0"
    assert first.get_nowait() == second.get_nowait() == {"step": 1}
    for rank in (first, second):
        with pytest.raises(QueueEmpty):
            rank.get_nowait()
    for rank in (first, second):
        with pytest.raises(DeadlineExceeded, match="nothing came within 3 s"):
            rank.get(3.0)
    assert not sent and not channel.messages
