"""A robot outside Slurm, at the end of an ssh, for a run whose env rank is on a node of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distant_arm import Arm, sshd

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

TASK = (
    "env.train.env_type=distant_robot", "env.train.env_id=arm", "env.train.num_envs=1", "env.train.max_episode_steps=20",
    "env.train.kwargs={observes: 3, acts: {low: [-2], high: [2]}, hz: 50, wait_s: 120}", "env.eval.num_envs=1",
    "algorithm.rollout_steps=16", "algorithm.update_epochs=1", "actor.global_batch_size=16", "runner.max_steps=8",
    "runner.save_interval=8",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


def test_it_joins_a_job_through_the_login_node_and_is_let_go_at_its_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun(slurm, tmp_path, *TASK)
    with sshd(tmp_path) as login:
        process = run.submit()
        until(lambda: (run.root / "registry" / "current").is_file(), "it has started", 120)
        key = tmp_path / "arm.key"
        said = run.rlhpc("robot", "invite", str(run.root), "--output", str(key), "--wait", "90")
        assert "--ssh LOGIN_NODE" in said  # the env rank listens where other hosts reach it
        arm = Arm(tmp_path / "arm", key, login)
        assert arm.process.wait(120) == 0, arm.said + run.account()
    run.finish(process)
    assert "has let arm go after 128 steps" in arm.said
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["env/robot_latency_ms_p50"] > 0 and row["env/robot_lost"] == 0 for row in rows)
