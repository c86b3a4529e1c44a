"""Graders against random problems in all published forms, and problems whose tests test nothing."""
# ruff: noqa: E501 - a program a line

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.cli import main
from rlhpc.language.config.data import DataSourceConfig
from rlhpc.language.data import make_dataset
from rlhpc.language.rewards import Sample
from rlhpc.language.rewards.code_reward import CodeReward, last_block
from rlhpc.language.rewards.registry import check_problems
from rlhpc.runtime.errors import ConfigError
from tests.attack.graders import ANSWERS, FORMS, FUNCTIONS, PROGRAMS, VACUOUS, answers, faults, programs
from tests.drawn import drawn, number
from tests.extras import need_extra

CASES: list[Any] = [((2, 3), 5), ((4, 4), 8), ((-1, 1), 0)]
EMPTY = ["pass", "", "def add(*args, **kwargs): return None"]


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(timeout_s=20.0)


def fenced(code: str, **meta: Any) -> Sample:
    return Sample("", f"```python\n{code}\n```", meta=meta)


@pytest.mark.drawn
def test_random_programs(reward: CodeReward) -> None:
    """A part of 300 by the commit; `make test-all` takes all."""
    names = drawn("graded programs", [f"{place:03}" for place in range(PROGRAMS)], least=12)
    samples = [graded for graded in programs(number()) if graded.name[:3] in names]
    rewarded, refused, _ = faults(reward, iter(samples))
    assert (rewarded, refused) == ([], [])


@pytest.mark.drawn
def test_random_answers() -> None:
    """A part of 500 by the commit; `make test-all` takes all."""
    need_extra("llm")
    from rlhpc.language.rewards.math_verifier import MathReward

    names = drawn("graded answers", [f"{place:03}" for place in range(ANSWERS)], least=25)
    samples = [graded for graded in answers(number()) if graded.name[:3] in names]
    rewarded, refused, right = faults(MathReward(), iter(samples))
    assert rewarded == [] and len(refused) <= max(1, 0.01 * right), refused


@pytest.mark.drawn
@pytest.mark.parametrize("form", drawn("empty programs", FORMS, least=3))
def test_empty_programs_gain_nothing(form: str, reward: CodeReward) -> None:
    """In each form a program without content gets 0, and a right one 1."""
    problem = FORMS[form]("add", CASES, False)
    assert problem is not None
    partial = CodeReward(partial=True, timeout_s=20.0)
    for code in EMPTY:
        assert reward(fenced(code, **problem.meta)) == partial(fenced(code, **problem.meta)) == 0, code


