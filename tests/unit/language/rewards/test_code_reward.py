"""The reward of programs: their tests, and what they may try instead of passing them."""

from __future__ import annotations

import pytest

from rlhpc.language.rewards import Sample
from rlhpc.language.rewards.code_reward import CodeReward, last_block
from rlhpc.language.rewards.expected_values import decode
from rlhpc.language.rewards.problem_tests import read_tests
from rlhpc.runtime.errors import ConfigError
from tests.attack.programs import CHEATS as MORE_CHEATS
from tests.attack.programs import cheated
from tests.drawn import drawn

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
SHORT = drawn("cheats", MORE_CHEATS, least=6, always=[
    "abs shadowed", "bool shadowed", "bool in builtins", "sub of an object", "isclose patched", "forges a failure",
    "forges bad JSON", "forges deep JSON", "forges a set that is slow", "returns a number to round",
])  # fmt: skip
TESTS = ["assert add(2, 3) == 5", "assert add(0, 0) == 0", "assert add('a', 'b') == 'ab'"]


@pytest.fixture(scope="module")
def reward():
    return CodeReward(timeout_s=5.0)


@pytest.fixture(scope="module")
def partial():
    return CodeReward(partial=True, timeout_s=2.0)


def program(code: str, tests, **meta) -> Sample:
    return Sample("question", f"Here it is:\n```python\n{code}\n```\nDone.", meta={"tests": tests, **meta})


def test_the_last_block_counts():
    assert last_block("```python\na = 1\n```\nbetter:\n```python\nb = 2\n```") == "b = 2\n"
    assert last_block("```python\na = 1\n```\noutput:\n```\n1\n```") == "a = 1\n"
    assert last_block("```\na = 1\n```") == "a = 1\n" and last_block("a = 1") is None
    assert last_block("```python\nnot closed") is None
    assert last_block('```py\ns = """\n```python\n"""\n```').startswith("s = ")


def test_all_or_a_part(reward, partial):
    assert reward(program(ADD, TESTS)) == 1 and reward(program(WRONG, TESTS)) == 0
    assert partial(program(ADD, TESTS)) == 1
    assert partial(program(WRONG, TESTS)) == pytest.approx(1 / 3)
    assert reward(Sample("q", ADD, meta={"tests": TESTS})) == 0
    assert CodeReward(run_unfenced=True)(Sample("q", ADD, meta={"tests": TESTS})) == 1
    with pytest.raises(ValueError, match="no tests"):
        reward(program(ADD, []))


def test_forms_of_tests(reward, partial):
    assert reward(program(ADD, "assert add(1, 1) == 2\nassert add(1, 1) != 3")) == 1
    assert reward(program(ADD, [{"call": "add(1, 1)", "output": 2}])) == 1
    assert reward(program(ADD, ["assert 2 == add(1, 1)", "assert add(1, 1) in (1, 2)", "assert add(1, 1) > 1"])) == 1
    assert reward(program(ADD, ["assert not add(0, 0)", "assert add(1, 1) is not None", "assert add(1, 0)"])) == 1
    assert reward(program(ADD, ["assert abs(add(0.1, 0.2) - 0.3) < 1e-9", "assert add([1], [2]) == [1, 2]"])) == 1
    assert reward(program(ADD, ["assert add(1, 1) == sum([1, 1])", "x = add(1, 1)\nassert x == 2"])) == 1
    assert reward(program(ADD, ["assert twice(2) == 4"], setup="def twice(a):\n    return add(a, a)")) == 1
    check = "def check(candidate):\n    '''doc'''\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == {}\n"
    assert reward(program(ADD, check.format(0), entry_point="add")) == 1
    assert partial(program(ADD, check.format(1), entry_point="add")) == 0.5
    loop = "def check(candidate):\n    for i in range(3):\n        assert candidate(i, i) == 2 * i\n"
    assert reward(program(ADD, loop, entry_point="add")) == 1 and reward(program(WRONG, loop, entry_point="add")) == 0
    with pytest.raises(ValueError, match="no Python"):
        reward(program(ADD, "assert ("))


