"""Collectives inside one worker group, over torch.distributed: gloo on CPU, NCCL on GPUs; formed when first used."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.context import current
from rlhpc.runtime.device import collective_backends, torch_device
from rlhpc.runtime.spec import WorkerSpec

if TYPE_CHECKING:
    import torch


class Collectives:
    """The group's process group, with the few operations that roles use.

    Args:
        group: Worker group.
        rank: This rank's number among those that belong together.
        world_size: How many these are.
        spec: What this process was told.
        first: Rank in the worker group of the first of them, where they are some neighbours; None for the whole group.
    """

    def __init__(
        self, group: str, rank: int, world_size: int, spec: WorkerSpec | None, first: int | None = None
    ) -> None:
        self.group, self.rank, self.world_size, self._spec, self._first = group, rank, world_size, spec, first
        self._ready = False

    def process_group(self) -> Any:
        """Forms torch's default process group; None where the group has one rank."""
        if self.world_size == 1:
            return None
        import torch.distributed as dist

        from rlhpc.runtime.comm.store import ServiceStore

        if not self._ready:
            assert self._spec is not None
            if not self._spec.tcp_address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            context = current()
            limit = min(context.wait_deadline, 1800)
            # Some of a group may have joined one by one, with names of their own.
            first = self._first or 0
            name = self._spec.incarnation if self._first is None else context.member(self.group, first)["incarnation"]
            dist.init_process_group(
                collective_backends(torch_device(self._spec.accelerators)),
                store=ServiceStore(context, self.group, name, limit, first),
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=limit),
            )
            self._ready = True
        return dist.group.WORLD

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """In place; "mean" divides the sum by the world size."""
        if self.process_group() is None:
            return tensor
        import torch.distributed as dist

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
        """The ranks' objects, in rank order, over the authenticated inboxes: torch.distributed would unpickle from anybody."""
        from rlhpc.runtime.comm import p2p

        if self.rank == 0:
            objects = [obj, *(p2p.recv(self.group, rank, tag="g") for rank in range(1, self.world_size))]
        else:
            p2p.send(obj, self.group, self.rank, self.group, 0, tag="g")
            objects = []
        if self.world_size == 1:
            return objects
        ranks = list(range(self.world_size))
        gathered: list[Any] = p2p.broadcast(objects, self.group, self.rank, [(self.group, ranks)], (self.group, 0))
        return gathered

    def barrier(self) -> None:
        if self.process_group() is not None:
            import torch.distributed as dist

            dist.barrier()
