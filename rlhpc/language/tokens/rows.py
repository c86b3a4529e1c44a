"""What rows of logits say of tokens, in float32, and the gradient of that; and how many are looked at at once."""

from __future__ import annotations

import torch
from torch import Tensor

#: Elements of a chunk in float32 (64 MiB).
_CHUNK = 1 << 24
#: On a CPU a quarter is better, which caches and the C library's heap can hold, but not fewer rows than make a product fast.
_QUARTER, _ROWS = 4, 128


def chunks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Cuts rows so that a part is small enough to be computed in float32."""
    size = max(1, _CHUNK // width)
    if device.type == "cpu":
        size = min(size, max(_ROWS, size // _QUARTER))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def scaled(logits: Tensor, scale: float) -> Tensor:
    """In float32."""
    z = logits.float()
    return z * scale if scale != 1.0 else z


def said_of(z: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of logits `[m, V]`, already divided by the temperature, and targets `[m]`.

    Returns:
        `[m]` each: log p(target), log Σ e^z, and the entropy if it is wanted.
    """
    log_sum = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(1, targets[:, None]).squeeze(1) - log_sum
    if not entropy:
        return logprobs, log_sum, None
    # −Σ p log p; log Σ e^z − Σ p z would cancel where logits are large
    log_p = z - log_sum[:, None]
    return logprobs, log_sum, -log_p.exp().mul_(log_p).sum(-1)


def gradient(
    z: Tensor,
    log_sum: Tensor,
    entropies: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Of what `said_of` said, with respect to z: `[m, V]`. `entropies` are looked at only if they have a gradient."""
    # d log p(y) / dz = onehot(y) − p; dH / dz = −p (log p + H)
    log_p = z - log_sum[:, None]
    p = log_p.exp()
    weight = -grad_logprobs[:, None]
    if grad_entropy is not None:
        weight = log_p.add_(entropies[:, None]).mul_(-grad_entropy[:, None]).add_(weight)
    return p.mul_(weight).scatter_add_(1, targets[:, None], grad_logprobs[:, None])
