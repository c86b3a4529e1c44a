"""What carries weights from a trainer to those who act with them: the contract, and the strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhpc.runtime.lookup import Registry

if TYPE_CHECKING:
    import torch

    from rlhpc.runtime.worker import Worker
    from rlhpc.weights.elements import Elements

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
NamedUpdates = Iterator[tuple[str, "torch.Tensor | Elements"]]
#: What `rollout.weight_delta` may be.
DELTAS = ("off", "frozen", "elements")


@dataclass(frozen=True)
class Update:
    """One version as it comes.

    Attributes:
        version: Of the weights.
        complete: Whether all tensors are in it; otherwise those that changed, and what is not in it stays as it is.
        tensors: To iterate once, to the end. Tensors may be views of shared memory: whoever keeps one keeps that. Nobody may
            write into them, except where Elements of them come with a later version.
    """

    version: int
    complete: bool
    tensors: NamedUpdates


class WeightSync(Protocol):
    """One end of a road for weights. The sender calls `send`, each receiver `receive`, once a version and in the same order.

    A strategy is a class, or a function, that is called by each end with `(worker, src, receivers, delta, whole)`, the
    arguments of `make_sync`, and returns that end.
    """

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends one version to all receivers.

        Args:
            version: Of the weights.
            tensors: Names and tensors, to iterate once and to the end: a sharded model gathers each with all its ranks.
            frozen: Names of those that never change, so that once is enough. The caller may leave out such a tensor after the
                first version, unless `delta` is `off`, until it calls `forget`.
        """

    def receive(self) -> Update:
        """Waits for the next version. It is taken in while its tensors are iterated, between two forward passes: nobody acts
        with half of one."""

    def forget(self) -> None:
        """What was sent or received so far is no base to build upon: the next version is complete."""


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """Names of a module's parameters that are not trained. Buffers change in training, too."""
    return frozenset(name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)


_BROADCAST = "rlhpc.weights.broadcast:BroadcastSync"
#: `auto` is the fastest that the topology allows: broadcast is, on one host and between hosts.
STRATEGIES: Registry[Callable[..., WeightSync]] = Registry(
    "weight sync", "rollout.weight_sync", "rlhpc.weight_syncs", {"auto": _BROADCAST, "broadcast": _BROADCAST}
)
register_sync = STRATEGIES.register


def make_sync(
    name: str,
    worker: Worker,
    src: tuple[str, int],
    receivers: list[tuple[str, list[int]]],
    delta: str = "frozen",
    *,
    whole: bool = False,
) -> WeightSync:
    """This worker's end of the strategy `name`.

    Args:
        name: `rollout.weight_sync`.
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`, in lower case for the strategy.
        whole: A receiver's wish: every update complete, with tensors only.

    Raises:
        ConfigError: There is no such strategy.
    """
    return STRATEGIES.find(name)(worker, src, receivers, delta.lower(), whole)
