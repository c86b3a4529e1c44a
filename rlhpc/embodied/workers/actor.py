"""Base of embodied actors (device, policy, weight sync, checkpoints), and the receiver of trajectories."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from rlhpc.algorithms.nonfinite import nonfinite, require_finite, skips
from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.start import WEIGHTS, load_fitting_weights
from rlhpc.checkpoint.state import load_state, load_tensors, rng_state, save_state, save_tensors, set_rng_state
from rlhpc.embodied.config import BcConfig, PpoConfig, SacConfig
from rlhpc.embodied.data.batches import RolloutBatch
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.rollout.env_link import Peer, PeerLeft, get_until_left, leave_check
from rlhpc.embodied.rollout.slot_map import PlayedRollout, SlotMap, Source
from rlhpc.embodied.training import PolicyBlueprint
from rlhpc.embodied.workers.env import WEIGHTS_SENT
from rlhpc.runs.device import set_up_process, worker_device
from rlhpc.runtime.channel import QueueEmpty
from rlhpc.runtime.comm.shared_memory import SegmentGone
from rlhpc.runtime.devices import empty_cache
from rlhpc.runtime.errors import ChannelError, CheckpointError, DeadlineExceeded
from rlhpc.runtime.files import write_durably
from rlhpc.runtime.trace_recorder import traced
from rlhpc.training.backend import Named, TrainingBackend
from rlhpc.training.registry import make_backend
from rlhpc.weights import WeightSync, make_sync
from rlhpc.weights.device_sharing import receivers_of
from rlhpc.weights.transport import BroadcastSync

if TYPE_CHECKING:
    from rlhpc.embodied.config import EmbodiedActorConfig, RolloutConfig
    from rlhpc.runtime.channel import Channel

Cfg = TypeVar("Cfg", PpoConfig, SacConfig, BcConfig)
FILE, SPEC = "actor-{rank}.pt", "model.json"


class PolicyLearner(Protocol):
    """Interface of the object that holds weights and optimizers: a `TrainingBackend`, or an update with several optimizers."""

    @property
    def lockstep(self) -> bool:
        """True if the ranks hold different parts of the weights, so that all ranks must call each method."""

    def named_weights(self, excluded_names: Container[str] = ()) -> Named:
        """Yields all full weights except those in `excluded_names`; all ranks must iterate."""

    def frozen_names(self) -> frozenset[str]:
        """Returns the names of the weights that never change."""

    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces all weights with full tensors."""

    def local_tensors(self) -> Named:
        """Yields this rank's tensors of weights and optimizers."""

    def save(self, folder: Path) -> None:
        """Writes the training state without the weights; all ranks must call it."""

    def load(self, folder: Path) -> None:
        """Restores the state that `save` wrote."""

    def offload(self) -> None:
        """Moves weights and optimizers to the host."""

    def reload(self) -> None:
        """Moves weights and optimizers back to the device after `offload`."""

    def keep_on_device(self) -> AbstractContextManager[None]:
        """Returns a context in which offloaded tensors are back on the device."""


