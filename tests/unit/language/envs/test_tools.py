"""Tools of the package: calculator and Python."""

from __future__ import annotations

import time

import pytest

from rlhpc.language.envs.tools import PythonTool, calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", "84"), ("2 ^ 10", "1024"), ("1/3", "0.333333333333"), ("7 // 2 + 7 % 2", "4"), ("-(3 - 5)", "2"),
        ("sqrt(16) + max(1, 2)", "6"), ("1,000 * 2", "2000"), ("0.1 + 0.2", "0.3"), ("2 * pi", "6.28318530718"),
        ("6 / 3 =", "2"), ("2**100", str(2**100)), ("10 ÷ 4 × 2", "5"),
    ],
)  # fmt: skip
def test_calculator(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9**9**9**9", "10**10000", "1/0", "(-1)**0.5", "__import__('os')", "().__class__", "'a'*9", "True", "x",
        "1 if 1 else 2", "[1]", "max()", "sqrt(-1)", "f(1)", "1+", "", "1" * 501, "(" * 400, "1e308*10", "exp(1000)",
        "round(1, n=2)", "2 << 9", "round(5, -10**9)",
    ],
)  # fmt: skip
def test_the_calculator_refuses(expression):
    started = time.monotonic()
    try:
        assert calculator(expression) == "inf"
    except ValueError as error:
        assert len(str(error)) < 100
    assert time.monotonic() - started < 5


def test_python():
    python = PythonTool({"wall_s": 2.0})
    assert python("print(2 + 2)\n") == "4"
    assert python(" x = 3\n x * 2") == "6" and python("print(1)\nNone") == "1"
    assert python("```python\nsum(range(10))\n```") == "45"
    assert python("print('a')\n1 / 0") == "a\nerror: ZeroDivisionError: division by zero"
    assert python("import os\nos.fork()") == "error: PermissionError: [Errno 1] Operation not permitted"
    assert python("open('/etc/passwd').read()").startswith("error: ")
    assert python("while True: pass") == "error: the program took too long"
    assert python("1 +").startswith("error: SyntaxError")
