"""Token batches: samples as flat tensors, from the rollout ranks to the backward pass."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.language.config.training import SHORTEST_PREFIX
from rlhpc.language.data.images import PromptImages, positions
from rlhpc.runtime.former_names import former_members


@dataclass(frozen=True)
class SharedPrefixes:
    """Shared prefixes of a packed row, and the tokens that attend to them. No token occurs twice, so one call of an attention
    kernel computes all of them.

    Attributes:
        queries: `[Q]` int64, row positions of the attending tokens, prefix by prefix.
        keys: `[K]` int64, row positions of the prefixes' tokens.
        query_ends, key_ends: `[N + 1]` int32, cumulative numbers of both for the N prefixes, from 0.
        longest: Largest number of attending tokens, and of tokens, of a prefix.
    """

    queries: Tensor
    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest: tuple[int, int]

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[range, range]], device: torch.device) -> SharedPrefixes:
        """Creates the prefixes from the row positions of each prefix's (attending tokens, tokens)."""
        sides = list(zip(*spans, strict=True))  # attending tokens, and tokens
        queries, keys = (torch.cat([torch.arange(r.start, r.stop) for r in side]) for side in sides)
        query_ends, key_ends = (cumulate([len(r) for r in side]).int() for side in sides)
        return cls(queries, keys, query_ends, key_ends, (max(map(len, sides[0])), max(map(len, sides[1])))).to(device)

    def to(self, device: torch.device) -> SharedPrefixes:
        """Moves the tensors to a device."""
        names = ("queries", "keys", "query_ends", "key_ends")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass(frozen=True)
class Segments:
    """Boundaries of the samples in a packed row.

    With shared prefixes, a segment is what a sample has in addition to the prefix that it shares with an earlier one.

    Attributes:
        runs: (number of samples, length) of each run of consecutive samples of equal length, without empty samples.
        ends: `[N + 1]` int32 on the model's device, cumulative lengths from 0.
        longest: Number of tokens of the longest sample.
        process_group: Process group of the ranks that share the row (`context_parallel`); None without context parallelism.
        prefixes: Shared prefixes, from those of most samples to those within them.
    """

    runs: tuple[tuple[int, int], ...]
    ends: Tensor
    longest: int
    process_group: Any = None
    prefixes: tuple[SharedPrefixes, ...] = ()

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device, prefixes: Sequence[SharedPrefixes] = ()) -> Self:
        """Creates the segments of consecutive samples of these lengths; omits empty samples."""
        nonzero_lengths = [length for length in lengths if length]
        ends = torch.tensor([0, *nonzero_lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)
        runs = tuple((len(list(group)), length) for length, group in groupby(nonzero_lengths))
        return cls(runs, ends, max(nonzero_lengths), prefixes=tuple(prefixes))


@dataclass(frozen=True)
class PackedRow:
    """Row in which a model reads a batch of T tokens: R tokens, fewer than T if samples share prefixes.

    Attributes:
        tokens: `[R]` int64, index in the batch of each token of the row.
        places: `[T]` int64, position in the row of each token of the batch; equal prefixes have the same positions.
        positions: `[R]` int64, position of each token in its sample.
        lengths: Number of tokens of each sample in the row, without those that it shares with an earlier sample.
        prefixes: See `Segments.prefixes`.
    """

    tokens: Tensor
    places: Tensor
    positions: Tensor
    lengths: list[int]
    prefixes: tuple[SharedPrefixes, ...] = ()

    @classmethod
    def from_lengths(cls, lengths: list[int], common_lengths: list[int], device: torch.device) -> PackedRow:
        """Creates the row of consecutive samples.

        Args:
            lengths: Number of tokens of each sample.
            common_lengths: Number of first tokens that each sample shares with the sample before it.
            device: Device of the tensors.
        """
        new_lengths = [length - num_shared for length, num_shared in zip(lengths, common_lengths, strict=True)]
        starts = [0, *itertools.accumulate(new_lengths)]
        no_tokens = torch.zeros(0, dtype=torch.int64)
        tokens, places, positions = [no_tokens], [no_tokens], [no_tokens]
        batch_start = 0
        for start, end, length, num_shared in zip(starts[:-1], starts[1:], lengths, common_lengths, strict=True):
            tokens.append(torch.arange(batch_start + num_shared, batch_start + length))
            places.append(torch.cat([places[-1][:num_shared], torch.arange(start, end)]))
            positions.append(torch.arange(num_shared, length))
            batch_start += length
        columns = [torch.cat(parts).to(device, non_blocking=True) for parts in (tokens, places, positions)]
        spans_by_level = _disjoint(_prefix_spans(lengths, common_lengths, starts))
        prefixes = tuple(SharedPrefixes.from_spans(spans, device) for spans in spans_by_level)
        return cls(columns[0], columns[1], columns[2], new_lengths, prefixes)

    def to(self, device: torch.device) -> PackedRow:
        """Moves the tensors to a device."""
        columns = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("tokens", "places", "positions")
        }
        return dataclasses.replace(self, **columns, prefixes=tuple(prefixes.to(device) for prefixes in self.prefixes))


