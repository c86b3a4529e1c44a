"""The one form that samples have from the rollout ranks to the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.language.models.vision import Pictures


@dataclass(frozen=True)
class Segments:
    """The samples of a row.

    Attributes:
        runs: (how many, how long) of each run of samples of the same length, none of them empty.
        ends: `[N + 1]` int32, on the model's device: cumulated lengths, from 0.
        longest: Tokens of the longest sample.
        group: The ranks that share the row, if there are several (`tokens.context`).
    """

    runs: tuple[tuple[int, int], ...]
    ends: Tensor
    longest: int
    group: Any = None

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Segments:
        """Those of samples of these lengths, one after the other."""
        filled = [length for length in lengths if length]
        ends = torch.tensor([0, *filled]).cumsum(0).to(device, torch.int32, non_blocking=True)
        return cls(tuple((len(list(run)), length) for length, run in groupby(filled)), ends, max(filled))


@dataclass
class TokenBatch:
    """N samples of T tokens in all, one after the other, without padding.

    A sample is what the model reads in one pass. Most episodes have one; an episode whose context was rewritten on the way, or
    in which several roles speak, has several, and each drawn token is trained in one of them. Samples of the same episode
    and role stand next to each other.

    Attributes:
        cu_seqlens: `[N + 1]` int64, on the host: sample n has the tokens `cu_seqlens[n]` to `cu_seqlens[n + 1] - 1`.
        ids: `[T]` int64: prompts and what came after them.
        mask: `[T]` bool: tokens that are trained on.
        turn: `[T]` int64: which turn of the model wrote a token, or was the first to read it; 0 in a single turn.
        columns: Further values of the tokens by name, `[T]` or `[T, k]`. Values of the first token of a sample, which
            nothing predicts, are masked out.
        episode: `[N]` int64: which episode a sample is of; unique in a step.
        role: `[N]` int64: who speaks in it, where several do.
        group: `[N]` int64: which prompt its episode answers.
        reward: `[N]` float32: what its episode was worth.
        pad_id: Token on padding, where the model wants a rectangle.
        packed: Whether the model reads the samples as one row, one after the other, rather than as a rectangle.
        pictures: What the samples look at; None where nobody sees anything.
    """

    cu_seqlens: Tensor
    ids: Tensor
    mask: Tensor
    turn: Tensor
    episode: Tensor
    role: Tensor
    group: Tensor
    reward: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    pad_id: int = 0
    packed: bool = False
    pictures: Pictures | None = None

    @classmethod
    def of(
        cls,
        ids: Sequence[Sequence[int] | Tensor],
        mask: Sequence[Sequence[bool] | Tensor],
        columns: Mapping[str, Sequence[Sequence[float] | Tensor]] | None = None,
        *,
        pad_id: int = 0,
        pictures: Pictures | None = None,
    ) -> TokenBatch:
        """Samples that are each an episode, a single turn, and a prompt of their own.

        Raises:
            ValueError: Something does not have exactly one value for each token.
        """
        lengths = [len(sample) for sample in ids]

        def joined(name: str, values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
            tensors = [torch.as_tensor(value, dtype=dtype) for value in values]
            for value, length in zip(tensors, lengths, strict=True):
                if value.shape[:1] != (length,):
                    raise ValueError(f"{name} has shape {tuple(value.shape)}; its sample has {length} tokens")
            return torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype or torch.float32)

        number = torch.arange(len(lengths))
        tokens = joined("ids", ids, torch.int64)
        return cls(
            cumulated(lengths), tokens, joined("mask", mask, torch.bool), torch.zeros_like(tokens), number,
            torch.zeros_like(number), number, torch.zeros(len(lengths)),
            {name: joined(f"column {name}", values) for name, values in (columns or {}).items()}, pad_id,
            pictures=pictures,
        )  # fmt: skip

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """The samples of several batches with the same columns, one batch after the other.

        Raises:
            ValueError: There is none.
        """
        if not batches:
            raise ValueError("there is no batch to join")
        first = batches[0]
        lengths = torch.cat([batch.lengths for batch in batches])
        columns = {name: torch.cat([batch.columns[name] for batch in batches]) for name in first.columns}
        rest = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in (*_OF_TOKENS, *_OF_SAMPLES)}
        pictures = Pictures.joined([(batch.pictures, len(batch)) for batch in batches])
        return cls(
            cu_seqlens=cumulated(lengths),
            columns=columns,
            pad_id=first.pad_id,
            packed=first.packed,
            pictures=pictures,
            **rest,
        )

    # -- shapes ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.cu_seqlens) - 1

    @property
    def tokens(self) -> int:
        """T: number of tokens."""
        return len(self.ids)

    @property
    def lengths(self) -> Tensor:
        """`[N]` int64, on the host."""
        return self.cu_seqlens.diff()

    @cached_property
    def width(self) -> int:
        """W: tokens of the longest sample; at least 2, since one alone predicts nothing and a model may refuse it."""
        return max(2, int(self.lengths.max())) if len(self) else 2

    @cached_property
    def places(self) -> Tensor:
        """`[T]`: where in the rectangle, read line by line, each token stands."""
        shift = torch.arange(len(self)) * self.width - self.cu_seqlens[:-1]
        places = torch.arange(self.tokens) + torch.repeat_interleave(shift, self.lengths)
        return places.to(self.ids.device)

    def padded(self, values: Tensor, fill: float = 0) -> Tensor:
        """`[T]` values of the tokens as `[N, W]`, padded on the right: what models, estimators and losses take."""
        full = values.new_full((len(self) * self.width, *values.shape[1:]), fill)
        return full.index_copy(0, self.places, values).view(len(self), self.width, *values.shape[1:])

    def flat(self, rectangle: Tensor) -> Tensor:
        """`[N, W]` back to `[T]`."""
        return rectangle.flatten(0, 1).index_select(0, self.places)

    def attended(self) -> Tensor:
        """`[N, W]` bool: where there is a token rather than padding."""
        return torch.arange(self.width, device=self.ids.device) < self.lengths.to(self.ids.device)[:, None]

    # -- what a model reads ---------------------------------------------------------------------------------------

    def read_by(self, packed: bool) -> TokenBatch:
        """The same samples, read as one row or as a rectangle."""
        return self if packed == self.packed else dataclasses.replace(self, packed=packed)

    def inputs(self) -> dict[str, Any]:
        """A model's arguments: `input_ids` `[N, W]`, or `[1, T]` with positions and, for its attention, `Segments`; and
        `Pictures.inputs`, which have positions of their own.

        Neither has a mask. In a rectangle, padding is on the right, where no token attends to it, and the model's own
        positions are right. A row of less than two tokens is filled up: one alone predicts nothing and a model may refuse it.
        """
        formed = (lambda values: values[None]) if self.packed else self.padded
        looks = {} if self.pictures is None else self.pictures.inputs(self.cu_seqlens, formed)
        if not self.packed:
            return {"input_ids": self.padded(self.ids, self.pad_id), **looks}
        lengths, device = self.lengths, self.ids.device
        positions = torch.arange(self.tokens) - torch.repeat_interleave(self.cu_seqlens[:-1], lengths)
        ids, positions, alone = self.ids, positions.to(device, non_blocking=True), max(0, 2 - self.tokens)
        if alone:
            ids, positions = (
                nn.functional.pad(ids, (0, alone), value=self.pad_id),
                nn.functional.pad(positions, (0, alone)),
            )
        segments = Segments.of([*lengths.tolist(), *[1] * alone], device)
        return {"input_ids": ids[None], "position_ids": positions[None], "segments": segments, **looks}

    def of_tokens(self, found: Tensor) -> Tensor:
        """What a model gave for `inputs`, `[N, W, …]` or `[1, T, …]`, as `[T, …]`."""
        return found[0, : self.tokens] if self.packed else self.flat(found)

    def before(self, values: Tensor) -> Tensor:
        """`[T]` values moved on by one token in each sample: each token gets that of the one before it, the first 0."""
        if not len(values):
            return values
        moved = nn.functional.pad(values[:-1], (1, 0))
        first = self.cu_seqlens[:-1][self.lengths > 0].to(values.device)
        return moved.index_fill(0, first, 0.0)

    def predictors(self) -> tuple[Tensor, Tensor]:
        """Where in `[T]` the tokens stand that are trained on; and where in what the model gave, read line by line, it says
        what each of them is: one before. A sample's first, which nothing predicts, is not among them."""
        trained = self.mask.clone()
        trained[self.cu_seqlens[:-1][self.lengths > 0].to(trained.device)] = False
        where = torch.nonzero(trained).flatten()
        return where, (where if self.packed else self.places[where]) - 1

    # -- parts ----------------------------------------------------------------------------------------------------

    def tokens_of(self, samples: Tensor) -> Tensor:
        """Where in `[T]` the tokens of some samples stand, one sample after the other."""
        lengths = self.lengths[samples]
        shift = self.cu_seqlens[samples] - cumulated(lengths)[:-1]
        return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)

    def select(self, samples: Tensor) -> TokenBatch:
        """Some of the samples, in this order."""
        where = self.tokens_of(samples)
        parts = {name: getattr(self, name)[where] for name in _OF_TOKENS}
        parts |= {name: getattr(self, name)[samples] for name in _OF_SAMPLES}
        columns = {name: values[where] for name, values in self.columns.items()}
        cuts = cumulated(self.lengths[samples])
        pictures = None if self.pictures is None else self.pictures.select(samples)
        return TokenBatch(
            cu_seqlens=cuts, columns=columns, pad_id=self.pad_id, packed=self.packed, pictures=pictures, **parts
        )

    def split(self, counts: Sequence[int]) -> list[TokenBatch]:
        """Its samples as several batches, so many in each."""
        return [self.select(samples) for samples in torch.arange(len(self)).split(list(counts))]

    def nothing(self) -> TokenBatch:
        """One sample of no tokens, with the same columns: a batch that trains nothing."""
        none = self.tokens_of(torch.zeros(0, dtype=torch.long))
        parts = {name: getattr(self, name)[none] for name in _OF_TOKENS}
        parts |= {name: getattr(self, name).new_zeros(1) for name in _OF_SAMPLES}
        columns = {name: values[none] for name, values in self.columns.items()}
        cuts = cumulated([0])
        return TokenBatch(cu_seqlens=cuts, columns=columns, pad_id=self.pad_id, packed=self.packed, **parts)

    def by_episode(self) -> TokenBatch:
        """The same tokens, with all that one role says in an episode as one sequence: what gets an advantage. A rectangle of
        the result (`padded`) has a sequence's tokens in the order of time. If an episode has several samples, the result is no
        input for a model."""
        if not len(self):
            return self
        same = (self.episode[1:] == self.episode[:-1]) & (self.role[1:] == self.role[:-1])
        first = torch.cat([torch.tensor([True]), ~same.cpu()])
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts |= {name: getattr(self, name)[first] for name in _OF_SAMPLES}
        return _Sequences(**{**parts, "cu_seqlens": torch.cat([self.cu_seqlens[:-1][first], self.cu_seqlens[-1:]])})

    def sequence(self) -> Tensor:
        """`[N]` int64: which sequence a sample is of, or a part of: what one role says in an episode."""
        roles = int(self.role.max()) + 1 if len(self) else 1
        return self.episode * roles + self.role

    def sequence_tokens(self) -> Tensor:
        """`[T]` int64: trained tokens of each token's sequence, of which all samples are in this batch."""
        sequence = self.sequence().unique(return_inverse=True)[1]
        which = torch.repeat_interleave(sequence, self.lengths.to(sequence.device))
        return self.mask.new_zeros(len(self) + 1, dtype=torch.long).index_add(0, which, self.mask.long())[which]

    def to(self, device: torch.device) -> TokenBatch:
        """On a device, but for `cu_seqlens`."""
        if device.type == "cpu":
            return self
        parts = {name: getattr(self, name).to(device, non_blocking=True) for name in (*_OF_TOKENS, *_OF_SAMPLES)}
        columns = {name: values.to(device, non_blocking=True) for name, values in self.columns.items()}
        pictures = None if self.pictures is None else self.pictures.to(device)
        return dataclasses.replace(self, columns=columns, pictures=pictures, **parts)

    # -- on the way -----------------------------------------------------------------------------------------------

    def pack(self) -> dict[str, Any]:
        """The batch as a few arrays, whatever N is, to go through a channel."""
        arrays = {name: getattr(self, name).numpy() for name in _OF_SAMPLES}
        small = {"ids": np.int32, "turn": np.int16}
        arrays |= {name: getattr(self, name).numpy().astype(small.get(name, bool)) for name in _OF_TOKENS}
        columns = {name: values.numpy() for name, values in self.columns.items()}
        looks = {} if self.pictures is None else {"pictures": self.pictures.pack()}
        lengths = self.lengths.numpy().astype(np.int32)
        return {**arrays, "lengths": lengths, "columns": columns, "pad_id": self.pad_id, **looks}

    @classmethod
    def unpack(cls, message: Mapping[str, Any]) -> TokenBatch:
        """The batch in a message that `pack` made; a copy, since what came in may be memory of the sender's."""
        parts: dict[str, Any] = {name: torch.from_numpy(np.array(message[name])) for name in _OF_SAMPLES}
        wide = {"ids": np.int64, "turn": np.int64}
        for name in _OF_TOKENS:
            parts[name] = torch.from_numpy(np.array(message[name], dtype=wide.get(name, bool)))
        columns = {name: torch.from_numpy(np.array(values)) for name, values in message["columns"].items()}
        cuts = cumulated(np.asarray(message["lengths"], np.int64))
        if "pictures" in message:
            parts["pictures"] = Pictures.unpack(message["pictures"])
        return cls(cu_seqlens=cuts, columns=columns, pad_id=int(message["pad_id"]), **parts)


class _Sequences(TokenBatch):
    """Sequences of a batch, whose samples stand in an order of their own, in the order of time: by turn, then by position.
    Each turn is trained in one sample, so a sequence's trained tokens are those of an episode in one piece."""

    @cached_property
    def places(self) -> Tensor:
        """`[T]`: where in the rectangle each token stands."""
        line = torch.repeat_interleave(torch.arange(len(self)), self.lengths)
        turns = int(self.turn.max()) + 1 if self.tokens else 1
        order = torch.argsort(line * turns + self.turn, stable=True)
        standing = line * self.width + torch.arange(self.tokens) - self.cu_seqlens[:-1][line]
        return torch.empty_like(order).index_copy(0, order, standing)


_OF_TOKENS = ("ids", "mask", "turn")
_OF_SAMPLES = ("episode", "role", "group", "reward")


def cumulated(lengths: Sequence[int] | np.ndarray | Tensor) -> Tensor:
    """`[N]` lengths to `[N + 1]` ends, from 0."""
    ends = torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends])
