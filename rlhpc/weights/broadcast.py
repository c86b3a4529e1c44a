"""Weights as one flat buffer per dtype: written once a host by the sender and mapped by every receiver there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.strategy import NamedTensors, register_sync

if TYPE_CHECKING:
    from rlhpc.runtime.worker import Worker


@register_sync("broadcast")
class BroadcastSync:
    """Sends through `Worker.broadcast`.

    Args:
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
    """

    def __init__(self, worker: Worker, src: tuple[str, int], receivers: list[tuple[str, list[int]]]) -> None:
        self._worker, self._src, self._receivers = worker, src, receivers

    def sync(self, version: int, named_tensors: NamedTensors) -> None:
        """See `WeightSync.sync`."""
        self._exchange(pack_tensors(version, named_tensors))

    def apply(self, named_tensors: NamedTensors) -> int:
        """See `WeightSync.apply`."""
        return unpack_tensors(self._exchange(None), named_tensors)

    def _exchange(self, message: dict[str, Any] | None) -> Any:
        return self._worker.broadcast(message, groups=self._receivers, src=self._src)


def pack_tensors(version: int, named_tensors: NamedTensors) -> dict[str, Any]:
    """One message with all tensors, flat by dtype, on the CPU."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    layout = []
    for name, tensor in named_tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
        layout.append((name, tuple(tensor.shape), str(tensor.dtype)))
    flat = {str(dtype): torch.cat(parts).cpu() for dtype, parts in by_dtype.items()}
    return {"version": version, "layout": layout, "flat": flat}


@torch.no_grad()
def unpack_tensors(message: dict[str, Any], named_tensors: NamedTensors) -> int:
    """Copies a message into the tensors; nothing is copied unless all names, shapes and dtypes agree.

    Raises:
        RlhpcError: The receiver's model is another one.
    """
    targets = list(named_tensors)
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in targets]
    if mine != list(message["layout"]):
        wrong = next((a, b) for a, b in zip([*mine, None], [*message["layout"], None], strict=False) if a != b)
        raise RlhpcError(
            f"weights of version {message['version']} do not fit the receiver: it has {wrong[0]}, got {wrong[1]}"
        )
    for (_, view), (_, tensor) in zip(views(message), targets, strict=True):
        tensor.copy_(view)
    return int(message["version"])


def views(message: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a message, as views of what was received."""
    position: dict[str, int] = {}
    for name, shape, dtype in message["layout"]:
        start = position.get(dtype, 0)
        position[dtype] = start + math.prod(shape)
        yield name, message["flat"][dtype][start : position[dtype]].view(shape)
