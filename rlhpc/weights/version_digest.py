"""What a version of the weights was to be, tensor by tensor: `rlhpc.weights.verification` compares it with what was taken in.

A tensor's digest is that of a sample of its bytes: all of a small one, every so many pages of a large one, other pages with
each version. So it costs next to nothing, on an accelerator, too. An optimizer changes elements everywhere, so one tensor in
place of another, or of an older version, differs in the sample; that it differs in a few elements alone is noticed within as
many versions as there are samples.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

#: Bytes that are taken together, and those of a sample at least.
_PAGE, _LEAST = 4096, 1 << 16
#: 64 bits of a buffer.
_digest: Callable[[Any], int] = xxhash.xxh3_64_intdigest
#: Samples in which a large tensor is looked at whole.
_SAMPLES = 64


@dataclass(frozen=True)
class Receipt:
    """What a version was to be.

    Attributes:
        version: Version of the weights.
        digests: Of each tensor that the sender was given, by name. Those that never change and were sent before may be
            missing.
    """

    version: int
    digests: dict[str, int]


def digest(tensor: torch.Tensor, version: int) -> int:
    """64 bits that stand for a tensor's bytes in a version.

    Args:
        tensor: Any dtype, shape and device.
        version: Chooses the sample.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return 0
    every = min(_SAMPLES, nbytes // _LEAST)
    if not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
        if every > 1 and not tensor.is_cpu:  # so that only the sample leaves the accelerator
            return _of(*(part.cpu().numpy() for part in _sample(tensor.view(-1).view(torch.uint8), version, every)))
        tensor = tensor.cpu()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    if every <= 1:
        return _digest(memory)
    # By numpy: it copies pages as such, and torch byte by byte.
    return _of(*map(np.ascontiguousarray, _sample(np.frombuffer(memoryview(memory), np.uint8), version, every)))


def digests(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    """The digest of each of many tensors, by name: there are hundreds of small ones, and acting waits for them."""
    found: dict[str, int] = {}
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        if 0 < nbytes < 2 * _LEAST and tensor.is_cpu and tensor.is_contiguous():  # as `digest` would, in fewer calls
            found[name] = _digest((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))
        else:
            found[name] = digest(tensor, version)
    return found


def _sample(data: Any, version: int, every: int) -> tuple[Any, Any]:
    """Of bytes, those behind the last page; and one of every so many pages."""
    pages = len(data) // _PAGE
    return data[pages * _PAGE :], data[: pages * _PAGE].reshape(pages, _PAGE)[version % every :: every]


def _of(*parts: Any) -> int:
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return int(found.intdigest())
