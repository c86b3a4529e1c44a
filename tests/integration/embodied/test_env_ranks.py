"""Env ranks of runs that play ahead of their actors come and go; no transition counts twice, and no step is made anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlhpc.embodied.data.stored_replay import StoredReplay
from tests import warm

pytestmark = pytest.mark.long

STEPS, SLOTS, DECISIONS = 400, 4, 8
#: An environment that takes its time for as long as there is a file, and that numbers what it shows.
SLOW = """
import itertools
import os
import time

import gymnasium
import numpy as np


EPISODES = itertools.count()


class Counting(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float32)

    def __init__(self, discrete=False):
        space = gymnasium.spaces
        self.action_space = space.Discrete(2) if discrete else space.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.made, self.episode, self.process = 0, next(EPISODES), os.getpid()
        return self.shown(), {}

    def shown(self):
        return np.array([self.episode, self.made, self.process], np.float32)

    def step(self, action):
        try:
            time.sleep(float(open(os.environ["RLHPC_TEST_PAUSE"]).read()))
        except (OSError, ValueError):
            pass
        self.made += 1
        return self.shown(), 1.0, False, self.made == 5, {}


gymnasium.register("Counting-v0", entry_point=Counting)
"""
COMMON = {
    "cluster": {
        "num_nodes": 1, "accelerators_per_node": 0,
        "component_placement": {"actor": "0", "rollout": "0", "env": "0:0-1"},
    },
    "runner": {"name": "run", "max_steps": STEPS, "save_interval": -1, "logger": {"logger_backends": ["jsonl"]}},
    "env": {"train": {"num_envs": SLOTS}, "eval": {"num_envs": 2}},
}  # fmt: skip
SAC = {
    "runner": {"task_type": "off_policy"},
    "algorithm": {
        "rollout_steps": DECISIONS, "max_staleness": 1, "update_to_data": 0.25,
        "replay_buffer": {"size": 100_000, "min_buffer_size": 64},
    },
    "env": {"train": {"env_id": "slow_env:Counting-v0"}, "eval": {"env_id": "slow_env:Counting-v0"}},
    "actor": {"global_batch_size": 16, "model": {"model_type": "sac", "hidden_sizes": [8, 8]}},
}  # fmt: skip
PPO = {
    "runner": {"task_type": "embodied"},
    "algorithm": {"rollout_steps": DECISIONS, "max_staleness": 1, "update_epochs": 1},
    "env": {
        "train": {"env_id": "slow_env:Counting-v0", "kwargs": {"discrete": True}},
        "eval": {"env_id": "slow_env:Counting-v0", "kwargs": {"discrete": True}},
    },
    "actor": {"global_batch_size": 16, "model": {"model_type": "mlp", "hidden_sizes": [8]}},
}  # fmt: skip


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = merged(found[key], value) if isinstance(found.get(key), dict) else value
    return found


class Disturbed:
    """A run that is looked at, and disturbed, while it trains.

    Args:
        folder: Of its own.
        kind: What it is besides `COMMON`.
        overrides: On the command line.
        restarts: How often ranks are started again.
    """

    def __init__(self, folder: Path, kind: dict[str, Any], *overrides: str, restarts: int = 20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.root, self.pause = folder, folder / "run", folder / "pause"
        self.config, self.log = folder / "run.yaml", folder / "said.txt"
        self.config.write_text(yaml.safe_dump(merged(COMMON, kind, {"runner": {"run_dir": str(folder)}})))
        (folder / "slow_env.py").write_text(SLOW)
        self.pause.write_text("0.01")
        self.environment = {
            **os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "RLHPC_TEST_PAUSE": str(self.pause),
            "RLHPC_MAX_RESTARTS": str(restarts),
        }  # fmt: skip
        self.overrides = overrides
        self.start()

    def start(self, *more: str) -> None:
        """Starts its driver; again, after one has ended."""
        command = [sys.executable, "-m", "rlhpc.cli", "train", str(self.config), *self.overrides, *more]
        with self.log.open("w") as log:
            self.process = warm.Popen(command, env=self.environment, cwd=self.folder, stdout=log, stderr=log)

    def said(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 150
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, self.said()
            time.sleep(0.02)

    def rows(self) -> list[dict[str, Any]]:
        try:
            lines = (self.root / "metrics.jsonl").read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self) -> int:
        return len(self.rows())

    def steps_on(self, count: int) -> None:
        """So many more steps are made."""
        after = self.step() + count
        self.until(lambda: self.step() >= after)

    def kill(self, rank: str) -> None:
        registry = self.root / "registry"
        now = registry / (registry / "current").read_text() / "members"
        os.kill(json.loads((now / f"{rank}.json").read_text())["pid"], signal.SIGKILL)

    def join(self, group: str = "env") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rlhpc.cli", "join", str(self.root), "--group", group]
        return warm.Popen(
            command, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def joined(self, rank: int) -> subprocess.Popen[str]:
        """A helper that takes part by now."""
        helper = self.join()
        self.until(lambda: f"env[{rank}] takes part from the next step on" in self.said())
        self.until(lambda: self.brought(rank))
        return helper

    def join_to_act(self, rank: int) -> subprocess.Popen[str]:
        """A rollout rank that acts by now."""
        helper = self.join("rollout")
        self.until(lambda: f"rollout[{rank}] takes part from the next step on" in self.said())
        self.steps_on(3)
        return helper

    def brought(self, rank: int) -> int:
        """Transitions that count, of one that joined."""
        return sum(int(row.get(f"env/joined_transitions_{rank}", 0)) for row in self.rows())

    def stop(self) -> str:
        """Ends it at a step; what it has said."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(120)
        return self.said()

    def replay(self) -> np.ndarray:
        (newest,) = sorted((self.root / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name[12:]))[-1:]
        return StoredReplay(newest).transitions()

    def counts(self) -> None:
        """Every transition that was counted is in the buffer, and none is twice there or belongs to two ranks."""
        rows, held = self.rows(), self.replay()
        assert rows[-1]["rollout/env_steps"] == len(held)
        assert len(np.unique(held["obs"], axis=0)) == len(held), (
            "an episode's number, a decision's, a process's: none twice"
        )
        follows = held["next_obs"] - held["obs"]
        assert (follows[:, 1] == 1).all() and not follows[:, [0, 2]].any(), "and each is followed by its own successor"


