"""Tools of the package: calculator and Python."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import step_of
from rlhpc.language.envs.registry import find_environment
from rlhpc.language.envs.tools import ProblemTools, PythonTool, calculator
from rlhpc.runtime.errors import ConfigError, RlhpcError
from tests.unit.language.envs.playing import begun, said


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


PROBLEM = Prompt(0, ({"role": "user", "content": "What is 12 * 7?"},), "84")


class _Retrieval(BaseHTTPRequestHandler):
    """Server of texts; of its first requests, `refused` get 503."""

    refused = 0
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).refused:
            type(self).refused -= 1
            self.send_error(503)
            return
        type(self).asked.append(body)
        rows = [
            {"contents": "Kob lives in Lum.", "url": "a"},
            {"document": {"contents": "Lum is far."}},
            {"contents": "x"},
        ]
        reply = json.dumps({"result": [rows]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Retrieval.refused, _Retrieval.asked = 0, []
    server = HTTPServer(("127.0.0.1", 0), _Retrieval)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


def call(environment: ProblemTools, name: str, **arguments: Any) -> str:
    calls = [{"id": "call_1", "function": {"name": name, "arguments": json.dumps(arguments)}}]
    step = step_of(environment.step({"content": "", "tool_calls": calls}))
    assert isinstance(step.observation, list)
    return str(step.observation[0]["content"])


def test_only_the_named_tools_are_there_and_an_answer_ends_the_episode() -> None:
    player = begun(ProblemTools(["calculator"]), PROBLEM)
    assert [schema["function"]["name"] for schema in player.tools] == ["calculator"]
    assert call(player, "calculator", expression="12 * 7") == "84"
    assert "there is no tool python" in call(player, "python", code="1")
    last = said(player, "The answer is 84.")
    assert (last.done, last.reward, last.metrics) == (True, 0.0, {"tool_calls": 2.0})


def test_python_runs_and_a_mistake_is_read() -> None:
    player = ProblemTools(max_characters=5)
    assert call(player, "python", code="x = 12\nx * 7") == "84"
    assert call(player, "python", code="print('a' * 50)") == "aaaaa…"
    assert "ZeroDivisionError" in call(ProblemTools(), "python", code="1 / 0")


def test_a_search_returns_the_servers_texts_also_after_a_refusal(url: str) -> None:
    _Retrieval.refused = 1
    player = ProblemTools(["search"], search_url=url, results=2)
    assert call(player, "search", query="home of kob") == "[1] Kob lives in Lum.\n\n[2] Lum is far."
    assert _Retrieval.asked == [{"queries": ["home of kob"], "topk": 2, "return_scores": False}]


def test_an_episode_without_its_search_server_is_left_out(url: str) -> None:
    """The model does not learn from a server that is down: the environment raises."""
    _Retrieval.refused = 5
    player = ProblemTools(["search"], search_url=url, retries=1)
    with pytest.raises(RlhpcError, match="does not answer"):
        call(player, "search", query="home of kob")


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"tools": ["browser"]}, "allowed: one or more of calculator, python, search"),
        ({"tools": []}, "allowed"),
        ({"tools": ["search"]}, "search_url"),
        ({"tools": ["search"], "search_url": "127.0.0.1:8000"}, "search_url"),
    ],
)
def test_mistakes_are_named(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_environment("tools", kwargs)(**kwargs)
