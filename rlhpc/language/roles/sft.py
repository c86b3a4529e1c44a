"""SftActor: one data-parallel rank of the trainer of a run on demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhpc.language.config import SftConfig
from rlhpc.language.data import PromptSampler, PromptTokenizer
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.roles.evaluation import EvaluatedActor
from rlhpc.language.roles.opening import open_demonstrations
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.pictures import Pictures
from rlhpc.language.tokens.scores import TokenScores
from rlhpc.language.tokens.trainer import TokenTrainer


class SftActor(EvaluatedActor[SftConfig]):
    """Trains on the demonstrations of a dataset."""

    def init_worker(self, total_steps: int) -> dict[str, Any]:
        """Loads model, optimizer and dataset.

        Args:
            total_steps: Steps of the whole run, for the learning rate.

        Returns:
            Facts: trainable parameters.
        """
        self.backend = self._load_model(total_steps, lambda: TokenTrainer(self.cfg, self, dropout=True))
        self.encoder, self.dataset = open_demonstrations(self.cfg, self.cfg.data, self.tokenizer)
        self.sampler = PromptSampler(len(self.dataset), self.cfg.data.prompts_per_step, self.seed)
        if self.cfg.runner.val_check_interval > 0:
            self.held_out = open_demonstrations(self.cfg, self.cfg.data, self.tokenizer, holdout=True)
        return {"parameters": self.backend.parameters_trained, "dropped": self.dataset.dropped}

    def imitate(self, step: int) -> dict[str, float]:
        """One optimizer step of SFT on this step's demonstrations: the mean of −log p over their tokens.

        Returns:
            Metrics, the same on all ranks.
        """
        rows = [self.dataset[place] for place in self.sampler.of_step(step, self.data, self.sizes.data)]
        demonstrations = self._batch_of(rows, self.encoder)
        counts = self._count(demonstrations)
        shared = self._shared(demonstrations)

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value = counts.loss(-scores.logprobs, batch, "token-mean")
            return value, {"loss": value.detach()}

        batches = [batch for _, batch in self._micro_batches(shared)]
        return self._only_step(step, self.backend.forward_backward(batches, loss), counts.tokens, shared)

    def validate(self) -> dict[str, float]:
        """The held-out loss with the present weights: the mean of −log p over all trained tokens of the held-out
        demonstrations, whatever ranks and micro-batches they are on.

        Returns:
            loss, tokens and rows, the same on all ranks.
        """
        encoder, dataset = self.held_out
        sums = torch.zeros(2, dtype=torch.float64)
        for places in self._held_out_places(len(dataset), self.cfg.data.prompts_per_step):
            rows = self._batch_of([dataset[place] for place in places], encoder)
            for _, batch in self._micro_batches(rows):
                losses = -self.backend.forward(batch).logprobs.cpu().double()
                sums += torch.stack([losses[batch.mask].sum(), batch.mask.sum().double()])
        loss, tokens = self._summed(sums).tolist()
        return {"loss": loss / max(tokens, 1.0), "tokens": tokens, "rows": float(len(dataset))}

    def _batch_of(self, rows: Sequence[Prompt], encoder: PromptTokenizer) -> TokenBatch:
        samples, masks, pictures = [], [], []
        for prompt in rows:
            encoded = encoder.encode_demonstration(prompt, self.max_tokens)
            assert encoded is not None, "those that do not fit are dropped at the start"
            ids, mask, at = encoded
            samples.append(ids)
            masks.append(mask)
            pictures.append(encoder.seen(prompt, at))
        return TokenBatch.of(samples, masks, pad_id=self.pad, pictures=Pictures.of(pictures))
