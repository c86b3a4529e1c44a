"""Worker threads of an event loop: results, errors, and callers that no longer wait."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rlhpc.language.agents.gateway.threads import Threads


def running() -> int:
    """Returns the number of live threads of these tests."""
    return sum(thread.name == "these" for thread in threading.enumerate())


def test_results_and_errors_reach_the_caller() -> None:
    threads = Threads(2, "these")

    async def calls() -> list[Any]:
        good = await threads.call(divmod, 7, 2)
        bad = await asyncio.gather(threads.call(divmod, 7, 0), return_exceptions=True)
        return [good, *bad]

    good, bad = asyncio.run(calls())
    assert good == (3, 1) and isinstance(bad, ZeroDivisionError)
    threads.close()


def test_no_more_threads_than_allowed_and_idle_ones_are_used_again() -> None:
    threads, most, lock = Threads(3, "these"), [0], threading.Lock()
    now = 0

    def work(number: int) -> int:
        nonlocal now
        with lock:
            now += 1
            most[0] = max(most[0], now)
        threading.Event().wait(0.01)
        with lock:
            now -= 1
        return number

    async def calls() -> list[int]:
        return await asyncio.gather(*(threads.call(work, number) for number in range(20)))

    assert asyncio.run(calls()) == list(range(20))
    assert 1 <= most[0] <= 3
    threads.close()


def test_a_thread_whose_caller_no_longer_waits_is_replaced() -> None:
    threads, blocked, free = Threads(1, "these"), threading.Event(), threading.Event()

    def hang() -> None:
        blocked.set()
        free.wait(60)

    async def calls() -> str:
        hanging = asyncio.ensure_future(threads.call(hang))
        await asyncio.to_thread(blocked.wait, 60)
        waiting = asyncio.ensure_future(threads.call(str, "next"))
        await asyncio.sleep(0)
        hanging.cancel()
        result: str = await asyncio.wait_for(waiting, 60)  # by another thread
        free.set()
        return result

    assert asyncio.run(calls()) == "next"
    threads.close()


def test_a_call_that_is_given_up_before_it_begins_is_never_made() -> None:
    threads, blocked, free = Threads(1, "these"), threading.Event(), threading.Event()
    made: list[str] = []

    def hang() -> None:
        blocked.set()
        free.wait(60)

    async def calls() -> None:
        hanging = asyncio.ensure_future(threads.call(hang))
        await asyncio.to_thread(blocked.wait, 60)
        dropped = asyncio.ensure_future(threads.call(made.append, "dropped"))
        await asyncio.sleep(0)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        free.set()
        await hanging
        await threads.call(made.append, "after")

    asyncio.run(calls())
    assert made == ["after"]
    threads.close()


def test_a_caller_that_holds_a_lock_waits_for_the_end_of_its_call() -> None:
    threads, blocked, free = Threads(1, "these"), threading.Event(), threading.Event()
    ended: list[str] = []

    def work() -> None:
        blocked.set()
        free.wait(60)
        ended.append("work")

    async def calls() -> None:
        task = asyncio.ensure_future(threads.call_to_end(work))
        await asyncio.to_thread(blocked.wait, 60)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, free.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        ended.append("caller")

    asyncio.run(calls())
    assert ended == ["work", "caller"]
    threads.close()
