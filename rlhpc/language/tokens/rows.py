"""What is read of rows of logits, in float32, and the gradient of that; and how many are looked at at once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class LogitRows:
    """M rows of a model's logits, without gradients, made when they are looked at.

    Attributes:
        number: M.
        width: Logits of a row.
        device: Where they are made.
        make: Some of them, `[m, V]`, in the model's precision.
    """

    number: int
    width: int
    device: torch.device
    make: Callable[[slice], Tensor]

    @classmethod
    def of(cls, logits: Tensor, places: Tensor) -> LogitRows:
        """Of whole logits `[N, W, V]`, read line by line, those at `places` `[M]`."""
        flat = logits.detach().flatten(0, -2)
        return cls(len(places), flat.shape[1], flat.device, lambda part: flat[places[part]])


class RowReader(abc.ABC):
    """Reads M rows of logits, a part at a time: forward, and for the gradient once more.

    Attributes:
        columns: How many numbers it says of a row.
    """

    columns: int = 1

    @abc.abstractmethod
    def say(self, logits: Tensor, part: slice) -> Tensor:
        """`[m, columns]` float32, of rows `[m, V]` in the model's precision; `part` says which of the M they are."""

    @abc.abstractmethod
    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """`[m, V]` float32: the gradient by the logits, of that `[m, columns]` by what was said. Called after `say` of all."""


class Said(RowReader):
    """Log-probs of tokens and, if wanted, entropies.

    Args:
        targets: `[M]`: the tokens.
        temperature: Divides the logits.
        entropy: Whether entropies are wanted.
    """

    def __init__(self, targets: Tensor, temperature: float = 1.0, entropy: bool = False) -> None:
        self._targets, self._scale, self._entropy = targets, 1.0 / temperature, entropy
        self.columns = 1 + entropy
        self._log_sums = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        self._entropies = torch.empty_like(self._log_sums) if entropy else self._log_sums

    def say(self, logits: Tensor, part: slice) -> Tensor:
        """See `RowReader.say`."""
        said, self._log_sums[part], entropies = said_of(scaled(logits, self._scale), self._targets[part], self._entropy)
        if entropies is None:
            return said[:, None]
        self._entropies[part] = entropies
        return torch.stack([said, entropies], -1)

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """See `RowReader.gradient`."""
        weights = grad[:, 0], grad[:, 1] if self._entropy else None
        z, rest = scaled(logits, self._scale), (self._log_sums[part], self._entropies[part], self._targets[part])
        found = gradient(z, *rest, *weights)
        return found.mul_(self._scale) if self._scale != 1.0 else found


class Beside(RowReader):
    """Several readers, side by side: the logits are made once for all of them."""

    def __init__(self, readers: Sequence[RowReader]) -> None:
        self._readers = list(readers)
        self._columns = [reader.columns for reader in readers]
        self.columns = sum(self._columns)

    def say(self, logits: Tensor, part: slice) -> Tensor:
        """See `RowReader.say`."""
        return torch.cat([reader.say(logits, part) for reader in self._readers], 1)

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """See `RowReader.gradient`."""
        found: Tensor | None = None
        for reader, mine in zip(self._readers, grad.split(self._columns, 1), strict=True):
            if mine.any():  # as log-probs have none that are there for metrics alone
                one = reader.gradient(logits, part, mine)
                found = one if found is None else found.add_(one)
        return torch.zeros_like(logits, dtype=torch.float32) if found is None else found


def read_rows(logits: Tensor, places: Tensor, reader: RowReader) -> Tensor:
    """What a reader says of some rows of whole logits, with gradients.

    Args:
        logits: `[N, W, V]`.
        places: `[M]`: the lines among N × W that are read, each once.
        reader: Reads them.

    Returns:
        `[M, columns]` float32.
    """
    found: Tensor = _FromLogits.apply(logits.flatten(0, -2), places, reader)
    return found


class _FromLogits(torch.autograd.Function):
    """Rows of logits `[R, V]` → what is said of some of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, reader: RowReader) -> Tensor:
        said = logits.new_empty(len(places), reader.columns, dtype=torch.float32)
        for part in chunks(len(places), logits.shape[1], logits.device):
            said[part] = reader.say(logits[places[part]], part)
        ctx.save_for_backward(logits, places)
        ctx.reader = reader
        return said

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_said: Tensor) -> tuple[Tensor, None, None]:
        logits, places = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for part in chunks(len(places), logits.shape[1], logits.device):
            grad[places[part]] = ctx.reader.gradient(logits[places[part]], part, grad_said[part]).to(grad.dtype)
        return grad, None, None


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
