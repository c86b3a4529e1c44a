"""Log-probs and entropies of tokens, from a causal model's hidden states or from its logits.

With a vocabulary of 150 000 and 16 000 tokens, the logits take 5 GB in bfloat16; log_softmax in float32 would add 10 GB in
the forward pass and 10 GB in the backward pass. If the LM head is a linear layer whose output the model returns unchanged
(`linear_head`), logits are computed in chunks from the hidden states of the trained tokens, once forward and once backward,
so that no tensor has their full size. For other heads, and for losses that need all logits, the model computes all logits.
Readers process these logits in chunks of rows, and only their gradient has the full size again.
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
from rlhpc.language.models.logit_chunks import chunk_rows
from rlhpc.language.models.packing import exact_tile, packs
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.devices import device_memory
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.torch_adapter import add_product, forward_replaced
from rlhpc.training.lora import linear_base, products


def chunks(num_rows: int, width: int, device: torch.device, memory: float | None = None) -> list[slice]:
    """Splits `num_rows` rows of `width` logits into slices of at most `chunk_rows` rows.

    Args:
        num_rows, width: Number of rows, and of logits in a row.
        device: Device of the logits.
        memory: Bytes of the device's memory; None makes the smallest chunks, for a device that others fill.
    """
    size = chunk_rows(width, is_on_host=device.type == "cpu", memory=memory)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def scale_logits(logits: Tensor, scale: float) -> Tensor:
    """Converts logits to float32 and multiplies them by `scale`."""
    z = logits.float()
    return z * scale if scale != 1.0 else z


@dataclass(frozen=True)
class LogitRows:
    """M rows of a model's logits, without gradients, computed on access.

    Attributes:
        number: M, number of rows.
        width: V, number of logits in a row.
        device: Device of the logits.
        make: Function that computes a slice of the rows, `[m, V]`, in the model's dtype.
    """

    number: int
    width: int
    device: torch.device
    make: Callable[[slice], Tensor]

    @classmethod
    def from_logits(cls, logits: Tensor, positions: Tensor) -> LogitRows:
        """Selects the rows at flat indices `positions` `[M]` of complete logits `[N, W, V]`."""
        flat_logits = logits.detach().flatten(0, -2)
        return cls(len(positions), flat_logits.shape[1], flat_logits.device, lambda part: flat_logits[positions[part]])


@dataclass(frozen=True)
class VocabularyShard:
    """Part of the vocabulary for which a rank's LM head computes logits.

    Attributes:
        first_id: First token id of the part.
        group: Process group of the ranks among which the vocabulary is divided.
    """

    first_id: int
    group: Any

    def gather(self, logits: Tensor) -> Tensor:
        """Gathers logits of the full vocabulary, `[m, V]`, from each rank's `[m, V / n]`."""
        rank_logits = [torch.empty_like(logits) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rank_logits, logits.contiguous(), group=self.group)
        return torch.cat(rank_logits, 1)

    def local(self, gradient: Tensor, width: int) -> Tensor:
        """Returns this rank's `width` columns of a gradient `[m, V]`."""
        return gradient[:, self.first_id : self.first_id + width]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks in place, and returns it."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by its maximum over the ranks in place, and returns it."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor


@former_members(say="values", divided="supports_shards", divided_by="set_shard")
class RowReader(abc.ABC):
    """Function of M rows of logits, computed chunk by chunk in the forward pass, and its gradient.

    Attributes:
        columns: Number of results per row.
        supports_shards: Whether the reader accepts a rank's part of the vocabulary, after `set_shard`; other readers get
            logits of the full vocabulary.
    """

    columns: int = 1
    supports_shards: bool = False

    def set_shard(self, vocabulary: VocabularyShard) -> None:  # noqa: B027 (only readers with `supports_shards` need it)
        """Sets the part of the vocabulary that the logits of later calls cover."""

    @abc.abstractmethod
    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Computes the results of rows `[m, V]`: `[m, columns]` float32; `part` is their slice of the M rows."""

    @abc.abstractmethod
    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Computes the gradient of the logits, `[m, V]` float32, from the gradient `[m, columns]` of the results.

        The caller first calls `values` for all rows.
        """


