"""The interface of a weight synchronisation strategy, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from rlhpc.runtime.errors import ConfigError

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


_strategies: dict[str, Callable[..., WeightSync]] = {}


def register_sync(name: str) -> Callable[[Callable[..., WeightSync]], Callable[..., WeightSync]]:
    """Registers a strategy under `rollout.weight_sync: <name>`; a second one of a name is an error."""

    def add(factory: Callable[..., WeightSync]) -> Callable[..., WeightSync]:
        if name.lower() in _strategies:
            raise ValueError(f"weight sync {name!r} is registered already")
        _strategies[name.lower()] = factory
        return factory

    return add


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
    name = "broadcast" if kind.lower() == "auto" else kind.lower()
    if name not in _strategies:
        raise ConfigError(f"rollout.weight_sync is {kind!r}; choose from auto, {', '.join(sorted(_strategies))}")
    return _strategies[name](worker, src, receivers, delta)
