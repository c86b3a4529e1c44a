"""`make chaos-scale`: seeded faults of network, clocks, nodes and daemons, over a run of 64 ranks on a real Slurm.

    python -m tests.slurm.chaos --seed 1 --part 1/10

Each part of a seed's events is a run of its own. What has been done stands in a state file: a command that was interrupted,
or that failed, goes on with the same event when it is given again. After each event the run must train on within its
deadline, from a step that is no older than what was committed before; in the end every step has one row, no checkpoint was
committed twice, one job was submitted, and no process of an earlier generation is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.false_clock import false_clock_variables

from . import prefork
from .cluster import CONTROLLER, LOGIN, SlurmCluster
from .processes import Process
from .runs import ROOT, SITE, SlurmRun, kill, until

#: Hosts between which the network is cut: those of the driver, of ranks, of who submitted, and of slurmctld.
PARTS = ("driver", "ranks", LOGIN, CONTROLLER)
CUTS_S = (10.0, 120.0)
JUMPS_S = (-3600.0, -90.0, 90.0, 3600.0)
#: Seconds in which the run must train on after a fault has ended. A node that was lost is noticed after 20 to 40 s, a requeued
#: job waits 10 s, and on a busy machine 64 ranks take a minute or two to start.
DEADLINE_S = 480.0
#: Kind of fault → how often it is drawn.
WEIGHTS = {
    "cut": 8, "clock": 3, "return": 3, "controller away": 1, "accounting away": 1, "worker": 2, "step": 1, "driver": 1,
    "waiter": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A fault: its kind, the hosts that it parts, or whose clock jumps, its seconds, and the seed of choices within it."""

    kind: str
    hosts: tuple[str, ...] = ()
    seconds: float = 0.0
    seed: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.kind, "-".join(self.hosts), f"{self.seconds:g} s" if self.seconds else ""]))


def drawn_events(seed: int, count: int, away_s: float = 600.0) -> list[Event]:
    """Returns the events of a seed; the first are the same, however many there are.

    Args:
        seed: Of the draw.
        count: Number of events.
        away_s: Seconds for which the controller and the accounting are away.
    """
    events = list[Event]()
    for number in range(count):
        within = f"{seed} {number}"
        draw = random.Random(within)
        kind = draw.choices([*WEIGHTS], weights=[*WEIGHTS.values()])[0]
        if kind == "cut":
            events.append(Event(kind, tuple(draw.sample(PARTS, 2)), draw.choice(CUTS_S), within))
        elif kind == "clock":
            events.append(Event(kind, (draw.choice(PARTS[:2]),), draw.choice(JUMPS_S), within))
        elif kind == "return":
            events.append(Event(kind, ("ranks",), draw.choice(CUTS_S), within))
        else:
            events.append(Event(kind, (), away_s if kind.endswith("away") else 0.0, within))
    return events


#: One actor and one rank that acts beside the driver, and one simulator a rank on two other nodes. Many small commits.
CONFIG = """
defaults: [{root}/configs/base/ppo.yaml]
runner: {{max_steps: {last}, save_interval: 3, max_restarts: 8, keep_checkpoints: 3}}
algorithm: {{rollout_steps: 1, update_epochs: 1}}
env:
  train: {{env_id: CartPole-v1, num_envs: {simulators}, wrappers: ["waiting_env:Waiting"]}}
actor: {{global_batch_size: {samples}}}
cluster:
  num_nodes: 3
  node_groups:
    - {{label: gpu, het_component: 0, num_nodes: 1, accelerators_per_node: 2, cpus_per_node: 4, mem: 8G}}
    - {{label: cpu, het_component: 1, num_nodes: 2, accelerators_per_node: 0, cpus_per_node: 8, mem: 16G}}
  component_placement:
    actor: {{node_group: gpu, placement: 0}}
    rollout: {{node_group: gpu, placement: 1}}
    env: {{node_group: cpu, placement: "0-1:0-{last_simulator}"}}
"""