class TokenReader(RowReader):
    """Reader that computes log-probs of target tokens and, if requested, entropies.

    Args:
        targets: `[M]`, the target tokens.
        temperature: Divisor of the logits.
        compute_entropy: Whether to compute entropies as a second column.
    """

    def __init__(self, targets: Tensor, temperature: float = 1.0, compute_entropy: bool = False) -> None:
        self._targets = targets
        self._scale = 1.0 / temperature
        self._entropy = compute_entropy
        self.columns = 1 + compute_entropy
        self._vocabulary: VocabularyShard | None = None
        self._log_sums = torch.empty(len(targets), dtype=torch.float32, device=targets.device)
        self._entropies = torch.empty_like(self._log_sums) if compute_entropy else self._log_sums

    supports_shards = True

    def set_shard(self, vocabulary: VocabularyShard) -> None:
        """Sets the part of the vocabulary; see `RowReader.set_shard`."""
        self._vocabulary = vocabulary

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Computes log-probs and entropies; see `RowReader.values`."""
        logprobs, self._log_sums[part], entropies = logprobs_and_entropy(
            scale_logits(logits, self._scale), self._targets[part], self._entropy, self._vocabulary
        )
        if entropies is None:
            return logprobs[:, None]
        self._entropies[part] = entropies
        return torch.stack([logprobs, entropies], -1)

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Computes the gradient of log-probs and entropies; see `RowReader.gradient`."""
        weights = grad[:, 0], grad[:, 1] if self._entropy else None
        scaled_logits, forward_results = (
            scale_logits(logits, self._scale),
            (self._log_sums[part], self._entropies[part], self._targets[part]),
        )
        grad_logits = gradient(scaled_logits, *forward_results, *weights, self._vocabulary)
        return grad_logits.mul_(self._scale) if self._scale != 1.0 else grad_logits


class CombinedReader(RowReader):
    """Several readers of the same rows, so that their logits are computed only once."""

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
            if reader_grad.any():  # columns used only for metrics have no gradient
                reader_grads = reader.gradient(logits, part, reader_grad)
                grad_sum = reader_grads if grad_sum is None else grad_sum.add_(reader_grads)
        return torch.zeros_like(logits, dtype=torch.float32) if grad_sum is None else grad_sum


class OffsetReader(RowReader):
    """Adapter that applies a reader of all ranks' rows to one rank's rows, which begin at `start`."""

    def __init__(self, reader: RowReader, start: int) -> None:
        self._reader = reader
        self._start = start
        self.columns = reader.columns
        self.supports_shards = reader.supports_shards

    def _global_rows(self, part: slice) -> slice:
        return slice(part.start + self._start, part.stop + self._start)

    def set_shard(self, vocabulary: VocabularyShard) -> None:
        """Sets the part of the vocabulary; see `RowReader.set_shard`."""
        self._reader.set_shard(vocabulary)

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Computes results of this rank's rows; see `RowReader.values`."""
        return self._reader.values(logits, self._global_rows(part))

    def gradient(self, logits: Tensor, part: slice, grad: Tensor) -> Tensor:
        """Computes the gradient of this rank's rows; see `RowReader.gradient`."""
        return self._reader.gradient(logits, self._global_rows(part), grad)


def read_rows(logits: Tensor, places: Tensor, reader: RowReader) -> Tensor:
    """Applies a reader to selected rows of complete logits, with gradients.

    Args:
        logits: `[N, W, V]`.
        places: `[M]`, flat indices of the rows among N × W.
        reader: The reader.

    Returns:
        The reader's results, `[M, columns]` float32.
    """
    row_values: Tensor = _ReadRowsFunction.apply(logits.flatten(0, -2), places, reader)
    return row_values


