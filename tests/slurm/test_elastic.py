"""Ranks from jobs of their own, on a partition that preempts: they come, work and go, and the run is the same.

`RLHPC_HELPERS_EVENTS` sets how often they are disturbed at random (`make chaos-helpers` takes 100), and `RLHPC_HELPERS_SEED`
the seed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.extras import need_extra

need_extra("llm")

from tests.stderr import error_lines
from tests.users import BOB, needs_root

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, SlurmRun, kill, until

EVENTS = int(os.environ.get("RLHPC_HELPERS_EVENTS", "8"))
SEED = int(os.environ.get("RLHPC_HELPERS_SEED", "1"))
#: How a helper comes or goes.
KINDS = ("join", "preempt", "kill rank", "leave", "kill job", "cancel", "kill join", "signal")

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200 + 60 * EVENTS)]
#: Ends a hang. On a busy machine a rank takes minutes to start.
DEADLINE_S = 300.0

CONFIG = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{save_interval: 10000, max_restarts: 3}}
cluster:
  num_nodes: 1
  accelerators_per_node: 0
  partition: cpu
  cpus_per_node: 2
  mem: 31000M
  component_placement: {{actor: 0, rollout: 0}}
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  eval: [{{name: held_out, source: arithmetic, size: 10, kwargs: {{digits: 1}}}}]
  max_prompt_tokens: 16
  prompts_per_step: 8
reward: {{terms: [{{name: "slow_rewards:slow"}}], processes: 1}}
workflow: {{eval_suites: [held_out]}}
algorithm: {{group_size: 4}}
rollout: {{rollout_backend: hf, max_new_tokens: 6, max_batch_size: 8}}
actor:
  global_batch_size: 32
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 32, layers: 2, heads: 2}}}}
  optim: {{lr: 3.0e-3}}
"""
#: Seconds that a reward takes before the run is told to hurry.
PAUSE_S = 0.2
ELASTIC = (
    "cluster.elastic=[{{max: 3, partition: preempt, time: '00:20:00', cpus_per_node: 1, mem: 3G, look_s: 5, react_s: 1, "
    "max_gpu_hours: {hours}}}]"
)
#: A reward that takes its time for as long as there is a file, which says how long.
SLOW = """
import os
import time

def slow(sample):
    try:
        with open(os.environ["RLHPC_TEST_PAUSE"]) as file:
            time.sleep(float(file.read()))
    except FileNotFoundError:
        pass
    return len(sample.response) / 8
"""


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


class ElasticRun(SlurmRun):
    """A run whose steps take their time until it is told to `hurry`."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, *overrides: str, name: str = "run", hours: str = "50"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "language.yaml"
        config.write_text(CONFIG.format(root=ROOT))
        (folder / "slow_rewards.py").write_text(SLOW)
        self.pause = folder / f"pause-{name}"
        self.pause.write_text(str(PAUSE_S))
        elastic = [ELASTIC.format(hours=hours)] if hours else []
        super().__init__(slurm, folder, *elastic, *overrides, config=config, name=name)
        self.site.write_text(json.dumps({"cluster": {"time": "00:30:00", "setup": ["export OMP_NUM_THREADS=1"]}}))
        self.environment |= {
            "RLHPC_MODELS": str(folder / "models"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{folder}:{ROOT}",
            "RLHPC_TEST_PAUSE": str(self.pause),
        }  # fmt: skip

    def hurry(self) -> None:
        self.pause.unlink()

    def last(self, steps: int) -> None:
        """Has the last of its steps take the longer, the fewer are left: it must not end before it is told to hurry."""
        left = max(1, steps - self.step())
        slower = self.pause.with_suffix(".new")
        slower.write_text(f"{PAUSE_S * max(1.0, 20 / left):.2f}")
        slower.replace(self.pause)

    def said(self) -> str:
        try:
            return (self.root / "logs" / "segment_0" / "driver.err").read_text()
        except OSError:
            return ""

    def stays(self) -> list[dict[str, Any]]:
        """Who has joined, with what happened to them."""
        found: dict[str, dict[str, Any]] = {}
        for line in (self.root / "attendance.jsonl").read_text().splitlines():
            event = json.loads(line)
            found.setdefault(event["incarnation"], {}).update({event["event"]: event["time"], **event})
        return list(found.values())

    def stay(self, stay: dict[str, Any]) -> dict[str, Any]:
        """What has become of one that joined."""
        return next(found for found in self.stays() if found["incarnation"] == stay["incarnation"])

    def working(self) -> list[dict[str, Any]]:
        """Those that take part at present."""
        try:
            return [stay for stay in self.stays() if "works" in stay and "left" not in stay]
        except OSError:
            return []

    def jobs(self) -> list[dict[str, Any]]:
        """The record of the helpers' jobs."""
        files = (self.root / "submit").glob("helpers-*.json")
        return [job for file in files for job in json.loads(file.read_text()).get("jobs", [])]

    def queue(self) -> dict[str, str]:
        """Helpers' jobs that Slurm has: id → state."""
        rows = self.cluster.run("squeue", "--me", "--noheader", "--format=%i|%T|%j").splitlines()
        return {row.split("|")[0]: row.split("|")[1] for row in rows if "-helpers-" in row}

    def scale(self, number: int | str, code: int = 0) -> str:
        return self.rlhpc("scale", str(self.root), f"rollout={number}", code=code)


