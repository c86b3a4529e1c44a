"""Actor worker of behaviour cloning: one data-parallel rank that trains on demonstrations."""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from rlhpc.algorithms import value_loss
from rlhpc.algorithms.nonfinite import SkippedSteps, skips
from rlhpc.config.load import total_steps
from rlhpc.embodied.algorithms.ppo import LazySequence
from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.batches import count_passes, local_minibatches, permutation
from rlhpc.embodied.data.demo_stream import Batch, DemoStream, RowOptions
from rlhpc.embodied.data.demonstrations import DemoEpisode, held_out_of, index_demos
from rlhpc.embodied.envs.registry import check_env, environment_of
from rlhpc.embodied.evaluation.episodes import evaluation_metrics, evaluation_rows
from rlhpc.embodied.models import build_model, policy_section
from rlhpc.embodied.models.advantage_conditioned import (
    IMPROVEMENT,
    KEY,
    episode_advantages,
    improvements,
    load_value_model,
)
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.workers.actor import PolicyTrainer
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names
from rlhpc.runtime.trace_recorder import span
from rlhpc.training.backend import Metrics
from rlhpc.training.flat_parameters import decay_factor, schedule_factor


def spaces_of(cfg: BcConfig) -> tuple[Any, Any]:
    """Returns the observation space and the action space of the demonstrations' environment.

    Raises:
        ConfigError: The environment does not exist.
    """
    return check_env(environment_of(cfg))


def check_actions(cfg: BcConfig, action_space: Any) -> None:
    """Checks that `algorithm.bc_loss` fits the action space.

    Raises:
        ConfigError: The loss is mse and actions are not a Box.
    """
    if cfg.algorithm.bc_loss == "mse" and not isinstance(action_space, spaces.Box):
        raise ConfigError(f"algorithm.bc_loss is 'mse', and the actions are {action_space}; choose nll")


@dataclass(frozen=True)
class DemoMicroBatch:
    """Rows of one forward and backward pass.

    Attributes:
        columns: The rows' columns, tensors on the device.
        count: Number of rows of the minibatch, over all ranks.
        is_idle: True for a pass that only keeps pace with other ranks.
    """

    columns: Batch
    count: int
    is_idle: bool = False


@dataclass(frozen=True)
class MinibatchRows:
    """Rows of a minibatch on one rank.

    Attributes:
        micro_batches: Rows of each micro-batch.
        count: Number of rows of the minibatch, over all ranks.
        num_passes: Number of passes that all ranks make for it; 0 if each makes its own.
    """

    micro_batches: list[np.ndarray]
    count: int
    num_passes: int = 0


#: Maximum number of rows of a batch when values are computed.
_VALUE_ROWS = 1024