class _ReadRowsFunction(torch.autograd.Function):
    """Autograd function that applies a reader to selected rows of logits `[R, V]`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, reader: RowReader) -> Tensor:
        row_values = logits.new_empty(len(places), reader.columns, dtype=torch.float32)
        for rows in chunks(len(places), logits.shape[1], logits.device, device_memory(logits.device)):
            row_values[rows] = reader.values(logits[places[rows]], rows)
        ctx.save_for_backward(logits, places)
        ctx.reader = reader
        return row_values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor, None, None]:
        logits, places = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for rows in chunks(len(places), logits.shape[1], logits.device, device_memory(logits.device)):
            row_grads = ctx.reader.gradient(logits[places[rows]], rows, grad_values[rows]).to(grad.dtype)
            grad.index_put_((places[rows],), row_grads, accumulate=True)  # several samples may read the same row
        return grad, None, None


def logprobs_and_entropy(
    z: Tensor, targets: Tensor, computes_entropy: bool, vocab_shard: VocabularyShard | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes log-probs and entropies from logits that are already divided by the temperature.

    Args:
        z: Logits, `[m, V]`, or `[m, V / n]` for a part of the vocabulary.
        targets: Target tokens, `[m]`, as ids of the full vocabulary.
        computes_entropy: Whether to compute the entropy.
        vocab_shard: Part of the vocabulary that `z` covers, or None; all ranks of its group must call this function.

    Returns:
        log p(target), log Σ e^z, and the entropy or None; `[m]` each.
    """
    if vocab_shard is not None:
        return _sharded_logprobs_and_entropy(z, targets, computes_entropy, vocab_shard)
    log_sum = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(1, targets[:, None]).squeeze(1) - log_sum
    if not computes_entropy:
        return logprobs, log_sum, None
    # −Σ p log p; log Σ e^z − Σ p z would lose precision by cancellation for large logits
    log_p = z - log_sum[:, None]
    return logprobs, log_sum, -log_p.exp().mul_(log_p).sum(-1)


def _sharded_logprobs_and_entropy(
    z: Tensor, targets: Tensor, computes_entropy: bool, vocab_shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Computes `logprobs_and_entropy` if each rank has a part of the vocabulary.

    The ranks exchange three numbers per row, or four with the entropy.
    """
    max_logits = vocab_shard.all_reduce_max(z.amax(-1))
    columns, is_local = _local_columns(targets, z.shape[1], vocab_shard)
    local_target = torch.where(is_local, z.gather(1, columns[:, None]).squeeze(1) - max_logits, 0.0)
    shifted_logits = z - max_logits[:, None]
    exponentials = shifted_logits.exp()
    local_sums = [exponentials.sum(-1), local_target]
    if computes_entropy:  # relative to the largest logit, which avoids cancellation
        local_sums.append(exponentials.mul_(shifted_logits).sum(-1))
    exp_sum, target_logits, *weighted_sum = vocab_shard.all_reduce_sum(torch.stack(local_sums)).unbind(0)
    log_exp_sum = exp_sum.log()
    return (
        target_logits - log_exp_sum,
        log_exp_sum + max_logits,
        log_exp_sum - weighted_sum[0] / exp_sum if weighted_sum else None,
    )


def _local_columns(targets: Tensor, width: int, vocabulary: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Returns each target's column in a part of the vocabulary, clamped to the part, and whether the part has the target."""
    local_ids = targets - vocabulary.first_id
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
    """Computes the gradient of `logprobs_and_entropy` with respect to `z`, of the same shape.

    `entropies` is used only if `grad_entropy` is not None.
    """
    # d log p(y) / dz = onehot(y) − p; dH / dz = −p (log p + H)
    log_p = z - log_sum[:, None]
    p = log_p.exp()
    weight = -grad_logprobs[:, None]
    if grad_entropy is not None:
        weight = log_p.add_(entropies[:, None]).mul_(-grad_entropy[:, None]).add_(weight)
    if vocabulary is not None:
        targets, is_local = _local_columns(targets, z.shape[1], vocabulary)
        grad_logprobs = torch.where(is_local, grad_logprobs, 0.0)
    return p.mul_(weight).scatter_add_(1, targets[:, None], grad_logprobs[:, None])


log = logging.getLogger(__name__)
#: Whether a model returns its linear head's output unchanged.
_has_plain_head: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
#: Probe logits, which scaling, bounding, shifting or rounding would change.
_PROBE = ((-900.0, -1.0, 0.1, 7.0, 600.0),)


@dataclass(frozen=True)
class ChunkedHead:
    """LM head that computes a reader's results chunk by chunk instead of all logits (chunked loss).

    Attributes:
        layer: A linear layer, or an adapter around one.
    """

    layer: nn.Module

    @contextlib.contextmanager
    def reading_head(self, places: Tensor, reader: RowReader) -> Iterator[None]:
        """Replaces the LM head within the block: the model returns the reader's results `[M, columns]`, float32, as logits.

        Args:
            places: `[M]`, flat indices of the hidden states whose logits the reader gets.
            reader: The reader.
        """

        def read_hidden_states(hidden_states: Tensor) -> Tensor:
            vocabulary, *factors = self._factors(hidden_states.flatten(0, -2)[places])
            if vocabulary is not None and reader.supports_shards:
                reader.set_shard(vocabulary)
            row_values: Tensor = _ChunkedHeadFunction.apply(reader, vocabulary, *factors)
            return row_values

        with forward_replaced(self.layer, read_hidden_states):
            yield

    def rows(self, call: Callable[[], Tensor], places: Tensor) -> LogitRows:
        """Returns logits without gradients; keeps the hidden states and computes slices of the logits on access.

        Args:
            call: Function that calls the model and returns its logits.
            places: `[M]`; see `reading_head`.
        """
        with torch.no_grad():
            with forward_replaced(self.layer, lambda hidden: hidden.flatten(0, -2)[places]):
                hidden_states = call()
            vocabulary, bias, *factors = self._factors(hidden_states)
        assert vocabulary is None, "a frozen model is whole on each rank"
        return LogitRows(len(places), len(factors[1]), hidden_states.device, lambda part: _logits(part, bias, factors))

    def _factors(self, hidden_states: Tensor) -> tuple[Any, ...]:
        """Returns the layer's part of the vocabulary, its bias, and the factors of its matrix products, all local tensors."""
        base = linear_base(self.layer)
        assert base is not None
        factors = (factor for factor_pair in products(self.layer, hidden_states) for factor in factor_pair)
        tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (base.bias, *factors)]
        return (_vocabulary(base.weight), *tensors)


