"""vLLM's log-probs as the losses need them: after temperature, and before top-p and top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _BeforeFilters(nn.Module):
    """vLLM's last sampling stage, with log-probs of the distribution before top-p and top-k."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        inner.logprobs_mode = "raw_logprobs"  # so that it computes none itself
        self.inner = inner

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        tokens, _ = self.inner(logits, *args, **kwargs)
        return tokens, logprobs


def _own_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
    """What vLLM takes from a step's log-probs: those of the tokens drawn.

    Its own function also ranks them, which nobody asks for here, and compiles itself for that: on a CPU many seconds at the
    first step of every process.
    """
    from vllm.v1.outputs import LogprobsTensors

    tokens = token_ids.unsqueeze(-1)
    ranks = torch.zeros_like(token_ids)
    return LogprobsTensors(tokens.to(torch.int32), logprobs.gather(-1, tokens), ranks)


def log_before_filters(worker: Any) -> bool:
    """Makes vLLM's log-probs those after temperature and before top-p and top-k; whether that could be done.

    None of its modes does: `raw_logprobs` are before temperature, `processed_logprobs` after the filters.
    """
    sampler = worker.model_runner.sampler
    stage = getattr(sampler, "topk_topp_sampler", None)
    if isinstance(stage, nn.Module):
        sampler.topk_topp_sampler = _BeforeFilters(stage)
        sampler.gather_logprobs = _own_logprobs
        return True
    inner = getattr(sampler, "_sample_random", None)  # the second model runner
    if inner is None:
        return False

    def sample(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tokens, _ = inner(logits.clone(), *args, **kwargs)
        return tokens, logits

    sampler._sample_random = sample
    return True
