"""Tests of a problem: expected values stay outside of the sandbox."""
# ruff: noqa: E501 - a program a line

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.language.rewards.problem_formats import tests_of as read_forms
from rlhpc.language.rewards.problem_tests import program_names, read_tests

MARK = "987654321"
#: Tests with an expected value that the program's process must not hold, by form.
OUTSIDE: dict[str, Any] = {
    "name": f"expected = {MARK}\nassert add(2, 3) == expected",
    "list": f"expected = [1, {MARK}]\nassert add(2, 3) == expected[1]",
    "dict": f"cases = {{2: {MARK}}}\nfor a, e in cases.items():\n    assert add(a, 3) == e",
    "walrus": f"assert add(2, 3) == (e := {MARK})",
    "check": {"tests": f"def check(candidate):\n    e = {MARK}\n    assert candidate(2, 3) == e", "entry_point": "add"},
    "EvalPlus": f"inputs, results = [[2, 3], [1, 1]], [{MARK}, 2]\nfor i, (inp, e) in enumerate(zip(inputs, results)):\n"
    "    assert add(*inp) == e, i",
    "indices": f"inputs = [1, 2]\nresults = [{MARK}, 3]\nfor i in range(len(inputs)):\n    assert add(inputs[i], 1) == results[i]",
    "setup": {"tests": "assert add(1, 2) == E", "setup": f"E = {MARK}"},
    "Decimal": f"from decimal import Decimal\nassert add(2, 3) == Decimal('{MARK}')",
    "Fraction": f"from fractions import Fraction\nassert add(2, 3) == Fraction({MARK}, 7)",
    "timedelta": f"import datetime\nassert add(2, 3) == datetime.timedelta({MARK})",
    "dict()": f"assert add(2, 3) == dict(a={MARK})",
    "json": f"import json\nassert add(2, 3) == json.loads('[{MARK}]')",
    "mean": f"import statistics\nassert add(2, 3) == statistics.mean([{MARK}, 1])",
    "sorted": f"assert sorted(add(2, 3), key=lambda x: -x) == sorted([{MARK}, 2], key=lambda x: -x)",
    "f-string": f"e = {MARK}\nassert add(2, 3) == f'{{e:>12}}'",
    "approx": f"import pytest\ndef test_a():\n    e = {MARK}.5\n    assert add(1, 2) == pytest.approx(e)",
    "parametrize": f"import pytest\n@pytest.mark.parametrize('a, e', [(1, {MARK}), (2, 3)])\ndef test_a(a, e):\n"
    "    assert add(a, 2) == e",
    "unittest": f"import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.e = {MARK}\n"
    "    def test_a(self):\n        self.assertEqual(add(1, 2), self.e)",
    "helper": f"def verify(f, e):\n    assert f(1, 2) == e\nverify(add, {MARK})",
    "doctest": f">>> add(1, 2)\n{MARK}\n",
    "changed in place": f"data = [3, 1]\nadd(data, 1)\nassert data == [1, {MARK}]",
    "beside its argument": f"case = ([3, 1], {MARK})\nassert add(case[0], 1) == case[1]",
    "call and output": [{"call": "add(1, 2)", "output": int(MARK)}],
}


@pytest.mark.parametrize("form", OUTSIDE)
def test_expected_values_stay_outside(form: str) -> None:
    meta = OUTSIDE[form] if isinstance(OUTSIDE[form], dict) else {"tests": OUTSIDE[form]}
    plan = read_tests(read_forms(meta), meta)
    assert plan.claims and not plan.verdicts
    assert MARK not in plan.setup + str(plan.steps)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (["add(1, 2) == 3"], "test 1 tests nothing: it compares without assert"),
        (
            ["def check(candidate):\n    assert candidate(1, 2) == 3"],
            "its tests test nothing: nothing calls its function check",
        ),
        (["assert (add(1, 2) == 3, 'sum')"], "test 1 has an assertion that is always true, "),
        (["x = 1"], "its tests test nothing: it has no assertion that is reached"),
        ([""], "test 1 tests nothing: it has no statement"),
    ],
)
def test_tests_that_test_nothing_are_refused(tests: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        read_tests(tests, {})


def test_a_test_that_cannot_be_split_runs_as_a_whole() -> None:
    loop = "while True:\n    assert add(1, base) == 3\n    break"
    plan = read_tests(["base = 2", loop], {"entry_point": "add"})
    [script] = plan.scripts
    assert script["kind"] == "script" and script["source"].startswith("base = 2\n") and plan.verdicts == [0]
    namespace: dict[str, Any] = {"add": lambda a, b: a + b}
    exec(script["source"], namespace)
    namespace["add"] = lambda a, b: a - b
    with pytest.raises(AssertionError):
        exec(script["source"], namespace)


def test_cases_of_unittest_that_cannot_be_split_run_in_the_sandbox() -> None:
    case = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        while True:\n"
        "            self.assertEqual(add(1, 2), 3)\n            break"
    )
    plan = read_tests([case], {"entry_point": "add"})
    [script] = plan.scripts
    exec(script["source"], {"add": lambda a, b: a + b})
    with pytest.raises(AssertionError):
        exec(script["source"], {"add": lambda a, b: 0})


def test_values_that_the_setup_needs_stay_in_it() -> None:
    setup = f"limit = 7\nexpected = {MARK}\ndef helper(x):\n    return x + limit\nstart = helper(1)"
    plan = read_tests(["assert add(start, 1) == expected"], {"entry_point": "add", "setup": setup})
    assert "limit = 7" in plan.setup and MARK not in plan.setup
    namespace: dict[str, Any] = {}
    exec(plan.setup, namespace)
    assert namespace["start"] == 8


def test_names_that_only_a_program_defines_are_known() -> None:
    plan = read_tests(["import math\nassert math.floor(solve(helper(1))) == 2"], {})
    assert program_names(plan) == ["helper", "solve"]


def test_a_program_that_is_named_like_a_builtin_must_define_it() -> None:
    plan = read_tests(["assert sorted([2, 1]) == [1, 2]"], {"entry_point": "sorted"})
    assert [step["source"] for step in plan.steps if step["kind"] == "do"] == ["globals()['sorted']"] and plan.prepared
