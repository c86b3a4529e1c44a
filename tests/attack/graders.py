"""Random problems for the graders: programs against tests in all published forms, and answers in all notations.

    python -m tests.attack.graders                      # 300 programs and 500 answers, by the commit
    python -m tests.attack.graders --seed 7 --count 1000

A wrong program or answer must get 0, a right one 1. The same seed draws the same problems. Exits with 1 where a wrong one is
rewarded, or more than 1 % of the right ones are not.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rlhpc.language.rewards import Sample
from tests.drawn import number as seed_of_commit

Case = tuple[tuple[Any, ...], Any]
PROGRAMS, ANSWERS = 300, 500


@dataclass(frozen=True)
class Graded:
    """A sample with its verdict.

    Attributes:
        name: Form, function and program, for messages.
        right: Whether it must get 1.
        sample: What the grader gets.
    """

    name: str
    right: bool
    sample: Sample


@dataclass(frozen=True)
class Function:
    """A function that a program is to define.

    Attributes:
        arguments: Draws the arguments of a call.
        right: Bodies that do what is asked for; the first gives the expected values.
        wrong: Bodies that do not.
        close: Results are floats, which tests compare within a tolerance.
    """

    arguments: Callable[[random.Random], tuple[Any, ...]]
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    close: bool = False
    parameters: str = "a, b"


def _numbers(draw: random.Random, low: int = 1) -> list[int]:
    return [draw.randint(-50, 50) for _ in range(draw.randint(low, 6))]


def _word(draw: random.Random) -> str:
    return "".join(draw.choice("abcdeé'\"\\ {}%") for _ in range(draw.randint(2, 8)))


#: By name. Each wrong body differs from the right ones on most arguments.
FUNCTIONS: dict[str, Function] = {
    "add": Function(lambda d: (d.randint(-99, 99), d.randint(1, 99)), ("return a + b", "return sum([a, b])"),
                    ("return a - b", "return a", "return str(a + b)", "return [a + b]", "return a + b + 1")),
    "quotient": Function(lambda d: (d.randint(1, 99), d.randint(3, 9)), ("return a / b", "return a * (1 / b)"),
                         ("return a // b + 2", "return b / a + 7", "return None"), close=True),
    "largest": Function(lambda d: (_numbers(d, 2), d.randint(-9, 9)), ("return max(a) + b", "return sorted(a)[-1] + b"),
                        ("return min(a) + b - 1", "return a", "return b - 999")),
    "joined": Function(lambda d: ([_word(d), _word(d)], d.choice("-+,")), ("return b.join(a)", "return a[0] + b + a[1]"),
                       ("return ''.join(a)", "return a", "return b")),
    "counted": Function(lambda d: (_word(d) + "aab", d.choice("ab")), ("return {b: a.count(b)}", "return {b: sum(c == b for c in a)}"),
                        ("return {b: 0}", "return {}", "return [(b, a.count(b))]")),
    "pair": Function(lambda d: (d.randint(1, 9), d.randint(10, 99)), ("return (b, a)", "return b, a"),
                     ("return (a, b)", "return (b,)", "return b")),
    "doubled": Function(lambda d: (_numbers(d), d.randint(2, 5)), ("return [x * b for x in a]", "return list(map(lambda x: b * x, a))"),
                        ("return a * b + [1]", "return []", "return [x + b + 99 for x in a]", "return a + [0]")),
    "unique": Function(lambda d: (_numbers(d), d.randint(60, 99)), ("return set(a) | {b}", "return {*a, b}"),
                       ("return set(a)", "return sorted(set(a))", "return set()")),
    "even": Function(lambda d: (d.randint(0, 50) * 2, d.randint(0, 50) * 2), ("return (a + b) % 2 == 0", "return not (a + b) % 2"),
                     ("return False", "return 'True'", "return None")),
    "nested": Function(lambda d: ({"k": _numbers(d)}, d.randint(1, 5)), ("return {'k': [sum(a['k']), b]}", "return dict(k=[sum(a['k']), b])"),
                       ("return {'k': [b]}", "return a", "return {'k': [b, sum(a['k']), 0]}")),
}  # fmt: skip


@dataclass
class Problem:
    """Tests of a function in one form.

    Attributes:
        meta: Columns of the row.
        kind: `function`, or `stdin` for programs that read and print.
    """

    meta: dict[str, Any]
    kind: str = "function"
    extra: dict[str, Any] = field(default_factory=dict)


def _comparison(call: str, value: Any, close: bool) -> str:
    return f"abs({call} - {value!r}) < 1e-6" if close else f"{call} == {value!r}"


def _call(name: str, arguments: tuple[Any, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _lines(name: str, cases: list[Case], close: bool) -> list[str]:
    return [_comparison(_call(name, arguments), value, close) for arguments, value in cases]


def _indented(lines: list[str], width: int = 4) -> str:
    return "\n".join(" " * width + line for line in lines)


def _asserts(name: str, cases: list[Case], close: bool) -> Problem:
    return Problem({"tests": [f"assert {line}" for line in _lines(name, cases, close)]})


def _one_text(name: str, cases: list[Case], close: bool) -> Problem:
    return Problem(
        {"tests": "\n".join(f"assert {line}, 'case {n}'" for n, line in enumerate(_lines(name, cases, close)))}
    )


def _mbpp(name: str, cases: list[Case], close: bool) -> Problem:
    lines = [f"assert {line}" for line in _lines(name, cases, close)]
    return Problem({"test_list": lines, "test_setup_code": "import math", "test_imports": []})


def _check(name: str, cases: list[Case], close: bool) -> Problem:
    body = _indented([f"assert {line}" for line in _lines("candidate", cases, close)])
    return Problem(
        {"test": f"\n\nMETADATA = {{'author': 'x'}}\n\ndef check(candidate):\n{body}\n", "entry_point": name}
    )


def _check_called(name: str, cases: list[Case], close: bool) -> Problem:
    body = _indented([f"assert {line}" for line in _lines("f", cases, close)])
    return Problem({"tests": f"def check(f):\n{body}\n\ncheck({name})\n"})


def _evalplus(name: str, cases: list[Case], close: bool) -> Problem:
    same = "abs(candidate(*inp) - exp) < 1e-6" if close else "candidate(*inp) == exp"
    body = _indented([
        f"inputs = {[list(arguments) for arguments, _ in cases]!r}", f"results = {[value for _, value in cases]!r}",
        "for i, (inp, exp) in enumerate(zip(inputs, results)):", f"    assert {same}, i",
    ])  # fmt: skip
    return Problem({"test": f"def check(candidate):\n{body}\n", "entry_point": name})


def _bound_names(name: str, cases: list[Case], close: bool) -> Problem:
    lines = []
    for n, (arguments, value) in enumerate(cases):
        same = f"abs(result_{n} - expected_{n}) < 1e-6" if close else f"result_{n} == expected_{n}"
        lines += [f"expected_{n} = {value!r}", f"result_{n} = {_call(name, arguments)}", f"assert {same}"]
    return Problem({"tests": "\n".join(lines)})


def _table(name: str, cases: list[Case], close: bool) -> Problem:
    same = f"abs({name}(*args) - wanted) < 1e-6" if close else f"{name}(*args) == wanted"
    return Problem({"tests": f"cases = {cases!r}\nfor args, wanted in cases:\n    assert {same}"})


def _pytest_functions(name: str, cases: list[Case], close: bool) -> Problem:
    tests = [f"def test_{n}():\n    assert {line}\n" for n, line in enumerate(_lines(name, cases, close))]
    return Problem({"test": f"from solution import {name}\n\n" + "\n".join(tests)})


def _pytest_approx(name: str, cases: list[Case], close: bool) -> Problem:
    del close
    tests = []
    for n, (arguments, value) in enumerate(cases):
        wanted = f"pytest.approx({value!r})" if isinstance(value, float) else repr(value)
        tests.append(f"def test_{n}():\n    expected = {wanted}\n    assert {_call(name, arguments)} == expected\n")
    return Problem({"test": "import pytest\nfrom solution import *\n\n" + "\n".join(tests)})


def _parametrized(name: str, cases: list[Case], close: bool) -> Problem:
    same = (
        _comparison(f"{name}(*args)", 0, close).replace(" - 0)", " - wanted)") if close else f"{name}(*args) == wanted"
    )
    rows = repr([(list(arguments), value) for arguments, value in cases])
    return Problem(
        {
            "test": f"import pytest\n\n@pytest.mark.parametrize('args, wanted', {rows})\ndef test_all(args, wanted):\n    assert {same}\n"
        }
    )


def _unittest(name: str, cases: list[Case], close: bool) -> Problem:
    lines = []
    for n, (arguments, value) in enumerate(cases):
        method = "assertAlmostEqual" if close else "assertEqual"
        lines += [f"def test_{n}(self):", f"    self.{method}({_call(name, arguments)}, {value!r})"]
    source = f"import unittest\n\nclass TestCases(unittest.TestCase):\n{_indented(lines)}\n"
    return Problem({"test": source + "\nif __name__ == '__main__':\n    unittest.main()\n", "entry_point": name})


def _unittest_inside(name: str, cases: list[Case], close: bool) -> Problem:
    problem = _unittest(name, cases, close)
    more = "    @classmethod\n    def setUpClass(cls):\n        cls.ready = True\n\n    def test_0(self)"
    return Problem({**problem.meta, "test": problem.meta["test"].replace("    def test_0(self)", more, 1)})


def _guard(name: str, cases: list[Case], close: bool) -> Problem:
    return Problem(
        {
            "tests": f"if __name__ == '__main__':\n{_indented([f'assert {line}' for line in _lines(name, cases, close)])}\n"
        }
    )


def _doctest(name: str, cases: list[Case], close: bool) -> Problem:
    lines = []
    for arguments, value in cases:
        call = _call(name, arguments)
        lines += [
            f">>> round({call}, 6)"
            if close
            else f">>> {call} == {value!r}"
            if isinstance(value, (set, dict, str))
            else f">>> {call}"
        ]
        lines += [repr(round(value, 6)) if close else "True" if isinstance(value, (set, dict, str)) else repr(value)]
    return Problem({"tests": "\n".join(lines) + "\n"})


def _calls(name: str, cases: list[Case], close: bool) -> Problem | None:
    if close or not all(_is_json(value) for _, value in cases):
        return None
    return Problem({"tests": [{"call": _call(name, arguments), "output": value} for arguments, value in cases]})


def _apps(name: str, cases: list[Case], close: bool) -> Problem | None:
    if close or not all(_is_json(value) for _, value in cases):
        return None
    data = {
        "fn_name": name,
        "inputs": [list(arguments) for arguments, _ in cases],
        "outputs": [[value] for _, value in cases],
    }
    return Problem({"input_output": json.dumps(data)})


def _livecodebench(name: str, cases: list[Case], close: bool) -> Problem | None:
    if close or not all(_is_json(value) for _, value in cases):
        return None
    rows = [
        {"input": "\n".join(map(json.dumps, arguments)), "output": json.dumps(value), "testtype": "functional"}
        for arguments, value in cases
    ]
    return Problem({"public_test_cases": json.dumps(rows), "metadata": json.dumps({"func_name": name})})


def _method(name: str, cases: list[Case], close: bool) -> Problem:
    body = _indented([f"assert {line}" for line in _lines("candidate", cases, close)])
    return Problem(
        {"test": f"def check(candidate):\n{body}\n", "entry_point": f"Solution().{name}"}, extra={"class": True}
    )


def _stdin(name: str, cases: list[Case], close: bool) -> Problem | None:
    del name
    if close or not all(isinstance(value, int) for _, value in cases):
        return None
    inputs = ["\n".join(map(repr, arguments)) + "\n" for arguments, _ in cases]
    outputs = [f"{value}\n" for _, value in cases]
    return Problem({"input_output": json.dumps({"inputs": inputs, "outputs": outputs})}, kind="stdin")


def _stdin_rows(name: str, cases: list[Case], close: bool) -> Problem | None:
    problem = _stdin(name, cases, close)
    if problem is None:
        return None
    data = json.loads(problem.meta["input_output"])
    rows = [{"input": i, "output": o} for i, o in zip(data["inputs"], data["outputs"], strict=True)]
    return Problem({"tests": rows}, kind="stdin")


def _is_json(value: Any) -> bool:
    return json.loads(json.dumps(value)) == value if isinstance(value, (int, str, list, dict)) else False


FORMS: dict[str, Callable[[str, list[Case], bool], Problem | None]] = {
    "asserts": _asserts, "one text": _one_text, "MBPP": _mbpp, "HumanEval": _check, "check called": _check_called,
    "EvalPlus": _evalplus, "bound names": _bound_names, "table": _table, "pytest": _pytest_functions,
    "pytest.approx": _pytest_approx, "parametrize": _parametrized, "unittest": _unittest,
    "unittest inside": _unittest_inside, "main guard": _guard, "doctest": _doctest, "call and output": _calls,
    "APPS": _apps, "LiveCodeBench": _livecodebench, "LeetCode": _method, "stdin, APPS": _stdin,
    "stdin rows": _stdin_rows,
}  # fmt: skip
#: Forms that test nothing: any program must get 0, or the problem be refused.
VACUOUS: dict[str, Callable[[str, list[Case]], Any]] = {
    "pair": lambda name, cases: f"assert ({_call(name, cases[0][0])} == {cases[0][1]!r}, 'wrong')",
    "comparison": lambda name, cases: f"{_call(name, cases[0][0])} == {cases[0][1]!r}",
    "comment": lambda name, cases: f"# assert {_call(name, cases[0][0])} == {cases[0][1]!r}",
    "check without a name": lambda name, cases: f"def check(candidate):\n    assert candidate(*{cases[0][0]!r}) == {cases[0][1]!r}",
    "call": lambda name, cases: _call(name, cases[0][0]),
    "helper that is not called": lambda name, cases: f"def verify():\n    assert {_call(name, cases[0][0])} == {cases[0][1]!r}",
    "class without tests": lambda name, cases: f"import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        assert {name}",
    "of known values": lambda name, cases: f"expected = {cases[0][1]!r}\nassert expected == {cases[0][1]!r}",
    "exception swallowed": lambda name, cases: f"try:\n    assert {_call(name, cases[0][0])} == {cases[0][1]!r}\nexcept BaseException:\n    pass",
    "generator": lambda name, cases: f"assert ({name}(*a) == b for a, b in {cases!r})",
}  # fmt: skip

#: What a program looks for that wants the expected values instead of computing them.
_SEARCH = """
def {name}(*args):
    import sys
    frames, frame = [], sys._getframe(1)
    while frame:
        frames += [frame.f_globals, frame.f_locals]
        frame = frame.f_back
    for names in frames:
        for key, value in list(names.items()):
            if any(word in key for word in ("expected", "wanted", "results", "exp")):
                return value[0] if "results" in key else value
    return None