def branch_points(common_lengths: Sequence[int]) -> list[int]:
    """Returns lower numbers of common first tokens, so that all parts of prefixes have at least `SHORTEST_PREFIX` tokens."""
    points, ranges = [0] * len(common_lengths), [(1, len(common_lengths), 0)]
    while ranges:  # samples that have the same tokens up to `parent`
        start, end, parent = ranges.pop()
        if start >= end:
            continue
        shortest = min(common_lengths[start:end])
        depth = shortest if shortest - parent >= SHORTEST_PREFIX else parent
        for index in range(start, end):
            if common_lengths[index] == shortest:
                points[index] = depth
                ranges.append((start, index, depth))
                start = index + 1
        ranges.append((start, end, depth))
    return points


def _prefix_spans(lengths: list[int], common_lengths: list[int], starts: list[int]) -> list[tuple[range, range]]:
    """Returns row positions: tokens that attend to a part of an earlier sample's tokens, and this part."""
    spans, count = list[tuple[range, range]](), len(lengths)
    for owner in range(count):
        end, offset = lengths[owner], starts[owner] - common_lengths[owner]
        for sample in range(owner + 1, count + 1):
            depth = max(common_lengths[sample] if sample < count else 0, common_lengths[owner])
            if depth < end:
                if starts[sample] > starts[owner + 1]:
                    spans.append((range(starts[owner + 1], starts[sample]), range(offset + depth, offset + end)))
                end = depth
            if end == common_lengths[owner]:
                break
    return spans


def _disjoint(spans: list[tuple[range, range]]) -> list[list[tuple[range, range]]]:
    """Distributes spans over as few lists as first fit finds, in each of which no token attends twice."""
    levels = list[list[tuple[range, range]]]()
    for queries, keys in sorted(spans, key=lambda span: (span[0].start, -span[0].stop, span[1].start)):
        for level in levels:
            if level[-1][0].stop <= queries.start:
                level.append((queries, keys))
                break
        else:
            levels.append([(queries, keys)])
    return levels


