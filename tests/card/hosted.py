"""The group in which processes with the accelerator of `tests.card` add up: gloo's, on copies in the host's memory."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

#: What a group can be asked for, by the names by which torch's C++ asks a group that is written in Python.
_ASKED = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "all_gather_single",
    "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "all_to_all_single", "alltoall", "send", "recv",
)  # fmt: skip


class Hosted(dist.ProcessGroup):
    """A group of processes. What it is asked for is done when the call comes back."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._host = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return "hosted"

    @property
    def group_name(self) -> str:
        """Torch gives it to the groups that it makes itself alone."""
        return dist.distributed_c10d._world.pg_names[self]

    def barrier(self, *_: Any, **__: Any) -> Any:
        return self.allreduce([torch.ones(1)])


def _on_host(name: str) -> Callable[..., Any]:
    def asked(self: Hosted, *args: Any, **options: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def down(one: Any) -> Any:
            if isinstance(one, list | tuple):
                return [down(part) for part in one]
            if not isinstance(one, torch.Tensor) or one.device.type == "cpu":
                return one
            copies.append((one.detach(), one.detach().cpu()))
            return copies[-1][1]

        with torch.no_grad():
            getattr(self._host, name)(*map(down, args), **options).wait()
            for card, host in copies:
                card.copy_(host)
        done: Future[Any] = Future()
        done.set_result(args[0])
        return _create_work_from_future(done)

    return asked


for _name in _ASKED:
    setattr(Hosted, _name, _on_host(_name))


def make(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Hosted:
    """As `Backend.register_backend` asks for."""
    return Hosted(store, rank, size, timeout)
