"""How weights get from a trainer to the workers that act with them: the contract, and the strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    import torch

    from rlhpc.runtime.worker import Worker
    from rlhpc.weights.delta import Elements
    from rlhpc.weights.version_digest import Receipt

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
NamedUpdates = Iterator[tuple[str, "torch.Tensor | Elements"]]
#: Allowed values of `rollout.weight_delta`.
DELTAS = ("off", "frozen", "elements")


@dataclass(frozen=True)
class Update:
    """One version, as a receiver gets it.

    Attributes:
        version: Version of the weights.
        complete: Whether it contains all tensors; otherwise it contains those that changed, and the rest stay as they are.
        tensors: To be iterated once, to the end. Tensors may be views of shared memory, which stays mapped while one is
            kept. Nobody may write into them, except the Elements of a later version.
        receipt: What the version was to be, once the tensors have been iterated to the end; None where the strategy does not
            know.
        proven: The strategy itself compares what comes with what was sent, and raises where they differ. Of the tensors, only
            what the receiver has said that it wants need be there.
    """

    version: int
    complete: bool
    tensors: NamedUpdates
    receipt: Callable[[], Receipt | None] = lambda: None
    proven: bool = False


class WeightSync(Protocol):
    """One end of a channel for weights: the sender calls `send`, each receiver `receive`, once per version, in one order.

    A strategy is a class or function that each end calls with `(worker, src, receivers, delta, whole)`, the arguments
    of `make_sync`; it returns that end.
    """

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends one version to all receivers.

        Args:
            version: Version of the weights.
            tensors: Names and tensors, to be iterated once and to the end: in a sharded model, all ranks gather each one.
            frozen: Names of tensors that never change, so that sending them once is enough. Unless `delta` is `off`,
                the caller may leave them out after the first version, until it calls `forget`.
        """

    def receive(self) -> Update:
        """Waits for the next version. It is taken in while its tensors are iterated, between two forward passes: nobody
        acts with half of one."""

    def forget(self) -> None:
        """Forgets what was sent or received so far, so that nothing builds upon it: the next version is complete."""


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """Names of a module's parameters that are not trained. Buffers are not among them: they change in training too."""
    return frozenset(name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)


_BROADCAST = "rlhpc.weights.broadcast:BroadcastSync"
#: `auto` is the fastest strategy for the topology: broadcast, both on one host and between hosts.
STRATEGIES: Registry[Callable[..., WeightSync]] = Registry(
    "weight sync", "rollout.weight_sync", "rlhpc.weight_syncs",
    {
        "auto": _BROADCAST, "broadcast": _BROADCAST, "shards": "rlhpc.weights.reshard:ShardSync",
        **{name.lower(): f"rlhpc.weights.broadcast:{name}Sync" for name in ("Host", "Ipc", "Nccl", "Gloo")},
    },
)  # fmt: skip
register_sync = STRATEGIES.register


def sends_shards(name: str) -> bool:
    """Whether every rank of the trainer sends what it holds by the strategy of a name (`reshard.SendsShards`), rather than the
    first what all have gathered."""
    return hasattr(STRATEGIES.find(name), "send_shards")


def make_sync(
    name: str,
    worker: Worker,
    src: tuple[str, int],
    receivers: list[tuple[str, list[int]]],
    delta: str = "frozen",
    *,
    whole: bool = False,
) -> WeightSync:
    """Makes this worker's end of the strategy `name`.

    Args:
        name: `rollout.weight_sync`.
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`, in lower case for the strategy.
        whole: Set by a receiver that wants every update complete, with tensors only.

    Raises:
        ConfigError: There is no such strategy.
    """
    return STRATEGIES.find(name)(worker, src, receivers, delta.lower(), whole)
