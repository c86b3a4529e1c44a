"""Process of a rank: environment, interpreter, signals, limits, cores and its end."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhpc import Cluster, WorkerFailed
from rlhpc.runtime import devices, worker_process
from rlhpc.runtime.placement import Placement
from rlhpc.runtime.worker_spec import for_input, spec_of
from tests.launching import Launch
from tests.probes import Awkward

CARDS = ("0000:1b:00.0", "0001:e3:00.0")


def test_environment_and_fresh_interpreter(launch: Launch) -> None:
    group = launch(1, "spawned", env_vars={"RLHPC_TEST": "yes"}, fork=False)
    assert group.environ("RLHPC_TEST").wait() == ["yes"]
    forked = launch(1, "forked")
    assert forked.environ("RLHPC_TEST").wait() == [None]


def test_what_close_raises_is_logged() -> None:
    group = Awkward.create_group("").launch(Cluster.local(1, 0), name="clinging")
    log = Path(group._records[0]["log_err"])
    group.shutdown()
    assert "clinging-0.close() failed" in log.read_text() and "would not let go" in log.read_text()


def test_signals_of_the_job_reach_ranks_and_end_none(launch: Launch) -> None:
    group = launch(1, "deaf")
    pid = group.identity().wait()[0]["pid"]
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert group.add(1).wait() == [1]
    with pytest.raises(WorkerFailed, match="signal 15"):
        os.kill(pid, signal.SIGTERM)
        group.nap(60).wait()


def test_ranks_may_open_as_many_files_as_the_system_lets_them(launch: Launch) -> None:
    group = launch(1, "openers")
    pid = group.identity().wait()[0]["pid"]
    soft, hard = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 16)


def test_a_rank_that_does_not_see_the_drivers_socket_says_so_at_once(tmp_path: Path) -> None:
    """As in a container with a /tmp of its own, on the only node of a job, where nobody listens on TCP."""
    placement = Placement(0, 0, 0, 1, (), "cluster")
    spec = spec_of(
        "actor", placement, 1, Cluster.local(1, 0), {}, 1, tmp_path, registry="", token="t", body=b"",
        driver={"ipc": f"ipc://{tmp_path}/elsewhere/s"},
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rlhpc.runtime.worker_process", "step"], input=for_input([spec]),
        env={**os.environ, "SLURM_PROCID": "0"}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"actor-0 does not see the driver's socket {tmp_path}/elsewhere/s" in done.stderr.decode()


TERMINATED = """
import ctypes, os, signal, sys
from rlhpc.runtime.worker_process import before_sigterm
before_sigterm(lambda: print("left", flush=True))
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
sys.stdin.readline()
# a mutex that is never given back: the main thread sits in C, where no handler of Python's ever runs
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
print("stuck", flush=True)
lock(mutex)
"""


def test_sigterm_ends_a_rank_as_ever_but_it_leaves_first() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    child = int(process.stdout.readline())
    os.kill(child, signal.SIGTERM)  # a child of the rank, as a simulator that is terminated
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the child did not end"
        time.sleep(0.01)
    assert process.poll() is None, "its own signal is not its parent's"
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "stuck\n"
    process.terminate()
    said, _ = process.communicate(timeout=30)
    assert said == "left\n" and process.returncode == -signal.SIGTERM


def test_ranks_with_accelerators_do_so_unless_told_not_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(devices.VIRTUAL, "1")
    asked: list[Any] = []
    monkeypatch.setattr(worker_process, "pci_addresses", lambda: list(CARDS))
    monkeypatch.setattr(worker_process, "bind_near", lambda *given: asked.append(given) or "bound")

    def start(*accelerators: int, **section: Any) -> list[Any]:
        cluster = Cluster({"accelerators_per_node": 1, **section}, environ={devices.VIRTUAL: "1"})
        placement = Placement(
            rank=0, node_rank=0, accelerators=accelerators, local_rank=0, local_world_size=1, node_group=None
        )
        spec = spec_of("group", placement, 1, cluster, {}, 1, tmp_path, registry="", token="", body=b"")
        spec.threads = 3
        asked.clear()
        worker_process._bind_near_devices(spec)
        return list(asked)

    with caplog.at_level(logging.INFO):
        assert start(0) == [(list(CARDS), 3)]
    assert "cores: bound" in caplog.text
    assert start() == [], "a rank without an accelerator is not bound"
    assert start(0, bind_cores=False) == []
    assert not Cluster.local(1, 1).bind_cores, "imaginary accelerators are near nothing"


#: Modules of the driver's part of the runtime, which a rank needs only for groups of its own.
DRIVER_MODULES = {
    "rlhpc.runtime.session",
    "rlhpc.runtime.cluster",
    "rlhpc.runtime.worker_group",
    "rlhpc.runtime.placement",
}
#: Driver whose rank prints the modules that it has imported.
FRESH_RANK = """
import sys
from rlhpc import Cluster, Session, Worker
assert "torch" not in sys.modules, "the driver has imported torch before it starts ranks"

class Fresh(Worker):
    def modules(self):
        return list(sys.modules)

group = Fresh.create_group().launch(Cluster.local(1, 0), fork=sys.argv[1] == "fork")
modules = group.modules().wait()[0]
Session.current().stop()
print(*modules)
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_rank_answers_before_it_has_imported_much(way: str) -> None:
    """No rank of a node answers before these modules are imported, by the node's fork server or by each rank."""
    driver = subprocess.run(
        [sys.executable, "-c", FRESH_RANK, way], capture_output=True, text=True, check=True, timeout=120
    )
    modules = set(driver.stdout.split())
    packages = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    assert "rlhpc.runtime.rpc" in modules and ("torch" in packages) == (way == "fork")
    assert not DRIVER_MODULES & modules
    assert (
        not {"omegaconf", "yaml", "psutil", "pydantic", "submitit", "snakemake", "torchvision", "transformers"}
        & packages
    )
