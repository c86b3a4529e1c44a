"""Agents that need no code of their own: servers of tools, environments of OpenEnv and verifiers; and services beside them."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.extras import need_extra, needs_python

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import QUESTION, Scripted, chat_tokenizer, episodes_of, product, run_all
from test_agent_clients import CLIENTS, VERIFIERS

from rlhpc.language.agents.runner.mcp_client import ToolServer
from rlhpc.language.agents.runner.shell import Shell
from rlhpc.language.agents.services import Services, fill_addresses
from rlhpc.language.config.agents import ServiceConfig
from rlhpc.runtime.errors import ConfigError
from tests.sandboxes import SANDBOXES

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
TOOLS = [str(CLIENTS), str(HERE / "agent_tools.py")]


@pytest.fixture(autouse=True)
def found_by_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor is anything left of any."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 10
    while left := [p for p in psutil.Process().children(recursive=True) if p.pid not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


#: The picture of `agent_tools`, as a message shows it.
SHOWN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,UE5H"}}


def clumsy(prompt: str) -> str:
    """A model that calls what is not there, then wrongly, then answers."""
    asked = prompt.count("<tool_response>")
    calls = ['{"name": "divide", "arguments": {}}', '{"name": "multiply", "arguments": {"a": -1, "b": 2}}']
    return f"<tool_call>{calls[asked]}</tool_call>" if asked < 2 else "I cannot."


@needs_python("agents")
def test_servers_of_tools_over_both_transports(tmp_path: Path) -> None:
    service = ServiceConfig("tools", [*TOOLS, "streamable-http"])
    services = Services([service], tmp_path)
    try:
        url = fill_addresses("http://{tools}/mcp", services.addresses)
        for section in ({"command": [*TOOLS, "stdio"], "url": None}, {"command": [], "url": url}):
            options = {"servers": [section]}
            with episodes_of(Scripted(product), kind="mcp", options=options) as generation:
                (episode,) = run_all(generation, 1)
            assert not episode.failed, episode.outcome.error
            assert episode.outcome.response == "The product is  84 ,\n I think." and episode.outcome.reward is None
            assert episode.outcome.metrics["tool_calls"] == 1 and len(episode.samples) == 1 and episode.turns == 2
            text = chat_tokenizer().decode(episode.samples[0].token_ids)
            assert "<tool_response>\n84\n</tool_response>" in text
            for looks, said in (False, "there:\n[image]"), (True, [{"type": "text", "text": "there:"}, SHOWN]):
                with ToolServer(**section, reads_images=looks) as server:
                    assert server.call("look", {}) == said
        with episodes_of(Scripted(clumsy), kind="mcp", options=options) as generation:
            (episode,) = run_all(generation, 1)
        text = chat_tokenizer().decode(episode.samples[0].token_ids)
        assert "error: there is no tool 'divide'; there are: multiply, look" in text and "a is negative" in text
        assert episode.outcome.metrics["tool_errors"] == 2 and episode.outcome.response == "I cannot."
    finally:
        services.close()


@needs_python("agents")
def test_an_environment_of_openenv(tmp_path: Path) -> None:
    """Actions are what the model writes; the reward is the environment's."""
    services = Services([ServiceConfig("env", [*TOOLS, "environment"], ready="/health")], tmp_path)

    def say(prompt: str) -> str:
        return "it is 84" if "step 1" not in prompt or "step 2" in prompt else "no idea"

    try:
        options = fill_addresses({"base_url": "http://{env}", "observation": "text"}, services.addresses)
        with episodes_of(Scripted(say), kind="openenv", python=CLIENTS, options=options) as generation:
            episodes = run_all(generation, 3)
    finally:
        services.close()
    for episode in episodes:
        assert not episode.failed, episode.outcome.error
        assert episode.outcome.reward == 2.0 and episode.outcome.metrics["done"] == 1.0
        assert len(episode.samples) == 1 and episode.turns == 3
        assert "say 84" in chat_tokenizer().decode(episode.samples[0].prompt_ids)


