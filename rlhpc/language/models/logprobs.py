"""Log-probs and entropies of tokens, from a causal model's hidden states or from its logits.

For a vocabulary of 150 000 and 16 000 tokens, logits in bfloat16 are 5 GB; log_softmax in float32 would add 10 GB forward
and 10 GB backward. Where the LM head is a linear layer whose output the model returns unchanged (`linear_head`), logits are
computed from the hidden states of the trained tokens, in chunks, forward and again backward: no tensor has their full size.
With other heads, and where a loss needs all logits, the model computes them; they are read in chunks of rows, and the only
additional tensor of their size is their gradient.
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
from rlhpc.runtime.torch_adapter import forward_replaced
from rlhpc.training.lora import linear_base, products

#: Elements of a chunk in float32 (64 MiB).
_CHUNK = 1 << 24
#: A CPU uses a quarter, which fits caches and the C library's heap, but not fewer rows than a fast product needs.
_QUARTER, _ROWS = 4, 128


def chunks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Splits rows into slices that are small enough for float32."""
    size = max(1, _CHUNK // width)
    if device.type == "cpu":
        size = min(size, max(_ROWS, size // _QUARTER))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def scaled(logits: Tensor, scale: float) -> Tensor:
    """Returns logits in float32, multiplied by a factor."""
    z = logits.float()
    return z * scale if scale != 1.0 else z


@dataclass(frozen=True)
class LogitRows:
    """M rows of a model's logits, without gradients, computed on access.

    Attributes:
        number: M.
        width: Logits of a row.
        device: Device of the logits.
        make: Computes a slice of the rows, `[m, V]`, in the model's precision.
    """

    number: int
    width: int
    device: torch.device
    make: Callable[[slice], Tensor]

    @classmethod
    def of(cls, logits: Tensor, places: Tensor) -> LogitRows:
        """Returns the rows at `places` `[M]` of complete logits `[N, W, V]`, counted line by line."""
        flat_logits = logits.detach().flatten(0, -2)
        return cls(len(places), flat_logits.shape[1], flat_logits.device, lambda part: flat_logits[places[part]])


@dataclass(frozen=True)
class VocabularyShard:
    """Part of the vocabulary for which a rank's head computes logits.

    Attributes:
        first: First token of the part.
        group: The ranks that share the vocabulary.
    """

    first: int
    group: Any

    def gather(self, logits: Tensor) -> Tensor:
        """Returns `[m, V]`, gathered from all ranks' `[m, V / n]`."""
        rank_logits = [torch.empty_like(logits) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rank_logits, logits.contiguous(), group=self.group)
        return torch.cat(rank_logits, 1)

    def local(self, gradient: Tensor, width: int) -> Tensor:
        """Returns this rank's columns of a gradient."""
        return gradient[:, self.first : self.first + width]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Takes the maximum over the ranks, in place."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor


class RowReader(abc.ABC):
    """Reader of M rows of logits in chunks: forward, and once more for the gradient.

    Attributes:
        columns: Number of values that it computes for a row.
        supports_shards: Whether it can read a rank's part of the vocabulary (`set_shard` is called first); other readers get a
            chunk's logits of the full vocabulary.
    """

    columns: int = 1
    supports_shards: bool = False

    def set_shard(self, vocabulary: VocabularyShard) -> None:  # noqa: B027 (only readers with `supports_shards` need it)
        """Sets the part of the vocabulary that the following logits cover."""

    @abc.abstractmethod
    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Returns `[m, columns]` float32 for rows `[m, V]` in the model's precision; `part` is their slice of the M rows."""

    @abc.abstractmethod
    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Returns the gradient of the logits, `[m, V]` float32, from the gradient `[m, columns]` of the results.

        Called after `values` of all rows.
        """


class TokenReader(RowReader):
    """Log-probs of tokens and, if requested, entropies.

    Args:
        targets: `[M]`: the tokens.
        temperature: Divides the logits.
        entropy: Also computes entropies.
    """

    def __init__(self, targets: Tensor, temperature: float = 1.0, entropy: bool = False) -> None:
        self._targets = targets
        self._scale = 1.0 / temperature
        self._entropy = entropy
        self.columns = 1 + entropy
        self._vocabulary: VocabularyShard | None = None
        self._log_sums = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        self._entropies = torch.empty_like(self._log_sums) if entropy else self._log_sums

    supports_shards = True

    def set_shard(self, vocabulary: VocabularyShard) -> None:
        """Sets the part of the vocabulary; see `RowReader.set_shard`."""
        self._vocabulary = vocabulary

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Returns log-probs and entropies; see `RowReader.values`."""
        logprobs, self._log_sums[part], entropies = logprobs_and_entropy(
            scaled(logits, self._scale), self._targets[part], self._entropy, self._vocabulary
        )
        if entropies is None:
            return logprobs[:, None]
        self._entropies[part] = entropies
        return torch.stack([logprobs, entropies], -1)

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Returns their gradient; see `RowReader.gradient`."""
        weights = grad[:, 0], grad[:, 1] if self._entropy else None
        scaled_logits, forward_results = (
            scaled(logits, self._scale),
            (self._log_sums[part], self._entropies[part], self._targets[part]),
        )
        grad_logits = gradient(scaled_logits, *forward_results, *weights, self._vocabulary)
        return grad_logits.mul_(self._scale) if self._scale != 1.0 else grad_logits


class CombinedReader(RowReader):
    """Several readers of the same rows: the logits are computed once for all of them."""

    def __init__(self, readers: Sequence[RowReader]) -> None:
        self._readers = list(readers)
        self._columns = [reader.columns for reader in readers]
        self.columns = sum(self._columns)
        self.supports_shards = all(reader.supports_shards for reader in self._readers)

    def set_shard(self, vocabulary: VocabularyShard) -> None:
        """Sets the part of the vocabulary; see `RowReader.set_shard`."""
        for reader in self._readers:
            reader.set_shard(vocabulary)

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Returns all readers' columns; see `RowReader.values`."""
        return torch.cat([reader.values(logits, part) for reader in self._readers], 1)

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Returns the sum of the readers' gradients; see `RowReader.gradient`."""
        grad_sum: Tensor | None = None
        for reader, reader_grad in zip(self._readers, grad.split(self._columns, 1), strict=True):
            if reader_grad.any():  # columns used for metrics alone have no gradient
                reader_grads = reader.gradient(logits, part, reader_grad)
                grad_sum = reader_grads if grad_sum is None else grad_sum.add_(reader_grads)
        return torch.zeros_like(logits, dtype=torch.float32) if grad_sum is None else grad_sum


class OffsetReader(RowReader):
    """Reader of one rank's rows, at an offset among the rows of all ranks."""

    def __init__(self, reader: RowReader, start: int) -> None:
        self._reader = reader
        self._start = start
        self.columns = reader.columns
        self.supports_shards = reader.supports_shards

    def _shifted(self, part: slice) -> slice:
        return slice(part.start + self._start, part.stop + self._start)

    def set_shard(self, vocabulary: VocabularyShard) -> None:
        """Sets the part of the vocabulary; see `RowReader.set_shard`."""
        self._reader.set_shard(vocabulary)

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Reads rows at an offset; see `RowReader.values`."""
        return self._reader.values(logits, self._shifted(part))

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Returns the gradient of rows at an offset; see `RowReader.gradient`."""
        return self._reader.gradient(logits, self._shifted(part), grad)


def read_rows(logits: Tensor, places: Tensor, reader: RowReader) -> Tensor:
    """Applies a reader to some rows of complete logits, with gradients.

    Args:
        logits: `[N, W, V]`.
        places: `[M]`: the lines among N × W to read, each once.
        reader: Reads them.

    Returns:
        `[M, columns]` float32.
    """
    row_values: Tensor = _FromLogits.apply(logits.flatten(0, -2), places, reader)
    return row_values


class _FromLogits(torch.autograd.Function):
    """Rows of logits `[R, V]` to a reader's results for some of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, reader: RowReader) -> Tensor:
        row_values = logits.new_empty(len(places), reader.columns, dtype=torch.float32)
        for rows in chunks(len(places), logits.shape[1], logits.device):
            row_values[rows] = reader.values(logits[places[rows]], rows)
        ctx.save_for_backward(logits, places)
        ctx.reader = reader
        return row_values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor, None, None]:
        logits, places = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for rows in chunks(len(places), logits.shape[1], logits.device):
            grad[places[rows]] = ctx.reader.gradient(logits[places[rows]], rows, grad_values[rows]).to(grad.dtype)
        return grad, None, None


def logprobs_and_entropy(
    z: Tensor, targets: Tensor, entropy: bool, vocabulary: VocabularyShard | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log-probs and entropies of logits `[m, V]`, already divided by the temperature, and targets `[m]`.

    Args:
        z: The logits, or those of a part of the vocabulary.
        targets: Ids in the full vocabulary.
        entropy: Also computes the entropy.
        vocabulary: The part; all of its ranks call this.

    Returns:
        `[m]` each: log p(target), log Σ e^z, and the entropy if requested.
    """
    if vocabulary is not None:
        return _sharded_logprobs_and_entropy(z, targets, entropy, vocabulary)
    log_sum = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(1, targets[:, None]).squeeze(1) - log_sum
    if not entropy:
        return logprobs, log_sum, None
    # −Σ p log p; log Σ e^z − Σ p z would cancel where logits are large
    log_p = z - log_sum[:, None]
    return logprobs, log_sum, -log_p.exp().mul_(log_p).sum(-1)


def _sharded_logprobs_and_entropy(
    z: Tensor, targets: Tensor, entropy: bool, vocabulary: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes `logprobs_and_entropy` over ranks with a part of the vocabulary each.

    They exchange three numbers a row, or four.
    """
    max_logits = vocabulary.all_reduce_max(z.amax(-1))
    columns, is_local = _within(targets, z.shape[1], vocabulary)
    of_target = torch.where(is_local, z.gather(1, columns[:, None]).squeeze(1) - max_logits, 0.0)
    shifted = z - max_logits[:, None]
    exponentials = shifted.exp()
    local_sums = [exponentials.sum(-1), of_target]
    if entropy:  # relative to the largest: large logits do not cancel
        local_sums.append(exponentials.mul_(shifted).sum(-1))
    exp_sum, target, *weighted_sum = vocabulary.all_reduce_sum(torch.stack(local_sums)).unbind(0)
    log_total = exp_sum.log()
    return target - log_total, log_total + max_logits, log_total - weighted_sum[0] / exp_sum if weighted_sum else None


def _within(targets: Tensor, width: int, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Returns targets as columns of a part of the vocabulary, and whether they lie in it."""
    local_ids = targets - vocabulary.first
    return local_ids.clamp(0, width - 1), (local_ids >= 0) & (local_ids < width)


def gradient(
    z: Tensor,
    log_sum: Tensor,
    entropies: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    vocabulary: VocabularyShard | None = None,
) -> Tensor:
    """Returns the gradient of `logprobs_and_entropy` with respect to z: `[m, V]`.

    Reads `entropies` only if they have a gradient.
    """
    # d log p(y) / dz = onehot(y) − p; dH / dz = −p (log p + H)
    log_p = z - log_sum[:, None]
    p = log_p.exp()
    weight = -grad_logprobs[:, None]
    if grad_entropy is not None:
        weight = log_p.add_(entropies[:, None]).mul_(-grad_entropy[:, None]).add_(weight)
    if vocabulary is not None:
        targets, is_local = _within(targets, z.shape[1], vocabulary)
        grad_logprobs = torch.where(is_local, grad_logprobs, 0.0)
    return p.mul_(weight).scatter_add_(1, targets[:, None], grad_logprobs[:, None])


log = logging.getLogger(__name__)
#: Whether a model returns its linear head's output unchanged.
_has_plain_head: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
#: Logits that any scale, bound, shift or rounding changes.
_PROBE = ((-900.0, -1.0, 0.1, 7.0, 600.0),)


@dataclass(frozen=True)
class ChunkedHead:
    """LM head that computes a reader's results instead of logits, a chunk of rows at a time (chunked loss).

    Attributes:
        layer: A linear layer, or an adapter around one.
    """

    layer: nn.Module

    @contextlib.contextmanager
    def reading_head(self, places: Tensor, reader: RowReader) -> Iterator[None]:
        """Makes calls of the model in the block return the reader's results as logits, `[M, columns]` in float32.

        Args:
            places: `[M]`: indices, among the hidden states read line by line, of the states that give the reader's logits.
            reader: Reads the logits.
        """

        def answer(hidden: Tensor) -> Tensor:
            vocabulary, *factors = self._factors(hidden.flatten(0, -2)[places])
            if vocabulary is not None and reader.supports_shards:
                reader.set_shard(vocabulary)
            row_values: Tensor = _ChunkedHeadFunction.apply(reader, vocabulary, *factors)
            return row_values

        with forward_replaced(self.layer, answer):
            yield

    def rows(self, call: Callable[[], Tensor], places: Tensor) -> LogitRows:
        """Returns logits without gradients, computed a few rows at a time from the hidden states, which are kept.

        Args:
            call: Calls the model, and returns its logits.
            places: `[M]`: see `reading_head`.
        """
        with torch.no_grad():
            with forward_replaced(self.layer, lambda hidden: hidden.flatten(0, -2)[places]):
                hidden_states = call()
            vocabulary, bias, *factors = self._factors(hidden_states)
        assert vocabulary is None, "a frozen model is whole on each rank"
        return LogitRows(len(places), len(factors[1]), hidden_states.device, lambda part: _logits(part, bias, factors))

    def _factors(self, hidden: Tensor) -> tuple[Any, ...]:
        """Returns the layer's part of the vocabulary, its bias, and the factors of its products."""
        base = linear_base(self.layer)
        assert base is not None
        factors = (factor for factor_pair in products(self.layer, hidden) for factor in factor_pair)
        tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (base.bias, *factors)]
        return (_vocabulary(base.weight), *tensors)


def _vocabulary(weight: Tensor) -> VocabularyShard | None:
    """Returns the part of the vocabulary for which a head's weight `[V, H]` computes logits; None for all of it."""
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    first_id = mesh.get_local_rank() * weight.to_local().shape[0]
    return VocabularyShard(first_id, mesh.get_group())


def linear_head(model: nn.Module) -> ChunkedHead | None:
    """Returns the head of the causal language model in a module; None if the model must compute complete logits."""
    causal_model = pretrained_in(model)
    head = None if causal_model is None else causal_model.get_output_embeddings()
    if head is None:
        return None
    if causal_model not in _has_plain_head:
        _has_plain_head[causal_model] = _returns_head_output(causal_model, head)
        if not _has_plain_head[causal_model]:
            log.info("%s makes whole logits: its head is more than a linear layer", type(causal_model).__name__)
    return ChunkedHead(head) if _has_plain_head[causal_model] else None


def _returns_head_output(causal: Any, head: nn.Module) -> bool:
    """Returns whether a model returns its head's output unchanged as logits, and the head is linear. Trunk and head are not
    run.
    """
    prefix, names = causal.base_model_prefix, [name for name, child in causal.named_children() if child is head]
    if not names or not isinstance(getattr(causal, prefix, None), nn.Module) or linear_base(head) is None:
        return False
    probe = torch.tensor([_PROBE])
    substitutes = {prefix: _Constant(_TrunkOutput(torch.zeros_like(probe))), names[0]: _Constant(probe)}
    original_modules = {name: causal._modules[name] for name in substitutes}
    causal._modules.update(substitutes)
    try:
        logits = type(causal).forward(causal, input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
        return torch.equal(logits, torch.tensor([_PROBE]))
    except (
        Exception
    ) as error:  # the forward pass needs something of trunk or head that these lack, so the answer is unknown
        log.debug("%s could not be asked what it does with its head's result", type(causal).__name__, exc_info=error)
        return False
    finally:
        causal._modules.update(original_modules)


class _Constant(nn.Module):
    """Module that returns a constant."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


class _TrunkOutput:
    """Output of a trunk that has only hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, at: int) -> Tensor:
        return (self.last_hidden_state,)[at]


class _ChunkedHeadFunction(torch.autograd.Function):
    """Results of a reader for logits: `[M, H]` times `[V, H]`, plus further such products, plus a bias `[V]`.

    The sum is rounded as the first product is, which is how a layer with an adapter rounds. A chunk's logits are computed
    twice. Where ranks have a part of the vocabulary each, the gradients of their common tensors are summed over them.
    """

    @staticmethod
    def forward(
        ctx: Any, reader: RowReader, vocabulary: VocabularyShard | None, bias: Tensor | None, *factors: Tensor
    ) -> Tensor:
        hidden = factors[0]
        row_values = hidden.new_empty(len(hidden), reader.columns, dtype=torch.float32)
        for rows in chunks(len(hidden), len(factors[1]), hidden.device):
            logits = _logits(rows, bias, factors)
            if vocabulary is not None and not reader.supports_shards:
                logits = vocabulary.gather(logits)
            row_values[rows] = reader.values(logits, rows)
        ctx.save_for_backward(bias, *factors)
        ctx.reader, ctx.vocabulary = reader, vocabulary
        return row_values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bias, *factors = ctx.saved_tensors
        needs_grad, vocabulary = ctx.needs_input_grad[3:], ctx.vocabulary
        gathers_logits = vocabulary is not None and not ctx.reader.supports_shards
        # Sums over chunks are kept in float32; each row of the hidden states lies in one chunk.
        grad_sums: list[Tensor | None] = [
            (
                torch.zeros(factor.shape, dtype=torch.float32, device=factor.device)
                if index % 2
                else torch.empty_like(factor)
            )
            if needs_grad[index]
            else None
            for index, factor in enumerate(factors)
        ]
        grad_bias = (
            None if bias is None or not ctx.needs_input_grad[2] else bias.new_zeros(len(bias), dtype=torch.float32)
        )
        for rows in chunks(len(factors[0]), len(factors[1]), factors[0].device):
            logits = _logits(rows, bias, factors)
            grad_logits = ctx.reader.gradient(vocabulary.gather(logits) if gathers_logits else logits, rows, grad[rows])
            grad_logits = (vocabulary.local(grad_logits, logits.shape[1]) if gathers_logits else grad_logits).to(
                logits.dtype
            )
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            for index in range(0, len(factors), 2):
                x, weight = factors[index], factors[index + 1]
                grad_x, grad_weight, grad_output = grad_sums[index], grad_sums[index + 1], grad_logits.to(x.dtype)
                if grad_x is not None:
                    grad_x[rows] = grad_output @ weight
                if grad_weight is not None and grad_output.dtype == torch.float32:
                    grad_weight.addmm_(grad_output.T, x[rows])
                elif grad_weight is not None:
                    grad_weight += grad_output.T @ x[rows]
        for factor in grad_sums[::2] if vocabulary is not None else []:
            if factor is not None:
                vocabulary.all_reduce_sum(factor)
        gradients = [
            None if factor is None else factor.to(factor_like.dtype)
            for factor, factor_like in zip(grad_sums, factors, strict=True)
        ]
        return None, None, None if grad_bias is None else grad_bias.to(bias.dtype), *gradients


def _logits(rows: slice, bias: Tensor | None, factors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    logits = base_logits = nn.functional.linear(factors[0][rows], factors[1], bias)
    for x, weight in zip(factors[2::2], factors[3::2], strict=True):
        logits = logits + nn.functional.linear(x[rows], weight)
    return logits.to(base_logits.dtype)


class LogitReading(Protocol):
    """Function of the trained model's logits that a loss needs besides log-probs and entropies: one value per token."""

    def rows(self, batch: TokenBatch) -> RowReader | None:
        """Returns a reader with one number for each row of logits that predicts a trained token; None for complete logits."""

    def read(self, logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Returns `[T]` float32, computed from complete logits."""


@dataclass
class TokenScores:
    """Results of one forward pass for a batch's tokens, `[T]`, in the batch's order.

    They are 0 for tokens that are not trained on, and for the first token of a sample.

    Attributes:
        logprobs: log p(token t | tokens before it in its sample) at the requested temperature.
        entropy: Entropy of that distribution, if requested.
        read: Results of the loss's `LogitReading`, if any.
        values: Value of the state before the token, in float32, if the model has a value head.
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
    """Runs one forward pass of a Hugging Face causal language model.

    The model gets one packed row of all samples, if it can read one (`packing`), or a rectangle; never a mask, which keeps the
    fast causal attention kernels.

    Args:
        model: Takes `TokenBatch.inputs` and returns `logits` `[1, T, V]` or `[N, W, V]`.
        batch: The samples.
        temperature: Divides the logits.
        entropy: Also computes entropies.
        reading: Further function of the logits, as they are before division by the temperature.
        share: This rank's share of rows, if several ranks share them: all of them get the same scores.

    Raises:
        ConfigError: The reading needs complete logits, and this rank's model computes a part of them.
    """
    batch = batch.read_by(packs(model))
    trained_tokens, places = batch.predictors()
    reader: RowReader = TokenReader(batch.ids[trained_tokens], temperature, entropy)
    extra_reader = None if reading is None else reading.rows(batch)
    if extra_reader is not None:
        reader = CombinedReader([reader, extra_reader])
    inputs = batch.inputs() if share is None else share.inputs(batch)
    if share is not None:
        trained_tokens, places, reader = _local_part(trained_tokens, places, reader, share.bounds(batch))
    head = linear_head(model) if reading is None or extra_reader is not None else None
    if head is None:
        outputs = model(**inputs, use_cache=False)
        values_read = read_rows(outputs["logits"], places, reader)
    else:
        with head.reading_head(places, reader):
            outputs = model(**inputs, use_cache=False)
        values_read = outputs["logits"]
    token_values = values_read.new_zeros(batch.tokens, values_read.shape[1]).index_copy(0, trained_tokens, values_read)
    critic_values = outputs.get("token_values")
    if share is not None:
        token_values = share.sum(token_values)
        if reading is not None and extra_reader is None:
            raise ConfigError(
                "this loss reads whole logits, of which ranks with actor.parallel.context have parts: set it to 1"
            )
        critic_values = None if critic_values is None else share.gather(critic_values, batch)
    if critic_values is not None:
        critic_values = batch.before(batch.of_tokens(critic_values))
    reading_values = None
    if reading is not None:
        reading_values = reading.read(outputs["logits"], batch) if extra_reader is None else token_values[:, -1]
    return TokenScores(token_values[:, 0], token_values[:, 1] if entropy else None, reading_values, critic_values)


def _local_part(
    where: torch.Tensor, places: torch.Tensor, reader: RowReader, bounds: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, RowReader]:
    """Selects the trained tokens, in the row's order, that a part of the row predicts; returns their indices in it."""
    start, end = (int((places < limit).sum()) for limit in bounds)
    return where[start:end], places[start:end] - bounds[0], OffsetReader(reader, start)


@torch.no_grad()
def logit_rows(model: nn.Module, batch: TokenBatch) -> LogitRows:
    """Returns the logits from which a frozen causal model predicts the trained tokens (`TokenBatch.predictors`).

    They are computed on access, if the model's head is linear.

    Args:
        model: See `token_scores`.
        batch: The samples.
    """
    batch = batch.read_by(packs(model))
    places = batch.predictors()[1]

    def call() -> torch.Tensor:
        logits: torch.Tensor = model(**batch.inputs(), use_cache=False)["logits"]
        return logits

    head = linear_head(model)
    return LogitRows.of(call(), places) if head is None else head.rows(call, places)
