"""What a version of the weights was to be, tensor by tensor: `rlhpc.weights.proof` compares it with what was taken in.

A tensor's digest is that of a sample of its bytes: all of a small one, every so many pages of a large one, other pages with
each version. So it costs next to nothing, on an accelerator, too. An optimizer changes elements everywhere, so one tensor in
place of another, or of an older version, differs in the sample; that it differs in a few elements alone is noticed within as
many versions as there are samples.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

#: Bytes that are taken together, and those of a sample at least.
_PAGE, _LEAST = 4096, 1 << 16
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
    if not tensor.numel():
        return 0
    tensor = tensor.detach().contiguous()
    every = min(_SAMPLES, tensor.nbytes // _LEAST)
    if every > 1 and tensor.device.type != "cpu":  # so that only the sample leaves the accelerator
        return _of(*(part.cpu().numpy() for part in _sample(tensor.view(-1).view(torch.uint8), version, every)))
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    # By its address: there are hundreds of small ones, and acting waits for them.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    if every <= 1:
        return _of(memory)
    # By numpy: it copies pages as such, and torch byte by byte.
    return _of(*map(np.ascontiguousarray, _sample(np.frombuffer(memoryview(memory), np.uint8), version, every)))


def _sample(data: Any, version: int, every: int) -> tuple[Any, Any]:
    """Of bytes, those behind the last page; and one of every so many pages."""
    pages = len(data) // _PAGE
    return data[pages * _PAGE :], data[: pages * _PAGE].reshape(pages, _PAGE)[version % every :: every]


def _of(*parts: Any) -> int:
    if len(parts) == 1:
        only: int = xxhash.xxh3_64_intdigest(parts[0])
        return only
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return int(found.intdigest())