def test_programs_that_read_and_print(partial):
    tests = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}, {"input": "1 x", "output": "?"}]
    code = "a, b = map(int, input().split())\nprint(a + b, '')\nif __name__ != '__main__': print('no')"
    assert partial(program(code, tests)) == pytest.approx(2 / 3)
    assert partial(program("print(5)\nimport sys; sys.exit(1)", tests[:1])) == 0


def test_values_keep_their_types(reward):
    values = [
        "2**4000", "-7", "1.5", "float('inf')", "1 + 2j", "b'x'", "{1: [2, (3, None)], 'a': {4, 5}}", "True", "'\\ud800'",
        "frozenset({1})",
    ]  # fmt: skip
    result = reward._sandbox.check("", [{"kind": "value", "source": source} for source in values])
    assert [decode(result.checks[i]["value"]) for i in range(len(values))] == [eval(source) for source in values]
    more = "import collections, fractions, decimal, numpy, enum\nclass N(enum.IntEnum):\n    A = 4"
    tests = [
        "assert collections.Counter('aab') == {'a': 2, 'b': 1}", "assert numpy.float64(0.5) == 0.5", "assert N.A == 4",
        "assert fractions.Fraction(1, 2) == 0.5", "assert decimal.Decimal('1.5') == 1.5", "assert numpy.int64(3) in [3]",
        "assert collections.namedtuple('P', 'x')(1) == (1,)", "assert collections.deque([1]) is not None",
    ]  # fmt: skip
    assert read_tests(tests[:1], {}).steps[-1]["source"] == "collections.Counter('aab')"
    # A deque cannot be told from what only claims to be one. Three hold without a program, so they are not counted.
    assert partial_of(reward, more, tests) == 1 - 1 / 5


def partial_of(reward, code, tests):
    everything = CodeReward(partial=True)
    return everything(program(code, tests))


