"""Digests of a version's tensors, which `rlhpc.weights.verification` compares with the tensors that a receiver applied.

A digest covers a sample of a tensor's bytes: all bytes of a small tensor, every n-th page of a large one. Each version samples
other pages. This costs little, also on an accelerator. An optimizer changes elements everywhere, so a tensor swapped with
another one, or with an older version, differs in the sample. A difference in a few elements only is detected within as many
versions as there are samples.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

#: Bytes of a page.
_PAGE = 4096
#: Minimum bytes of a sample.
_MIN_SAMPLE_BYTES = 1 << 16
#: Returns 64 bits of a buffer.
_digest: Callable[[Any], int] = xxhash.xxh3_64_intdigest
#: Number of samples that cover a large tensor completely.
_SAMPLES = 64


@dataclass(frozen=True)
class Receipt:
    """Digests of a version, as its sender computed them.

    Attributes:
        version: Version of the weights.
        digests: Digest of each tensor passed to the sender, by name. Tensors that never change and were sent before may be
            missing.
    """

    version: int
    digests: dict[str, int]


def digest(tensor: torch.Tensor, version: int) -> int:
    """Returns a 64-bit digest of a tensor's bytes in a version.

    Args:
        tensor: Any dtype, shape and device.
        version: Chooses the sample.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return 0
    every = min(_SAMPLES, nbytes // _MIN_SAMPLE_BYTES)
    if not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
        if every > 1 and not tensor.is_cpu:  # so that only the sample leaves the accelerator
            return _of(*(part.cpu().numpy() for part in _sample(tensor.view(-1).view(torch.uint8), version, every)))
        tensor = tensor.cpu()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    if every <= 1:
        return _digest(memory)
    # numpy copies whole pages, torch single bytes.
    return _of(*map(np.ascontiguousarray, _sample(np.frombuffer(memoryview(memory), np.uint8), version, every)))


def digests(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    """Returns the digest of each tensor, by name. It is fast for hundreds of small tensors, since acting waits for it."""
    digests_by_name: dict[str, int] = {}
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        if 0 < nbytes < 2 * _MIN_SAMPLE_BYTES and tensor.is_cpu and tensor.is_contiguous():  # `digest` inlined
            digests_by_name[name] = _digest((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))
        else:
            digests_by_name[name] = digest(tensor, version)
    return digests_by_name


def _sample(data: Any, version: int, every: int) -> tuple[Any, Any]:
    """Returns the bytes after the last complete page, and one of every `every` pages."""
    pages = len(data) // _PAGE
    return data[pages * _PAGE :], data[: pages * _PAGE].reshape(pages, _PAGE)[version % every :: every]


def _of(*parts: Any) -> int:
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return int(hasher.intdigest())
