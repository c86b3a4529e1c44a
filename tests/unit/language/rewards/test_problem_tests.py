"""Tests of a problem: expected values stay outside of the sandbox."""
# ruff: noqa: E501 - a program a line

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.language.rewards.problem_formats import tests_of as read_forms
from rlhpc.language.rewards.problem_tests import read_tests

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
