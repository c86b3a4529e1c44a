"""Keys and values of the rows under way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Columns come in blocks: what attention reads of a row is this much and a multiple of it, by the row's own length alone.
BLOCK = 32


def blocks(length: int) -> int:
    """The columns of the blocks that `length` tokens are in."""
    return -(-length // BLOCK) * BLOCK


class KeyValues:
    """The cache of all layers, `[rows, heads, columns, width]` each.

    Each row begins at column 0, whatever the others' lengths are; a row that joins or leaves copies no other but the one that
    takes its place. What is behind a row's end is finite, and weighs nothing.

    Attributes:
        rows: Rows in use.
        length: Tokens in each row.
        present: Row and column of each token that is computed next.
        places: The position of each of them: its column, but for what pictures before it make of that.
        only: The row whose token that is; None for all.
    """

    present: tuple[Tensor, Tensor]
    places: Tensor
    only: int | None

    def __init__(self, max_rows: int) -> None:
        self.max_rows, self.rows = max_rows, 0
        self.length, self._shift = (np.zeros(max_rows, dtype=np.int64) for _ in range(2))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def clear(self) -> None:
        """Drops the rows, keeps the memory."""
        self.rows = 0

    def free(self) -> None:
        """Drops the rows and the memory."""
        self.clear()
        self.keys, self.values = [], []

    def append(self, layers: Any, lengths: Sequence[int], source: Sequence[int], shifts: Sequence[int]) -> None:
        """Adds rows from a prefill of several sequences, one after the other.

        Args:
            layers: Of the cache that the prefill filled: `keys` and `values` `[1, heads, at least all tokens, width]`.
            lengths: Tokens of each sequence.
            source: The sequence of each new row; rows with the same prompt share one.
            shifts: By how much each sequence's next position is beyond its next column.
        """
        begins = [0, *accumulate(lengths)]
        theirs = [*(layer.keys for layer in layers), *(layer.values for layer in layers)]
        first, stop = self.rows, self.rows + len(source)
        self._fit(theirs, stop, max(lengths[one] for one in source) + 1)
        for mine, given in zip((*self.keys, *self.values), theirs, strict=True):
            mine[first:stop].zero_()
            row = first
            for one, alike in groupby(source):
                count, length = len(list(alike)), lengths[one]
                mine[row : row + count, :, :length] = given[0, :, begins[one] : begins[one] + length]
                row += count
        self.length[first:stop] = [lengths[one] for one in source]
        self._shift[first:stop] = [shifts[one] for one in source]
        self.rows = stop

    def reserve(self, only: int | None = None) -> None:
        """Makes sure of a column for the next token, of each row or of one, and says where it is."""
        self._fit((*self.keys, *self.values), self.rows, int(self.length[: self.rows].max()) + 1)
        rows = np.arange(self.rows) if only is None else np.array([only])
        device = self.keys[0].device
        self.only = only
        self.present = torch.from_numpy(rows).to(device), torch.from_numpy(self.length[rows]).to(device)
        self.places = torch.from_numpy(self.length[rows] + self._shift[rows]).to(device)

    def drop(self, leaving: Sequence[int]) -> list[tuple[int, int]]:
        """Removes rows. The last ones move into their places: (from, to), to be done likewise by whoever has rows too."""
        moves = moves_into_places(self.rows, leaving)
        if moves:
            movers, holes = (list(side) for side in zip(*moves, strict=True))
            used = int(self.length[movers].max())
            for tensor in (*self.keys, *self.values):
                tensor[holes, :, :used] = tensor[movers, :, :used]
            self.length[holes], self._shift[holes] = self.length[movers], self._shift[movers]
        self.rows -= len(set(leaving))
        return moves

    def _fit(self, like: Sequence[Tensor], rows: int, columns: int) -> None:
        """Room for so many rows and columns, with some more where it has to grow."""
        room = self.keys[0].shape if self.keys else (0, 0, 0)
        if rows <= room[0] and columns <= room[2]:
            return
        if rows > room[0]:
            rows = min(self.max_rows, max(2 * room[0], rows))
        if columns > room[2]:
            columns = blocks(columns + columns // 2 + 64)
        rows, columns = max(rows, room[0]), max(columns, room[2])
        grown = list[Tensor]()
        for old in (*self.keys, *self.values) or like:
            # Zeros, not whatever was there: 0 weight times NaN is NaN.
            new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
            if self.keys:
                new[: self.rows, :, : room[2]] = old[: self.rows]
            grown.append(new)
        half = len(grown) // 2
        self.keys, self.values = grown[:half], grown[half:]


def decoding_cache(store: KeyValues) -> Any:
    """`store` in the form in which transformers' models take a cache, for one token at a time of `store.present`.

    Of a single row, layers give back what is in it. Otherwise they give back all there is, and attention has to know what is
    whose.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        """Writes a token of each row and gives back views: nothing is copied."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.is_initialized = index, True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            rows, ends = store.present
            keys, values = store.keys[self.index], store.values[self.index]
            keys[rows, :, ends] = key_states[: len(ends), :, 0]
            values[rows, :, ends] = value_states[: len(ends), :, 0]
            if store.only is None:
                return keys, values
            row, end = slice(store.only, store.only + 1), self.get_seq_length() + 1
            return keys[row, :, :end], values[row, :, :end]

        def get_seq_length(self) -> int:
            return 0 if store.only is None else int(store.length[store.only])

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.get_seq_length() + query_length, 0

    return Cache(layers=[Layer(index) for index in range(len(store.keys))])


def moves_into_places(rows: int, leaving: Sequence[int]) -> list[tuple[int, int]]:
    """Which of the last rows come into the places of those that leave: (from, to)."""
    gone = set(leaving)
    left = rows - len(gone)
    holes = [row for row in sorted(gone) if row < left]
    movers = [row for row in range(left, rows) if row not in gone]
    return list(zip(movers, holes, strict=True))
