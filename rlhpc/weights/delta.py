"""Exact deltas of tensors: finds the elements that changed, and writes them into another tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

#: Elements compared at a time: few enough to stay in the processor's cache until the changed ones are taken out.
_CHUNK = 1 << 17
#: If more than this fraction of a tensor changed, sending all of it is quicker.
_MAX_CHANGED_FRACTION = 1 / 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Elements:
    """New values of some elements of a tensor.

    Attributes:
        shape: Shape of the tensor.
        index: `[n]` int32 or int64, ascending: positions of the elements in the flat tensor.
        values: `[n]`, in the tensor's dtype.
    """

    shape: torch.Size
    index: torch.Tensor
    values: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.values.dtype


def copy_update(target: torch.Tensor, update: torch.Tensor | Elements) -> None:
    """Copies a tensor, or some of its elements, into another tensor in place."""
    target = target.detach() if target.requires_grad else target
    if not isinstance(update, Elements):
        target.copy_(update)
    elif target.is_cpu and target.is_contiguous() and target.dtype == update.dtype:
        _bits(target)[update.index.numpy()] = _bits(update.values)  # three times as fast as torch's
    else:
        index = update.index.to(device=target.device, dtype=torch.int64)
        target.put_(index, update.values.to(device=target.device, dtype=target.dtype))


class Shadow:
    """Copy of the tensors as last sent, from which changes are found. It needs as much memory as the tensors."""

    def __init__(self) -> None:
        self._last_sent_tensors: dict[str, torch.Tensor] = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and tensors as they were last sent."""
        yield from self._last_sent_tensors.items()

    def changes(self, name: str, tensor: torch.Tensor) -> torch.Tensor | Elements | None:
        """Returns the update for a receiver that has the last values: the tensor, some of its elements, or None if nothing
        changed.

        Bits are compared, so −0 differs from 0 and a NaN equals itself.

        Args:
            name: The tensor's name.
            tensor: `[...]`, contiguous, on the CPU. It counts as sent from then on.
        """
        last_values = self._last_sent_tensors.get(name)
        if last_values is None or tensor.element_size() not in _BITS:
            self._last_sent_tensors[name] = tensor.clone()
            return tensor
        new_bits, old_bits = _bits(tensor), _bits(last_values)
        index_chunks, num_changed = [], 0
        for chunk_start in range(0, new_bits.size, _CHUNK):
            changed_index = np.flatnonzero(
                new_bits[chunk_start : chunk_start + _CHUNK] != old_bits[chunk_start : chunk_start + _CHUNK]
            )
            index_chunks.append(changed_index + chunk_start)
            num_changed += changed_index.size
            if num_changed > new_bits.size * _MAX_CHANGED_FRACTION:
                last_values.copy_(tensor)
                return tensor
        if not num_changed:
            return None
        index = np.concatenate(index_chunks)
        old_bits[index] = changed_bits = new_bits[index]
        index_dtype = np.int32 if new_bits.size <= np.iinfo(np.int32).max else np.int64
        new_values = torch.from_numpy(changed_bits).view(tensor.dtype)
        return Elements(tensor.shape, torch.from_numpy(index.astype(index_dtype)), new_values)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Returns a contiguous tensor's memory as flat integers."""
    tensor_bits: np.ndarray = tensor.reshape(-1).view(_BITS[tensor.element_size()]).numpy()
    return tensor_bits
