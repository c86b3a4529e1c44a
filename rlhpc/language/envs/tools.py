"""Tools for the model's responses: arithmetic, and Python in a sandbox."""

from __future__ import annotations

import ast
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from rlhpc.language.sandbox.python import Sandbox

Tool = Callable[[str], Any]
"""Tool: takes the text of a call, and returns the result as text or, for a model with image input, as a PIL image or the bytes
of an image file. The model gets the message of an exception as the result."""

_MAX_CHARACTERS = 500
_MAX_BITS = 4096
_FENCE = re.compile(r"^\s*```\w*\n(.*?)(?:\n```)?\s*$", re.DOTALL)
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


def _round(value: Any, digits: int = 0) -> Any:
    """Rounds a value. The digits are limited, because the run time of `round` grows with them."""
    if abs(digits) > _MAX_BITS:
        raise ValueError("the value is rounded to too many digits")
    return round(value, digits) if digits else round(value)


_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor, "ceil": math.ceil, "gcd": math.gcd,
}  # fmt: skip
_NAMES = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression: numbers, `+ - * / // % **` (or `^`), parentheses, and functions.

    Raises:
        ValueError: The text is not an arithmetic expression, or its value is too large.
    """
    python_expression = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    python_expression = (
        re.sub(r"(?<=\d),(?=\d{3}\b)", "", python_expression.removesuffix("=").strip())
        if "(" not in python_expression
        else python_expression
    )
    if len(python_expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {_MAX_CHARACTERS} characters")
    try:
        number = _evaluate(ast.parse(python_expression, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the value is too large") from None
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return f"{number:.12g}" if isinstance(number, float) else str(number)


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _check_size(node.value)
        case ast.BinOp() if type(node.op) in _BINARY:
            left_operand, right_operand = _evaluate(node.left), _evaluate(node.right)
            is_integer_power = (
                isinstance(node.op, ast.Pow) and isinstance(left_operand, int) and isinstance(right_operand, int)
            )
            if is_integer_power and left_operand.bit_length() * right_operand > _MAX_BITS:
                raise ValueError("the value is too large")
            return _check_size(_BINARY[type(node.op)](left_operand, right_operand))
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_evaluate(node.operand))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            try:
                return _check_size(_FUNCTIONS[name](*map(_evaluate, node.args)))
            except TypeError as error:
                raise ValueError(str(error)) from None
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    raise ValueError("this is no arithmetic expression")


def _check_size(value: Any) -> Any:
    if isinstance(value, complex):
        raise ValueError("the value is no real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("the value is too large")
    return value


class PythonTool:
    """Tool that runs a program in a sandbox: returns its output, and the value of its last line if that is an
    expression.

    Args:
        sandbox: Arguments of `Sandbox`.
    """

    def __init__(self, sandbox: Mapping[str, Any] | None = None) -> None:
        self._sandbox = Sandbox(**(sandbox or {}))

    def __call__(self, source: str) -> str:
        fence_match = _FENCE.match(source)
        sandbox_result = self._sandbox.run(
            _print_last_value(textwrap.dedent(fence_match[1] if fence_match else source).strip())
        )
        if sandbox_result.status == "ok":
            return sandbox_result.stdout.strip()
        printed_text = sandbox_result.stdout.strip() + "\n" if sandbox_result.stdout.strip() else ""
        reason = {"timeout": "the program took too long", "output": "the program wrote too much"}
        return (
            printed_text
            + "error: "
            + (reason.get(sandbox_result.status) or sandbox_result.error or "the program was ended")
        )


def _print_last_value(source: str) -> str:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source  # the run of the program reports the error
    last_statement = body[-1] if body else None
    if not isinstance(last_statement, ast.Expr):
        return source
    print_statements = ast.parse("_value = 0\nif _value is not None:\n    print(_value)").body
    assert isinstance(print_statements[0], ast.Assign)
    print_statements[0].value = last_statement.value
    return ast.unparse(ast.fix_missing_locations(ast.Module([*body[:-1], *print_statements], [])))
