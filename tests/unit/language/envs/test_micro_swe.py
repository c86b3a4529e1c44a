"""Repair of a package: the tools show and change its files, and hidden tests decide."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.language.envs.base import step_of
from rlhpc.language.envs.micro_swe import FAULTS, MicroSwe
from rlhpc.language.envs.problems import demonstrations


def begun(number: int) -> MicroSwe:
    environment, problem = MicroSwe(), MicroSwe.problem(number)
    task: Any = SimpleNamespace(
        meta=problem.meta, messages=problem.messages, question=problem.question, answer="", seed=0
    )
    assert environment.reset(task) is None
    return environment


@pytest.mark.parametrize("number", [0, 5])
def test_a_demonstration_repairs_the_package(number: int) -> None:
    environment = begun(number)
    assert "FAILED" in environment.pytest()
    done = False
    for _ in range(10):
        reply = environment.demonstrate(random.Random(0))
        step = step_of(environment.step({"role": "assistant", "content": reply}))
        if done := step.done:
            break
    assert done and step.reward == 1.0 and step.metrics == {"hidden_failed": 0.0}
    assert environment.pytest() == "all tests pass"


def test_a_fault_that_stays_pays_nothing() -> None:
    environment = begun(1)
    step = step_of(environment.answer("done"))
    assert step.done and step.reward == 0.0 and step.metrics["hidden_failed"] > 0


def test_tools_say_what_is_wrong_with_a_call() -> None:
    environment, path = begun(0), FAULTS[0][0]
    assert path in environment.ls().splitlines() and FAULTS[0][2] in environment.cat(path)
    for call in ("cat: stock/none.py", f'replace: {{"path": "{path}", "old": "result", "new": "x"}}'):
        step = step_of(environment.step({"role": "assistant", "content": call}))
        assert str(step.observation).startswith("error: ")


def test_each_fault_is_a_problem() -> None:
    assert MicroSwe.count() == len(FAULTS)
    assert len(demonstrations(MicroSwe(), MicroSwe.problem(2))) == 5
