"""ManiSkill on nodes of its own: actor and rollout on GPU nodes, environments on CPU nodes, and one of them dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import SlurmRun, kill, until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(600)]

TASK = (
    "env.train.env_type=maniskill", "env.train.env_id=MS-CartpoleBalance-v1", "env.train.num_envs=4",
    "env.train.max_episode_steps=20", "env.train.simulators=0", "algorithm.rollout_steps=8", "algorithm.update_epochs=1",
    "actor.global_batch_size=32", "runner.max_steps=60", "runner.save_interval=5", "runner.max_restarts=3",
    'cluster.component_placement.env={node_group: cpu, placement: "0:0-1"}',
)  # fmt: skip
STEPS, TRANSITIONS = 60, 4 * 8


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


def test_a_maniskill_rank_dies_and_starts_again_alone(slurm: SlurmCluster, tmp_path: Path) -> None:
    """No other process ends, every step is trained once, and the metrics say what was lost."""
    need_extra("embodied")
    run = SlurmRun(slurm, tmp_path, *TASK)
    process = run.submit()
    run.training(deadline_s=240)
    before, attempt = run.members(), run.generation()
    assert before["env-0"]["node"] == before["env-1"]["node"] != before["actor-0"]["node"]
    kill(before["env-1"]["pid"])
    until(lambda: lost(run), f"it goes on\n{run.account()}", 120)
    after = run.members()
    changed = {name for name in before if after[name]["pid"] != before[name]["pid"]}
    assert changed == {"env-1"} and run.generation() == attempt, run.account()
    run.finish(process)
    assert len(run.attempts) == 1 and len(run.recoveries) == 1
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["rollout/env_steps"] == STEPS * TRANSITIONS
    counted, resumed = lost(run), run.recoveries[0]
    assert counted["env/lost_ranks"] == 1 and counted["env/lost_episodes"] >= 0
    assert counted["env/lost_steps"] >= TRANSITIONS and counted["env/lost_steps"] % TRANSITIONS == 0
    assert not any(lost_in(row) for row in rows[:resumed]) and all(lost_in(row) == counted for row in rows[resumed:])


def lost(run: SlurmRun) -> dict[str, Any]:
    """What the newest row counts as lost."""
    try:
        return lost_in(json.loads((run.root / "metrics.jsonl").read_text().splitlines()[-1]))
    except (OSError, ValueError, IndexError):
        return {}


def lost_in(row: dict[str, Any]) -> dict[str, Any]:
    return {name: count for name, count in row.items() if name.startswith("env/lost_")}
