"""The log-probs that a frozen model gives to tokens, and to others in their place: what a reference or a teacher says."""

from __future__ import annotations

import torch

from rlhpc.language.algorithm.base import Scorer
from rlhpc.language.config import GrpoConfig
from rlhpc.language.hugging_face import transformers
from rlhpc.language.scoring.group import ScoringGroup
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.divergence import top_logprobs
from rlhpc.language.tokens.model import compute_dtype, load_causal_lm
from rlhpc.language.tokens.packing import pack, packs, reads_rows, unpack
from rlhpc.language.tokens.scores import logit_rows, token_scores


class LogProbs(Scorer):
    """A causal language model's log-probs of the tokens that another one drew, at `rollout.temperature`."""

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        super().__init__(cfg, device, group)
        section = group.model_section
        dtype = compute_dtype(group.model, device, section)
        model = load_causal_lm(group.model, dtype=dtype, key=f"{section}.model_path")
        packed = pack(model)
        self.model = model.eval().requires_grad_(False).to(device)
        if packed and not reads_rows(self.model, device, dtype):
            unpack(self.model)
        self.packed = packs(self.model)
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


class TopLogProbs(LogProbs):
    """For each token that is trained on, the log-probs of the `k` most likely ones in its place, and of all others together,
    at `rollout.temperature`: see `top_logprobs`.

    Args:
        k: How many tokens.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup, k: int = 64) -> None:
        super().__init__(cfg, device, group)
        self.k, self.vocabulary = k, vocabulary_of(cfg)

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """`[T, k + 1, 2]`."""
        rows = logit_rows(self.model, batch)
        return top_logprobs(rows, batch, self.k, self.temperature, self.vocabulary)


def vocabulary_of(cfg: GrpoConfig) -> int | None:
    """How many logits the model that is trained has; another one with the same tokenizer may be filled up to more."""
    model = cfg.actor.model
    found = transformers().AutoConfig.from_pretrained(str(model.model_path), trust_remote_code=model.trust_remote_code)
    size = getattr(found.get_text_config(), "vocab_size", None)
    return None if size is None else int(size)
