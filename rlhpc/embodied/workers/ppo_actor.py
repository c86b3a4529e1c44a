"""Actor worker of on-policy embodied runs: it computes advantages and trains the policy on the rollout ranks'
trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlhpc.algorithms import calculate_adv_and_returns
from rlhpc.algorithms.nonfinite import skips
from rlhpc.embodied.algorithms.ppo import PolicyUpdate, TransitionStream
from rlhpc.embodied.config import PpoConfig, minibatch_size
from rlhpc.embodied.data.batches import DropReason, RolloutBatch, RolloutCounts, TrainBatch
from rlhpc.embodied.models.mlp import flat_numbers
from rlhpc.embodied.rollout.slot_map import TRAJECTORIES, SlotMap, Source
from rlhpc.embodied.rollout.work_sharing import PARTS, num_parts_of
from rlhpc.embodied.workers.actor import PolicyTrainer, TrajectoryReceiver
from rlhpc.runtime.trace_recorder import traced
from rlhpc.training.flat_parameters import schedule_factor


class EmbodiedActor(PolicyTrainer[PpoConfig]):
    """Actor worker that trains by PPO and related algorithms on the rollout ranks' trajectories."""

    #: Batch of the step, which `update` trains on.
    batch: TrainBatch | None = None
    #: Stream of the step's transitions, if training overlaps with the rollout.
    stream: TransitionStream | None = None
    _read_update: Callable[[], dict[str, float]] | None = None

    @property
    def may_mask_rows(self) -> bool:
        """Returns whether the loss mask may leave out transitions."""
        return True

    def init_worker(self, slots: SlotMap, observation_space: Any, action_space: Any) -> int:
        """Builds policy and optimizer; the initial weights depend only on the seed.

        Returns:
            Number of trainable parameters.
        """
        cfg = self.cfg
        self.set_up_device()
        self.slots, self.steps, self.share = slots, cfg.algorithm.rollout_steps, slots.actor_share(self.rank)
        self.parts = num_parts_of(cfg)
        needs_lags = cfg.algorithm.proximal_policy == "interpolated"
        self.receiver = TrajectoryReceiver(cfg, slots, self.rank, needs_lags=needs_lags)
        self.backend = self.build_backend(
            cfg.actor,
            (observation_space, action_space),
            reads_norm=skips(cfg),
            levels=cfg.algorithm.logprob_type,
        )
        self.update_policy = PolicyUpdate(
            cfg.algorithm,
            self.backend,
            batch_size=minibatch_size(cfg),
            micro_batch=cfg.actor.micro_batch_size,
            sequence_length=self.steps // self.parts,
            seed=self.seed,
            reduce=self.all_reduce,
            gather=self.all_gather_object,
            rank=self.rank,
            num_ranks=self.world_size,
            skips_nonfinite=skips(cfg),
            may_mask_rows=self.may_mask_rows,
        )
        self.open_sync(slots, cfg.rollout)
        num_parameters = self.backend.num_trained_parameters
        self.log.info("trains %d parameters of %s on %s", num_parameters, cfg.actor.model.model_type, self.device)
        return num_parameters

    def connect(self) -> None:
        """Connects to the channels that the driver has created."""
        self.receiver.connect(self.connect_channel(TRAJECTORIES), self.connect_channel(PARTS))

    def receive(self, step: int, source: Source) -> RolloutCounts:
        """Receives this step's transitions of the rank's slots, and computes advantages and returns. Returns the counts
        of transitions.

        With `runner.use_training_pipeline`, receives only the step's first part; `update` receives the other parts.

        Args:
            step: Global step.
            source: Turns and shards that make up the step.

        Raises:
            NonFinite: A value is not finite, and `runner.on_nonfinite` is stop.
        """
        num_parts = 1 if self.cfg.algorithm.max_staleness else self.parts
        if num_parts == 1:
            batch, rollout_counts = self._receive_part(step, source)
            self.batch = batch.flatten()
            return rollout_counts
        counts_by_part: list[RolloutCounts] = []

        def receive_part(part_number: int) -> TrainBatch:
            later_rollouts = (
                played_rollout.full_rollout.number for played_rollout in source.played_rollouts[part_number + 1 :]
            )
            shard_source = replace(
                source,
                played_rollouts=source.played_rollouts[part_number : part_number + 1],
                later_rollouts=source.later_rollouts.union(later_rollouts),
            )
            batch, rollout_counts = self._receive_part(step, shard_source)
            counts_by_part.append(rollout_counts)
            return batch

        self.stream = TransitionStream(receive_part, num_parts, self.steps)
        if self.cfg.runner.use_training_pipeline:
            self.stream.wait_until(0)  # later parts must be complete, so this part's counts hold for them
            return replace(counts_by_part[0], num_received=counts_by_part[0].num_received * num_parts)
        self.stream.wait_until(num_parts - 1)
        self.batch, self.stream = self.stream.batch, None
        return RolloutCounts.sum(counts_by_part)

    def _receive_part(self, step: int, shard_source: Source) -> tuple[TrainBatch, RolloutCounts]:
        """Receives a step or a part of a step. Returns the batch to train on, `[n, T, ...]`, and its counts."""
        return self.prepare(self.receiver.receive(step, shard_source))

    def prepare(self, received_batch: RolloutBatch[np.ndarray]) -> tuple[TrainBatch, RolloutCounts]:
        """Drops the transitions that cannot be trained on, and computes advantages and returns.

        Returns:
            The batch to train on, `[n, T, ...]`, and its counts.
        """
        algorithm = self.cfg.algorithm
        # GAE bootstraps from the observation before a failure; other estimators need all transitions of a slot.
        drops_failed_slots = algorithm.adv_type != "gae"
        received_batch = received_batch.drop_lost_and_failed(by_slot=True, failures_by_slot=drops_failed_slots)
        if algorithm.filter_rewards:
            bounds = algorithm.rewards_lower_bound, algorithm.rewards_upper_bound
            received_batch = received_batch.drop_groups(self.slots.group_size, *bounds)
        # A slot without any remaining transition does not count as a member of its group.
        members = None
        if received_batch.drops is not None:
            members = torch.from_numpy(~received_batch.drops.all(1)).to(self.device)
            received_batch = received_batch.replace_nonfinite()
        num_lost = received_batch.dropped.get(DropReason.RANK_LOST, 0)
        rollout_counts = received_batch.counts(
            received_batch.rewards.shape[0] * received_batch.rewards.shape[1] - num_lost
        )
        return self.with_advantages(received_batch.to_tensors(self.device), members), rollout_counts

    def with_advantages(self, rollout: RolloutBatch[torch.Tensor], members: torch.Tensor | None = None) -> TrainBatch:
        """Computes the advantages and returns of transitions on the device; `members`, bool `[n]`, selects the slots that
        take part (None for all). Returns the batch to train on, `[n, T, ...]`.
        """
        algorithm, sequence = self.cfg.algorithm, rollout.reward_sequence()
        if algorithm.bootstrap_type == "always":
            sequence = sequence.as_truncated()
        slots = torch.arange(self.share.start, self.share.stop, device=self.device)
        with torch.no_grad():
            advantages, returns = calculate_adv_and_returns(
                algorithm.adv_type,
                group_ids=slots // self.slots.group_size,
                gamma=algorithm.gamma,
                gae_lambda=algorithm.gae_lambda,
                all_reduce=self.all_reduce if self.world_size > 1 else None,
                members=members,
                **sequence.estimator_inputs(),
            )
        return rollout.with_advantages(advantages, returns, sequence)

    def update(self, step: int, progress: float = 0.0) -> dict[str, float]:
        """Trains on the trajectories that `receive` has received.

        Args:
            step: Global step.
            progress: Completed fraction of the run, 0 to 1, for the learning rate.

        Returns:
            Metrics, the same on all ranks, and `update_s`, the duration in seconds without the time spent receiving parts.
        """
        self.train(step, progress)
        return self.read_metrics()

    @traced("update", "train")
    def train(self, step: int, progress: float = 0.0) -> None:
        """Trains as `update` does, but leaves the metrics on the device until `read_metrics` reads them."""
        start_time = time.perf_counter()
        factor = schedule_factor(self.cfg.actor.optim, step - 1, progress, is_annealed=self.cfg.algorithm.anneal_lr)
        rate = self.backend.base_lr * factor
        stream, self.stream = self.stream, None
        batch, self.batch = self.batch if stream is None else stream.batch, None
        assert batch is not None, "update follows receive"
        # Without transitions to train on, Adam would still move the weights by its momentum.
        if stream is None and self.may_mask_rows and not self.all_reduce(batch.mask.sum()).item():
            self._read_update = lambda: {"lr": rate, "epochs": 0.0}
            return
        local_indices = range(self.share.start * self.steps, self.share.stop * self.steps)
        num_transitions = self.slots.num_envs * self.steps
        waited_before_s = 0.0 if stream is None else stream.wait_s
        read_metrics = self.update_policy.train(batch, local_indices, num_transitions, step, rate, stream)
        variance_sums = self._sum_for_explained_variance(batch)
        self._update_normaliser(batch)
        self.updates += 1
        wait_s = 0.0 if stream is None else stream.wait_s - waited_before_s

        def read() -> dict[str, float]:
            metrics = read_metrics()
            explained_variance = _compute_explained_variance(variance_sums)
            update_s = time.perf_counter() - start_time - wait_s
            return {**metrics, "explained_variance": explained_variance, "update_s": update_s}

        self._read_update = read

    def read_metrics(self) -> dict[str, float]:
        """Reads the metrics of the last `train`, which `update` returns; all ranks must call it.

        Raises:
            NonFinite: A gradient is not finite.
        """
        read, self._read_update = self._read_update, None
        assert read is not None, "read_metrics follows train"
        return read()

    def _update_normaliser(self, batch: TrainBatch) -> None:
        """Adds this step's observations to the policy's running statistics. `update` calls it after the training, so
        that acting and training of a step use the same statistics.
        """
        normaliser = self.policy.normaliser
        if normaliser is None:
            return
        num_slots = len(self.share)
        observations = flat_numbers(batch.obs)
        mask = (batch.mask.reshape(num_slots, self.steps, -1) > 0).any(-1)
        observation_moments = normaliser.moments(observations.reshape(num_slots, self.steps, -1), mask)
        if self.world_size > 1:
            all_moments = observation_moments.new_zeros(self.slots.num_envs, observation_moments.shape[1])
            all_moments[self.share.start : self.share.stop] = observation_moments
            observation_moments = self.all_reduce(all_moments)
        normaliser.update(observation_moments)

    def _sum_for_explained_variance(self, batch: TrainBatch) -> torch.Tensor | None:
        """Returns the sums of `_compute_explained_variance` over all ranks; None if the variance is undefined."""
        predicted_values, returns, mask = batch.values, batch.returns, batch.mask
        if predicted_values.shape != returns.shape:  # returns are per action, but values are per decision
            return None
        error, target = ((returns - predicted_values) * mask).double(), (returns * mask).double()
        sums = torch.stack(
            [mask.double().sum(), error.sum(), (error * error).sum(), target.sum(), (target * target).sum()]
        )
        return self.all_reduce(sums)


def _compute_explained_variance(sums: torch.Tensor | None) -> float:
    """Returns 1 − Var(returns − values) / Var(returns) over the trained transitions; nan if undefined.

    Args:
        sums: Number of transitions, and sums of errors, squared errors, returns and squared returns.
    """
    if sums is None:
        return float("nan")
    num_values, error_sum, squared_error_sum, return_sum, squared_return_sum = sums.tolist()
    variance = squared_return_sum / num_values - (return_sum / num_values) ** 2
    return (
        1.0 - (squared_error_sum / num_values - (error_sum / num_values) ** 2) / variance
        if variance > 0
        else float("nan")
    )
