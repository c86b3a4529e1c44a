"""Random kills over one run, seeded: it finishes, and no committed step is lost or trained twice; and faults of the network,
clocks and nodes, of which `make chaos-scale` carries out many more.

`RLHPC_CHAOS_KILLS` sets the number of kills (`make chaos` takes 30) and `RLHPC_CHAOS_SEED` the seed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .chaos import ChaosRun, Event, carry_out, steps_for
from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import SlurmRun, kill, until

KILLS = int(os.environ.get("RLHPC_CHAOS_KILLS", "6"))
SEED = int(os.environ.get("RLHPC_CHAOS_SEED", "1"))
KINDS = ("worker", "step", "driver", "waiter", "node")

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(300 + 120 * KILLS)]


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


def restarted(run: SlurmRun, before: tuple[int, int]) -> tuple[int] | None:
    """The step that it went on from, once there is a new attempt or recovery."""
    attempts, recoveries = run.attempts, run.recoveries
    if len(attempts) > before[0]:
        return (attempts[-1]["step"],)
    return (recoveries[-1],) if len(recoveries) > before[1] else None


def test_random_kills(slurm: SlurmCluster, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    # every kind at least once where there are enough kills; a dead node takes the longest to be noticed
    kinds = [*KINDS, *draw.choices(KINDS, weights=(5, 4, 4, 3, 1), k=max(0, KILLS - len(KINDS)))][:KILLS]
    draw.shuffle(kinds)
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=1000000", "runner.save_interval=10", "runner.max_restarts=3",
                   "algorithm.update_epochs=2", "runner.keep_checkpoints=2", "runner.segments=1")  # fmt: skip
    last = 40 * KILLS + 200
    run.overrides.append(f"runner.max_steps={last}")
    process = run.submit()
    lost, done, dead = 0, [], set()
    for kind in kinds:
        before = run.committed()
        if before > last - 40:
            break
        run.training(beyond=before, deadline_s=180)
        time.sleep(draw.uniform(0, 1.5))
        counts, members = (len(run.attempts), len(run.recoveries)), run.members()
        committed = run.committed()
        if kind == "worker":
            kill(members[draw.choice(sorted(set(members) - {"driver"}))]["pid"])
        elif kind == "step":
            slurm.run("scancel", "--signal=KILL", members[draw.choice(["actor-0", "rollout-0", "env-0"])]["step"])
        elif kind == "driver":
            kill(int(run.json("status.json")["pid"]))
        elif kind == "waiter":
            for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                kill(child.pid)
            process.wait()
            process = run.submit()
        else:
            node = members["env-0"]["node"]
            slurm.kill_slurmd(node)
            dead.add(node)
        done.append(kind)
        if kind != "waiter":
            again = until(lambda n=counts: restarted(run, n), f"it starts again after {kind}\n{run.account()}", 180)  # type: ignore[misc]
            lost += max(0, committed - again[0])
        for node in sorted(dead):
            slurm.start_slurmd(node, wait=False)
        dead.clear()
    run.finish(process, 300)
    rows = [row["step"] for row in run.rows()]
    begun = [attempt["step"] for attempt in run.attempts]
    print(f"\nkills: {len(done)} ({', '.join(done)}), restarts: {len(run.attempts) - 1} of the driver and "
          f"{len(run.recoveries)} of environments and rollout alone, lost steps: {lost}")  # fmt: skip
    assert len(done) == KILLS and lost == 0
    assert rows == list(range(1, last + 1)), "every step's row is there once"
    assert begun == sorted(begun)


#: Seconds of the fault, and what happens: the driver's node and one of simulators lose each other, a clock is an hour ahead,
#: and a node dies and is back under its name, with an empty /tmp and /dev/shm.
SMALL = [Event("cut", ("driver", "ranks"), 10.0), Event("clock", ("ranks",), 3600.0), Event("return", ("ranks",), 10.0)]


@pytest.mark.timeout(1800)  # on a busy machine, where an event takes minutes
def test_a_cut_a_clock_that_jumps_and_a_node_that_comes_back(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    """No committed step is lost, none is trained or committed twice, and the first two faults start nothing again."""
    slurm_hosts.add_login()
    run = ChaosRun(slurm_hosts, tmp_path, steps_for(SMALL))
    outcomes: list[str] = []
    summary = carry_out(SMALL, run, outcomes.append)
    assert len(outcomes) == len(SMALL) and len(run.attempts) + len(run.recoveries) > 1, (outcomes, summary)
