"""Log-probs and entropies of tokens, from a causal model's hidden states or from its logits.

For a vocabulary of 150 000 and 16 000 tokens, logits in bfloat16 are 5 GB; log_softmax in float32 would add 10 GB forward
and 10 GB backward. Where the head is a linear layer whose result the model gives as it is (`tokens.head`), logits are made of
the hidden states of the tokens that are trained on, in chunks, forward and again backward: no tensor has their size. With
other heads, and where a loss wants them whole, the model makes them; they are read in chunks of rows, and the one tensor of
their size that is added is their gradient.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhpc.language.models.context_parallel import RowShare
from rlhpc.language.models.loading import pretrained_in
from rlhpc.language.models.packing import packs
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lora import linear_base, products

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


log = logging.getLogger(__name__)
#: Whether a model gives its linear head's result as it is.
_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
#: Logits that no scale, bound, shift or rounding leaves as they are.
_PROBE = ((-900.0, -1.0, 0.1, 7.0, 600.0),)


@dataclass(frozen=True)
class LinearHead:
    """The head of a model that can be asked instead of making logits.

    Attributes:
        layer: A linear layer, or an adapter around one.
    """

    layer: nn.Module

    @contextlib.contextmanager
    def answering(self, places: Tensor, reader: RowReader) -> Iterator[None]:
        """In the block, a call of the model gives for logits what the reader says of them, `[M, columns]` in float32.

        Args:
            places: `[M]`: where among the hidden states, read line by line, those are of which the reader's logits are made.
            reader: Reads them.
        """

        def answer(hidden: Tensor) -> Tensor:
            vocabulary, *factors = self._factors(hidden.flatten(0, -2)[places])
            if vocabulary is not None and reader.divided:
                reader.divided_by(vocabulary)
            found: Tensor = _FromHidden.apply(reader, vocabulary, *factors)
            return found

        with self._giving(answer):
            yield

    def rows(self, call: Callable[[], Tensor], places: Tensor) -> LogitRows:
        """Logits without gradients, made a few rows at a time of the hidden states, which are kept.

        Args:
            call: Calls the model, and returns its logits.
            places: `[M]`: see `answering`.
        """
        with torch.no_grad():
            with self._giving(lambda hidden: hidden.flatten(0, -2)[places]):
                hidden = call()
            vocabulary, bias, *factors = self._factors(hidden)
        assert vocabulary is None, "a frozen model is whole on each rank"
        return LogitRows(len(places), len(factors[1]), hidden.device, lambda part: _logits(part, bias, factors))

    def _factors(self, hidden: Tensor) -> tuple[Any, ...]:
        """Which part of the vocabulary it is for, the layer's bias, and what it multiplies."""
        base = linear_base(self.layer)
        assert base is not None
        factors = (factor for pair in products(self.layer, hidden) for factor in pair)
        found = [one.to_local() if isinstance(one, DTensor) else one for one in (base.bias, *factors)]
        return (_vocabulary(base.weight), *found)

    @contextlib.contextmanager
    def _giving(self, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
        layer: Any = self.layer
        before = layer.__dict__.get("forward")  # a plan that divides it has put its own there
        layer.forward = answer
        try:
            yield
        finally:
            if before is None:
                del layer.forward
            else:
                layer.forward = before


def _vocabulary(weight: Tensor) -> Vocabulary | None:
    """Of which a head's weight `[V, H]` makes logits, if that is a part."""
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    first = mesh.get_local_rank() * weight.to_local().shape[0]
    return Vocabulary(first, mesh.get_group())


def linear_head(model: nn.Module) -> LinearHead | None:
    """The head of the causal language model in a module, if it can be asked; None has the whole logits made."""
    causal = pretrained_in(model)
    head = None if causal is None else causal.get_output_embeddings()
    if head is None:
        return None
    if causal not in _plain:
        _plain[causal] = _gives_as_is(causal, head)
        if not _plain[causal]:
            log.info("%s makes whole logits: its head is more than a linear layer", type(causal).__name__)
    return LinearHead(head) if _plain[causal] else None


def _gives_as_is(causal: Any, head: nn.Module) -> bool:
    """Whether what a model returns as logits is what its head gave, and the head is known. The model computes nothing."""
    prefix, names = causal.base_model_prefix, [name for name, part in causal.named_children() if part is head]
    if not names or not isinstance(getattr(causal, prefix, None), nn.Module) or linear_base(head) is None:
        return False
    probe = torch.tensor([_PROBE])
    stands_for = {prefix: _Gives(_Hidden(torch.zeros_like(probe))), names[0]: _Gives(probe)}
    real = {name: causal._modules[name] for name in stands_for}
    causal._modules.update(stands_for)
    try:
        found = type(causal).forward(causal, input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
        return torch.equal(found, torch.tensor([_PROBE]))
    except Exception as error:  # whatever it wants of trunk or head that these do not have: then nothing is known of it
        log.debug("%s could not be asked what it does with its head's result", type(causal).__name__, exc_info=error)
        return False
    finally:
        causal._modules.update(real)


class _Gives(nn.Module):
    """Gives always the same."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.found


class _Hidden:
    """A trunk's result, without anything but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, at: int) -> Tensor:
        return (self.last_hidden_state,)[at]


class _FromHidden(torch.autograd.Function):
    """`[M, H]` times `[V, H]`, plus further such products, plus a bias `[V]` → what is said of these logits. The sum is
    rounded as the first product is, which is how a layer with an adapter rounds. A chunk's logits are made twice. Where ranks
    have a part of the vocabulary each, the gradient of what they all have is summed over them."""

    @staticmethod
    def forward(
        ctx: Any, reader: RowReader, vocabulary: Vocabulary | None, bias: Tensor | None, *factors: Tensor
    ) -> Tensor:
        hidden = factors[0]
        said = hidden.new_empty(len(hidden), reader.columns, dtype=torch.float32)
        for rows in chunks(len(hidden), len(factors[1]), hidden.device):
            logits = _logits(rows, bias, factors)
            if vocabulary is not None and not reader.divided:
                logits = vocabulary.gathered(logits)
            said[rows] = reader.say(logits, rows)
        ctx.save_for_backward(bias, *factors)
        ctx.reader, ctx.vocabulary = reader, vocabulary
        return said

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias, *factors = ctx.saved_tensors
        wanted, vocabulary = ctx.needs_input_grad[3:], ctx.vocabulary
        gathers = vocabulary is not None and not ctx.reader.divided
        # Sums over chunks are kept in float32; hidden states have each of their rows in one chunk.
        sums: list[Tensor | None] = [
            (torch.zeros(one.shape, dtype=torch.float32, device=one.device) if number % 2 else torch.empty_like(one))
            if wanted[number]
            else None
            for number, one in enumerate(factors)
        ]
        of_bias = (
            None if bias is None or not ctx.needs_input_grad[2] else bias.new_zeros(len(bias), dtype=torch.float32)
        )
        for rows in chunks(len(factors[0]), len(factors[1]), factors[0].device):
            logits = _logits(rows, bias, factors)
            z = ctx.reader.gradient(vocabulary.gathered(logits) if gathers else logits, rows, grad[rows])
            z = (vocabulary.own(z, logits.shape[1]) if gathers else z).to(logits.dtype)
            if of_bias is not None:
                of_bias += z.sum(0, dtype=torch.float32)
            for number in range(0, len(factors), 2):
                x, weight = factors[number], factors[number + 1]
                of_x, of_weight, into = sums[number], sums[number + 1], z.to(x.dtype)
                if of_x is not None:
                    of_x[rows] = into @ weight
                if of_weight is not None and into.dtype == torch.float32:
                    of_weight.addmm_(into.T, x[rows])
                elif of_weight is not None:
                    of_weight += into.T @ x[rows]
        for one in sums[::2] if vocabulary is not None else []:
            if one is not None:
                vocabulary.summed(one)
        gradients = [None if one is None else one.to(of.dtype) for one, of in zip(sums, factors, strict=True)]
        return None, None, None if of_bias is None else of_bias.to(bias.dtype), *gradients


def _logits(rows: slice, bias: Tensor | None, factors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    z = first = nn.functional.linear(factors[0][rows], factors[1], bias)
    for x, weight in zip(factors[2::2], factors[3::2], strict=True):
        z = z + nn.functional.linear(x[rows], weight)
    return z.to(first.dtype)


class LogitReading(Protocol):
    """What a loss wants of the trained model's logits beside log-probs and entropies: one value per token."""

    def rows(self, batch: TokenBatch) -> RowReader | None:
        """Says one number of each row of logits that says what a trained token is; None if the logits are wanted whole."""

    def read(self, logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """`[T]` float32, of whole logits."""


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
    reading: LogitReading | None = None,
    share: RowShare | None = None,
) -> TokenScores:
    """One forward pass of a Hugging Face causal language model.

    The model gets one row of all samples, if it can (`tokens.packing`), or a rectangle; never a mask, which keeps the fast
    causal attention kernels.

    Args:
        model: Takes `TokenBatch.inputs` and gives `logits` `[1, T, V]` or `[N, W, V]`.
        batch: What is scored.
        temperature: Divides the logits.
        entropy: Whether entropies are wanted.
        reading: What else is wanted of the logits, as they are before the temperature divides them.
        share: Of rows, if several ranks share them: all of them get the same scores.

    Raises:
        ConfigError: The reading wants whole logits, and this rank's model makes those of a part.
    """
    batch = batch.read_by(packs(model))
    where, places = batch.predictors()
    reader: RowReader = Said(batch.ids[where], temperature, entropy)
    further = None if reading is None else reading.rows(batch)
    if further is not None:
        reader = Beside([reader, further])
    inputs = batch.inputs() if share is None else share.inputs(batch)
    if share is not None:
        where, places, reader = _own(where, places, reader, share.bounds(batch))
    head = linear_head(model) if reading is None or further is not None else None
    if head is None:
        found = model(**inputs, use_cache=False)
        said = read_rows(found["logits"], places, reader)
    else:
        with head.answering(places, reader):
            found = model(**inputs, use_cache=False)
        said = found["logits"]
    every = said.new_zeros(batch.tokens, said.shape[1]).index_copy(0, where, said)
    values = found.get("token_values")
    if share is not None:
        every = share.together(every)
        if reading is not None and further is None:
            raise ConfigError(
                "this loss reads whole logits, of which ranks with actor.parallel.context have parts: set it to 1"
            )
        values = None if values is None else share.whole(values, batch)
    if values is not None:
        values = batch.before(batch.of_tokens(values))
    read = None
    if reading is not None:
        read = reading.read(found["logits"], batch) if further is None else every[:, -1]
    return TokenScores(every[:, 0], every[:, 1] if entropy else None, read, values)


def _own(
    where: torch.Tensor, places: torch.Tensor, reader: RowReader, bounds: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, RowReader]:
    """Of trained tokens, in the row's order, those that a part of the row says, and where in it."""
    start, end = (int((places < bound).sum()) for bound in bounds)
    return where[start:end], places[start:end] - bounds[0], From(reader, start)


@torch.no_grad()
def logit_rows(model: nn.Module, batch: TokenBatch) -> LogitRows:
    """The logits that a frozen causal model says the trained tokens by (`TokenBatch.predictors`), made when they are looked
    at, if its head can be asked.

    Args:
        model: See `token_scores`.
        batch: The samples.
    """
    batch = batch.read_by(packs(model))
    places = batch.predictors()[1]

    def call() -> torch.Tensor:
        found: torch.Tensor = model(**batch.inputs(), use_cache=False)["logits"]
        return found

    head = linear_head(model)
    return LogitRows.of(call(), places) if head is None else head.rows(call, places)