class ChaosRun(SlurmRun):
    """A run that is submitted on the login node and whose nodes have clocks of their own.

    Args:
        slurm: The cluster, with a login node.
        folder: The run's.
        last: Its number of steps.
        ranks: Number of its ranks: one actor, one that acts, and simulators on two nodes.
        overrides: Further overrides.
    """

    def __init__(self, slurm: SlurmCluster, folder: Path, last: int, *overrides: str, ranks: int = 6) -> None:
        config = folder / "chaos.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        config.write_text(
            CONFIG.format(root=ROOT, last=last, simulators=ranks - 2, last_simulator=ranks - 3, samples=ranks - 2)
        )
        super().__init__(slurm, folder, *overrides, config=config)
        (folder / "waiting_env.py").write_text(WAITING)
        site = folder / "clocks"
        self.clock = slurm.local / "clock"
        variables = false_clock_variables(site, self.clock)
        for node in slurm.nodes:
            self.set_clock(node, 0.0)
        setup = [*SITE["cluster"]["setup"], *variables]
        container = prefork.words(with_false_clock="\n".join(variables))
        self.site.write_text(json.dumps({"cluster": SITE["cluster"] | {"setup": setup, "container": container}}))
        self.environment["PYTHONPATH"] = os.pathsep.join(map(str, (site, folder, ROOT)))
        self.login_words = slurm.enter(LOGIN)
        self.last, self.pause = last, folder / "pause"
        self.environment |= {"RLHPC_TEST_PAUSE": str(self.pause), "RLHPC_VIRTUAL_ACCELERATORS": "1"}
        self.keep_from_ending()

    def keep_from_ending(self) -> None:
        """Has the last of its steps take the longer, the fewer are left."""
        new = self.pause.with_suffix(".new")
        new.write_text(f"{PAUSE_S * max(1.0, 60 / max(1, self.last - self.step())):.2f}")
        new.replace(self.pause)

    def hurry(self) -> None:
        """Lets it end."""
        self.pause.unlink()

    def set_clock(self, node: str, offset_s: float) -> None:
        """Sets how far the clock of a node is ahead of the true time."""
        new = self.cluster.root / "nodes" / node / "local" / "clock.new"
        new.write_text(f"{offset_s:+g}\n")
        new.replace(new.with_name("clock"))

    def host(self, part: str) -> str:
        """Returns the host of a part of the run at present."""
        if part in (LOGIN, CONTROLLER):
            return part
        return str(self.members()["driver" if part == "driver" else "env-0"]["node"])


#: A simulator that waits for as long as a file says: the run must not end before its events are over.
WAITING = """
import os
import time
import gymnasium

class Waiting(gymnasium.Wrapper):
    def step(self, action):
        try:
            with open(os.environ["RLHPC_TEST_PAUSE"]) as file:
                time.sleep(float(file.read()))
        except FileNotFoundError:
            pass
        return self.env.step(action)
"""
#: Seconds of a simulator's step, of which a training step has one.
PAUSE_S = 0.8


class Commits:
    """Watches the checkpoints of a run: each is committed once, and never written again."""

    def __init__(self, run: SlurmRun) -> None:
        self._run, self._marks, self._stop = run, dict[str, tuple[int, int]](), threading.Event()
        self.twice = list[str]()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            for path in self._run.root.glob("checkpoints/global_step_*/COMPLETE"):
                try:
                    status = path.stat()
                except OSError:
                    continue
                mark = (status.st_ino, status.st_mtime_ns)
                if self._marks.setdefault(path.parent.name, mark) != mark:
                    self.twice.append(path.parent.name)
                    self._marks[path.parent.name] = mark

    def close(self) -> int:
        """Ends the watch; returns the number of commits that it has seen."""
        self._stop.set()
        self._thread.join(10)
        return len(self._marks)