@former_members(nothing="empty_sample", of="from_sequences")
@dataclass
class TokenBatch:
    """N samples with T tokens in total, concatenated without padding.

    A sample is a sequence that the model reads in one pass. Most episodes have one sample. An episode has several samples if
    several roles act in it or if its context was rewritten; each sampled token is trained in one of these samples. Samples of
    the same episode and role are adjacent.

    Attributes:
        cu_seqlens: `[N + 1]` int64 on the host; sample n has the tokens `cu_seqlens[n]` to `cu_seqlens[n + 1] - 1`.
        ids: `[T]` int64, token ids of prompts and responses.
        mask: `[T]` bool, loss mask: true for trained tokens.
        turn: `[T]` int64, the turn in which the model wrote or first read the token; 0 in single-turn episodes.
        columns: Further per-token values by name, `[T]` or `[T, k]`. Values of a sample's first token are masked out,
            because the model does not predict this token.
        episode: `[N]` int64, index of the sample's episode, unique within a step.
        role: `[N]` int64, index of the role that acts in the sample; 0 with a single role.
        group: `[N]` int64, index of the episode's prompt.
        reward: `[N]` float32, the episode's reward.
        pad_id: Padding token for models that need a rectangle.
        packed: Whether the model reads the samples as one row rather than as a rectangle.
        shares_prefixes: Whether the model reads a prefix once that adjacent samples of a group share, if it reads a row.
        pictures: Images of the samples; None if no sample has images.
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
    shares_prefixes: bool = False

    @classmethod
    def from_sequences(
        cls,
        ids: Sequence[Sequence[int] | Tensor],
        mask: Sequence[Sequence[bool] | Tensor],
        columns: Mapping[str, Sequence[Sequence[float] | Tensor]] | None = None,
        *,
        pad_id: int = 0,
        pictures: Pictures | None = None,
    ) -> TokenBatch:
        """Creates a batch in which each sample is an episode of a separate prompt, with a single turn and reward 0.

        Raises:
            ValueError: A mask or column does not have one value per token.
        """
        lengths = [len(sample) for sample in ids]

        def concatenate(name: str, values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
            tensors = [torch.as_tensor(tensor, dtype=dtype) for tensor in values]
            for tensor, length in zip(tensors, lengths, strict=True):
                if tensor.shape[:1] != (length,):
                    raise ValueError(f"{name} has shape {tuple(tensor.shape)}; its sample has {length} tokens")
            return torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype or torch.float32)

        sample_index = torch.arange(len(lengths))
        tokens = concatenate("ids", ids, torch.int64)
        return cls(
            cumulate(lengths),
            tokens,
            concatenate("mask", mask, torch.bool),
            torch.zeros_like(tokens),
            sample_index,
            torch.zeros_like(sample_index),
            sample_index,
            torch.zeros(len(lengths)),
            {name: concatenate(f"column {name}", column_values) for name, column_values in (columns or {}).items()},
            pad_id,
            pictures=pictures,
        )

    @classmethod
    def joined(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Concatenates batches that have the same columns.

        Raises:
            ValueError: `batches` is empty.
        """
        if not batches:
            raise ValueError("there is no batch to join")
        first_batch = batches[0]
        joined_fields = {
            name: torch.cat([getattr(batch, name) for batch in batches]) for name in (*_TOKEN_FIELDS, *_SAMPLE_FIELDS)
        }
        return cls(
            cu_seqlens=cumulate(torch.cat([batch.lengths for batch in batches])),
            columns={name: torch.cat([batch.columns[name] for batch in batches]) for name in first_batch.columns},
            pad_id=first_batch.pad_id,
            packed=first_batch.packed,
            shares_prefixes=first_batch.shares_prefixes,
            pictures=Pictures.joined([(batch.pictures, len(batch)) for batch in batches]),
            **joined_fields,
        )

    def with_pad_id(self, pad_id: int) -> TokenBatch:
        """Returns the batch with another padding token; both share all tensors."""
        return self if pad_id == self.pad_id else dataclasses.replace(self, pad_id=pad_id)

    # -- shapes ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.cu_seqlens) - 1

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.ids)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each sample, `[N]` int64 on the host."""
        return self.cu_seqlens.diff()

    @cached_property
    def width(self) -> int:
        """W, the number of tokens of the longest sample; at least 2, because a model may reject a single token."""
        return max(2, int(self.lengths.max())) if len(self) else 2

    @cached_property
    def places(self) -> Tensor:
        """Flat index of each token in the rectangle `[N, W]`; `[T]`."""
        offsets = torch.arange(len(self)) * self.width - self.cu_seqlens[:-1]
        token_places = torch.arange(self.tokens) + torch.repeat_interleave(offsets, self.lengths)
        return token_places.to(self.ids.device)

    def padded(self, values: Tensor, fill: float = 0) -> Tensor:
        """Converts per-token values `[T]` to `[N, W]`, padded on the right with `fill`."""
        rectangle = values.new_full((len(self) * self.width, *values.shape[1:]), fill)
        return rectangle.index_copy(0, self.places, values).view(len(self), self.width, *values.shape[1:])

    def flat(self, rectangle: Tensor) -> Tensor:
        """Converts padded values `[N, W]` to `[T]`; the inverse of `padded`."""
        return rectangle.flatten(0, 1).index_select(0, self.places)

    def attended(self) -> Tensor:
        """Returns the mask of the rectangle, `[N, W]` bool: true for tokens and false for padding."""
        return torch.arange(self.width, device=self.ids.device) < self.lengths.to(self.ids.device)[:, None]

    # -- model inputs ---------------------------------------------------------------------------------------------

    def read_by(self, packed: bool) -> TokenBatch:
        """Returns the same samples with `packed` set to the given value."""
        return self if packed == self.packed else dataclasses.replace(self, packed=packed)

    def sharing_prefixes(self) -> TokenBatch:
        """Returns the same samples with `shares_prefixes`; both share all tensors."""
        return dataclasses.replace(self, shares_prefixes=True)

    @cached_property
    def row(self) -> PackedRow:
        """Row in which a model reads the samples if it packs them."""
        common_lengths = self.common_prefixes(range(len(self))) if self.shares_prefixes else [0] * len(self)
        return PackedRow.from_lengths(self.lengths.tolist(), branch_points(common_lengths), self.ids.device)

    def common_prefixes(self, samples: Sequence[int]) -> list[int]:
        """Returns the number of first tokens that each of the given samples shares with the one before it in `samples`.

        It is 0 across groups and for samples with images. Tokens for which routers replay different experts differ.
        """
        common_lengths = [0] * len(samples)
        if self.pictures is not None:
            return common_lengths
        experts = [self.columns[EXPERTS].flatten(1)] if EXPERTS in self.columns else []
        tokens = torch.cat([self.ids[:, None], *experts], 1).cpu().numpy()
        starts, groups = self.cu_seqlens.tolist(), self.group.tolist()
        for index in range(1, len(samples)):
            neighbour, sample = samples[index - 1], samples[index]
            if groups[neighbour] != groups[sample]:
                continue
            length = min(starts[neighbour + 1] - starts[neighbour], starts[sample + 1] - starts[sample])
            offset, sample_offset = starts[neighbour], starts[sample]
            differs = (tokens[offset : offset + length] != tokens[sample_offset : sample_offset + length]).any(1)
            common_lengths[index] = int(differs.argmax()) if differs.any() else length
        return common_lengths

    def inputs(self) -> dict[str, Any]:
        """Returns the arguments of the model's forward pass.

        These are `input_ids` `[N, W]`, or `[1, T]` with `position_ids` and `segments` for packed attention; and
        `Pictures.inputs`, which replace the positions.

        Neither form has a mask: in a rectangle, padding is on the right, so that no token attends to it and the model's
        default positions are correct. A row of fewer than two tokens is padded, because a model may reject a single token.
        """
        convert = (lambda values: values[None]) if self.packed else self.padded
        image_inputs = {} if self.pictures is None else self.pictures.inputs(self.cu_seqlens, convert)
        if not self.packed:
            return {"input_ids": self.padded(self.ids, self.pad_id), **image_inputs}
        row, device = self.row, self.ids.device
        ids, positions, padding = self.ids[row.tokens], row.positions, max(0, 2 - len(row.tokens))
        if padding:
            ids, positions = (
                nn.functional.pad(ids, (0, padding), value=self.pad_id),
                nn.functional.pad(positions, (0, padding)),
            )
        segments = Segments.from_lengths([*row.lengths, *[1] * padding], device, row.prefixes)
        return {"input_ids": ids[None], "position_ids": positions[None], "segments": segments, **image_inputs}

    def of_tokens(self, outputs: Tensor) -> Tensor:
        """Converts the model's outputs for `inputs`, `[N, W, …]` or `[1, T, …]`, to `[T, …]`."""
        return outputs[0, self.row.places] if self.packed else self.flat(outputs)

    def before(self, values: Tensor) -> Tensor:
        """Shifts `[T]` values by one token within each sample: a token gets its predecessor's value, the first token 0."""
        if not len(values):
            return values
        shifted_values = nn.functional.pad(values[:-1], (1, 0))
        first_tokens = self.cu_seqlens[:-1][self.lengths > 0].to(values.device)
        return shifted_values.index_fill(0, first_tokens, 0.0)

    def predictors(self) -> tuple[Tensor, Tensor]:
        """Returns the indices of the trained tokens in `[T]`, and the flat indices of the model outputs that predict them.

        The first token of a sample is omitted, because the model does not predict it. Where samples part, one output predicts
        several tokens.
        """
        trained_tokens = self._trained_tokens
        places = self.row.places if self.packed else self.places
        return trained_tokens, places[trained_tokens - 1]

    @cached_property
    def _trained_tokens(self) -> Tensor:
        is_trained = self.mask.clone()
        is_trained[self.cu_seqlens[:-1][self.lengths > 0].to(is_trained.device)] = False
        return torch.nonzero(is_trained).flatten()

    # -- parts ----------------------------------------------------------------------------------------------------

    def tokens_of(self, samples: Tensor) -> Tensor:
        """Returns the indices in `[T]` of the given samples' tokens, in the given order of samples."""
        return _ranges(self.lengths, samples)

    def select(self, samples: Tensor) -> TokenBatch:
        """Returns a batch of the given samples, in the given order."""
        token_indices = self.tokens_of(samples)
        selected_fields = {name: getattr(self, name)[token_indices] for name in _TOKEN_FIELDS}
        selected_fields |= {name: getattr(self, name)[samples] for name in _SAMPLE_FIELDS}
        return TokenBatch(
            cu_seqlens=cumulate(self.lengths[samples]),
            columns={name: column[token_indices] for name, column in self.columns.items()},
            pad_id=self.pad_id,
            packed=self.packed,
            shares_prefixes=self.shares_prefixes,
            pictures=None if self.pictures is None else self.pictures.select(samples),
            **selected_fields,
        )

    def split(self, counts: Sequence[int]) -> list[TokenBatch]:
        """Splits the batch into consecutive batches with these numbers of samples."""
        return [self.select(samples) for samples in torch.arange(len(self)).split(list(counts))]

    def empty_sample(self) -> TokenBatch:
        """Returns a batch of one sample without tokens and with the same columns, which has no effect on training."""
        sample_fields = {name: getattr(self, name).new_zeros(1) for name in _SAMPLE_FIELDS}
        no_samples = torch.zeros(0, dtype=torch.long)
        return dataclasses.replace(self.select(no_samples), cu_seqlens=cumulate([0]), pictures=None, **sample_fields)

    def by_episode(self) -> TokenBatch:
        """Merges all samples of the same episode and role into one sequence, the unit of advantage computation.

        `padded` of the result puts a sequence's tokens in chronological order. The result is not valid model input if an
        episode has several samples.
        """
        if not len(self):
            return self
        is_continued = (self.episode[1:] == self.episode[:-1]) & (self.role[1:] == self.role[:-1])
        starts_sequence = torch.cat([torch.tensor([True]), ~is_continued.cpu()])
        sequence_fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        sequence_fields |= {name: getattr(self, name)[starts_sequence] for name in _SAMPLE_FIELDS}
        return _Sequences(
            **{
                **sequence_fields,
                "cu_seqlens": torch.cat([self.cu_seqlens[:-1][starts_sequence], self.cu_seqlens[-1:]]),
            }
        )

    def sequence(self) -> Tensor:
        """Returns the sequence index of each sample, `[N]` int64; samples of the same episode and role share an index."""
        num_roles = int(self.role.max()) + 1 if len(self) else 1
        return self.episode * num_roles + self.role

    def sequence_tokens(self) -> Tensor:
        """Returns the number of trained tokens in each token's sequence, `[T]` int64.

        All samples of a sequence must be in this batch.
        """
        sequence = self.sequence().unique(return_inverse=True)[1]
        sequence_index = torch.repeat_interleave(sequence, self.lengths.to(sequence.device))
        return self.mask.new_zeros(len(self) + 1, dtype=torch.long).index_add(0, sequence_index, self.mask.long())[
            sequence_index
        ]

    def to(self, device: torch.device) -> TokenBatch:
        """Moves the batch to a device, except `cu_seqlens`, which stays on the host."""
        if device.type == "cpu":
            return self
        moved_fields = {
            name: getattr(self, name).to(device, non_blocking=True) for name in (*_TOKEN_FIELDS, *_SAMPLE_FIELDS)
        }
        columns = {name: column.to(device, non_blocking=True) for name, column in self.columns.items()}
        pictures = None if self.pictures is None else self.pictures.to(device)
        moved_batch = dataclasses.replace(self, columns=columns, pictures=pictures, **moved_fields)
        # Their number is the size of tensors; the host would wait for a device that counts them.
        vars(moved_batch)["_trained_tokens"] = self._trained_tokens.to(device, non_blocking=True)
        if self.packed:
            vars(moved_batch)["row"] = self.row.to(device)
        return moved_batch

    # -- serialization --------------------------------------------------------------------------------------------

    def pack(self) -> dict[str, Any]:
        """Converts the batch to a message for a channel; its number of arrays does not depend on N."""
        arrays = {name: getattr(self, name).numpy() for name in _SAMPLE_FIELDS}
        packed_dtypes = {"ids": np.int32, "turn": np.int16}
        arrays |= {name: getattr(self, name).numpy().astype(packed_dtypes.get(name, bool)) for name in _TOKEN_FIELDS}
        columns = {name: column.numpy() for name, column in self.columns.items()}
        image_arrays = {} if self.pictures is None else {"pictures": self.pictures.pack()}
        lengths = self.lengths.numpy().astype(np.int32)
        return {**arrays, "lengths": lengths, "columns": columns, "pad_id": self.pad_id, **image_arrays}

    @classmethod
    def unpack(cls, message: Mapping[str, Any]) -> TokenBatch:
        """Creates a batch from a message of `pack`; copies the data, because the message may be in the sender's memory."""
        unpacked_fields: dict[str, Any] = {name: torch.from_numpy(np.array(message[name])) for name in _SAMPLE_FIELDS}
        unpacked_dtypes = {"ids": np.int64, "turn": np.int64}
        for name in _TOKEN_FIELDS:
            unpacked_fields[name] = torch.from_numpy(np.array(message[name], dtype=unpacked_dtypes.get(name, bool)))
        columns = {name: torch.from_numpy(np.array(column)) for name, column in message["columns"].items()}
        cu_seqlens = cumulate(np.asarray(message["lengths"], np.int64))
        if "pictures" in message:
            unpacked_fields["pictures"] = Pictures.unpack(message["pictures"])
        return cls(cu_seqlens=cu_seqlens, columns=columns, pad_id=int(message["pad_id"]), **unpacked_fields)


