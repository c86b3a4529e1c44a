"""vLLM's log-probs as the losses need them: after temperature, and before top-p and top-k; of what it draws, and of what it is
given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.language.tokens.divergence import FLOOR
from rlhpc.language.tokens.rows import chunks, scaled


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
    """What vLLM takes from log-probs: those of the tokens drawn or given, and of the most likely ones where it is asked to.

    Its own function also ranks them, which nobody asks for here, and compiles itself for that: on a CPU many seconds at the
    first step of every process.
    """
    from vllm.v1.outputs import LogprobsTensors

    tokens = token_ids.unsqueeze(-1)
    found = logprobs.gather(-1, tokens)
    if num_logprobs:
        most, theirs = logprobs.topk(num_logprobs, dim=-1)
        tokens, found = torch.cat([tokens, theirs], -1), torch.cat([found, most], -1)
    return LogprobsTensors(tokens.to(torch.int32), found, torch.zeros_like(token_ids))


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


def merged(logits: Tensor, top: int, width: int, temperature: float) -> Tensor:
    """The most likely tokens' log-probs, and that of all others together as of one token more, in the form of logits.

    Their exponentials sum up to 1, so a softmax leaves them as they are. The others' comes from a sum over these, and not from
    what the most likely ones leave of 1, which float32 does not know where it is little.

    Args:
        logits: `[M, V]`.
        top: k: how many tokens, at most `width`.
        width: Ids from here on are left out.
        temperature: Divides the logits.

    Returns:
        `[M, width + 1]` float32: finite for k tokens and in the last column, the others'; -inf for these themselves.
    """
    found = torch.full((len(logits), width + 1), -math.inf, device=logits.device)
    for part in chunks(len(logits), width, logits.device):
        logprobs = torch.log_softmax(scaled(logits[part, :width], 1.0 / temperature), dim=-1)
        most, ids = logprobs.topk(top, dim=-1)
        rest = logprobs.scatter(1, ids, -math.inf).logsumexp(-1)
        found[part] = found[part].scatter(1, ids, most.clamp_min(FLOOR))
        found[part, width] = rest.clamp_min(FLOOR)
    return found


def say_outcomes(worker: Any, top: int, width: int, temperature: float) -> None:
    """Has vLLM's model say what a teacher does, wherever logits are asked of it: at a temperature, which vLLM gives to what it
    draws alone, and with all but the most likely tokens as one, where there is a number of these.

    Args:
        worker: vLLM's; whichever model runner it has takes a prompt's log-probs from its model's `compute_logits`.
        top: k, or 0 for logits as they are.
        width: See `merged`.
        temperature: Divides the logits.
    """
    model, sampler = worker.model_runner.get_model(), worker.model_runner.sampler
    inner = model.compute_logits

    def outcomes(*args: Any, **kwargs: Any) -> Tensor:
        logits = inner(*args, **kwargs)
        return merged(logits, top, width, temperature) if top else scaled(logits, 1.0 / temperature)

    model.compute_logits = outcomes
    if isinstance(getattr(sampler, "topk_topp_sampler", None), nn.Module):  # the first model runner's
        sampler.gather_logprobs = _own_logprobs
