"""Actor worker of behaviour cloning: one data-parallel rank that trains on demonstrations."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from omegaconf import OmegaConf
from torch import nn

from rlhpc.algorithms import value_loss
from rlhpc.algorithms.nonfinite import SkippedSteps, format_names, skips
from rlhpc.config.typed import plain, typed
from rlhpc.embodied.config import BcConfig, EnvSideConfig
from rlhpc.embodied.data.batches import count_passes, local_minibatches, permutation
from rlhpc.embodied.data.demonstrations import check_fit, chunks_of, held_out_of, read_demos, returns_to_go, windows_of
from rlhpc.embodied.data.trajectory import Trajectory
from rlhpc.embodied.envs.observations import join, take
from rlhpc.embodied.envs.registry import check_env
from rlhpc.embodied.evaluation.episodes import evaluation_metrics, evaluation_rows
from rlhpc.embodied.models import build_model, policy_section
from rlhpc.embodied.models.advantage_conditioned import IMPROVEMENT, KEY, label_improvements, load_value_model
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.workers.actor import PolicyTrainer
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.backend import Metrics

Batch = dict[str, Any]


def environment_of(cfg: BcConfig) -> EnvSideConfig:
    """Returns the configuration of the demonstrations' environment, from `env.train`."""
    task = cfg.env.train
    env_cfg = EnvSideConfig(
        env_type=task.env_type, env_id=task.env_id, max_episode_steps=task.max_episode_steps, kwargs=plain(task.kwargs),
        wrappers=plain(task.wrappers), ignore_terminations=task.ignore_terminations, simulator_python=task.simulator_python,
    )  # fmt: skip
    return typed(EnvSideConfig, OmegaConf.structured(env_cfg))


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


