"""Agents of frameworks: conversations with tool servers, and environments of verifiers and OpenEnv with their tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlhpc.language import policy_text
from rlhpc.language.agents.runner import mcp_client as tool_servers
from rlhpc.language.agents.runner.frameworks import agent_of, pick_task
from tests.unit.language.agents.runner.tool_programs import command


def test_a_problem_beyond_a_taskset_is_refused() -> None:
    tasks = ["a", "b", "c"]
    assert [pick_task(tasks, SimpleNamespace(id=n, meta={})) for n in range(3)] == tasks
    assert pick_task(tasks, SimpleNamespace(id=70, meta={"idx": 1})) == "b"
    for number in (3, 70, -1):
        with pytest.raises(ValueError, match=rf"has tasks 0 to 2, and the source asks for {number}"):
            pick_task(tasks, SimpleNamespace(id=number, meta={}))


class ContextFull(Exception):
    code = "context_length_exceeded"


class Model:
    """A model whose replies are given; each is a text, calls of tools, or an error."""

    reads_images = False
    base_url, name = "http://model", "policy"

    def __init__(self, *replies: Any) -> None:
        self.replies, self.heard = list(replies), list[list[Any]]()
        self.tools: Any = None

    def chat(self, messages: list[Any], tools: Any = None) -> dict[str, Any]:
        self.heard.append(list(messages))
        self.tools = tools
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, str):
            return {"role": "assistant", "content": reply}
        calls = [
            {"id": str(n), "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(reply)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}


def tool_agent(*tools: tuple[str, ...]) -> Any:
    servers = [{"command": command(*names), "url": None} for names in tools]
    return agent_of("mcp", {"servers": servers}, {"servers": tool_servers, "text": policy_text})


TASK = SimpleNamespace(messages=[{"role": "user", "content": "2+2?"}], seed=(1 << 31) + 5, id=1, meta={})


def test_two_tools_of_one_name_are_refused() -> None:
    servers = [{"command": command(*tools), "url": None} for tools in (("f", "g"), ("h", "f"))]
    helpers = {"servers": tool_servers, "text": policy_text}
    solve = agent_of("mcp", {"servers": servers}, helpers)
    model: Any = type("Model", (), {"reads_images": False})()
    with pytest.raises(ValueError, match=r"two of agent\.servers have a tool 'f'"):
        solve(None, model)


def test_a_conversation_goes_on_until_a_reply_calls_no_tool() -> None:
    model = Model([("f", '{"a": 1}'), ("h", "{}")], [("none", "{}"), ("f", "[1]"), ("f", "{")], "four")
    outcome = tool_agent(("f", "g"), ("h",))(TASK, model)
    assert outcome == {"response": "four", "tool_calls": 5, "tool_errors": 3}
    assert [tool["function"]["name"] for tool in model.tools] == ["f", "g", "h"]
    results = [message["content"] for message in model.heard[-1] if message["role"] == "tool"]
    assert results[:2] == ["{'a': 1}", "{}"]
    assert results[2] == "error: there is no tool 'none'; there are: f, g, h"
    assert results[3] == "error: arguments must be an object" and results[4].startswith("error: ")


def test_a_full_context_ends_the_conversation_and_another_error_the_episode() -> None:
    agent = tool_agent(("f",))
    assert agent(TASK, Model([("f", "{}")], ContextFull())) == {"response": "", "tool_calls": 1, "tool_errors": 0}
    with pytest.raises(RuntimeError, match="gone"):
        agent(TASK, Model(RuntimeError("gone")))


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """OpenEnv's client with an environment that counts to 3 and rewards each step but the first."""
    calls: list[Any] = []

    class Counting:
        def __init__(self, base_url: str) -> None:
            calls.append(base_url)
            self.count = 0

        @contextlib.contextmanager
        def sync(self) -> Iterator[Counting]:
            yield self

        def reset(self, **options: Any) -> Any:
            calls.append(options)
            return self.transition(None)

        def step(self, action: Any) -> Any:
            calls.append(action)
            self.count += 1
            return self.transition(None if self.count == 1 else 0.5)

        def transition(self, reward: float | None) -> Any:
            observation = {"text": f"at {self.count}", "other": 1}
            return SimpleNamespace(observation=observation, done=self.count == 3, reward=reward)

    client = ModuleType("openenv.core.generic_client")
    client.GenericEnvClient = Counting  # type: ignore[attr-defined]
    for name, module in {"openenv": ModuleType("openenv"), "openenv.core": ModuleType("openenv.core")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, client.__name__, client)
    return calls


