"""Batches of off-policy learning: samples from the replay buffer and a fixed fraction from demonstrations (RLPD, Ball et al.
2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.data.replay_buffer import ReplayBuffer, TransitionRing, gather
from rlhpc.embodied.data.stored_replay import StoredReplay, describe_difference, row_type
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home

#: Arrays, or tensors on a device.
_Array = TypeVar("_Array")


@dataclass
class MixtureDraw(Generic[_Array]):
    """Rows of one batch on a rank.

    Attributes:
        columns: Arrays `[b, ...]` by name. Those of a `Mixture` are views that the next draw overwrites.
        noise: `[2, b, d]` float32, standard normal.
        total: Number of rows over all ranks.
        steps: Number of decisions `[b]` between observation and next observation; None if it is 1 everywhere.
        shifts: Offsets `[2, b, 2]` of rows and columns, 0 to twice `random_shift`, of the images of observations and next
            observations; None without shifts.
        critics: Indices of the critics whose values count in the targets; None for all.
    """

    columns: dict[str, _Array]
    noise: _Array
    total: int
    steps: _Array | None = None
    shifts: _Array | None = None
    critics: _Array | None = None


@dataclass(frozen=True)
class RowDraw:
    """Rows of one batch on a rank, before their transitions are read.

    Attributes:
        demo_rows: Rows among the demonstrations, int64.
        replay_rows: Rows in the replay buffer, int64.
        noise, total, shifts, critics: See `MixtureDraw`.
    """

    demo_rows: np.ndarray
    replay_rows: np.ndarray
    noise: np.ndarray
    total: int
    shifts: np.ndarray | None
    critics: np.ndarray | None


#: Column with the positions of transitions (`PositionCounter`), by which several decisions of an episode are found.
POSITION = "position"
#: Column that marks the transitions in which a person or a script chose an action; demonstrations are marked, too.
INTERVENED = "intervened"
#: Folder of the interventions' buffer in a checkpoint.
INTERVENTIONS_FOLDER = "interventions"


@dataclass(frozen=True)
class DrawOptions:
    """Options of how a batch is drawn.

    Attributes:
        batch_size: Number of rows over all ranks.
        demo_ratio: Fraction of the rows that come from the demonstrations.
        action_dim: Number of action components, d.
        num_steps: Maximum number of decisions whose rewards a row sums up, discounted by `gamma`.
        gamma: Discount.
        random_shift: Pixels by which images are shifted at most.
        num_critics, num_targets: Number of critics, and of those drawn for the targets; None for all.
    """

    batch_size: int
    demo_ratio: float
    action_dim: int
    num_steps: int = 1
    gamma: float = 1.0
    random_shift: int = 0
    num_critics: int = 2
    num_targets: int | None = None


class _Demos:
    """Demonstrated transitions `[n]`, with the methods of a replay buffer that a draw needs."""

    def __init__(self, transitions: np.ndarray) -> None:
        self.dtype = transitions.dtype
        self._transitions = transitions
        self._table = transitions.view(np.uint8).reshape(len(transitions), transitions.dtype.itemsize)

    def __len__(self) -> int:
        return len(self._transitions)

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copies the transitions of some rows to `out` (`ReplayBuffer.gather`)."""
        gather(self._table, rows, out)

    def following(self, rows: np.ndarray, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds later transitions (`ReplayBuffer.following`)."""
        return np.minimum(rows + num_steps, len(self) - 1), rows + num_steps < len(self)

    def stored_column(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Returns a column of the transitions in some rows (`ReplayBuffer.stored_column`)."""
        column: np.ndarray = self._transitions[name][rows]
        return column


class RowSampler:
    """Sampler of the rows of batches. Rows and noise depend only on seed, update and the lengths of the buffers.

    Args:
        replay: Buffer of this rank.
        demos: Demonstrated transitions `[n]` in the buffer's dtype, the same on all ranks; None for no demonstrations.
        options: Options of the draw of a batch.
        seed: Seed of the run.
        rank, ranks: Rank in the actor group, and its size.
    """

    def __init__(
        self,
        replay: TransitionRing,
        demos: np.ndarray | None,
        options: DrawOptions,
        *,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.replay = replay
        self.options = options
        self.seed = seed
        self.demos = demos
        self._rank = rank
        self._ranks = ranks

    @property
    def num_demos(self) -> int:
        """Number of demonstrated transitions."""
        return 0 if self.demos is None else len(self.demos)

    @property
    def demo_rows(self) -> int:
        """Number of a batch's rows that come from the demonstrations, over all ranks."""
        return round(self.options.demo_ratio * self.options.batch_size) if self.num_demos else 0

    def dtype(self, *, demos_only: bool = False) -> np.dtype[Any]:
        """Returns the dtype of a batch's transitions; `demos_only` selects the demonstrations' own.

        Raises:
            ConfigError: The columns of the demonstrations differ from those of this run.
        """
        demo_dtype = None if self.demos is None else self.demos.dtype
        dtype = demo_dtype if demos_only else self.replay.dtype
        assert dtype is not None
        if demo_dtype is not None and demo_dtype != dtype:
            raise _mismatch_error(demo_dtype, dtype)
        return dtype

    def draw_rows(self, update: int, *, demos_only: bool = False) -> RowDraw:
        """Draws the rows and the noise of an update's batch.

        Args:
            update: Number of the update.
            demos_only: Draw all rows from the demonstrations.
        """
        options = self.options
        generator = np.random.Generator(np.random.Philox(key=[self.seed, update]))
        num_demos = options.batch_size if demos_only else self.demo_rows
        local_demo_positions = np.arange(
            num_demos * self._rank // self._ranks, num_demos * (self._rank + 1) // self._ranks
        )
        demo_rows = np.empty(0, np.int64)
        if num_demos:
            demo_rows = generator.integers(0, self.num_demos, num_demos)[local_demo_positions]
        replay_positions = (
            np.empty(0, np.int64)
            if demos_only
            else generator.integers(0, len(self.replay), options.batch_size - num_demos)
        )
        local_replay_positions, rows = self.replay.local_rows(replay_positions)
        noise = generator.standard_normal((2, options.batch_size, options.action_dim), np.float32)
        joint_positions = np.concatenate((local_demo_positions, local_replay_positions + num_demos))
        shifts, critics = None, None
        if options.random_shift:
            shifts = generator.integers(0, 2 * options.random_shift + 1, (2, options.batch_size, 2))
        if options.num_targets is not None and options.num_targets < options.num_critics:
            critics = generator.permutation(options.num_critics)[: options.num_targets]
        if len(joint_positions) != options.batch_size:
            noise = noise[:, joint_positions]
            shifts = None if shifts is None else shifts[:, joint_positions]
        return RowDraw(demo_rows, rows, noise, options.batch_size, shifts, critics)


class Mixture(RowSampler):
    """Sampler of batches from a replay buffer and demonstrations in host memory.

    Args:
        replay, demos, options: Arguments of `RowSampler`, like `ranks`.
        interventions: Buffer of one slot with the transitions of interventions, the same on all ranks; they are drawn as
            demonstrations are. None if there is no source of interventions.
        **ranks: Seed, rank and size of the actor group.
    """

    replay: ReplayBuffer

    def __init__(
        self,
        replay: ReplayBuffer,
        demos: np.ndarray | None,
        options: DrawOptions,
        *,
        interventions: ReplayBuffer | None = None,
        **ranks: int,
    ) -> None:
        super().__init__(replay, demos, options, **ranks)
        self.interventions = interventions
        self.set_demos(demos)
        self._out = self._next_out = np.empty((0, 0), np.uint8)

    def set_demos(self, demos: np.ndarray | None) -> None:
        """Replaces the demonstrated transitions."""
        self.demos = demos
        self._demos = None if demos is None else _Demos(demos)

    @property
    def num_demos(self) -> int:
        """Number of demonstrated transitions, with those of interventions."""
        return super().num_demos + (0 if self.interventions is None else len(self.interventions))

    def draw(self, update: int, *, demos_only: bool = False) -> MixtureDraw[np.ndarray]:
        """Draws the batch of an update (`draw_rows`)."""
        row_draw, dtype = self.draw_rows(update, demos_only=demos_only), self.dtype(demos_only=demos_only)
        num_rows = len(row_draw.demo_rows) + len(row_draw.replay_rows)
        if self._out.shape != (num_rows, dtype.itemsize):
            self._out = np.empty((num_rows, dtype.itemsize), np.uint8)
            self._next_out = np.empty_like(self._out) if self.options.num_steps > 1 else self._next_out
        columns, steps = self._rows(dtype, row_draw.demo_rows, row_draw.replay_rows)
        return MixtureDraw(columns, row_draw.noise, row_draw.total, steps, row_draw.shifts, row_draw.critics)

    def _rows(
        self, dtype: np.dtype[Any], demo_rows: np.ndarray, replay_rows: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Returns the columns of demonstrated and played transitions, and their numbers of decisions (`MixtureDraw.steps`)."""
        num_demos, column_names = len(demo_rows), dtype.names or ()
        row_sources: list[tuple[Any, np.ndarray, slice | np.ndarray]] = []
        num_recorded = super().num_demos
        is_recorded = demo_rows < num_recorded
        if is_recorded.all() and num_demos:
            row_sources.append((self._demos, demo_rows, slice(num_demos)))
        elif num_demos:
            assert self.interventions is not None
            if is_recorded.any():
                row_sources.append((self._demos, demo_rows[is_recorded], np.flatnonzero(is_recorded)))
            _, rows_of_interventions = self.interventions.local_rows(demo_rows[~is_recorded] - num_recorded)
            row_sources.append((self.interventions, rows_of_interventions, np.flatnonzero(~is_recorded)))
        if len(replay_rows):
            row_sources.append((self.replay, replay_rows, slice(num_demos, None)))
        for row_source, rows, table_part in row_sources:
            _gather_into(row_source, rows, self._out, table_part)
        batch = self._out.view(dtype)[:, 0]
        columns = {name: batch[name] for name in column_names}
        if self.options.num_steps == 1:
            return columns, None
        steps = np.empty(len(batch), np.int64)
        for row_source, rows, table_part in row_sources:
            columns["rewards"][table_part], last_rows, steps[table_part] = self._sum_rewards(row_source, rows)
            _gather_into(row_source, last_rows, self._next_out, table_part)
        next_rows = self._next_out.view(dtype)[:, 0]
        columns |= {
            name: next_rows[name] for name in column_names if name.startswith("next_obs") or name == "terminations"
        }
        return columns, steps

    def _sum_rewards(self, row_source: Any, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums the discounted rewards of up to `num_steps` decisions of an episode.

        Returns:
            Sums `[n]`, rows of the last of these transitions, and the number of decisions.
        """
        rewards = row_source.stored_column("rewards", rows).astype(np.float64)
        row_positions = row_source.stored_column(POSITION, rows)
        last_rows, num_steps, goes_on = rows.copy(), np.ones(len(rows), np.int64), np.ones(len(rows), bool)
        for step in range(1, self.options.num_steps):
            later_rows, is_there = row_source.following(rows, step)
            later_positions = row_source.stored_column(POSITION, later_rows)
            goes_on &= is_there & (row_positions & 1 == 0) & (later_positions >> 1 == (row_positions >> 1) + 1)
            row_positions = later_positions
            rewards += goes_on * self.options.gamma**step * row_source.stored_column("rewards", later_rows)
            last_rows[goes_on] = later_rows[goes_on]
            num_steps += goes_on
        return rewards.astype(np.float32), last_rows, num_steps


def _gather_into(row_source: Any, rows: np.ndarray, table: np.ndarray, table_part: slice | np.ndarray) -> None:
    """Copies transitions of `row_source` to some rows of a byte table."""
    if isinstance(table_part, slice):
        row_source.gather(rows, table[table_part])
        return
    transitions = np.empty((len(rows), table.shape[1]), np.uint8)
    row_source.gather(rows, transitions)
    table[table_part] = transitions


class PositionCounter:
    """Counter of `POSITION` for the transitions of a rank's slots. A position is twice a number, plus 1 where an episode ends;
    the numbers of a slot begin at 2 to the power of 40 times the slot.

    Args:
        share: Slots of the rank.
    """

    def __init__(self, share: range) -> None:
        self._share = np.array(share, np.int64)
        self._next_position = self._share << 40

    def resume(self, replay: ReplayBuffer) -> None:
        """Continues after the newest transitions of a restored buffer. In a slot whose newest transition is another slot's, no
        later transition continues it.
        """
        self._next_position = (self._share << 40) + replay.decisions
        if len(replay):
            newest_position = len(replay) - replay.num_envs + self._share
            newest_decision = replay.stored_column(POSITION, replay.local_rows(newest_position)[1]) >> 1
            is_own = newest_decision >> 40 == self._share
            self._next_position[is_own] = newest_decision[is_own] + 1

    def count(self, ends: np.ndarray) -> np.ndarray:
        """Returns the positions `[slots, T]` of new transitions.

        Args:
            ends: Bool `[slots, T]`: transitions after which an episode ends, or which are left out.
        """
        return self.count_without_ends(ends.shape[1]) + ends

    def count_without_ends(self, num_steps: int) -> np.ndarray:
        """Returns the positions `[slots, T]` of new transitions (`count`), without the 1 where an episode ends."""
        row_numbers = self._next_position[:, None] + np.arange(num_steps)
        self._next_position += num_steps
        return 2 * row_numbers


def load_demos(
    path: str, *, reward_scale: float, ignore_terminations: bool, skip: bool = False, has_positions: bool = False
) -> np.ndarray:
    """Loads demonstrated transitions in the form of the replay buffer.

    Args:
        path: HDF5 trajectories in ManiSkill's format (a file, a folder, a pattern), or a stored replay buffer (see
            `replay_buffer`), whose transitions stay unchanged.
        reward_scale, ignore_terminations: Options of the training environments, which also apply to the demonstrations.
        skip: Skip episodes with non-finite numbers; otherwise they raise an error.
        has_positions: Whether trajectories get the column `POSITION`.

    Returns:
        Structured array `[n]`.

    Raises:
        ConfigError: The path contains no transitions, or rewards are missing.
    """
    key = "algorithm.demo_buffer.load_path"
    folder = expand_home(path)
    if any(folder.glob("index-*.json")) or any(folder.glob("replay/index-*.json")):
        replay = StoredReplay(folder)
        if replay.dtype is None:
            raise ConfigError(f"{key}: {folder} is empty")
        return replay.transitions()
    from rlhpc.embodied.data.trajectories import read_trajectories

    required_columns = ("obs", "actions", "rewards")
    trajectories = read_trajectories(path, require=required_columns, key=key, left_out=[] if skip else None)
    return transitions_of(
        trajectories,
        reward_scale=reward_scale,
        ignore_terminations=ignore_terminations,
        has_positions=has_positions,
    )


def _mismatch_error(demo_dtype: np.dtype[Any], dtype: np.dtype[Any]) -> ConfigError:
    demo_columns, columns = describe_difference(demo_dtype, dtype)
    return ConfigError(
        f"algorithm.demo_buffer.load_path: the demonstrations have {demo_columns}; this run's transitions have {columns}. "
        "Record demonstrations with this run's environment (rlhpc record), or give the run the environment of these"
    )


def fit(
    demos: np.ndarray, observation_space: Any, action_space: Any, chunk: int, *, has_positions: bool = False,
    has_labels: bool = False,
) -> np.ndarray:  # fmt: skip
    """Returns the demonstrations with exactly the columns of this run's transitions.

    Args:
        demos: Result of `load_demos`.
        observation_space, action_space: Spaces of one environment slot.
        chunk: Number of actions of a decision.
        has_positions: Whether this run's transitions have the column `POSITION`.
        has_labels: Whether this run's transitions have the column `INTERVENED`. Demonstrations without it are marked.

    Raises:
        ConfigError: A column is missing or has a different shape; the message shows the columns of both.
    """
    boxes = {"obs": observation_space}
    if isinstance(observation_space, spaces.Dict):
        boxes = {f"obs.{name}": box for name, box in observation_space.items()}
    columns = {name: _as_float32(np.zeros((1, *box.shape), box.dtype)) for name, box in boxes.items()}
    columns |= {f"next_{name}": column for name, column in columns.items()}
    columns["actions"] = np.zeros((1, chunk, int(np.prod(action_space.shape))), np.float32)
    columns |= {"rewards": np.zeros(1, np.float32), "terminations": np.zeros(1, bool)}
    if has_positions:
        columns[POSITION] = np.zeros(1, np.int64)
    required_dtype = row_type(columns, 1)
    demo_fields: Any = demos.dtype.fields or {}
    required_fields: Any = required_dtype.fields or {}
    if any(name not in demo_fields or demo_fields[name][0] != dtype for name, (dtype, *_) in required_fields.items()):
        raise _mismatch_error(demos.dtype, required_dtype)
    if has_labels:
        required_dtype = row_type({**columns, INTERVENED: np.zeros(1, bool)}, 1)
    rows = np.zeros(len(demos), required_dtype)
    for name in required_dtype.names or ():
        rows[name] = demos[name] if name in demo_fields else True
    return rows


def transitions_of(
    trajectories: Iterable[Mapping[str, Any]],
    *,
    reward_scale: float = 1.0,
    ignore_terminations: bool = False,
    has_positions: bool = False,
) -> np.ndarray:
    """Converts trajectories (see `rlhpc.embodied.data.trajectories`) to transitions `[n]`.

    The observation after the last action is the last next observation, so that a truncated episode can be bootstrapped.
    """
    columns_by_trajectory: list[dict[str, np.ndarray]] = []
    next_position = 0
    for trajectory in trajectories:
        obs = trajectory["obs"]
        obs_columns = (
            {f"obs.{name}": array for name, array in obs.items()} if isinstance(obs, Mapping) else {"obs": obs}
        )
        columns = {name: np.asarray(array)[:-1] for name, array in obs_columns.items()}
        columns |= {f"next_{name}": np.asarray(array)[1:] for name, array in obs_columns.items()}
        actions = np.asarray(trajectory["actions"], np.float32)
        terminations = np.asarray(trajectory["terminations"], bool)
        columns |= {
            "actions": actions.reshape(len(actions), 1, -1),
            "rewards": np.asarray(trajectory["rewards"], np.float32) * np.float32(reward_scale),
            "terminations": np.zeros_like(terminations) if ignore_terminations else terminations,
        }
        if has_positions:
            columns[POSITION] = 2 * np.arange(next_position, next_position + len(actions))
            columns[POSITION][-1:] += 1
        next_position += len(actions)
        columns_by_trajectory.append({name: _as_float32(column) for name, column in columns.items()})
    columns = {
        name: np.concatenate([trajectory_columns[name] for trajectory_columns in columns_by_trajectory])
        for name in columns_by_trajectory[0]
    }
    rows = np.zeros(len(columns["rewards"]), row_type(columns, 1))
    for name, column in columns.items():
        rows[name] = column
    return rows


def _as_float32(column: np.ndarray) -> np.ndarray:
    return column.astype(np.float32) if column.dtype == np.float64 else column
