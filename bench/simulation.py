"""Discrete-event simulation of the control plane of a run, with the messages of the loop in `bench.scale_loop`.

Processes execute tasks one after the other on the cores of their host, where tasks of several processes queue for a core.
Messages between hosts take the latency of the network, and a metadata server answers file operations. `LoopModel` sends the
messages of the real loop, so its counts are those of a real run (`tests/integration/runtime/test_scale_model.py`). The seconds
of processor time per message are parameters (`Costs`), which `bench.scale_model` measures.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Then = Callable[[], None]


class Simulation:
    """Clock and queue of events.

    Attributes:
        now: Simulated seconds.
        counts: Requests, fetches and file operations by kind, as `bench.peers.counts` names them.
    """

    def __init__(self) -> None:
        self.now, self.counts = 0.0, Counter[str]()
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = itertools.count()

    def schedule(self, seconds: float, then: Then) -> None:
        """Calls `then` after `seconds` simulated seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def run(self) -> float:
        """Runs until no event remains; returns the simulated seconds since the start of the call."""
        start_time = self.now
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()
        return self.now - start_time


class SimulatedHost:
    """Cores of a host; tasks wait in the order of their arrival.

    Attributes:
        busy_s: Processor seconds of all tasks.
    """

    def __init__(self, simulation: Simulation, num_cores: int, slowdown: float = 1.0) -> None:
        self._simulation, self._num_free, self._slowdown = simulation, num_cores, slowdown
        self._waiting_tasks: deque[tuple[float, Then]] = deque()
        self.busy_s = 0.0

    def execute(self, cpu_s: float, then: Then) -> None:
        """Executes a task of `cpu_s` processor seconds, as soon as a core is free."""
        if not self._num_free:
            self._waiting_tasks.append((cpu_s, then))
            return
        self._num_free -= 1
        self.busy_s += cpu_s

        def end() -> None:
            self._num_free += 1
            if self._waiting_tasks:
                self.execute(*self._waiting_tasks.popleft())
            then()

        self._simulation.schedule(cpu_s * self._slowdown, end)


class Process:
    """Process that executes one task at a time, as Python's lock makes it.

    Attributes:
        host, part: Its host, and its part of the run (`Costs`).
        num_messages: Messages that it has sent or handled.
        busy_s: Processor seconds of its tasks.
    """

    def __init__(self, host: SimulatedHost, part: str = "") -> None:
        self.host, self.part, self.busy_s, self.num_messages = host, part, 0.0, 0
        self._tasks: deque[tuple[float, Then]] = deque()
        self._is_running = False

    def execute(self, cpu_s: float, then: Then = lambda: None) -> None:
        """Executes a task after the tasks that already wait."""
        self._tasks.append((cpu_s, then))
        if not self._is_running:
            self._next()

    def _next(self) -> None:
        self._is_running = bool(self._tasks)
        if not self._tasks:
            return
        cpu_s, then = self._tasks.popleft()
        self.busy_s += cpu_s

        def end() -> None:
            then()
            self._next()

        self.host.execute(cpu_s, end)


class MetadataServer:
    """Server of file operations: each takes `latency_s`, and the server ends at most `rate` a second.

    Args:
        simulation: The simulation.
        latency_s: Seconds that a process waits for an operation if no other waits.
        rate: Operations per second; infinite for a local disk, whose costs are in the processor time of the processes.
    """

    def __init__(self, simulation: Simulation, latency_s: float = 0.0, rate: float = math.inf) -> None:
        self._simulation, self._latency_s, self._interval_s = simulation, latency_s, 1 / rate
        self._free_at = 0.0

    def operate(self, num_operations: int, then: Then, num_threads: int = 1) -> None:
        """Executes operations of a process, which waits for each of them in one of its threads, then calls `then`."""
        simulation = self._simulation
        self._free_at = max(self._free_at, simulation.now) + num_operations * self._interval_s
        latency_end = simulation.now + math.ceil(num_operations / num_threads) * self._latency_s
        simulation.schedule(max(self._free_at, latency_end) - simulation.now, then)


