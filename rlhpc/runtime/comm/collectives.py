"""Collectives within a worker group, over torch.distributed: gloo on CPU, NCCL on GPUs.

The first collective creates the process group.
"""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.comm.context import current
from rlhpc.runtime.devices import collective_backends, torch_device
from rlhpc.runtime.trace_recorder import span
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
        import torch.distributed as dist

        if not self._is_created:
            from rlhpc.runtime.comm.store import ServiceStore

            assert self._spec is not None
            if not self._spec.tcp_address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            context = current()
            timeout_s = min(context.wait_deadline, 1800)
            # Ranks that join separately have different incarnations, so neighbouring ranks use that of their first rank.
            first_rank = self._first_rank or 0
            name = (
                self._spec.incarnation
                if self._first_rank is None
                else context.rank_record(self.group, first_rank)["incarnation"]
            )
            dist.init_process_group(
                collective_backends(torch_device(self._spec.accelerators)),
                store=ServiceStore(context, self.group, name, timeout_s, first_rank),
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            self._is_created = True
        return dist.group.WORLD

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduces a tensor in place and returns it; `op` is "sum", "mean", "max" or "min".

        Raises:
            ValueError: The operation is unknown.
        """
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
        with span("all_reduce", "send", bytes=tensor.nbytes):
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
            import torch.distributed as dist

            with span(f"barrier of {self.group}", "wait"):
                dist.barrier()
