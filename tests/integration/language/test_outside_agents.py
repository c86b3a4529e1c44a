"""Agents outside: programs in processes of their own, whose episodes become samples; what is left of those that go wrong."""

from __future__ import annotations

import ast
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import QUESTION, Scripted, chat_model, chat_tokenizer, episodes_of, product, run_all

from rlhpc.config.typed import default_section
from rlhpc.language.agents import agent_processes
from rlhpc.language.agents.episodes import sample_of, tokens_of
from rlhpc.language.config.engines import GrpoRolloutConfig as RolloutConfig
from rlhpc.language.config.training import GrpoActorConfig as ActorConfig
from rlhpc.language.engines import make_rollout
from rlhpc.language.rollout.sample_group import build_sample_group
from rlhpc.runtime.errors import ConfigError
from tests.sandboxes import SANDBOXES


@pytest.fixture(autouse=True)
def found_by_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).resolve().parents[3])])
    )


def test_an_agent_with_tools_in_a_process_of_its_own() -> None:
    engine = Scripted(product)
    with episodes_of(engine, "outside_agents:own_loop") as generation:
        episodes = run_all(generation, 6)
    assert generation.unfinished() == 0
    for episode in episodes:
        (sample,) = episode.samples
        assert episode.outcome.reward == 1.0 and episode.outcome.metrics["messages"] == 4.0
        assert sample.turns == 2 and tokens_of(episode) == sum(sample.loss_mask)
        text = chat_tokenizer().decode(sample.token_ids)
        assert text.count("<tool_response>\n84\n</tool_response>") == 1
        judged = sample_of(QUESTION, episode, chat_tokenizer(), has_finished=True)
        assert judged.response == "The product is  84 ,\n I think." and judged.meta["agent"]["reward"] == 1.0
    # The same seeds draw the same, whichever episode is the first to ask.
    with episodes_of(Scripted(product), "outside_agents:own_loop", processes=1) as generation:
        again = run_all(generation, 6)
    assert [e.samples[0].token_ids for e in again] == [e.samples[0].token_ids for e in episodes]


def test_a_command(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import http.client, json, os, sys, urllib.parse\n"
        "task = json.loads(os.environ['RLHPC_TASK'])\n"
        "assert 'answer' not in task and sys.argv[1] == task['question']\n"
        "url = urllib.parse.urlsplit(os.environ['OPENAI_BASE_URL'])\n"
        "connection = http.client.HTTPConnection(url.hostname, url.port)\n"
        "body = json.dumps({'model': 'policy', 'messages': task['messages']})\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "connection.request('POST', url.path + '/chat/completions', body, head)\n"
        "print('it said:', json.load(connection.getresponse())['choices'][0]['message']['content'])\n"
        "print('not judged', file=sys.stderr)\n"
        "sys.exit(3 if task['seed'] == 2 else 0)\n"
    )
    with episodes_of(Scripted(lambda prompt: "84"), command=(sys.executable, str(script), "{question}")) as generation:
        first, second, third = run_all(generation, 3)
    assert first.outcome.response == second.outcome.response == "it said: 84"
    assert first.outcome.reward is None and not first.failed
    assert third.failed and "status 3" in third.outcome.error and "not judged" in third.outcome.error


