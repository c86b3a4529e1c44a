"""The interface of a weight synchronisation strategy, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.runtime.lookup import Registry

if TYPE_CHECKING:
    import torch

    from rlhpc.runtime.worker import Worker

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class WeightSync(Protocol):
    """Both ends of a synchronisation. Sender and receivers call in the same order, once a version.

    A receiver's module changes only inside `apply`, which it calls between two forward passes: a half-applied update is
    never visible.
    """

    def sync(self, version: int, named_tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends one version to all receivers; tensors with names in `frozen` never change, so that once is enough."""

    def forget(self) -> None:
        """What was sent or received so far is no base to build upon: the next version is complete."""

    def apply(self, named_tensors: NamedTensors, *, adopt: torch.nn.Module | None = None) -> int:
        """Receives the next version into these tensors, in place.

        Args:
            named_tensors: What to fill.
            adopt: The module that they belong to, where it is only ever read: its tensors may become views of memory that
                others look at, too.

        Returns:
            The version.
        """


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """Names of a module's parameters that are not trained. Buffers change in training, too."""
    return frozenset(name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)


#: Of `(worker, src, receivers, delta) -> WeightSync`.
STRATEGIES: Registry[Callable[..., WeightSync]] = Registry(
    "weight sync", "rollout.weight_sync", "rlhpc.weight_syncs", {"broadcast": "rlhpc.weights.broadcast:BroadcastSync"}
)
register_sync = STRATEGIES.register


def make_sync(
    kind: str, worker: Worker, src: tuple[str, int], receivers: list[tuple[str, list[int]]], delta: str = "frozen"
) -> Any:
    """The strategy `kind` for this worker; "auto" takes the fastest that the topology allows.

    Args:
        kind: `rollout.weight_sync`.
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`.

    Raises:
        ConfigError: There is no such strategy.
    """
    name = "broadcast" if kind.lower() == "auto" else kind
    return STRATEGIES.find(name)(worker, src, receivers, delta)
