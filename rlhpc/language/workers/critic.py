"""Critic worker: rank of the critic's trainer. The critic estimates the value of the state before each token."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhpc.language.algorithms.base import RETURNS as RETURN_OF
from rlhpc.language.algorithms.base import VALUES, MinibatchCounts, length_limit
from rlhpc.language.algorithms.policy_gradient import value_loss_share
from rlhpc.language.config.run import GrpoConfig, minibatch_size, responses_per_step
from rlhpc.language.config.training import LanguageActorConfig
from rlhpc.language.models.micro_batching import minibatches, values_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.rollout.sample_group import BlockChannel, SampleGroup
from rlhpc.language.scoring.groups import CRITIC
from rlhpc.language.training.prompt_dispatch import GROUPS, RETURNS, PromptMap, channel_to
from rlhpc.language.training.trainer import ScalarTrainer
from rlhpc.language.workers.actor import LanguageActor
from rlhpc.language.workers.scoring import GroupInbox, send_column
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.runtime.text import format_names
from rlhpc.runtime.trace_recorder import span, traced


class CriticWorker(LanguageActor[GrpoConfig]):
    """Rank of the critic, which computes the values of a step's groups on arrival, then trains on the actors' returns."""

    section_name = CRITIC
    backend: ScalarTrainer

    @property
    def section(self) -> LanguageActorConfig:
        """Training section of the configuration."""
        return self.cfg.critic

    def init_worker(self, total_steps: int, prompts: PromptMap) -> dict[str, Any]:
        """Loads model and optimizer.

        Args:
            total_steps: Number of steps of the run, for the learning rate.
            prompts: Map of prompts to ranks.

        Returns:
            `critic_parameters`: number of trained parameters.
        """
        self.prompts = prompts
        self._stored_groups: dict[int, dict[bytes, TokenBatch]] = {}
        seed = self.cfg.runner.seed
        trainer = self._load_model(
            total_steps, lambda: ScalarTrainer(self.section, self, seed=seed, key=CRITIC, per_input=True)
        )
        return {"critic_parameters": trainer.num_trained_parameters}

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        channel = BlockChannel(self.connect_channel(channel_to(CRITIC)), self, self.sizes)
        self._inbox = GroupInbox(channel, f"{CRITIC}-{self.rank}", self.prompts.rollout_name)
        self._actors = self.connect_channel(GROUPS)
        self._returns = BlockChannel(self.connect_channel(RETURNS), self, self.sizes)
        self._stored_groups.clear()

    # -- values ---------------------------------------------------------------------------------------------------

    def serve(self, step: int) -> dict[str, float]:
        """Computes the values of this rank's groups of a step on arrival, and sends the values to the actors.

        The groups are stored for `update`.

        Returns:
            `busy_s`: seconds of computation; `tokens`: number of tokens.
        """
        valued_groups, busy_s, num_tokens = dict[int, dict[bytes, TokenBatch]](), 0.0, 0
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        prompt_positions = self.prompts.share_of(CRITIC, self.data)
        # With several ranks, forward passes are collective, so each rank waits for all of its groups.
        for groups in self._inbox.batches(step, prompt_positions, deadline, only_arrived=self.world_size > 1):
            batch_start = time.perf_counter()
            with span("values", "judge", batch=len(groups)):
                num_tokens += self._compute_values(groups, valued_groups)
            busy_s += time.perf_counter() - batch_start
        self._stored_groups = dict(sorted(valued_groups.items()))
        return {"busy_s": busy_s, "tokens": float(num_tokens)}

    def _compute_values(self, groups: list[SampleGroup], stored_groups: dict[int, dict[bytes, TokenBatch]]) -> int:
        """Computes the values of groups, sends the values to the actors, and stores the groups in `stored_groups`.

        Returns:
            Number of tokens.
        """
        batch = TokenBatch.joined([group.batch for group in groups]).with_pad_id(self.pad)
        values = values_of(self.backend.forward, self._micro_batches(batch), batch, CRITIC)
        batch.columns[VALUES] = values
        for group, group_batch in zip(groups, batch.split([len(group.batch) for group in groups]), strict=True):
            stored_groups.setdefault(group.position, {})[group.answers_digest] = group_batch
        if self.is_leader:
            send_column(self._actors, self.prompts, groups, CRITIC, values)
        return batch.tokens

    # -- training -------------------------------------------------------------------------------------------------

    @traced("update", "train")
    def update(self, step: int) -> dict[str, float]:
        """Trains on the groups that `serve` stored, once the actors have sent the returns.

        Returns:
            Metrics, the same on all ranks.

        Raises:
            NonFinite: A gradient is not finite.
        """
        batches = self._await_returns(step)
        cfg, start_time = self.cfg, time.perf_counter()
        step_batch = TokenBatch.joined(batches)
        num_responses, responses_per_minibatch = responses_per_step(cfg), minibatch_size(cfg, cfg.critic)
        learning_rate = self._compute_learning_rate(step)
        named_minibatches = minibatches(
            step_batch, num_responses, responses_per_minibatch, cfg.critic.update_epochs, (self.seed, step)
        )
        metrics, _ = self._run_minibatches(
            ((f"step {step}, {minibatch_name}", minibatch) for minibatch_name, minibatch in named_minibatches),
            length_limit(cfg),
            partial(self._train_minibatch, learning_rate),
        )
        self.version = step
        return {
            **metrics,
            **self._compute_value_metrics(step_batch),
            "lr": learning_rate,
            "update_s": time.perf_counter() - start_time,
        }

    def _await_returns(self, step: int) -> list[TokenBatch]:
        """Waits for the returns of all stored groups.

        Returns:
            The trained samples of each group with the column of returns, in the order of positions.

        Raises:
            DeadlineExceeded: Returns did not arrive within `runner.step_timeout_s`.
        """
        valued_groups = self._stored_groups
        self._stored_groups = {}
        batches = dict[int, TokenBatch]()
        deadline, missing_positions = time.monotonic() + self.cfg.runner.step_timeout_s, set(valued_groups)
        if not missing_positions:
            raise RlhpcError(f"step {step}: the critic has valued no groups that it could be trained on")
        while missing_positions:
            try:
                message = self._returns.get(max(0.0, deadline - time.monotonic()))
            except DeadlineExceeded:
                raise DeadlineExceeded(
                    f"step {step}: no returns came from {self.prompts.actor_name} for prompts "
                    f"{format_names(sorted(missing_positions), limit=8)} within "
                    "runner.step_timeout_s"
                ) from None
            if message["step"] != step:
                continue
            batch = valued_groups[message["position"]][message["digest"]]
            batch = batch.select(torch.nonzero(torch.from_numpy(message["members"].copy())).flatten())
            batch.columns[RETURN_OF] = torch.from_numpy(message["values"].copy())
            batches[message["position"]] = batch
            missing_positions.discard(message["position"])
        return [batches[prompt_position] for prompt_position in valued_groups]

    def _train_minibatch(self, rate: float, batch: TokenBatch, counts: MinibatchCounts, label: str) -> dict[str, float]:
        """Runs one optimizer step on a minibatch of all ranks; returns its metrics."""
        batch = self._balance_load(batch)

        def compute_loss(
            predictions: torch.Tensor, micro_batch: TokenBatch
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss_value, metrics = value_loss_share(predictions, micro_batch, self.cfg.algorithm, counts)
            return loss_value, {"loss": loss_value.detach(), **metrics}

        metrics = self.backend.forward_backward(
            [micro_batch for _, micro_batch in self._micro_batches(batch)], compute_loss
        )
        return self._run_optimizer_step(rate, self._reduce_metrics(metrics), counts.tokens, label, batch)

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes model and optimizer below the folder `critic`."""
        path = Path(folder) / CRITIC
        path.mkdir(exist_ok=True)
        super().save(str(path))

    def load(self, folder: str) -> None:
        """Restores a checkpoint of any world size."""
        super().load(str(Path(folder) / CRITIC))
