"""Rendezvous and dispatch as the number of workers grows, and on a slow filesystem.

`real`: processes, up to the number that two cores can run. `simulated`: up to 10 000 members of one group, which are
records, sockets and heartbeats over TCP and share processes (`bench/peers/members.py`); the driver's code is that of rlhpc.
`bench.scale_model` runs the loop of `bench.scale_loop` with such members (`simulated_loop`).
`slow`: each operation on the registry's files takes a given number of milliseconds more, in every process of the session.

    python -m bench.scale
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from bench.machine import goal, spread, write

if TYPE_CHECKING:
    from bench.peers.members import Simulators
    from rlhpc import Session

REAL = (1, 2, 4, 8, 16, 32)
SIMULATED = (10, 100, 1000, 10_000)
SLOW_MS = (0, 20, 100)


def run_child(*arguments: str, **environment: str) -> dict[str, float]:
    """Runs one measurement in a separate process."""
    command = [sys.executable, "-m", "bench.scale", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment})
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


def time_call(act: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


def measure_real(count: int) -> dict[str, float]:
    """Measures a group of `count` processes."""
    from bench.peers.rlhpc_runtime import RuntimePeer
    from rlhpc import Cluster, NodePlacementStrategy, Session

    cluster = Cluster.local(1, 0)
    RuntimePeer.create_group().launch(cluster, NodePlacementStrategy([0]), "first")
    group = RuntimePeer.create_group()
    row = {"launch (s)": time_call(lambda: group.launch(cluster, NodePlacementStrategy([0] * count), "group"))}
    group.idle().wait()
    row["dispatch to all (us)"] = float(np.median([time_call(lambda: group.idle().wait()) for _ in range(100)])) * 1e6
    row["end (s)"] = time_call(group.shutdown)
    Session.current().stop()
    return row


@contextlib.contextmanager
def simulated_session(simulators: Simulators, folder: Path) -> Iterator[Session]:
    """Starts a session whose ranks are members that share processes, and ends both."""
    from rlhpc import Session

    session = Session.start(registry_root=folder / "registry", log_dir=folder / "logs", tcp_address="127.0.0.1")
    tell_server = session._fork_launcher._send_request

    def start(**message: Any) -> None:
        simulators.start(message["spec"]) if message["op"] == "start" else tell_server(**message)

    session._fork_launcher._send_request = start
    yield session
    session._fork_launcher._send_request = tell_server
    for process in session.processes.values():
        process.state = "ended"
    simulators.stop()
    session.stop()


def measure_cost(act: Callable[[], Any]) -> tuple[float, float]:
    """Returns wall seconds and CPU seconds of this process."""
    cpu_before_s = time.process_time()
    wall_s = time_call(act)
    return wall_s, time.process_time() - cpu_before_s


def measure_simulated(count: int) -> dict[str, float]:
    """Measures a group of `count` members that share processes."""
    from bench.peers import slow_files
    from bench.peers.members import Simulators

    simulators = Simulators(count)  # forks: before there is any thread
    from rlhpc import Cluster, NodePlacementStrategy, Worker

    with tempfile.TemporaryDirectory() as folder:
        slow_files.install(folder)
        with simulated_session(simulators, Path(folder)):
            this_process = psutil.Process()
            memory = this_process.memory_info().rss
            slow_files.take_count()
            group = Worker.create_group()
            cluster = Cluster.local(1, 0)

            def launch() -> None:
                group.launch(cluster, NodePlacementStrategy([0] * count), "group", wait=False)
                simulators.go()
                group.wait_ready()

            row: dict[str, float] = {}
            row["rendezvous (s)"], row["rendezvous, CPU of the driver (s)"] = measure_cost(launch)
            row["file operations of the driver"] = slow_files.take_count()
            row["file operations a member"] = simulators.count_operations() / count
            row["first dispatch (s)"], row["first dispatch, CPU of the driver (s)"] = measure_cost(
                lambda: group.barrier().wait()
            )
            later_barriers = [measure_cost(lambda: group.barrier().wait()) for _ in range(5)]
            row["dispatch (s)"] = float(np.median([wall_s for wall_s, _ in later_barriers]))
            row["dispatch, CPU of the driver (s)"] = float(np.median([cpu for _, cpu in later_barriers]))
            _, idle_cpu_s = measure_cost(lambda: time.sleep(4.0))
            row["idle, CPU of the driver (% of a core)"] = idle_cpu_s / 4 * 100
            row["memory of the driver (MB)"] = (this_process.memory_info().rss - memory) / 1e6
    return row


def measure_simulated_loop(count: int) -> dict[str, float]:
    """Measures a real driver in the loop of `bench.scale_loop`, with `count` members that share processes.

    Members of a process run one after the other, so only the driver's processor time is comparable. The weights are left out.
    """
    from bench.peers.members import Simulators
    from bench.scale_loop import ACTOR, ROLLOUT, LoopRank, Sizes

    simulators = Simulators(count)  # after the imports, which its processes then share
    from rlhpc import Channel, Cluster, NodePlacementStrategy
    from rlhpc.language.rollout.prompt_queue import PromptTracker
    from rlhpc.language.training.prompt_dispatch import GROUPS

    sizes, cluster = Sizes(count, ranks_per_host=8, prompts_per_rank=1, chunks=1, chunk_bytes=64), Cluster.local(1, 0)
    with tempfile.TemporaryDirectory() as folder, simulated_session(simulators, Path(folder)):
        this_process = psutil.Process()
        memory, files = this_process.memory_info().rss, this_process.num_fds()
        groups = []

        def launch() -> None:
            for name, ranks in ((ACTOR, sizes.actors), (ROLLOUT, sizes.rollouts)):
                group = LoopRank.create_group()
                groups.append(group.launch(cluster, NodePlacementStrategy([0] * ranks), name, wait=False))
            simulators.go()
            for group in groups:
                group.wait_ready()

        row: dict[str, float] = {}
        row["rendezvous (s)"], row["rendezvous, CPU of the driver (s)"] = measure_cost(launch)
        simulators.count_operations()
        tracker = PromptTracker(sizes.prompts)

        def connect() -> None:
            Channel.create(GROUPS, home=ACTOR)
            tracker.open(0)
            for handle in [group.connect(sizes) for group in groups]:
                handle.wait()

        def rollout(step: int) -> None:
            tracker.enqueue(step)
            assert sum(groups[1].generate(step).wait()) == sizes.prompts
            assert tracker.wait_complete(step, 60.0)
            tracker.close(step)
            assert sum(groups[0].receive(step).wait()) == sizes.prompts

        row["connect (s)"], row["connect, CPU of the driver (s)"] = measure_cost(connect)
        steps = [measure_cost(functools.partial(rollout, step)) for step in range(1, 5)][1:]
        row["rollout, CPU of the driver (s)"] = float(np.median([cpu_s for _, cpu_s in steps]))
        calls = [measure_cost(lambda: [group.idle().wait() for group in groups]) for _ in range(5)]
        row["calls, CPU of the driver (s)"] = float(np.median([cpu_s for _, cpu_s in calls]))
        _, idle_cpu_s = measure_cost(lambda: time.sleep(6.0))
        row["idle, CPU of the driver (% of a core)"] = idle_cpu_s / 6 * 100
        row["memory of the driver (MB)"] = (this_process.memory_info().rss - memory) / 1e6
        row["descriptors"] = this_process.num_fds() - files
    return row


def measure_slow(delay_ms: int) -> dict[str, float]:
    """Measures a session of eight workers whose registry answers slowly."""
    from bench.peers import slow_files
    from bench.peers.rlhpc_runtime import RuntimePeer
    from rlhpc import Channel, Cluster, NodePlacementStrategy, Session

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RLHPC_BENCH_SLOW_ROOT": folder, "RLHPC_BENCH_SLOW_MS": str(delay_ms)}
        slow_files.install(folder, delay_ms)
        cluster = Cluster.local(1, 0)
        row: dict[str, float] = {}
        start_s = time.perf_counter()
        Session.start(registry_root=Path(folder) / "registry", preload=["bench.peers.slow_files"])
        group = RuntimePeer.create_group().launch(cluster, NodePlacementStrategy([0] * 8), "eight")
        row["cold start to 8 ready workers (s)"] = time.perf_counter() - start_s
        other_group = RuntimePeer.create_group()
        row["warm launch (s)"] = time_call(lambda: other_group.launch(cluster, NodePlacementStrategy([0]), "other"))
        group.idle().wait()
        row["dispatch to 8 (us)"] = float(np.median([time_call(lambda: group.idle().wait()) for _ in range(100)])) * 1e6

        def talk(count: int) -> list[float]:
            channel, back_channel = Channel.create("out", home="other"), Channel.create("back", home="eight")
            ping_handle = group.execute_on(0).ping(channel, back_channel, count, np.ones(1000, np.uint8))
            other_group.pong(channel, back_channel, count).wait()
            round_trips: list[float] = ping_handle.wait()[0]
            return round_trips

        row["channel, first items (s)"] = time_call(lambda: talk(1))
        row["channel, 1 KB, one way (us)"] = float(np.median(talk(200))) / 2 * 1e6
        row["file operations of the driver"] = slow_files.take_count()
        Session.current().stop()
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/scale.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs=2, metavar=("PART", "NUMBER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    measurements: dict[str, tuple[Callable[[int], dict[str, float]], Sequence[int]]] = {
        "real": (measure_real, REAL), "simulated": (measure_simulated, SIMULATED), "slow": (measure_slow, SLOW_MS),
    }  # fmt: skip
    if args.only:
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        part = measure_simulated_loop if args.only[0] == "loop" else measurements[args.only[0]][0]
        print(json.dumps(part(int(args.only[1]))))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: dict[str, dict[int, list[dict[str, float]]]] = {part_name: {} for part_name in measurements}
    for _ in range(args.repeat):
        for part_name, (_, counts) in measurements.items():
            for count in counts:
                row = run_child("--only", part_name, str(count))
                rows[part_name].setdefault(count, []).append(row)
                print(part_name, count, json.dumps(row), flush=True)
    figures = {
        part_name: {
            count: {name: spread([row[name] for row in count_rows]) for name in count_rows[0]}
            for count, count_rows in rows_by_count.items()
        }
        for part_name, rows_by_count in rows.items()
    }
    largest, smaller = figures["simulated"][SIMULATED[-1]], figures["simulated"][SIMULATED[-2]]
    growth = SIMULATED[-1] / SIMULATED[-2]
    goals = [
        goal("10 000 members: file operations a member", largest["file operations a member"]["median"], at_most=10),
        goal("10 000 members: rendezvous a member / that of 1000",
             largest["rendezvous (s)"]["median"] / smaller["rendezvous (s)"]["median"] / growth, at_most=1.5),
        goal("10 000 members: one dispatch, CPU of the driver (s)",
             largest["dispatch, CPU of the driver (s)"]["median"], at_most=1),
    ]  # fmt: skip
    for line in goals:
        print(f"{'met   ' if line['met'] else 'MISSED'} {line['goal']:55} {line['measured']:12.3f} ({line['wanted']})")
    print(write("scale", f"python -m bench.scale --repeat {args.repeat}", {"figures": figures, "goals": goals}))


if __name__ == "__main__":
    main()
