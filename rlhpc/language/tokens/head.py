"""A causal model's head asked about some tokens alone: what is read of their logits, of which no tensor `[T, V]` is made.

The head is asked in its place, in the middle of the model's own forward pass. So whatever a training backend does around the
model and its layers (gathering sharded weights, forward and backward), it does for this, too; what the model returns as its
logits are these answers. That needs a head that is a linear layer, maybe with an adapter, and a model that gives the head's
result as it is: some divide it, or bound it by a tanh. `linear_head` finds out which it is by a call of the model's forward
pass in which something else stands for trunk and head.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhpc.language.tokens.model import pretrained_in
from rlhpc.language.tokens.rows import LogitRows, RowReader, Vocabulary, chunks
from rlhpc.training.lora import linear_base, products

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
