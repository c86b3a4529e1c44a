"""Tools for the model's responses: arithmetic, and Python in a sandbox; and the environment `tools`, which gives them, and
search by a retrieval server, for problems of any source.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import operator
import re
import textwrap
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.language.envs.base import EnvResponse, Message, Step, Task, ToolEnvironment, tool
from rlhpc.language.sandbox.python import Sandbox
from rlhpc.runtime.errors import ConfigError, RlhpcError

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


def _round(number: Any, num_digits: int = 0) -> Any:
    """Rounds a value. The digits are limited, because the run time of `round` grows with them."""
    if abs(num_digits) > _MAX_BITS:
        raise ValueError("the value is rounded to too many digits")
    return round(number, num_digits) if num_digits else round(number)


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
        result_number = _evaluate(ast.parse(python_expression, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the value is too large") from None
    if isinstance(result_number, float) and result_number.is_integer() and abs(result_number) < 1e15:
        return str(int(result_number))
    return f"{result_number:.12g}" if isinstance(result_number, float) else str(result_number)


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


def _check_size(result_value: Any) -> Any:
    if isinstance(result_value, complex):
        raise ValueError("the value is no real number")
    if isinstance(result_value, int) and result_value.bit_length() > _MAX_BITS:
        raise ValueError("the value is too large")
    return result_value


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
        printed = sandbox_result.stdout.strip() + "\n" if sandbox_result.stdout.strip() else ""
        reason = {"timeout": "the program took too long", "output": "the program wrote too much"}
        return (
            printed + "error: " + (reason.get(sandbox_result.status) or sandbox_result.error or "the program was ended")
        )


def _print_last_value(program_source: str) -> str:
    try:
        body = ast.parse(program_source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program_source  # the run of the program reports the error
    last_statement = body[-1] if body else None
    if not isinstance(last_statement, ast.Expr):
        return program_source
    print_statements = ast.parse("_value = 0\nif _value is not None:\n    print(_value)").body
    assert isinstance(print_statements[0], ast.Assign)
    print_statements[0].value = last_statement.value
    return ast.unparse(ast.fix_missing_locations(ast.Module([*body[:-1], *print_statements], [])))


#: Pause in seconds before a request is repeated; it doubles with each attempt.
_RETRY_S = 0.2


class ProblemTools(ToolEnvironment):
    """Problems of `data.train` with tools. A reply without a tool call is the answer, which `reward.terms` score.

    Args:
        tools: Names of the tools: `python`, `calculator`, `search`.
        search_url: URL of the retrieval server, to which a search posts `{"queries": [text], "topk": results}`. Its reply is
            `{"result": [[{"contents": text}, …]]}`, in the form of Search-R1's server.
        results: Number of texts that a search returns.
        timeout_s: Maximum time in seconds of an attempt to search.
        retries: Maximum number of further attempts.
        max_characters: Maximum length of a tool's result.

    Raises:
        ConfigError: A tool is unknown, or `search` lacks its URL.
    """

    def __init__(
        self,
        tools: Sequence[str] = ("python",),
        search_url: str | None = None,
        results: int = 3,
        timeout_s: float = 30.0,
        retries: int = 3,
        max_characters: int = 4000,
    ) -> None:
        super().__init__()
        unknown_names = [name for name in tools if name not in self._methods]
        if unknown_names or not tools:
            raise ConfigError(
                f"agent.kwargs.tools is {list(tools)}; allowed: one or more of {', '.join(sorted(self._methods))}"
            )
        if "search" in tools and not str(search_url).startswith(("http://", "https://")):
            raise ConfigError(
                f"agent.kwargs.search_url is {search_url!r}; the tool search needs the URL of a retrieval server, such as "
                "http://127.0.0.1:8000/retrieve"
            )
        self._methods = {name: self._methods[name] for name in tools}
        self.tools = [schema for schema in self.tools if schema["function"]["name"] in tools]
        self._search_url, self._results, self._max_characters = search_url or "", results, max_characters
        self._timeout_s, self._retries = timeout_s, retries
        self._num_calls = 0
        self._search_error: Exception | None = None

    def reset(self, task: Task) -> EnvResponse:
        """Starts the episode; the observation is the problem."""
        return None

    @tool
    def python(self, code: str) -> str:
        """Runs a Python program and returns its output, and the value of its last line."""
        return self._cut(_find_python_tool()(code))

    @tool
    def calculator(self, expression: str) -> str:
        """Evaluates an arithmetic expression, such as (3 + 4) * 12."""
        return self._cut(calculator(expression))

    @tool
    def search(self, query: str) -> str:
        """Returns the texts that fit a query best."""
        body = json.dumps({"queries": [query], "topk": self._results, "return_scores": False}).encode()
        result_texts = [_contents(row) for row in self._post(body)["result"][0][: self._results]]
        return self._cut(
            "\n\n".join(f"[{result_number}] {result_text}" for result_number, result_text in enumerate(result_texts, 1))
            or "nothing found"
        )

    def answer(self, text: str) -> EnvResponse:
        """Ends the episode; `reward.terms` score the answer."""
        return Step(done=True, metrics={"tool_calls": float(self._num_calls)})

    def step(self, reply: Message) -> EnvResponse:
        """Runs the tool calls of a reply, or ends the episode.

        Raises:
            RlhpcError: The retrieval server does not answer; the episode is then left out of training.
        """
        self._num_calls += len(reply.get("tool_calls") or ())
        response = super().step(reply)
        if self._search_error is not None:
            raise RlhpcError(f"agent.kwargs.search_url ({self._search_url}) does not answer: {self._search_error}")
        return response

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._max_characters else text[: self._max_characters] + "…"

    def _post(self, body: bytes) -> dict[str, Any]:
        """Posts a query and returns the reply; repeats attempts that fail."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._search_url, body, headers, method="POST")
        for num_retries_left in range(self._retries, -1, -1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                    reply_content: dict[str, Any] = json.loads(reply.read())
                    return reply_content
            except (OSError, ValueError) as error:  # no connection, a status such as 503, or no JSON
                if not num_retries_left:
                    self._search_error = error
                    raise
            time.sleep(_RETRY_S * 2 ** (self._retries - num_retries_left))
        raise AssertionError("unreachable")


@functools.cache
def _find_python_tool() -> PythonTool:
    """Returns the sandbox of all episodes of this process."""
    return PythonTool()


def _contents(row: Any) -> str:
    """Returns the text of a result: a text, or a mapping with `contents`, possibly in `document`."""
    if isinstance(row, dict):
        return str(row.get("document", row).get("contents", "")) if "contents" not in row else str(row["contents"])
    return str(row)
