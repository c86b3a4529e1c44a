"""Weights by shared memory: written once a host, straight from the sender's tensors, and mapped by every receiver."""

from __future__ import annotations

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

    def apply(self, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
        """See `WeightSync.apply`."""
        return unpack_tensors(self._exchange(None), named_tensors, adopt=adopt)

    def _exchange(self, message: dict[str, Any] | None) -> Any:
        return self._worker.broadcast(message, groups=self._receivers, src=self._src, read_only=True)


def pack_tensors(version: int, named_tensors: NamedTensors) -> dict[str, Any]:
    """One message with all tensors, on the CPU."""
    named = [(name, tensor.detach().cpu().contiguous()) for name, tensor in named_tensors]
    layout = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]
    return {"version": version, "layout": layout, "tensors": [tensor for _, tensor in named]}


@torch.no_grad()
def unpack_tensors(
    message: dict[str, Any], named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None
) -> int:
    """Takes a message over into the tensors; nothing is changed unless all names, shapes and dtypes agree.

    Args:
        message: As `pack_tensors` made it.
        named_tensors: What to fill.
        adopt: A module that is only ever read. Its parameters and buffers of these names, where they are on the CPU, look
            at what was received from now on, instead of having it copied: no byte is moved, and all receivers of a host
            share the memory.

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
    own = {} if adopt is None else adopt.state_dict(keep_vars=True)
    for (name, received), (_, tensor) in zip(views(message), targets, strict=True):
        if name in own and own[name].device.type == "cpu":
            own[name].data = received
        else:
            tensor.copy_(received)
    return int(message["version"])


def views(message: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a message, as views of what was received."""
    for (name, _, _), tensor in zip(message["layout"], message["tensors"], strict=True):
        yield name, tensor
