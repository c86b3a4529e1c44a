"""Gives accelerator memory away and takes it back, with every view of it intact.

Frameworks keep many views of a few flat buffers, and references to them in places of their own. Moving the tensors
would break those, so the storage under them is copied to the host and emptied, and filled again later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Parked:
    """Holds the contents of some tensors' storages on the host. The tensors cannot be used until `restore`.

    Args:
        tensors: Any tensors; memory that they share is stored once. Tensors not among them that share the same memory
            are emptied with it.
        scratch: More tensors to empty, whose contents need not be kept.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        self._seen: set[int] = set()
        for tensor in scratch:
            self._take(tensor.untyped_storage(), keep=False)
        for tensor in tensors:
            self._take(tensor.untyped_storage(), keep=True)

    def _take(self, storage: torch.UntypedStorage, keep: bool) -> None:
        size = storage.nbytes()
        if storage._cdata in self._seen or size == 0 or not storage.resizable():
            return
        self._seen.add(storage._cdata)
        host = None
        if keep:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(_bytes_of(storage))
        self._held.append((storage, size, host))
        storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Number of bytes that were given away."""
        return sum(size for _, size, _ in self._held)

    def restore(self) -> None:
        """Allocates the memory again and puts the contents back."""
        for storage, size, host in self._held:
            storage.resize_(size)
            if host is not None:
                _bytes_of(storage).copy_(host)
        self._held = []


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_in(value: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """Tensors, and their gradients, in nested lists, tuples, sets, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return
    if depth > 0:
        for child in value:
            yield from tensors_in(child, depth - 1)
