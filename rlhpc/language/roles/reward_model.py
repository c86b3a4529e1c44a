"""RewardModelActor: one data-parallel rank of the trainer of a reward model."""

from __future__ import annotations

from typing import Any

import torch

from rlhpc.algorithms.preference_losses import find_reward_loss
from rlhpc.config.typed import plain
from rlhpc.language.data import PromptSampler, PromptTokenizer
from rlhpc.language.preference_scores import (
    EACH,
    Suite,
    batch_of,
    cut,
    encoder_of,
    most_tokens,
    rewards_of,
    suites_of,
    training_rows,
)
from rlhpc.language.reward_config import RewardRunConfig
from rlhpc.language.roles.actor import LanguageActor
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.scalar import last_values
from rlhpc.language.tokens.trainer import ScalarTrainer


class RewardModelActor(LanguageActor[RewardRunConfig]):
    """Trains a reward model on the preferences, or labels, of a dataset."""

    backend: ScalarTrainer

    def init_worker(self, total_steps: int) -> dict[str, Any]:
        """Loads model, optimizer and datasets.

        Args:
            total_steps: Steps of the whole run, for the learning rate.

        Returns:
            Facts: trainable parameters.
        """
        cfg = self.cfg
        self.backend = self._load_model(total_steps, lambda: ScalarTrainer(cfg.actor, self, seed=cfg.runner.seed))
        self.loss, self.form = find_reward_loss(cfg.algorithm.loss_type, plain(cfg.algorithm.loss_kwargs))
        self.most = most_tokens(self.max_tokens, self.form)
        self.encoder: PromptTokenizer = encoder_of(cfg, cfg.data.train, self.tokenizer, "data.train")
        self.dataset = training_rows(cfg)
        dropped = self.dataset.fit(self.encoder, self.most)
        self.sampler = PromptSampler(len(self.dataset), cfg.data.prompts_per_step, self.seed)
        self.suites: dict[str, Suite] = {}
        if cfg.runner.val_check_interval > 0:
            self.suites = suites_of(cfg, self.tokenizer, self.form)
        return {"parameters": self.backend.parameters_trained, "dropped": dropped}

    def prefer(self, step: int) -> dict[str, float]:
        """One optimizer step on this step's rows: the mean of their losses.

        Returns:
            Metrics, the same on all ranks.
        """
        count = self.cfg.data.prompts_per_step
        rows = [self.dataset[place] for place in self.sampler.of_step(step, self.data, self.sizes.data)]
        each = EACH[self.form]
        responses = batch_of(rows, self.encoder, self.most, self.pad)
        tokens = self._count(responses).tokens
        shared = self._shared(responses, each)

        def loss(values: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            rewards, targets = last_values(values, batch), batch.reward
            if not batch.tokens:
                rewards, targets = rewards[:0], targets[:0]
            metrics: dict[str, torch.Tensor] = {"reward": rewards.sum() / (count * each)}
            if self.form == "pairs":
                chosen, rejected = rewards.view(-1, 2).unbind(1)
                losses = self.loss(chosen, rejected, targets[::2])
                metrics |= {
                    "accuracy": (chosen > rejected).sum() / count,
                    "margin": (chosen - rejected).sum() / count,
                    "reward_chosen": chosen.sum() / count,
                    "reward_rejected": rejected.sum() / count,
                }
            else:
                losses = self.loss(rewards, targets)
                metrics["mse"] = (rewards - targets).square().sum() / count
            value = losses.sum() / count
            return value, {"loss": value, **metrics}

        batches = [batch for _, batch in self._evenly(cut(shared, each, self.max_tokens), shared)]
        return self._only_step(step, self.backend.forward_backward(batches, loss), tokens, shared)

    def validate(self) -> dict[str, list[dict[str, Any]]]:
        """The rewards of this rank's share of the suites' rows, with the present weights.

        Returns:
            Suite → rows, each with its `place` among all rows of the suite.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for name, suite in self.suites.items():
            places = list(range(self.data, len(suite.rows), self.sizes.data))
            rows = [suite.rows[place] for place in places]
            rewards = rewards_of(
                rows, suite.encoder, self.most, self.pad, self.max_tokens, self.backend.forward, self._evenly
            )
            if not self.leads:  # another says the same
                continue
            found[name] = [
                {
                    "place": place,
                    "rewards": own,
                    "target": row.target,
                    "level": row.prompt.level,
                    "prompt": row.prompt.question,
                }
                for place, row, own in zip(places, rows, rewards, strict=True)
            ]
        return found