class _Sequences(TokenBatch):
    """Result of `TokenBatch.by_episode`: `places` puts the tokens of a sequence in chronological order, by turn.

    Each turn is trained in one sample, so a sequence has each trained token of its episode and role once.
    """

    @cached_property
    def places(self) -> Tensor:
        """Flat index of each token in the rectangle, chronological within a sequence; `[T]`."""
        sequence_index = torch.repeat_interleave(torch.arange(len(self)), self.lengths)
        num_turns = int(self.turn.max()) + 1 if self.tokens else 1
        by_turn = torch.argsort(sequence_index * num_turns + self.turn, stable=True)
        target_places = sequence_index * self.width + torch.arange(self.tokens) - self.cu_seqlens[:-1][sequence_index]
        return torch.empty_like(by_turn).index_copy(0, by_turn, target_places)


#: Name of the token batch column with the experts that the engine chose.
EXPERTS = "experts"
_TOKEN_FIELDS = ("ids", "mask", "turn")
_SAMPLE_FIELDS = ("episode", "role", "group", "reward")


def cumulate(lengths: Sequence[int] | np.ndarray | Tensor) -> Tensor:
    """Computes cumulative lengths, `[N + 1]` int64 starting at 0, from `[N]` lengths."""
    ends = torch.as_tensor(lengths, dtype=torch.int64).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends])


