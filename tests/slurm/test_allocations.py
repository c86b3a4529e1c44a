"""Allocations of all kinds: several equal nodes, one node, a part of a shared one, salloc, a batch script by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import SlurmCluster
from .jobs import wait_gone
from .runs import ROOT, SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
FEW = ("runner.max_steps=6", "runner.save_interval=3", "algorithm.update_epochs=1")


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.run("scancel", "--me")


def in_allocation(run: SlurmRun, options: list[str], *overrides: str, tool: str = "salloc") -> str:
    """`salloc … rlhpc train …`: what it said; it must end well."""
    train = [sys.executable, "-m", "rlhpc.cli", "train", str(run.config), *run.overrides, *overrides]
    done = subprocess.run(
        [tool, *options, *train], env=run.environment, cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr + run.account()
    return done.stdout + done.stderr


def placement(run: SlurmRun) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads((run.root / "provenance.json").read_text())["placement"]
    return found


def test_several_equal_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two nodes, two ranks of each role, gradients reduced between the nodes."""
    run = SlurmRun(slurm, tmp_path, *FEW, config=QUICKSTART)
    in_allocation(
        run, ["--partition=gpu", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--gres=gpu:fake:2"],
        "cluster.num_nodes=2", "cluster.accelerators_per_node=null",
        "cluster.component_placement={actor: '0,2', rollout: '1,3', env: {node_group: node, placement: '0-1'}}",
    )  # fmt: skip
    assert len(run.rows()) == 6
    assert [(rank["node_rank"], rank["accelerators"]) for rank in placement(run)["rollout"]] == [(0, [1]), (1, [1])]


def test_a_part_of_a_shared_node(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two runs on one node, each with a GPU of its own: index 0 is the first that Slurm gave."""
    runs = [SlurmRun(slurm, tmp_path, *FEW, config=QUICKSTART, name=name) for name in ("one", "two")]
    node = slurm.gpu_nodes[0]
    options = ["--partition=gpu", f"--nodelist={node}", "--cpus-per-task=2", "--gres=gpu:fake:1", "--mem=3G"]
    commands = [
        subprocess.Popen(
            ["salloc", *options, sys.executable, "-m", "rlhpc.cli", "train", str(run.config), *run.overrides,
             "cluster.accelerators_per_node=null"],
            env=run.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for run in runs
    ]  # fmt: skip
    for command, run in zip(commands, runs, strict=True):
        said, _ = command.communicate(timeout=200)
        assert command.returncode == 0, said + run.account()
        assert [rank["accelerators"] for rank in placement(run)["actor"]] == [[0]]


def test_more_than_was_granted(slurm: SlurmCluster, tmp_path: Path) -> None:
    """One message, exit code 2, and nothing written."""
    run = SlurmRun(slurm, tmp_path, *FEW, config=QUICKSTART)
    train = [sys.executable, "-m", "rlhpc.cli", "train", str(run.config), *run.overrides, "cluster.num_nodes=2"]
    done = subprocess.run(
        ["salloc", "--nodes=1", *train], env=run.environment, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert "cluster.num_nodes is 2, but the Slurm job" in done.stderr and "Traceback" not in done.stderr
    assert not run.root.exists()
    # a shell that still has the variables of that allocation, which is over
    job = done.stderr.partition("Granted job allocation ")[2].split()[0]
    wait_gone(slurm)
    left = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": slurm.gpu_nodes[0]}
    done = subprocess.run(
        train[:-1], env={**run.environment, **left}, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and f"SLURM_JOB_ID is {job}, but that job is over" in done.stderr, done.stderr
    assert not run.root.exists()


@pytest.mark.timeout(600)
def test_the_batch_script(slurm: SlurmCluster, tmp_path: Path) -> None:
    """examples/sbatch_train.sh: trains, and after the signal of the walltime goes back into the queue and on."""
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=100", "runner.save_interval=5", config=QUICKSTART, light=True)
    output = tmp_path / "job.out"
    command = ["sbatch", "--parsable", "--mem=4G", f"--output={output}", str(ROOT / "examples" / "sbatch_train.sh")]
    done = subprocess.run(
        [*command, str(run.config), *run.overrides], env=run.environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    until(lambda: run.committed() > 0, "it has saved", 90)
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    until(lambda: "PENDING" in slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T"), "it is queued again")
    before = run.committed()
    until(lambda: (run.root / "metrics.jsonl").exists() and len(run.rows()) == 100, "it has finished", 400)
    assert before > 0 and [row["step"] for row in run.rows()] == list(range(1, 101))
