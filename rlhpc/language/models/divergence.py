"""How far a model's distribution of the next token is from a teacher's, and the gradient of that with respect to the logits.

With P the model's distribution and Q the teacher's, `beta` says which divergence: 1 is KL(P ‖ Q), 0 is KL(Q ‖ P), and between
them it is the generalized Jensen-Shannon divergence β KL(Q ‖ M) + (1 − β) KL(P ‖ M) with M = (1 − β) P + β Q (Agarwal et al.,
"On-Policy Distillation of Language Models", 2023), which falls to 0 at both of these ends.

Logits of both are read in chunks of rows, forward and again backward (`rows`). Where their heads can be asked they are made of
hidden states, and nothing of their size is kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rlhpc.language.models.logprobs import LogitRows, RowReader, chunks, scaled
from rlhpc.language.models.token_batch import TokenBatch

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


class Full(RowReader):
    """The divergence over the whole vocabulary, in nats.

    Args:
        theirs: The teacher's rows. Where they are not as wide as the model's, as with vocabularies filled up to different
            sizes, what only the teacher has is left out, and what only the model has the teacher rules out.
        temperature: Divides both.
        beta: Which divergence.
    """

    def __init__(self, theirs: LogitRows, temperature: float = 1.0, beta: float = 1.0) -> None:
        self._theirs, self._scale, self._beta = theirs, 1.0 / temperature, beta

    def say(self, logits: Tensor, part: slice) -> Tensor:
        """See `RowReader.say`."""
        return divergence(*self._both(logits, part), self._beta)[0][:, None]

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """See `RowReader.gradient`."""
        s, t = self._both(logits, part)
        _, h = divergence(s, t, self._beta)
        h -= s.exp() * h.sum(-1, keepdim=True)
        return h.mul_(self._scale * grad)

    def _both(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Log-probs of the model and of the teacher, `[m, V]`."""
        V = logits.shape[1]
        s = torch.log_softmax(scaled(logits, self._scale), dim=-1)
        t = torch.log_softmax(scaled(self._theirs.make(part)[:, :V], self._scale), dim=-1)
        return s, nn.functional.pad(t, (0, V - t.shape[1]), value=-torch.inf)


class Top(RowReader):
    """The divergence over k + 1 outcomes, in nats: the teacher's k most likely tokens, and all others together.

    Merging outcomes never makes a divergence larger, so this one is a lower bound of the full one.

    Args:
        told: `[M, k + 1, 2]`, as `top_logprobs` tells of a token, at the same temperature.
        temperature: Divides the logits.
        beta: Which divergence.
    """

    def __init__(self, told: Tensor, temperature: float = 1.0, beta: float = 1.0) -> None:
        self._ids, self._theirs = told[:, :-1, 1].long(), told[..., 0]
        self._scale, self._beta = 1.0 / temperature, beta

    def say(self, logits: Tensor, part: slice) -> Tensor:
        """See `RowReader.say`."""
        _, mine = self._merged(logits, part)
        return divergence(mine, self._theirs[part], self._beta)[0][:, None]

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """See `RowReader.gradient`."""
        logprobs, mine = self._merged(logits, part)
        _, h = divergence(mine, self._theirs[part], self._beta)
        # A token has its share of its outcome's h: all of it, or what it is of the rest.
        share = (logprobs - mine[:, -1:].clamp_min(FLOOR)).exp() * h[:, -1:]
        share = share.scatter(1, self._ids[part], h[:, :-1]) - logprobs.exp() * h.sum(-1, keepdim=True)
        return share.mul_(self._scale * grad)

    def _merged(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Log-probs `[m, V]` of all tokens; and `[m, k + 1]` of some, and of all others together."""
        ids, logprobs = self._ids[part], torch.log_softmax(scaled(logits, self._scale), dim=-1)
        rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return logprobs, torch.cat([logprobs.gather(1, ids), rest], 1)


@torch.no_grad()
def top_logprobs(
    rows: LogitRows, batch: TokenBatch, k: int, temperature: float = 1.0, vocabulary: int | None = None
) -> Tensor:
    """What a teacher tells of the distributions that tokens were drawn from.

    Args:
        rows: Its logits.
        batch: The samples whose trained tokens they are of.
        k: How many tokens; with a smaller vocabulary, all of it.
        temperature: Divides the logits.
        vocabulary: Ids from here on are left out; None takes all.

    Returns:
        `[T, k + 1, 2]` float32: log-prob and id (exact below 2^24) of each token, the most likely first; at last the log-prob
        of all others together, and −1. 0 for tokens that are not trained on.
    """
    where = batch.predictors()[0]
    width = min(rows.width, vocabulary or rows.width)
    k = min(k, width)
    told = torch.zeros(batch.tokens, k + 1, 2, device=rows.device)
    for part in chunks(rows.number, rows.width, rows.device):
        logprobs = torch.log_softmax(scaled(rows.make(part)[:, :width], 1.0 / temperature), dim=-1)
        top, ids = logprobs.topk(k, dim=-1)
        rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(FLOOR)
        values = torch.cat([top.clamp_min(FLOOR), rest[:, None]], 1)
        names = torch.cat([ids.float(), torch.full_like(rest[:, None], -1.0)], 1)
        told[where[part]] = torch.stack([values, names], -1)
    return told
