"""What is read of rows of logits, in float32, and the gradient of that; and how many are looked at at once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary of which a rank's head makes logits.

    Attributes:
        first: Its first token.
        group: The ranks that share the vocabulary.
    """

    first: int
    group: Any

    def gathered(self, logits: Tensor) -> Tensor:
        """`[m, V]` of all ranks' `[m, V / n]`."""
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, logits.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def own(self, gradient: Tensor, width: int) -> Tensor:
        """This rank's columns."""
        return gradient[:, self.first : self.first + width]

    def summed(self, tensor: Tensor) -> Tensor:
        """Over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Over the ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor


class RowReader(abc.ABC):
    """Reads M rows of logits, a part at a time: forward, and for the gradient once more.

    Attributes:
        columns: How many numbers it says of a row.
        divided: Whether it can read a rank's part of the vocabulary (`divided_by` is called first); others are given all of a
            chunk's logits.
    """

    columns: int = 1
    divided: bool = False

    def divided_by(self, vocabulary: Vocabulary) -> None:  # noqa: B027 (others do not read so)
        """From now on, logits are of this part of the vocabulary."""

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
        self._vocabulary: Vocabulary | None = None
        self._log_sums = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        self._entropies = torch.empty_like(self._log_sums) if entropy else self._log_sums

    divided = True

    def divided_by(self, vocabulary: Vocabulary) -> None:
        """See `RowReader.divided_by`."""
        self._vocabulary = vocabulary

    def say(self, logits: Tensor, part: slice) -> Tensor:
        """See `RowReader.say`."""
        said, self._log_sums[part], entropies = said_of(
            scaled(logits, self._scale), self._targets[part], self._entropy, self._vocabulary
        )
        if entropies is None:
            return said[:, None]
        self._entropies[part] = entropies
        return torch.stack([said, entropies], -1)

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """See `RowReader.gradient`."""
        weights = grad[:, 0], grad[:, 1] if self._entropy else None
        z, rest = scaled(logits, self._scale), (self._log_sums[part], self._entropies[part], self._targets[part])
        found = gradient(z, *rest, *weights, self._vocabulary)
        return found.mul_(self._scale) if self._scale != 1.0 else found


class Beside(RowReader):
    """Several readers, side by side: the logits are made once for all of them."""

    def __init__(self, readers: Sequence[RowReader]) -> None:
        self._readers = list(readers)
        self._columns = [reader.columns for reader in readers]
        self.columns = sum(self._columns)
        self.divided = all(reader.divided for reader in self._readers)

    def divided_by(self, vocabulary: Vocabulary) -> None:
        """See `RowReader.divided_by`."""
        for reader in self._readers:
            reader.divided_by(vocabulary)

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


class From(RowReader):
    """Another reader, of whose rows the first are read elsewhere."""

    def __init__(self, reader: RowReader, start: int) -> None:
        self._reader, self._start = reader, start
        self.columns, self.divided = reader.columns, reader.divided

    def _moved(self, part: slice) -> slice:
        return slice(part.start + self._start, part.stop + self._start)

    def divided_by(self, vocabulary: Vocabulary) -> None:
        """See `RowReader.divided_by`."""
        self._reader.divided_by(vocabulary)

    def say(self, logits: Tensor, part: slice) -> Tensor:
        """See `RowReader.say`."""
        return self._reader.say(logits, self._moved(part))

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """See `RowReader.gradient`."""
        return self._reader.gradient(logits, self._moved(part), grad)


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


def said_of(
    z: Tensor, targets: Tensor, entropy: bool, vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of logits `[m, V]`, already divided by the temperature, and targets `[m]`.

    Args:
        z: The logits, or those of a part of the vocabulary.
        targets: In the whole vocabulary.
        entropy: Whether it is wanted.
        vocabulary: The part, whose ranks all call this.

    Returns:
        `[m]` each: log p(target), log Σ e^z, and the entropy if it is wanted.
    """
    if vocabulary is not None:
        return _said_together(z, targets, entropy, vocabulary)
    log_sum = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(1, targets[:, None]).squeeze(1) - log_sum
    if not entropy:
        return logprobs, log_sum, None
    # −Σ p log p; log Σ e^z − Σ p z would cancel where logits are large
    log_p = z - log_sum[:, None]
    return logprobs, log_sum, -log_p.exp().mul_(log_p).sum(-1)


def _said_together(
    z: Tensor, targets: Tensor, entropy: bool, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`said_of` by ranks that have a part of the vocabulary each: they exchange three numbers a row, or four."""
    largest = vocabulary.largest(z.amax(-1))
    there, mine = _within(targets, z.shape[1], vocabulary)
    of_target = torch.where(mine, z.gather(1, there[:, None]).squeeze(1) - largest, 0.0)
    below = z - largest[:, None]
    p = below.exp()
    sums = [p.sum(-1), of_target]
    if entropy:  # about the largest: large logits do not cancel
        sums.append(p.mul_(below).sum(-1))
    total, target, *weighed = vocabulary.summed(torch.stack(sums)).unbind(0)
    log_total = total.log()
    return target - log_total, log_total + largest, log_total - weighed[0] / total if weighed else None


def _within(targets: Tensor, width: int, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Targets as columns of a part of the vocabulary, and whether they are there."""
    local = targets - vocabulary.first
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def gradient(
    z: Tensor,
    log_sum: Tensor,
    entropies: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    vocabulary: Vocabulary | None = None,
) -> Tensor:
    """Of what `said_of` said, with respect to z: `[m, V]`. `entropies` are looked at only if they have a gradient."""
    # d log p(y) / dz = onehot(y) − p; dH / dz = −p (log p + H)
    log_p = z - log_sum[:, None]
    p = log_p.exp()
    weight = -grad_logprobs[:, None]
    if grad_entropy is not None:
        weight = log_p.add_(entropies[:, None]).mul_(-grad_entropy[:, None]).add_(weight)
    if vocabulary is not None:
        targets, mine = _within(targets, z.shape[1], vocabulary)
        grad_logprobs = torch.where(mine, grad_logprobs, 0.0)
    return p.mul_(weight).scatter_add_(1, targets[:, None], grad_logprobs[:, None])
