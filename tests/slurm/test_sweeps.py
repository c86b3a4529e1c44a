"""A sweep on the cluster: no more jobs than it allows, one run that is killed and goes on, and a page at the end.

Of two runs; with RLHPC_SWEEP_SEEDS=3 of two by two values at three seeds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import LIGHT, ROOT, SlurmRun, kill, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SEEDS = list(range(1, 1 + int(os.environ.get("RLHPC_SWEEP_SEEDS", "1"))))
GAMMAS = [0.98, 0.99] if len(SEEDS) > 1 else [0.98]
MOST = 4 if len(SEEDS) > 1 else 1
SWEEP = {
    "defaults": [str(ROOT / "configs/quickstart.yaml")],
    "cluster": {"partition": "cpu", "cpus_per_node": 1, "mem": "1500M", "time": "00:20:00"},
    "runner": {"name": "lr", "segments": 1, "max_steps": 12, "save_interval": 3, "logger": {"logger_backends": ["jsonl"]}},
    "env": {"train": {"num_envs": 4}, "eval": {"num_envs": 2, "num_episodes": 4}},
    "actor": {"global_batch_size": 64},
    "workflow": {"eval_job": {"mem": "1000M"}, "convert_job": {"mem": "1000M"}},
    "sweep": {
        "grid": {"actor.optim.lr": [1e-3, 3e-3], "algorithm.gamma": GAMMAS},
        "seeds": SEEDS,
        "max_queued": MOST,
    },
}  # fmt: skip


def under_way(sweep: Path) -> int:
    """Runs that have a job which has not ended yet."""
    submitted = {path.parents[1] for path in sweep.glob("*/submit/segment_0.json")}
    return sum(not (run / "segments/0.json").exists() for run in submitted)


def test_all_runs_of_a_sweep_stand_in_the_queue(slurm: SlurmCluster, tmp_path: Path) -> None:
    """More of them than Snakemake has threads by itself, while the partition takes no job."""
    config, seeds = tmp_path / "lr.yaml", 12
    config.write_text(yaml.safe_dump({**SWEEP, "sweep": {"grid": {}, "seeds": [*range(seeds)]}}))
    run = SlurmRun(slurm, tmp_path, name="lr", light=True)
    profile = ROOT / "profiles" / ("slurm" if slurm.has_accounting else "slurm-no-accounting")
    command = [sys.executable, "-P", "-m", "rlhpc.cli", "run", str(config), *LIGHT, "--profile", str(profile)]
    slurm.run("scontrol", "update", "PartitionName=cpu", "State=DOWN")
    process = subprocess.Popen(
        [*command, "--site", str(run.site)], env=run.environment, cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: len(slurm.run("squeue", "--noheader").splitlines()) == seeds, f"{seeds} runs wait", 300)
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        end_jobs(slurm)
        slurm.run("scontrol", "update", "PartitionName=cpu", "State=UP")


def test_a_sweep_with_a_run_that_is_killed(slurm: SlurmCluster, tmp_path: Path) -> None:
    sweep, names = (
        tmp_path / "runs/lr",
        [f"lr_{lr}-gamma_{g}-s{s}" for lr in (0.001, 0.003) for g in GAMMAS for s in SEEDS],
    )
    runs = [SlurmRun(slurm, tmp_path, name=f"lr/{name}", light=True) for name in names]
    config = tmp_path / "lr.yaml"
    config.write_text(yaml.safe_dump(SWEEP))
    profile = ROOT / "profiles" / ("slurm" if slurm.has_accounting else "slurm-no-accounting")
    command = [
        sys.executable, "-P", "-m", "rlhpc.cli", "run", str(config), *LIGHT, "--profile", str(profile),
        "--site", str(runs[0].site),
        "--", "--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2",
    ]  # fmt: skip
    with (tmp_path / "said.txt").open("w") as said:
        process = subprocess.Popen(
            command, env=runs[0].environment, cwd=tmp_path, stdout=said, stderr=said, start_new_session=True
        )
    SlurmRun.submitted.append(process)  # type: ignore[arg-type]
    most, killed = 0, None

    def over() -> bool:
        nonlocal most, killed
        most = max(most, under_way(sweep))
        if killed is None and (run := next((run for run in runs if 3 <= run.committed() < 12), None)) is not None:
            kill(int(run.json("status.json")["pid"]))
            killed = run
        return process.poll() is not None

    until(over, "the sweep has ended", 800)
    told = (tmp_path / "said.txt").read_text()
    assert process.returncode == 0 and f"lr: {len(names)} of {len(names)} runs finished" in told, told
    assert most == MOST
    assert killed is not None and len(killed.attempts) > 1
    for run in runs:
        assert [row["step"] for row in run.rows()] == list(range(1, 13))
        assert json.loads((run.root / "eval/global_step_12/default.json").read_text())["episodes"] == 4
    page = (sweep / "compare.html").read_text()
    assert f"{len(names)} of {len(names)}" in page and all(f">{name}</a>" in page for name in names)
    assert runs[0].rlhpc("status", str(sweep)).count("finished") == len(names)
    again = subprocess.run([*command[: command.index("--")], "-n"], env=runs[0].environment, cwd=tmp_path, text=True,
                           capture_output=True, timeout=120, check=False)  # fmt: skip
    assert "Nothing to be done" in again.stdout + again.stderr
