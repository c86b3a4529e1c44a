"""Log-probs and entropies of tokens, from a causal model's hidden states or from its logits.

For a vocabulary of 150 000 and 16 000 tokens, logits in bfloat16 are 5 GB; log_softmax in float32 would add 10 GB forward
and 10 GB backward. Where the head is a linear layer whose result the model gives as it is (`tokens.head`), logits are made of
the hidden states of the tokens that are trained on, in chunks, forward and again backward: no tensor has their size. With
other heads, and where a loss reads the logits itself, the model makes them whole; they are read in chunks of rows, and the one
tensor of their size that is added is their gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.head import linear_head
from rlhpc.language.tokens.packing import packs
from rlhpc.language.tokens.rows import chunks, gradient, said_of, scaled

#: Makes of logits `[N, W, V]`, with gradients, and the batch that they are of, one value per token: `[T]` float32.
Reading = Callable[[torch.Tensor, TokenBatch], torch.Tensor]


@dataclass
class TokenScores:
    """What one forward pass says of a batch's tokens, `[T]`, one after the other as in the batch; 0 for tokens that are not
    trained on, and for a sample's first.

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

    The model gets one row of all samples, if it can (`tokens.packing`), or a rectangle; never a mask, which keeps the fast
    causal attention kernels.

    Args:
        model: Takes `TokenBatch.inputs` and gives `logits` `[1, T, V]` or `[N, W, V]`.
        batch: What is scored.
        temperature: Divides the logits.
        entropy: Whether entropies are wanted.
        reading: Makes something else of the logits, as they are before the temperature divides them.
    """
    batch = batch.read_by(packs(model))
    where, places = batch.predictors()
    head = linear_head(model) if reading is None else None
    if head is None:
        found = model(**batch.inputs(), use_cache=False)
        said = scores_of_logits(found["logits"], places, batch.ids[where], temperature, entropy)
    else:
        with head.answering(places, batch.ids[where], temperature, entropy):
            found = model(**batch.inputs(), use_cache=False)
        said = found["logits"]
    every = said.new_zeros(batch.tokens, said.shape[1]).index_copy(0, where, said)
    values = found.get("token_values")
    if values is not None:
        values = batch.before(batch.of_tokens(values))
    read = None if reading is None else reading(found["logits"], batch)
    return TokenScores(every[:, 0], every[:, 1] if entropy else None, read, values)


def scores_of_logits(
    logits: torch.Tensor, places: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, entropy: bool = False
) -> torch.Tensor:
    """What whole logits say of some tokens.

    Args:
        logits: `[N, W, V]`.
        places: `[M]`: the lines among N × W that say what the tokens are.
        targets: `[M]`: these tokens.
        temperature: Divides the logits.
        entropy: Whether entropies are wanted.

    Returns:
        `[M, 1]` float32 log-probs, or `[M, 2]` with entropies.
    """
    flat = logits.flatten(0, -2)
    every = targets.new_zeros(len(flat)).index_copy(0, places, targets)
    found = _Scores.apply(flat, every, 1.0 / temperature, entropy)
    return torch.stack([one[places] for one in found[: 1 + entropy]], -1)


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
        for rows in chunks(N, V, logits.device):
            z = scaled(logits[rows], scale)
            logprobs[rows], log_sum[rows], found = said_of(z, targets[rows], entropy)
            if found is not None:
                entropies[rows] = found
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
        for rows in chunks(len(logits), logits.shape[1], logits.device):
            weights = grad_logprobs[rows], grad_entropy[rows] if ctx.entropy else None
            z = scaled(logits[rows], ctx.scale)
            p = gradient(z, log_sum[rows], entropies[rows], targets[rows], *weights)
            grad[rows] = p.mul_(ctx.scale) if ctx.scale != 1.0 else p
        return grad, None, None, None
