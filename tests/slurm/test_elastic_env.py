"""Env and rollout ranks from jobs of their own, on a partition that preempts: they come, play and go, and no transition counts
twice.

`RLHPC_HELPERS_EVENTS` and `RLHPC_HELPERS_SEED` as in `test_elastic`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhpc.embodied.data.stored_replay import StoredReplay
from tests.extras import need_extra

need_extra("llm")  # as `test_elastic`

from .cluster import SlurmCluster
from .runs import SlurmRun, kill, until
from .test_elastic import EVENTS, KINDS, SEED, Disturber, ElasticRun, no_job_is_left

__all__ = ["no_job_is_left"]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600 + 20 * EVENTS)]

SLOTS, DECISIONS = 4, 8
CONFIG = """
runner: {task_type: off_policy, save_interval: 10000, max_restarts: 1000}
cluster:
  num_nodes: 1
  accelerators_per_node: 0
  partition: cpu
  cpus_per_node: 2
  mem: 31000M
  component_placement: {actor: 0, rollout: "0:0-1", env: "0:0-1"}
algorithm:
  rollout_steps: 8
  max_staleness: 1
  update_to_data: 0.1
  replay_buffer: {size: 1000000, min_buffer_size: 64}
env:
  train: {env_id: "counting_env:Counting-v0", num_envs: 4}
  eval: {num_envs: 2}
actor: {global_batch_size: 16, model: {model_type: sac, hidden_sizes: [8, 8]}}
"""
JOBS = "partition: preempt, time: '00:20:00', cpus_per_node: 1, mem: 3G, look_s: 5, react_s: 1, max_gpu_hours: {hours}"
ELASTIC = f"cluster.elastic=[{{{{group: env, max: 3, {JOBS}}}}}, {{{{group: rollout, max: 2, {JOBS}}}}}]"
#: What is shown names process, episode and decision, and takes its time for as long as there is a file.
COUNTING = """
import itertools
import os
import time

import gymnasium
import numpy as np

EPISODES = itertools.count()


