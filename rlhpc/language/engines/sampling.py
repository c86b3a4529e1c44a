"""Drawing tokens for many rows at once, each from its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhpc.language.engines.base import Request


def uniforms(request: Request, count: int) -> np.ndarray:
    """The request's random numbers in [0, 1), one per token. They depend on its seed alone."""
    generator = np.random.Generator(np.random.Philox(key=request.seed % 2**128))
    return generator.random(count)


class Rows:
    """Sampling parameters of the rows under way, as tensors on the device."""

    def __init__(self, requests: Sequence[Request], vocabulary: int, device: torch.device) -> None:
        temperature = [request.sampling.temperature for request in requests]
        top_p = [request.sampling.top_p for request in requests]
        top_k = [min(k, vocabulary) if (k := request.sampling.top_k) > 0 else vocabulary for request in requests]
        self.temperature = torch.tensor(temperature, dtype=torch.float32, device=device).unsqueeze(1)
        self.greedy = self.temperature == 0.0
        self.divisor = torch.where(self.greedy, 1.0, self.temperature)
        self.any_greedy, self.all_greedy = 0.0 in temperature, not any(temperature)
        self.scaled = any(t not in (0.0, 1.0) for t in temperature)
        self.filtered = any(p < 1.0 for p in top_p) or any(k < vocabulary for k in top_k)
        self.top_p = torch.tensor(top_p, dtype=torch.float64, device=device).unsqueeze(1)
        self.top_k = torch.tensor(top_k, dtype=torch.int64, device=device).unsqueeze(1)


def draw(logits: Tensor, rows: Rows, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draws one token for each row.

    A token is where the cumulative probability passes the row's random number, so a row needs one number per token, not
    one per entry of the vocabulary. The sum is taken in float64: in float32 it loses the tail of a large vocabulary.

    Args:
        logits: `[N, V]`.
        rows: Sampling parameters of the N rows.
        noise: `[N]` float64 in [0, 1).

    Returns:
        Token ids `[N]` and their log-probs `[N]` after temperature, before top-p and top-k; rows of temperature 0 get
        those of temperature 1.
    """
    logits = logits.float()
    if rows.scaled:
        logits = logits / rows.divisor
    logprobs = torch.log_softmax(logits, dim=-1)
    if rows.all_greedy:
        tokens = logprobs.argmax(dim=-1, keepdim=True)
        return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
    mass = logprobs.double().exp_()
    if rows.filtered:
        # In the vocabulary's order again afterwards: a row draws the same whether or not another one is filtered.
        mass = mass.masked_fill_(~_allowed(mass, rows), 0.0)
    tokens = _pick(mass.cumsum_(dim=-1), noise)
    if rows.any_greedy:
        tokens = torch.where(rows.greedy, logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def _allowed(mass: Tensor, rows: Rows) -> Tensor:
    """What top-k leaves, and of that the nucleus: tokens before which less than top_p is counted, at least one."""
    ordered, order = torch.sort(mass, dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill_(torch.arange(mass.shape[1], device=mass.device) >= rows.top_k, 0.0)
    sums = ordered.cumsum(dim=-1)
    keep = (ordered > 0.0) & ((sums - ordered < rows.top_p * sums[:, -1:]) | (rows.top_p == 1.0))
    return torch.zeros_like(keep).scatter_(1, order, keep)


def _pick(sums: Tensor, noise: Tensor) -> Tensor:
    """Where each row's cumulative mass passes its random number `[N, 1]`; entries without mass are never taken."""
    total = sums[:, -1:]
    # Strictly below the total, or rounding could point past the last entry that has mass.
    target = torch.minimum(noise.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True)
