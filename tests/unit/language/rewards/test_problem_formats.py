"""Published formats of a problem's tests, as plain assertions."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from rlhpc.language.rewards import problem_formats as formats
from rlhpc.language.rewards.python_expressions import Unclear

CALL = "(Solution().add if 'Solution' in globals() else add)(1, 2)"


@pytest.mark.parametrize(
    ("meta", "tests"),
    [
        ({"tests": "assert add(1, 2) == 3"}, ["assert add(1, 2) == 3"]),
        ({"test_list": ["assert a", "assert b"]}, ["assert a", "assert b"]),
        ({"tests": '["assert a", "assert b"]'}, ["assert a", "assert b"]),
        ({"tests": {"call": "add(1, 2)", "output": 3}}, [{"call": "add(1, 2)", "output": 3}]),
        (
            {"input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]})},
            [{"input": "1 2\n", "output": "3\n"}, {"input": "3\n4", "output": "7"}],
        ),
        (
            {"input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}},
            [{"call": CALL, "output": 3}],  # APPS wraps each result
        ),
        (
            {"input_output": {"fn_name": "m.add", "inputs": [[1, 2]], "outputs": [3]}},
            [{"call": "m.add(1, 2)", "output": 3}],
        ),
        (
            {"public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
             "metadata": json.dumps({"func_name": "add"})},
            [{"call": CALL, "output": 3}],
        ),
        ({"tests": {"input": "1", "output": 1}}, [{"input": "1", "output": "1"}]),
    ],
)  # fmt: skip
def test_each_column_is_read(meta: dict[str, Any], tests: list[Any]) -> None:
    assert formats.tests_of(meta) == tests


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"other": 1}, "the problem has no tests: its meta has none of 'tests'"),
        ({"tests": 7}, "a test is a int"),
        ({"tests": {"x": 1}}, "a test is an object with the keys x; allowed"),
        ({"tests": {"inputs": [1], "outputs": []}}, "no lists of one length"),
        ({"tests": {"fn_name": "f", "inputs": ["x"], "outputs": [1]}}, "calls f with a str"),
        ({"tests": {"input": "1", "output": "1", "testtype": "functional"}}, "set entry_point"),
        ({"tests": {"input": "x", "output": "1", "testtype": "functional"}, "entry_point": "f"}, "no JSON"),
        ({"tests": {"input": "1", "output": "1", "type": "graphical"}}, "testtype 'graphical'"),
        ({"tests": "a1B2" * 40}, "a test is compressed"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_reason(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        formats.tests_of(meta)


def test_setup_and_entry_point() -> None:
    meta = {"setup": "import math", "test_imports": ["import re", "import json"], "entry_point": "f"}
    assert formats.setup_of(meta) == "import math\nimport re\nimport json"
    assert formats.entry_of(meta) == "f"
    assert formats.entry_of({"metadata": "{broken"}) == formats.entry_of({}) == ""
    assert formats.entry_of({"metadata": {"func_name": "g"}}) == "g"


def parsed(test: str) -> list[str]:
    """Returns the statements of a test as text."""
    return [ast.unparse(statement) for statement in formats.parse_test(test)]


def test_guards_runners_and_imports_of_the_program_are_taken_apart() -> None:
    source = (
        "from solution import add, mul as times\nfrom program import *\nimport math\n"
        "assert add(1, 2) == 3\nif __name__ == '__main__':\n    assert times(2, 3) == 6\n    unittest.main()\n'note'\n"
    )
    assert parsed(source) == ["times = mul", "import math", "assert add(1, 2) == 3", "assert times(2, 3) == 6"]
    assert parsed("if '__main__' == __name__:\n    pytest.main()") == []


def test_doctests_become_assertions() -> None:
    source = (
        ">>> x = 2\n>>> add(x, 3)\n5\n>>> print(add(1, 1))\n2\n>>> f(-1)\nTraceback (most recent call last):\n    ...\n"
    )
    source += "my.errors.Bad: no\n"
    assert parsed(source) == [
        "x = 2", "assert repr(add(x, 3)) == '5'", "assert str(add(1, 1)) == '2'", "with pytest.raises(Bad):\n    f(-1)",
    ]  # fmt: skip
    assert parsed("'''Examples\n\n>>> f(1)\n2\n'''\nassert g(1)") == ["assert repr(f(1)) == '2'", "assert g(1)"]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("assert (", "no Python"),
        (">>> f(1) # doctest: +ELLIPSIS\n1", "has options"),
        (">>> print(1, 2)\n1 2", "prints several values"),
        (">>> x = f(1)\n1", "prints from a statement"),
        (">>> f(\n1", "no Python"),
    ],
)
def test_doctests_that_are_not_read(test: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        formats.parse_test(test)


def split(source: str) -> tuple[list[str], list[str], list[str]]:
    """Returns plain statements, functions and classes as text."""
    plain, functions, classes = formats.test_functions(ast.parse(source).body)
    return [ast.unparse(s) for s in plain], [ast.unparse(f) for f in functions], [c.name for c in classes]


def test_functions_that_pytest_would_call() -> None:
    source = (
        "x = 1\ndef test_a(n=2):\n    assert f(n)\n"
        "@pytest.mark.parametrize('a,b', [(1, 2)])\n@pytest.mark.parametrize(['c'], [(3,)])\n"
        "def test_b(a, b, c):\n    assert f(a, b, c)\n"
        "class TestC:\n    'Doc.'\n    def test_d(self):\n        assert f(4)\n"
        "class E(unittest.TestCase):\n    def test_e(self): pass\n"
    )
    plain, functions, classes = split(source)
    assert plain == ["x = 1"] and classes == ["E"]
    assert functions == [
        "def test_a():\n    n = 2\n    assert f(n)",
        "def test_b():\n    for a, b in [(1, 2)]:\n        for c in [(3,)]:\n            assert f(a, b, c)",
        "def test_d_TestC():\n    assert f(4)",
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("async def test_a(): pass", "is asynchronous"),
        ("def test_a(tmp_path): pass", "takes tmp_path, which a fixture would give"),
        ("def test_a(*values): pass", "takes arguments"),
        ("@skip\ndef test_a(): pass", "has the decorator skip"),
        ("@pytest.mark.parametrize(NAMES, [1])\ndef test_a(n): pass", "names are computed"),
        ("class T(TestCase):\n    x = 1", "has no method test"),
        ("class TestA:\n    x = 1", "holds more than tests"),
        ("class TestA:\n    def test_a(self):\n        self.x", "uses an object"),
        ("class TestA:\n    'Doc.'", "has no method test"),
    ],
)
def test_functions_that_are_not_read(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(source)


def converted(methods: str) -> list[str]:
    """Returns the tests of a unittest class as text."""
    [class_] = ast.parse(f"class T(TestCase):\n{methods}").body
    assert isinstance(class_, ast.ClassDef)
    return [ast.unparse(function) for function in formats.unittest_functions(class_)]


def test_unittest_assertions_become_plain_ones() -> None:
    source = (
        "    def setUp(self):\n        self.x = 1\n"
        "    def test_a(self):\n        self.assertEqual(f(self.x), 2)\n        self.assertTrue(f(1), 'why')\n"
        "        self.assertIsNone(f(2))\n        self.assertNotIsInstance(f(3), int)\n"
        "        self.assertRaises(KeyError, f, 4)\n"
        "        self.assertAlmostEqual(f(5), 0.1, 3)\n        self.assertAlmostEqual(f(6), 0.1, delta=0.5)\n"
        "        with self.assertRaises(ValueError):\n            f(7)\n"
        "        with self.subTest(i=1):\n            self.assertIn(8, f(8))\n"
    )
    [text] = converted(source)
    assert text.splitlines()[:2] == ["def test_a_T():", "    _self_x = 1"]
    for line in (
        "assert f(_self_x) == 2", "assert f(1)", "assert f(2) is None", "assert not isinstance(f(3), int)",
        "with pytest.raises(KeyError):", "assert round(abs(f(5) - 0.1), 3) == 0", "assert abs(f(6) - 0.1) <= 0.5",
        "with pytest.raises(ValueError):", "assert 8 in f(8)",
    ):  # fmt: skip
        assert line in text


@pytest.mark.parametrize(
    "methods",
    [
        "    x = 1\n    def test_a(self): pass",
        "    def helper(self): pass\n    def test_a(self): pass",
        "    @skip\n    def test_a(self): pass",
        "    def test_a(self):\n        self.fail('x')",
        "    def test_a(self):\n        self.assertCountEqual([1], [1])",
        "    def test_a(self):\n        f(self)",
    ],
)
def test_unittest_classes_with_more_run_in_the_sandbox(methods: str) -> None:
    with pytest.raises(Unclear):
        converted(methods)


def test_modules_that_are_not_installed_are_named() -> None:
    formats.require_modules(ast.parse("import os.path\nfrom solution import f\nfrom . import x\nimport program").body)
    with pytest.raises(ValueError, match="import no_such_module"):
        formats.require_modules(ast.parse("from no_such_module.part import f").body)
