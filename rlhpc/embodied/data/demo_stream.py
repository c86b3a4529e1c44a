"""Stream of demonstrations: batches of training rows, read by index from files within a budget of memory.

A row is one step of an episode. Rows are numbered episode by episode. A batch's columns are arrays `[n, ...]`: the observation
(with its time window), the action chunk with its padding mask, and further columns.

Numbers (states, actions, rewards) are read in blocks of consecutive episodes, images by `FramePool`. A block that was read
stays in memory until the budget needs its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhpc.embodied.data.demonstrations import (
    DemoEpisode,
    chunk_steps,
    fitted_obs,
    returns_to_go,
    window_length,
    window_steps,
)
from rlhpc.embodied.data.frames import FramePool, FrameRequest, Frames
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.weights.transport import Prefetcher

Batch = dict[str, Any]

#: Parts of the budget for numbers and for each group of batches that is read at once; decoded frames get the rest but one
#: quarter, which is for the group in use and the group that is read ahead.
_NUMBERS, _GROUP = 8, 8
#: Maximum bytes of a block of numbers.
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class RowOptions:
    """Columns of a batch.

    Attributes:
        observation_space: Space of one environment slot's observation.
        chunk: Offsets of a chunk's actions from the step.
        obs_offset: 0 for the observation before a step, 1 for the observation after it.
        columns: Fields of the episodes that become float32 columns.
        gamma: Discount of the column `returns`; None omits the column.
        reward_scale: Factor of the returns.
        labels: Columns that the files do not contain, by name: an array `[T, ...]` for each episode.
    """

    observation_space: Any
    chunk: range
    obs_offset: int = 0
    columns: tuple[str, ...] = ()
    gamma: float | None = None
    reward_scale: float = 1.0
    labels: Mapping[str, Sequence[np.ndarray]] | None = None


class _Block:
    """Numbers of consecutive episodes, and handles of their images.

    Args:
        episodes: Episodes of the block.
        labels: Labels of these episodes, by column.
        options: Columns.
    """

    def __init__(
        self, episodes: Sequence[DemoEpisode], labels: Mapping[str, Sequence[np.ndarray]], options: RowOptions
    ) -> None:
        self._options = options
        self._boxes = boxes_of(options.observation_space)
        episode_lengths = np.array([episode.length for episode in episodes])
        self._lengths = episode_lengths
        self._starts = np.cumsum([0, *episode_lengths[:-1]])
        self._obs_starts = self._starts + np.arange(len(episode_lengths))
        #: Handles of the images by name, for each episode.
        self.frames: list[dict[str, Frames]] = []
        #: Names of the observations, in the order of the files.
        self.names: list[str] = []
        obs: dict[str, list[np.ndarray]] = {}
        columns: dict[str, list[np.ndarray]] = {name: list(arrays) for name, arrays in labels.items()}
        for episode in episodes:
            trajectory = episode.read()
            fitted_columns = fitted_obs(trajectory["obs"], options.observation_space)
            self.names = list(fitted_columns)
            self.frames.append(
                {name: obs_column for name, obs_column in fitted_columns.items() if isinstance(obs_column, Frames)}
            )
            for name, obs_column in fitted_columns.items():
                if not isinstance(obs_column, Frames):
                    obs.setdefault(name, []).append(obs_column)
            columns.setdefault("actions", []).append(trajectory["actions"])
            for name in options.columns:
                columns.setdefault(name, []).append(np.asarray(trajectory[name], np.float32))
            if options.gamma is not None:
                returns = options.reward_scale * returns_to_go(trajectory["rewards"], options.gamma)
                columns.setdefault("returns", []).append(returns)
        self._obs = {name: np.concatenate(arrays) for name, arrays in obs.items()}
        self._columns = {name: np.concatenate(arrays) for name, arrays in columns.items()}
        self.nbytes = sum(array.nbytes for array in (*self._obs.values(), *self._columns.values()))

    def windows(self, name: str, shape: tuple[int, ...], steps: np.ndarray) -> np.ndarray:
        """Returns the observations of each row (`window_steps`).

        Args:
            name: Name of the observation.
            shape: Shape of an episode's array.
            steps: Step of each row.
        """
        return window_steps(steps + self._options.obs_offset, window_length(name, shape, self._boxes))

    def gather(self, episodes: np.ndarray, steps: np.ndarray) -> tuple[dict[str, np.ndarray], Batch]:
        """Returns the observations without images, and the other columns.

        Args:
            episodes: Number of each row's episode in the block.
            steps: Step of each row.
        """
        obs = {}
        for name, array in self._obs.items():
            window = self.windows(name, array.shape, steps)
            obs_starts = self._obs_starts[episodes]
            obs[name] = array[window + (obs_starts[:, None] if window.ndim == 2 else obs_starts)]
        obs_starts = self._starts[episodes]
        batch = {name: column[obs_starts + steps] for name, column in self._columns.items() if name != "actions"}
        chunks, batch["is_pad"] = chunk_steps(steps, self._lengths[episodes], self._options.chunk)
        batch["actions"] = self._columns["actions"][obs_starts[:, None] + chunks]
        return obs, batch


class DemoStream:
    """Reader of batches of demonstrations.

    Args:
        episodes: Episodes, in order.
        options: Columns of a batch.
        budget: Bytes of host memory for numbers, decoded frames and batches that are read ahead. A micro-batch that needs more
            is still read.
        probe: Row that is read at once, to learn the size of a row.

    Attributes:
        total: Number of rows.
        pool: Reader of the images.

    Raises:
        ConfigError: The first row cannot be read.
    """

    def __init__(self, episodes: Sequence[DemoEpisode], options: RowOptions, budget: int, probe: int = 0) -> None:
        self._episodes, self._options = list(episodes), options
        self._ends = np.cumsum([episode.length for episode in episodes])
        self._starts = np.concatenate([[0], self._ends[:-1]]).astype(np.int64)
        self.total = int(self._ends[-1]) if len(self._ends) else 0
        self._numbers_budget, self._group_budget = budget // _NUMBERS, budget // _GROUP
        self.pool = FramePool(budget - budget // _NUMBERS - 2 * (budget // _GROUP))
        self._block_starts = self._find_block_starts(min(_BLOCK_BYTES, max(self._numbers_budget // 4, 1)))
        self._blocks = OrderedDict[int, _Block]()
        self._row_bytes = 1
        if self.total:
            probe_batch = self.read(np.array([probe]))
            self._row_bytes = max(1, sum(array.nbytes for array in _iter_arrays(probe_batch)))

    def _find_block_starts(self, block_bytes: int) -> np.ndarray:
        """Returns the first episode of each block."""
        block_starts, num_bytes = [0], 0
        for episode_number, episode in enumerate(self._episodes):
            episode_bytes = episode.length * episode.step_bytes
            if num_bytes and num_bytes + episode_bytes > block_bytes:
                block_starts.append(episode_number)
                num_bytes = 0
            num_bytes += episode_bytes
        return np.array(block_starts)

    @property
    def retained_bytes(self) -> int:
        """Bytes of numbers and decoded frames in memory, without batches."""
        return self.pool.cached_bytes + sum(block.nbytes for block in self._blocks.values())

    @property
    def max_rows(self) -> int:
        """Maximum number of rows that are read at once; a larger micro-batch is still read."""
        return max(1, self._group_budget // self._row_bytes)

    def rows_of(self, episode: int) -> range:
        """Returns the rows of an episode."""
        return range(int(self._starts[episode]), int(self._ends[episode]))

    def read(self, rows: np.ndarray) -> Batch:
        """Returns the columns of rows, as arrays in their order. Each file with images is read once.

        Raises:
            ConfigError: A file cannot be read.
        """
        rows = np.asarray(rows)
        episodes = np.searchsorted(self._ends, rows, side="right")
        steps = rows - self._starts[episodes]
        blocks = np.searchsorted(self._block_starts, episodes, side="right") - 1
        obs: dict[str, np.ndarray] = {}
        batch: Batch = {}
        requests: list[FrameRequest] = []
        column_names: list[str] = []
        for block_number in np.unique(blocks).tolist():
            block, selected_rows = self._block(block_number), np.flatnonzero(blocks == block_number)
            local_episodes, local_steps = (
                episodes[selected_rows] - self._block_starts[block_number],
                steps[selected_rows],
            )
            block_obs, block_columns = block.gather(local_episodes, local_steps)
            _scatter(obs, block_obs, selected_rows, len(rows))
            _scatter(batch, block_columns, selected_rows, len(rows))
            for row, episode, step in zip(
                selected_rows.tolist(), local_episodes.tolist(), local_steps.tolist(), strict=True
            ):
                for name, frames in block.frames[episode].items():
                    window = block.windows(name, frames.shape, np.array([step]))[0]
                    if name not in obs:
                        obs[name] = np.empty((len(rows), *np.shape(window), *frames.shape[1:]), frames.dtype)
                    obs_column = obs[name]
                    requests.append(
                        (
                            frames,
                            np.atleast_1d(window),
                            obs_column[row] if np.ndim(window) else obs_column[row : row + 1],
                        )
                    )
            column_names = block.names
        self.pool.read(requests)
        return {"obs": obs[""] if "" in obs else {name: obs[name] for name in column_names}, **batch}

    def _block(self, number: int) -> _Block:
        """Returns a block of numbers, and drops those that were used longest ago until the rest fits the budget."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        first_episode = int(self._block_starts[number])
        end_episode = (
            int(self._block_starts[number + 1]) if number + 1 < len(self._block_starts) else len(self._episodes)
        )
        labels = {name: arrays[first_episode:end_episode] for name, arrays in (self._options.labels or {}).items()}
        block = _Block(self._episodes[first_episode:end_episode], labels, self._options)
        num_bytes = block.nbytes + sum(other_block.nbytes for other_block in self._blocks.values())
        while self._blocks and num_bytes > self._numbers_budget:
            num_bytes -= self._blocks.popitem(last=False)[1].nbytes
        self._blocks[number] = block
        return block

    def close(self) -> None:
        """Closes the open files."""
        self.pool.close()

    def batches(self, minibatches: Iterable[Sequence[np.ndarray]]) -> Generator[Batch, None, None]:
        """Yields the batch of each micro-batch, in order. A thread reads ahead.

        The micro-batches of a minibatch are read together as far as they fit the budget, so that each of their files is read
        once. Closing the generator ends the thread.

        Args:
            minibatches: Rows of each micro-batch, by minibatch.

        Raises:
            ConfigError: A file cannot be read.
        """
        for batch, group_sizes in Prefetcher()(self._read_groups(minibatches)):
            group_start = 0
            for group_size in group_sizes:
                yield _select(batch, slice(group_start, group_start + group_size))
                group_start += group_size

    def _read_groups(self, minibatches: Iterable[Sequence[np.ndarray]]) -> Iterator[tuple[Batch, list[int]]]:
        for micro_batches in minibatches:
            group: list[np.ndarray] = []
            for rows in micro_batches:
                if group and sum(map(len, group)) + len(rows) > self.max_rows:
                    yield self.read(np.concatenate(group)), [len(index_rows) for index_rows in group]
                    group = []
                group.append(rows)
            if group:
                yield self.read(np.concatenate(group)), [len(index_rows) for index_rows in group]


def _scatter(columns: dict[str, Any], block_columns: Mapping[str, np.ndarray], rows: np.ndarray, num_rows: int) -> None:
    """Writes a block's rows to the columns of a batch with `num_rows` rows."""
    for name, column in block_columns.items():
        if len(rows) == num_rows:
            columns[name] = column
        else:
            columns.setdefault(name, np.empty((num_rows, *column.shape[1:]), column.dtype))[rows] = column


def _iter_arrays(data: Any) -> Iterator[np.ndarray]:
    if isinstance(data, Mapping):
        for child in data.values():
            yield from _iter_arrays(child)
    else:
        yield data


def _select(data: Any, rows: slice) -> Any:
    if isinstance(data, Mapping):
        return {name: _select(child, rows) for name, child in data.items()}
    return data[rows]
