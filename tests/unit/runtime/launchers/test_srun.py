"""Job steps without a Slurm: their environment, what srun's words mean, which devices a rank takes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import Attempts, SegmentJournal
from rlhpc.jobs.slurm import component_ids
from rlhpc.runtime import network
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import (
    CallAborted,
    ChannelError,
    ConfigError,
    PlacementError,
    RlhpcError,
    StaleGeneration,
    StepFailed,
    WorkerFailed,
)
from rlhpc.runtime.launchers import RankProcess
from rlhpc.runtime.launchers.node_fork import pid_file
from rlhpc.runtime.launchers.srun import SrunLauncher, task_status
from rlhpc.runtime.launchers.srun_commands import killing_step, step_environment
from rlhpc.runtime.worker_spec import WorkerSpec, step_devices


def test_the_steps_environment() -> None:
    """What Slurm set for the batch step alone must not size or bind another step; what names the job stays."""
    job = {
        "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_JOB_ID": "7", "SLURM_JOB_ID_HET_GROUP_1": "8", "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n2", "SLURM_RESTART_COUNT": "1", "SLURM_STEPMGR": "n1",
        "SLURM_NODELIST": "n1", "SLURM_CLUSTER_NAME": "c", "SLURM_JOB_SLUID": "s1", "SLURM_NETWORK": "vni",
        "PATH": "/bin", "HOME": "/home/me",
    }  # fmt: skip
    batch = dict.fromkeys(
        ("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NPROCS", "SLURM_NNODES",
         "SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SBATCH_GRES",
         "SLURM_DISTRIBUTION", "SLURM_TASKS_PER_NODE", "SRUN_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "SUBMITIT_EXECUTOR",
         # of 23.11 and later, and users' own
         "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_GRES_FLAGS", "SLURM_MPI_TYPE", "SLURM_STDINMODE", "SLURM_LABELIO",
         "SLURM_OOM_KILL_STEP", "SLURM_WAIT", "SLURM_EXIT_ERROR", "SLURM_HINT", "SLURM_SRUN_REDUCE_TASK_EXIT_MSG",
         "SLURM_SPREAD_SEGMENTS", "SRUN_INPUT", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        "1",
    )  # fmt: skip
    assert step_environment({**job, **batch}) == job


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("Killed", signal.SIGKILL),
        ("Terminated", signal.SIGTERM),
        ("Segmentation fault (core dumped)", signal.SIGSEGV),
        ("Exited with exit code 3", 3 << 8),
        ("Exited with exit code 137", signal.SIGKILL),  # as bubblewrap and shells end after a program that was killed
        ("Exited with exit code 143", signal.SIGTERM),
        ("Exited with exit code 128", 128 << 8),
        ("Exited with exit code 255", 255 << 8),
        ("Out Of Memory", signal.SIGKILL),
        ("Job step aborted", None),
    ],
)
def test_what_srun_says_of_a_task(words: str, status: int | None) -> None:
    assert task_status(words) == status


def spec(*accelerators: int) -> WorkerSpec:
    return WorkerSpec("actor", 0, 1, "n1", 0, 0, 1, accelerators, "r", "t", b"", "o", "e")


def test_a_rank_takes_its_own_devices() -> None:
    masked = {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert step_devices(spec(1), masked, ("4", "6")) == "6"
    assert step_devices(spec(0, 1), masked, ("4", "6")) == "4,6"
    assert step_devices(spec(), masked, ("4", "6")) == "", "a rank without accelerators sees none"
    assert step_devices(spec(2), {}, ()) == "2", "a site that masks nothing"
    with pytest.raises(ConfigError, match=r"actor-0 on node n1 .* accelerator 2, .* given 2 there .*'4,6'"):
        step_devices(spec(2), masked, ("4", "6"))


def test_node_groups_with_different_pythons_are_no_ranks_of_one_job_step() -> None:
    specs = [spec(), spec()]
    specs[1].interpreter = "/opt/other/bin/python"
    members = [SimpleNamespace(spec=each) for each in specs]
    with pytest.raises(
        PlacementError, match=r"actor: .* different Pythons \(/opt/other/bin/python\), and a job step has one"
    ):
        object.__new__(SrunLauncher).start(members, Cluster.local())  # type: ignore[arg-type]


def test_addresses() -> None:
    assert network.interfaces()["lo"] == "127.0.0.1" == network.address_of("lo") == network.address_towards("127.0.0.1")
    assert network.interface_of("127.0.0.1") == "lo" and network.interface_of("203.0.113.7") is None
    with pytest.raises(ConfigError, match=r"cluster.interface is 'nope0'.*there are: .*lo \(127.0.0.1\)"):
        network.address_of("nope0")
    with pytest.raises(ConfigError, match=r"finds no way to no-such-host\.invalid"):
        network.address_towards("no-such-host.invalid")


def test_component_ids() -> None:
    het = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_ID_HET_GROUP_1": "8"}
    assert component_ids(het) == ["7", "8"]
    assert component_ids({"SLURM_JOB_ID": "7"}) == ["7"] and component_ids({}) == []


def test_attempts_are_counted_until_there_is_progress(tmp_path: Path) -> None:
    files = SegmentJournal(RunPaths(tmp_path), 0)
    files.paths.submit.mkdir()
    for step in (-1, -1, 20):
        attempts = Attempts(files, "token")
        attempts.begin(step, "7")
        attempts.end("failed: a node")
        attempts.note("n1")
    again = Attempts(files, "token")
    assert again.count == 3 and (again.num_idle(20), again.num_idle(-1), again.num_idle(40)) == (1, 0, 0)
    assert again.blames("n1") and not again.blames("n2")
    assert Attempts(files, "another submission").count == 0


@pytest.mark.parametrize(
    ("error", "restartable"),
    [
        (WorkerFailed("killed", exit_signal=9), True),
        (WorkerFailed("raised", remote_traceback="Traceback …"), False),
        (StepFailed("no step"), True),
        (ChannelError("gone"), True),
        (StaleGeneration("old"), False),
        (ConfigError("wrong"), False),
    ],
)
def test_what_may_be_tried_again(error: RlhpcError, restartable: bool) -> None:
    assert error.restartable is restartable


def test_a_rank_that_raised_for_anothers_failure_may_be_tried_again() -> None:
    failure = WorkerFailed("raised", remote_traceback="Traceback …")
    failure.__cause__ = CallAborted("another group failed")
    assert failure.restartable


def test_one_task_of_a_step_is_killed(tmp_path: Path) -> None:
    """With all that it has started, also what hides its environment and its session; a stopped one, too; no other task."""
    mark = f"RLHPC_STEP=many-{os.getpid()}"
    hidden = f"{shlex.quote(sys.executable)} -c 'import time; time.sleep(60)'"

    def task(number: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "SLURM_PROCID": str(number), **dict([mark.split("=")])}
        script = f"setsid env -i {hidden} & echo $!; wait"
        return subprocess.Popen(["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True)

    tasks = [task(0), task(1), task(11)]
    children = [int(one.stdout.readline()) for one in tasks if one.stdout]
    forked = [subprocess.Popen(["sleep", "60"], env={}) for _ in tasks]  # as `node_fork` starts the ranks of tasks
    for number, rank in zip((0, 1, 11), forked, strict=True):
        pid_file(tmp_path, mark.partition("=")[2], str(number)).write_text(str(rank.pid))
    try:
        tasks[1].send_signal(signal.SIGSTOP)
        argv = killing_step(1, 2, "n1", mark, 1, tmp_path)
        assert argv[: argv.index("bash")][-2:] == ["--het-group=1", "--nodelist=n1"]
        done = subprocess.run(argv[argv.index("bash") :], timeout=60)
        assert done.returncode == 0 and tasks[1].wait(10) == -signal.SIGKILL
        assert not is_alive(children[1]) and all(map(is_alive, (children[0], children[2])))
        assert tasks[0].poll() is None and tasks[2].poll() is None
        assert forked[1].wait(10) == -signal.SIGKILL
        assert forked[0].poll() is None and forked[2].poll() is None
    finally:
        for pid in [*children, *(one.pid for one in [*tasks, *forked])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in [*tasks, *forked]:
            one.communicate()


class RecordedReports:
    """Reports of a launcher: no rank was expected to end."""

    def __init__(self) -> None:
        self.errors: list[RlhpcError] = []
        self.has_ended = threading.Event()

    def record_exit(self, member: RankProcess, status: int) -> None:
        pass

    def record_ends(self, members: Sequence[RankProcess]) -> list[RankProcess]:
        return list(members)

    def fail(self, error: RlhpcError) -> None:
        self.errors.append(error)
        self.has_ended.set()


@pytest.mark.parametrize(
    ("code", "says"), [(0, "srun ended before its ranks had:"), (3, "srun ended with exit code 3:")]
)
def test_srun_ends_before_its_ranks(code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit code is only said where it is one of a failure; its words follow."""
    program = tmp_path / "srun"
    program.write_text(f"#!/bin/sh\necho 'srun: error: Unable to confirm allocation'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reports = RecordedReports()
    launcher = SrunLauncher(tmp_path, SimpleNamespace(), reports)  # type: ignore[arg-type]
    launcher.start([RankProcess(spec(), launcher)], Cluster.local(1))
    assert reports.has_ended.wait(30), "waited for the end of srun"
    [error] = reports.errors
    assert says in str(error) and "Unable to confirm allocation" in str(error), error


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
