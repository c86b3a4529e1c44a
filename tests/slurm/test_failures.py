"""Each kind of failure, really caused: what the user sees, and that the run goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from .cluster import SlurmCluster
from .jobs import end_jobs, wait_gone
from .processes import Process
from .runs import SlurmRun, kill, until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


#: A quarter of a minute, of which the run has trained a second when something happens to it.
LAST = 80
STEPS = (f"runner.max_steps={LAST}", "runner.save_interval=5", "runner.max_restarts=3")
#: Where the run must still be at it when another command has started, or the controller has ended.
LONGER = 200


def start(slurm: SlurmCluster, folder: Path, *overrides: str) -> tuple[SlurmRun, object, int]:
    """A run that has committed something, the command that waits for it, and the step it had committed."""
    run = SlurmRun(slurm, folder, *STEPS, *overrides, light=True)
    process = run.submit()
    run.training()
    return run, process, run.committed()


def resumed(run: SlurmRun, process: object, before: int, steps: int = LAST) -> None:
    """It went on from what it had committed, and every step was trained once."""
    run.finish(process, 300)  # type: ignore[arg-type]
    assert len(run.attempts) >= 2 and run.attempts[1]["step"] >= before, run.attempts
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))


def test_an_actor_is_killed(slurm: SlurmCluster, tmp_path: Path) -> None:
    run, process, before = start(slurm, tmp_path)
    record = run.members()["actor-0"]
    began = time.monotonic()
    kill(record["pid"])
    until(lambda: run.attempts[0]["how"] != "running", "the driver notices", 20)
    assert time.monotonic() - began < 15
    how = run.attempts[0]["how"]
    assert f"actor[0] on node {record['node']} was killed by signal 9 (SIGKILL)" in how
    resumed(run, process, before)


def test_a_step_is_killed(slurm: SlurmCluster, tmp_path: Path) -> None:
    run, process, before = start(slurm, tmp_path)
    slurm.run("scancel", "--signal=KILL", run.members()["actor-0"]["step"])
    resumed(run, process, before)
    assert "actor" in run.attempts[0]["how"]


@pytest.mark.parametrize("victim", ["env", "rollout"])
def test_environments_and_rollout_start_again_alone(slurm: SlurmCluster, tmp_path: Path, victim: str) -> None:
    """The actor's process and the job's attempt live on."""
    run, process, before = start(slurm, tmp_path)
    actor = run.members()["actor-0"]["pid"]
    slurm.run("scancel", "--signal=KILL", run.members()[f"{victim}-0"]["step"])
    until(lambda: run.recoveries, "they start again")
    assert run.members()["actor-0"]["pid"] == actor
    run.finish(process, 300)  # type: ignore[arg-type]
    assert len(run.attempts) == 1 and run.recoveries[0] >= before
    assert [row["step"] for row in run.rows()] == list(range(1, LAST + 1))


def test_the_driver_is_killed(slurm: SlurmCluster, tmp_path: Path) -> None:
    run, process, before = start(slurm, tmp_path)
    kill(int(run.json("status.json")["pid"]))
    resumed(run, process, before)


def test_the_waiter_is_killed(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The job goes on; the same command again waits for it."""
    run, process, _ = start(slurm, tmp_path, f"runner.max_steps={LONGER}")
    kill(process.pid)  # type: ignore[attr-defined]
    job = run.job
    again = run.submit()
    run.finish(again, 300)
    assert run.job == job and len(run.attempts) == 1 and f"waiting for Slurm job {job}" in run.log.read_text()