def test_a_helper_joins_works_and_leaves_and_another_is_killed(tmp_path: Path) -> None:
    run = Disturbed(tmp_path / "sac", SAC)
    run.until(lambda: run.step() >= 2)
    helper = run.joined(2)
    run.steps_on(4)
    run.pause.write_text("0.05")  # it is in the middle of something when it is told
    run.steps_on(2)
    helper.send_signal(signal.SIGTERM)
    _, err = helper.communicate(timeout=60)
    assert helper.returncode == 0 and "env-2 joins run" in err and "its job is being ended (SIGTERM)" in err, err
    run.pause.write_text("0.01")
    run.until(lambda: "env[2] left (its job is being ended (SIGTERM))" in run.said())
    brought = run.brought(2)
    other = run.joined(3)
    run.kill("env-3")
    other.communicate(timeout=60)
    run.until(lambda: "env[3] ended" in run.said())
    run.steps_on(3)
    status = warm.run(
        [sys.executable, "-m", "rlhpc.cli", "status", str(run.root)],
        env=run.environment,
        capture_output=True,
        text=True,
    )
    assert "env-2" in status.stdout and "env-3" in status.stdout, status.stdout
    said = run.stop()
    assert "start again from" not in said and "goes on without rank 2" not in said, said
    rows = run.rows()
    assert all(row["step"] - 1 - row["rollout/version"] <= 1 for row in rows), "nobody is staler than allowed"
    assert rows[-1]["rollout/env_steps"] == SLOTS * DECISIONS * len(rows), "steps are as large as without them"
    waited = [sum(row[f"time/{phase}_s"] for row in rows) for phase in ("rollout", "sync")]
    assert waited[0] > waited[1], "what is waited for are simulators, which has a run grow"
    shares = {row["env/joined_transitions"] for row in rows if row.get("env/joined_transitions")}
    assert shares and max(shares) < SLOTS * DECISIONS, "all play each step"
    assert run.brought(2) >= brought and run.brought(3)
    run.counts()


RANKS = {"cluster": {"component_placement": {"actor": "0:0-1", "rollout": "0:0-1", "env": "0:0-1"}}}


@pytest.mark.parametrize("kind", [merged(SAC, RANKS), PPO], ids=["sac", "ppo"])
def test_a_lost_env_rank_costs_its_slots_and_takes_part_again(tmp_path: Path, kind: dict[str, Any]) -> None:
    run = Disturbed(tmp_path / "lost", kind)
    run.until(lambda: run.step() >= 3)
    run.kill("env-1")
    run.until(lambda: "env[1] takes part from the next step on" in run.said())
    run.steps_on(3)
    said = run.stop()
    assert "env[1] ended; what it had not delivered is played by others or left out" in said, said
    assert "start again from" not in said and "Traceback" not in said, said
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "no step is made anew"
    assert rows[-1]["env/lost_ranks"] == 1 and rows[-1]["env/lost_steps"] > 0
    taken = np.diff([0, *(row["rollout/env_steps"] for row in rows)])
    assert taken[-1] == SLOTS * DECISIONS and min(taken) == SLOTS * DECISIONS / 2
    assert sum(taken) + rows[-1]["env/lost_steps"] == SLOTS * DECISIONS * len(rows)
    if kind is not PPO:
        run.counts()