@needs_python("verifiers")
def test_an_environment_of_verifiers() -> None:
    """Its taskset, its harness, its reward."""
    options: dict[str, Any] = {"taskset": {"id": "verifiers_harness"}, "agent": {"runtime": {"type": "subprocess"}}}
    with episodes_of(Scripted(product), kind="verifiers", python=VERIFIERS, options=options) as generation:
        episodes = run_all(generation, 2, prompt=replace(QUESTION, id=1))
        (beyond,) = run_all(generation, 1)
    assert beyond.failed and f"has tasks 0 to 1, and the source asks for {QUESTION.id}" in str(beyond.outcome.error)
    for episode in episodes:
        assert not episode.failed, episode.outcome.error
        assert episode.outcome.reward == 1.0 and "84" in episode.outcome.response
        assert len(episode.samples) == 1 and episode.turns == 2
    with (
        pytest.raises(ConfigError, match=r"agent\.kind is verifiers, which cannot be imported"),
        episodes_of(Scripted(product), kind="verifiers", options=options),
    ):
        pass


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_shell_stays(sandbox: str) -> None:
    """Its folder, its variables; what it is not to do; and what goes wrong in it is its command's alone."""
    with Shell(sandbox, timeout_s=2.0) as shell:
        assert shell.run("mkdir -p a && cd a && x=5 && echo 'it''s' > file") == ""
        assert shell.run("pwd; cat file; echo $x") == f"{shell.folder}/a\nits\n5"
        assert "unexpected EOF" in shell.run("echo 'unclosed") and shell.run("echo $x") == "5"
        assert shell.run("false") == "[status 1]"
        assert shell.run('cat; read y; echo "got:$y"') == "got:"
        assert shell.run("exit 3") == "[it ended the shell: the shell was started anew]"
        assert shell.run("echo $x; cat a/file") == "\nits"
        assert shell.run("echo so far; sleep 1000") == "so far\n[it took longer than 2 s: the shell was started anew]"
        flood = shell.run("yes | head -c 10000000; echo the end")
        assert len(flood) < 10_000 and flood.endswith("the end") and "characters" in flood
        assert shell.run("sleep 1000 & echo begun") == "begun"
        assert "OPENAI" not in shell.run("env") and shell.run("test -w /etc && echo yes") == (
            "yes" if sandbox == "unshare" and os.geteuid() == 0 else "[status 1]"
        )
        listening = socket.create_server(("127.0.0.1", 0))
        assert "refused" in shell.run(f"echo > /dev/tcp/127.0.0.1/{listening.getsockname()[1]}") or "unreachable" in (
            shell.run(f"echo > /dev/tcp/127.0.0.1/{listening.getsockname()[1]}")
        )
        listening.close()
    assert not Path(shell.folder).exists()


def test_a_model_with_a_shell() -> None:
    """Each episode has its own; the model reads what it says."""

    def say(prompt: str) -> str:
        asked = prompt.count("<tool_response>")
        commands = ["n=12; mkdir d; cd d; pwd", "echo $((n * 7)); ls .."]
        call = f'{{"name": "shell", "arguments": {{"command": "{commands[min(asked, 1)]}"}}}}'
        return f"<tool_call>{call}</tool_call>" if asked < 2 else "done"

    options = {"servers": [{"command": [], "url": None, "shell": True}]}
    with episodes_of(Scripted(say), kind="mcp", options=options, sandbox="unshare") as generation:
        episodes = run_all(generation, 3)
    for episode in episodes:
        assert not episode.failed, episode.outcome.error
        text = chat_tokenizer().decode(episode.samples[0].token_ids)
        assert "<tool_response>\n84\nd\n</tool_response>" in text and episode.outcome.response == "done"
    with (
        pytest.raises(ConfigError, match=r"agent\.sandbox is bubblewrap, which does not work on"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PATH", "/nowhere")
        with episodes_of(Scripted(say), kind="mcp", options=options, sandbox="bubblewrap"):
            pass