def test_a_node_fails(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its slurmd and all its processes die: Slurm gives the job another node."""
    run, process, before = start(slurm, tmp_path)
    node = run.members()["env-0"]["node"]
    slurm.kill_slurmd(node)
    try:
        until(
            lambda: run.members().get("env-0", {}).get("node") not in (None, node),
            "its environments are elsewhere",
            150,
        )
        resumed(run, process, before)
    finally:
        slurm.start_slurmd(node)


def test_a_node_is_cut_off(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Its processes live on, and may not take part any more when they are back."""
    if not slurm.nodes_are_hosts:
        pytest.skip("the nodes of this cluster share one network, so none can be cut off")
    run, process, before = start(slurm, tmp_path)
    old = run.members()["env-0"]
    rank = Process.of(old["pid"])
    assert rank is not None
    slurm.cut(old["node"])
    try:
        elsewhere = (None, old["node"])
        until(
            lambda: run.members().get("env-0", {}).get("node") not in elsewhere, "its environments are elsewhere", 150
        )
    finally:
        slurm.restore(old["node"])
    resumed(run, process, before)
    slurm.wait_for_nodes(old["node"], deadline_s=180)  # the controller asks a silent node again every minute or so
    asked = 0.0

    def gone() -> bool:
        nonlocal asked
        if time.monotonic() - asked > 20:  # else it may take minutes until the controller asks the node what runs there
            asked = time.monotonic()
            slurm.run("scontrol", "reconfigure")
        return not rank.alive()

    until(gone, "the cut-off rank is gone", 180)


def test_the_controller_is_away(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Training needs no slurmctld, and waiting survives its absence."""
    run, process, before = start(slurm, tmp_path, f"runner.max_steps={LONGER}")
    slurm.stop_controller()
    try:
        until(lambda: run.committed() > before, "it trains on without the controller")
    finally:
        slurm.start_controller()
    run.finish(process, 300)  # type: ignore[arg-type]
    assert len(run.attempts) == 1


def test_out_of_memory(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The message says what to look at; a run that never gets anywhere ends."""
    run = SlurmRun(slurm, tmp_path, *STEPS, "runner.max_restarts=1", "runner.save_interval=-1", light=True)
    process = run.submit()
    victims: set[int] = set()
    for _ in range(2):
        until(
            lambda: run.members().get("env-0", {}).get("pid", 0) not in {0, *victims}, "its environments are there", 60
        )
        victims.add(run.members()["env-0"]["pid"])
        kill(run.members()["env-0"]["pid"])  # as the kernel's out-of-memory killer does
    said = run.finish(process, 120, code=1)
    assert "look for the out-of-memory killer" in said and "restarted 1 times without a new checkpoint" in said


def test_an_error_of_the_program_is_not_tried_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A traceback would come again; the user sees it at once."""
    (tmp_path / "broken.py").write_text("def loss(**_):\n    raise RuntimeError('a mistake in the loss')\n")
    run = SlurmRun(slurm, tmp_path, *STEPS, "algorithm.loss_type=broken:loss", light=True)
    said = run.finish(run.submit(), 120, code=1)
    assert "a mistake in the loss" in said and len(run.attempts) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small filesystem")
def test_the_run_folder_is_full(
    new_cluster: Callable[[str], AbstractContextManager[SlurmCluster]], tmp_path: Path
) -> None:
    """One clear message; what was committed stays, and the same command goes on once there is room."""
    folder = tmp_path / "small"
    folder.mkdir()
    # before the cluster, so that its nodes see it
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    try:
        with new_cluster("noaccounting") as slurm:
            run, process, before = start(slurm, folder, "runner.max_restarts=1", "runner.keep_checkpoints=1")
            with contextlib.suppress(OSError), (folder / "filler").open("wb") as filler:
                while True:
                    filler.write(bytes(1 << 16))
                    filler.flush()
            assert process.wait(240) != 0  # type: ignore[attr-defined]
            (folder / "filler").unlink()
            said = run.log.read_text() + (run.root / "logs" / "segment_0" / "driver.err").read_text()
            assert "No space left on device" in said and "Traceback" not in said, said
            wait_gone(slurm)
            assert run.committed() >= before
            run.finish(run.submit(), 300)
            assert [row["step"] for row in run.rows()] == list(range(1, LAST + 1))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
