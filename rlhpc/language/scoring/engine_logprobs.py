"""What a teacher says of tokens, by an engine: in the form of `LogProbs` and `TopLogProbs`."""

from __future__ import annotations

import itertools

import torch

from rlhpc.language.algorithm.base import Scorer
from rlhpc.language.config import GrpoConfig
from rlhpc.language.data.builtin import resolve_model
from rlhpc.language.engines.vllm_scores import VLLMScores
from rlhpc.language.scoring.group import ScoringGroup
from rlhpc.language.scoring.logprobs import vocabulary_of
from rlhpc.language.scoring.own_engine import engine_config, explained
from rlhpc.language.tokens.batches import TokenBatch


class EngineLogProbs(Scorer):
    """The teacher's log-probs of the tokens that another model drew or, with `k`, of the most likely ones in their place and
    of all others together, by vLLM, at `rollout.temperature`.

    Args:
        k: How many tokens; 0 for those that were drawn.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup, k: int = 0) -> None:
        super().__init__(cfg, device, group)
        self.told, own = group, engine_config(cfg.teacher, takes_turns=cfg.actor.offload_in_rollout)
        with explained(group):
            self.engine = VLLMScores(
                own, model_path=resolve_model(cfg.teacher.model), device=device, seed=cfg.runner.seed,
                temperature=cfg.rollout.temperature, top=k, vocabulary=vocabulary_of(cfg) if k else None,
                max_tokens=group.max_tokens,
            )  # fmt: skip

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """`[T]`, of all tokens; or `[T, k + 1, 2]`, of those that are trained on, as from `top_logprobs`."""
        k = self.engine.top
        ids, wanted = batch.ids.cpu(), torch.ones(batch.tokens, dtype=torch.bool)
        if k:
            wanted = torch.zeros_like(wanted).index_fill_(0, batch.predictors()[0].cpu(), True)
        texts, places = list[list[int]](), list[torch.Tensor]()
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            mine = 1 + torch.nonzero(wanted[start + 1 : end]).flatten()
            if len(mine):
                texts.append(ids[start : start + int(mine[-1]) + 1].tolist())
                places.append(start + mine)
        with explained(self.told):
            found = self.engine.score(texts)
        values = torch.zeros(batch.tokens, *((k + 1, 2) if k else ()))
        for said, place, text in zip(found, places, texts, strict=True):
            values[place] = said[place - (int(place[-1]) + 1 - len(text)) - 1]
        return values

    def offload(self) -> None:
        """See `Scorer.offload`."""
        self.engine.offload()

    def reload(self) -> None:
        """See `Scorer.reload`."""
        self.engine.reload()

    def close(self) -> None:
        """See `Scorer.close`."""
        self.engine.close()
