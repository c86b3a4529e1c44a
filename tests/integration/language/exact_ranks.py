"""What the ranks of the agreement tests do: generate with the engine hf, score and train on the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlhpc import Worker
from rlhpc.language.engines.base import Request, SamplingParams
from rlhpc.language.engines.hf import HFRollout
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.micro_batching import micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer


def requests(step: int, prompts: int = 5) -> list[Request]:
    """Twelve of prompts with 1 to 40 tokens, of which some are equal, for answers of up to 60 tokens in every fifth step."""
    drawn = np.random.default_rng(step)
    texts = [tuple(drawn.integers(3, 60, int(drawn.integers(1, 41))).tolist()) for _ in range(prompts)]
    lengths = drawn.integers(1, 13 if step % 5 else 61, 12).tolist()
    temperature = (1.0, 0.7)[step % 2]
    return [
        Request(index, texts[index % prompts], SamplingParams(length, temperature=temperature), seed=97 * step + index)
        for index, length in enumerate(lengths)
    ]


def agree(worker: Worker, cfg: Any, steps: int) -> dict[str, Any]:
    """Alternates generation and updates; returns how many log-probs differ between engine and trainer, by how much, in
    scoring and in the update; and how far the weights moved."""
    torch.manual_seed(0)
    trainer = TokenTrainer(cfg, worker)
    sizes = trainer.backend.sizes
    engine = None
    if worker.rank == 0:
        engine = HFRollout(cfg, model_path=cfg.actor.model.model_path, device=trainer.device)
    threads = torch.get_num_threads()
    largest = [0.0, 0.0]
    unequal, tokens, mean, first_weights = [0, 0], 0, 0.0, {}
    for step in range(steps):
        weights = {name: tensor.clone() for name, tensor in trainer.named_weights()}
        first_weights = first_weights or weights
        answers: list[Any] = []
        temperature = (1.0, 0.7)[step % 2]
        if engine is not None:
            engine.update_weights(step, weights.items())
            asked = {request.id: request for request in requests(step)}
            engine.add(asked.values())
            done = []
            while len(done) < len(asked):
                done += engine.step()
            answers = [
                (asked[one.id].prompt_ids, one.token_ids, one.logprobs) for one in sorted(done, key=lambda o: o.id)
            ]
        answers = worker.all_gather_object(answers)[0] if worker.world_size > 1 else answers
        mine = answers[sizes.data_of(worker.rank) :: sizes.data]
        batch = TokenBatch.from_sequences(
            [[*prompt, *response] for prompt, response, _ in mine],
            [[False] * len(prompt) + [True] * len(response) for prompt, response, _ in mine],
            {"rollout": [[0.0] * len(prompt) + logprobs for prompt, _, logprobs in mine]},
        )
        batch.group = batch.episode % 5
        parts = [batch.select(part) for part in micro_batches(batch.lengths, 90 + 30 * (step % 5))]
        most = int(worker.all_reduce(torch.tensor(float(len(parts))), "max")) if worker.world_size > 1 else len(parts)
        parts += [batch.empty_sample()] * (most - len(parts))

        def compare(scores: torch.Tensor, part: TokenBatch, kind: int) -> int:
            difference = (scores - part.columns["rollout"].to(scores.device))[part.mask].abs()
            unequal[kind] += int((difference != 0).sum())
            largest[kind] = max([largest[kind], *difference.tolist()])
            return difference

        for part in parts:
            scores = trainer.forward(part, temperature=temperature).logprobs.cpu()
            mean += float(compare(scores, part, 0).sum())
            tokens += int(part.mask.sum())

        def loss(scores: TokenScores, part: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            compare(scores.logprobs.detach(), part, 1)
            sign = torch.where(part.ids % 2 == 0, 1.0, -1.0)
            return -(sign * scores.logprobs).sum() / 300, {}

        trainer.forward_backward(parts, loss, temperature=temperature, compute_entropy=step % 3 == 0)
        trainer.optimizer_step(1e-3)
    last_weights = dict(trainer.named_weights())
    moved = max(float((last_weights[name] - weight).abs().max()) for name, weight in first_weights.items())
    return {
        "unequal": unequal, "largest": largest, "tokens": tokens, "mean": mean / max(tokens, 1), "moved": moved,
        "threads": threads,
    }  # fmt: skip


class Agreeing(Worker):
    """A rank that generates and trains."""

    def agree(self, cfg: Any, steps: int) -> dict[str, Any]:
        torch.set_num_threads(2)
        return agree(self, cfg, steps)
