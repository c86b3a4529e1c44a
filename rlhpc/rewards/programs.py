"""Whether a program passes its tests."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rlhpc.rewards.base import Sample
from rlhpc.rewards.sandbox import Sandbox
from rlhpc.runtime.errors import ConfigError

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_COMPARISONS = {
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Lt: lambda a, b: a < b, ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b, ast.Is: lambda a, b: a is b, ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


class CodeReward:
    """Runs the last Python block of a response against `meta["tests"]`, in a sandbox.

    A test is one of:

    - `assert` statements, one or more. Those that compare an expression with a literal are judged outside: the value of
      the expression comes out of the sandbox, the literal never goes in. So an object that claims to equal everything,
      or a program that ends early and prints success, gains nothing. Other statements are judged inside, beside the
      program; a program bent on it can deceive those.
    - `{"input": text, "output": text}`: the program is run with that on stdin, and what it prints is compared outside,
      up to white space at line ends.
    - `{"call": expression, "output": value}`: as the first.

    `meta["setup"]` has statements to run before the tests, `meta["entry_point"]` the name that a `check(candidate)`
    function among the tests is called with.

    Args:
        partial: The part of the tests that pass, rather than 1 for all of them and 0 else.
        whole: A response without a block is taken for a program as it stands.
        timeout_s: Wall time of all tests of a sample; must be below `reward.timeout_s`.
        sandbox: Arguments of the `Sandbox`.
    """

    memory_mb = 8192

    def __init__(
        self,
        partial: bool = False,
        whole: bool = False,
        timeout_s: float = 6.0,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        self._partial, self._whole, self._timeout_s = partial, whole, timeout_s
        try:
            self._sandbox = Sandbox(**{"wall_s": timeout_s, **(sandbox or {})})
        except TypeError as error:
            raise ConfigError(f"reward.terms: sandbox of 'code': {error}") from None

    def __call__(self, sample: Sample) -> float:
        tests = sample.meta.get("tests")
        if not tests:
            raise ValueError("the problem has no tests: its meta has no 'tests'")
        tests = [tests] if isinstance(tests, (str, Mapping)) else list(tests)
        program = last_block(sample.response)
        if program is None:
            if not self._whole:
                return 0.0
            program = sample.response
        deadline = time.monotonic() + self._timeout_s
        streams = [test for test in tests if isinstance(test, Mapping) and "call" not in test]
        checks = [check for test in tests if test not in streams for check in read_test(test, sample.meta)]
        passed = []
        if checks:
            result = self._sandbox.check(
                program, [check.told() for check in checks], str(sample.meta.get("setup", "")), self._timeout_s
            )
            passed += [check.judge(result.checks.get(number, {})) for number, check in enumerate(checks)]
        for test in streams:
            left = deadline - time.monotonic()
            enough = self._partial or all(passed)
            passed.append(enough and left > 0 and self._prints(program, test, left))
        return sum(passed) / len(passed) if self._partial else float(all(passed))

    def _prints(self, program: str, test: Mapping[str, Any], left: float) -> bool:
        result = self._sandbox.run(program, str(test.get("input", "")), left)
        return result.status == "ok" and _lines(result.stdout) == _lines(str(test["output"]))


def last_block(response: str) -> str | None:
    """The last closed block that is marked as Python, or else the last without a mark."""
    blocks = _BLOCK.findall(response)
    for marks in (("python", "py", "python3"), ("",)):
        found = [code for mark, code in blocks if mark.lower() in marks]
        if found:
            return str(found[-1])
    return None


@dataclass(frozen=True)
class Check:
    """One thing to be found out inside, and what makes it right.

    Attributes:
        source: An expression, or statements where `comparison` is None.
        comparison: A comparison of the syntax tree.
        wanted: What the value is compared with.
    """

    source: str
    comparison: type[ast.cmpop] | None = None
    wanted: Any = None

    def told(self) -> dict[str, str]:
        """What the sandbox is told."""
        return {"kind": "script" if self.comparison is None else "value", "source": self.source}

    def judge(self, answer: Mapping[str, Any]) -> bool:
        """Whether one answer of the sandbox is right."""
        if self.comparison is None:
            return answer.get("passed") is True
        if "value" not in answer:
            return False
        try:
            return bool(_COMPARISONS[self.comparison](decode(answer["value"]), self.wanted))
        except Exception:  # values that do not compare
            return False


def read_test(test: str | Mapping[str, Any], meta: Mapping[str, Any]) -> list[Check]:
    """The checks of one test."""
    if isinstance(test, Mapping):
        return [Check(str(test["call"]), ast.Eq, test["output"])]
    try:
        body = ast.parse(test).body
    except SyntaxError as error:
        raise ValueError(f"a test of the problem is no Python: {error}") from None
    if body and all(isinstance(statement, ast.Assert) for statement in body):
        return [_assertion(statement, {}) for statement in body if isinstance(statement, ast.Assert)]
    entry = str(meta.get("entry_point", ""))
    function = next((s for s in body if isinstance(s, ast.FunctionDef) and s.name == "check"), None)
    if function is None or not entry:
        return [Check(test)]
    statements = [s for s in function.body if not _is_text(s)]
    argument = function.args.args[0].arg if len(function.args.args) == 1 else ""
    if argument and statements and all(isinstance(statement, ast.Assert) for statement in statements):
        return [_assertion(s, {argument: entry}) for s in statements if isinstance(s, ast.Assert)]
    return [Check(f"{test}\ncheck({entry})")]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)


def _assertion(statement: ast.Assert, names: Mapping[str, str]) -> Check:
    claim = _Renamed(names).visit(statement.test)
    if isinstance(claim, ast.Compare) and len(claim.ops) == 1:
        left, right, comparison = claim.left, claim.comparators[0], type(claim.ops[0])
        if comparison in (ast.Eq, ast.NotEq) and _literal(left)[0] and not _literal(right)[0]:
            left, right = right, left
        known, wanted = _literal(right)
        if known and not _literal(left)[0]:
            return Check(ast.unparse(left), comparison, wanted)
    if isinstance(claim, ast.UnaryOp) and isinstance(claim.op, ast.Not):
        return Check(f"bool({ast.unparse(claim.operand)})", ast.Is, False)
    return Check(f"bool({ast.unparse(claim)})", ast.Is, True)


def _literal(node: ast.expr) -> tuple[bool, Any]:
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def decode(value: Any) -> Any:
    """Inverse of the sandbox's encoding: builtin values only, whatever the program made them from."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "i":
            return int(inner, 16)
        case "f":
            return float.fromhex(inner)
        case "c":
            return complex(float.fromhex(inner[0]), float.fromhex(inner[1]))
        case "b":
            return bytes.fromhex(inner)
        case "l":
            return [decode(item) for item in inner]
        case "t":
            return tuple(decode(item) for item in inner)
        case "s":
            return {decode(item) for item in inner}
        case "d":
            return {decode(key): decode(item) for key, item in inner}
        case "q":
            return Fraction(int(inner[0], 16), int(inner[1], 16))
        case "n":
            return Decimal(inner)
    raise ValueError(f"no value of kind {kind!r}")