def test_rollout_ranks_come_and_go(tmp_path: Path) -> None:
    """One that the run started with is killed, and started again; one joins, acts, and is killed; two others are told to
    leave, which costs nothing: they act in the steps that they were asked for."""
    run = Disturbed(tmp_path / "acting", merged(SAC, RANKS))
    run.until(lambda: run.step() >= 3)
    run.kill("rollout-1")
    run.until(lambda: "rollout[1] takes part from the next step on" in run.said())
    run.steps_on(2)
    helper = run.join_to_act(2)
    run.kill("rollout-2")
    helper.communicate(timeout=60)
    run.until(lambda: "rollout[2] ended" in run.said())
    run.steps_on(3)
    lost = run.rows()[-1]["env/lost_steps"]
    helpers = [run.join_to_act(rank) for rank in (3, 4)]
    run.pause.write_text("0.05")
    run.steps_on(1)
    for helper in helpers:
        helper.send_signal(signal.SIGTERM)
    for helper in helpers:
        helper.communicate(timeout=60)
    run.until(lambda: all(f"rollout[{rank}] left (its job is being ended (SIGTERM))" in run.said() for rank in (3, 4)))
    run.pause.write_text("0.01")
    run.steps_on(3)
    said = run.stop()
    assert "rollout[1] ended; others act on its slots from the next step on, and no step is made anew" in said, said
    assert "start again from" not in said and "Traceback" not in said, said
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "no step is made anew"
    assert all(row["step"] - 1 - row["rollout/version"] <= 1 for row in rows)
    taken = np.diff([0, *(row["rollout/env_steps"] for row in rows)])
    assert taken[-1] == SLOTS * DECISIONS and min(taken) >= SLOTS * DECISIONS / 2
    assert rows[-1]["env/lost_ranks"] == 2 and rows[-1]["env/lost_steps"] == lost > 0
    assert sum(taken) + rows[-1]["env/lost_steps"] == SLOTS * DECISIONS * len(rows)
    run.counts()


def test_ppo_ahead_of_its_actors_is_helped(tmp_path: Path) -> None:
    """What is played for a step that a helper leaves, or is killed in, others play; the batch is always whole."""
    run = Disturbed(tmp_path / "ppo", PPO)
    run.until(lambda: run.step() >= 2)
    first, second = run.joined(2), run.joined(3)
    run.steps_on(3)
    run.pause.write_text("0.05")
    run.steps_on(2)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    run.steps_on(2)
    run.kill("env-3")
    second.communicate(timeout=60)
    run.pause.unlink()
    run.steps_on(6)
    said = run.stop()
    assert "start again from" not in said and "Traceback" not in said, said
    rows = run.rows()
    assert rows[-1]["rollout/env_steps"] == SLOTS * DECISIONS * len(rows)
    assert all(row["step"] - 1 - row["rollout/version"] <= 1 for row in rows)
    assert all(row["train/epochs"] == 1 for row in rows) and run.brought(2) and run.brought(3)


def test_a_rollout_rank_that_is_lost_costs_what_it_did_before(tmp_path: Path) -> None:
    """All go back to the checkpoint, and a helper that is there begins anew with them."""
    run = Disturbed(tmp_path / "recovered", SAC, "runner.save_interval=5")
    run.until(lambda: run.step() >= 6)
    helper = run.joined(2)
    run.steps_on(2)
    run.kill("rollout-0")
    run.until(lambda: "start again from global_step_" in run.said())
    brought = run.brought(2)
    run.until(lambda: run.brought(2) > brought)
    run.steps_on(4)
    said = run.stop()
    helper.communicate(timeout=60)
    assert "Traceback" not in said, said
    run.counts()


def test_a_helper_waits_for_the_next_driver(tmp_path: Path) -> None:
    """The driver is killed; buffer and counters of the one that takes the run up are those of a run without helpers."""
    run = Disturbed(tmp_path / "resumed", SAC, "runner.save_interval=5")
    run.until(lambda: run.step() >= 6)
    helper = run.joined(2)
    run.steps_on(2)
    run.process.kill()
    run.process.wait()
    run.start("runner.resume_dir=auto")
    run.until(lambda: "env[2] takes part from the next step on" in run.said())
    brought = run.brought(2)
    run.until(lambda: run.brought(2) > brought)
    run.steps_on(2)
    said = run.stop()
    helper.communicate(timeout=60)
    rows = run.rows()
    assert "Traceback" not in said and [row["step"] for row in rows] == list(range(1, len(rows) + 1)), said
    assert rows[-1]["rollout/env_steps"] == SLOTS * DECISIONS * len(rows)
    run.counts()


def test_synchronous_runs_take_none(tmp_path: Path) -> None:
    run = Disturbed(tmp_path / "sync", PPO, "algorithm.max_staleness=0", "cluster.elastic=[{group: env, max: 2}]")
    assert run.process.wait(60) == 2
    said = run.said()
    assert "cluster.elastic[0].group" in said and "algorithm.max_staleness of 1 or more" in said
    assert said.count("rlhpc: error:") == 1 and "Traceback" not in said and not run.root.exists()
