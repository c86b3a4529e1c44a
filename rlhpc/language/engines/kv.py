"""Keys and values of the rows under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class KeyValues:
    """The cache of all layers, `[rows, heads, columns, width]` each.

    Every row ends at the same column `end`, where the next token goes; row i begins at `start[i]`. So a decoding step
    writes one column of all rows at once, a row that joins or leaves copies no other row, and the models' own masks for
    padding on the left hold as they are. When `end` reaches the last column, what is in use moves back to the front, or
    into a larger buffer; one copy lasts for as many steps as there is room for behind it.

    Attributes:
        rows: Rows in use.
        first: First column in use.
        end: Column of the next token.
        start: Each row's first column.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows, self.rows, self.first, self.end = max_rows, 0, 0, 0
        self.start = np.zeros(max_rows, dtype=np.int64)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def clear(self) -> None:
        """Drops the rows, keeps the memory."""
        self.rows = self.first = self.end = 0

    def _resized(self, rows: int) -> None:
        self.rows = rows
        self.first = int(self.start[:rows].min()) if rows else self.end

    def free(self) -> None:
        """Drops the rows and the memory."""
        self.clear()
        self.keys, self.values = [], []

    def append(self, layers: Any, lengths: Sequence[int], source: Sequence[int]) -> None:
        """Adds rows from a prefill that was padded on the left.

        Args:
            layers: Of the cache that the prefill filled: `keys` and `values` `[prefilled rows, heads, P, width]`.
            lengths: Tokens in each new row.
            source: Prefilled row of each new row; rows with the same prompt share one.
        """
        width = layers[0].keys.shape[2]
        if self.end < width or not self.keys:
            self._settle(layers, max(width, self.end), len(source))
        elif self.rows + len(source) > self.keys[0].shape[0]:
            self._settle(layers, self.end, len(source))
        begin, stop = self.rows, self.rows + len(source)
        index = torch.as_tensor(list(source), device=layers[0].keys.device)
        for mine, theirs in zip((*self.keys, *self.values), _tensors(layers), strict=True):
            mine[begin:stop, :, self.end - width : self.end] = theirs.index_select(0, index)
        self.start[begin:stop] = self.end - np.asarray(lengths)
        self._resized(stop)

    def reserve(self) -> None:
        """Makes sure of a column for the next token."""
        if self.end == self.keys[0].shape[2]:
            self._settle(None, self.end - self.first, 0)

    def drop(self, leaving: Sequence[int]) -> list[tuple[int, int]]:
        """Removes rows. The last ones move into their places: (from, to), to be done likewise by whoever has rows too."""
        gone = set(leaving)
        left = self.rows - len(gone)
        holes = [row for row in sorted(gone) if row < left]
        movers = [row for row in range(left, self.rows) if row not in gone]
        if holes:
            to, come = torch.tensor(holes), torch.tensor(movers)
            first = self.first
            for tensor in (*self.keys, *self.values):
                tensor[to, :, first : self.end] = tensor[come, :, first : self.end]
            self.start[holes] = self.start[movers]
        if left:
            self._resized(left)
        else:
            self.clear()
        return list(zip(movers, holes, strict=True))

    def _settle(self, like: Any, end: int, more: int) -> None:
        """Moves what is in use so that it ends at column `end`, with room behind it and for `more` rows."""
        first, used = self.first, self.end - self.first if self.rows else 0
        like_tensors = (*self.keys, *self.values) if self.keys else tuple(_tensors(like))
        rows, columns = (self.keys[0].shape[0], self.keys[0].shape[2]) if self.keys else (0, 0)
        if self.rows + more > rows:
            rows = min(self.max_rows, max(2 * rows, self.rows + more))
        if end + end // 4 + 32 > columns:
            columns = end + end // 2 + 64
        moved: list[Tensor] = []
        for old in like_tensors:
            if self.keys and (rows, columns) == (old.shape[0], old.shape[2]):
                new, content = old, old[: self.rows, :, first : self.end].clone()
            else:
                # Zeros, not whatever was there: 0 weight times NaN is NaN.
                new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
                content = old[: self.rows, :, first : self.end]
            if self.keys and used:
                new[: self.rows, :, end - used : end] = content
            moved.append(new)
        half = len(moved) // 2
        self.keys, self.values = moved[:half], moved[half:]
        self.start[: self.rows] += end - self.end
        self.first, self.end = end - used, end


def _tensors(layers: Any) -> list[Tensor]:
    return [layer.keys for layer in layers] + [layer.values for layer in layers]


def decoding_cache(store: KeyValues) -> Any:
    """`store` in the form in which transformers' models take a cache, for one token per row at a time."""
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        """Writes the new column and gives back views: nothing is copied."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.is_initialized = index, True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            keys, values = store.keys[self.index], store.values[self.index]
            rows, first, end = store.rows, store.first, store.end
            keys[:rows, :, end] = key_states[:, :, 0]
            values[:rows, :, end] = value_states[:, :, 0]
            return keys[:rows, :, first : end + 1], values[:rows, :, first : end + 1]

        def get_seq_length(self) -> int:
            return store.end - store.first

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return store.end - store.first + query_length, 0

    return Cache(layers=[Layer(index) for index in range(len(store.keys))])
