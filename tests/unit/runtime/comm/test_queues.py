"""The state of a channel at its home."""

from __future__ import annotations

import random

import pytest

from rlhpc.runtime.comm.queues import ChannelState, ConsumerLocation


def test_keys_that_were_used_once_leave_nothing() -> None:
    state = ChannelState(0, 1 << 30)
    for step in range(10_000):
        state.record_consumer(str(step), ConsumerLocation("host"))
        state.put(str(step), [b"x"], 1, 0, "", None)
        assert state.get(str(step), (), None, lambda items: True)
    assert state.queues == {} and state.nbytes == 0
    assert len(state._consumers) < 10_000


@pytest.mark.parametrize("seed", range(20))
def test_queues_exist_for_keys_with_items_or_waiters_alone(seed: int) -> None:
    """Whatever comes in whatever order, FIFO order holds, and nothing is lost or doubled."""
    rng = random.Random(seed)
    state = ChannelState(rng.choice((0, 2)), 1 << 30)
    put: dict[str, list[bytes]] = {}
    received: dict[str, list[bytes]] = {}
    waiters: list[tuple[str, object]] = []
    numbers: dict[int, str] = {}

    def answer_of(key: str):  # type: ignore[no-untyped-def]
        def answer(items) -> bool:  # type: ignore[no-untyped-def]
            received.setdefault(key, []).extend(bytes(item.frames[0]) for item in items)
            numbers.update({item.number: key for item in items})
            return True

        return answer

    for number in range(300):
        key, action = rng.choice("abc"), rng.randrange(6)
        if action < 3:
            body = b"%d" % number
            if state.put(key, [body], 1, 0, "", None):
                put.setdefault(key, []).append(body)
        elif action == 3 or (action == 4 and state.count(key)):
            answer = answer_of(key)
            state.get(key, ("one",), None, answer)
            waiters.append((key, answer))
        elif action == 5 and waiters:
            _, doomed = waiters.pop(rng.randrange(len(waiters)))
            state.cancel(lambda answer, doomed=doomed: answer is doomed)
        for queue in state.queues.values():
            assert queue.items or queue.getters or queue.putters
    state.acknowledge(list(numbers))
    for key, bodies in put.items():
        assert received.get(key, []) == bodies[: len(received.get(key, []))]
        assert state.count(key) == len(bodies) - len(received.get(key, []))
    state.consumer_died("one")
    assert all(queue.items for queue in state.queues.values())
