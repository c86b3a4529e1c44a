"""Workers of off-policy runs: rollout ranks send transitions; actor ranks store them and train on samples from the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.algorithms.nonfinite import skips
from rlhpc.embodied.algorithms.off_policy import TransitionBatch
from rlhpc.embodied.algorithms.registry import algorithm_for
from rlhpc.embodied.config import SacConfig
from rlhpc.embodied.data.batches import RolloutBatch, RolloutCounts
from rlhpc.embodied.data.mixture import Mixture, MixtureDraw, fit, load_demos
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
from rlhpc.runs.device import settle
from rlhpc.runtime.comm.context import current
from rlhpc.training.backend import Named
from rlhpc.training.captured_passes import captures_graphs


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
        self._pending: dict[str, np.ndarray] = {}

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
        positions = steps * self._num_envs + slots + self._share.start
        rank_rows = gather((positions, {name: column[slots, steps] for name, column in columns.items()}))
        # The order is the same for any number of ranks.
        order = np.argsort(np.concatenate([positions for positions, _ in rank_rows]))
        pending_columns = {
            name: np.concatenate([columns_of_rank[name] for _, columns_of_rank in rank_rows])[order] for name in columns
        }
        if self._pending:
            pending_columns = {
                name: np.concatenate([self._pending[name], column]) for name, column in pending_columns.items()
            }
        rows = len(next(iter(pending_columns.values()))) // self._num_envs
        num_used = rows * self._num_envs
        self._pending = {name: column[num_used:].copy() for name, column in pending_columns.items()}
        return {
            name: column[:num_used]
            .reshape(rows, self._num_envs, *column.shape[1:])
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
    )


class OffPolicyEnvWorker(JoinableEnvWorker[SacConfig]):
    """Env worker of off-policy runs; each decision is one transition."""

    rollout_worker_path = "rlhpc.embodied.workers.off_policy:OffPolicyRolloutWorker"

    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""
        return OutcomeShape()


class OffPolicyRolloutWorker(ActingWorker[SacConfig]):
    """Rollout worker of off-policy runs: sends transitions (observation, action, reward, true next observation,
    termination). The first actions of a run are random.
    """

    policy: ActorCritic

    def build_policy(self, observation_space: Any, action_space: Any) -> Policy:
        """Builds the policy with newly initialized weights."""
        return build_model(self.cfg.actor.model, observation_space, action_space)

    def generate(self, turn: FullRollout, random_steps: int = 0) -> dict[str, float]:
        """Acts for a turn (`ActingWorker.generate`); the actions of the run's first `random_steps` transitions are random."""
        self._num_random = random_steps - ((turn.step - 1) * self.steps + turn.begin) * self.slots.num_envs
        return super().generate(turn)

    def set_random_actions(self, random: bool) -> None:
        """Sets whether the next actions are random (`ActingWorker.set_random_actions`)."""
        self._num_random = self.steps * self.slots.num_envs if random else 0

    def _choose_actions(
        self, obs: Any, noise: torch.Tensor, requests: Sequence[tuple[slice, int]]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs = self._to_device(obs)
        random_rows = [rows for rows, t in requests if t * self.slots.num_envs < self._num_random]
        if len(random_rows) == len(requests):
            actions = self.policy.head.uniform_actions(noise)
        else:
            features, _ = self.policy.features(inputs, True, False)
            assert features is not None
            actions = self.policy.head.act(features, noise)[0]
            for rows in random_rows:
                actions[rows] = self.policy.head.uniform_actions(noise)[rows]
        return self.policy.executed(inputs, actions), {"actions": actions}

    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""
        return OutcomeShape()

    def transitions(self, outcomes: list[SlotOutcomes]) -> list[RolloutBatch[np.ndarray]]:
        """Returns the transitions of each stage, with their next observations (`ActingWorker.transitions`)."""
        batches = []
        for outcome, buffer in zip(outcomes, self.buffers, strict=True):
            columns = buffer.columns()
            last_obs, final_obs = (columns_of("obs", as_arrays(obs)) for obs in (outcome.last_obs, outcome.final_obs))
            for name in last_obs:
                next_obs = columns[f"next_{name}"] = np.empty_like(columns[name])
                next_obs[:, :-1], next_obs[:, -1] = columns[name][:, 1:], last_obs[name]
                next_obs[outcome.final_slot, outcome.final_step] = final_obs[name]
            # The update bootstraps after all transitions that are not terminated, so truncations are not needed.
            batches.append(
                replace(RolloutBatch.from_columns({**columns, **outcome.transition_columns()}), truncations=None)
            )
        return batches

    def _named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return self.policy.acting()


class OffPolicyActor(PolicyTrainer[SacConfig]):
    """Actor worker of off-policy runs: stores the transitions of its slots, and trains actor and critics. Every rank holds
    the complete networks.
    """

    policy: ActorCritic
    counters: Mapping[str, str] = {"transitions": "transitions", "due": "updates_due"}

    def init_worker(self, slots: SlotMap, observation_space: Any, action_space: Any) -> int:
        """Builds networks, optimizers and buffers; the initial weights depend only on the seed.

        Returns:
            Number of trainable parameters.
        """
        cfg = self.cfg
        self.set_up_device()
        self.slots, self.steps = slots, cfg.algorithm.rollout_steps
        self.receiver = TrajectoryReceiver(cfg, slots, self.rank)
        model = build_model(cfg.actor.model, observation_space, action_space, seed=self.seed)
        update_class = algorithm_for(cfg.algorithm.name, model, cfg.actor.model.model_type)
        assert isinstance(model, ActorCritic)
        self.policy = settle(model, self.device).train()
        self.learner = self.off_policy = update_class(
            cfg.algorithm,
            cfg.actor.optim,
            self.policy,
            self.all_reduce,
            self.world_size,
            skip=skips(cfg),
            rank=self.rank,
        )
        if cfg.actor.capture_graphs and captures_graphs(self.device):
            self.off_policy.capture_passes()
        buffer = cfg.algorithm.replay_buffer
        self.replay = ReplayBuffer(
            buffer.size, self.receiver.share, slots.num_envs, self.rank, current().service.scratch.spill
        )
        demos = None
        if cfg.algorithm.demo_buffer.load_path:
            demos = fit(read_demo_buffer(cfg), observation_space, action_space, cfg.actor.model.num_action_chunks)
        self.mixture = Mixture(
            self.replay,
            demos,
            batch_size=cfg.actor.global_batch_size,
            demo_ratio=cfg.algorithm.demo_buffer.ratio,
            action_dim=model.head.dim,
            seed=self.seed,
            rank=self.rank,
            ranks=self.world_size,
        )
        self.incomplete = IncompleteRows(slots.num_envs, self.receiver.share)
        self.transitions = self.updates_due = 0
        self.open_sync(slots, cfg.rollout)
        num_parameters = sum(parameter.numel() for parameter in self.policy.parameters() if parameter.requires_grad)
        self.log.info("trains %d parameters of %s on %s", num_parameters, cfg.actor.model.model_type, self.device)
        return num_parameters

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

    def sent_weights(self, without: Container[str]) -> Named:
        """Yields the weights that rollout ranks need for acting, except those in `without`."""
        yield from ((name, tensor) for name, tensor in self.policy.acting() if name not in without)

    def receive(self, step: int, source: Source) -> RolloutCounts:
        """Adds this step's transitions of the rank's slots to the buffer; returns their counts.

        Drops transitions that are non-finite, and transitions of failed simulators, failed robots, and lost env or
        rollout ranks (`IncompleteRows`).

        Args:
            step: Global step.
            source: Turns and shards that make up the step.

        Raises:
            NonFinite: A transition is not finite, and `runner.on_nonfinite` is stop.
        """
        batch = self.receiver.receive(step, source).drop_lost_and_failed(by_slot=False, failures_by_slot=False)
        columns = batch.transition_columns()
        num_dropped = torch.tensor([float(sum(batch.dropped.values()))])
        if (
            self.all_reduce(num_dropped) if self.world_size > 1 else num_dropped
        ).item():  # all ranks exchange transitions if any rank dropped some
            present_mask = np.ones(batch.rewards.shape[:2], bool) if batch.drops is None else ~batch.drops
            gather: Callable[[Any], list[Any]] = self.all_gather_object if self.world_size > 1 else lambda rows: [rows]
            columns = self.incomplete.regroup(columns, present_mask, gather)
        rows = next(iter(columns.values())).shape[1] if columns else 0
        if rows:
            self.replay.add(columns)
        self.transitions += self.slots.num_envs * rows
        return batch.counts(len(self.receiver.share) * rows)

    def update(self, step: int, progress: float = 0.0) -> dict[str, float]:
        """Runs the pending updates: `update_to_data` updates per transition since training started.

        Args:
            step: Global step.
            progress: Completed fraction of the run, 0 to 1, for the learning rates.

        Returns:
            Metrics, the same on all ranks, and `update_s`, the duration in seconds.
        """
        algorithm = self.cfg.algorithm
        num_learned = max(0, self.transitions - algorithm.replay_buffer.min_buffer_size)
        total_updates = int(algorithm.update_to_data * num_learned + 1e-6)  # 49 × 1/49 is below 1 in floating point
        num_updates, self.updates_due = total_updates - self.updates_due, total_updates
        return self._run_updates(num_updates, progress)

    def update_offline(self, step: int, progress: float = 0.0) -> dict[str, float]:
        """Runs `algorithm.offline_updates` updates on the demonstrations alone. Takes the arguments of `update` and
        returns the same metrics.
        """
        del step
        return self._run_updates(self.cfg.algorithm.offline_updates, progress, alone=True)

    def _run_updates(self, count: int, progress: float, *, alone: bool = False) -> dict[str, float]:
        start = time.perf_counter()
        if self.cfg.algorithm.anneal_lr:
            self.off_policy.set_lr(1.0 - progress)
        for _ in range(count):
            self.off_policy.step(self._to_batch(self.mixture.draw(self.off_policy.updates, alone=alone)))
        update_s = time.perf_counter() - start
        return {**self.off_policy.metrics(), "buffer_size": float(len(self.replay)), "update_s": update_s}

    def _to_batch(self, draw: MixtureDraw) -> TransitionBatch:
        columns = {name: torch.from_numpy(column).to(self.device) for name, column in draw.columns.items()}
        return TransitionBatch(
            obs=rows_of(columns, "obs"),
            actions=columns["actions"],
            rewards=columns["rewards"],
            next_obs=rows_of(columns, "next_obs"),
            terminations=columns["terminations"],
            noise=torch.from_numpy(draw.noise).to(self.device),
            total=draw.total,
        )

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes `actor-<rank>.pt` and this rank's part of the replay buffer; rank 0 also writes model and optimizers."""
        super().save(folder)
        self.replay.save(Path(folder))

    def load(self, folder: str) -> None:
        """Restores a checkpoint; a rank without a file in it uses rank 0's.

        Raises:
            CheckpointError: The weights do not fit the configured model.
        """
        super().load(folder)
        self.replay.load(Path(folder))
