"""Gives accelerator memory away and takes it back, with every view of it intact.

Frameworks keep many views of a few flat buffers, and references to them in places of their own. Moving the tensors
would break those, so the storage under them is copied to the host and emptied, and filled again later.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rlhpc.runtime.devices import empty_cache, host_memory, synchronize
from rlhpc.training.backend import TrainingBackend

_ALIGN = 64


class HostMemory:
    """Memory of the host for what leaves an accelerator, kept from one time to the next: to lock pages costs more than to
    copy into them."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return 0 if self._flat is None else self._flat.nbytes

    def blocks(self, sizes: list[int], device: str) -> list[torch.Tensor]:
        """Memory of these sizes in bytes, uint8, in place of what was given out before.

        Args:
            sizes: Of the blocks.
            device: Kind of the device that will copy.
        """
        rounded = [size + -size % _ALIGN for size in sizes]
        if self.nbytes < sum(rounded):
            self._flat = None  # before the next is there
            self._flat = host_memory(sum(rounded), device)
        if self._flat is None:
            return []
        parts = self._flat[: sum(rounded)].split(rounded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


class Parked:
    """Holds the contents of some tensors' storages on the host. The tensors cannot be used until `restore`.

    Args:
        tensors: Any tensors of one device; memory that they share is stored once. Tensors not among them that share the same
            memory are emptied with it.
        scratch: More tensors to empty, whose contents need not be kept.
        host: Where the contents go; by default memory of its own.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        scratch: Iterable[torch.Tensor] = (),
        host: HostMemory | None = None,
    ) -> None:
        self._seen: set[int] = set()
        emptied, kept = self._storages(scratch), self._storages(tensors)
        self._device = device = kept[0].device.type if kept else "cpu"
        self._host = HostMemory() if host is None else host
        blocks = self._host.blocks([storage.nbytes() for storage in kept], device)
        synchronize(device)  # another stream may still write into them
        for storage, block in zip(kept, blocks, strict=True):
            block.copy_(_bytes_of(storage), non_blocking=True)
        synchronize(device)
        self._kept = [(storage, storage.nbytes(), block) for storage, block in zip(kept, blocks, strict=True)]
        self._emptied = [(storage, storage.nbytes()) for storage in emptied]
        for storage in (*kept, *emptied):
            storage.resize_(0)

    def _storages(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """What lies under them, each once."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen and storage.nbytes() and storage.resizable():
                self._seen.add(storage._cdata)
                found.append(storage)
        return found

    @property
    def nbytes(self) -> int:
        """Number of bytes that were given away."""
        return sum(size for _, size, _ in self._kept) + sum(size for _, size in self._emptied)

    def restore(self) -> None:
        """Allocates the memory again and puts the contents back; what was scratch has any."""
        for storage, size in self._emptied:
            storage.resize_(size)
        for storage, size, block in self._kept:
            storage.resize_(size)
            _bytes_of(storage).copy_(block, non_blocking=True)
        synchronize(self._device)  # before something else goes where the contents were
        self._kept, self._emptied = [], []


class ParkingBackend(TrainingBackend):
    """A backend that empties its memory while another role has the accelerator. A subclass says what it has there, and does
    what reads or writes it inside `awake`."""

    _parked: Parked | None = None
    _host: HostMemory | None = None

    @property
    def away(self) -> bool:
        """Whether all that is left are views of empty memory."""
        return self._parked is not None

    def offload(self) -> None:
        """Moves everything to the host."""
        if self.device.type != "cpu" and not self.away:
            self.park()
            empty_cache()

    def park(self) -> int:
        """Empties what this rank holds on its device; returns the number of bytes given away."""
        self._host = self._host or HostMemory()
        kept, scratch = ([t for t in tensors if t.device.type == self.device.type] for tensors in self.belongings())
        self._parked = Parked(kept, scratch, self._host)
        return self._parked.nbytes

    def reload(self) -> None:
        """Moves back what `offload` moved away."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
            self.returned()

    @abstractmethod
    def belongings(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """What is to be kept, in any order, on any device; and what is not, because nobody needs its contents or they can be
        made again."""

    def returned(self) -> None:
        """Makes again what was not kept."""


def tensors_of(*modules: torch.nn.Module | None) -> Iterator[torch.Tensor]:
    """Parameters and buffers of the modules that there are."""
    for module in modules:
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()


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
