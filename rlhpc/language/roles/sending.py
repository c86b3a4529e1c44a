"""How an actor's weights get to rollout ranks, and to the ranks of the reference."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import torch

from rlhpc.language.config import GrpoConfig
from rlhpc.language.engines.engine import adapters_apart
from rlhpc.language.roles.probe import Probe
from rlhpc.language.roles.prompts import VERSIONS, PromptMap
from rlhpc.language.scoring.groups import REFERENCE
from rlhpc.runtime.worker import Worker
from rlhpc.training.backend import Named
from rlhpc.weights import WeightSync, make_sync, sends_shards
from rlhpc.weights.reshard import SendsShards

if TYPE_CHECKING:
    from rlhpc.language.tokens.trainer import ModelTrainer

#: Dtypes of an engine's weights, by `rollout.dtype`; the trainer's own otherwise.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def sync_of(cfg: GrpoConfig) -> str:
    """The strategy by which weights travel: adapters alone are small, and go whole, and so do those of several policies."""
    name = cfg.rollout.weight_sync
    return "auto" if (adapters_apart(cfg) or cfg.agent.policies) and sends_shards(name) else name


def reference_sync_of(cfg: GrpoConfig) -> str:
    """Returns the strategy of the reference's weights (`reference.update_interval`): that of `rollout.weight_sync`, but they
    travel whole."""
    return "auto" if sends_shards(cfg.rollout.weight_sync) else cfg.rollout.weight_sync


class ActorWeights:
    """Sends an actor's weights; all of its ranks call each method. By most strategies all gather each tensor, and the first
    sends it; by those that send shards, each sends what it holds.

    Args:
        worker: This rank of the actor.
        cfg: The run's configuration.
        prompts: Names the groups.
        backend: Holds the weights.
    """

    def __init__(self, worker: Worker, cfg: GrpoConfig, prompts: PromptMap, backend: ModelTrainer) -> None:
        self._worker, self._cfg, self._prompts, self._backend = worker, cfg, prompts, backend
        self._name, self._apart = sync_of(cfg), adapters_apart(cfg)
        self._by_shards = sends_shards(self._name)
        self._dtype = _DTYPES.get(cfg.rollout.dtype)
        self._sync: WeightSync | None = None
        self._before: WeightSync | None = None
        self._reference: WeightSync | None = None
        self._to: list[int] = []
        self._sent: frozenset[str] = frozenset()
        if worker.rank == 0 and cfg.reference.update_interval and REFERENCE in prompts.scoring:
            ranks = [(REFERENCE, list(range(prompts.scoring[REFERENCE])))]
            self._reference = make_sync(reference_sync_of(cfg), worker, (prompts.actor_name, 0), ranks, "off")

    def send(self, version: int, ranks: Sequence[int], probe: Probe | None) -> None:
        """Sends the weights to these rollout ranks; those that are not trained only once."""
        self._aim(list(ranks))
        frozen = self._frozen_names()
        self._announce(ranks, probe)
        if self._by_shards:
            self._send_shards(self._sync, version)
            return
        weights = self._weights(self._sent)
        if self._sync is None:
            for _ in weights:  # a sharded backend gathers each with all ranks
                pass
        else:
            self._sync.send(version, _as(self._dtype, weights), frozen=frozen)
        self._sent = frozen

    def welcome(self, version: int, ranks: Sequence[int]) -> None:
        """Sends all weights to rollout ranks that have just come."""
        self._announce(ranks, None)
        to = [(self._prompts.rollout_name, list(ranks))]
        if self._by_shards:
            self._send_shards(self._made(to, "off"), version)
            return
        weights = self._weights(())
        if self._worker.rank:
            for _ in weights:
                pass
            return
        self._made(to, "off").send(version, _as(self._dtype, weights))

    def refresh_reference(self, version: int) -> None:
        """Sends all weights to the reference's ranks."""
        weights = self._backend.named_weights()
        if self._reference is None:
            for _ in weights:
                pass
        else:
            self._reference.send(version, weights)

    def forget(self) -> None:
        """Frozen weights go out again with the next version."""
        self._sent = frozenset()
        for sync in (self._sync, self._before, self._reference):
            if sync is not None:
                sync.forget()

    def _weights(self, without: Container[str]) -> Named:
        """What engines get."""
        if not self._apart:
            return self._backend.named_weights(without)
        return iter(self._backend.adapters().items())

    def _announce(self, ranks: Sequence[int], probe: Probe | None) -> None:
        if self._worker.rank == 0:
            for rank in ranks:
                self._worker.notify(probe, self._prompts.rollout_name, rank, VERSIONS)

    def _send_shards(self, sync: WeightSync | None, version: int) -> None:
        assert isinstance(sync, SendsShards)
        sync.send_shards(version, self._backend.shards(self._dtype))

    def _made(self, to: list[tuple[str, list[int]]], delta: str) -> WeightSync:
        return make_sync(self._name, self._worker, (self._prompts.actor_name, 0), to, delta)

    def _aim(self, ranks: list[int]) -> None:
        """Where others receive than before, all of them get complete weights."""
        if ranks == self._to:
            return
        self._to = ranks
        if self._worker.rank == 0 or self._by_shards:
            if self._before is not None:
                self._before.forget()
            # Somebody may yet have to take in what the last version builds upon: it is let go with the next change.
            self._before = self._sync
            self._sync = self._made([(self._prompts.rollout_name, ranks)], self._cfg.rollout.weight_delta)
        self._sent = frozenset()

    def _frozen_names(self) -> frozenset[str]:
        off = self._cfg.rollout.weight_delta.lower() == "off"
        return frozenset() if off or self._apart else self._backend.frozen_names()


def _as(dtype: torch.dtype | None, weights: Named) -> Named:
    """Weights in an engine's dtype."""
    if dtype is None:
        return weights
    return ((name, one.to(dtype) if one.is_floating_point() else one) for name, one in weights)