@pytest.mark.long
@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_a_sandbox_without_a_network_reaches_the_model_and_nothing_else(sandbox: str, tmp_path: Path) -> None:
    """With a client that knows of neither."""
    script = tmp_path / "agent.py"
    script.write_text(
        "import http.client, json, os, socket, sys, urllib.parse\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)\n"
        "    print('there is a network')\n"
        "except OSError:\n"
        "    pass\n"
        "url = urllib.parse.urlsplit(os.environ['OPENAI_BASE_URL'])\n"
        "messages = json.loads(os.environ['RLHPC_TASK'])['messages']\n"
        "for turn in range(2):\n"
        "    connection = http.client.HTTPConnection(url.hostname, url.port)\n"
        "    head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    connection.request('POST', url.path + '/chat/completions', json.dumps({'messages': messages}), head)\n"
        "    message = json.load(connection.getresponse())['choices'][0]['message']\n"
        "    messages += [message, {'role': 'user', 'content': 'and?'}]\n"
        "open('own', 'w').close()\n"
        "writable = os.access(os.path.dirname(sys.argv[0]), os.W_OK)\n"
        "pids = [name for name in os.listdir('/proc') if name.isdigit()]\n"
        "print(message['content'], writable, len(pids) < 20)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        command = (sys.executable, str(script), str(elsewhere.getsockname()[1]))
        with episodes_of(Scripted(lambda prompt: "84"), command=command, sandbox=sandbox) as generation:
            (episode,) = run_all(generation, 1)
    assert episode.outcome.response == f"84 {sandbox == 'unshare'} True", episode.outcome.error
    assert len(episode.samples) == 1 and episode.turns == 2
    assert not list(Path(tempfile.gettempdir()).glob("rlhpc-episode-*/own"))


def below(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.parametrize("what", ["hang", "die", "raise", "fork", "flood", "storm", "late", "pay"])
def test_of_an_agent_that_goes_wrong_only_its_episode_is_lost(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, before = Scripted(lambda prompt: "84"), {p.pid for p in below(os.getpid())}
    limit = 2.0 if what in ("hang", "flood", "storm") else 60.0
    with episodes_of(engine, "outside_agents:chaos", timeout_s=limit, what=what, notes=str(tmp_path)) as generation:
        episodes = run_all(generation, 4)
        deadline = time.monotonic() + 5
        # What runs the agents is there; nothing of any episode is.
        while len(left := [p for p in below(os.getpid()) if p.pid not in before]) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(left) == 1, left
        for note in tmp_path.glob("*.pid"):
            assert not psutil.pid_exists(int(note.read_text()))
        asked = len(engine.requests)
        time.sleep(0.2)
        assert len(engine.requests) == asked, "nobody asks any more"
    assert [episode.failed for episode in episodes] == [True, False, True, False]
    assert [episode.outcome.reward for episode in episodes] == [None, 1.0, None, 1.0]
    wanted = {
        "hang": "agent.timeout_s (2 s)", "flood": "agent.timeout_s (2 s)", "storm": "agent.timeout_s (2 s)", "die": "signal 9",
        "raise": "ValueError: no, with KEY", "fork": "it has started something", "late": "it goes on",
        "pay": "ModelError: 404",
    }  # fmt: skip
    assert wanted[what] in episodes[0].outcome.error
    assert "rk-" not in caplog.text, "no key is in a log"
    assert [p for p in below(os.getpid()) if p.pid not in before] == []


def test_what_runs_agents_wants_no_more_of_an_interpreter_than_it_says() -> None:
    for name in (
        "runner/main.py",
        "runner/task.py",
        "runner/mcp_client.py",
        "runner/frameworks.py",
        "../policy_text.py",
    ):
        tree = ast.parse((Path(agent_processes.__file__).parent / name).read_text(), feature_version=(3, 8))
        roots = {
            alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        roots |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert roots <= sys.stdlib_module_names | (
            {"verifiers", "openenv"} if name == "runner/frameworks.py" else set()
        )


@pytest.mark.chaos
def test_what_runs_agents_is_started_again_when_it_is_killed() -> None:
    def kill() -> None:
        if not killed and len(engine.requests) > 2:
            own = [p for p in below(os.getpid()) if p.pid not in before]
            killed.append(next(p for p in own if p.ppid() == os.getpid()))
            killed[0].kill()

    before, killed, engine = {p.pid for p in below(os.getpid())}, list[psutil.Process](), Scripted(product, delay=20)
    with episodes_of(engine, "outside_agents:own_loop", processes=2) as generation:
        episodes = run_all(generation, 6, between=kill)
        assert killed and not all(p.pid in before for p in below(os.getpid()))
    failed = [episode for episode in episodes if episode.failed]
    assert len(failed) == 2 and all("ended with status -9" in episode.outcome.error for episode in failed)
    deadline = time.monotonic() + 5
    while (left := [p for p in below(os.getpid()) if p.pid not in before]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_an_agent_that_cannot_be_imported_is_refused() -> None:
    for target, said in (("outside_agents:nothing", "nothing"), ("no_such_module:solve", "No module"),
                         ("outside_agents:json", "no function")):  # fmt: skip
        with pytest.raises(ConfigError, match=said), episodes_of(Scripted(product), target):
            pass
    with pytest.raises(ConfigError, match=r"agent\.python"), episodes_of(Scripted(product), "x:y", python="/nowhere"):
        pass


@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.long)])
def test_log_probs_are_those_of_each_tokens_own_version_over_an_update_in_flight(backend: str, tmp_path: Path) -> None:
    """And the text of every later turn would be other tokens, were it encoded again."""
    need_extra("vllm" if backend == "vllm" else "llm")
    model = chat_model(tmp_path / "model")
    options = RolloutConfig(rollout_backend=backend, max_batch_size=16, max_model_len=1024, dtype="float32")
    sections = {"rollout": OmegaConf.structured(options), "actor": default_section(ActorConfig)}
    engine = make_rollout(OmegaConf.create(sections), model_path=str(tmp_path / "model"), device="cpu", seed=0)
    noise = torch.Generator().manual_seed(1)
    new = {
        name: value + 0.02 * torch.randn(value.shape, generator=noise)
        for name, value in model.state_dict().items()
    }  # fmt: skip
    steps = 0

    def update() -> None:
        nonlocal steps
        steps += 1
        if steps > 40 and engine.version == 0 and engine.unfinished() >= 4:
            engine.update_weights(1, new.items())

    try:
        with episodes_of(engine, "outside_agents:three_turns", processes=8) as generation:
            episodes = run_all(generation, 8, most=60, between=update)
    finally:
        engine.close()
    versions = {0: model, 1: type(model)(model.config).float().eval()}
    versions[1].load_state_dict(new)
    worst, mixed, drifting, later = {0: 0.0, 1: 0.0}, 0, 0, 0
    tokenizer = chat_tokenizer()
    for episode in episodes:
        (sample,) = episode.samples
        assert sample.turns == 3
        ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
        begin = len(sample.prompt_ids)
        with torch.inference_mode():
            said = {v: m(ids).logits[0, begin - 1 : -1].log_softmax(-1) for v, m in versions.items()}
        wrote = [(at, v) for at, (v, m) in enumerate(zip(sample.versions, sample.loss_mask, strict=True)) if m]
        for at, version in wrote:
            wanted = said[version][at, sample.token_ids[at]].item()
            worst[version] = max(worst[version], abs(wanted - sample.logprobs[at]))
        mixed += len({v for _, v in wrote}) > 1
        for turn in (1, 2):
            end = sample.turn_ids.index(turn)
            prompt = [*sample.prompt_ids, *sample.token_ids[:end]]
            drifting += tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) != prompt
            later += 1
    assert mixed, "episodes lived through the update"
    assert max(worst.values()) < (1e-5 if backend == "hf" else 1e-4)
    assert drifting == later


def test_an_episode_of_several_samples_is_one_to_whoever_compares() -> None:
    engine = Scripted(product)
    with episodes_of(engine, "outside_agents:branching") as generation:
        episodes = run_all(generation, 3)
    assert [len(episode.samples) for episode in episodes] == [2, 2, 2]
    columns: list[Any] = [{} for episode in episodes for _ in episode.samples]
    group = build_sample_group(
        3, 5, {0: episodes[0], 2: episodes[2]}, torch.tensor([1.0, 2.0]).numpy(), columns[:4], True, 4
    )
    assert group.batch.episode.tolist() == [20, 20, 22, 22] and group.batch.reward.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert len(group.batch.by_episode()) == 2
    assert int(group.batch.mask.sum()) == tokens_of(episodes[0]) + tokens_of(episodes[2])