class PolicyTrainer(SavingWorker, Generic[Cfg]):
    """Base of actors: one data-parallel rank that trains a policy.

    A subclass builds `policy` and `learner` in its `init_worker`, which first calls `set_up_device`.

    Attributes:
        policy: Trained policy; a rank may hold only a part of its weights.
        learner: Object that holds weights and optimizers.
        counters: Names of integer attributes that a checkpoint stores for each rank, by key in the file.
        sync: Weight sync to the rollout ranks; None if the actor sends no weights.
    """

    counters: Mapping[str, str] = {"updates": "updates"}
    policy: Policy
    learner: PolicyLearner
    sync: WeightSync | None = None
    _make_sync: Callable[[str, Sequence[int]], WeightSync]
    _weight_sources: tuple[int, ...]
    _previous_sync: WeightSync | None = None
    _rollout_name: str
    _receivers: tuple[int, ...]

    def __init__(self, cfg: Cfg) -> None:
        super().__init__()
        self.cfg: Cfg = cfg
        self.updates = 0
        self._sent_names: frozenset[str] = frozenset()
        self._gathers_once = False
        #: Weight syncs to joined ranks, by rank.
        self._joined_syncs: dict[int, WeightSync] = {}

    def set_up_device(self) -> None:
        """Selects the device and seeds the process."""
        self.seed = self.cfg.runner.seed
        self.device = worker_device(self)
        set_up_process(self.cfg.runner, "actor", self.rank)

    def build_backend(
        self, actor: EmbodiedActorConfig, spaces: tuple[Any, Any], *, reads_norm: bool, levels: str = "chunk_level"
    ) -> TrainingBackend:
        """Builds the policy in the backend `actor.training_backend`; sets `policy` and `learner`.

        Args:
            actor: Section `actor`.
            spaces: Observation space and action space of one slot.
            reads_norm: See `rlhpc.training.Blueprint.reads_norm`.
            levels: `algorithm.logprob_type`.
        """
        backend = make_backend(
            PolicyBlueprint(actor, spaces, self.device, seed=self.seed, reads_norm=reads_norm, levels=levels),
            actor,
            self,
        )
        assert isinstance(backend.module, Policy)
        self.policy, self.learner = backend.module, backend
        return backend

    def open_sync(self, slots: SlotMap, rollout: RolloutConfig) -> None:
        """Prepares the weight sync to the acting rollout ranks: from rank 0 to all, or from each rank to the rollout ranks on
        its own accelerator (`SlotMap.weight_sources`).
        """
        self._gathers_once = self.learner.lockstep and rollout.weight_delta != "off"

        def make_sync_to(group: str, ranks: Sequence[int]) -> WeightSync:
            source_rank = (slots.actor_name, self.rank)
            sync = make_sync(rollout.weight_sync, self, source_rank, [(group, list(ranks))], rollout.weight_delta)
            if slots.weight_sources and isinstance(sync, BroadcastSync):
                sync.require_readers()  # the receivers are called at the same time, so no chunk has to wait in host memory
            return sync

        self._make_sync, self._rollout_name, self._receivers = make_sync_to, slots.rollout_name, ()
        self._weight_sources = slots.weight_sources
        self._set_receivers(slots.acting_ranks)

    def _set_receivers(self, ranks: Sequence[int]) -> None:
        """Sets the rollout ranks that receive weights from now on. If the ranks have changed, the next sync sends all
        weights.
        """
        if tuple(ranks) == self._receivers:
            return
        if self._previous_sync is not None:
            self._previous_sync.forget()
        # A rank may not have received the last version yet, so the previous sync is released at the next change only.
        self._receivers, self._previous_sync, self._sent_names = tuple(ranks), self.sync, frozenset()
        local_receivers = receivers_of(self._weight_sources, self.rank, ranks)
        self.sync = self._make_sync(self._rollout_name, local_receivers) if local_receivers else None

    # -- weights --------------------------------------------------------------------------------------------------

    def sent_weights(self, excluded_names: Container[str]) -> Named:
        """Yields the weights that the rollout ranks need, except those in `excluded_names`; all ranks must iterate."""
        return self.learner.named_weights(excluded_names)

    def sync_weights(self, version: int, ranks: Sequence[int]) -> None:
        """Sends the weights, as `version`, to rollout ranks; sharded frozen weights are gathered only once."""
        self._set_receivers(ranks)
        if self.sync is None and not self.learner.lockstep:
            return
        with self.learner.keep_on_device():  # weights stay on the device until they are gathered and sent
            self._send(version, self.sync, self._sent_names)
        if self._gathers_once:
            self._sent_names = self.learner.frozen_names()

    @traced("send weights", "weights")
    def _send(self, version: int, sync: WeightSync | None, excluded_names: frozenset[str]) -> None:
        """Gathers the weights with all ranks, and sends them if `sync` is given."""
        weights = self.sent_weights(excluded_names)
        if sync is None:
            deque(weights, maxlen=0)
        else:
            sync.send(version, weights, frozen=self.learner.frozen_names())

    def send_weights_to(self, version: int, group: str, ranks: Sequence[int], left_ranks: Sequence[int] = ()) -> None:
        """Sends the weights, as `version`, to joined ranks; sharded weights are gathered once for each rank.

        Args:
            version: Version of the weights.
            group: Group of the joined ranks.
            ranks: Ranks that receive the weights.
            left_ranks: Ranks that received weights before and have left.
        """
        if self.rank and not self.learner.lockstep:
            return
        for rank in self._joined_syncs.keys() & {*left_ranks}:
            self._joined_syncs.pop(rank).forget()
        with self.learner.keep_on_device():
            for rank in ranks:
                is_notified = self.rank == 0 and self.notify(version, group, rank, WEIGHTS_SENT)
                if is_notified and rank not in self._joined_syncs:
                    self._joined_syncs[rank] = self._make_sync(group, [rank])
                self._send(version, self._joined_syncs[rank] if is_notified else None, frozenset())

    def start_from(self, folder: str) -> None:
        """Loads the weights of a checkpoint or an export; optimizer and counters keep their initial state."""
        shapes = {name: tensor.shape for name, tensor in self.learner.named_weights()}
        self.learner.replace_weights(load_fitting_weights(shapes, Path(folder)))
        self._reset_syncs()

    def _gather_weights(self) -> dict[str, torch.Tensor]:
        """Returns all weights on the CPU. Only rank 0 returns the weights; the other ranks help to gather them and
        return {}.
        """
        return {name: tensor.cpu() for name, tensor in self.learner.named_weights() if self.rank == 0}

    def _reset_syncs(self) -> None:
        """Resets the weight sync, so that the next version does not build on the weights sent so far."""
        self._sent_names = frozenset()
        for sync in (self.sync, self._previous_sync, *self._joined_syncs.values()):
            if sync is not None:
                sync.forget()

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes `actor-<rank>.pt` and the training backend's state; rank 0 also writes the full model.

        Raises:
            NonFinite: A weight or a value of the optimizer state is not finite.
        """
        path = Path(folder)
        weights_name = f"{path.name.partition('-')[0].removeprefix('.tmp_')} (actor-{self.rank})"
        weights = self._gather_weights() if self.rank == 0 or self.learner.lockstep else {}
        require_finite(weights.items(), weights_name)  # {} on other ranks
        if self.rank == 0 or self.learner.lockstep:
            require_finite(self.learner.local_tensors(), weights_name)
        if self.rank == 0:
            save_tensors(path / WEIGHTS, weights)
            write_durably(path / SPEC, json.dumps(self.policy.spec(), indent=2, sort_keys=True).encode() + b"\n")
        self.learner.save(path)
        counter_values = {key: getattr(self, name) for key, name in self.counters.items()}
        save_state(path / FILE.format(rank=self.rank), {**counter_values, "rng": rng_state()})

    def load(self, folder: str) -> None:
        """Restores a checkpoint; a rank without a file in it uses rank 0's.

        Raises:
            CheckpointError: The weights do not fit the configured model.
        """
        path = Path(folder)
        try:
            self.learner.replace_weights(load_tensors(path / WEIGHTS))
        except RuntimeError as error:
            raise CheckpointError(
                f"{path / WEIGHTS} does not fit actor.model of this configuration: {error}"
            ) from error
        self.learner.load(path)
        rank_file = path / FILE.format(rank=self.rank)
        rank_state = load_state(rank_file if rank_file.is_file() else path / FILE.format(rank=0))
        for key, name in self.counters.items():
            if key in rank_state:  # checkpoints of earlier versions have fewer counters
                setattr(self, name, int(rank_state[key]))
        set_rng_state(rank_state["rng"])
        self._reset_syncs()

    def release_cache(self) -> None:
        """Returns memory that torch has cached to the accelerator, for another process."""
        empty_cache()

    def offload(self) -> None:
        """Moves weights and optimizer to the host."""
        self.learner.offload()

    def reload(self) -> None:
        """Moves weights and optimizer back to the device after `offload`."""
        self.learner.reload()


def mark_nonfinite(
    batch: RolloutBatch[np.ndarray], step: int, slot_share: range, rank: int, *, skips: bool
) -> RolloutBatch[np.ndarray]:
    """Returns the transitions with those marked that contain non-finite numbers.

    Args:
        batch: Transitions of the slots `slot_share`.
        step: Global step.
        slot_share: Global slots.
        rank: Actor rank.
        skips: Whether `runner.on_nonfinite` is skip.

    Raises:
        NonFinite: A value is not finite, and `skips` is false.
    """
    bad_by_column = batch.nonfinite_columns()
    if bad_by_column and not skips:
        slot, t = (int(index[0]) for index in np.nonzero(np.logical_or.reduce(list(bad_by_column.values()))))
        raise nonfinite(
            f"step {step}, decision {t}: of slot {slot_share.start + slot} (actor-{rank}) "
            f"{', '.join(bad_by_column)} {'is' if len(bad_by_column) == 1 else 'are'} not finite"
        )
    return batch.mark_nonfinite(bad_by_column.values())


#: Maximum seconds for the arrival of a message that a rank sent before it left.
_LAST_MESSAGE_S = 0.5


class TrajectoryReceiver:
    """Receiver of the transitions that rollout ranks and joined env ranks send to an actor rank.

    Args:
        cfg: Configuration.
        slots: Slot map.
        rank: Actor rank.
        needs_lags: Whether the transitions have to know the age of the weights that acted (`RolloutBatch.lags`).
    """

    def __init__(self, cfg: PpoConfig | SacConfig, slots: SlotMap, rank: int, *, needs_lags: bool = False) -> None:
        self.share, self._rank, self._skips_nonfinite = slots.actor_share(rank), rank, skips(cfg)
        self._needs_lags = needs_lags
        #: Batches of later full rollouts that arrived early, by key and full rollout number.
        self._early_batches: defaultdict[str, dict[int, RolloutBatch[np.ndarray]]] = defaultdict(dict)
        #: Empty columns with the shapes and dtypes of the last message, from which missing batches are built.
        self._empty_columns: dict[str, np.ndarray] = {}

    def connect(self, trajectories: Channel, shards: Channel) -> None:
        """Sets the channels to receive from, and drops early messages."""
        self._trajectories, self._shards = trajectories, shards
        self._early_batches.clear()

    def receive(self, step: int, source: Source) -> RolloutBatch[np.ndarray]:
        """Receives a step's transitions of the rank's slots, `[n, T, ...]`; `missing` marks transitions of lost ranks.

        Raises:
            NonFinite: A value is not finite, and `runner.on_nonfinite` is stop.
        """
        slots = source.slots
        self._discard(slots, source.useless_keys)
        rollout_numbers = [played_rollout.full_rollout.number for played_rollout in source.played_rollouts]
        full_rollouts = [
            self._receive_rollout(acted, source.later_rollouts.union(rollout_numbers[index + 1 :]), step)
            for index, acted in enumerate(source.played_rollouts)
        ]
        if source.units is not None:
            full_rollouts.append(
                [self._receive_unit(slots, source.units[unit_index], step) for unit_index in slots.units_of(self._rank)]
            )
        batch = RolloutBatch.join([RolloutBatch.join(unit_batches, axis=0) for unit_batches in full_rollouts], axis=1)
        batch = mark_nonfinite(batch, step, self.share, self._rank, skips=self._skips_nonfinite)
        return batch if batch.version is not None else replace(batch, version=step - 1)

    def _receive_rollout(
        self, played_rollout: PlayedRollout, later_rollouts: frozenset[int], step: int
    ) -> list[RolloutBatch[np.ndarray]]:
        """Receives the rollout ranks' transitions of a full rollout, in slot order."""
        rollout_sources = played_rollout.slots.sources_of(self._rank)
        batches = [
            (slots, self._receive_from(played_rollout, later_rollouts, stage, rank))
            for stage, rank, slots in rollout_sources
        ]
        received = [
            self._build_missing_batch(len(slots), played_rollout.full_rollout.num_decisions) if batch is None else batch
            for slots, batch in batches
        ]
        return [self._add_lags(batch, step) for batch in received]

    def _add_lags(self, batch: RolloutBatch[np.ndarray], step: int) -> RolloutBatch[np.ndarray]:
        return batch.with_lags(step - 1) if self._needs_lags else batch

    def _receive_from(
        self, played_rollout: PlayedRollout, later_rollouts: frozenset[int], stage: int, rank: int
    ) -> RolloutBatch[np.ndarray] | None:
        """Receives a rollout rank's transitions of a full rollout's stage; returns None if the rank left or was lost before it
        sent them.
        """
        slots, expected_number = played_rollout.slots, played_rollout.full_rollout.number
        key, peer = slots.to_actor_key(stage, rank, self._rank), (slots.rollout_name, rank)
        early_batches = self._early_batches[key] = {
            rollout_number: early_batch
            for rollout_number, early_batch in self._early_batches[key].items()
            if rollout_number in {expected_number, *later_rollouts}
        }
        batch = early_batches.pop(expected_number, None)
        try:
            while batch is None:
                # a message of a later full rollout shows that another rank has replaced the lost rank
                if any(rollout_number > expected_number for rollout_number in early_batches):
                    return None
                message = self._receive_message(key, peer, has_left=rank in played_rollout.lost_ranks)
                rollout_number = message.pop("rollout")
                if rollout_number == expected_number:
                    batch = RolloutBatch.from_columns(message)
                elif rollout_number in later_rollouts:
                    early_batches[rollout_number] = RolloutBatch.from_columns(message)
                # a message of any other full rollout is outdated
        except PeerLeft:
            return None
        self._empty_columns = {
            name: np.empty((0, 0, *column.shape[2:]), column.dtype) for name, column in batch.columns().items()
        }
        return batch

    def _receive_message(self, key: str, peer: Peer, *, has_left: bool) -> dict[str, Any]:
        if not has_left:
            return get_until_left(self._trajectories, key, peer, leave_check(*peer))
        try:
            return self._trajectories.get(key=key, timeout=_LAST_MESSAGE_S)
        except (ChannelError, DeadlineExceeded, SegmentGone) as error:
            raise PeerLeft(f"{peer[0]}-{peer[1]}") from error

    def _build_missing_batch(self, num_slots: int, num_decisions: int) -> RolloutBatch[np.ndarray]:
        """Builds a batch of missing transitions for `num_slots` slots.

        Raises:
            ChannelError: The columns are unknown, because no message has arrived yet.
        """
        if not self._empty_columns:
            raise ChannelError(
                "all rollout ranks of this actor rank's slots ended in the first step of the run's start"
            )
        return RolloutBatch.zeros(self._empty_columns, num_slots, num_decisions)

    def _receive_unit(self, slots: SlotMap, shard_keys: Sequence[int], step: int) -> RolloutBatch[np.ndarray]:
        """Receives and concatenates the shards of a unit for this rank's slots."""
        messages = [self._shards.get(key=slots.shard_key(key, self._rank)) for key in shard_keys]
        shards = [self._add_lags(RolloutBatch.from_columns(message), step) for message in messages]
        return RolloutBatch.join(shards, axis=1)

    def _discard(self, slots: SlotMap, keys: Sequence[int]) -> None:
        """Removes unused shards from the channel if the shards have arrived."""
        for key in keys:
            with contextlib.suppress(QueueEmpty):
                self._shards.get_nowait(key=slots.shard_key(key, self._rank))