def _vocabulary(weight: Tensor) -> VocabularyShard | None:
    """Returns the part of the vocabulary that a head's weight `[V, H]` covers; None for the full vocabulary."""
    if not isinstance(weight, DTensor):
        return None
    mesh = weight.device_mesh
    first_id = mesh.get_local_rank() * weight.to_local().shape[0]
    return VocabularyShard(first_id, mesh.get_group())


def linear_head(model: nn.Module) -> ChunkedHead | None:
    """Returns the LM head of the causal model in a module; None if the model itself must compute the logits."""
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
    """Returns whether the head is linear and the model returns the head's output unchanged as logits.

    The check runs the model's forward method with constants in place of trunk and head.
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
    ) as error:  # the forward method needs attributes that the substitutes lack, so the answer is unknown
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
    """Trunk output with hidden states only; all other attributes are None."""

    def __init__(self, hidden_states: Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _ChunkedHeadFunction(torch.autograd.Function):
    """Autograd function from hidden states and weights to a reader's results.

    Logits are `[M, H]` times `[V, H]` transposed, plus further such products (adapters), plus a bias `[V]`. The sum is rounded
    to the dtype of the first product, as in a layer with an adapter. The logits of a chunk are computed twice, forward and
    backward. If each rank has a part of the vocabulary, the gradients of the products' inputs are summed over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, reader: RowReader, vocabulary: VocabularyShard | None, bias: Tensor | None, *factors: Tensor
    ) -> Tensor:
        hidden_states = factors[0]
        row_values = hidden_states.new_empty(len(hidden_states), reader.columns, dtype=torch.float32)
        for rows in chunks(
            len(hidden_states), len(factors[1]), hidden_states.device, device_memory(hidden_states.device)
        ):
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
        # Weights' gradients are summed over chunks in float32; each row of the hidden states lies in one chunk.
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
        device = factors[0].device
        for rows in chunks(len(factors[0]), len(factors[1]), device, device_memory(device)):
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
                if grad_weight is not None:
                    add_product(grad_weight, grad_output.T, x[rows])
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
    """Per-token function of the trained model's logits that a loss needs besides log-probs and entropies."""

    def rows(self, batch: TokenBatch) -> RowReader | None:
        """Returns a reader with one result per row that predicts a trained token; None if `read` needs complete logits."""

    def read(self, logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """Computes the function from complete logits; returns `[T]` float32."""


@dataclass
class TokenScores:
    """Results of one forward pass for the tokens of a batch, `[T]` each.

    Log-probs, entropies and `read` are 0 for tokens that are not trained and for the first token of a sample.

    Attributes:
        logprobs: log p(token | earlier tokens of its sample) at the requested temperature.
        entropy: Entropy of the distribution of the token; None if not requested.
        read: Results of the loss's `LogitReading`; None if there is none.
        values: Value of the state before the token, float32; None if the model has no value head.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    read: torch.Tensor | None = None
    values: torch.Tensor | None = None


def token_scores(
    model: nn.Module,
    batch: TokenBatch,
    temperature: float = 1.0,
    computes_entropy: bool = False,
    reading: LogitReading | None = None,
    share: RowShare | None = None,
) -> TokenScores:
    """Computes log-probs, and optionally entropies, of a batch by one forward pass of a Hugging Face causal model.

    The model gets all samples as one packed row if it supports packing (`packing`), otherwise as a rectangle. The model gets
    no mask, so that attention uses the fast causal kernels.

    Args:
        model: Model that takes `TokenBatch.inputs` and returns `logits`, `[1, T, V]` or `[N, W, V]`.
        batch: The samples.
        temperature: Divisor of the logits.
        computes_entropy: Whether to compute entropies.
        reading: Further function of the logits before division by the temperature.
        share: This rank's part of each row in context parallelism; all ranks get the same scores.

    Raises:
        ConfigError: `reading` needs complete logits, and context parallelism divides them among ranks.
    """
    batch = batch.read_by(packs(model))
    trained_tokens, places = batch.predictors()
    targets, tile = batch.ids[trained_tokens], exact_tile(model) if reading is None else 0
    if tile:
        places, targets = (nn.functional.pad(values, (0, -len(values) % tile)) for values in (places, targets))
    reader: RowReader = TokenReader(targets, temperature, computes_entropy)
    extra_reader = None if reading is None else reading.rows(batch)
    if extra_reader is not None:
        reader = CombinedReader([reader, extra_reader])
    inputs = batch.inputs() if share is None else share.inputs(batch)
    if tile:
        inputs |= {
            name: nn.functional.pad(inputs[name], (0, -inputs[name].shape[1] % tile))
            for name in ("input_ids", "position_ids")
        }
    if share is not None:
        trained_tokens, places, reader = _select_local_rows(trained_tokens, places, reader, share.bounds(batch))
    head = linear_head(model) if reading is None or extra_reader is not None else None
    if head is None:
        outputs = model(**inputs, use_cache=False)
        values_read = read_rows(outputs["logits"], places, reader)
    else:
        with head.reading_head(places, reader):
            outputs = model(**inputs, use_cache=False)
        values_read = outputs["logits"]
    values_read = values_read[: len(trained_tokens)]
    values = values_read.new_zeros(batch.tokens, values_read.shape[1]).index_copy(0, trained_tokens, values_read)
    critic_values = outputs.get("token_values")
    if share is not None:
        values = share.sum(values)
        if reading is not None and extra_reader is None:
            raise ConfigError(
                "this loss reads whole logits, of which ranks with actor.parallel.context have parts: set it to 1"
            )
        critic_values = None if critic_values is None else share.gather(critic_values, batch)
    if critic_values is not None:
        critic_values = batch.before(batch.of_tokens(critic_values))
    reading_values = None
    if reading is not None:
        reading_values = reading.read(outputs["logits"], batch) if extra_reader is None else values[:, -1]
    return TokenScores(values[:, 0], values[:, 1] if computes_entropy else None, reading_values, critic_values)


def _select_local_rows(
    trained_tokens: torch.Tensor, places: torch.Tensor, reader: RowReader, bounds: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, RowReader]:
    """Selects the trained tokens that this rank's part of a row predicts.

    Args:
        trained_tokens: Indices of the trained tokens in the batch, ascending.
        places: Indices in the row of the outputs that predict the trained tokens.
        reader: Reader of all trained tokens.
        bounds: Start and end of this rank's part of the row.

    Returns:
        The selected trained tokens; the indices of the outputs that predict them in this rank's part; and the reader of these
        outputs.
    """
    start, end = (int((places < limit).sum()) for limit in bounds)
    return trained_tokens[start:end], places[start:end] - bounds[0], OffsetReader(reader, start)


@torch.no_grad()
def logit_rows(model: nn.Module, batch: TokenBatch) -> LogitRows:
    """Returns the logits with which a frozen causal model predicts the trained tokens (`TokenBatch.predictors`).

    If the model's head is linear, the logits are computed on access.

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
    return LogitRows.from_logits(call(), places) if head is None else head.rows(call, places)
