"""What the rows under way have drawn so far, and when each of them ends."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlhpc.language.engines.base import Completion, Request
from rlhpc.language.engines.ends import StopTexts
from rlhpc.language.engines.sampling import uniforms


class Ledger:
    """Rows as arrays on the host, so that a step over many of them is a few array operations.

    Args:
        max_rows: Most rows.
        vocabulary: Token ids are below this.
        own_ends: Tokens that end every response.
        stop_texts: Looks for the texts that end some.
    """

    def __init__(self, max_rows: int, vocabulary: int, own_ends: frozenset[int], stop_texts: StopTexts) -> None:
        self.requests: list[Request] = []
        #: What routers chose for the tokens that were read of each row, part by part.
        self.experts: list[list[np.ndarray]] = []
        self._vocabulary, self._own_ends, self._stop_texts = vocabulary, own_ends, stop_texts
        self._count, self._limit, self._end_set = (np.zeros(max_rows, dtype=np.int64) for _ in range(3))
        self._watched = np.zeros(max_rows, dtype=bool)
        self._tokens, self._versions = (np.zeros((max_rows, 64), dtype=np.int64) for _ in range(2))
        self._logprobs = np.zeros((max_rows, 64), dtype=np.float32)
        self._noise = np.zeros((max_rows, 64), dtype=np.float64)
        #: Sets of end tokens, by their line in `_ends`; a row holds the number of its set. There are at most as many as rows.
        self._end_sets: dict[tuple[int, ...], int] = {}
        self._ends = np.zeros((0, vocabulary), dtype=bool)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, limit: int) -> None:
        """A new last row, of at most `limit` tokens."""
        row = len(self.requests)
        self.requests.append(request)
        self.experts.append([])
        if limit > self._tokens.shape[1]:
            more = ((0, 0), (0, limit - self._tokens.shape[1]))
            self._tokens, self._versions = np.pad(self._tokens, more), np.pad(self._versions, more)
            self._logprobs, self._noise = np.pad(self._logprobs, more), np.pad(self._noise, more)
        self._count[row], self._limit[row] = 0, limit
        self._noise[row, :limit] = uniforms(request, limit)
        self._watched[row] = bool(request.sampling.stop)
        self._end_set[row] = self._number_of(request.sampling.stop_token_ids, row)

    def _number_of(self, ends: tuple[int, ...], rows: int) -> int:
        """Returns the number of a set of end tokens; a new one takes the number of one that none of the first rows uses."""
        if ends in self._end_sets:
            return self._end_sets[ends]
        used = set(self._end_set[:rows].tolist())
        idle = next((known for known, number in self._end_sets.items() if number not in used), None)
        number = len(self._ends) if idle is None else self._end_sets.pop(idle)
        line = np.zeros((1, self._vocabulary), dtype=bool)
        line[0, [i for i in {*ends, *self._own_ends} if 0 <= i < self._vocabulary]] = True
        if idle is None:
            self._ends = np.concatenate([self._ends, line])
        else:
            self._ends[number] = line
        self._end_sets[ends] = number
        return number

    def noise(self, begin: int) -> np.ndarray:
        """The random numbers of the next token of rows from `begin` on."""
        rows = np.arange(begin, len(self.requests))
        return np.asarray(self._noise[rows, self._count[rows]])

    def record(self, begin: int, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> list[tuple[int, str]]:
        """Writes down what rows from `begin` on drew; those that end with it, and why."""
        rows = np.arange(begin, len(self.requests))
        at = self._count[rows]
        self._tokens[rows, at], self._logprobs[rows, at], self._versions[rows, at] = tokens, logprobs, version
        self._count[rows] += 1
        stopped = self._ends[self._end_set[rows], tokens]
        for row in rows[self._watched[rows] & ~stopped].tolist():
            stopped[row - begin] = self._stop_texts.ended(self.said(row), self.requests[row].sampling.stop)
        ended = stopped | (self._count[rows] >= self._limit[rows])
        return [(begin + i, "stop" if stopped[i] else "length") for i in np.flatnonzero(ended).tolist()]

    def said(self, row: int) -> list[int]:
        """The response so far."""
        tokens: list[int] = self._tokens[row, : self._count[row]].tolist()
        return tokens

    def completion(self, row: int, reason: str) -> Completion:
        """The response so far, as it is given back."""
        count = self._count[row]
        return Completion(
            id=self.requests[row].id,
            token_ids=self.said(row),
            logprobs=self._logprobs[row, :count].tolist(),
            versions=self._versions[row, :count].tolist(),
            finish_reason=reason,
            experts=np.concatenate(self.experts[row]) if self.experts[row] else None,
        )

    def move(self, moves: Iterable[tuple[int, int]], left: int) -> None:
        """Moves rows into the places of others, (from, to), and keeps the first `left`."""
        for come, to in moves:
            self.requests[to], self.experts[to] = self.requests[come], self.experts[come]
            for record in self._records():
                record[to] = record[come]
        del self.requests[left:], self.experts[left:]

    def clear(self) -> None:
        """Forgets all rows."""
        self.requests, self.experts = [], []

    def _records(self) -> tuple[np.ndarray, ...]:
        return (
            self._tokens, self._logprobs, self._versions, self._noise,
            self._count, self._limit, self._end_set, self._watched,
        )  # fmt: skip
