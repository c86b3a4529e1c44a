"""SftActor: one data-parallel rank of the trainer of a run on demonstrations."""

from __future__ import annotations

from typing import Any

import torch

from rlhpc.algorithms.losses import aggregate
from rlhpc.language.config import SftConfig
from rlhpc.language.data import PromptDataset, PromptSampler, PromptTokenizer, make_dataset
from rlhpc.language.roles.actor import LanguageActor
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.pictures import Pictures
from rlhpc.language.tokens.scores import TokenScores
from rlhpc.language.tokens.trainer import TokenTrainer


class SftActor(LanguageActor[SftConfig]):
    """Trains on the demonstrations of a dataset."""

    backend: TokenTrainer

    def init_worker(self, total_steps: int) -> dict[str, Any]:
        """Loads model, optimizer and dataset.

        Args:
            total_steps: Steps of the whole run, for the learning rate.

        Returns:
            Facts: trainable parameters.
        """
        self.backend = self._load_model(total_steps, lambda: TokenTrainer(self.cfg, self))
        data = self.cfg.data
        self.encoder = PromptTokenizer(
            self.tokenizer, data.max_prompt_tokens, data.overlong_prompts, data.train.chat_template
        )
        self.dataset: PromptDataset = make_dataset(data.train, "train", demonstrations=True)
        if self.encoder.overlong == "drop":
            self.dataset = self.encoder.fitting(self.dataset, demonstrations=True, max_tokens=self.max_tokens)
        self.sampler = PromptSampler(len(self.dataset), data.prompts_per_step, self.seed)
        return {"parameters": self.backend.parameters_trained}

    def imitate(self, step: int) -> dict[str, float]:
        """One optimizer step of SFT on this step's demonstrations: the mean of −log p over their tokens.

        Returns:
            Metrics, the same on all ranks.
        """
        samples, masks, seen, count = [], [], [], self.cfg.data.prompts_per_step
        for draw in range(self.data, count, self.sizes.data):
            index = self.sampler.at((step - 1) * count + draw)
            prompt = self.dataset[index]
            encoded = self.encoder.encode_demonstration(prompt, self.max_tokens)
            assert encoded is not None, "those that do not fit are dropped at the start"
            ids, mask, at = encoded
            samples.append(ids)
            masks.append(mask)
            seen.append(self.encoder.seen(prompt, at))
        whole = self._shared(TokenBatch.of(samples, masks, pad_id=self.pad, pictures=Pictures.of(seen)))
        tokens, _ = self._counted(whole)

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value = aggregate(
                -batch.padded(scores.logprobs), batch.padded(batch.mask), "token-mean", global_tokens=tokens
            )
            return value, {"loss": value.detach()}

        batches = [batch for _, batch in self._micro_batches(whole)]
        return self._only_step(step, self.backend.forward_backward(batches, loss), tokens, whole)
