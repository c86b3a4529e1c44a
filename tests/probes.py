"""Worker classes that tests of the runtime launch; importable by the workers."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from typing import Any

import torch

from rlhpc import Channel, QueueEmpty, Worker, WorkerGroup


class Probe(Worker):
    def __init__(self, base: int = 0, fail_rank: int | None = None) -> None:
        super().__init__()
        self.base = base
        self.waiting_for: Any = None
        if self.rank == fail_rank:
            raise ValueError("no such robot")

    def add(self, x: int) -> int:
        return self.base + self.rank + x

    def identity(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(), "ppid": os.getppid(), "rank": self.rank, "world_size": self.world_size,
            "group": self.group_name, "local_rank": self.local_rank, "node_rank": self.node_rank,
            "accelerators": self.accelerators, "device_index": self.device_index, "threads": torch.get_num_threads(),
            "omp": os.environ["OMP_NUM_THREADS"], "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }  # fmt: skip

    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    def echo(self, obj: Any) -> Any:
        return obj

    def wall_clock(self) -> int:
        return time.time_ns()

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def hold_the_interpreter(self, seconds: float) -> int:
        """As a long call into C code does that keeps the interpreter's lock: no thread of this process runs."""
        import ctypes

        ctypes.PyDLL(None).sleep(int(seconds))
        return self.rank

    def boom(self, rank: int = 1, text: str = "kaboom") -> int:
        if self.rank == rank:
            raise ValueError(text)
        return self.rank

    def leave(self, status: int) -> None:
        os._exit(status)

    def fault(self) -> None:
        import ctypes

        ctypes.string_at(0)

    def start_child(self) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    def _secret(self) -> int:
        return 1

    def produce(self, channel: Channel, n: int, size: int = 1000, key: str = "default_queue") -> int:
        for i in range(n):
            channel.put({"i": i, "t": torch.full((size,), float(i))}, key=key)
        return n

    def consume(self, channel: Channel, n: int, key: str = "default_queue") -> list[tuple[int, float]]:
        return [(x["i"], float(x["t"].double().mean())) for x in (channel.get(key=key) for _ in range(n))]

    def take_and_hold(self, channel: Channel) -> None:
        """Asks for an item the way `get` does, but dies before it acknowledges."""
        import pickle

        from rlhpc.runtime.comm.context import current
        from rlhpc.runtime.comm.zmq_sockets import choose

        head = pickle.dumps((channel.name, "default_queue", None, True, (current().host, ""), current().name))
        current().service.peers.request(choose(channel._homes[0]), b"GET", [head], 10, "an item")
        os.kill(os.getpid(), 9)

    def take(self, channel: Channel) -> Any:
        """Takes an item and is not done with it."""
        return channel.take_nowait().item

    def take_and_do(self, channel: Channel) -> Any:
        taken = channel.take_nowait()
        channel.done(taken)
        return taken.item

    def entrust(self, channel: Channel, item: Any) -> None:
        channel.entrust(item)

    def entrust_before_leaving(self, channel: Channel, item: Any, stays: bool) -> None:
        """Will do so when it is told to leave; with `stays` in this call, which lasts until then."""
        self.before_leaving(lambda: channel.entrust(item))
        channel.entrust("ready")
        while stays and not self.told_to_leave:
            time.sleep(0.01)

    def linger(self) -> None:
        """Has something to do before it leaves that takes too long."""
        self.before_leaving(lambda: time.sleep(300))

    def tell(self, obj: Any, group: str, rank: int) -> bool:
        return self.notify(obj, group, rank, "news")

    def heard(self) -> list[Any]:
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self.notice("news"))
        return found

    def flood(self, channel: Channel, how: str, deadline: float, count: int = 5000) -> tuple[str, int]:
        """Sends to the home of a channel, which may not read; the error, and how many items were sent before it."""
        from rlhpc.runtime.comm.context import current

        context = current()
        before, context.wait_deadline = context.wait_deadline, deadline
        number = 0
        try:
            for number in range(count):
                item = {"number": number, "data": bytes(20_000)}
                if how == "put":
                    channel.put(item)
                elif how == "entrust":
                    channel.entrust(item)
                elif how == "send":
                    self.send(item, "home", 0)
                elif how == "notify":
                    self.notify(item, "home", 0, "flood")
                else:
                    context.service.peers.post(channel._homes[0]["ipc"], b"NOTE", [bytes(20_000)], deadline)
        except Exception as error:
            return f"{type(error).__name__}: {error}", number
        finally:
            context.wait_deadline = before
        return "", count

    def get_with_deadline(self, channel: Channel, seconds: float) -> str:
        try:
            channel.get(timeout=seconds)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "an item"

    def poll(self, channel: Channel, how: str) -> None:
        """Asks for an item again and again, as a loop does that has other work between; nobody ever puts one."""
        while True:
            if how == "get_nowait":
                with contextlib.suppress(QueueEmpty):
                    channel.get_nowait()
            else:
                channel.empty()
            time.sleep(0.001)

    def send_all(self, items: list[Any], group: str) -> None:
        for item in items:
            self.send(item, group, self.rank)

    def recv_all(self, group: str, n: int) -> list[Any]:
        return [self.recv(group, self.rank) for _ in range(n)]

    def give_and_change(self, size: int, wait: float, group: str, channel: Channel | None) -> None:
        """Sends by message or channel, twice, and uses the tensors again at once."""
        x = {"a": torch.arange(size, dtype=torch.float32), "b": torch.ones(7)}
        for _ in range(2):
            time.sleep(wait)
            self.send(x, group, self.rank) if channel is None else channel.put(x, key="0")
            x["a"] += 1

    def take_twice(self, size: int, wait: float, group: str, channel: Channel | None) -> list[bool]:
        """Whether each is what it was when it was sent."""
        same = []
        for number in range(2):
            time.sleep(wait)
            got = self.recv(group, self.rank) if channel is None else channel.get(key="0")
            expected = torch.arange(size, dtype=torch.float32) + number
            same.append(torch.equal(got["a"], expected) and torch.equal(got["b"], torch.ones(7)))
        return same

    def broadcast_and_hold(self, src: tuple[str, int], groups: list[tuple[str, list[int]]]) -> float:
        mine = (self.group_name, self.rank) == src
        self.held = self.broadcast(torch.arange(1 << 20) if mine else None, groups, src, read_only=True)
        return float(self.held.sum())

    def segments_in_use(self) -> int:
        """Of those that this process has written, how many somebody still looks into."""
        from rlhpc.runtime.comm.context import current
        from rlhpc.runtime.comm.shared_memory import segments_in_use
        from rlhpc.runtime.host import process_id

        return segments_in_use(current().service.scratch.shm, process_id())

    def send_in_place(self, group: str) -> None:
        self.send_tensor(torch.arange(12.0).reshape(3, 4), group, self.rank)

    def recv_in_place(self, group: str, shape: tuple[int, ...]) -> torch.Tensor:
        out = torch.zeros(shape)
        self.recv_tensor(out, group, self.rank)
        return out

    def exchange_async(self, group: str) -> list[int]:
        work = [self.send(i, group, self.rank, async_op=True) for i in range(5)]
        got = [self.recv(group, self.rank, async_op=True) for _ in range(5)]
        for w in work:
            assert w is not None
            w.wait(30)
        return [w.wait(30) for w in got]

    def broadcast_from(self, src: tuple[str, int], groups: list[tuple[str, list[int]]]) -> float:
        mine = (self.group_name, self.rank) == src
        got = self.broadcast({"w": torch.arange(100_000.0)} if mine else None, groups, src)
        got["w"][0] = -1.0  # a receiver may write: nobody else sees it
        return float(got["w"].sum())

    def reduce(self) -> tuple[torch.Tensor, list[Any]]:
        tensor = self.all_reduce(torch.full((3,), float(self.rank)))
        self.barrier()
        return tensor, self.all_gather_object({"rank": self.rank})

    def reduce_in_pairs(self) -> float:
        """Subgroups of torch's own, as sharded training makes them."""
        import torch.distributed as dist

        self.init_process_group()
        pairs = [dist.new_group([first, first + 1]) for first in range(0, self.world_size, 2)]
        tensor = torch.tensor(float(self.rank))
        dist.all_reduce(tensor, group=pairs[self.rank // 2])
        return float(tensor)

    def call_group(self, name: str, x: int) -> list[int]:
        return WorkerGroup.from_group_name(Probe, name).add(x).wait()


class Awkward(Worker):
    """A rank that does not start, or not end, as it should."""

    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "slow":
            time.sleep(600)

    def close(self) -> None:
        raise OSError("the engine would not let go")

    def pid(self) -> int:
        return os.getpid()


class Spawned(Awkward):
    @classmethod
    def forks(cls, how: str) -> bool:
        return how == "forked"

    def command(self) -> list[str]:
        import sys

        return sys.orig_argv


def note_import() -> None:
    """Notes the process that makes a group's imports."""
    with open(os.environ["RLHPC_TEST_IMPORTS"], "a") as file:
        print(os.getpid(), file=file)


class Preloading(Probe):
    """Ranks whose node imports for them."""

    @classmethod
    def preloads(cls, *args: object, **kwargs: object) -> list[str]:
        return [f"{__name__}:note_import"]


class Greedy(Worker):
    def shutdown(self) -> None: ...


class Pair(Probe):
    """Two ranks see each other's accelerators."""

    @classmethod
    def ranks_sharing_devices(cls, *args: object, **kwargs: object) -> int:
        return 2
