"""Weight sync contract between a trainer and the workers that act with its weights, and the registry of strategies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rlhpc.runtime.former_names import former_attributes, former_members
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    import torch

    from rlhpc.runtime.worker import Worker
    from rlhpc.weights.delta import Elements
else:
    __getattr__ = former_attributes(__name__)

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]
NamedUpdates = Iterator[tuple[str, "torch.Tensor | Elements"]]


@dataclass(frozen=True)
class VersionDigests:
    """Digests of a version, as its sender computed them.

    Attributes:
        version: Version of the weights.
        digests: Digest of each tensor passed to the sender, by name. Tensors that never change and were sent before may be
            missing.
    """

    version: int
    digests: dict[str, int]


@dataclass
class Transfer:
    """Transfer of one version to this process.

    Attributes:
        bytes_by_transport: Received bytes by transport.
        start_s: Time of the sender's first byte, by this process's `time.monotonic`.
        end_s: Time at which this process held the version and had checked it; NaN before.
    """

    bytes_by_transport: Counter[str] = field(default_factory=Counter)
    start_s: float = math.inf
    end_s: float = math.nan


@former_members(receipt="version_digests")
@dataclass(frozen=True)
class Update:
    """One version of the weights, as received.

    Attributes:
        version: Version of the weights.
        complete: True if the update contains all tensors. Otherwise it contains only the tensors that changed.
        tensors: Iterator, to be consumed once and to the end. Tensors may be views of shared memory, which stays mapped while
            a view exists. Receivers must not write to them; the strategy may apply `Elements` of a later version in place.
        version_digests: Returns the digests of the version after the tensors have been iterated to the end; None if the
            strategy has no digests.
        transfer: Measurement of the transfer, which ends when the receiver has checked the update; None if the strategy
            measures nothing.
        proven: True if the strategy itself compares the received tensors with those sent, and raises if they differ. Then only
            the tensors that the receiver requested are complete.
    """

    version: int
    complete: bool
    tensors: NamedUpdates
    version_digests: Callable[[], VersionDigests | None] = lambda: None
    proven: bool = False
    transfer: Transfer | None = None


class WeightSync(Protocol):
    """One end of a weight channel. The sender calls `send` and each receiver calls `receive`, once per version and in the same
    order.

    A strategy is a class or function that builds an end from `(worker, src, receivers, delta, complete_updates)`, which are
    the arguments of `make_sync`.
    """

    def send(self, version: int, tensors: NamedTensors, *, frozen: Container[str] = ()) -> None:
        """Sends one version to all receivers.

        Args:
            version: Version of the weights.
            tensors: Names and tensors, to be iterated once and to the end, because all ranks of a sharded model gather each
                tensor.
            frozen: Names of tensors that never change, so that sending them once is enough. Unless `delta` is `off`,
                the caller may leave them out after the first version, until it calls `forget`.
        """

    def receive(self) -> Update:
        """Waits for the next version and returns it. The receiver applies the tensors while it iterates over them, between two
        forward passes, so that no worker acts with a partial version.
        """

    def forget(self) -> None:
        """Discards the record of earlier versions, so that the next version is complete."""


def frozen_names(module: torch.nn.Module) -> frozenset[str]:
    """Returns the names of a module's untrained parameters. Buffers are not included, since training changes them too."""
    return frozenset(
        name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad
    )


#: Name of the strategy without a gather. With `auto`, task packages choose it where it can replace a broadcast.
SHARDS = "shards"
_BROADCAST = "rlhpc.weights.transport:BroadcastSync"
STRATEGIES: Registry[Callable[..., WeightSync]] = Registry(
    "weight sync", "rollout.weight_sync", "rlhpc.weight_syncs",
    {
        "auto": _BROADCAST, "broadcast": _BROADCAST, SHARDS: "rlhpc.weights.reshard:ShardSync",
        **{name.lower(): f"rlhpc.weights.transport:{name}Sync" for name in ("Host", "Ipc", "Nccl", "Gloo")},
    },
)  # fmt: skip
register_sync = STRATEGIES.register


def sends_shards(name: str) -> bool:
    """Returns whether every trainer rank sends its own shards with this strategy (`reshard.SendsShards`), instead of the first
    rank sending gathered tensors.
    """
    return hasattr(STRATEGIES.find(name), "send_shards")


def make_sync(
    name: str,
    worker: Worker,
    src: tuple[str, int],
    receivers: list[tuple[str, list[int]]],
    delta: str = "frozen",
    *,
    complete_updates: bool = False,
) -> WeightSync:
    """Builds this worker's end of the strategy `name`.

    Args:
        name: `rollout.weight_sync`.
        worker: The worker that sends or receives.
        src: Group and rank of the sender.
        receivers: Groups and ranks that receive.
        delta: `rollout.weight_delta`, in lower case for the strategy.
        complete_updates: Set by a receiver that needs every update complete, with tensors only.

    Raises:
        ConfigError: The strategy does not exist.
    """
    return STRATEGIES.find(name)(worker, src, receivers, delta.lower(), complete_updates)
