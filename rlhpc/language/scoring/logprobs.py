"""The log-probs that a frozen model gives to tokens: what a reference or a teacher says of them."""

from __future__ import annotations

import torch

from rlhpc.language.algorithm.base import Scorer
from rlhpc.language.config import GrpoConfig
from rlhpc.language.scoring.groups import ScoringGroup
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.model import compute_dtype, load_causal_lm
from rlhpc.language.tokens.scores import token_scores


class LogProbs(Scorer):
    """A causal language model's log-probs of the tokens that another one drew, at `rollout.temperature`."""

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        super().__init__(cfg, device, group)
        model = load_causal_lm(group.model, dtype=compute_dtype(group.model))
        self.model = model.eval().requires_grad_(False).to(device)
        self.temperature = cfg.rollout.temperature

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """See `Scorer.score`."""
        return token_scores(self.model, batch, self.temperature).logprobs

    def offload(self) -> None:
        """See `Scorer.offload`."""
        self.model.to("cpu")

    def reload(self) -> None:
        """See `Scorer.reload`."""
        self.model.to(self.device)
