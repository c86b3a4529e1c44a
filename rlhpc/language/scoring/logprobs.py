"""The log-probs that a frozen model gives to tokens, and to others in their place: what a reference or a teacher says."""

from __future__ import annotations

import itertools

import torch

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.vllm_logprobs import VLLMScores
from rlhpc.language.hugging_face import transformers
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.models.divergence import top_logprobs
from rlhpc.language.models.loading import compute_dtype, load_causal_lm
from rlhpc.language.models.logprobs import logit_rows, token_scores
from rlhpc.language.models.packing import pack, packs, reads_rows, unpack
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.groups import engine_config, explained
from rlhpc.language.scoring.registry import Scorer, ScoringGroup


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
