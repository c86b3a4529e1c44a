"""Who takes which prompt, and what the driver knows of those that were delivered."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines import Completion
from rlhpc.language.rollout import prompt_queue as work
from rlhpc.language.rollout.pending_group import PartialGroup, PendingGroup
from rlhpc.language.rollout.prompt_queue import Delivery, PromptLeases, PromptTracker
from rlhpc.runtime.channel import LeasedItem, QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded


class Queue:
    """A channel in one process, which gives back what its takers leave."""

    def __init__(self) -> None:
        self.items: dict[str, deque[Any]] = defaultdict(deque)
        self.done_with: list[int] = []

    def put(self, item: Any, key: str = "") -> None:
        self.items[key].append(item)

    entrust = put

    def get_nowait(self, key: str = "") -> Any:
        if not self.items[key]:
            raise QueueEmpty
        return self.items[key].popleft()

    def get(self, key: str = "", timeout: float = 0.0) -> Any:
        if not self.items[key]:
            raise DeadlineExceeded("nothing came")
        return self.items[key].popleft()

    def take_nowait(self, key: str) -> LeasedItem:
        item = self.get_nowait(key)
        return LeasedItem(item, item if isinstance(item, int) else item.position)

    def done(self, taken: LeasedItem) -> None:
        self.done_with.append(taken.number)

    def empty(self, key: str) -> bool:
        return not self.items[key]


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> dict[str, Queue]:
    made: dict[str, Queue] = {}
    monkeypatch.setattr(work.Channel, "create", lambda name: made.setdefault(name, Queue()))
    return made


def opened(queues: dict[str, Queue], prompts: int, last: int) -> tuple[PromptTracker, Queue, Queue]:
    ledger = PromptTracker(prompts)
    ledger.open(0)
    ledger.enqueue(last)
    return ledger, queues[work.WORK], queues[work.DELIVERED]


def takings(prompts: int, rank: int, queues: tuple[Any, Any], step: int, ranks: int) -> PromptLeases:
    taker = PromptLeases(prompts, *queues)
    taker.begin(step, ranks)
    return taker


def test_in_order_and_no_more_than_its_share(queues: dict[str, Queue]) -> None:
    _, given, told = opened(queues, 5, 1)
    one, two = (takings(5, rank, (given, told), 1, 2) for rank in range(2))
    assert [one.lease(1) for _ in range(4)] == [0, 1, 2, None], "its share is three of five"
    assert not one.is_exhausted(1), "more may be left for it when it is done with one"
    assert [two.lease(1) for _ in range(3)] == [3, 4, None] and two.is_exhausted(1)
    one.deliver(1, 0, {})
    assert one.lease(1) is None and one.is_exhausted(1) and one.num_leased(1) == 2
    assert given.done_with == [0]


def test_what_comes_back_is_found_again(queues: dict[str, Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    _, given, told = opened(queues, 2, 1)
    one = takings(2, 0, (given, told), 1, 1)
    assert [one.lease(1) for _ in range(2)] == [0, 1]
    one.deliver(1, 0, {})
    assert one.lease(1) is None
    given.put(0, key="1")
    assert one.lease(1) is None, "it does not ask at every step of its engine"
    monkeypatch.setattr(work, "_AGAIN_S", 0.0)
    assert one.lease(1) == 0 and not one.is_exhausted(1)


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_prompt_that_returns_twice_is_in_flight_once(queues: dict[str, Queue], is_partial: bool) -> None:
    """A rank that ends while it hands a prompt back leaves two of it, and one rank may find both."""
    _, given, told = opened(queues, 3, 1)
    given.items["1"].insert(1, PartialGroup(0, 0, []) if is_partial else 0)
    one = takings(3, 0, (given, told), 1, 1)
    assert [one.lease(1) for _ in range(3)] == [0, 1, 2]
    assert one.num_leased(1) == 3 and one.lease(1) is None
    for position in range(3):
        one.deliver(1, position, {})
    assert not one.num_leased(1) and sorted(given.done_with) == [0, 1, 2]


def test_another_item_of_the_same_prompt_is_acknowledged(
    queues: dict[str, Queue], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, given, told = opened(queues, 2, 1)
    numbers = iter([10, 11, 12])
    monkeypatch.setattr(given, "take_nowait", lambda key: LeasedItem(given.get_nowait(key), next(numbers)))
    given.items["1"].insert(1, 0)
    one = takings(2, 0, (given, told), 1, 1)
    assert [one.lease(1) for _ in range(2)] == [0, 1] and given.done_with == [11]


def test_what_was_begun_is_handed_on(queues: dict[str, Queue], monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves with a prompt of a refill under way, of which one answer is whole and one has not begun."""
    monkeypatch.setattr(work, "_AGAIN_S", 0.0)
    _, given, told = opened(queues, 2, 1)
    one, two = (takings(2, rank, (given, told), 1, 2) for rank in range(2))
    assert [one.lease(1), two.lease(1)] == [0, 1] and two.lease(1) is None
    prompt = Prompt("1 + 1", "2", {}, [])
    whole = Episode(8, (5, 6), prompt, [9, 1], [-0.1, -0.2], [3, 4], finish_reason="stop")
    part = Episode(9, (5, 6), prompt, [9], [-0.1], [3], finish_reason="abort")
    slot = PendingGroup(1, 0, 2, prompt, (5, 6))
    one.requeue(1, slot.to_partial([whole, part, Episode(10, (5, 6), prompt, finish_reason="abort")]))
    assert given.done_with == [0] and one.num_leased(1) == 0, "it does not come back a second time when this rank ends"
    two.deliver(1, 1, {})
    begun = two.lease(1)
    assert begun == PartialGroup(0, 2, [
        Completion(0, [9, 1], [-0.1, -0.2], [3, 4], "stop"), Completion(1, [9], [-0.1], [3], "abort"),
        Completion(2, finish_reason="abort"),
    ])  # fmt: skip
    assert two.num_leased(1) == 1 and not two.is_exhausted(1)
    two.deliver(1, 0, {})
    assert two.num_leased(1) == 0 and [told.get_nowait().position for _ in range(2)] == [1, 0]


