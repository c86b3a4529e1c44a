"""Traffic of a run: operations on the shared filesystem, queries of the scheduler and bytes over the network, counted.

`run`: ranks of one group that are simulated (`bench/peers/members.py`: records, sockets and heartbeats over TCP, many per
process); the driver's code is that of rlhpc. One rank a second writes a line to its log. `follow`, `status` and `join` are the
commands `rlhpc logs --follow`, `rlhpc status` and, after the driver was killed, `rlhpc join` by several ranks of one host.
`step`: a real run of three ranks, in which the operations of a training step are counted. `queries`: all commands that ask
Slurm about jobs, at the same time, with a stand-in for `squeue` that counts.

    python -m bench.traffic
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.machine import RESULTS, goal, write
from bench.peers.traced import Operations, count_command_operations, count_operations
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_probe import wait_folder

RANKS = (100, 1000)
PARTS = ["ranks", "step", "queries"]
WINDOW_S = 15.0
#: Joined ranks that wait on one host.
JOINED = 4
_STEP_RUN = "configs/quickstart.yaml"
SQUEUE = """#!/bin/sh
date +%s.%N >> {calls}
echo '7|RUNNING|None|n1|2030-01-01T00:00:00|mine'
"""


def wait_for(condition: Callable[[], Any], purpose: str, deadline_s: float = 120.0) -> Any:
    """Returns the first true result of `condition`.

    Raises:
        TimeoutError: The condition was not met within `deadline_s`; the message has `purpose`.
    """
    deadline = time.monotonic() + deadline_s
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {deadline_s:.0f} s for {purpose}")
        time.sleep(0.1)
    return result


# -- the driver ---------------------------------------------------------------------------------------------------------


def write_lines(control: socket.socket) -> None:
    """Writes one line a second, to the logs of the ranks in rotation, and notifies the driver as a rank would."""
    import pickle

    from rlhpc.runtime import pickle_stream
    from rlhpc.runtime.comm.service import Service
    from rlhpc.runtime.comm.zmq_sockets import choose
    from rlhpc.runtime.registry import GenerationFolder
    from rlhpc.runtime.scratch import Scratch

    message = pickle_stream.receive(control)
    if message is None:
        return
    specs = [pickle.loads(spec) for spec in message]
    keys = GenerationFolder(Path(specs[0].registry)).load_keys()
    service = Service(f"lines-{os.getpid()}", keys, Scratch(specs[0].token), None)
    driver, number = choose(specs[0].driver), 0
    control.settimeout(1.0)
    while True:
        spec = specs[number % len(specs)]
        with Path(spec.log_err).open("ab") as log:
            log.write(f"line {number} {time.time():.3f}\n".encode())
            size = log.tell()
        note = {"note": "logs", "name": spec.name, "incarnation": spec.incarnation, "positions": (0, size)}
        service.peers.post(driver, b"NOTE", [pickle.dumps(note)])
        number += 1
        try:
            if not control.recv(1):
                return
        except TimeoutError:
            pass


def drive(count: int, folder: Path) -> None:
    """Drives a session of `count` simulated ranks until the standard input ends; prints the processes' ids."""
    from bench.peers.members import Simulators

    simulators = Simulators(count)  # forks: before there is any thread
    lines_socket, child_socket = socket.socketpair()
    if (lines_pid := os.fork()) == 0:
        try:
            lines_socket.close()
            write_lines(child_socket)
        finally:
            os._exit(0)
    child_socket.close()
    from rlhpc import Cluster, NodePlacementStrategy, Session, Worker
    from rlhpc.runtime import pickle_stream
    from rlhpc.runtime.host import node_name

    paths = RunPaths(folder)
    session = Session.start(registry_root=paths.registry, log_dir=paths.segment_logs(0), tcp_address="127.0.0.1")
    tell_server, specs = session._fork_launcher._send_request, list[bytes]()

    def start(**message: Any) -> None:
        if message["op"] != "start":
            tell_server(**message)
            return
        specs.append(message["spec"])
        simulators.start(message["spec"])

    session._fork_launcher._send_request = start
    group = Worker.create_group()
    group.launch(Cluster.local(1, 0), NodePlacementStrategy([0] * count), "group", wait=False)
    simulators.go()
    group.wait_ready()
    for rank in range(count):
        for stream in ("out", "err"):
            (session.log_dir / f"group-{rank}.{stream}").touch()
    now = time.time()
    status = {"state": "running", "pid": os.getpid(), "host": node_name(), "started": now, "updated": now, "step": 1}
    paths.driver_state.write_text(json.dumps(status))
    pickle_stream.send(lines_socket, specs)
    print(json.dumps({"driver": os.getpid(), "simulators": simulators.pids, "lines": lines_pid}), flush=True)
    sys.stdin.read()
    for pid in (*simulators.pids, lines_pid):
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


