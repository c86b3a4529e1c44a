"""Collectives within a worker group, over torch.distributed: gloo on CPU, NCCL on GPUs.

The first collective creates the process group.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlhpc.runtime.comm.context import Context, current
from rlhpc.runtime.comm.zmq_sockets import choose
from rlhpc.runtime.devices import collective_backends, torch_device
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.worker_spec import WorkerSpec

if TYPE_CHECKING:
    import torch


class Collectives:
    """Collectives of a worker group, or of neighbouring ranks of it, over torch's default process group.

    Args:
        group: Name of the worker group.
        rank: This rank's index in the process group.
        world_size: Number of ranks of the process group.
        spec: Specification of this process's rank.
        first: Rank, in the worker group, of the first rank of the process group; None if the process group is the whole
            worker group.
    """

    def __init__(
        self, group: str, rank: int, world_size: int, spec: WorkerSpec | None, first: int | None = None
    ) -> None:
        self.group, self.rank, self.world_size, self._spec, self._first_rank = group, rank, world_size, spec, first
        self._is_created = False

    def process_group(self) -> Any:
        """Returns torch's default process group, which the first call creates; returns None for a single rank."""
        if self.world_size == 1:
            return None
        if not self._is_created:
            assert self._spec is not None
            if not self._spec.tcp_address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            context = current()
            limit = min(context.wait_deadline, 1800)
            # Ranks that join separately have different incarnations, so neighbouring ranks use that of their first rank.
            first_rank = self._first_rank or 0
            name = (
                self._spec.incarnation
                if self._first_rank is None
                else context.member(self.group, first_rank)["incarnation"]
            )
            dist.init_process_group(
                collective_backends(torch_device(self._spec.accelerators)),
                store=ServiceStore(context, self.group, name, limit, first_rank),
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=limit),
            )
            self._is_created = True
        return dist.group.WORLD

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduces a tensor in place and returns it; `op` is "sum", "mean", "max" or "min"."""
        if self.process_group() is None:
            return tensor
        reduce = {
            "sum": dist.ReduceOp.SUM,
            "mean": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
        }
        if op not in reduce:
            raise ValueError(f"all_reduce: op is {op!r}; allowed: {', '.join(reduce)}")
        dist.all_reduce(tensor, reduce[op])
        return tensor.div_(self.world_size) if op == "mean" else tensor

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks in rank order.

        Sends the objects through the authenticated inboxes, because torch.distributed would unpickle data from any sender.
        """
        from rlhpc.runtime.comm import p2p

        objects_by_rank = [obj]
        if self.world_size == 1:
            return objects_by_rank
        if self.rank == 0:
            objects_by_rank += [p2p.recv(self.group, rank, tag="g") for rank in range(1, self.world_size)]
        else:
            p2p.send(obj, self.group, self.rank, self.group, 0, tag="g")
        ranks = list(range(self.world_size))
        all_objects: list[Any] = p2p.broadcast(
            objects_by_rank, self.group, self.rank, [(self.group, ranks)], (self.group, 0)
        )
        return all_objects

    def barrier(self) -> None:
        if self.process_group() is not None:
            dist.barrier()


#: Seconds between two checks whether the run has failed, while the rank that stores the keys waits for one.
_CHECK_S = 0.2
#: torch keeps only the C++ part of a store; without a reference here, the Python object and its methods would be lost.
_stores: list[ServiceStore] = []


class ServiceStore(dist.Store):
    """torch store of a process group; the service of one rank of the group stores the keys and values.

    Args:
        context: This process's context.
        group: Name of the worker group.
        name: Name that distinguishes several stores of one rank.
        timeout_s: Seconds to wait for a key that another rank sets.
        holder: Rank whose service stores the keys.
    """

    def __init__(self, context: Context, group: str, name: str, timeout_s: float, holder: int = 0) -> None:
        super().__init__()
        self._context, self._group, self._name, self._timeout_s = context, group, name, timeout_s
        self._holder_rank = holder
        _stores.append(self)

    def _request(self, op: bytes, key: str, *arguments: bytes, timeout: float | None = None) -> bytes:
        """Executes an operation (`KeyValueStore.execute`, or "wait") in the service of the rank that stores the keys.

        Returns the operation's result.
        """
        service, endpoint = self._context.service, self._holder_endpoint()
        if endpoint is None:
            return service.store.execute(op, self._full_key(key), *arguments)
        purpose = f"{self._group}-{self._holder_rank} to answer for the process group"
        limit = self._timeout_s if timeout is None else timeout
        return service.peers.request(endpoint, b"STORE", [op, self._full_key(key), *arguments], limit, purpose)[0]

    def _holder_endpoint(self) -> str | None:
        """Returns the endpoint of the process that stores the keys; None if this process stores them."""
        record = self._context.member(self._group, self._holder_rank)["data"]
        return None if record["ipc"] == self._context.service.endpoint["ipc"] else choose(record)

    def _full_key(self, key: str) -> bytes:
        return f"{self._name}/{key}".encode()

    def _wait_for_value(self, key: str, deadline: float) -> bytes:
        """Waits until a rank has set a key; returns its value.

        Raises:
            DeadlineExceeded: No rank has set the key before the deadline.
        """
        limit = max(0.0, deadline - time.monotonic())
        if self._holder_endpoint() is not None:
            with contextlib.suppress(DeadlineExceeded):
                return self._request(b"wait", key, timeout=limit)
        else:
            while True:
                self._context.check()
                remaining_s = deadline - time.monotonic()
                stored_value = self._context.service.store.wait(
                    self._full_key(key), max(0.0, min(remaining_s, _CHECK_S))
                )
                if stored_value is not None:
                    return stored_value
                if remaining_s <= 0:
                    break
        raise DeadlineExceeded(f"{self._context.name} waited {limit:.0f} s for the ranks of {self._group!r} "
                               f"to form their process group (key {key})")  # fmt: skip

    def set(self, key: str, value: Any) -> None:
        self._request(b"set", key, value if isinstance(value, bytes) else str(value).encode())

    def get(self, key: str) -> bytes:
        return self._wait_for_value(key, time.monotonic() + self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        return int(self._request(b"add", key, str(amount).encode()))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        sides = [side if isinstance(side, bytes) else str(side).encode() for side in (expected, desired)]
        return self._request(b"swap", key, *sides)

    def check(self, keys: list[str]) -> bool:
        return all(self._request(b"has", key) == b"1" for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit
        for key in keys:
            self._wait_for_value(key, deadline)

    def delete_key(self, key: str) -> bool:
        return self._request(b"del", key) == b"1"

    def num_keys(self) -> int:
        return int(self._request(b"count", ""))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> ServiceStore:
        """Returns another handle of the same store; torch derives a subgroup's store from it."""
        return ServiceStore(self._context, self._group, self._name, self._timeout_s, self._holder_rank)
