"""Split of a problem's tests: right programs fulfil the claims, wrong ones do not, and expected values stay outside."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.language.rewards.expected_values import holds
from rlhpc.language.rewards.problem_tests import read_tests
from rlhpc.language.sandbox.harness import encode

RIGHT = "def f(x):\n    return x + 1\ndef g(xs):\n    xs.append(9)\ndef bad(x):\n    raise ValueError('no ' + str(x))"
WRONG = "def f(x):\n    return x + 2\ndef g(xs):\n    pass\ndef bad(x):\n    raise KeyError(x)"


def answers_of(program: str, plan: Any) -> list[dict[str, Any]]:
    """What the sandbox answers to the steps of a plan."""
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    exec(plan.setup, namespace)
    answers: list[dict[str, Any]] = []
    for step in plan.steps:
        try:
            if step["kind"] == "value":
                answers.append({"value": encode(eval(step["source"], namespace))})
            else:
                exec(step["source"], namespace)
                answers.append({"passed": True})
        except Exception as error:
            classes = [each.__name__ for each in type(error).__mro__]
            described = encode((f"{type(error).__name__}: {error}", classes))
            answers.append({"value": described} if step["kind"] == "raises" else {"error": str(error)})
    return answers


@pytest.mark.parametrize("test", [
    "assert f(411) == 412", "assert abs(f(411) / 2 - 206) < 1e-6", "assert not f(411) != 412 and f(0) in (412, 1)",
    "for x in range(3):\n    assert f(x) == x + 1", "assert [f(x) for x in (411, 2)] == [412, 3]",
    "assert all(f(x) == y for x, y in [(411, 412), (1, 2)])", "want = 412\nassert f(411) == want",
    "assert sorted([f(411), 3], key=lambda v: -v) == [412, 3]", "assert f'{f(411):>5}' == '  412'",
    "xs = [1, 2]\ng(xs)\nassert xs == [1, 2, 9]", "import pytest\nwith pytest.raises(ValueError, match='no 4'):\n    bad(411)",
    "import math\nassert math.isclose(f(411), 412.0)", "assert {f(411): 1} == {412: 1}", "assert str(f(411))[1:] == '12'",
    "def check(candidate):\n    assert candidate(411) == 412\n    assert candidate(0) == 1",
    "def test_one():\n    y = f(411)\n    assert y == 412", "if 1 > 0:\n    assert f(411) == 412\nelse:\n    assert f(1) == 0",
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(411), 412)",
    "assert (y := 412) == f(411)", "assert isinstance(f(411), int) and len({f(411), f(411)}) == 1 and f(411) == 412",
])  # fmt: skip
def test_claims_hold_for_a_right_program_alone(test: str) -> None:
    plan = read_tests([test], {"entry_point": "f"})
    assert plan.claims and not plan.scripts[len([s for s in plan.steps if s["kind"] == "do"]) :], "split completely"
    assert not any("412" in step["source"] for step in plan.steps), "an expected value is in the program's process"
    answers = answers_of(RIGHT, plan)
    assert all(holds(claim, answers) for claim in plan.claims)
    answers = answers_of(WRONG, plan)
    assert not all(holds(claim, answers) for claim in plan.claims)


@pytest.mark.parametrize("test", [
    "while True:\n    assert f(1) == 2\n    break", "try:\n    assert f(1) == 2\nfinally:\n    pass",
    "for x in iter(int, 1):\n    assert f(x) == 1", "def helper(v):\n    if v != 2:\n        raise ValueError\nhelper(f(1))",
])  # fmt: skip
def test_a_test_that_cannot_be_split_runs_in_the_sandbox(test: str) -> None:
    plan = read_tests([test], {})
    assert not plan.claims and [plan.scripts[number]["kind"] for number in plan.verdicts] == ["script"]


def test_a_test_of_nothing_is_refused() -> None:
    for test, message in (("x = 1", "test nothing"), ("assert (f(1) == 2, 'no')", "always true"),
                          ("def test_a():\n    pass", "asserts nothing")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_tests([test], {})