CHEATS = {
    "equals everything": "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
    "    def __bool__(self): return True\ndef add(a, b): return E()",
    "exits at once": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits when called": "import os\ndef add(a, b): os._exit(0)",
    "exits by exception": "def add(a, b): raise SystemExit(0)",
    "prints success": "def add(a, b):\n    print('passed 0 null'); print('ok'); return None",
    "no assertions": "import builtins\nbuiltins.AssertionError = KeyboardInterrupt\ndef add(a, b): return None",
    "no exec": "import builtins\nbuiltins.exec = builtins.eval = lambda *a: None\ndef add(a, b): return None",
    "subclass of int": "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return I(9)",
    "str that lies": "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return S('z')",
    "writes to all files": 'import os\nfor fd in range(3, 60):\n    try: os.write(fd, b\'x value 0 {"i": "0x5"}\\n\')\n'
    "    except OSError: pass\ndef add(a, b): return 0",
    "kills its parent": "import os, signal\ntry: os.kill(os.getppid(), signal.SIGKILL)\nexcept OSError: pass",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef add(a, b): return None",
    "endless": "while True: pass",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
def test_cheats_gain_nothing(code, partial):
    assert (
        partial(program(code, ["assert add(2, 3) == 5", "total = add(2, 3)\nassert total == 5 and type(total) is int"]))
        == 0
    )


@pytest.mark.drawn
@pytest.mark.parametrize("name", SHORT)
def test_cheats_on_the_way_to_the_judge_gain_nothing(name, partial):
    """Those that once gained something, and a part of all."""
    assert cheated(partial, name) == ""


def test_right_programs_pass_tests_that_are_taken_apart(partial):
    code = (
        "import collections, math\n"
        "def root(x): return math.sqrt(x)\n"
        "def split(s): return collections.deque(s)\n"
        "def count(n):\n    for i in range(n): yield i\n"
        "def table(n): return {i: i * i for i in range(n)}\n"
        "def sum(items): return 1.0 * items[0] + items[1]\n"
    )
    tests = [
        "assert abs(root(2.0) - 1.41421356) < 1e-6", "assert -1e-6 < root(2.0) - 1.41421356 < 1e-6",
        "import math\nassert math.isclose(root(2.0), 2 ** 0.5, rel_tol=1e-9)", "assert list(split('ab')) == ['a', 'b']",
        "assert list(count(3)) == [0, 1, 2] and sorted(table(3)) == [0, 1, 2]", "assert len(set(split('aab'))) == 2",
        "assert all(abs(a - b) < 1e-6 for a, b in zip(list(count(2)), [0.0, 1.0]))", "assert root(4) == 2 or root(4) == -2",
        "assert all(root(i * i) == i for i in range(4))", "assert [root(x) for x in table(2).values()] == [0, 1]",
        "for i, (want) in enumerate([0, 1, 4]):\n    got = table(3)[i]\n    assert got == want, 'no'",
        "for number, square in [(1, 1), (2, 4)]:\n    assert table(9)[number] == square", "assert sum([1, 2]) == 3",
        "assert abs(sum([0.1, 0.2]) - 0.3) < 1e-9", "assert isinstance(root(2), float) and type(root(2)) == float",
        "assert tuple(sorted(table(2).items())) == ((0, 0), (1, 1))", "assert set(count(3)) - {1} == set([0, 2])",
        "x = root(9)\ny = x + 1\nassert x == 3 and y == 4", "try:\n    root(-1)\n    assert False\nexcept ValueError: pass",
        "assert round(root(2.0), 2) == 1.41", "assert max(count(4)) == 10 ** 1 - 7", "assert not [] and not count(0) is None",
        "from collections import Counter\nassert Counter(split('aab')) == Counter(['a', 'a', 'b'])",
    ]  # fmt: skip
    failed = [test for test in tests if partial(program(code, [test], setup="")) != 1]
    assert failed == []
    check = (
        'META = {\'a\': 1}\ndef check(f):\n    """Text."""\n    got = f(4)\n    assert got == 2\n'
        "    for n in range(2, 4):\n        assert f(n * n) == n\n"
    )
    assert partial(program(code, check, entry_point="root")) == 1
    assert read_tests([check], {"entry_point": "root"}).scripts == [{"kind": "do", "source": "_check_got = root(4)"}]
    assert partial(program(code, "raise ValueError\nassert root(4) == 2")) == 0


def test_what_came_before_a_hang_counts(partial):
    slow = "def add(a, b):\n    while a == 0: pass\n    return a + b"
    assert partial(program(slow, TESTS)) == pytest.approx(1 / 3)


def test_the_expected_value_is_not_inside(partial):
    """A program that searches all of its process finds no answer of a test that is judged outside."""
    finder = (
        "import gc, sys\n"
        "def add(a, b):\n"
        "    wanted, frame, seen = ''.join(['4242', '42']), sys._getframe(1), []\n"
        "    while frame:\n        seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "    seen += [repr(o) for o in gc.get_objects() if type(o) in (dict, list, tuple) and len(o) < 50]\n"
        "    return any(wanted in text for text in seen)\n"
    )
    assert partial(program(finder, ["assert add(1, 1) == 424242", "assert add(1, 1) is False"])) == 0.5
    inside = ["while add(1, 1):\n    assert 424242 == sum([])"]  # one that has to be judged inside is found
    assert partial(program(finder, inside)) == 0
    split = [
        "assert add(1, 1) is not True or 424242 == sum([])", "assert abs(add(1, 1) - 424242) < 1",
        "x = add(1, 1)\nassert x == 424242", "for i in range(2):\n    assert add(i, i) == 424242 * i",
        "assert all(a == 424242 for a in [add(1, 1)])",
    ]  # fmt: skip
    for test in split:
        assert "424242" not in str(read_tests([test], {}).steps + read_tests([test], {}).scripts), test
    both = [split[0], "assert add(1, 1) is False"]
    assert partial(program(finder, both)) == 1  # it was not found: False is not True


def test_bad_arguments():
    with pytest.raises(ConfigError, match="sandbox of 'code'"):
        CodeReward(sandbox={"memory": 1})