#: Fields of `Pictures` that are tensors.
_PICTURE_TENSORS = ("patches", "grids", "image_indices", "at", "counts")


def _ranges(lengths: Tensor, items: Tensor) -> Tensor:
    """Returns the element indices of the given items, in the given order; item i has `lengths[i]` elements."""
    ends = lengths.cumsum(0)
    item_lengths = lengths[items]
    offsets = (ends - lengths)[items] - (item_lengths.cumsum(0) - item_lengths)
    return torch.arange(int(item_lengths.sum())) + torch.repeat_interleave(offsets, item_lengths)


@dataclass
class Pictures:
    """Images of N samples: M distinct images with P patches in total, to which the samples refer K times.

    Attributes:
        patches: `[P, d]` float32, image by image.
        grids: `[M, 3]` int64 on the host, number of frames, rows and columns of each image's patches.
        image_indices: `[K]` int64 on the host, the image of each reference, sample by sample.
        at: `[K]` int64 on the host, position in the sample of the image's first token.
        counts: `[N]` int64 on the host, number of images of each sample.
        merge: Number of patches in each direction that become one token.
    """

    patches: Tensor
    grids: Tensor
    image_indices: Tensor
    at: Tensor
    counts: Tensor
    merge: int

    @classmethod
    def from_images(cls, images: Sequence[PromptImages | None]) -> Pictures | None:
        """Collects the images of samples and stores equal images once; returns None if no sample has images."""
        sample_images = [images_of_sample for images_of_sample in images if images_of_sample is not None]
        if not sample_images:
            return None
        unique_images = {
            digest: (patches, grid)
            for images_of_sample in sample_images
            for patches, grid, digest in zip(
                images_of_sample.patches, images_of_sample.grids, images_of_sample.digests, strict=True
            )
        }
        image_indices = {digest: index for index, digest in enumerate(unique_images)}
        return cls(
            torch.from_numpy(np.concatenate([patches for patches, _ in unique_images.values()])),
            torch.from_numpy(np.stack([grid for _, grid in unique_images.values()])),
            torch.tensor(
                [image_indices[digest] for images_of_sample in sample_images for digest in images_of_sample.digests]
            ),
            torch.from_numpy(np.concatenate([images_of_sample.at for images_of_sample in sample_images])),
            torch.tensor(
                [0 if images_of_sample is None else len(images_of_sample.grids) for images_of_sample in images]
            ),
            sample_images[0].merge,
        )

    @classmethod
    def joined(cls, batches: Sequence[tuple[Pictures | None, int]]) -> Pictures | None:
        """Concatenates the images of several batches, given as (images or None, number of samples)."""
        batch_images = [pictures for pictures, _ in batches if pictures is not None]
        if not batch_images:
            return None
        counts = [torch.zeros(n, dtype=torch.int64) if pictures is None else pictures.counts for pictures, n in batches]
        image_offset, indices = 0, list[Tensor]()
        for pictures in batch_images:
            indices.append(pictures.image_indices + image_offset)
            image_offset += len(pictures.grids)
        joined_fields = {
            name: torch.cat([getattr(pictures, name) for pictures in batch_images])
            for name in ("patches", "grids", "at")
        }
        return cls(
            image_indices=torch.cat(indices), counts=torch.cat(counts), merge=batch_images[0].merge, **joined_fields
        )

    def select(self, samples: Tensor) -> Pictures | None:
        """Returns the images of the given samples, in the given order; None if they have no images."""
        references = _ranges(self.counts, samples)
        if not len(references):
            return None
        image_numbers, indices = self.image_indices[references].unique(return_inverse=True)
        sizes = self.grids.prod(1)
        patch_indices = _ranges(sizes, image_numbers).to(self.patches.device)
        return Pictures(
            self.patches[patch_indices],
            self.grids[image_numbers],
            indices,
            self.at[references],
            self.counts[samples],
            self.merge,
        )

    def to(self, device: torch.device) -> Pictures:
        """Moves the patches to a device; other fields stay on the host."""
        return dataclasses.replace(self, patches=self.patches.to(device, non_blocking=True))

    def pack(self) -> dict[str, Any]:
        """Converts the images to a message for a channel."""
        return {name: getattr(self, name).numpy() for name in _PICTURE_TENSORS} | {"merge": self.merge}

    @classmethod
    def unpack(cls, message: Mapping[str, Any]) -> Pictures:
        """Creates the images from a message of `pack`; copies the data."""
        return cls(
            merge=int(message["merge"]),
            **{name: torch.from_numpy(np.array(message[name])) for name in _PICTURE_TENSORS},
        )

    def inputs(self, cu_seqlens: Tensor, convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Returns the model's additional arguments for images.

        These are `pixel_values` and `image_grid_thw` of the images, sample by sample; `mm_token_type_ids`, which marks image
        tokens; and `position_ids` with three positions per token.

        Args:
            cu_seqlens: Cumulative lengths of the samples, `[N + 1]`.
            convert: Function that converts per-token values `[T, …]` to the form that the model reads, a row or a
                rectangle.
        """
        num_tokens = int(cu_seqlens[-1])
        token_types, position_ids = (
            torch.zeros(num_tokens, dtype=torch.int64),
            torch.empty(num_tokens, 3, dtype=torch.int64),
        )
        grids = self.grids[self.image_indices]
        sizes = (grids.prod(1) // self.merge**2).tolist()
        first_image = 0
        for start, end, count in zip(cu_seqlens[:-1], cu_seqlens[1:], self.counts.tolist(), strict=True):
            image_range = slice(first_image, first_image + count)
            first_image += count
            for offset, size in zip((self.at[image_range] + start).tolist(), sizes[image_range], strict=True):
                token_types[offset : offset + size] = 1
            sample_positions = positions(
                int(end - start), self.at[image_range].numpy(), grids[image_range].numpy(), self.merge
            )
            position_ids[start:end] = torch.from_numpy(sample_positions).T
        device = self.patches.device
        pixels = self.patches[_ranges(self.grids.prod(1), self.image_indices).to(device)]
        token_types, position_ids = (convert(column.to(device)) for column in (token_types, position_ids))
        return {
            "pixel_values": pixels,
            "image_grid_thw": grids.to(device),
            "mm_token_type_ids": token_types,
            "position_ids": position_ids.permute(2, 0, 1),
        }