def test_one_that_waits_for_rollouts_gets_more_ranks(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A run on one node, by rule, within its budget; somebody asks for fewer and for none, and all are gone with the run."""
    run = ElasticRun(slurm, tmp_path, "runner.max_steps=100000", hours="1")
    process = run.submit()
    until(lambda: run.working(), f"a rank has joined by itself\n{run.account()}", 240)
    assert "the actor waits for rollouts" in run.said()
    (stay,) = run.working()
    assert stay["node"] != run.members()["driver"]["node"] and stay["job"] in run.queue()
    until(lambda: len(run.working()) == 3, f"there are as many as may be\n{run.account()}", 240)
    assert "give a number from 0 to 3" in run.scale(9, code=2)
    run.scale(1)
    until(lambda: len(run.working()) == 1, f"the others have left\n{run.account()}", 60)
    assert {job["why"] for job in run.jobs() if job["leaving"]} == {"1 were asked for"}
    left = [stay for stay in run.stays() if "left" in stay]
    assert {stay["why"] for stay in left} == {"it was told to leave (SIGUSR1)"}
    assert "goes on without rank" not in run.said(), "nobody has lost anything"
    status = run.rlhpc("status", str(run.root))
    assert "it was told to leave (SIGUSR1)" in status and left[0]["job"] in status
    until(lambda: sum(job["ended"] is None for job in run.jobs()) == 1, f"their jobs have ended\n{run.account()}", 60)
    assert "1 job of helpers of this run: cancelled" in run.rlhpc("cancel", str(run.root), timeout=200)
    until(lambda: not run.queue(), "no job of helpers is left", 60)
    process.wait(60)
    assert all("left" in stay for stay in run.stays())
    assert os.path.exists(run.root / "submit" / "scale.json")


def test_options_of_srun_make_helpers_steps(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A rank that joins is then a job step with these options; it leaves when it is told to, and before its walltime."""
    prolog, seen = tmp_path / "prolog.sh", tmp_path / "seen"
    prolog.write_text(f'#!/bin/bash\necho "$SLURM_JOB_ID.$SLURM_STEP_ID $SLURM_JOB_NAME $SLURM_STEP_NAME" >>{seen}\n')
    prolog.chmod(0o755)
    run = ElasticRun(slurm, tmp_path, "runner.max_steps=100000", f"cluster.srun=[--task-prolog={prolog}]", hours="1")
    process = run.submit()
    until(lambda: run.committed() >= 0 or run.step() >= 1, f"a step is done\n{run.account()}", 240)
    run.scale(1)
    until(lambda: len(run.working()) == 1, f"a rank has joined\n{run.account()}", 240)
    (stay,) = run.working()
    steps = {line.split()[0] for line in seen.read_text().splitlines()}
    assert f"{stay['job']}.0" in steps, "the rank is a step of its job, with the prolog"
    run.scale(0)
    until(lambda: not run.working(), f"it has left\n{run.account()}", 60)
    assert run.stay(stay)["why"] == "it was told to leave (SIGUSR1)"
    until(lambda: stay["job"] not in run.queue(), f"its job has ended\n{run.account()}", 60)
    run.scale(1)
    until(lambda: len(run.working()) == 1, f"another has joined\n{run.account()}", 240)
    (stay,) = run.working()
    slurm.run("scancel", "--batch", "--signal=USR2", stay["job"])
    until(lambda: "left" in run.stay(stay), f"it has left\n{run.account()}", 60)
    assert run.stay(stay)["why"] == "its job must end soon (SIGUSR2: walltime or preemption)"
    assert "goes on without rank" not in run.said(), "nobody has lost anything"
    run.rlhpc("cancel", str(run.root), timeout=200)
    process.wait(60)


class Disturber:
    """Has helpers of a run come and go.

    Args:
        run: The run.
        slurm: Its cluster.
        draw: Where its choices come from.
        steps: How many steps the run has.
    """

    def __init__(self, run: ElasticRun, slurm: SlurmCluster, draw: random.Random, steps: int) -> None:
        self.run, self.slurm, self.draw, self.wanted, self.steps = run, slurm, draw, 2, steps
        self.done: list[str] = []

    def victim(self) -> dict[str, Any]:
        """One that takes part, of those whose job has not been disturbed."""
        self.wait(lambda: bool(self.run.working()), "somebody takes part")
        return self.draw.choice(self.run.working())

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Waits while the run goes on."""

        def is_met() -> bool:
            self.run.last(self.steps)
            return condition()

        until(is_met, f"{what}\n{self.run.account()}", DEADLINE_S)

    def disturb(self, kind: str) -> None:
        """Does it, and waits until it has been noticed."""
        if kind in ("join", "leave"):
            self.wanted = min(3, self.wanted + 1) if kind == "join" else max(1, self.wanted - 1)
            self.run.scale(self.wanted)
            # one that is still leaving could be gone before it is disturbed
            self.wait(lambda: len(self.run.working()) <= self.wanted, f"{self.wanted} remain after {kind}")
        else:
            stay = self.victim()
            job, node = stay["job"], stay["node"]
            if kind == "preempt":
                other = self.slurm.run(
                    "sbatch", "--parsable", "--partition=all", f"--nodelist={node}", "--cpus-per-task=8", "--mem=1000",
                    "--time=5", "--output=/dev/null", "--wrap=sleep 2",
                ).strip()  # fmt: skip
            elif kind == "signal":
                self.slurm.run("scancel", "--batch", "--signal=USR2", job)
            elif kind == "cancel":
                self.slurm.run("scancel", job)
            else:
                kill(self.process(stay, kind))
            self.wait(lambda: "left" in self.run.stay(stay), f"{stay['rank']} has left after {kind}")
            if kind == "preempt":
                self.slurm.run("scancel", other)
        self.done.append(kind)

    def process(self, stay: dict[str, Any], kind: str) -> int:
        """The rank's own process, that of `rlhpc join`, or the job's."""
        rank = psutil.Process(self.run.members()[f"rollout-{stay['rank']}"]["pid"])
        found = {"kill rank": rank, "kill join": rank.parent(), "kill job": rank.parent().parent()}[kind]
        return int(found.pid)


def test_helpers_come_and_go_at_random(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Joins, leaves, preemptions, signals and kills, seeded: the run finishes, and is that of one rank alone, bit for bit."""
    steps = 30 + 8 * EVENTS
    draw = random.Random(SEED)
    kinds = [*KINDS, *draw.choices(KINDS, k=max(0, EVENTS - len(KINDS)))][:EVENTS]
    draw.shuffle(kinds)
    alone = ElasticRun(slurm, tmp_path, f"runner.max_steps={steps}", name="alone", hours="")
    alone.hurry()
    undisturbed = alone.submit()
    run = ElasticRun(slurm, tmp_path, f"runner.max_steps={steps}", hours="1000")
    process = run.submit()
    until(lambda: run.step() >= 1, f"it trains\n{run.account()}", DEADLINE_S)
    disturber = Disturber(run, slurm, draw, steps)
    run.scale(disturber.wanted)
    for kind in kinds:
        disturber.disturb(kind)
    run.hurry()
    run.finish(process, 900)
    until(lambda: not run.queue(), "no job of helpers is left", DEADLINE_S)
    alone.finish(undisturbed, 900)
    stays = run.stays()
    print(
        f"\nevents: {len(disturber.done)} ({', '.join(disturber.done)}); joined: {len(stays)}, jobs: {len(run.jobs())}"
    )
    assert len(disturber.done) == EVENTS and len(run.attempts) == 1 and not run.recoveries
    assert all("left" in stay for stay in stays)
    rows = run.rows()
    assert [row["rollout/samples"] for row in rows] == [32.0 * step for step in range(1, steps + 1)]
    assert rows == alone.rows(), "no prompt is lost, none is trained on twice, and every number is the same"
    weights, expected = run.weights(steps), alone.weights(steps)
    assert all((weights[name] == expected[name]).all() for name in expected)


def test_a_driver_that_comes_back_takes_its_helpers_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its job is requeued: they wait, and join the next driver; no other job is submitted, and none is left in the end."""
    run = ElasticRun(slurm, tmp_path, "runner.max_steps=100000", "runner.save_interval=20")
    process = run.submit()
    until(lambda: run.step() >= 1, f"it trains\n{run.account()}", 400)
    run.scale(2)
    until(lambda: len(run.working()) == 2, f"two have joined\n{run.account()}", 400)
    jobs, generation = run.queue(), run.generation()
    frozen = psutil.Process(run.members()[f"rollout-{run.working()[0]['rank']}"]["pid"])
    for asleep in (frozen.parent(), frozen):  # it knows nothing of what happens, and goes on later as if nothing had
        asleep.suspend()
    slurm.run("scancel", "--batch", "--signal=USR2", run.job)
    until(lambda: run.generation() != generation, f"there is another driver\n{run.account()}", 400)
    until(lambda: len(run.working()) == 1, f"one is back\n{run.account()}", 400)
    step = run.step()
    until(lambda: run.step() > step, f"it trains\n{run.account()}", 200)
    for asleep in (frozen, frozen.parent()):
        asleep.resume()
    until(lambda: len(run.working()) == 2, f"they are back\n{run.account()}", 400)
    assert not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE, "who was of the old generation has ended"
    assert run.generation().endswith("-1") and not run.recoveries
    assert set(run.queue()) == set(jobs) == {job["id"] for job in run.jobs()}, "the same jobs, and no others"
    assert {stay["job"] for stay in run.working()} == set(jobs) and len(run.stays()) == 4
    slurm.run("scancel", "--batch", "--signal=TERM", run.job)
    until(lambda: not run.queue(), f"those that wait for it notice that nobody comes\n{run.account()}", 400)
    process.wait(200)


@pytest.mark.parametrize("killed", [False, True], ids=["cancelled", "killed"])
def test_helpers_that_wait_in_the_queue_go_with_their_driver(slurm: SlurmCluster, tmp_path: Path, killed: bool) -> None:
    """One that is told to end takes them out; after one that was killed, with its job, they start, find nobody, and end."""
    run = ElasticRun(slurm, tmp_path, "runner.max_steps=100000", "runner.max_restarts=0")
    process = run.submit()
    until(lambda: run.step() >= 1, f"it trains\n{run.account()}", 120)
    slurm.run("scontrol", "update", "PartitionName=preempt", "State=DOWN")
    try:
        run.scale(2)
        until(lambda: [*run.queue().values()] == ["PENDING"] * 2, f"two wait\n{run.account()}", 60)
        if killed:
            process.kill()
            kill(run.members()["driver"]["pid"])
            slurm.run("scancel", "--signal=KILL", "--full", run.job)
        else:
            slurm.run("scancel", run.job)
            until(lambda: not run.queue(), f"they are taken out\n{run.account()}", 60)
    finally:
        slurm.run("scontrol", "update", "PartitionName=preempt", "State=UP")
    until(lambda: not run.queue(), f"none is left\n{run.account()}", 120)
    assert not (run.root / "attendance.jsonl").exists() or not run.stays()


#: `rlhpc join` as somebody else, or with code of another day. Modules come first: others may not read where they are.
STRANGER = """
import os, sys
import rlhpc.cli, rlhpc.cli.join, rlhpc.jobs.state, rlhpc.runtime.allocation, rlhpc.runtime.joining as joining
kind, uid = sys.argv[1], int(sys.argv[2])
if kind == "code":
    joining.fingerprint = lambda: "of another day"
if uid:
    os.chdir("/"); os.setgroups([]); os.setgid(uid); os.setuid(uid)
sys.exit(rlhpc.cli.main(["join", *sys.argv[3:]]))
"""


@needs_root
def test_who_may_not_join_from_another_node(slurm: SlurmCluster) -> None:
    """Another user, and another rlhpc: one message each, and the run does not notice."""
    folder = slurm.root / f"open-{os.getpid()}"  # everybody may enter: only the run's own modes protect it
    run = ElasticRun(slurm, folder, "runner.max_steps=100000")
    process = run.submit()
    until(lambda: run.step() >= 1, f"it trains\n{run.account()}", 120)
    for path in (folder, folder / "runs", run.root):
        path.chmod(0o755)

    def join(kind: str, uid: int) -> str:
        done = subprocess.run(
            [*slurm.enter("gpu1"), sys.executable, "-P", "-c", STRANGER, kind, str(uid), str(run.root)],
            env=run.environment, cwd="/", capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stdout + done.stderr
        (line,) = error_lines(done.stdout + done.stderr)
        return line

    members = run.members()
    assert "only the user whose run it is can join it" in join("user", BOB)
    assert "another rlhpc than the run's own" in join("code", 0)
    assert run.members() == members and not (run.root / "attendance.jsonl").exists()
    step = run.step()
    until(lambda: run.step() > step, f"it goes on\n{run.account()}", 60)
    run.rlhpc("cancel", str(run.root))
    process.wait(60)
    shutil.rmtree(folder, ignore_errors=True)
