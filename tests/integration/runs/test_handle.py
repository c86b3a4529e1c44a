"""Runs started from Python, in processes of their own: followed, waited for, interrupted and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import psutil
import pytest
from tiny_run import CONFIG, TINY, wait_until

from rlhpc import ConfigError, DeadlineExceeded, DriverFailed, DriverRejected, UserError, load_config, train
from rlhpc.config.merge import parse_override
from rlhpc.config.yaml_files import scalar_values
from rlhpc.runs.handle import TrainingRun
from tests.extras import need_extra

KEYS = {key: scalar_values(value) for key, value in map(parse_override, TINY)}
LANGUAGE = {
    "defaults": [str(CONFIG.parent / "base" / "grpo.yaml")],
    "runner": {"name": "answers", "max_steps": 2, "logger": {"logger_backends": ["jsonl"]}},
    "data": {
        "train": {"source": "arithmetic", "size": 16, "kwargs": {"digits": 1}},
        "max_prompt_tokens": 16,
        "prompts_per_step": 4,
    },
    "reward": {"terms": [{"name": "exact"}]},
    "algorithm": {"group_size": 2},
    "rollout": {"max_new_tokens": 4, "rollout_backend": "hf"},
    "actor": {
        "global_batch_size": 8,
        "model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 1, "heads": 2}},
    },
}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """What makes the quickstart configuration a run of few and short steps, in a folder of its own."""
    return {**KEYS, "runner.run_dir": tmp_path / "runs"}


@pytest.fixture
def started() -> Iterator[list[TrainingRun]]:
    """Runs that are ended with the test, whatever becomes of it."""
    runs: list[TrainingRun] = []
    yield runs
    for run in runs:
        run.cancel(grace_s=30)


def descendants(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def script_of(tmp_path: Path, keys: dict[str, Any], *lines: str) -> Path:
    """A script without `if __name__ == "__main__"`, in a folder with a module of its own."""
    script = tmp_path / "script.py"
    words = json.dumps({key: str(value) if isinstance(value, Path) else value for key, value in keys.items()})
    head = ("import json, rlhpc", f"run = rlhpc.train({str(CONFIG)!r}, **json.loads({words!r}))")
    script.write_text("\n".join([*head, *lines]) + "\n")
    return script


def test_a_wrong_key_is_refused_at_once_and_leaves_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    for wrong in ({"runner.max_stepz": 5}, {"runner": {"max_stepz": 5}}):
        with pytest.raises(ConfigError, match=r"unknown key runner\.max_stepz; did you mean runner\.max_steps\?"):
            train(CONFIG, **{**keys, **wrong})
    with pytest.raises(ConfigError, match=r"runner\.max_steps is of type object"):
        train(CONFIG, **{**keys, "runner.max_steps": object()})
    with pytest.raises(ConfigError, match="did you mean"):
        train({"defaults": [str(CONFIG)], "runer": {}})
    assert list(tmp_path.iterdir()) == []


def test_what_only_the_driver_can_refuse_comes_with_wait_and_leaves_nothing(
    tmp_path: Path, keys: dict[str, Any], started: list[TrainingRun]
) -> None:
    """What files show is refused at once; a simulator in a process of its own, by the driver."""
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        train(CONFIG, **keys, **{"runner.init_from": "/nowhere/at/all"})
    own = {
        "env.train.simulator_python": sys.executable,
        "env.train.simulators": 1,
        "env.train.env_id": "nowhere:Nowhere-v0",
    }
    run = train(CONFIG, **keys, **own)
    started.append(run)
    with pytest.raises(DriverRejected, match="nowhere") as refused:
        run.wait(timeout_s=240)
    assert "rlhpc: error" not in str(refused.value) and "Traceback" not in str(refused.value)
    assert run.state == "failed" and run.done() and run.metrics() == []
    assert list(tmp_path.iterdir()) == []


def test_metrics_while_it_trains_a_deadline_and_an_end_on_request(
    keys: dict[str, Any], started: list[TrainingRun]
) -> None:
    run = train(CONFIG, **{**keys, "runner.max_steps": 100000})
    started.append(run)
    assert run.state == "running" and run.folder == keys["runner.run_dir"] / "quickstart"
    wait_until(lambda: len(run.metrics()) >= 2)
    assert not run.done()
    with pytest.raises(DeadlineExceeded, match="it goes on"):
        run.wait(timeout_s=0.1)
    assert not run.done()
    with pytest.raises(UserError, match="one run, one driver"):
        train(CONFIG, **{**keys, "runner.max_steps": 100000})
    run.cancel()
    assert run.state == "stopped" and run.wait() is run
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert run.checkpoint is not None and run.checkpoint.name == f"global_step_{rows[-1]['step']}"
    with pytest.raises(ConfigError, match="has checkpoints already"):
        train(CONFIG, **{**keys, "runner.max_steps": 100000})


@pytest.mark.long
def test_a_run_goes_on_from_the_configuration_that_was_loaded(keys: dict[str, Any], started: list[TrainingRun]) -> None:
    words = [f"{key}={json.dumps(str(value) if isinstance(value, Path) else value)}" for key, value in keys.items()]
    cfg = load_config(CONFIG, [*words, "runner.max_steps=4"])
    started.append(train(cfg))
    assert started[-1].wait(timeout_s=300).state == "finished"
    assert started[-1].report().is_file()
    started.append(train(cfg, runner={"resume_dir": "auto", "max_steps": 6}))
    rows = started[-1].wait(timeout_s=300).metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert list(pandas.DataFrame(rows)["step"]) == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_the_first_error_of_a_run_is_one_message(keys: dict[str, Any], started: list[TrainingRun]) -> None:
    run = train(CONFIG, **{**keys, "runner.max_steps": 100000})
    started.append(run)
    wait_until(run.metrics)
    record = run.folder / "registry" / "local-0" / "members" / "env-0.json"
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
    with pytest.raises(DriverFailed, match=r"env.*SIGKILL|env.*signal 9") as failed:
        run.wait(timeout_s=240)
    assert "Traceback" not in str(failed.value) and run.state == "failed"


def test_a_script_that_is_interrupted_saves(tmp_path: Path, keys: dict[str, Any]) -> None:
    """As by Ctrl-C while it waits; an event loop is running, as in a notebook."""
    lines = (
        "import asyncio",
        "async def cell():",
        "    run.wait()",
        "asyncio.new_event_loop().run_until_complete(cell())",
    )
    script = script_of(tmp_path, {**keys, "runner.max_steps": 100000}, *lines)
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, script], stderr=stderr, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background of a shell ignore it
        )  # fmt: skip
    metrics = keys["runner.run_dir"] / "quickstart" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 2)
    tree = descendants(process.pid)
    for _ in range(3):  # Python loses one that comes while it finalizes an object
        os.killpg(process.pid, signal.SIGINT)
        end = time.monotonic() + 20
        while "saves and ends" not in errors.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        if "saves and ends" in errors.read_text():
            break
    process.wait(timeout=240)
    said = errors.read_text()
    assert "saves and ends" in said and "KeyboardInterrupt" in said
    assert not [member for member in tree if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    rows = metrics.read_bytes().count(b"\n")
    assert (metrics.parent / "checkpoints" / f"global_step_{rows}" / "COMPLETE").exists()


@pytest.mark.long
@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_run_ends_with_its_program_and_saves(tmp_path: Path, keys: dict[str, Any], how: str) -> None:
    then = "import time; time.sleep(600)" if how == "killed" else ""
    lines = ("while len(run.metrics()) < 2: run.done()", then)
    script = script_of(tmp_path, {**keys, "runner.max_steps": 100000}, *lines)
    process = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
    root = keys["runner.run_dir"] / "quickstart"
    if how == "killed":
        wait_until(lambda: (root / "metrics.jsonl").exists() and len((root / "metrics.jsonl").read_bytes()) > 0)
        process.kill()
    _, said = process.communicate(timeout=240)
    wait_until(lambda: json.loads((root / "status.json").read_text())["state"] == "stopped")
    step = json.loads((root / "status.json").read_text())["step"]
    assert (root / "checkpoints" / f"global_step_{step}" / "COMPLETE").exists()
    assert how == "killed" or "with the program that started it" in said


def test_code_that_a_script_can_import_its_run_can_too(tmp_path: Path, keys: dict[str, Any]) -> None:
    (tmp_path / "worlds.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Mine-v0', entry_point=CartPoleEnv, max_episode_steps=20)\n"
    )
    script = script_of(
        tmp_path,
        {**keys, "runner.max_steps": 2, "env.train.env_id": "worlds:Mine-v0"},
        "print(json.dumps([run.wait().state, len(run.metrics()), run.done()]))",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, cwd="/", check=False)
    assert json.loads(done.stdout or "null") == ["finished", 2, True], done.stderr


@pytest.mark.long
def test_a_language_model_from_a_mapping(tmp_path: Path, started: list[TrainingRun]) -> None:
    need_extra("llm")
    run = train(LANGUAGE, **{"runner.run_dir": tmp_path})
    started.append(run)
    assert [row["step"] for row in run.wait(timeout_s=400).metrics()] == [1, 2]
    assert "train/reward" in run.metrics()[-1] and run.state == "finished"