class Disturber:
    """Carries out events on a run, and checks after each that the run goes on.

    Args:
        run: The run.
    """

    def __init__(self, run: ChaosRun) -> None:
        self.run, self.slurm = run, run.cluster
        self._jobs_before = self._jobs()
        self.process = run.submit()
        self.commits = Commits(run)
        self.earlier = set[Process]()
        until_told(
            lambda: run.committed() > 0 or self.process.poll() is not None,
            lambda: f"it trains\n{run.account()}",
            DEADLINE_S,
        )
        assert self.process.poll() is None, f"the command ended\n{run.account()}"
        self.job = run.job

    def disturb(self, event: Event) -> str:
        """Carries out an event; returns what came of it.

        Raises:
            AssertionError: The run lost a committed step, or does not go on within its deadline.
        """
        run, before = self.run, self.run.committed()
        counts = (len(run.attempts), len(run.recoveries))
        self._note_processes()
        began = time.monotonic()
        getattr(self, "_" + event.kind.replace(" ", "_"))(event)
        # Something must be committed that was trained after the fault.
        reached = max(before, run.committed())

        def goes_on() -> bool:
            run.keep_from_ending()
            return run.committed() > reached + 1 or self.process.poll() is not None

        until_told(goes_on, lambda: f"it trains beyond step {reached} after {event}\n{run.account()}", DEADLINE_S)
        assert self.process.poll() is None, f"the command ended after {event}\n{run.account()}"
        again = [attempt["step"] for attempt in run.attempts[counts[0] :]] + run.recoveries[counts[1] :]
        assert all(step >= before for step in again), (
            f"step {before} was committed, and it went on from {again} after {event}"
        )
        assert run.job == self.job, f"job {run.job} was submitted beside {self.job} after {event}"
        assert not self.commits.twice, f"committed twice: {self.commits.twice} after {event}"
        if (event.kind == "cut" and event.seconds <= min(CUTS_S)) or event.kind in ("clock", "accounting away"):
            assert not again, f"it started again, from {again}, after {event}\n{run.account()}"
        return f"{event}: went on after {time.monotonic() - began:.0f} s, from step {again or run.committed()}"

    def finish(self) -> str:
        """Waits for the end of the run, and checks what it has left; returns a summary."""
        run, last = self.run, self.run.last
        run.hurry()
        self._note_processes()
        run.finish(self.process, DEADLINE_S)
        num_commits = self.commits.close()
        steps = [row["step"] for row in run.rows()]
        assert steps == list(range(1, last + 1)), f"every step's row is there once: {steps}"
        assert not self.commits.twice, f"committed twice: {self.commits.twice}"
        jobs = self._jobs() - self._jobs_before
        assert jobs <= {self.job}, f"job {self.job} was submitted, and also {jobs - {self.job}}"
        until(lambda: not any(process.alive() for process in self.earlier), "no process of the run is left", 180)
        begun = [attempt["step"] for attempt in run.attempts]
        assert begun == sorted(begun)
        return f"{last} steps, {num_commits} checkpoints, {len(begun)} attempts, {len(run.recoveries)} recoveries"

    def _jobs(self) -> set[str]:
        """Returns the ids of all jobs that the accounting knows; of a het job, one."""
        if not self.slurm.has_accounting:
            return set()
        rows = self.slurm.run("sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID").split()
        return {row.partition("+")[0] for row in rows}

    def _note_processes(self) -> None:
        """Remembers the ranks of the present generation: they must be gone in the end."""
        ranks = (Process.of(int(record["pid"])) for record in self.run.members().values() if record.get("pid"))
        self.earlier |= {rank for rank in ranks if rank}

    # -- kinds ----------------------------------------------------------------------------------------------------

    def _cut(self, event: Event) -> None:
        one, other = map(self.run.host, event.hosts)
        with self._repaired(lambda: self.slurm.part(one, other), lambda: self.slurm.rejoin(one, other)):
            time.sleep(event.seconds)

    def _clock(self, event: Event) -> None:
        node = self.run.host(event.hosts[0])
        self.run.set_clock(node, event.seconds)
        time.sleep(15.0)
        self.run.set_clock(node, 0.0)

    def _return(self, event: Event) -> None:
        node = self.run.host(event.hosts[0])
        with self._repaired(lambda: self.slurm.lose_node(node), lambda: self.slurm.bring_node_back(node)):
            time.sleep(event.seconds)
        self.run.set_clock(node, 0.0)

    def _controller_away(self, event: Event) -> None:
        with self._repaired(self.slurm.stop_controller, self.slurm.start_controller):
            time.sleep(event.seconds)

    def _accounting_away(self, event: Event) -> None:
        with self._repaired(self.slurm.stop_accounting, self.slurm.start_accounting):
            time.sleep(event.seconds)

    def _worker(self, event: Event) -> None:
        members = self.run.members()
        kill(members[random.Random(event.seed).choice(sorted(set(members) - {"driver"}))]["pid"])

    def _step(self, event: Event) -> None:
        group = random.Random(event.seed).choice(["actor-0", "rollout-0", "env-0"])
        self.slurm.run("scancel", "--signal=KILL", self.run.members()[group]["step"])

    def _driver(self, event: Event) -> None:
        kill(int(self.run.json("status.json")["pid"]))

    def _waiter(self, event: Event) -> None:
        for child in [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]:
            kill(child.pid)
        self.process.wait()
        self.process = self.run.submit()

    @contextmanager
    def _repaired(self, harm: Callable[[], Any], repair: Callable[[], Any]) -> Iterator[None]:
        harm()
        try:
            yield
        finally:
            repair()