class BcActor(PolicyTrainer[BcConfig]):
    """Actor worker that trains the policy on demonstrations; each rank holds an equal share of the steps.

    Attributes:
        labels: Checksum of the improvement labels.
    """

    labels = 0

    def init_worker(self) -> dict[str, float]:
        """Builds policy and optimizer, and reads the demonstrations.

        Returns:
            Numbers of `parameters`, `episodes` and `transitions` in training; `left_out` is the number of episodes that
            are omitted because they are not finite.
        """
        cfg = self.cfg
        self.set_up_device()
        observation_space, action_space = spaces = spaces_of(cfg)
        skips_nonfinite = skips(cfg)
        self.backend = self.build_backend(cfg.actor, spaces, look=skips_nonfinite)
        self.skips = SkippedSteps(skips_nonfinite)
        self.loss_type, self.value_coef = cfg.algorithm.bc_loss.lower(), cfg.algorithm.bc_value_coef
        problems: list[str] | None = [] if skips_nonfinite else None
        trajectories = list(read_demos(cfg, problems))
        for problem in problems or ():
            self.log.warning("left out: %s", problem)
        for trajectory in trajectories:
            check_fit(trajectory, observation_space, action_space)
            trajectory["obs"] = windows_of(trajectory["obs"], observation_space)
        if cfg.algorithm.value_model:
            self._label_improvements(trajectories, observation_space)
        self._store_transitions(trajectories)
        parameters = float(self.backend.parameters_trained)
        self.log.info(
            "clones %d episodes with %d parameters of %s on %s", self.episodes, parameters, cfg.actor.model.model_type,
            self.device,
        )  # fmt: skip
        metrics = {"parameters": parameters, "episodes": float(self.episodes), "transitions": float(self.total)}
        return {**metrics, "left_out": float(len(problems or ()))}

    def _label_improvements(self, trajectories: Sequence[Trajectory], observation_space: Any) -> None:
        """Labels each step of the episodes as an improvement or not."""
        labels = label_improvements(self.cfg, trajectories, load_value_model(self.cfg, observation_space), self.device)
        for trajectory, improvement in zip(trajectories, labels, strict=True):
            trajectory[IMPROVEMENT] = improvement
        self.labels = zlib.crc32(np.concatenate(labels).tobytes())
        self.counters = {**self.counters, "labels": "labels"}

    def load(self, folder: str) -> None:
        """Restores a checkpoint (`PolicyTrainer.load`).

        Raises:
            ConfigError: The improvement labels have changed.
        """
        previous_labels = self.labels
        super().load(folder)
        if self.labels != previous_labels:
            raise ConfigError(
                f"{KEY} or demos.path: what is there now makes other steps improvements than what {folder} was trained "
                "on; name what the run began with (a checkpoint in place of a run that goes on)"
            )

    def _store_transitions(self, trajectories: Sequence[Trajectory]) -> None:
        """Stores this rank's share of the training transitions, and the held-out episodes, on the device."""
        held_out = held_out_of(len(trajectories), self.cfg)
        train_trajectories = [trajectory for i, trajectory in enumerate(trajectories) if i not in held_out]
        self.episodes, self.total = (
            len(train_trajectories),
            sum(len(trajectory["actions"]) for trajectory in train_trajectories),
        )
        self.local_rows = range(
            self.total * self.rank // self.world_size, self.total * (self.rank + 1) // self.world_size
        )
        self.demos = self._build_batch(train_trajectories, self.local_rows)
        holdout_trajectories = [trajectories[i] for i in sorted(held_out)]
        self.holdout = (
            self._build_batch(holdout_trajectories, None) if holdout_trajectories and self._computes_holdout else None
        )

    @property
    def _computes_holdout(self) -> bool:
        """True if this rank computes the held-out loss: rank 0 only, or all ranks if they hold parts of the weights."""
        return self.rank == 0 or self.backend.lockstep

    def _build_batch(self, trajectories: Sequence[Trajectory], row_range: range | None) -> Batch:
        rows = slice(None) if row_range is None else slice(row_range.start, row_range.stop)

        def join_columns(columns: list[Any]) -> Any:
            return to_tensors(take(join(columns), rows), self.device)

        # A success model gets the observation after a step; a policy gets the observation before the step.
        obs_steps = slice(1, None) if self.policy.is_success_classifier else slice(-1)
        batch = {"obs": join_columns([take(trajectory["obs"], obs_steps) for trajectory in trajectories])}
        actions, pad_masks = zip(
            *(chunks_of(trajectory["actions"], self.policy.imitated) for trajectory in trajectories), strict=True
        )
        batch["actions"], batch["is_pad"] = join_columns(list(actions)), join_columns(list(pad_masks))
        for name in self._extra_columns(trajectories[0]):
            batch[name] = join_columns([np.asarray(trajectory[name], np.float32) for trajectory in trajectories])
        if self.value_coef:
            scale, gamma = self.cfg.env.train.reward_scale, self.cfg.algorithm.gamma
            batch["returns"] = join_columns(
                [scale * returns_to_go(trajectory["rewards"], gamma) for trajectory in trajectories]
            )
        return batch

    def _extra_columns(self, available_columns: Container[str]) -> list[str]:
        """Returns the names of the available inputs of `Policy.bc_loss` other than observations and actions."""
        return [
            name
            for name in (IMPROVEMENT, *(["success"] if self.policy.is_success_classifier else []))
            if name in available_columns
        ]

    # -- training -------------------------------------------------------------------------------------------------

    def imitate(self, step: int, progress: float) -> dict[str, float]:
        """Trains for `algorithm.update_epochs` passes over the demonstrations.

        Args:
            step: Global step.
            progress: Completed fraction of the run, 0 to 1, for the learning rate.

        Returns:
            Metrics, the same on all ranks.

        Raises:
            NonFinite: A gradient is not finite.
        """
        cfg = self.cfg
        rate = self.backend.base_lr * ((1.0 - progress) if cfg.algorithm.anneal_lr else 1.0)
        batch_size = min(cfg.actor.global_batch_size, self.total)
        micro_batch_size = batch_size if cfg.actor.micro_batch_size is None else cfg.actor.micro_batch_size
        sums, norms, updates = torch.zeros(2, dtype=torch.float64, device=self.device), 0.0, 0
        for epoch in range(cfg.algorithm.update_epochs):
            minibatches = local_minibatches(
                permutation(self.total, self.seed, step, epoch), batch_size, self.local_rows
            )
            micro_batches = [list(rows.split(micro_batch_size)) if rows.numel() else [] for rows in minibatches]
            if self.backend.lockstep:
                num_passes = count_passes(
                    [len(minibatch) for minibatch in micro_batches], self.rank, self.world_size, self.all_reduce
                )
                idle = torch.zeros(0, dtype=torch.int64)
                micro_batches = [
                    minibatch + [idle] * (minibatch_passes - len(minibatch))
                    for minibatch, minibatch_passes in zip(micro_batches, num_passes, strict=True)
                ]
            for index, index_chunks in enumerate(micro_batches):
                count = min(batch_size, self.total - index * batch_size)
                minibatch_sums = torch.zeros_like(sums)
                for outputs in self.backend.forward_backward(
                    [(indices, count) for indices in index_chunks], self._loss
                ):
                    minibatch_sums += outputs["losses"].double()
                norm = float(self.backend.optimizer_step(rate))
                if not math.isfinite(norm):
                    names = format_names(self.backend.bad_gradients()) or "all together"
                    self.skips.record_skip(
                        lambda: f"step {step}, epoch {epoch}, minibatch {index}: the gradient of {names} is not finite"  # noqa: B023
                    )
                    continue
                self.skips.record_step()
                sums += minibatch_sums
                norms += norm
                updates += 1
        if self.world_size > 1:
            sums = self.all_reduce(sums)
        num_updates = max(updates, 1)
        policy_loss, mean_value_loss = (sums / num_updates).tolist()
        self.updates += 1
        metrics = {"loss": policy_loss, "grad_norm": norms / num_updates, "lr": rate, "updates": float(updates)}
        metrics |= self.skips.pop_metrics()
        if "returns" in self.demos:
            metrics["value_loss"] = mean_value_loss
        if self.holdout is not None:
            rows = torch.arange(len(self.holdout["actions"]), device=self.device)
            index_chunks = rows.split(self.cfg.actor.micro_batch_size or self.cfg.actor.global_batch_size)
            losses = [
                self.backend.evaluate(self._losses, (self.holdout, indices, len(rows)))[0] for indices in index_chunks
            ]
            metrics["holdout_loss"] = float(sum(losses))
        return metrics

    def _loss(self, module: nn.Module, micro_batch: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, Metrics]:
        """Returns a micro-batch's summand of the loss of a minibatch with `count` rows, and the loss terms. An empty
        micro-batch has loss 0.
        """
        indices, count = micro_batch
        rows = indices.to(self.device) if indices.numel() else torch.zeros(1, dtype=torch.int64, device=self.device)
        losses = self._losses(module, (self.demos, rows, count))
        loss = losses[0] + self.value_coef * losses[1]
        if not indices.numel():
            return 0.0 * loss, {"losses": torch.zeros(2, device=self.device)}
        return loss, {"losses": torch.stack(losses)}

    def _losses(self, module: nn.Module, batch_rows: tuple[Batch, torch.Tensor, int]) -> list[torch.Tensor]:
        """Returns the summands that rows of a batch contribute to the policy loss and the value loss of a minibatch
        with `count` rows.
        """
        batch, indices, count = batch_rows
        obs, actions, has_returns = take(batch["obs"], indices), batch["actions"][indices], "returns" in batch
        inputs = {"obs": obs, "actions": actions, "is_pad": batch["is_pad"][indices]}
        inputs |= {name: batch[name][indices] for name in self._extra_columns(batch)}

        def compute_losses(policy: Policy) -> list[torch.Tensor]:
            outputs = policy.default_forward(inputs, compute_logprobs=False, compute_values=True) if has_returns else {}
            if self.loss_type == "nll":
                loss = policy.bc_loss(inputs).sum() / count
            else:
                mean_actions = policy.mean_action(obs)
                if torch.is_grad_enabled() and not mean_actions.requires_grad:
                    raise ConfigError(
                        f"algorithm.bc_loss is 'mse', and the actions of model_type {self.cfg.actor.model.model_type} have no "
                        "gradient; choose nll"
                    )
                loss = (mean_actions - actions[:, : policy.chunk]).square().mean((1, 2)).sum() / count
            if not has_returns:
                return [loss, torch.zeros_like(loss)]
            mask = torch.ones_like(outputs["values"], dtype=torch.bool)[:, None]
            value_term, _ = value_loss(
                values=outputs["values"][:, None], returns=batch["returns"][indices][:, None], loss_mask=mask,
                global_tokens=torch.tensor(float(count), device=self.device),
            )  # fmt: skip
            return [loss, value_term]

        return module(compute_losses)

    def evaluate(self) -> dict[str, float]:
        """Evaluates the current weights on `env.eval` with deterministic actions; returns the metrics.

        All ranks must call the method. Each plays a part, except that sharded weights are gathered into a separate policy of
        rank 0, which plays alone.
        """
        policy, parts = self.policy, self.world_size
        if self.backend.lockstep:
            weights, parts = self._gather_weights(), 1
            if self.rank == 0:
                policy = build_model(policy_section(self.cfg.actor, self.device), *spaces_of(self.cfg)).to(self.device)
                policy.load_state_dict(weights)
        policy.eval()
        try:
            rows = (
                evaluation_rows(self.cfg, policy, self.seed, self.device, self.rank, parts) if self.rank < parts else []
            )
        finally:
            policy.train()
        return evaluation_metrics(self.cfg, [rows] if self.world_size == 1 else self.all_gather_object(rows))