"""


def _fenced(draw: random.Random, code: str) -> str:
    code = code.rstrip("\n")
    style = draw.choice(["plain", "plain", "list", "tildes", "four", "attributes", "quote", "tabs"])
    if style == "list":
        inner = "\n".join(("   " + line).rstrip() for line in code.splitlines())
        return f"1. The idea.\n2. The program:\n\n   ```python\n{inner}\n   ```\n3. Done."
    if style == "tildes":
        return f"So:\n~~~python\n{code}\n~~~\n"
    if style == "four":
        return f"````py\n{code}\n````\nwhich prints\n```\n1\n```\n"
    if style == "attributes":
        return f"```{{.python .numberLines}}\n{code}\n```"
    if style == "quote":
        inner = "\n".join(f"> {line}" for line in code.splitlines())
        return f"> ```python\n{inner}\n> ```\n"
    if style == "tabs":
        inner = "\n".join("\t" + line for line in code.splitlines())
        return f"- program:\n\n\t```python\n{inner}\n\t```\n"
    return f"First try:\n```python\nraise SystemExit\n```\nBetter:\n```python\n{code}\n```\nDone."


def _source(problem: Problem, name: str, function: Function, body: str) -> str:
    if problem.kind == "stdin":
        return f"import ast, sys\ndef f({function.parameters}):\n    {body}\nprint(f(*map(ast.literal_eval, sys.stdin.read().splitlines())))\n"
    if problem.extra.get("class"):
        return f"class Solution:\n    def {name}(self, {function.parameters}):\n        {body}\n"
    return f"def {name}({function.parameters}):\n    {body}\n"


def _value(function: Function, body: str, arguments: tuple[Any, ...]) -> Any:
    names: dict[str, Any] = {}
    exec(f"def f({function.parameters}):\n    {body}", names)
    return names["f"](*json.loads(json.dumps(arguments)))


def programs(seed: int, count: int = PROGRAMS) -> Iterator[Graded]:
    """Yields programs with problems: in turn a right one, a wrong one, one without content, one for tests that test nothing."""
    draw, made = random.Random(f"programs {seed}"), 0
    while made < count:
        name, function = draw.choice(list(FUNCTIONS.items()))
        form = list(FORMS)[made % len(FORMS)]
        cases = [
            (arguments, _value(function, function.right[0], arguments))
            for arguments in (function.arguments(draw) for _ in range(4))
        ]
        problem = FORMS[form](name, cases, function.close)
        if problem is None:
            continue
        kind = draw.choice(["right", "right", "wrong", "wrong", "empty", "vacuous", "search"])
        if kind == "right":
            code = _source(problem, name, function, draw.choice(function.right))
        elif kind == "wrong":
            body = draw.choice(function.wrong)
            values = [_value(function, body, arguments) for arguments, _ in cases]
            written = str if problem.kind == "stdin" else repr
            if any(written(value) == written(right) for value, (_, right) in zip(values, cases, strict=True)):
                continue
            code, kind = _source(problem, name, function, body), f"wrong: {body}"
        elif kind == "search":
            code = _SEARCH.format(name=name)
        else:
            bodies = [
                "pass",
                "",
                f"def {name}(*args, **kwargs): return None",
                "import sys; sys.exit(0)",
                "raise KeyError",
            ]
            code = draw.choice(bodies)
            if kind == "vacuous":
                form = draw.choice(list(VACUOUS))
                problem, code = (
                    Problem({"tests": [VACUOUS[form](name, cases)]}),
                    draw.choice([code, _source(problem, name, function, draw.choice(function.wrong))]),
                )
            kind = f"{kind}: {code}"
        yield Graded(
            f"{made:03} {form}, {name}, {kind}", kind == "right", Sample("", _fenced(draw, code), meta=problem.meta)
        )
        made += 1


def _spaced(draw: random.Random, text: str) -> str:
    """Puts white space where LaTeX does not read it."""
    if draw.random() < 0.5:
        return text
    parts = re.findall(r"\\[a-zA-Z]+|\\.|.", text)
    return "".join(draw.choice(["", " ", r"\, ", r"\; "]) + part if part in "+=," else part for part in parts)


def _fraction(draw: random.Random, value: Fraction) -> str:
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    if below == 1:
        return f"{sign}{above}"
    factor = draw.choice([1, 1, 2, 3])
    forms = [rf"{sign}\frac{{{above}}}{{{below}}}", rf"{sign}\dfrac{{{above}}}{{{below}}}", f"{sign}{above}/{below}",
             rf"{sign}\frac{{{above * factor}}}{{{below * factor}}}"]  # fmt: skip
    if above > below:
        forms.append(rf"{sign}{above // below}\frac{{{above % below}}}{{{below}}}")
    if above < 10 and below < 10:
        forms.append(rf"{sign}\tfrac{above}{below}")
    return draw.choice(forms)


def _integer(draw: random.Random, value: int) -> str:
    forms = [str(value), f"{value}.0", f"${value}$", rf"{value}\text{{ cm}}", f"{value} cm"]
    if abs(value) >= 1000:
        forms += [f"{value:,}", f"{value:,}".replace(",", "{,}"), f"{value:,}".replace(",", r"\,")]
    if value < 0:
        forms += [f"- {-value}", f"\u2212{-value}"]
    return draw.choice(forms)


def _vector(draw: random.Random, values: list[int]) -> str:
    kind, row = draw.choice(["pmatrix", "bmatrix"]), draw.choice([r" \\ ", r"\\", "\\\\\n", r"\\ "])
    return (
        rf"\begin{{{kind}}}{draw.choice(['', ' '])}{row.join(map(str, values))}{draw.choice(['', ' '])}\end{{{kind}}}"
    )


def _list(draw: random.Random, values: list[int], opening: str, closing: str) -> str:
    left, right = draw.choice([("", ""), (r"\left", r"\right")])
    comma = draw.choice([", ", ",", r",\ "])
    return f"{left}{opening}{comma.join(map(str, values))}{right}{closing}"


def _value_and_text(draw: random.Random, kind: str) -> tuple[Any, Callable[[Any], str], Callable[[Any], Any]]:
    """Returns a value, what writes it, and what makes another of it."""
    number = draw.randint(2, 40)
    match kind:
        case "integer":
            return draw.randint(-99999, 99999), lambda v: _integer(draw, v), lambda v: v + draw.choice([1, -1, 10])
        case "fraction":
            return (Fraction(draw.randint(-30, 30) * 7 + 1, draw.choice([2, 3, 4, 5, 7, 9])), lambda v: _fraction(draw, v),
                    lambda v: v + draw.choice([1, Fraction(1, 2), -v * 2]))  # fmt: skip
        case "decimal":
            value = Fraction(draw.randint(-9999, 9999) * 10 + 1, 1000)
            return (
                value,
                lambda v: draw.choice([f"{float(v)}", f"{float(v):.4f}", _fraction(draw, v)]),
                lambda v: v + Fraction(1, 10),
            )
        case "vector":
            values = [draw.randint(-9, 9) for _ in range(draw.randint(2, 4))]
            return values, lambda v: _vector(draw, v), lambda v: [*v[:-1], v[-1] + 1]
        case "tuple":
            values = [draw.randint(-9, 9) for _ in range(3)]
            return (
                values,
                lambda v: _list(draw, v, "(", ")"),
                lambda v: draw.choice([[*v[:-1], v[-1] + 1], [v[0] + 1, *v[1:]]]),
            )
        case "set":
            values = draw.sample(range(-9, 9), 3)
            return values, lambda v: _list(draw, draw.sample(v, 3), r"\{", r"\}"), lambda v: [*v[:-1], 77]
        case "interval":
            values = [draw.randint(-9, 0), draw.randint(1, 9)]
            return values, lambda v: _list(draw, v, "[", ")"), lambda v: [v[0], v[1] + 1]
        case "root":
            return (
                number,
                lambda v: draw.choice([rf"{v}\sqrt{{2}}", rf"\sqrt{{{2 * v * v}}}", rf"{v}\sqrt2"]),
                lambda v: v + 1,
            )
        case "pi":
            return (
                number,
                lambda v: draw.choice([rf"{v}\pi", rf"{v} \pi", f"{v}π", rf"\frac{{{2 * v}\pi}}{{2}}"]),
                lambda v: v + 1,
            )
        case "scientific":
            return (
                number,
                lambda v: draw.choice([rf"{v} \times 10^{{3}}", f"{v}000", f"{v}e3", rf"{v} \cdot 10^3"]),
                lambda v: v + 1,
            )
        case "equation":
            return number, lambda v: draw.choice([f"x={v}", f"x = {v}", f"{v}"]), lambda v: v + 1
        case "polynomial":
            return number, lambda v: draw.choice([f"x^2+{v}x+1", f"{v}x + x^{{2}} + 1", f"1+x^2+{v}x"]), lambda v: v + 1
        case "percent":
            return number, lambda v: draw.choice([rf"{v}\%", f"{v}%", rf"{v} \%"]), lambda v: v + 1
        case _:
            word = draw.choice(["Monday", "Tuesday", "even", "odd", "north"])
            return word, lambda v: draw.choice([v, rf"\text{{{v}}}", v.lower(), f"{v}."]), lambda v: v + "s"


KINDS = ("integer", "fraction", "decimal", "vector", "tuple", "set", "interval", "root", "pi", "scientific", "equation",
         "polynomial", "percent", "word")  # fmt: skip


def answers(seed: int, count: int = ANSWERS) -> Iterator[Graded]:
    """Yields answers of mathematics with references: half of them right, in another notation, half of them wrong."""
    draw = random.Random(f"answers {seed}")
    for place in range(count):
        kind, right = KINDS[place % len(KINDS)], draw.random() < 0.5
        value, write, change = _value_and_text(draw, kind)
        reference, answer = write(value), write(value if right else change(value))
        if kind in ("tuple", "polynomial", "equation"):
            answer = _spaced(draw, answer)
        name = f"{place:03} {kind}: {answer!r} for {reference!r}"
        yield Graded(name, right, Sample("", f"Thinking.\nSo it is $\\boxed{{{answer}}}$.", reference))


def faults(reward: Callable[[Sample], float], samples: Iterator[Graded]) -> tuple[list[str], list[str], int]:
    """Returns the wrong samples that are rewarded, the right ones that are not, and how many are right."""
    rewarded, refused, right = list[str](), list[str](), 0
    for graded in samples:
        try:
            value: float | str = reward(graded.sample)
        except ValueError as error:
            value = f"refused: {error}"
        right += graded.right
        if graded.right and value != 1:
            refused.append(f"{graded.name}: {value}")
        elif not graded.right and value not in (0, 0.0) and not isinstance(value, str):
            rewarded.append(f"{graded.name}: {value}")
    return rewarded, refused, right


def main() -> int:
    """Draws both, and prints what was judged wrongly."""
    from rlhpc.language.rewards.code_reward import CodeReward
    from rlhpc.language.rewards.math_verifier import MathReward

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--count", type=int, default=None, help="of each, instead of 300 programs and 500 answers")
    options = parser.parse_args()
    seed, bad = seed_of_commit() if options.seed is None else options.seed, 0
    for what, reward, samples in (
        ("programs", CodeReward(), programs(seed, options.count or PROGRAMS)),
        ("answers", MathReward(), answers(seed, options.count or ANSWERS)),
    ):
        drawn = list(samples)
        rewarded, refused, right = faults(reward, iter(drawn))
        print(
            f"{what}, seed {seed}: {len(drawn)}, {right} right; {len(rewarded)} wrong ones rewarded, {len(refused)} right ones not"
        )
        print(*(f"  rewarded: {name}" for name in rewarded), *(f"  not rewarded: {name}" for name in refused), sep="\n")
        kinds = Counter(name[4:].partition(",")[0].partition(":")[0] for name in (*rewarded, *refused))
        print(*(f"  {count} x {kind}" for kind, count in kinds.most_common()), sep="\n")
        bad += bool(rewarded) or len(refused) > 0.01 * right
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