class Counting(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.made, self.episode, self.process = 0, next(EPISODES), os.getpid()
        return self.shown(), {}

    def shown(self):
        return np.array([self.episode, self.made, self.process], np.float32)

    def step(self, action):
        if os.path.exists(os.environ.get("RLHPC_TEST_PAUSE", "")):
            time.sleep(0.02)
        self.made += 1
        return self.shown(), 1.0, False, self.made == 5, {}


gymnasium.register("Counting-v0", entry_point=Counting)
"""


class EnvRun(ElasticRun):
    """An off-policy run, whose environments take their time until it is told to `hurry`."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *overrides: str, hours: str = "50") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "off_policy.yaml"
        config.write_text(CONFIG)
        (folder / "counting_env.py").write_text(COUNTING)
        self.pause = folder / "pause-run"
        self.pause.touch()
        SlurmRun.__init__(self, slurm, folder, ELASTIC.format(hours=hours), *overrides, config=config)
        self.site.write_text(json.dumps({"cluster": {"time": "00:30:00", "setup": ["export OMP_NUM_THREADS=1"]}}))
        self.environment |= {"PYTHONPATH": str(folder), "RLHPC_TEST_PAUSE": str(self.pause)}

    def scale(self, number: int | str, code: int = 0, group: str = "env") -> str:
        return self.rlhpc("scale", str(self.root), f"{group}={number}", code=code)

    def at_work(self, group: str) -> int:
        return sum(stay["group"] == group for stay in self.working())


class EnvDisturber(Disturber):
    """Has helpers of a run come and go, and kills env and rollout ranks that it started with."""

    run: EnvRun

    def disturb(self, kind: str) -> None:
        what, _, group = kind.partition(" ")
        if kind in ("kill env", "kill rollout"):
            again = f"{group}[1] takes part from the next step on"
            before = self.run.said().count(again)
            kill(self.run.members()[f"{group}-1"]["pid"])
            until(lambda: self.run.said().count(again) > before, f"{group}-1 is back\n{self.run.account()}", 90)
        elif group == "rollout":
            wanted = 2 if what == "join" else 1
            self.run.scale(wanted, group=group)
            if what == "join":
                until(lambda: self.run.at_work(group), f"a rollout rank has joined\n{self.run.account()}", 90)
        else:
            super().disturb(kind)
            return
        self.done.append(kind)

    def process(self, stay: dict[str, Any], kind: str) -> int:
        rank = psutil.Process(self.run.members()[f"{stay['group']}-{stay['rank']}"]["pid"])
        found = {"kill rank": rank, "kill join": rank.parent(), "kill job": rank.parent().parent()}[kind]
        return int(found.pid)


def test_ranks_come_and_go_at_random(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Joins, leaves, preemptions, signals and kills, seeded: the run finishes in one go; every transition that was counted is
    in the buffer, none is there twice, and what is missing is what was lost with env ranks that the run started with, and with
    rollout ranks."""
    steps = 60 + 30 * EVENTS
    draw = random.Random(SEED)
    kinds = [*KINDS, "kill env", "kill rollout", "join rollout", "leave rollout"]
    kinds = [*kinds, *draw.choices(kinds, k=max(0, EVENTS - len(kinds)))][: max(EVENTS, len(kinds))]
    draw.shuffle(kinds)
    run = EnvRun(slurm, tmp_path, f"runner.max_steps={steps}", hours="1000")
    process = run.submit()
    until(lambda: run.step() >= 1, f"it trains\n{run.account()}", 120)
    disturber = EnvDisturber(run, slurm, draw, steps)
    run.scale(disturber.wanted)
    run.scale(1, group="rollout")
    for kind in kinds:
        disturber.disturb(kind)
    assert run.step() < steps, "all of it was disturbed"
    run.hurry()
    run.finish(process, 300)
    until(lambda: not run.queue(), "no job of helpers is left", 60)
    stays, rows = run.stays(), [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    held = StoredReplay(run.root / "checkpoints" / f"global_step_{steps}").transitions()
    helped = sum(int(row.get("env/joined_transitions", 0)) for row in rows)
    lost = int(rows[-1].get("env/lost_steps", 0))
    print(
        f"\nevents: {len(disturber.done)} ({', '.join(disturber.done)}); joined: {len(stays)}, jobs: {len(run.jobs())}; "
        f"transitions: {len(held)}, of helpers {helped}, lost with env and rollout ranks {lost}"
    )
    assert len(disturber.done) == len(kinds) and len(run.attempts) == 1 and not run.recoveries
    assert all("left" in stay for stay in stays)
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "no step was made anew"
    assert {stay["group"] for stay in stays if "works" in stay} == {"env", "rollout"}
    assert helped and all(row["step"] - 1 - row["rollout/version"] <= 1 for row in rows)
    assert rows[-1]["rollout/env_steps"] == len(held)
    assert 0 <= SLOTS * DECISIONS * steps - lost - len(held) < SLOTS, "what does not fill a row of the buffer"
    assert len(np.unique(held["obs"], axis=0)) == len(held), "none is there twice"
    follows = held["next_obs"] - held["obs"]
    assert (follows[:, 1] == 1).all() and not follows[:, [0, 2]].any()


def test_one_that_waits_for_play_gets_more_env_ranks(slurm: SlurmCluster, tmp_path: Path) -> None:
    """By rule: the environments are slow, so the actor waits."""
    run = EnvRun(slurm, tmp_path, "runner.max_steps=100000")
    process = run.submit()
    until(lambda: run.at_work("env"), f"an env rank has joined by itself\n{run.account()}", 150)
    assert "the actor waits for rollouts" in run.said()
    slurm.run("scancel", "--batch", "--signal=TERM", run.job)
    until(lambda: not run.queue(), f"no job of helpers is left\n{run.account()}", 120)
    process.wait(60)


def test_a_driver_that_comes_back_takes_its_helpers_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its job is requeued: an env and a rollout rank wait, and join the next driver; no other job is submitted."""
    run = EnvRun(slurm, tmp_path, "runner.max_steps=100000", "runner.save_interval=20")
    process = run.submit()
    until(lambda: run.step() >= 1, f"it trains\n{run.account()}", 120)
    for group in ("env", "rollout"):
        run.scale(1, group=group)
    until(lambda: run.at_work("env") == run.at_work("rollout") == 1, f"both have joined\n{run.account()}", 120)
    jobs, generation = run.queue(), run.generation()
    slurm.run("scancel", "--batch", "--signal=USR2", run.job)
    until(lambda: run.generation() != generation, f"there is another driver\n{run.account()}", 180)
    until(lambda: run.at_work("env") == run.at_work("rollout") == 1, f"both are back\n{run.account()}", 120)
    step = run.step()
    until(lambda: run.step() > step + 4, f"it trains\n{run.account()}", 60)
    assert set(run.queue()) == set(jobs) == {job["id"] for job in run.jobs()}, "the same jobs, and no others"
    assert len(run.stays()) == 4 and not run.recoveries
    slurm.run("scancel", "--batch", "--signal=TERM", run.job)
    until(lambda: not run.queue(), f"those that wait for it notice that nobody comes\n{run.account()}", 120)
    process.wait(60)
    rows = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["rollout/env_steps"] == SLOTS * DECISIONS * len(rows), "nothing was lost with the driver"