@contextmanager
def simulated_run(count: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Runs a driver with simulated ranks during the block; yields the ids of its processes."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "bench.traffic", "--drive", str(count), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert driver.stdout is not None and driver.stdin is not None
    try:
        line = driver.stdout.readline()
        if not line:
            raise RuntimeError(f"the driver of {count} simulated ranks ended with exit code {driver.wait()}")
        yield json.loads(line)
    finally:
        driver.stdin.close()
        try:
            driver.wait(30)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


# -- what is counted ------------------------------------------------------------------------------------------------------


def count_steady(pids: dict[str, Any], folder: Path, window_s: float = WINDOW_S) -> Operations:
    """Counts the operations of driver and ranks in a steady state, without the lines that ranks write to their logs."""
    with count_operations([pids["driver"], *pids["simulators"]], folder, folder.parent / "steady.strace") as operations:
        time.sleep(window_s)
    return operations


@contextmanager
def run_follower(folder: Path, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Runs `rlhpc logs --follow` during the block."""
    command = [sys.executable, "-m", "rlhpc.cli", "logs", str(folder), "--follow", "--lines", "0"]
    follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})
    try:
        yield follower
    finally:
        follower.kill()
        follower.communicate()


def count_following(folder: Path, window_s: float = WINDOW_S) -> tuple[Operations, list[float]]:
    """Counts the operations of a terminal that follows the logs; returns also the ages of the lines that it printed."""
    with run_follower(folder) as follower:
        assert follower.stdout is not None
        for _ in range(3):
            follower.stdout.readline()
        ages = list[float]()
        with count_operations([follower.pid], folder, folder.parent / "follow.strace") as operations:
            end = time.monotonic() + window_s
            while time.monotonic() < end:
                match = re.search(r"line \d+ ([\d.]+)", follower.stdout.readline())
                if match:
                    ages.append(time.time() - float(match[1]))
    return operations, ages


def count_status(folder: Path) -> Operations:
    """Counts the operations of one `rlhpc status`."""
    command = [sys.executable, "-m", "rlhpc.cli", "status", str(folder)]
    return count_command_operations(command, folder, folder.parent / "status.strace")


@contextmanager
def join_ranks(folder: Path, count: int, environment: dict[str, str] | None = None) -> Iterator[list[int]]:
    """Runs `rlhpc join` for several ranks of this host during the block."""
    command = [sys.executable, "-m", "rlhpc.cli", "join", str(folder), "--group", "group", "--await-driver"]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **(environment or {})}, stderr=subprocess.DEVNULL)
        for _ in range(count)
    ]
    try:
        yield [rank.pid for rank in ranks]
    finally:
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.wait(30)


def count_waiting_host(folder: Path, count: int = JOINED, window_s: float = 2 * WINDOW_S) -> Operations:
    """Counts the operations of a host whose joined ranks wait for the next driver of a run."""
    with join_ranks(folder, count) as pids:
        lookup_files = list(wait_folder().glob("look-*.json"))
        wait_for(lambda: [*wait_folder().glob("look-*.json")] != lookup_files, "a rank to look at the run", 300)
        wait_for(lambda: _are_idle(pids), "all ranks to have found that the driver is gone", 300)
        with count_operations(pids, folder, folder.parent / "join.strace") as operations:
            time.sleep(window_s)
        if not all(psutil.pid_exists(pid) for pid in pids):
            raise RuntimeError("a joined rank did not wait")
    return operations


def _are_idle(pids: Sequence[int]) -> bool:
    """Returns whether the processes hardly computed during ten seconds."""

    def cpu_s() -> list[float]:
        return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]

    before = cpu_s()
    time.sleep(10.0)
    return all(0.5 < after < earlier + 0.3 for earlier, after in zip(before, cpu_s(), strict=True))


def count_run(count: int) -> dict[str, float]:
    """Counts the operations of a run with `count` simulated ranks, and of the commands that read it."""
    row: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "run"
        folder.mkdir()
        with simulated_run(count, folder) as pids:
            time.sleep(8.0)
            operations = count_steady(pids, folder)
            row["run (operations/s)"] = operations.per_s
            row["sent by driver and ranks (kB/s)"] = operations.sent_bytes / operations.seconds / 1e3
            operations, ages = count_following(folder)
            row["logs --follow (operations/s)"] = operations.per_s
            row["oldest line when printed (s)"] = max(ages)
            row["status (operations)"] = sum(count_status(folder).counts.values())
            os.kill(pids["driver"], signal.SIGKILL)
            for pid in (*pids["simulators"], pids["lines"]):
                os.kill(pid, signal.SIGKILL)
        state = json.loads(RunPaths(folder).driver_state.read_text())
        RunPaths(folder).driver_state.write_text(json.dumps({**state, "host": "elsewhere", "updated": time.time()}))
        row[f"host of {JOINED} waiting ranks (operations/s)"] = count_waiting_host(folder).per_s
    return row


def count_steps(window_s: float = WINDOW_S) -> dict[str, float]:
    """Counts the operations of a real run on this host: of a second without steps, and of each step."""
    with tempfile.TemporaryDirectory() as parent:
        root = Path(parent).resolve()
        paths = RunPaths(root / "run")
        overrides = [
            "runner.name=run",
            f"runner.run_dir={root}",
            "runner.max_steps=100000",
            "runner.save_interval=100000",
        ]
        command = [sys.executable, "-m", "rlhpc.cli", "train", _STEP_RUN, *overrides]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def steps() -> int:
            return sum(1 for _ in paths.metrics.open()) if paths.metrics.exists() else 0

        try:
            wait_for(lambda: steps() >= 3, "the first steps", 600)
            pids = [driver.pid, *(child.pid for child in psutil.Process(driver.pid).children(recursive=True))]
            first_step = steps()
            with count_operations(pids, paths.root, root / "strace") as operations:
                time.sleep(window_s)
            num_steps = steps() - first_step
        finally:
            driver.terminate()
            driver.wait(60)
    total = sum(operations.counts.values())
    return {"steps/s": num_steps / operations.seconds, "operations/s": operations.per_s,
            "appends to metrics files a step": operations.counts["write"] / num_steps,
            "operations a step": total / num_steps}  # fmt: skip


WAIT = """
import sys, time
from rlhpc.jobs.probes import SlurmProbe
from rlhpc.jobs.shared_probe import SharedProbe
probe = SharedProbe(SlurmProbe())
while True:
    probe.query_job("7") if sys.argv[1] == "waiter" else probe.jobs_named("helpers")
    time.sleep(1.0)
"""


def create_submitted_run(folder: Path) -> RunPaths:
    """Creates the folder of a run whose Slurm job 7 runs on another host."""
    from rlhpc.jobs.segment import JobRecord, SegmentJournal

    paths = RunPaths(folder)
    paths.submit.mkdir(parents=True)
    JobRecord(0, 1, "t", "slurm", [], "mine", job_id="7", phase="submitted").write(SegmentJournal(paths, 0))
    return paths


def count_queries(window_s: float = 50.0) -> dict[str, float]:
    """Counts `squeue` while waiters, drivers with helper jobs, status loops and followers run on this host."""
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        root = Path(parent).resolve()
        calls, bin_folder, folder = root / "calls", root / "bin", root / "run"
        bin_folder.mkdir()
        calls.touch()
        (bin_folder / "squeue").write_text(SQUEUE.format(calls=calls))
        (bin_folder / "squeue").chmod(0o755)
        environment = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(root)}
        create_submitted_run(folder)
        for role in ("waiter", "waiter", "driver", "driver"):
            process = subprocess.Popen([sys.executable, "-c", WAIT, role], env={**os.environ, **environment})
            stack.callback(process.wait)
            stack.callback(process.kill)
        for _ in range(2):
            stack.enter_context(run_follower(folder, environment))
        end, num_status = time.monotonic() + window_s, 0
        while time.monotonic() < end:
            subprocess.run(
                [sys.executable, "-m", "rlhpc.cli", "status", str(folder)],
                env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            num_status += 1
        times = [float(line) for line in calls.read_text().split()]
    return {"squeue/min": (len(times) - 1) / (times[-1] - times[0]) * 60, "status commands": num_status}


def main(argv: Sequence[str] | None = None) -> None:
    """Counts the traffic, and writes `results/traffic.json`; parts that are not counted keep their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drive", nargs=2, metavar=("COUNT", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args(argv)
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.drive:
        drive(int(args.drive[0]), Path(args.drive[1]))
    path = RESULTS / "traffic.json"
    figures: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() else {}
    if "ranks" in args.parts:
        figures["simulated ranks"] = {str(count): count_run(count) for count in RANKS}
    if "step" in args.parts:
        figures["real run of 3 ranks"] = count_steps()
    if "queries" in args.parts:
        figures["queries of a host"] = count_queries()
    print(json.dumps(figures, indent=1))
    rows, goals = figures.get("simulated ranks", {}), []
    for count, row in rows.items():
        joined_name = f"host of {JOINED} waiting ranks (operations/s)"
        bounds = {"run (operations/s)": 20, "logs --follow (operations/s)": 5, joined_name: 1}
        goals += [goal(f"{count} ranks: {name}", row[name], at_most=bound) for name, bound in bounds.items()]
    if "queries of a host" in figures:
        goals.append(goal("all commands of a host: squeue/min", figures["queries of a host"]["squeue/min"], at_most=6))
    for line in goals:
        print(f"{'met   ' if line['met'] else 'MISSED'} {line['goal']:60} {line['measured']:8.2f} ({line['wanted']})")
    print(write("traffic", "python -m bench.traffic", {"figures": figures, "goals": goals}))


if __name__ == "__main__":
    main()
