"""Log-probs and entropies of tokens from a causal model's logits, without a second `[B, T, V]` tensor in float32.

For a vocabulary of 150 000 and 16 000 tokens, logits in bfloat16 are 5 GB; log_softmax in float32 would add 10 GB forward
and 10 GB backward. Here the logits are read in chunks of rows, forward and again backward; the one tensor of their
size that is added is their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhpc.language.tokens.batches import TokenBatch

#: Elements of a chunk in float32 (64 MiB).
_CHUNK = 1 << 24
#: Makes of logits `[N, W, V]`, with gradients, and the batch that they are of, one value per token: `[T]` float32.
Reading = Callable[[torch.Tensor, TokenBatch], torch.Tensor]


@dataclass
class TokenScores:
    """What one forward pass says of a batch's tokens, `[T]`, one after the other as in the batch; 0 for a sample's first.

    Attributes:
        logprobs: log p(token t | tokens before it in its sample) at the temperature asked for.
        entropy: Of that distribution, where asked for.
        read: What else was made of the logits, where asked for.
        values: Of the state before the token, in float32, where the model has a head for them.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    read: torch.Tensor | None = None
    values: torch.Tensor | None = None


def token_scores(
    model: nn.Module,
    batch: TokenBatch,
    temperature: float = 1.0,
    entropy: bool = False,
    reading: Reading | None = None,
) -> TokenScores:
    """One forward pass of a Hugging Face causal language model.

    The model gets a rectangle, and neither mask nor positions: padding is on the right, so a token never attends to it, and
    the model's own positions 0, 1, 2, … are right. That keeps the fast causal attention kernels.

    Args:
        model: Takes `input_ids` `[N, W]` and gives `logits` `[N, W, V]`.
        batch: What is scored.
        temperature: Divides the logits.
        entropy: Whether entropies are wanted.
        reading: Makes something else of the logits, as they are before the temperature divides them.
    """
    ids = batch.padded(batch.ids, batch.pad_id)
    found = model(input_ids=ids, use_cache=False)
    logits, values = found["logits"], found.get("token_values")
    scores = scores_of_logits(logits, ids, batch.attended(), temperature, entropy)
    entropies = None if scores.entropy is None else batch.flat(scores.entropy)
    if values is not None:
        values = batch.flat(nn.functional.pad(values[:, :-1], (1, 0)))
    read = None if reading is None else reading(logits, batch)
    return TokenScores(batch.flat(scores.logprobs), entropies, read, values)


def scores_of_logits(
    logits: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
) -> TokenScores:
    """Scores as rectangles `[B, T]`, padded on the right. `logits[:, t]` says what token t + 1 is; the result is shifted, so
    that column t is about token t. Column 0, and what stands on padding, is 0."""
    B, T, V = logits.shape
    targets = torch.roll(input_ids, -1, dims=1)  # the last column's target is the first token: dropped below
    logprobs, entropies = _Scores.apply(logits.reshape(B * T, V), targets.reshape(-1), 1.0 / temperature, entropy)
    predicted = attention_mask[:, 1:].bool()

    def align(values: torch.Tensor) -> torch.Tensor:
        kept = torch.where(predicted, values.view(B, T)[:, :-1], 0.0)
        return nn.functional.pad(kept, (1, 0))

    return TokenScores(align(logprobs), align(entropies) if entropy else None)


class _Scores(torch.autograd.Function):
    """Rows of logits `[N, V]` → log p(target) `[N]`, entropy `[N]`, in float32."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, scale: float, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        N, V = logits.shape
        logprobs = logits.new_empty(N, dtype=torch.float32)
        log_sum = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs) if entropy else logprobs.new_empty(0)
        for rows in chunks(N, V):
            z = scaled(logits[rows], scale)
            log_sum[rows] = torch.logsumexp(z, dim=-1)
            logprobs[rows] = z.gather(1, targets[rows, None]).squeeze(1) - log_sum[rows]
            if entropy:  # −Σ p log p; log Σ e^z − Σ p z would cancel where logits are large
                log_p = z - log_sum[rows, None]
                entropies[rows] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.save_for_backward(logits, targets, log_sum, entropies)
        ctx.scale, ctx.entropy = scale, entropy
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, log_sum, entropies = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in chunks(*logits.shape):
            # d log p(y) / dz = onehot(y) − p; dH / dz = −p (log p + H)
            log_p = scaled(logits[rows], ctx.scale) - log_sum[rows, None]
            p = log_p.exp()
            weight = -grad_logprobs[rows, None]
            if ctx.entropy:
                weight = weight - grad_entropy[rows, None] * log_p.add_(entropies[rows, None])
            p.mul_(weight).scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
            grad[rows] = p.mul_(ctx.scale) if ctx.scale != 1.0 else p
        return grad, None, None, None


def scaled(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """In float32."""
    z = logits.float()
    return z * scale if scale != 1.0 else z


def chunks(rows: int, width: int) -> list[slice]:
    """Cuts rows so that a part is small enough to be computed in float32."""
    size = max(1, _CHUNK // width)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
