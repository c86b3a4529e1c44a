"""How far a model's distribution of the next token is from a teacher's, and the gradient of that with respect to the logits.

With P the model's distribution and Q the teacher's, `beta` says which divergence: 1 is KL(P ‖ Q), 0 is KL(Q ‖ P), and between
them it is the generalized Jensen-Shannon divergence β KL(Q ‖ M) + (1 − β) KL(P ‖ M) with M = (1 − β) P + β Q (Agarwal et al.,
"On-Policy Distillation of Language Models", 2023), which falls to 0 at both of these ends.

As in `rows`, logits are read in chunks of rows, forward and again backward: beside them and their gradient nothing of their
size is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.rows import chunks, scaled

#: Log-probs below count as this: a token that one of the two rules out costs much, and not infinitely much.
FLOOR = -100.0


def divergence(mine: Tensor, theirs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of some distributions, and what its gradient is made of.

    Args:
        mine, theirs: `[M, B]` log-probs of B outcomes.
        beta: Which divergence; see above.

    Returns:
        `[M]` nats; `[M, B]` h = p ∂D/∂p, up to a multiple of p. So ∂D/∂z = h − p Σh, where p = softmax(z).
    """
    s, t = mine.clamp_min(FLOOR), theirs.clamp_min(FLOOR)
    q = theirs.exp()
    if beta == 0:
        return (q * (t - s)).sum(-1), -q
    if beta == 1:
        h = mine.exp() * (s - t)
        return h.sum(-1), h
    mixture = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    h = (1 - beta) * mine.exp() * (s - mixture)
    return beta * (q * (t - mixture)).sum(-1) + h.sum(-1), h


def full_divergence(
    logits: Tensor,
    batch: TokenBatch,
    teacher_logits: Tensor,
    temperature: float = 1.0,
    beta: float = 1.0,
    *,
    teacher_batch: TokenBatch | None = None,
) -> Tensor:
    """Over the whole vocabulary.

    Args:
        logits: `[N, W, V]` or, as the batch says, `[1, T, V]`, with gradients.
        batch: The samples that they are of.
        teacher_logits: `[N, W, V']` or `[1, T, V']`, without. Where V' differs from V, as with vocabularies filled up to
            different sizes, what only the teacher has is left out, and what only the model has the teacher rules out.
        temperature: Divides both.
        beta: Which divergence.
        teacher_batch: The samples as the teacher read them, if not as the model did.

    Returns:
        `[T]` float32 nats: for each token that is trained on, of the distributions that it was drawn from; 0 for others.
    """
    where, rows = batch.predictors()
    their_rows = rows if teacher_batch is None else teacher_batch.predictors()[1]
    flat, theirs = logits.flatten(0, 1), teacher_logits.flatten(0, 1)
    return _placed(batch, where, _Full.apply(flat, rows, theirs, their_rows, 1.0 / temperature, beta))


def top_divergence(
    logits: Tensor, batch: TokenBatch, told: Tensor, temperature: float = 1.0, beta: float = 1.0
) -> Tensor:
    """Over k + 1 outcomes: the teacher's k most likely tokens, and all others together.

    Merging outcomes never makes a divergence larger, so this one is a lower bound of the full one.

    Args:
        logits: `[N, W, V]` or, as the batch says, `[1, T, V]`, with gradients.
        batch: The samples that they are of.
        told: `[T, k + 1, 2]`, from `top_logprobs`, at the same temperature.
        temperature: Divides the logits.
        beta: Which divergence.

    Returns:
        As `full_divergence`.
    """
    where, rows = batch.predictors()
    if not len(where):
        return logits.new_zeros(batch.tokens, dtype=torch.float32)
    told = told[where]
    ids, theirs = told[:, :-1, 1].long(), told[..., 0]
    return _placed(batch, where, _Top.apply(logits.flatten(0, 1), rows, ids, theirs, 1.0 / temperature, beta))