class LoopSizes(Protocol):
    """Sizes of the simulated loop: see `bench.scale_loop.Sizes`."""

    @property
    def actors(self) -> int: ...
    @property
    def rollouts(self) -> int: ...
    @property
    def prompts(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    def host_of(self, group: str, rank: int) -> int:
        """Returns the host of a rank."""


@dataclass(frozen=True)
class Cost:
    """Processor seconds of a process in a phase: a fixed part, and a part for each message that it sends or handles."""

    fixed_s: float
    message_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Processor seconds by phase and part of the run. Parts: driver, fork server, actor, sender (actor 0), rollout."""

    parts: dict[str, dict[str, Cost]]

    def find_cost(self, phase: str, part: str) -> Cost:
        """Returns the processor time of a part in a phase; a cost of 0 s if the part does nothing in it."""
        return self.parts[phase].get(part, Cost(0.0))


@dataclass(frozen=True)
class Machine:
    """Machine or cluster on which the loop is simulated.

    Attributes:
        cores: Cores of a host.
        slowdown: Factor of all processor times, because other programs also use the cores.
        is_shared: Whether all ranks and the driver are on one host.
        latency_s: Seconds that a message takes to another process.
        metadata_latency_s, metadata_rate: See `MetadataServer`.
    """

    cores: int = 2
    slowdown: float = 1.0
    is_shared: bool = True
    latency_s: float = 0.0
    metadata_latency_s: float = 0.0
    metadata_rate: float = math.inf


#: File operations of the launch, of each rank and of the driver: (open, lstat, rename, stat).
LAUNCH_FILES = {"rank": (5, 1, 1, 3), "driver": (4, 2, 2, 2)}
#: Operations of a checkpoint, of each actor's file and of the driver's: (kind, for each file, fixed).
CHECKPOINT_FILES = (("open", 2, 7), ("stat", 1, 2), ("mkdir", 0, 3), ("scandir", 0, 2), ("listdir", 0, 1), ("lstat", 0, 5),
                    ("rename", 0, 2))  # fmt: skip
#: Threads of the driver that query the files of a checkpoint (`rlhpc.runtime.files`).
STAT_THREADS = 16
PHASES = ("launch", "connect", "rollout", "weights", "calls", "checkpoint")


@dataclass
class PhaseResult:
    """Outcome of a simulated phase.

    Attributes:
        seconds: Duration.
        counts: Requests, fetches and file operations by kind.
        busy_s: Processor seconds of the driver, the fork server, actor 0 and rollout rank 0.
        num_messages: Messages that these processes have sent or handled.
    """

    seconds: float
    counts: dict[str, int]
    busy_s: dict[str, float]
    num_messages: dict[str, int]


@dataclass
class LoopModel:
    """Simulated run of the loop.

    Attributes:
        sizes: Sizes of the loop.
        costs: Processor seconds.
        machine: Machine or cluster.
        is_first_version: Whether the next version of the weights is the first, for which the sender reads the records.
    """

    sizes: LoopSizes
    costs: Costs
    machine: Machine
    is_first_version: bool = True
    _phase: str = ""

    def run(self, phase: str) -> PhaseResult:
        """Simulates one phase from a run that is idle."""
        self._phase, self._simulation = phase, Simulation()
        machine, sizes = self.machine, self.sizes
        shared_host = SimulatedHost(self._simulation, machine.cores, machine.slowdown) if machine.is_shared else None

        def host() -> SimulatedHost:
            return shared_host or SimulatedHost(self._simulation, machine.cores, machine.slowdown)

        self.driver, self.fork_server = Process(host(), "driver"), Process(host(), "fork server")
        self.actors = [Process(host(), "actor") for _ in range(sizes.actors)]
        self.actors[0].part = "sender" if phase == "weights" else "actor"
        self.rollouts = [Process(host(), "rollout") for _ in range(sizes.rollouts)]
        self.file_server = MetadataServer(self._simulation, machine.metadata_latency_s, machine.metadata_rate)
        getattr(self, f"_{phase}")()
        seconds = self._simulation.run()
        if phase == "weights":
            self.is_first_version = False
        processes = (self.driver, self.fork_server, self.actors[0], self.actors[-1], self.rollouts[0])
        busy_s = {process.part: process.busy_s for process in processes}
        num_messages = {process.part: process.num_messages for process in processes}
        return PhaseResult(seconds, dict(self._simulation.counts), busy_s, num_messages)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _handle(self, process: Process, then: Then = lambda: None, is_fixed: bool = False) -> None:
        """Makes a process send or handle a message, with the fixed part of its phase if `is_fixed`."""
        cost = self.costs.find_cost(self._phase, process.part)
        process.num_messages += 1
        process.execute(cost.message_s + (cost.fixed_s if is_fixed else 0.0), then)

    def _count(self, kind: str, number: int = 1) -> None:
        self._simulation.counts[kind] += number

    def _message(self, kind: str, target: Process, then: Then, is_fixed: bool = False) -> None:
        """Delivers a message that was sent already; the receiver handles it."""
        self._count(f"request {kind}")
        self._simulation.schedule(self.machine.latency_s, lambda: self._handle(target, then, is_fixed))

    def _request(self, kind: str, source: Process, target: Process, then: Then) -> None:
        """Sends a request and handles its reply."""
        reply = lambda: self._message("REPLY", source, then)  # noqa: E731
        self._handle(source, lambda: self._message(kind, target, reply))

    def _call(self, ranks: list[Process], work: Callable[[int, Then], None], then: Then) -> None:
        """Calls a method on ranks; the driver continues when all have answered."""
        num_missing = len(ranks)

        def on_answer() -> None:
            nonlocal num_missing
            num_missing -= 1
            if not num_missing:
                then()

        for index, rank in enumerate(ranks):

            def execute(index: int = index) -> None:
                work(index, lambda: self._message("ANSWER", self.driver, on_answer))

            def begin(rank: Process = rank, execute: Then = execute) -> None:
                self._message("CALL", rank, execute, is_fixed=True)

            self._handle(self.driver, begin)

    # -- phases --------------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        for part, times in (("rank", self.sizes.actors + self.sizes.rollouts), ("driver", 1)):
            for kind, number in zip(("open", "lstat", "rename", "stat"), LAUNCH_FILES[part], strict=True):
                self._count(f"file {kind}", number * times)
        num_rank_operations = sum(LAUNCH_FILES["rank"])
        self.driver.execute(self.costs.find_cost("launch", "driver").fixed_s)
        for rank in [*self.actors, *self.rollouts]:

            def register(rank: Process = rank) -> None:
                self._handle(
                    rank,
                    lambda: self.file_server.operate(
                        num_rank_operations, lambda: self._message("NOTE", self.driver, lambda: None)
                    ),
                    is_fixed=True,
                )

            def fork(register: Then = register) -> None:
                if self.machine.is_shared:
                    self._handle(self.fork_server, register)
                else:  # every node has a fork server or srun of its own
                    register()

            self._handle(self.driver, fork)

    def _connect(self) -> None:
        sizes = self.sizes
        self._count("file lstat", 3)
        self._count("file rename", 3)
        self._count("file stat", 3)
        self._count("file open", 7 + 2 * sizes.actors + 3 * sizes.rollouts)
        ranks = [*self.actors, *self.rollouts]

        def connect(index: int, then: Then) -> None:
            self.file_server.operate(1 if index < sizes.actors else 3, then)

        def on_open() -> None:
            self._call(ranks, connect, lambda: None)

        num_missing = sizes.actors

        def on_confirm() -> None:
            nonlocal num_missing
            num_missing -= 1
            if not num_missing:
                on_open()

        def open_all() -> None:
            for actor in self.actors:
                self._request("OPEN", self.driver, actor, on_confirm)

        # the driver reads the records of the actors one after the other
        self.driver.execute(
            self.costs.find_cost("connect", "driver").fixed_s, lambda: self.file_server.operate(sizes.actors, open_all)
        )

    def _rollout(self) -> None:
        sizes = self.sizes
        share = sizes.prompts // sizes.rollouts

        def generate(index: int, then: Then) -> None:
            rank = self.rollouts[index]

            def deliver(position: int) -> None:
                if position == share:
                    self._request("SYNC", rank, self.driver, then)
                    return
                actor = self.actors[(index * share + position) * sizes.actors // sizes.prompts]

                def reported() -> None:
                    self._message("PUT", self.driver, lambda: None)
                    self._message("ACK", self.driver, lambda: None)
                    deliver(position + 1)

                self._request("PUT", rank, actor, lambda: self._handle(rank, reported))

            def lease(number: int) -> None:
                if number == share:
                    deliver(0)
                else:
                    self._request("GET", rank, self.driver, lambda: lease(number + 1))

            lease(0)

        def on_generated() -> None:
            self._call(self.actors, lambda index, then: then(), lambda: None)

        self.driver.execute(self.costs.find_cost("rollout", "driver").fixed_s)
        self._call(self.rollouts, generate, on_generated)

    def _weights(self) -> None:
        sizes, sender = self.sizes, self.actors[0]
        hosts = {sizes.host_of("rollout", rank) for rank in range(sizes.rollouts)}
        if self.is_first_version:
            self._count("file open", sizes.rollouts)
        num_unread_chunks = dict.fromkeys(range(sizes.rollouts), sizes.chunks)
        ends: list[Then] = [lambda: None] * sizes.rollouts

        def on_received(index: int) -> None:
            num_unread_chunks[index] -= 1
            if not num_unread_chunks[index]:
                ends[index]()

        def send(chunk: int, then: Then) -> None:
            """Announces a chunk to all receivers, which fetch it, and continues once all have confirmed."""
            if chunk == sizes.chunks:
                then()
                return
            self._count("fetch", len(hosts))
            num_missing = sizes.rollouts

            def confirmed() -> None:
                nonlocal num_missing
                num_missing -= 1
                if not num_missing:
                    send(chunk + 1, then)

            for index, receiver in enumerate(self.rollouts):

                def announced(receiver: Process = receiver, index: int = index) -> None:
                    self._handle(receiver, lambda: on_received(index))
                    self._message("REPLY", sender, confirmed)

                def announce(receiver: Process = receiver, announced: Then = announced) -> None:
                    self._message("PUT", receiver, announced)

                self._handle(sender, announce)

        def take(index: int, then: Then) -> None:
            ends[index] = then
            if not num_unread_chunks[index]:
                then()

        self.driver.execute(self.costs.find_cost("weights", "driver").fixed_s)
        self._call(self.actors, lambda index, then: then() if index else send(0, then), lambda: None)
        self._call(self.rollouts, take, lambda: None)

    def _calls(self) -> None:
        self.driver.execute(self.costs.find_cost("calls", "driver").fixed_s)

        def idle(index: int, then: Then) -> None:
            then()

        self._call(self.actors, idle, lambda: self._call(self.rollouts, idle, lambda: None))

    def _checkpoint(self) -> None:
        sizes = self.sizes
        for kind, each, num_fixed in CHECKPOINT_FILES:
            self._count(f"file {kind}", each * sizes.actors + num_fixed)
        num_driver_operations = (
            sum(each * sizes.actors + num_fixed for _, each, num_fixed in CHECKPOINT_FILES) - sizes.actors
        )

        def commit() -> None:
            self.file_server.operate(num_driver_operations, lambda: None, STAT_THREADS)

        self.driver.execute(self.costs.find_cost("checkpoint", "driver").fixed_s)
        self._call(self.actors, lambda index, then: self.file_server.operate(1, then), commit)


# -- weight tree ---------------------------------------------------------------------------------------------------------

#: Hosts to which a host forwards what it receives (`rlhpc.weights.transport`).
BRANCHES = 2


def find_tree_parent(host: int) -> int:
    """Returns the host from which a host gets the weights, or -1 for the sender; hosts count from 0."""
    return host // BRANCHES - 1


def compute_tree_depth(num_hosts: int) -> int:
    """Returns the number of transfers one after the other until the last host has a chunk."""
    return math.ceil(math.log2(num_hosts + 2)) - 1 if num_hosts else 0


@dataclass(frozen=True)
class Network:
    """Leaf-spine network.

    Attributes:
        link_gbps: Gb/s of a host's link, each way.
        stream_gbps: Gb/s of one TCP stream.
        hosts_per_leaf: Hosts below a leaf switch.
        oversubscription: Bandwidth of a leaf's hosts, divided by that of its links to the spine.
    """

    link_gbps: float
    stream_gbps: float
    hosts_per_leaf: int = 32
    oversubscription: float = 1.0


def simulate_weight_tree(
    num_hosts: int, num_chunks: int, chunk_bytes: float, network: Network
) -> tuple[float, list[float]]:
    """Simulates the tree of hosts, chunk by chunk, with store and forward of chunks.

    A host receives a chunk over one stream from its parent, and sends to its children one after the other. Transfers that
    leave a leaf share its links to the spine.

    Returns:
        Seconds until the last host has the last chunk, and the bytes that each uplink sent: of the sender, then of each host.
    """
    stream = min(network.link_gbps, network.stream_gbps) * 1e9 / 8
    spine = network.link_gbps * 1e9 / 8 * network.hosts_per_leaf / network.oversubscription
    link = network.link_gbps * 1e9 / 8
    uplink_free, downlink_free = [0.0] * (num_hosts + 1), [0.0] * (num_hosts + 1)
    stream_free = [0.0] * (num_hosts + 1)
    num_leaves = num_hosts // network.hosts_per_leaf + 1
    spine_up, spine_down = [0.0] * num_leaves, [0.0] * num_leaves
    sent_bytes = [0.0] * (num_hosts + 1)
    last_arrival = 0.0
    arrivals = [[0.0] * (num_hosts + 1) for _ in range(2)]
    for chunk in range(num_chunks):
        arrival_times = arrivals[chunk % 2]
        arrival_times[0] = 0.0
        for host in range(num_hosts):  # a parent has a smaller number than its children
            parent, node = find_tree_parent(host) + 1, host + 1
            ready_at = max(arrival_times[parent], stream_free[node])
            uplink_free[parent] = max(uplink_free[parent], ready_at) + chunk_bytes / link
            downlink_free[node] = max(downlink_free[node], ready_at) + chunk_bytes / link
            end = max(ready_at + chunk_bytes / stream, uplink_free[parent], downlink_free[node])
            source_leaf, leaf = parent // network.hosts_per_leaf, node // network.hosts_per_leaf
            if source_leaf != leaf:
                spine_up[source_leaf] = max(spine_up[source_leaf], ready_at) + chunk_bytes / spine
                spine_down[leaf] = max(spine_down[leaf], ready_at) + chunk_bytes / spine
                end = max(end, spine_up[source_leaf], spine_down[leaf])
            stream_free[node] = arrival_times[node] = end
            sent_bytes[parent] += chunk_bytes
            last_arrival = max(last_arrival, end)
    return last_arrival, sent_bytes


# -- failures ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reliability:
    """Durations and failure rate of a run.

    Attributes:
        step_s: Seconds of a step.
        checkpoint_steps: Steps between two checkpoints.
        save_stall_s: Seconds for which training stands still for a checkpoint.
        save_s: Seconds after which a checkpoint counts: until then a failure falls back to the one before.
        recovery_s: Seconds from a failure until the steps after the checkpoint begin to be repeated.
        failures_per_day: Failures of the run's nodes.
    """

    step_s: float
    checkpoint_steps: int
    save_stall_s: float
    save_s: float
    recovery_s: float
    failures_per_day: float


@dataclass(frozen=True)
class Outcome:
    """Simulated days: share of the time that trained steps which count, failures, and mean lost work in seconds and steps."""

    goodput: float
    failures: int
    lost_s: float
    lost_steps: float
    max_lost_steps: int


def simulate_failures(reliability: Reliability, duration_days: float, seed: int = 0) -> Outcome:
    """Simulates a run with failures that are independent and equally likely at any time."""
    generator, end_s = random.Random(seed), duration_days * 86400
    interval_s = 86400 / reliability.failures_per_day if reliability.failures_per_day else math.inf
    failure_at = generator.expovariate(1 / interval_s) if interval_s < math.inf else math.inf
    now, step, saved_step, pending_saves = 0.0, 0, 0, deque[tuple[float, int]]()
    num_failures, lost_s, num_lost_steps, max_lost_steps = 0, 0.0, 0, 0
    while now < end_s:
        while pending_saves and pending_saves[0][0] <= now:
            saved_step = pending_saves.popleft()[1]
        is_saving = (step + 1) % reliability.checkpoint_steps == 0
        duration = reliability.step_s + (reliability.save_stall_s if is_saving else 0.0)
        if now + duration > failure_at:
            while pending_saves and pending_saves[0][0] <= failure_at:
                saved_step = pending_saves.popleft()[1]
            pending_saves.clear()
            num_failures += 1
            steps = step - saved_step
            num_lost_steps, max_lost_steps = num_lost_steps + steps, max(max_lost_steps, steps)
            lost_s += steps * reliability.step_s + failure_at - now
            step = saved_step
            now = failure_at + reliability.recovery_s
            failure_at = now + generator.expovariate(1 / interval_s)
            continue
        now += duration
        step += 1
        if is_saving:
            pending_saves.append((now + reliability.save_s, step))
    goodput = step * reliability.step_s / now
    return Outcome(goodput, num_failures, lost_s / max(num_failures, 1), num_lost_steps / max(num_failures, 1),
                   max_lost_steps)  # fmt: skip


def compute_best_interval_s(stall_s: float, failures_per_day: float) -> float:
    """Returns the seconds between checkpoints that waste least: √(2 · stall · time between failures).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
    """
    return math.sqrt(2 * stall_s * 86400 / failures_per_day)