def test_later_steps_are_of_their_own(queues: dict[str, Queue]) -> None:
    ledger, given, told = opened(queues, 2, 2)
    ledger.enqueue(2)
    assert [len(given.items[key]) for key in "12"] == [2, 2], "given out once"
    one = takings(2, 0, (given, told), 1, 1)
    assert [one.lease(2), one.lease(1), one.lease(2), one.lease(1)] == [0, 0, 1, 1]
    assert one.num_leased(1) == one.num_leased(2) == 2


def test_a_step_is_whole_when_each_prompt_was_delivered_once(queues: dict[str, Queue]) -> None:
    ledger, _given, told = opened(queues, 3, 1)
    for position, reward in ((2, 0.3), (0, 0.1), (2, 0.3)):
        told.put(Delivery(1, position, {"reward": reward, "max_length": float(position)}))
    assert (
        not ledger.wait_complete(1, 0.0) and ledger.list_missing_positions(1) == [1] and ledger.has_returned_prompts(1)
    )
    told.put(Delivery(1, 1, {"reward": 0.2, "max_length": 7.0}))
    assert ledger.wait_complete(1, 0.0)
    assert ledger.close(1) == {"reward": 0.1 + 0.2 + 0.3, "max_length": 7.0}, "in the order of the prompts, none twice"


def test_beginning_anew_forgets_what_was_given_out(queues: dict[str, Queue]) -> None:
    ledger, _given, told = opened(queues, 2, 3)
    told.put(Delivery(1, 0, {}))
    assert not ledger.wait_complete(1, 0.0)
    queues.clear()
    ledger.open(1)
    ledger.enqueue(2)
    assert ledger.list_missing_positions(1) == [0, 1]
    assert not queues[work.WORK].items["1"] and list(queues[work.WORK].items["2"]) == [0, 1]
