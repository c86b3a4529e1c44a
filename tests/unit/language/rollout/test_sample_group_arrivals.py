"""What an actor and those that score make of a prompt that was drawn twice."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.rollout.sample_group import Arrivals, SampleGroup, build_sample_group, column_message
from rlhpc.language.workers.scoring import GroupInbox
from rlhpc.runtime.channel import QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded


def group(step: int, position: int, *tokens: int) -> SampleGroup:
    """A prompt's group of one answer."""
    numbers, versions, n = [-1.0] * len(tokens), [step - 1] * len(tokens), len(tokens)
    episode = Episode(0, (1, 2), None, list(tokens), numbers, versions, [True] * n, [0] * n, 1, "stop")
    return build_sample_group(step, position, {0: episode}, np.zeros(1, np.float32), [{}], trained=True, size=1)


def column(of: SampleGroup, maker: str, value: float) -> dict[str, Any]:
    return column_message(of, maker, torch.full((of.batch.tokens,), value))


def test_columns_stay_with_the_answers_that_they_are_of() -> None:
    arrivals = Arrivals(frozenset({"critic", "reference"}))
    arrivals.begin(1)
    lost, again = group(1, 0, 5, 6), group(1, 0, 7, 8, 9)
    for message in (lost.pack(), column(lost, "critic", 1.0), again.pack(), column(again, "reference", 2.0)):
        arrivals.add(message)
        assert arrivals.missing(1, [0]) != {}
    assert arrivals.missing(1, [0]) == {"reference": [0]}
    arrivals.add(column(again, "critic", 3.0))
    assert arrivals.missing(1, [0]) == {}
    found, columns = arrivals.pop_complete(1, 0)
    assert found.answers_digest == again.answers_digest and {
        name: values.tolist() for name, values in columns.items()
    } == {
        "critic": [3.0] * 5,
        "reference": [2.0] * 5,
    }


def test_what_was_given_away_does_not_come_again() -> None:
    arrivals = Arrivals(frozenset())
    arrivals.begin(1)
    first, second, later = group(1, 0, 5), group(1, 0, 6), group(2, 0, 7)
    for one in (first, second, later):
        arrivals.add(one.pack())
    assert arrivals.pop_complete(1, 0)[0].answers_digest == first.answers_digest
    arrivals.add(second.pack())
    assert arrivals.missing(1, [0]) == {"": [0]}
    arrivals.begin(2)
    arrivals.add(second.pack())
    assert arrivals.missing(2, [0]) == {} and arrivals.missing(1, [0]) == {"": [0]}


class Sent:
    """A channel with messages in it, of which more may come when it is empty."""

    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)

    def get_nowait(self) -> Any:
        if not self.messages or self.messages[0] is None:
            raise QueueEmpty
        return self.messages.popleft()

    def get(self, timeout: float) -> Any:
        while self.messages and self.messages[0] is None:
            self.messages.popleft()
        if not self.messages:
            raise DeadlineExceeded("nothing")
        return self.messages.popleft()


def parts(sent: Sent, step: int, share: range, inbox: GroupInbox | None = None, **how: bool) -> list[list[bytes]]:
    inbox = inbox or GroupInbox(sent, "critic-0", "rollout")  # type: ignore[arg-type]
    return [[one.answers_digest for one in part] for part in inbox.batches(step, share, time.monotonic() + 5, **how)]


def test_both_are_scored_whenever_the_second_comes() -> None:
    a, b, again = group(1, 0, 5), group(1, 1, 6), group(1, 0, 7)
    end = {"end": 1}
    for order in ([a, again, b], [again, a, b], [a, b, again]):
        messages = [one.pack_without_columns() for one in order]
        found = parts(Sent(*messages, end), 1, range(2))
        assert [[order[0].answers_digest], [b.answers_digest]] == found[:2] or [
            [b.answers_digest],
            [order[0].answers_digest],
        ] == found[:2]
        assert found[2:] == [[next(one.answers_digest for one in order[1:] if one is not b)]]
        (whole,) = parts(Sent(*messages, end), 1, range(2), at_once=True)
        assert whole == [order[0].answers_digest, b.answers_digest, found[2][0]]


def test_the_same_answers_are_scored_once() -> None:
    a, b = group(1, 0, 5), group(1, 1, 6)
    assert parts(
        Sent(
            a.pack_without_columns(),
            a.pack_without_columns(),
            None,
            b.pack_without_columns(),
            None,
            a.pack_without_columns(),
            {"end": 1},
        ),
        1,
        range(2),
    ) == [
        [a.answers_digest],
        [b.answers_digest],
    ]


def test_a_step_is_over_when_the_driver_says_so() -> None:
    a, early, late = group(1, 0, 5), group(2, 0, 6), group(1, 0, 9)
    sent = Sent(
        a.pack_without_columns(),
        early.pack_without_columns(),
        {"end": 1},
        None,
        late.pack_without_columns(),
        {"end": 2},
    )
    inbox = GroupInbox(sent, "reference-0", "rollout")  # type: ignore[arg-type]
    assert parts(sent, 1, range(1), inbox) == [[a.answers_digest]]
    assert parts(sent, 2, range(1), inbox) == [[early.answers_digest]], "what comes of an earlier step is nobody's"
    with pytest.raises(DeadlineExceeded, match="no groups came from rollout to reference-0"):
        parts(
            Sent(a.pack_without_columns()),
            1,
            range(1),
            GroupInbox(Sent(a.pack_without_columns()), "reference-0", "rollout"),
        )  # type: ignore[arg-type]
