"""Task and model of an episode: what an agent's function gets, and what may become of its result."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from rlhpc.language.agents.runner import task as runner_task
from rlhpc.language.agents.runner.task import AgentTask, Model, ModelError, check_outcome, run_agent

TICKET = {
    "base_url": "http://127.0.0.1:9/v1", "api_key": "secret-a", "process_key": "secret-p", "session_id": "secret-s",
    "model": "policy", "looks": True, "socket": "/nowhere", "task": {"id": 3, "question": "q", "answer": "84", "seed": 5},
}  # fmt: skip


def outcome(result: Any) -> dict[str, Any]:
    return run_agent(lambda task, model: result, TICKET)


def test_an_agent_gets_its_task_and_its_model() -> None:
    seen: list[Any] = []
    run_agent(lambda task, model: seen.extend([task, model]), TICKET)
    task, model = seen
    assert isinstance(task, AgentTask) and (task.id, task.answer, task.seed, task.meta) == (3, "84", 5, {})
    assert (model.name, model.api_key, model.session_id) == ("policy", "secret-a", "secret-s")
    assert model.reads_images and model.looks, "also under the former name"
    with pytest.raises(AttributeError, match="nosuch"):
        _ = model.nosuch


def test_results_become_outcomes() -> None:
    assert outcome(None) == {} and outcome(True) == {"reward": 1.0}

    async def later() -> float:
        return 0.5

    assert outcome(later()) == {"reward": 0.5}
    assert outcome({"reward": 1, "steps": 2, "response": 84, "none": None}) == {
        "reward": 1.0,
        "metrics": {"steps": 2.0},
        "response": "84",
    }
    assert outcome({"turn_rewards": [1, 2]}) == {"turn_rewards": [1.0, 2.0], "reward": 3.0}
    assert outcome({"rewards": {"a": 1}, "later": 0}) == {"rewards": {"a": 1.0}, "later": False}
    assert outcome({"later": ("x",)}) == {"later": ["x"]}
    for result, message in (("text", "returned a str"), ({"later": True, "reward": 1}, "leave one out")):
        with pytest.raises(TypeError, match=message):
            outcome(result)


def test_outcomes_of_another_form_are_refused() -> None:
    for good in ({}, {"reward": 1.0, "metrics": {"a": 2}, "later": ["x"], "left": 1}, {"later": True}):
        assert check_outcome(good) == good
    for bad in (
        [], {"nosuch": 1}, {"reward": True}, {"reward": "1"}, {"rewards": {"a": "b"}}, {"turn_rewards": [1, None]},
        {"later": [1]}, {"error": 3}, {"cut": 1}, {"reward": 1 << 2000},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="its outcome"):
            check_outcome(bad)


def test_keys_and_reference_answers_stay_inside() -> None:
    environment = runner_task.environment_of(TICKET)
    assert environment["OPENAI_BASE_URL"] == TICKET["base_url"]
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9", "its client adds /v1"
    assert runner_task.redact("a secret-a b secret-s", TICKET) == "a KEY b KEY"
    assert runner_task.without_reference({"id": 1, "answer": "84", "meta": {}}) == {"id": 1}
    try:
        raise ValueError("no such city")
    except ValueError as error:
        assert runner_task.describe(error).startswith("ValueError: no such city (test_task.py, line ")


@pytest.fixture
def served() -> Iterator[tuple[str, list[Any]]]:
    """A model that answers what the last message asks for."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers["Authorization"], body))
            status, content = body["messages"][-1]["content"]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()
    server.server_close()


def test_a_model_is_asked_and_says_why_it_refuses(served: tuple[str, list[Any]]) -> None:
    url, requests = served
    model = Model(url, "key", "policy")
    reply = json.dumps({"id": "c1", "choices": [{"message": {"role": "assistant", "content": "84"}}]})
    assert model.chat([{"role": "user", "content": [200, reply]}], [{"t": 1}], max_tokens=5)["content"] == "84"
    assert model.ids == ["c1"]
    path, authorization, body = requests[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer key")
    assert body["tools"] == [{"t": 1}] and body["max_tokens"] == 5
    full = json.dumps({"error": {"message": "full", "code": "context_length_exceeded"}})
    for status, content, code in ((400, full, "context_length_exceeded"), (502, "<html>", None)):
        with pytest.raises(ModelError) as refused:
            model.chat([{"role": "user", "content": [status, content]}])
        assert (refused.value.status, refused.value.code) == (status, code)