def test_the_model_acts_in_an_environment_of_openenv_until_it_is_done(openenv: list[Any]) -> None:
    options = {"base_url": "http://env", "action": "code", "observation": "text", "reset": {"level": 2}}
    model = Model("a", "b", "c")
    outcome = agent_of("openenv", options, {})(TASK, model)
    assert outcome == {"reward": 1.0, "steps": 4, "done": 1.0}
    assert openenv == ["http://env", {"level": 2, "seed": 5}, {"code": "a"}, {"code": "b"}, {"code": "c"}]
    assert [message["content"] for message in model.heard[-1]] == ["2+2?", "at 0", "a", "at 1", "b", "at 2"]


def test_an_observation_is_shown_as_json_and_a_full_context_leaves_the_episode_unfinished(openenv: list[Any]) -> None:
    model = Model("a", ContextFull())
    outcome = agent_of("openenv", {"base_url": "http://env"}, {})(TASK, model)
    assert outcome["done"] == 0.0 and outcome["reward"] == 0.0
    assert json.loads(model.heard[-1][-1]["content"]) == {"text": "at 1", "other": 1}


@pytest.fixture
def verifiers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Verifiers with a taskset of two tasks; `episode` is what it makes of one."""
    state: dict[str, Any] = {"tasks": ["zero", "one"], "picked": []}

    class Environment:
        @property
        def taskset(self) -> Any:
            return iter(state["tasks"])

        @contextlib.asynccontextmanager
        async def serving(self) -> Any:
            yield

        async def run_episode(self, task: str, context: Any) -> Any:
            state["picked"].append((task, context.model, context.client.base_url))
            return state["episode"]

    package: Any = ModuleType("verifiers.v1")
    package.load_environment, package.resolve_env_config = lambda config: Environment(), lambda options: options
    package.ModelContext = package.SamplingConfig = lambda **fields: SimpleNamespace(**fields)
    client: Any = ModuleType("verifiers.v1.configs.client")
    client.EvalClientConfig = lambda **fields: SimpleNamespace(**fields)
    parents = ("verifiers", "verifiers.v1.configs")
    for name, module in {**{name: ModuleType(name) for name in parents}, package.__name__: package}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, client.__name__, client)
    sys.modules["verifiers"].v1 = package  # type: ignore[attr-defined]
    return state


def trace(reward: float, reply: str, trainable: bool = True, **metrics: float) -> Any:
    agent = SimpleNamespace(trainable=trainable)
    return SimpleNamespace(agent=agent, reward=reward, last_reply=reply, metrics=metrics, errors=[])


def test_the_outcome_of_an_episode_of_verifiers_is_that_of_its_trained_agents(verifiers: dict[str, Any]) -> None:
    traces = [
        trace(1.0, "a", correct=1.0),
        trace(0.0, "b", correct=0.0),
        trace(9.0, "user", trainable=False, correct=9.0),
    ]
    verifiers["episode"] = SimpleNamespace(ok=True, traces=traces, errors=[])
    outcome = asyncio.run(agent_of("verifiers", {}, {})(TASK, Model()))
    assert outcome == {"reward": 0.5, "response": "b", "correct": 0.5}
    assert verifiers["picked"] == [("one", "policy", "http://model")]


def test_an_episode_of_verifiers_that_failed_is_an_error(verifiers: dict[str, Any]) -> None:
    error = SimpleNamespace(type="Timeout", message="too slow")
    failed = trace(0.0, "")
    failed.errors = [error]
    verifiers["episode"] = SimpleNamespace(ok=False, traces=[failed], errors=[error])
    with pytest.raises(RuntimeError, match="Timeout: too slow; Timeout: too slow"):
        asyncio.run(agent_of("verifiers", {}, {})(TASK, Model()))
    verifiers["tasks"] = []
    with pytest.raises(ValueError, match="has no tasks"):
        agent_of("verifiers", {}, {})


def test_a_missing_package_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(ImportError):
        agent_of("openenv", {"base_url": "x"}, {})
