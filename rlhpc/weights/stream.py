"""Weights of any size as a stream of buckets: written once a host, mapped by every receiver, taken in as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.broadcast import pack_tensors, views
from rlhpc.weights.strategy import NamedTensors

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker

#: Bytes of a bucket: large enough that its fixed costs vanish, small enough that two of them are no burden.
BUCKET_BYTES = 256 << 20


def send_weights(
    worker: Worker,
    version: int,
    tensors: NamedTensors,
    src: tuple[str, int],
    receivers: list[tuple[str, list[int]]],
    dtype: torch.dtype | None = None,
) -> int:
    """Sends all tensors to all receivers; each has to iterate `receive_weights`.

    Args:
        worker: The sending worker, which is `src`.
        version: Version of the weights.
        tensors: Names and tensors; each is dropped before the next is asked for.
        src: Group and rank of the sender.
        receivers: Groups and their ranks.
        dtype: Floating-point tensors are sent in this; by default as they are.

    Returns:
        Bytes sent.
    """
    held: list[tuple[str, torch.Tensor]] = []
    total, size = 0, 0

    def post(last: bool) -> None:
        nonlocal held, size
        worker.broadcast({**pack_tensors(version, held), "last": last}, groups=receivers, src=src, read_only=True)
        held, size = [], 0

    for name, tensor in tensors:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        count = tensor.numel() * tensor.element_size()
        if held and size + count > BUCKET_BYTES:
            post(last=False)
        held.append((name, tensor))
        size += count
        total += count
    post(last=True)
    return total


def receive_weights(worker: Worker, src: tuple[str, int]) -> tuple[int, Iterator[tuple[str, torch.Tensor]]]:
    """Waits for the next version.

    Returns:
        Its number, and its names and tensors. The tensors are views of shared memory, which lives as long as one of them
        does: whoever keeps one keeps its bucket. Nobody may write into them.

    Raises:
        RlhpcError: While iterating: buckets of two versions are mixed up.
    """
    first = worker.broadcast(None, groups=[], src=src, read_only=True)
    version = int(first["version"])

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        message = first
        while True:
            yield from views(message)
            if message["last"]:
                return
            message = worker.broadcast(None, groups=[], src=src, read_only=True)
            if int(message["version"]) != version:
                raise RlhpcError(f"weights of version {version} were followed by a part of {message['version']}")

    return version, tensors()