class BcActor(PolicyTrainer[BcConfig]):
    """Actor worker that trains the policy on demonstrations; each rank reads an equal share of the steps.

    Attributes:
        labels: Checksum of the improvement labels.
        passes: Number of complete passes over the demonstrations.
        pass_rows: Number of rows of the current pass that were trained on, over all ranks.
        total: Number of training rows, over all ranks.
    """

    labels = passes = pass_rows = total = 0
    counters = {**PolicyTrainer.counters, "passes": "passes", "pass_rows": "pass_rows", "rows": "total"}  # noqa: RUF012

    def init_worker(self) -> dict[str, float]:
        """Builds policy and optimizer, and indexes the demonstrations.

        Returns:
            Numbers of `parameters`, `episodes` and `transitions` in training; `left_out` is the number of episodes that
            are omitted because they are not finite.
        """
        cfg = self.cfg
        self.set_up_device()
        spaces = spaces_of(cfg)
        skips_nonfinite = skips(cfg)
        self.backend = self.build_backend(cfg.actor, spaces, reads_norm=skips_nonfinite)
        self.skips = SkippedSteps(skips_nonfinite)
        self.loss_type, self.value_coef = cfg.algorithm.bc_loss, cfg.algorithm.bc_value_coef
        problems: list[str] | None = [] if skips_nonfinite else None
        demos = index_demos(
            cfg,
            problems,
            spaces=spaces,
            rank=self.rank,
            world_size=self.world_size,
            gather=self.all_gather_object if self.world_size > 1 else None,
        )
        for problem in problems or ():
            self.log.warning("left out: %s", problem)
        labels = self._label_improvements(demos, spaces[0]) if cfg.algorithm.value_model else None
        self._open_stream(demos, spaces[0], labels)
        parameters = float(self.backend.num_trained_parameters)
        self.log.info(
            "clones %d episodes with %d parameters of %s on %s", self.episodes, parameters, cfg.actor.model.model_type,
            self.device,
        )  # fmt: skip
        metrics = {"parameters": parameters, "episodes": float(self.episodes), "transitions": float(self.total)}
        return {**metrics, "left_out": float(len(problems or ()))}

    def _label_improvements(self, demos: Sequence[DemoEpisode], observation_space: Any) -> list[np.ndarray]:
        """Returns the improvement labels of each episode, `[T, 1]`. Each rank computes the values of a share of the
        episodes.
        """
        model = load_value_model(self.cfg, observation_space).to(self.device)
        rank_demos = demos[len(demos) * self.rank // self.world_size : len(demos) * (self.rank + 1) // self.world_size]
        stream = DemoStream(
            rank_demos, RowOptions(observation_space, range(1), columns=("rewards",)), self._memory_bytes
        )
        batch_size = min(_VALUE_ROWS, stream.max_rows)
        advantages = []
        for episode in range(len(rank_demos)):
            rows = np.asarray(stream.rows_of(episode))
            obs_parts = (
                stream.read(rows[row_start : row_start + batch_size]) for row_start in range(0, len(rows), batch_size)
            )
            advantages.append(episode_advantages(self.cfg, obs_parts, model, self.device))
        stream.close()
        if self.world_size > 1:
            advantages = [
                advantage for rank_advantages in self.all_gather_object(advantages) for advantage in rank_advantages
            ]
        labels = improvements(advantages, self.cfg.algorithm.improved_fraction)
        self.labels = zlib.crc32(np.concatenate(labels).tobytes())
        self.counters = {**self.counters, "labels": "labels"}
        return labels

    def load(self, folder: str) -> None:
        """Restores a checkpoint (`PolicyTrainer.load`), and the position in the demonstrations.

        Raises:
            ConfigError: The improvement labels have changed, or the demonstrations within a pass.
        """
        labels, num_rows = self.labels, self.total
        self.passes = -1
        super().load(folder)
        if self.passes < 0:  # checkpoints of earlier versions were written between passes
            self.passes, self.pass_rows = self.updates * self.cfg.algorithm.update_epochs, 0
        trained_total, self.total = self.total, num_rows
        if self.labels != labels:
            raise ConfigError(
                f"{KEY} or demos.path: what is there now makes other steps improvements than what {folder} was trained "
                "on; name what the run began with (a checkpoint in place of a run that goes on)"
            )
        if self.pass_rows and trained_total != num_rows:
            raise ConfigError(
                f"demos.path has {num_rows} steps now, and {folder} was written after {self.pass_rows} of "
                f"{trained_total} steps "
                "of a pass; name the demonstrations that the run began with, or start another run with runner.init_from"
            )

    @property
    def _memory_bytes(self) -> int:
        return self.cfg.demos.memory_mb << 20

    def _open_stream(
        self, demos: Sequence[DemoEpisode], observation_space: Any, labels: Sequence[np.ndarray] | None
    ) -> None:
        """Opens the stream of the training rows, which the held-out rows follow."""
        held_out = held_out_of(len(demos), self.cfg)
        train_demos = [i for i in range(len(demos)) if i not in held_out]
        demo_order = [*train_demos, *sorted(held_out)]
        self.episodes, self.total = len(train_demos), sum(demos[i].length for i in train_demos)
        self.local_rows = range(
            self.total * self.rank // self.world_size, self.total * (self.rank + 1) // self.world_size
        )
        # A success model gets the observation after a step; a policy gets the observation before the step.
        is_classifier = self.policy.is_success_classifier
        self.has_returns = bool(self.value_coef)
        self.extra_columns = ([IMPROVEMENT] if labels else []) + (["success"] if is_classifier else [])
        options = RowOptions(
            observation_space,
            self.policy.imitated_offsets,
            obs_offset=int(is_classifier),
            columns=("success",) if is_classifier else (),
            gamma=self.cfg.algorithm.gamma if self.has_returns else None,
            reward_scale=self.cfg.env.train.reward_scale,
            labels={IMPROVEMENT: [labels[i] for i in demo_order]} if labels else None,
        )
        first_row = min(self.local_rows.start, self.total - 1)
        self.stream = DemoStream([demos[i] for i in demo_order], options, self._memory_bytes, probe=first_row)
        #: Batch of passes that only keep pace with other ranks.
        self._idle_batch = self.stream.read(np.array([first_row])) if self.backend.lockstep else {}
        # Rank 0 computes the held-out loss, or all ranks if they hold parts of the weights.
        computes_holdout = self.rank == 0 or self.backend.lockstep
        self.holdout_rows = range(self.total, self.stream.total) if computes_holdout else range(0)

    # -- training -------------------------------------------------------------------------------------------------

    def imitate(self, step: int, progress: float) -> dict[str, float]:
        """Trains for `algorithm.minibatches_per_step` minibatches, or `algorithm.update_epochs` passes over the
        demonstrations.

        Args:
            step: Global step.
            progress: Completed fraction of the run, 0 to 1, for the learning rate.

        Returns:
            Metrics, the same on all ranks; `num_samples` is the number of rows.

        Raises:
            NonFinite: A gradient is not finite.
        """
        cfg = self.cfg
        rate = self._learning_rate(progress)
        sums, norms, updates, num_samples = torch.zeros(2, dtype=torch.float64, device=self.device), 0.0, 0, 0
        last_pass, num_left = self.passes + cfg.algorithm.update_epochs, cfg.algorithm.minibatches_per_step
        while num_left != 0 if num_left is not None else self.passes < last_pass:
            minibatches = self._minibatches(num_left)
            num_left = None if num_left is None else num_left - len(minibatches)
            with contextlib.closing(self._read(minibatches)) as batches:
                for index, rows in enumerate(minibatches):
                    rate = self._learning_rate(progress)
                    minibatch_sums, norm = self._update(rows, batches, rate)
                    self.pass_rows += rows.count
                    num_samples += rows.count
                    if not math.isfinite(norm):
                        position_text = (
                            f"step {step}, epoch {self.passes % cfg.algorithm.update_epochs}, minibatch {index}"
                        )
                        bad_names = format_names(self.backend.bad_gradients()) or "all together"
                        message = f"{position_text}: the gradient of {bad_names} is not finite"
                        self.skips.record_skip(functools.partial(str, message))
                        continue
                    self.skips.record_step()
                    sums += minibatch_sums
                    norms += norm
                    updates += 1
            if self.pass_rows >= self.total:
                self.passes, self.pass_rows = self.passes + 1, 0
        if self.world_size > 1:
            sums = self.all_reduce(sums)
        num_updates = max(updates, 1)
        policy_loss, mean_value_loss = (sums / num_updates).tolist()
        self.updates += 1
        metrics = {"loss": policy_loss, "grad_norm": norms / num_updates, "lr": rate, "updates": float(updates)}
        metrics |= {"samples": float(num_samples), **self.skips.pop_metrics()}
        if self.has_returns:
            metrics["value_loss"] = mean_value_loss
        if self.holdout_rows:
            metrics["holdout_loss"] = self._compute_holdout_loss()
        return metrics

    def _learning_rate(self, progress: float) -> float:
        """Returns the learning rate of the next minibatch: `algorithm.anneal_lr` alone lowers it from step to step, a schedule
        of `actor.optim` with each minibatch.

        Args:
            progress: Completed fraction of the run at the beginning of the step.
        """
        optim, algorithm = self.cfg.actor.optim, self.cfg.algorithm
        if algorithm.anneal_lr and not (optim.lr_warmup_steps or optim.lr_decay_steps):
            return self.backend.base_lr * decay_factor(optim, 1.0 - progress)
        size = min(self.cfg.actor.global_batch_size, self.total)
        num_minibatches = -(-self.total // size)
        done = self.passes * num_minibatches + self.pass_rows // size
        minibatches_per_step = algorithm.minibatches_per_step or num_minibatches * algorithm.update_epochs
        progress = done / max(total_steps(self.cfg) * minibatches_per_step, 1)
        return self.backend.base_lr * schedule_factor(optim, done, progress, is_annealed=algorithm.anneal_lr)

    def _minibatches(self, limit: int | None) -> list[MinibatchRows]:
        """Returns the next minibatches of the current pass, at most `limit`. The order of the rows of a pass depends on the
        seed and on the number of the pass only.
        """
        cfg = self.cfg
        minibatch_size = min(cfg.actor.global_batch_size, self.total)
        micro_batch_size = minibatch_size if cfg.actor.micro_batch_size is None else cfg.actor.micro_batch_size
        epochs = cfg.algorithm.update_epochs
        row_order = permutation(self.total, self.seed, self.passes // epochs + 1, self.passes % epochs)[
            self.pass_rows :
        ]
        row_order = row_order if limit is None else row_order[: limit * minibatch_size]
        local_batches = local_minibatches(row_order, minibatch_size, self.local_rows)
        minibatches = [
            MinibatchRows(
                [row_part.numpy() + self.local_rows.start for row_part in rows.split(micro_batch_size)]
                if rows.numel()
                else [],
                min(minibatch_size, len(row_order) - index * minibatch_size),
            )
            for index, rows in enumerate(local_batches)
        ]
        if not self.backend.lockstep:
            return minibatches
        num_passes = count_passes(
            [len(rows.micro_batches) for rows in minibatches], self.rank, self.world_size, self.all_reduce
        )
        return [replace(rows, num_passes=pass_count) for rows, pass_count in zip(minibatches, num_passes, strict=True)]

    def _read(self, minibatches: Sequence[MinibatchRows]) -> Generator[Batch, None, None]:
        """Yields the micro-batches of minibatches, read ahead."""
        return self.stream.batches([rows.micro_batches for rows in minibatches])

    def _update(self, rows: MinibatchRows, batches: Iterator[Batch], rate: float) -> tuple[torch.Tensor, float]:
        """Trains on a minibatch.

        Args:
            rows: Rows of the minibatch on this rank.
            batches: Their micro-batches.
            rate: Learning rate.

        Returns:
            This rank's sums of the policy loss and the value loss, and the gradient norm.
        """

        def load() -> DemoMicroBatch:
            with span("demonstrations", "data"):
                return DemoMicroBatch(to_tensors(next(batches), self.device), rows.count)

        def idle() -> DemoMicroBatch:
            return DemoMicroBatch(to_tensors(self._idle_batch, self.device), rows.count, is_idle=True)

        num_rows = len(rows.micro_batches)
        builders = [load] * num_rows + [idle] * (rows.num_passes - num_rows)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for outputs in self.backend.forward_backward(LazySequence(builders), self._loss):
            sums += outputs["losses"].double()
        return sums, float(self.backend.optimizer_step(rate))

    def _compute_holdout_loss(self) -> float:
        """Returns the mean loss of the held-out rows."""
        batch_size = self.cfg.actor.micro_batch_size or self.cfg.actor.global_batch_size
        rows = np.asarray(self.holdout_rows)
        row_parts = [[rows[row_start : row_start + batch_size]] for row_start in range(0, len(rows), batch_size)]
        with contextlib.closing(self.stream.batches(row_parts)) as batches:
            losses = [self.backend.evaluate(self._losses, (batch, len(rows)))[0] for batch in batches]
        return float(sum(losses))

    def _loss(self, module: nn.Module, micro_batch: DemoMicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Returns a micro-batch's share of its minibatch's mean loss, and the policy and value terms of this share. The share
        of an idle micro-batch is 0.
        """
        losses = self._losses(module, (micro_batch.columns, micro_batch.count))
        loss = losses[0] + self.value_coef * losses[1]
        if micro_batch.is_idle:
            return 0.0 * loss, {"losses": torch.zeros(2, device=self.device)}
        return loss, {"losses": torch.stack(losses)}

    def _losses(self, module: nn.Module, batch_count: tuple[Batch, int]) -> list[torch.Tensor]:
        """Returns a batch's shares of the mean policy loss and the mean value loss of its minibatch.

        Args:
            module: The policy.
            batch_count: The batch, and the number of rows of its minibatch, by which the sums are divided.
        """
        batch, num_rows = to_tensors(batch_count[0], self.device), batch_count[1]
        obs, actions, has_returns = batch["obs"], batch["actions"], self.has_returns
        inputs = {name: batch[name] for name in ("obs", "actions", "is_pad", *self.extra_columns)}

        def compute_losses(policy: Policy) -> list[torch.Tensor]:
            outputs = policy.default_forward(inputs, compute_logprobs=False, compute_values=True) if has_returns else {}
            if self.loss_type == "nll":
                loss = policy.bc_loss(inputs).sum() / num_rows
            else:
                mean_actions = policy.mean_action(obs)
                if torch.is_grad_enabled() and not mean_actions.requires_grad:
                    raise ConfigError(
                        f"algorithm.bc_loss is 'mse', and the actions of model_type {self.cfg.actor.model.model_type} have no "
                        "gradient; choose nll"
                    )
                loss = (mean_actions - actions[:, : policy.chunk]).square().mean((1, 2)).sum() / num_rows
            if not has_returns:
                return [loss, torch.zeros_like(loss)]
            mask = torch.ones_like(outputs["values"], dtype=torch.bool)[:, None]
            value_term, _ = value_loss(
                values=outputs["values"][:, None], returns=batch["returns"][:, None], loss_mask=mask,
                global_tokens=torch.full((), float(num_rows), device=self.device),
            )  # fmt: skip
            return [loss, value_term]

        return module(compute_losses)

    def evaluate(self) -> dict[str, float]:
        """Evaluates the current weights on `env.eval` with deterministic actions; returns the metrics.

        All ranks must call the method. Each plays a part, except that sharded weights are gathered into a separate policy of
        rank 0, which plays alone.
        """
        policy, num_parts = self.policy, self.world_size
        if self.backend.lockstep:
            weights, num_parts = self._gather_weights(), 1
            if self.rank == 0:
                policy = build_model(policy_section(self.cfg.actor, self.device), *spaces_of(self.cfg)).to(self.device)
                policy.load_state_dict(weights)
        policy.eval()
        try:
            rows = (
                evaluation_rows(self.cfg, policy, self.seed, self.device, self.rank, num_parts)
                if self.rank < num_parts
                else []
            )
        finally:
            policy.train()
        return evaluation_metrics(self.cfg, [rows] if self.world_size == 1 else self.all_gather_object(rows))