@pytest.mark.parametrize("form", VACUOUS)
def test_tests_that_test_nothing_pay_nothing(form: str, reward: CodeReward) -> None:
    tests = [VACUOUS[form]("add", CASES)]
    try:
        CodeReward.check_problem({"tests": tests})
    except ValueError as error:
        assert "test" in str(error)
        return
    for code in (*EMPTY, "def add(a, b): return a + b"):  # only a run can tell
        try:
            assert reward(fenced(code, tests=tests)) == 0
        except ValueError as error:
            assert "its tests test nothing" in str(error)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "the problem has no tests"),
        ({"tests": "add(1, 2) == 3"}, "compares without assert"),
        ({"tests": "assert (add(1, 2) == 3, 'no')"}, "always true"),
        ({"tests": "# add(1, 2) == 3"}, "it has no statement"),
        ({"tests": "def check(f):\n    assert f(1, 2) == 3"}, "nothing calls its function check"),
        ({"tests": "def test_a(tmp_path):\n    assert add(1, 2) == 3"}, "which a fixture would give"),
        ({"tests": "import no_such_module\nassert add(1, 2) == 3"}, "import no_such_module, which is not installed"),
        ({"tests": [{"stdin": "1"}]}, "an object with the keys stdin"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "x"}]}, "testtype 'x'"),
        ({"tests": "eJw" * 60}, "is compressed"),
        ({"input_output": json.dumps({"inputs": ["1"], "outputs": []})}, "no lists of one length"),
        ({"tests": ["assert add(1, 2) == 3", "add(2, 2)", "add(2, 3) == 5"]}, "test 3 tests nothing"),
    ],
)  # fmt: skip
def test_problems_without_a_test_are_named(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeReward.check_problem(meta)


def test_a_run_does_not_start_with_a_problem_without_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names file and line; so does `rlhpc plan`."""
    rows = [{"prompt": "Add.", "answer": "", "tests": [test]} for test in ("assert add(1, 2) == 3", "add(1, 2) == 3")]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = make_dataset(OmegaConf.structured(DataSourceConfig(source="jsonl", path=str(path))))
    check_problems(["length"], dataset, "data.train")
    with pytest.raises(ConfigError, match=r"data.train: .*problems.jsonl:2: .*'code', which cannot judge") as raised:
        check_problems(["length", "code"], dataset, "data.train")
    assert raised.value.exit_code == 2
    need_extra("llm")
    base = Path(__file__).resolve().parents[4] / "configs" / "base" / "grpo.yaml"
    config = tmp_path / "run.yaml"
    config.write_text(f"defaults: [{base}]\n")
    words = ["runner.name=x", f"data.train.path={path}", "data.train.source=jsonl", "reward.terms=[{name: code}]", "workflow.eval_suites=[]",
             "actor.model.model_path=builtin:tiny", "data.eval=[]"]  # fmt: skip
    assert main(["plan", str(config), *words]) == 2
    assert "problems.jsonl:2: " in capsys.readouterr().err


FENCES = {
    "list item": "1. So:\n\n   ```python\n   a = 1\n   if a:\n       b = 2\n   ```\n",
    "tabs": "-\t```python\n\ta = 1\n\tif a:\n\t    b = 2\n\t```\n",
    "behind a bullet": "- ```python\n  a = 1\n  if a:\n      b = 2\n  ```",
    "tildes": "~~~python\na = 1\nif a:\n    b = 2\n~~~",
    "four": "````python\na = 1\nif a:\n    b = 2\n````\n",
    "attributes": "```{.python .numberLines}\na = 1\nif a:\n    b = 2\n```",
    "title": "```python title='x.py'\na = 1\nif a:\n    b = 2\n```",
    "capital": "``` Python3\na = 1\nif a:\n    b = 2\n```",
    "quote": "> ```py\n> a = 1\n> if a:\n>     b = 2\n> ```",
    "end of the line": "```python\r\na = 1\r\nif a:\r\n    b = 2\r\n```\r\n",
    "less indented": "    ```python\n  a = 1\n  if a:\n      b = 2\n    ```",
}


@pytest.mark.parametrize("name", FENCES)
def test_fences(name: str) -> None:
    block = last_block(FENCES[name])
    assert block is not None
    values: dict[str, Any] = {}
    exec(compile(block, name, "exec"), values)
    assert values["b"] == 2


def test_what_is_no_fence() -> None:
    assert last_block("```python\ns = '```'\nt = 1\n```") == "s = '```'\nt = 1\n"
    assert last_block("~~~python\n```\n~~~") == "```\n"
    assert last_block("`````py\n```\n`````") == "```\n"
    assert last_block("text ```python\na = 1\n```") is None


RIGHT = {
    "in place": ("def f(a): a.sort()", "x = [3, 1]\ny = x\nf(x)\nassert x == [1, 3] and y is not None\nassert y == [1, 3]"),
    "in place, in a loop": ("def f(a): a.sort()", "for x, e in [([2, 1], [1, 2])]:\n    f(x)\n    assert x == e"),
    "argument left alone": ("def f(a): return sorted(a)", "x = [3, 1]\nassert f(x) == [1, 3]\nassert x == [3, 1]"),
    "dates": ("import datetime\ndef f(n): return datetime.date(2020, 1, n)", "from datetime import date\nassert f(2) == date(2020, 1, 2)"),
    "exception": ("def f(a):\n    if a < 0: raise ValueError('negative')\n    return a",
                  "import pytest\ndef test_f():\n    assert f(1) == 1\n    with pytest.raises(ValueError, match='neg'):\n        f(-1)"),
    "exception, called": ("def f(a):\n    if a < 0: raise ValueError\n    return a", "import unittest\nclass T(unittest.TestCase):\n"
                          "    def test_f(self):\n        self.assertEqual(f(1), 1)\n        self.assertRaises(ValueError, f, -1)"),
    "doctest of an exception": ("def f(a): return [1][a]", ">>> f(0)\n1\n>>> f(5)\nTraceback (most recent call last):\n    ...\nIndexError: list"),
    "doctest that prints": ("def f(a): return a", ">>> print(f('a'))\na\n"),
    "reference in the tests": ("def f(a): return a * 2", "def double(n):\n    return n + n\nfor n in range(3):\n    assert f(n) == double(n)"),
    "object of the program": ("class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)",
                              "s = Stack()\ns.push(4)\nassert s.a == [4]\nassert len(s.a) == 1"),
    "random arguments": ("def f(a): return a + 1", "import random\nrandom.seed(3)\nfor _ in range(3):\n    n = random.randint(1, 9)\n    assert f(n) == n + 1"),
    "tuple for JSON's list": ("def f(a): return (a, a)", [{"call": "f(1)", "output": [1, 1]}]),
    "numpy": ("def f(a): return [x * 2 for x in a]", "import numpy as np\nassert np.allclose(f([1.0]), [2.0])"),
    "subtests": ("def f(a): return a", "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        for n in (1, 2):\n"
                 "            with self.subTest(n=n):\n                self.assertEqual(f(n), n)"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs(name: str, reward: CodeReward) -> None:
    code, tests = RIGHT[name]
    assert reward(fenced(code, tests=tests)) == 1
    for empty in ("pass", "def f(*args, **kwargs): return None"):
        assert reward(fenced(empty, tests=tests)) == 0


def test_a_function_with_a_builtin_name_needs_a_program(reward: CodeReward) -> None:
    for meta in ({"tests": "assert sum([1, 2]) == 3"}, {"tests": "assert sum([1, 2]) == 3", "entry_point": "sum"}):
        assert reward(fenced("def sum(a): return a[0] + a[1]", **meta)) == 1
        assert reward(fenced("pass", **meta)) == 0


def test_every_form_is_tried() -> None:
    assert len(FORMS) >= 20 and len(FUNCTIONS) >= 10
    everything = list(programs(5))
    assert {graded.name[4:].split(",")[0] for graded in everything} >= {
        form.split(",")[0] for form in (*FORMS, *VACUOUS)
    }
    assert sum(graded.right for graded in everything) >= 60
