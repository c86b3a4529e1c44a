"""What a run cost, from a real sacct."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import SlurmCluster
from .jobs import wait_gone
from .runs import SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_roles_and_components_of_a_requeued_run(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The report has them; while slurmdbd is away it says so and keeps what it had."""
    if not slurm.has_accounting:
        pytest.skip("this cluster has no accounting")
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=80", "runner.save_interval=10", light=True)
    process = run.submit()
    run.training()
    slurm.run("scontrol", "requeue", run.job)
    run.finish(process)
    wait_gone(slurm, run.job)

    def report() -> dict[str, object]:
        run.rlhpc("report", str(run.root))
        return run.json("report/accounting.json")

    # slurmctld tells slurmdbd within seconds
    found = until(lambda: (r := report()).get("complete") and r, "the accounting is complete", 30)
    assert found["available"] and found["jobs"] == [run.job] and found["requeues"] == 1
    roles = found["roles"]
    assert set(roles) == {"actor", "rollout", "env", "driver"}
    for name, role in roles.items():
        assert role["restarts"] >= 1 and role["cpu_hours"] > role["cpu_hours_used"] > 0, name
        assert 0 <= role["idle_share"] <= 1 and role["max_rss_bytes"] > 50 << 20, name
    assert roles["actor"]["gpu_hours"] > 0 and roles["env"]["gpu_hours"] == 0
    gpu, cpu = found["components"]
    assert (gpu["partitions"], cpu["partitions"]) == (["gpu"], ["cpu"]) and gpu["restarts"] == cpu["restarts"] == 1
    assert gpu["gpu_hours"] > gpu["gpu_hours_used"] > 0 and cpu["gpu_hours"] == 0
    assert gpu["max_rss_bytes"] < gpu["memory_bytes"] == 4 << 30

    slurm.stop_accounting()
    try:
        run.rlhpc("report", str(run.root), timeout=60)
        assert "Numbers of an earlier report" in (run.root / "report" / "index.html").read_text()
        (run.root / "report" / "accounting.json").unlink()
        assert report()["available"] is False
    finally:
        slurm.start_accounting()
    assert report()["available"] is True


def test_a_cluster_without_accounting(slurm_without_accounting: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun(slurm_without_accounting, tmp_path, "runner.max_steps=5", "runner.save_interval=5")
    run.finish(run.submit())
    run.rlhpc("report", str(run.root), timeout=60)
    assert run.json("report/accounting.json")["available"] is False
    assert "Accounting is not available" in (run.root / "report" / "index.html").read_text()
