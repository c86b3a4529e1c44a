"""Workers of off-policy runs: rollout ranks send transitions; actor ranks store them and train on samples from the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhpc.algorithms.nonfinite import skips
from rlhpc.embodied.algorithms.off_policy import TransitionBatch
from rlhpc.embodied.algorithms.registry import algorithm_for
from rlhpc.embodied.config import SacConfig
from rlhpc.embodied.data.batches import RolloutBatch, RolloutCounts
from rlhpc.embodied.data.mixture import (
    INTERVENED,
    INTERVENTIONS_FOLDER,
    POSITION,
    DrawOptions,
    Mixture,
    MixtureDraw,
    PositionCounter,
    fit,
    load_demos,
)
from rlhpc.embodied.data.replay_buffer import ReplayBuffer
from rlhpc.embodied.envs.observations import as_arrays, columns_of, rows_of
from rlhpc.embodied.models import Policy, build_model
from rlhpc.embodied.models.off_policy import ActorCritic
from rlhpc.embodied.rollout.slot_map import TRAJECTORIES, SlotMap, Source
from rlhpc.embodied.rollout.step_outcomes import OutcomeShape, SlotOutcomes
from rlhpc.embodied.rollout.work_sharing import PARTS, FullRollout
from rlhpc.embodied.workers.actor import PolicyTrainer, TrajectoryReceiver
from rlhpc.embodied.workers.env import JoinableEnvWorker
from rlhpc.embodied.workers.rollout import ActingWorker
from rlhpc.runs.device import place_policy
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.trace_recorder import traced
from rlhpc.training.backend import Named
from rlhpc.training.captured_passes import captures_graphs
from rlhpc.training.flat_parameters import decay_factor

if TYPE_CHECKING:
    from rlhpc.embodied.data.tensor_replay import TensorReplay
    from rlhpc.embodied.rewards import SuccessTrainer

#: Column with a person's verdicts on episodes, which the buffers do not keep.
_MARKS = "marks"


class IncompleteRows:
    """Buffer that regroups the transitions of steps with missing slots, so that each row again has one transition for
    every slot.

    Transitions may move to other slots, because an off-policy buffer does not depend on the slot. Transitions that do
    not fill a row stay in the buffer until the next step with missing slots.

    Args:
        num_envs: Number of slots of the run.
        share: Slots of this rank.
    """

    def __init__(self, num_envs: int, share: range) -> None:
        self._num_envs, self._share = num_envs, share
        self.clear()

    def clear(self) -> None:
        """Drops the waiting transitions."""
        self._pending_columns: dict[str, np.ndarray] = {}

    def regroup(
        self, columns: dict[str, np.ndarray], is_present: np.ndarray, gather: Callable[[Any], list[Any]]
    ) -> dict[str, np.ndarray]:
        """Returns full rows for this rank's slots, `[n, rows, ...]`. All ranks must call the method; they get the same
        number of rows.

        Args:
            columns: Transitions of a step, `[n, T, ...]`.
            is_present: Mask of the existing transitions, `[n, T]`.
            gather: Gathers an object from all ranks.
        """
        steps, slots = np.nonzero(is_present.T)
        row_positions = steps * self._num_envs + slots + self._share.start
        rank_rows = gather((row_positions, {name: column[slots, steps] for name, column in columns.items()}))
        # The order is the same for any number of ranks.
        position_order = np.argsort(np.concatenate([rank_positions for rank_positions, _ in rank_rows]))
        pending_columns = {
            name: np.concatenate([columns_of_rank[name] for _, columns_of_rank in rank_rows])[position_order]
            for name in columns
        }
        if self._pending_columns:
            pending_columns = {
                name: np.concatenate([self._pending_columns[name], column]) for name, column in pending_columns.items()
            }
        num_rows = len(next(iter(pending_columns.values()))) // self._num_envs
        num_used = num_rows * self._num_envs
        self._pending_columns = {name: column[num_used:].copy() for name, column in pending_columns.items()}
        return {
            name: column[:num_used]
            .reshape(num_rows, self._num_envs, *column.shape[1:])
            .swapaxes(0, 1)[self._share.start : self._share.stop]
            for name, column in pending_columns.items()
        }


def read_demo_buffer(cfg: SacConfig) -> np.ndarray:
    """Reads the transitions of `algorithm.demo_buffer.load_path` (`load_demos`)."""
    return load_demos(
        str(cfg.algorithm.demo_buffer.load_path),
        reward_scale=cfg.env.train.reward_scale,
        ignore_terminations=cfg.env.train.ignore_terminations,
        skip=skips(cfg),
        has_positions=cfg.algorithm.n_step > 1,
    )


def num_random_left(cfg: SacConfig, random_steps: int, step: int, first_decision: int = 0) -> int:
    """Returns the number of the run's first `random_steps` transitions are not before decision `first_decision` of a step."""
    return random_steps - ((step - 1) * cfg.algorithm.rollout_steps + first_decision) * cfg.env.train.num_envs