@torch.no_grad()
def top_logprobs(
    logits: Tensor, batch: TokenBatch, k: int, temperature: float = 1.0, vocabulary: int | None = None
) -> Tensor:
    """What a teacher tells of the distributions that tokens were drawn from.

    Args:
        logits: `[N, W, V]` or, as the batch says, `[1, T, V]`.
        batch: The samples that they are of.
        k: How many tokens; with a smaller vocabulary, all of it.
        temperature: Divides the logits.
        vocabulary: Ids from here on are left out; None takes all.

    Returns:
        `[T, k + 1, 2]` float32: log-prob and id (exact below 2^24) of each token, the most likely first; at last the log-prob
        of all others together, and −1. 0 for tokens that are not trained on.
    """
    where, rows = batch.predictors()
    flat = logits.flatten(0, 1)
    width = min(flat.shape[1], vocabulary or flat.shape[1])
    k = min(k, width)
    told = torch.zeros(batch.tokens, k + 1, 2, device=logits.device)
    for part in chunks(len(rows), width, logits.device):
        logprobs = torch.log_softmax(scaled(flat[rows[part], :width], 1.0 / temperature), dim=-1)
        top, ids = logprobs.topk(k, dim=-1)
        rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(FLOOR)
        values = torch.cat([top.clamp_min(FLOOR), rest[:, None]], 1)
        names = torch.cat([ids.float(), torch.full_like(rest[:, None], -1.0)], 1)
        told[where[part]] = torch.stack([values, names], -1)
    return told


def _placed(batch: TokenBatch, where: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(batch.tokens).index_copy(0, where, values)


class _Full(torch.autograd.Function):
    """Some rows of logits `[R, V]`, and those of the teacher's that are of the same tokens → the divergence `[M]`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, theirs: Tensor, their_rows: Tensor, scale: float, beta: float
    ) -> Tensor:
        found = logits.new_empty(len(rows), dtype=torch.float32)
        for part in chunks(len(rows), logits.shape[1], logits.device):
            found[part] = divergence(*_both(logits[rows[part]], theirs[their_rows[part]], scale), beta)[0]
        ctx.save_for_backward(logits, rows, theirs, their_rows)
        ctx.scale, ctx.beta = scale, beta
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_found: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, rows, theirs, their_rows = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for part in chunks(len(rows), logits.shape[1], logits.device):
            s, t = _both(logits[rows[part]], theirs[their_rows[part]], ctx.scale)
            _, h = divergence(s, t, ctx.beta)
            h -= s.exp() * h.sum(-1, keepdim=True)
            grad[rows[part]] = (h * (ctx.scale * grad_found[part, None])).to(grad.dtype)
        return grad, None, None, None, None, None


def _both(logits: Tensor, theirs: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the model and of the teacher, `[m, V]`."""
    V = logits.shape[1]
    s = torch.log_softmax(scaled(logits, scale), dim=-1)
    t = torch.log_softmax(scaled(theirs[:, :V], scale), dim=-1)
    return s, nn.functional.pad(t, (0, V - t.shape[1]), value=-torch.inf)


class _Top(torch.autograd.Function):
    """Some rows of logits `[R, V]`, the ids `[M, k]` of outcomes, and the teacher's log-probs `[M, k + 1]` of them and of the
    rest → the divergence `[M]`."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, ids: Tensor, theirs: Tensor, scale: float, beta: float
    ) -> Tensor:
        found = logits.new_empty(len(rows), dtype=torch.float32)
        for part in chunks(len(rows), logits.shape[1], logits.device):
            _, mine = _merged(logits, rows[part], ids[part], scale)
            found[part] = divergence(mine, theirs[part], beta)[0]
        ctx.save_for_backward(logits, rows, ids, theirs)
        ctx.scale, ctx.beta = scale, beta
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_found: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, rows, ids, theirs = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for part in chunks(len(rows), logits.shape[1], logits.device):
            logprobs, mine = _merged(logits, rows[part], ids[part], ctx.scale)
            _, h = divergence(mine, theirs[part], ctx.beta)
            # A token has its share of its outcome's h: all of it, or what it is of the rest.
            share = (logprobs - mine[:, -1:].clamp_min(FLOOR)).exp() * h[:, -1:]
            share = share.scatter(1, ids[part], h[:, :-1]) - logprobs.exp() * h.sum(-1, keepdim=True)
            grad[rows[part]] = (share * (ctx.scale * grad_found[part, None])).to(grad.dtype)
        return grad, None, None, None, None, None


def _merged(logits: Tensor, rows: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Log-probs `[m, V]` of all tokens; and `[m, k + 1]` of some, and of all others together."""
    logprobs = torch.log_softmax(scaled(logits[rows], scale), dim=-1)
    rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return logprobs, torch.cat([logprobs.gather(1, ids), rest], 1)