def until_told(condition: Callable[[], bool], what: Callable[[], str], deadline_s: float) -> None:
    """Waits as `until` does, and makes up what it waited for when the deadline has passed."""
    try:
        until(condition, "", deadline_s)
    except AssertionError:
        raise AssertionError(f"waited {deadline_s:.0f} s until {what()}") from None


def steps_for(events: Sequence[Event]) -> int:
    """Returns about as many steps as a run trains during the events; the last of them take longer."""
    return 20 + sum(8 + (0 if event.kind == "clock" else round(event.seconds / 4)) for event in events)


@dataclass
class State:
    """Outcomes of a part of a seed's events, in a file, so that an interrupted command goes on."""

    file: Path
    outcomes: list[str]

    @classmethod
    def load(cls, file: Path) -> State:
        """Reads a state file; a missing one is an empty state."""
        return cls(file, json.loads(file.read_text())["outcomes"] if file.exists() else [])

    def add(self, outcome: str) -> None:
        """Adds the outcome of the next event."""
        self.outcomes.append(outcome)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"outcomes": self.outcomes}, indent=1))
        new.replace(self.file)


def carry_out(events: Sequence[Event], run: ChaosRun, done: Callable[[str], None]) -> str:
    """Carries out events on a run and lets it finish.

    Args:
        events: What happens.
        run: The run, not submitted yet.
        done: Called with the outcome of each event; with that of the last one after the run's end, so that a command that
            goes on carries it out again if the run did not end well.

    Returns:
        A summary of the run.

    Raises:
        AssertionError: A property does not hold.
    """
    disturber = Disturber(run)
    try:
        for event in events[:-1]:
            done(disturber.disturb(event))
        outcome = disturber.disturb(events[-1])
        summary = disturber.finish()
        done(outcome)
        return summary
    finally:
        disturber.commits.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a part of a seed's events; returns 1 if a property does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the events")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the events")
    parser.add_argument("--events", type=int, default=100, help="events of the seed")
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the run")
    parser.add_argument(
        "--away", type=float, default=600.0, help="seconds for which controller and accounting are away"
    )
    parser.add_argument("--state", type=Path, default=ROOT / "runs" / "chaos", help="folder of the state files")
    args = parser.parse_args(argv)
    # the cluster ends with the command, also in the background of a shell, which ignores Ctrl-C
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop_signal, signal.default_int_handler)
    number, _, count = args.part.partition("/")
    events = drawn_events(args.seed, args.events, args.away)[int(number) - 1 :: int(count)]
    of = f"events-{args.events}-ranks-{args.ranks}-away-{args.away:g}"
    state = State.load(args.state / f"seed-{args.seed}-part-{number}-of-{count}-{of}.json")
    remaining = events[len(state.outcomes) :]
    print(f"seed {args.seed}, part {args.part}: {len(remaining)} of {len(events)} events remain", flush=True)
    if not remaining:
        return 0

    def done(outcome: str) -> None:
        state.add(outcome)
        print(f"seed {args.seed}, part {args.part}, event {len(state.outcomes)}: {outcome}", flush=True)

    with tempfile.TemporaryDirectory(prefix="rlhpc-chaos-") as folder:
        cluster = SlurmCluster(tempfile.mkdtemp(prefix="rlhpc-slurm-", dir="/tmp"), "full", [Path(folder)])
        try:
            cluster.up()
            cluster.add_login()
            run = ChaosRun(cluster, Path(folder), steps_for(remaining), ranks=args.ranks)
            print(carry_out(remaining, run, done), flush=True)
        except Exception as error:
            print(f"seed {args.seed}, part {args.part}, event {len(state.outcomes) + 1}: {error}", flush=True)
            options = f"SEED={args.seed} PART={args.part} EVENTS={args.events} RANKS={args.ranks}"
            print(f"to go on with this event: make chaos-scale {options}", flush=True)
            if not isinstance(error, AssertionError):
                raise
            return 1
        finally:
            while SlurmRun.submitted:
                SlurmRun.submitted.pop().kill()
            cluster.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
