"""Keeps a module's tensors up to date with a trainer's versions."""

from __future__ import annotations

import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.elements import Elements, put
from rlhpc.weights.proof import Proof
from rlhpc.weights.strategy import NamedTensors, Update, WeightSync


def apply(sync: WeightSync, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
    """Receives the next version into these tensors, in place.

    Args:
        sync: The receiving end.
        named_tensors: The tensors to fill.
        adopt: See `Target`.

    Returns:
        The version.

    Raises:
        RlhpcError: The receiver's model is a different one; nothing was changed.
    """
    target = Target(named_tensors, adopt)  # while the sender is still writing
    update = sync.receive()
    try:
        target.take(update)
    except BaseException:
        sync.forget()
        raise
    return update.version


class Target:
    """The tensors that an update goes into.

    Args:
        named_tensors: The tensors to fill.
        adopt: A module that is only ever read. Its parameters and buffers of these names, if they are on the CPU, become
            views of what was received instead of copies: no byte is moved, and all receivers on a host share the memory.
    """

    def __init__(self, named_tensors: NamedTensors, adopt: torch.nn.Module | None = None) -> None:
        self._tensors = dict(named_tensors)
        self._own = {} if adopt is None else adopt.state_dict(keep_vars=True)

    @torch.no_grad()
    def take(self, update: Update) -> None:
        """Applies an update; nothing is changed unless all names, shapes and dtypes agree.

        Raises:
            RlhpcError: The receiver's model is a different one.
        """
        changes: list[tuple[str, torch.Tensor | Elements]] = []
        bad, proof = None, Proof(update, look=False)
        for name, change in proof.tensors():  # as they arrive: the sender is still writing the rest
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
            elif mine.is_cpu and not isinstance(change, Elements) and change.is_cpu:
                mine.data = change
            else:
                put(mine, change)
        proof.check(self._held)

    def _held(self, name: str) -> torch.Tensor:
        return self._own[name] if name in self._own else self._tensors[name]


def _described(name: str, tensor: torch.Tensor | Elements | None) -> str:
    return "None" if tensor is None else str((name, tuple(tensor.shape), str(tensor.dtype)))
