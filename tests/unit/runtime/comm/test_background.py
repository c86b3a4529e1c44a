"""Background operations: callbacks, and several operations that are done together."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from rlhpc.runtime.comm.background import AsyncWork, JoinedWork, in_background


def test_a_callback_runs_after_the_operation_and_not_after_a_failure() -> None:
    gate, order = threading.Event(), list[str]()

    def operate() -> str:
        gate.wait(20)
        order.append("operation")
        return "ignored by then"

    work = in_background("then", operate)
    chained = work.then(lambda name, *, mark: order.append(name + mark) or len(order), "callback", mark="!")
    assert not chained.done()
    gate.set()
    assert chained.wait(20) == 2 and order == ["operation", "callback!"]
    assert work.then(lambda: "at once").wait(20) == "at once"

    def fail() -> None:
        raise ValueError("lost")

    for failed in (in_background("fail", fail).then(order.append, "never"), work.then(fail)):
        with pytest.raises(ValueError, match="lost"):
            failed.wait(20)
    assert order == ["operation", "callback!"]


def test_joined_operations_finish_once_with_all_results_in_order() -> None:
    futures, finished = [Future[Any]() for _ in range(3)], list[list[Any]]()
    work = JoinedWork(
        [AsyncWork(future) for future in futures], lambda results: finished.append(results) or sum(results)
    )
    for index in (2, 0):
        futures[index].set_result(index)
    assert not work.done() and finished == []
    futures[1].set_result(1)
    assert work.done() and work.wait() == work.wait() == 3 and asyncio.run(work.async_wait()) == 3
    assert finished == [[0, 1, 2]]


def test_joined_operations_fail_with_one_of_them_or_with_the_end() -> None:
    failing, good = Future[Any](), Future[Any]()
    work = JoinedWork([AsyncWork(failing), AsyncWork(good)], lambda results: results)
    failing.set_exception(ValueError("lost"))
    assert not work.done(), "the other one is still under way"
    good.set_result(1)
    with pytest.raises(ValueError, match="lost"):
        work.wait(20)
    with pytest.raises(ZeroDivisionError):
        JoinedWork([AsyncWork(good)], lambda results: results[0] / 0).wait(20)
    assert JoinedWork([], len).wait(20) == 0
