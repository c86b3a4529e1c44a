"""Weights by shared memory: written once a host, straight from the sender's tensors, and mapped by every receiver."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.elements import Elements, put
from rlhpc.weights.strategy import NamedTensors
from rlhpc.weights.subscribe import Update
from rlhpc.weights.transport import WeightReceiver, WeightSender

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker


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
        """Sends a version to all receivers (`WeightSync.sync`)."""
        assert self._sender is not None
        self._sender.send(version, named_tensors, frozen=frozen)

    def forget(self) -> None:
        """Makes the next version a complete one (`WeightSync.forget`)."""
        for end in (self._sender, self._receiver):
            if end is not None:
                end.forget()

    def apply(self, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
        """Receives the next version (`WeightSync.apply`)."""
        assert self._receiver is not None
        target = Target(named_tensors, adopt)  # while the sender still writes
        update = self._receiver.receive()
        try:
            target.take(update)
        except BaseException:
            self._receiver.forget()
            raise
        return update.version


class Target:
    """What an update goes into.

    Args:
        named_tensors: To fill.
        adopt: A module that is only ever read. Its parameters and buffers of these names, where they are on the CPU, look
            at what was received from now on, instead of having it copied: no byte is moved, and all receivers of a host
            share the memory.
    """

    def __init__(self, named_tensors: NamedTensors, adopt: torch.nn.Module | None = None) -> None:
        self._tensors = dict(named_tensors)
        self._own = {} if adopt is None else adopt.state_dict(keep_vars=True)

    @torch.no_grad()
    def take(self, update: Update) -> None:
        """Takes an update over; nothing is changed unless all names, shapes and dtypes agree.

        Raises:
            RlhpcError: The receiver's model is another one.
        """
        changes: list[tuple[str, torch.Tensor | Elements]] = []
        bad = None
        for name, change in update.tensors:  # as they come: the sender still writes what follows
            theirs = self._tensors.get(name)
            if theirs is None or theirs.shape != change.shape or theirs.dtype != change.dtype:
                bad = bad or name
            changes.append((name, change))
        if update.complete and bad is None and len(changes) != len(self._tensors):
            bad = next(iter(self._tensors.keys() - dict(changes).keys()))
        if bad is not None:
            raise RlhpcError(
                f"weights of version {update.version} do not fit the receiver: it has "
                f"{_described(bad, self._tensors.get(bad))}, got {_described(bad, dict(changes).get(bad))}"
            )
        for name, change in changes:
            mine = self._own.get(name)
            if mine is None:
                put(self._tensors[name], change)
            elif mine.device.type == "cpu" and not isinstance(change, Elements):
                mine.data = change
            else:
                put(mine, change)


def _described(name: str, tensor: torch.Tensor | Elements | None) -> str:
    return "None" if tensor is None else str((name, tuple(tensor.shape), str(tensor.dtype)))
