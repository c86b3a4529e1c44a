"""Offload of accelerator memory to the host and back, with every view of it intact.

Frameworks keep many views of a few flat buffers, and internal references to them. Moving the tensors would break those, so
the storage under them is copied to the host and emptied, and filled again later.
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
    """Host memory for offloaded tensors, kept between uses: locking pages costs more than copying into them."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Number of retained bytes."""
        return 0 if self._flat is None else self._flat.nbytes

    def blocks(self, sizes: list[int], device: str) -> list[torch.Tensor]:
        """Returns memory of these sizes in bytes, uint8, in place of the blocks that were returned before.

        Args:
            sizes: Bytes of each block.
            device: Kind of the device that will copy.
        """
        rounded = [size + -size % _ALIGN for size in sizes]
        if self.nbytes < sum(rounded):
            self._flat = None  # free it before the next allocation
            self._flat = host_memory(sum(rounded), device)
        if self._flat is None:
            return []
        parts = self._flat[: sum(rounded)].split(rounded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


class Parked:
    """Contents of some tensors' storages on the host. The tensors cannot be used until `restore`.

    Args:
        tensors: Tensors of one device; memory that they share is stored once. Other tensors that share the same memory are
            emptied with it.
        scratch: More tensors to empty, whose contents need not be kept.
        host: Memory for the contents; a new one by default.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        scratch: Iterable[torch.Tensor] = (),
        host: HostMemory | None = None,
    ) -> None:
        self._storage_ids: set[int] = set()
        emptied, contents = self._storages(scratch), self._storages(tensors)
        self._device = device = contents[0].device.type if contents else "cpu"
        self._host = HostMemory() if host is None else host
        blocks = self._host.blocks([storage.nbytes() for storage in contents], device)
        synchronize(device)  # another stream may still write into them
        for storage, block in zip(contents, blocks, strict=True):
            block.copy_(_bytes_of(storage), non_blocking=True)
        synchronize(device)
        self._contents = [(storage, storage.nbytes(), block) for storage, block in zip(contents, blocks, strict=True)]
        self._emptied = [(storage, storage.nbytes()) for storage in emptied]
        for storage in (*contents, *emptied):
            storage.resize_(0)

    def _storages(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Returns the tensors' storages, each once."""
        storages = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storage_ids and storage.nbytes() and storage.resizable():
                self._storage_ids.add(storage._cdata)
                storages.append(storage)
        return storages

    @property
    def nbytes(self) -> int:
        """Number of bytes that were freed."""
        return sum(size for _, size, _ in self._contents) + sum(size for _, size in self._emptied)

    def restore(self) -> None:
        """Allocates the memory again and restores the contents; those of scratch tensors are undefined."""
        for storage, size in self._emptied:
            storage.resize_(size)
        for storage, size, block in self._contents:
            storage.resize_(size)
            _bytes_of(storage).copy_(block, non_blocking=True)
        synchronize(self._device)  # before other data overwrites the host copy
        self._contents, self._emptied = [], []


class ParkingBackend(TrainingBackend):
    """Backend that empties its memory while another role has the accelerator. A subclass lists its tensors (`belongings`), and
    reads or writes them inside `awake`.
    """

    _parked: Parked | None = None
    _host: HostMemory | None = None

    @property
    def away(self) -> bool:
        """True while the tensors are views of empty memory."""
        return self._parked is not None

    def offload(self) -> None:
        """Moves everything to the host."""
        if self.device.type != "cpu" and not self.away:
            self.park()
            empty_cache()

    def park(self) -> int:
        """Empties the tensors of this rank on its device; returns the number of bytes freed."""
        self._host = self._host or HostMemory()
        contents, scratch = ([t for t in tensors if t.device.type == self.device.type] for tensors in self.belongings())
        self._parked = Parked(contents, scratch, self._host)
        return self._parked.nbytes

    def reload(self) -> None:
        """Moves back what `offload` moved away."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
            self.returned()

    @abstractmethod
    def belongings(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Returns the tensors to keep, in any order, on any device, and those that are unused or can be recreated."""

    def returned(self) -> None:
        """Recreates the tensors that were not kept."""


def tensors_of(*modules: torch.nn.Module | None) -> Iterator[torch.Tensor]:
    """Yields parameters and buffers of the modules that are not None."""
    for module in modules:
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_in(value: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """Yields tensors, and their gradients, in nested lists, tuples, sets, dicts and dataclasses."""
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