def choose_actions(policy: ActorCritic, inputs: Any, noise: torch.Tensor, *, random: bool) -> torch.Tensor:
    """Returns actions `[B, chunk, d]` for observations on the policy's device, with exploration noise or, if `random`, uniform
    within the bounds.
    """
    if random:
        return policy.head.uniform_actions(noise)
    features, _ = policy.features(inputs, True, False)
    assert features is not None
    return policy.head.act(features, noise)[0]


def _make_outcome_shape(cfg: SacConfig, action_space: Any) -> OutcomeShape:
    """Returns the shape of step outcomes. They contain the executed actions if a source of interventions is configured."""
    if cfg.env.train.intervene.source is None:
        return OutcomeShape()
    action_shape = (cfg.actor.model.num_action_chunks, int(np.prod(action_space.shape)))
    return OutcomeShape(interventions=True, action_shape=action_shape, marks=cfg.algorithm.success_classifier.train)


class OffPolicyEnvWorker(JoinableEnvWorker[SacConfig]):
    """Env worker of off-policy runs; each decision is one transition."""

    rollout_worker_path = "rlhpc.embodied.workers.off_policy:OffPolicyRolloutWorker"

    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""
        return _make_outcome_shape(self.cfg, self.envs[0].action_space)


class OffPolicyRolloutWorker(ActingWorker[SacConfig]):
    """Rollout worker of off-policy runs: sends transitions (observation, action, reward, true next observation,
    termination). The first actions of a run are random.
    """

    policy: ActorCritic

    def build_policy(self, observation_space: Any, action_space: Any) -> Policy:
        """Builds the policy with newly initialized weights."""
        return build_model(self.cfg.actor.model, observation_space, action_space)

    def generate(self, full_rollout: FullRollout, random_steps: int = 0) -> dict[str, float]:
        """Acts for a full rollout (`ActingWorker.generate`); actions of the first `random_steps` transitions are random."""
        self._num_random = num_random_left(self.cfg, random_steps, full_rollout.step, full_rollout.begin)
        return super().generate(full_rollout)

    def set_random_actions(self, is_random: bool) -> None:
        """Sets whether the next actions are random (`ActingWorker.set_random_actions`)."""
        self._num_random = self.steps * self.slots.num_envs if is_random else 0

    def _choose_actions(
        self, obs: Any, noise: torch.Tensor, requests: Sequence[tuple[slice, int]]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = self._to_device(obs)
        random_rows = [rows for rows, t in requests if t * self.slots.num_envs < self._num_random]
        actions = choose_actions(self.policy, inputs, noise, random=len(random_rows) == len(requests))
        if len(random_rows) < len(requests):
            for rows in random_rows:
                actions[rows] = self.policy.head.uniform_actions(noise)[rows]
        return self.policy.executed(inputs, actions), {"actions": actions}

    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""
        return _make_outcome_shape(self.cfg, self.policy.action_space)

    def transitions(self, outcomes: list[SlotOutcomes]) -> list[RolloutBatch[np.ndarray]]:
        """Returns the transitions of each stage, with their next observations (`ActingWorker.transitions`)."""
        batches = []
        for slot_outcomes, buffer in zip(outcomes, self.buffers, strict=True):
            columns = buffer.columns()
            if slot_outcomes.executed_actions is not None:  # the transition is that of the action which was executed
                assert slot_outcomes.intervened is not None
                is_led = slot_outcomes.intervened.reshape(*slot_outcomes.intervened.shape, 1, 1)
                columns["actions"] = np.where(is_led, slot_outcomes.executed_actions, columns["actions"])
            last_obs, final_obs = (
                columns_of("obs", as_arrays(obs)) for obs in (slot_outcomes.last_obs, slot_outcomes.final_obs)
            )
            for name in last_obs:
                next_obs = columns[f"next_{name}"] = np.empty_like(columns[name])
                next_obs[:, :-1], next_obs[:, -1] = columns[name][:, 1:], last_obs[name]
                next_obs[slot_outcomes.final_slot, slot_outcomes.final_step] = final_obs[name]
            batch = RolloutBatch.from_columns({**columns, **slot_outcomes.transition_columns()})
            # The update bootstraps after all transitions that are not terminated. Only sums of several rewards need to know
            # where an episode was truncated.
            batches.append(batch if self.cfg.algorithm.n_step > 1 else replace(batch, truncations=None))
        return batches

    def _named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return self.policy.acting_weights()


class OffPolicyActor(PolicyTrainer[SacConfig]):
    """Actor worker of off-policy runs: stores the transitions of its slots, and trains actor and critics. Every rank holds
    the complete networks.
    """

    policy: ActorCritic
    counters: Mapping[str, str] = {"transitions": "transitions", "due": "updates_due"}
    #: Transitions of interventions, the same on all ranks; None without a source of interventions.
    interventions: ReplayBuffer | None = None
    #: Success classifier that is trained during the run; None unless `algorithm.success_classifier.train`.
    classifier: SuccessTrainer | None = None
    #: Whether the replay buffer has the column of labels. A restored buffer keeps its columns.
    has_labels = False

    def init_worker(self, slots: SlotMap, observation_space: Any, action_space: Any) -> int:
        """Builds networks, optimizers and buffers; the initial weights depend only on the seed.

        Returns:
            Number of trainable parameters.
        """
        cfg = self.cfg
        self._spaces = (observation_space, action_space)
        self.set_up_device()
        self.slots, self.steps = slots, cfg.algorithm.rollout_steps
        self.receiver = TrajectoryReceiver(cfg, slots, self.rank)
        model = build_model(cfg.actor.model, observation_space, action_space, seed=self.seed)
        update_class = algorithm_for(cfg.algorithm.name, model, cfg.actor.model.model_type)
        assert isinstance(model, ActorCritic)
        self.policy = place_policy(model, self.device).train()
        self.learner = self.off_policy = update_class(
            cfg.algorithm,
            cfg.actor.optim,
            self.policy,
            self.all_reduce,
            self.world_size,
            skips_nonfinite=skips(cfg),
            rank=self.rank,
        )
        if cfg.actor.capture_graphs and captures_graphs(self.device):
            self.off_policy.capture_passes()
        self.replay = self.build_replay()
        self.positions = PositionCounter(self.receiver.share) if cfg.algorithm.n_step > 1 else None
        if cfg.env.train.intervene.source is not None:
            self.has_labels = True
            self.interventions = ReplayBuffer(
                cfg.algorithm.demo_buffer.size,
                range(1),
                1,
                self.rank,
                current().service.scratch.spill,
                cfg.algorithm.replay_buffer.frame_stack,
                checkpoint_folder=INTERVENTIONS_FOLDER,
                key="algorithm.demo_buffer.size",
            )
        if cfg.algorithm.success_classifier.train:
            from rlhpc.embodied.rewards import SuccessTrainer

            self.classifier = SuccessTrainer(cfg, *self._spaces, self.device, current().service.scratch.spill)
        options = DrawOptions(
            cfg.actor.global_batch_size,
            cfg.algorithm.demo_buffer.ratio,
            model.head.dim,
            num_steps=cfg.algorithm.n_step,
            gamma=cfg.algorithm.gamma,
            random_shift=cfg.algorithm.random_shift if model.encodes_images else 0,
            num_critics=cfg.actor.model.num_q_heads,
            num_targets=cfg.algorithm.critic_subsample_size,
        )
        self.build_mixture(self._read_demos(), options)
        self.incomplete = IncompleteRows(slots.num_envs, self.receiver.share)
        self.transitions = self.updates_due = 0
        self._update_start_s = 0.0
        self._classifier_metrics: dict[str, float] = {}
        self.open_sync(slots, cfg.rollout)
        num_parameters = sum(parameter.numel() for parameter in self.policy.parameters() if parameter.requires_grad)
        self.log.info("trains %d parameters of %s on %s", num_parameters, cfg.actor.model.model_type, self.device)
        return num_parameters

    def build_replay(self) -> ReplayBuffer | TensorReplay:
        """Builds this rank's part of the replay buffer."""
        buffer = self.cfg.algorithm.replay_buffer
        folder = current().service.scratch.spill
        return ReplayBuffer(
            buffer.size, self.receiver.share, self.slots.num_envs, self.rank, folder, buffer.frame_stack
        )

    def build_mixture(self, demos: np.ndarray | None, options: DrawOptions) -> None:
        """Builds the sampler of batches from the replay buffer and demonstrations."""
        assert isinstance(self.replay, ReplayBuffer)
        self._mixture = Mixture(
            self.replay,
            demos,
            options,
            interventions=self.interventions,
            seed=self.seed,
            rank=self.rank,
            ranks=self.world_size,
        )

    def replace_demos(self, demos: np.ndarray | None) -> None:
        """Replaces the demonstrations, because the restored transitions have the labels of interventions or lack them."""
        self._mixture.set_demos(demos)

    def _read_demos(self) -> np.ndarray | None:
        """Reads the recorded demonstrations."""
        cfg = self.cfg
        if not cfg.algorithm.demo_buffer.load_path:
            return None
        return fit(
            read_demo_buffer(cfg),
            *self._spaces,
            cfg.actor.model.num_action_chunks,
            has_positions=self.positions is not None,
            has_labels=self.has_labels,
        )

    def connect(self) -> None:
        """Connects to the channels that the driver has created."""
        self.receiver.connect(self.connect_channel(TRAJECTORIES), self.connect_channel(PARTS))
        self.incomplete.clear()

    def start_from(self, folder: str) -> None:
        """Loads the weights of a checkpoint or an export, such as a behaviour-cloned policy, into policy and target
        networks.
        """
        super().start_from(folder)
        self.off_policy.reset_targets()

    def sent_weights(self, excluded_names: Container[str]) -> Named:
        """Yields the weights that rollout ranks need for acting, except those in `excluded_names`."""
        yield from ((name, tensor) for name, tensor in self.policy.acting_weights() if name not in excluded_names)

    def receive(self, step: int, source: Source) -> RolloutCounts:
        """Adds this step's transitions of the rank's slots to the buffer, and those of interventions to the demonstrations;
        returns their counts.

        Drops transitions that are non-finite, and transitions of failed simulators, failed robots, and lost env or
        rollout ranks (`IncompleteRows`).

        Args:
            step: Global step.
            source: Turns and shards that make up the step.

        Raises:
            NonFinite: A transition is not finite, and `runner.on_nonfinite` is stop.
        """
        return self.store(self.receiver.receive(step, source))

    def store(self, received: RolloutBatch[np.ndarray]) -> RolloutCounts:
        """Adds a step's transitions of the rank's slots to the buffer, without those to drop (`receive`)."""
        batch = received.drop_lost_and_failed(by_slot=False, failures_by_slot=False)
        columns = batch.transition_columns()
        is_intervened = np.zeros(batch.rewards.shape[:2], bool) if batch.intervened is None else batch.intervened
        if columns and (self.has_labels or self.interventions is not None):
            columns[INTERVENED] = is_intervened
        if columns and self.classifier is not None:
            assert batch.marks is not None
            columns[_MARKS] = batch.marks
        if self.positions is not None and columns:
            assert received.truncations is not None
            episode_ends = received.terminations | received.truncations
            columns[POSITION] = self.positions.count(
                episode_ends if batch.drops is None else episode_ends | batch.drops
            )
        if self.is_any(bool(sum(batch.dropped.values()))):  # all ranks exchange transitions if any rank dropped some
            present_mask = np.ones(batch.rewards.shape[:2], bool) if batch.drops is None else ~batch.drops
            gather: Callable[[Any], list[Any]] = self.all_gather_object if self.world_size > 1 else lambda rows: [rows]
            columns = self.incomplete.regroup(columns, present_mask, gather)
        return batch.counts(self.add_transitions(columns))

    def is_any(self, local_flag: bool) -> bool:
        """Returns whether a flag is set on any rank."""
        return bool(self.all_reduce(torch.tensor([float(local_flag)])).item()) if self.world_size > 1 else local_flag

    def add_transitions(self, columns: Mapping[str, Any]) -> int:
        """Adds transitions of the rank's slots to the buffer, `[n, rows, ...]`; returns their number."""
        rows = next(iter(columns.values())).shape[1] if columns else 0
        if rows and self.classifier is not None:
            columns = {**columns, "rewards": self.classifier.receive(columns, columns[_MARKS])}
        if self.interventions is not None:
            self._add_interventions(columns if rows else {})
        if rows:
            self.replay.add(self._list_stored_columns(columns))
        self.transitions += self.slots.num_envs * rows
        return len(self.receiver.share) * rows

    def _list_stored_columns(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns that the buffers have."""
        return {
            name: column
            for name, column in columns.items()
            if name != _MARKS and (name != INTERVENED or self.has_labels)
        }

    def _add_interventions(self, columns: Mapping[str, Any]) -> None:
        """Adds the transitions of interventions, those of a slot in order, to the demonstrations of all ranks."""
        assert self.interventions is not None
        rows: dict[str, np.ndarray] = {}
        if columns:
            slots, steps = np.nonzero(columns[INTERVENED])
            rows = {name: column[slots, steps] for name, column in self._list_stored_columns(columns).items()}
        rank_rows = [rows] if self.world_size == 1 else self.all_gather_object(rows)
        rank_rows = [rows for rows in rank_rows if rows and len(rows["rewards"])]
        if rank_rows:
            column_names = rank_rows[0]
            self.interventions.add(
                {name: np.concatenate([rows[name] for rows in rank_rows])[None] for name in column_names}
            )

    def update(self, step: int, progress: float = 0.0) -> dict[str, float]:
        """Runs the pending updates: `update_to_data` updates per transition since training started.

        Args:
            step: Global step.
            progress: Completed fraction of the run, 0 to 1, for the learning rates.

        Returns:
            Metrics, the same on all ranks, and `update_s`, the duration in seconds.
        """
        self.train(step, progress)
        return self.read_metrics()

    def train(self, step: int, progress: float = 0.0) -> None:
        """Trains as `update` does, but leaves the metrics on the device until `read_metrics` reads them."""
        del step
        algorithm = self.cfg.algorithm
        num_learned = max(0, self.transitions - algorithm.replay_buffer.min_buffer_size)
        total_updates = int(algorithm.update_to_data * num_learned + 1e-6)  # 49 × 1/49 is below 1 in floating point
        num_updates, self.updates_due = total_updates - self.updates_due, total_updates
        self._run_updates(num_updates, progress)

    def update_offline(self, step: int, progress: float = 0.0) -> dict[str, float]:
        """Runs `algorithm.offline_updates` updates on the demonstrations alone. Takes the arguments of `update` and
        returns the same metrics.
        """
        del step
        self._run_updates(self.cfg.algorithm.offline_updates, progress, is_offline=True)
        return self.read_metrics()

    @traced("update", "train")
    def _run_updates(self, num_updates: int, progress: float, *, is_offline: bool = False) -> None:
        self._update_start_s = time.perf_counter()
        if self.cfg.algorithm.anneal_lr:
            self.off_policy.set_lr(decay_factor(self.cfg.actor.optim, 1.0 - progress))
        for draw in self.draws(num_updates, demos_only=is_offline):
            self.off_policy.step(_to_batch(draw))
        self._classifier_metrics = {}
        if self.classifier is not None and not is_offline:
            assert isinstance(self.replay, ReplayBuffer)
            self._classifier_metrics = self.classifier.update(self.replay)

    def read_metrics(self) -> dict[str, float]:
        """Reads the metrics of the last updates, which `update` returns; all ranks must call it.

        Raises:
            NonFinite: A metric is not finite.
        """
        metrics = {**self.off_policy.metrics(), "buffer_size": float(len(self.replay))}
        metrics["update_s"] = time.perf_counter() - self._update_start_s
        if self.interventions is not None:
            metrics["demo_buffer_size"] = float(self._mixture.num_demos)
        return metrics | self._classifier_metrics

    def draws(self, count: int, *, demos_only: bool) -> Iterator[MixtureDraw[torch.Tensor]]:
        """Yields the batches of the next updates, on the device; `demos_only` draws from the demonstrations only."""
        for _ in range(count):
            draw = self._mixture.draw(self.off_policy.num_updates, demos_only=demos_only)
            columns = {name: column for name, column in draw.columns.items() if name not in (POSITION, INTERVENED)}
            steps, shifts, critics = (
                None if array is None else torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
                for array in (draw.steps, draw.shifts, draw.critics)
            )
            yield MixtureDraw(
                {name: torch.from_numpy(column).to(self.device) for name, column in columns.items()},
                torch.from_numpy(draw.noise).to(self.device),
                draw.total,
                steps,
                shifts,
                critics,
            )

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def stored_on_host(self) -> ReplayBuffer:
        """Returns the buffer in the host's memory that `load` restores."""
        assert isinstance(self.replay, ReplayBuffer)
        return self.replay

    def save(self, folder: str) -> None:
        """Writes `actor-<rank>.pt` and this rank's part of the replay buffer; rank 0 also writes model and optimizers."""
        super().save(folder)
        self.replay.save(Path(folder))
        if self.interventions is not None and self.rank == 0:  # all ranks hold the same transitions
            self.interventions.save(Path(folder))
        if self.classifier is not None and self.rank == 0:
            self.classifier.save(Path(folder))

    def load(self, folder: str) -> None:
        """Restores a checkpoint; a rank without a file in it uses rank 0's.

        Raises:
            CheckpointError: The weights do not fit the configured model.
        """
        super().load(folder)
        self.replay.load(Path(folder))
        if self.interventions is not None and (Path(folder) / INTERVENTIONS_FOLDER).is_dir():
            self.interventions.load(Path(folder))
        if self.classifier is not None:
            self.classifier.load(Path(folder))
        if self.replay.dtype is not None and self.has_labels is not (INTERVENED in (self.replay.dtype.names or ())):
            self.has_labels = not self.has_labels
            self.replace_demos(self._read_demos())
        if self.positions is not None:
            self.positions.resume(self.stored_on_host())


def _to_batch(draw: MixtureDraw[torch.Tensor]) -> TransitionBatch:
    columns = draw.columns
    return TransitionBatch(
        obs=rows_of(columns, "obs"),
        actions=columns["actions"],
        rewards=columns["rewards"],
        next_obs=rows_of(columns, "next_obs"),
        terminations=columns["terminations"],
        noise=draw.noise,
        total=draw.total,
        steps=draw.steps,
        shifts=draw.shifts,
        critics=draw.critics,
    )
