"""Divergence between the next-token distributions of a model and a teacher, and its gradient with respect to the logits.

P is the model's distribution and Q the teacher's. `beta` selects the divergence: 1 is KL(P ‖ Q), 0 is KL(Q ‖ P), and values in
between give the generalized Jensen-Shannon divergence β KL(Q ‖ M) + (1 − β) KL(P ‖ M) with M = (1 − β) P + β Q (Agarwal et
al., "On-Policy Distillation of Language Models", 2023), which approaches 0 for β towards 0 or 1.

The logits of both models are computed in chunks of rows, once forward and once backward (`logprobs`). If the heads are linear,
chunks are computed from hidden states, so that no tensor has the size of all logits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rlhpc.language.models.logprobs import LogitRows, RowReader, chunks, scale_logits
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.devices import device_memory

#: Lower bound of log-probs, so that a token to which one distribution gives probability 0 has a large but finite cost.
FLOOR = -100.0


def divergence(logprobs: Tensor, teacher_logprobs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Computes the divergence D of pairs of distributions, and the term h from which its gradient is computed.

    Args:
        logprobs, teacher_logprobs: `[M, B]`, log-probs of B outcomes.
        beta: Selects the divergence; see the module's docstring.

    Returns:
        D `[M]` in nats; and h = p ∂D/∂p `[M, B]`, up to a multiple of p, so that ∂D/∂z = h − p Σh with p = softmax(z).
    """
    s, t = logprobs.clamp_min(FLOOR), teacher_logprobs.clamp_min(FLOOR)
    q = teacher_logprobs.exp()
    if beta == 0:
        return (q * (t - s)).sum(-1), -q
    if beta == 1:
        h = logprobs.exp() * (s - t)
        return h.sum(-1), h
    log_mixture = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    h = (1 - beta) * logprobs.exp() * (s - log_mixture)
    return beta * (q * (t - log_mixture)).sum(-1) + h.sum(-1), h


class FullDivergence(RowReader):
    """Reader that computes the divergence over the full vocabulary, in nats.

    Args:
        teacher: The teacher's logits. If their width differs from the model's (vocabularies padded to different sizes),
            columns that only the teacher has are dropped, and the teacher gives probability 0 to tokens that it lacks.
        temperature: Divisor of both models' logits.
        beta: Selects the divergence; see the module's docstring.
    """

    def __init__(self, teacher: LogitRows, temperature: float = 1.0, beta: float = 1.0) -> None:
        self._teacher = teacher
        self._scale = 1.0 / temperature
        self._beta = beta

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Computes the divergences; see `RowReader.values`."""
        return divergence(*self._logprob_pair(logits, part), self._beta)[0][:, None]

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Computes the divergences' gradient; see `RowReader.gradient`."""
        s, t = self._logprob_pair(logits, part)
        _, h = divergence(s, t, self._beta)
        h -= s.exp() * h.sum(-1, keepdim=True)
        return h.mul_(self._scale * grad)

    def _logprob_pair(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Returns the log-probs of the model and of the teacher, `[m, V]`."""
        V = logits.shape[1]
        s = torch.log_softmax(scale_logits(logits, self._scale), dim=-1)
        t = torch.log_softmax(scale_logits(self._teacher.make(part)[:, :V], self._scale), dim=-1)
        return s, nn.functional.pad(t, (0, V - t.shape[1]), value=-torch.inf)


class TopKDivergence(RowReader):
    """Reader that computes the divergence over k + 1 outcomes, in nats: the teacher's k most likely tokens, and all other
    tokens as one outcome.

    Merging outcomes never increases a divergence, so the result is a lower bound of the divergence over the full vocabulary.

    Args:
        top_columns: `[M, k + 1, 2]`, rows of `top_logprobs` at the same temperature.
        temperature: Divisor of the logits.
        beta: Selects the divergence; see the module's docstring.
    """

    def __init__(self, top_columns: Tensor, temperature: float = 1.0, beta: float = 1.0) -> None:
        self._ids = top_columns[:, :-1, 1].long()
        self._teacher = top_columns[..., 0]
        self._scale = 1.0 / temperature
        self._beta = beta

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Computes the divergences; see `RowReader.values`."""
        _, merged_logprobs = self._merged_logprobs(logits, part)
        return divergence(merged_logprobs, self._teacher[part], self._beta)[0][:, None]

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Computes the divergences' gradient; see `RowReader.gradient`."""
        logprobs, merged_logprobs = self._merged_logprobs(logits, part)
        _, h = divergence(merged_logprobs, self._teacher[part], self._beta)
        # A top token gets its outcome's h; other tokens get their outcome's h in proportion to their probabilities.
        grad_logits = (logprobs - merged_logprobs[:, -1:].clamp_min(FLOOR)).exp() * h[:, -1:]
        grad_logits = grad_logits.scatter(1, self._ids[part], h[:, :-1]) - logprobs.exp() * h.sum(-1, keepdim=True)
        return grad_logits.mul_(self._scale * grad)

    def _merged_logprobs(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Returns the log-probs of all tokens, `[m, V]`, and of the k top tokens and the sum of the others, `[m, k + 1]`."""
        ids, logprobs = self._ids[part], torch.log_softmax(scale_logits(logits, self._scale), dim=-1)
        remainder = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return logprobs, torch.cat([logprobs.gather(1, ids), remainder], 1)


@torch.no_grad()
def top_logprobs(
    rows: LogitRows, batch: TokenBatch, k: int, temperature: float = 1.0, vocabulary: int | None = None
) -> Tensor:
    """Computes the teacher's k largest log-probs at each trained token.

    Args:
        rows: The teacher's logits for the trained tokens of `batch`.
        batch: The samples.
        k: Number of tokens; reduced to the size of the vocabulary if larger.
        temperature: Divisor of the logits.
        vocabulary: Size of the vocabulary; larger token ids are dropped. None keeps all.

    Returns:
        `[T, k + 1, 2]` float32: log-prob and id (exact below 2^24) of the k likeliest tokens in descending order, then the
        log-prob of the sum of all other tokens, and −1. Tokens that are not trained get 0.
    """
    trained_tokens = batch.predictors()[0]
    width = min(rows.width, vocabulary or rows.width)
    k = min(k, width)
    scores = torch.zeros(batch.tokens, k + 1, 2, device=rows.device)
    for part in chunks(rows.number, rows.width, rows.device, device_memory(rows.device)):
        logprobs = torch.log_softmax(scale_logits(rows.make(part)[:, :width], 1.0 / temperature), dim=-1)
        top, ids = logprobs.topk(k, dim=-1)
        remainder = logprobs.scatter(1, ids, -torch.inf).logsumexp(-1).clamp_min(FLOOR)
        top_values = torch.cat([top.clamp_min(FLOOR), remainder[:, None]], 1)
        top_ids = torch.cat([ids.float(), torch.full_like(remainder[:, None], -1.0)], 1)
        scores[trained_tokens[part]] = torch.stack([top_values, top_ids], -1)
    return scores
