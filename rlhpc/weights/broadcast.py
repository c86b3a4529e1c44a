"""Weights by shared memory: written once a host, straight from the sender's tensors, and mapped by every receiver."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.elements import Elements, put
from rlhpc.weights.strategy import NamedTensors, register_sync
from rlhpc.weights.subscribe import Update
from rlhpc.weights.transport import WeightReceiver, WeightSender

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker


@register_sync("broadcast")
class BroadcastSync:
    """The one strategy so far.

    Args:
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.
    """

    def __init__(
        self, worker: Worker, src: tuple[str, int], receivers: list[tuple[str, list[int]]], delta: str = "frozen"
    ) -> None:
        sends = (worker.group_name, worker.rank) == tuple(src)
        self._sender = WeightSender(worker, receivers, delta) if sends else None
        self._receiver = None if sends else WeightReceiver(worker, src)

    def sync(self, version: int, named_tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """See `WeightSync.sync`."""
        assert self._sender is not None
        self._sender.send(version, named_tensors, frozen=frozen)

    def forget(self) -> None:
        """See `WeightSync.forget`."""
        for end in (self._sender, self._receiver):
            if end is not None:
                end.forget()

    def apply(self, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
        """See `WeightSync.apply`."""
        assert self._receiver is not None
        update = self._receiver.receive()
        try:
            return apply_update(update, named_tensors, adopt=adopt)
        except BaseException:
            self._receiver.forget()
            raise


@torch.no_grad()
def apply_update(update: Update, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
    """Takes an update over into the tensors; nothing is changed unless all names, shapes and dtypes agree.

    Args:
        update: What came.
        named_tensors: What to fill.
        adopt: A module that is only ever read. Its parameters and buffers of these names, where they are on the CPU, look
            at what was received from now on, instead of having it copied: no byte is moved, and all receivers of a host
            share the memory.

    Raises:
        RlhpcError: The receiver's model is another one.
    """
    targets = dict(named_tensors)
    changes = list(update.tensors)
    _check_fit(update, targets, changes)
    own = {} if adopt is None else adopt.state_dict(keep_vars=True)
    for name, change in changes:
        if name in own and own[name].device.type == "cpu" and not isinstance(change, Elements):
            own[name].data = change
        else:
            put(own.get(name, targets[name]), change)
    return update.version


def _check_fit(
    update: Update, targets: dict[str, torch.Tensor], changes: list[tuple[str, torch.Tensor | Elements]]
) -> None:
    bad = None
    for name, change in changes:
        mine = targets.get(name)
        if mine is None or mine.shape != change.shape or mine.dtype != change.dtype:
            bad = name
            break
    else:
        if update.complete and len(changes) != len(targets):
            bad = next(iter(targets.keys() - dict(changes).keys()))
    if bad is not None:
        came = dict(changes).get(bad)
        raise RlhpcError(
            f"weights of version {update.version} do not fit the receiver: it has {_described(bad, targets.get(bad))}, "
            f"got {_described(bad, came)}"
        )


def _described(name: str, tensor: torch.Tensor | Elements | None) -> str:
    return "None" if tensor is None else str((name, tuple(tensor.shape), str(tensor.dtype)))
