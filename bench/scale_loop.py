"""Loop with the communication of a synchronous GRPO step, on real ranks without a model, for `bench.scale_model`.

In a step the driver fills the prompt queue; each rollout rank leases its prompts, sends each group to its actor with a durable
put and reports the delivery; actors take their groups from their own process; actor 0 sends the weights to all rollout ranks
through the tree of hosts; every actor writes its file of a checkpoint, and the driver commits the manifest. Queue, channels,
calls, weight sync and checkpoints are those of rlhpc; sampling and training are left out. Each simulated host has
`Sizes.ranks_per_host` ranks, which share one /dev/shm in truth. `bench.peers.counts` counts requests, bytes and files.

    python -m bench.scale_loop --ranks 16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.peers import counts
from rlhpc import Channel, Cluster, NodePlacementStrategy, Session, Worker
from rlhpc.checkpoint import CheckpointWriter
from rlhpc.checkpoint.async_writer import Checksums, write_summed
from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.rollout.prompt_queue import PromptLeases, PromptTracker
from rlhpc.language.training.prompt_dispatch import DELIVERED, GROUPS, WORK
from rlhpc.runs.checkpointing import merge_checksums
from rlhpc.weights import make_sync
from rlhpc.weights.receiver import apply
from rlhpc.weights.transport import WeightSender

ACTOR, ROLLOUT = "actor", "rollout"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run of the loop.

    Attributes:
        ranks: Ranks of both groups; half of them are actors.
        ranks_per_host: Ranks on each simulated host.
        prompts_per_rank: Prompts of a step for each rollout rank.
        group_bytes: Payload of a prompt's group of answers.
        chunks, chunk_bytes: Chunks of a version of the weights, each one tensor.
        file_bytes: Size of an actor's file of a checkpoint.
        steps: Steps of the run; a checkpoint follows the last one.
    """

    ranks: int
    ranks_per_host: int = 2
    prompts_per_rank: int = 2
    group_bytes: int = 4096
    chunks: int = 4
    chunk_bytes: int = 1 << 20
    file_bytes: int = 1 << 16
    steps: int = 3

    @property
    def actors(self) -> int:
        """Ranks of the actor."""
        return self.ranks // 2

    @property
    def rollouts(self) -> int:
        """Rollout ranks."""
        return self.ranks - self.actors

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return self.rollouts * self.prompts_per_rank

    def host_of(self, group: str, rank: int) -> int:
        """Returns the host of a rank; no host has ranks of both groups."""
        first_host = -(-self.actors // self.ranks_per_host) if group == ROLLOUT else 0
        return first_host + rank // self.ranks_per_host

    @property
    def hosts(self) -> int:
        """Simulated hosts."""
        return self.host_of(ROLLOUT, self.rollouts - 1) + 1


class LoopRank(Worker):
    """Actor or rollout rank of the loop."""

    def take_counts(self) -> tuple[dict[str, int], dict[str, int], float]:
        """Returns the numbers and bytes by kind and the processor seconds since the last call."""
        numbers, num_bytes = counts.take_counts()
        counts.add_count("request ANSWER", number=-1)  # the answer to this call
        now = time.process_time()
        cpu_s, self._cpu_at = now - getattr(self, "_cpu_at", 0.0), now
        return numbers, num_bytes, cpu_s

    def connect(self, sizes: Sizes) -> None:
        """Opens channels and weight sync."""
        self.sizes = sizes
        receivers = [(ROLLOUT, list(range(sizes.rollouts)))]
        self.tensors = [(f"layer{i}", torch.zeros(sizes.chunk_bytes // 4)) for i in range(sizes.chunks)]
        self.groups = self.connect_channel(GROUPS)
        if self.group_name == ROLLOUT:
            self.work, self.delivery_channel = self.connect_channel(WORK), self.connect_channel(DELIVERED)
            self.leases = PromptLeases(sizes.prompts, self.work, self.delivery_channel)
            self.sync = make_sync("auto", self, (ACTOR, 0), receivers, "off")
        elif self.rank == 0:
            self.sender = WeightSender(self, receivers, "off", sizes.chunk_bytes)

    def idle(self) -> None:
        """Does nothing."""

    def generate(self, step: int) -> int:
        """Leases this rank's prompts, and delivers a group for each; returns their number."""
        self.leases.begin(step, self.sizes.rollouts)
        positions = []
        while (position := self.leases.lease(step)) is not None:
            positions.append(int(position))  # type: ignore[arg-type]
        group = bytes(self.sizes.group_bytes)
        for position in positions:
            actor = position * self.sizes.actors // self.sizes.prompts
            self.groups.entrust((position, group), key=str(actor))
            self.leases.deliver(step, position, {"samples": 1.0})
        return len(positions)

    def receive(self, step: int) -> int:
        """Takes the groups that this actor trains on; returns their number."""
        local_prompts = [
            p for p in range(self.sizes.prompts) if p * self.sizes.actors // self.sizes.prompts == self.rank
        ]
        return len([self.groups.get(key=str(self.rank)) for _ in local_prompts])

    def send_weights(self, version: int) -> None:
        """Sends a version of the weights from actor 0."""
        if self.rank == 0:
            self.sender.send(version, self.tensors)

    def take_weights(self, version: int) -> bool:
        """Receives a version of the weights."""
        return apply(self.sync, self.tensors) == version

    def save(self, folder: str) -> Checksums:
        """Writes this actor's file of a checkpoint."""
        path, content = Path(folder) / f"{ACTOR}-{self.rank}.pt", bytes(self.sizes.file_bytes)

        def write(file: Any) -> None:
            file.write(content)

        return {path.name: write_summed(path, write)}


@dataclass
class Phase:
    """One phase of a run, as measured.

    Attributes:
        seconds: Duration.
        numbers, num_bytes: Requests, fetches and file operations of all processes by kind, and their bytes.
        driver_cpu_s: Processor seconds of the driver.
        rank_cpu_s: Processor seconds of each rank: of the actors, then of the rollout ranks.
        fork_cpu_s: Processor seconds of the fork server.
    """

    seconds: float
    numbers: dict[str, int]
    num_bytes: dict[str, int]
    driver_cpu_s: float
    rank_cpu_s: list[float]
    fork_cpu_s: float = 0.0


def start_session(folder: Path) -> Session:
    """Starts a session whose processes count, with a warm fork server."""
    counts.install(str(folder))
    os.environ["RLHPC_BENCH_COUNT_ROOT"] = str(folder)
    session = Session.start(
        registry_root=folder / "registry", log_dir=folder / "logs", preload=["bench.peers.counts", "bench.scale_loop"],
        tcp_address="127.0.0.1",
    )  # fmt: skip
    launcher = session._fork_launcher
    prepare = launcher.prepare

    def on_own_host(spec: Any, node: Any, forks: bool) -> None:
        host = Sizes(2 * spec.world_size).host_of(spec.group, spec.rank)
        spec.env["RLHPC_HOST_ID"] = f"host{host}"
        prepare(spec, node, forks)

    launcher.prepare = on_own_host
    warm = LoopRank.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0]), "warm")
    warm.shutdown()
    return session


class Loop:
    """Run of the loop in a session; `phases` has its measurements by name.

    Args:
        sizes: Sizes of the run; each group has half of the ranks.
        session: The session (`start_session`).
        folder: Folder of the checkpoint, inside the folder whose files are counted.
    """

    def __init__(self, sizes: Sizes, session: Session, folder: Path) -> None:
        self.sizes, self.session, self.folder = sizes, session, folder
        self.phases: dict[str, list[Phase]] = {}
        self._groups: list[Any] = []

    def _fork_cpu_s(self) -> float:
        path = Path(f"/proc/{self.session._fork_launcher.server.process.pid}/schedstat")
        return int(path.read_text().split()[0]) / 1e9

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures wall time, CPU time and messages of the block, under the name of a phase."""
        counts.take_counts()
        fork_start_s, cpu_start_s, start_s = self._fork_cpu_s(), time.process_time(), time.perf_counter()
        yield
        duration_s = time.perf_counter() - start_s
        driver_cpu_s, fork_cpu_s = time.process_time() - cpu_start_s, self._fork_cpu_s() - fork_start_s
        numbers, num_bytes = map(Counter, counts.take_counts())
        rank_cpu_s = []
        for group in self._groups:
            for rank_numbers, rank_bytes, cpu_s in group.take_counts().wait():
                numbers.update(rank_numbers)
                num_bytes.update(rank_bytes)
                rank_cpu_s.append(cpu_s)
        kind_counts = {kind: number for kind, number in numbers.items() if number}
        result = Phase(duration_s, kind_counts, dict(num_bytes), driver_cpu_s, rank_cpu_s, fork_cpu_s)
        self.phases.setdefault(name, []).append(result)

    def run(self) -> None:
        """Runs all phases, and ends the groups."""
        sizes, cluster = self.sizes, Cluster.local(1, 0)
        with self.phase("launch"):
            actor, rollout = (
                LoopRank.create_group().launch(cluster, NodePlacementStrategy([0] * ranks), name, wait=False)
                for name, ranks in ((ACTOR, sizes.actors), (ROLLOUT, sizes.rollouts))
            )
            for group in (actor, rollout):
                group.wait_ready()
            self._groups = [actor, rollout]
        tracker = PromptTracker(sizes.prompts)
        with self.phase("connect"):
            Channel.create(GROUPS, home=ACTOR)
            tracker.open(0)
            for handle in [group.connect(sizes) for group in self._groups]:
                handle.wait()
        for step in range(1, sizes.steps + 1):
            with self.phase("rollout"):
                tracker.enqueue(step)
                assert sum(rollout.generate(step).wait()) == sizes.prompts
                assert tracker.wait_complete(step, 60.0)
                tracker.close(step)
                assert sum(actor.receive(step).wait()) == sizes.prompts
            with self.phase("weights"):
                handles = actor.send_weights(step), rollout.take_weights(step)
                assert all(handles[1].wait())
                handles[0].wait()
            with self.phase("calls"):
                for group in self._groups:
                    group.idle().wait()
        with self.phase("checkpoint"):
            self.folder.mkdir()
            with CheckpointWriter(RunPaths(self.folder), sizes.steps) as writer:
                answers = actor.save(str(writer.staging)).wait()
                writer.commit({}, merge_checksums(answers))
        files = read_manifest(RunPaths(self.folder).checkpoint(sizes.steps))["files"]
        self.phases["checkpoint"][0].num_bytes["checkpoint"] = sum(file["size"] for file in files.values())
        for group in self._groups:
            group.shutdown()
            for (
                thread
            ) in threading.enumerate():  # tells the other group, whose ranks have to confirm it before they end
                if thread.name.endswith("members"):
                    thread.join(30.0)


def measure(all_sizes: Sequence[Sizes]) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Runs the loop in each of the sizes, in one session of this process; yields the phases of each run."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("RLHPC_BENCH_FOLDER")) as folder:
        session = start_session(Path(folder))
        for number, sizes in enumerate(all_sizes):
            loop = Loop(sizes, session, Path(folder) / f"run{number}")
            loop.run()
            yield {name: [asdict(phase) for phase in phases] for name, phases in loop.phases.items()}
        session.stop()


def main() -> None:
    """Prints the phases of each run as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=Sizes.steps)
    args = parser.parse_args()
    for phases in measure([Sizes(ranks, steps=args.steps) for ranks in args.ranks]):
        print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    import bench.scale_loop  # ranks import the classes by the module's name

    bench.scale_loop.main()
