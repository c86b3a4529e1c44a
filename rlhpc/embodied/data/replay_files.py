"""Replay buffers on disk: inside a checkpoint, or as a folder of its own. `rlhpc replay` shows, joins and splits them.

    replay/index-<rank>.json             slots of the rank, how many decisions were made, which files hold the newest
    replay/<rank>-<first>-<stop>.npy     decisions first … stop-1 of its slots: a structured array [stop-first, slots]

A decision is one action in every slot; its rows are transitions with the columns of the array's dtype: `obs` (or `obs.<key>`
where an environment shows several things), `actions`, `rewards`, `next_obs`, `terminations`. Files are only ever added: the
next checkpoint holds the same ones by hard links, and one more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.checkpoint.manifest import is_plain_name
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, read_json

FOLDER = "replay"
FORMAT = 1


@dataclass(frozen=True)
class Segment:
    """One file.

    Attributes:
        file: Its name.
        first, stop: Decisions that it holds, counted from the start of the run.
    """

    file: str
    first: int
    stop: int


@dataclass
class Index:
    """What one rank of a stored buffer has.

    Attributes:
        slots: First and past-last slot of the rank.
        num_envs: Slots of the run.
        decisions: Decisions made since the run began.
        held: How many of them, the newest, are in the buffer.
        segments: Files, oldest first; the first one may begin before what is held.
    """

    slots: tuple[int, int]
    num_envs: int
    decisions: int
    held: int
    segments: list[Segment] = field(default_factory=list)

    def dump(self) -> bytes:
        """The index as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode() + b"\n"

    @classmethod
    def load(cls, path: Path) -> Index:
        """Reads what `dump` wrote.

        Raises:
            CheckpointError: It is not an index; names the file.
        """
        try:
            data = read_json(path.read_bytes())
            if data.pop("format") != FORMAT:
                raise ValueError(f"format is not {FORMAT}")
            segments = [Segment(**segment) for segment in data.pop("segments")]
            for segment in segments:
                if not is_plain_name(segment.file) or "/" in segment.file or not segment.file.endswith(".npy"):
                    raise ValueError(f"file {segment.file!r} is not the name of a .npy file beside it")
            return cls(**{**data, "slots": tuple(data["slots"])}, segments=segments)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot be read as the index of a replay buffer ({error})") from error


def write_segment(path: Path, parts: Sequence[np.ndarray]) -> None:
    """Writes arrays of one dtype one after the other, as one `.npy`."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(parts[0].dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(file, header)
        for part in parts:
            part.tofile(file)


class StoredReplay:
    """A replay buffer on disk.

    Args:
        folder: A checkpoint, or a folder with `index-*.json`.

    Raises:
        ConfigError: There is none.
        CheckpointError: It is damaged.
    """

    def __init__(self, folder: Path) -> None:
        folder = expand_home(folder)
        self.folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        files = sorted(self.folder.glob("index-*.json"))
        if not files:
            raise ConfigError(
                f"{folder} holds no replay buffer; name a checkpoint of an off-policy run (runs/NAME/checkpoints/"
                "global_step_N), its folder 'replay', or what `rlhpc replay merge` wrote"
            )
        self.ranks = sorted((Index.load(path) for path in files), key=lambda index: index.slots)
        first = self.ranks[0]
        ends = [0, *(index.slots[1] for index in self.ranks)]
        whole = [index.slots[0] for index in self.ranks] == ends[:-1] and ends[-1] == first.num_envs
        same = len({(index.num_envs, index.decisions, index.held) for index in self.ranks}) == 1
        if not whole or not same:
            raise CheckpointError(
                f"{self.folder}: the ranks' parts do not fit together; a file of some rank is missing"
            )
        self.num_envs, self.decisions, self.held = first.num_envs, first.decisions, first.held
        self._parts = [self._open(index) for index in self.ranks]
        dtypes = {part.dtype for parts in self._parts for part in parts}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.folder}: the files' columns differ")
        self.dtype: np.dtype[Any] | None = dtypes.pop() if dtypes else None

    def __len__(self) -> int:
        return self.held * self.num_envs

    def _open(self, index: Index) -> list[np.ndarray]:
        """The files' arrays, mapped, without what is older than the buffer's oldest decision."""
        oldest, at, parts = index.decisions - index.held, index.decisions - index.held, []
        for segment in index.segments:
            path = self.folder / segment.file
            try:
                rows = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be read ({error})") from error
            expected = (segment.stop - segment.first, index.slots[1] - index.slots[0])
            if rows.shape != expected or segment.first > at:
                raise CheckpointError(f"{path}: holds {rows.shape}, its index says {expected}")
            parts.append(rows[max(0, oldest - segment.first) :])
            at = segment.stop
        if at != index.decisions:
            raise CheckpointError(f"{self.folder}: decisions {at} to {index.decisions} are missing")
        return parts

    def pieces(self, share: range) -> Iterator[tuple[int, slice, np.ndarray]]:
        """The transitions of some slots as mapped arrays `[decisions, slots]`: each with its first decision, counted from the
        oldest held, and its place among `share`."""
        for index, parts in zip(self.ranks, self._parts, strict=True):
            start, stop = max(share.start, index.slots[0]), min(share.stop, index.slots[1])
            at = 0
            for part in parts if start < stop else ():
                mine = slice(start - index.slots[0], stop - index.slots[0])
                yield at, slice(start - share.start, stop - share.start), part[:, mine]
                at += len(part)

    def of_slots(self, share: range) -> np.ndarray:
        """The transitions of some slots, `[held, len(share)]`, oldest first."""
        assert self.dtype is not None
        found = np.zeros((self.held, len(share)), self.dtype)  # also the bytes between columns
        for at, place, rows in self.pieces(share):
            found[at : at + len(rows), place] = rows
        return found

    def transitions(self) -> np.ndarray:
        """All transitions, `[len(self)]`, oldest first and by slot."""
        return self.of_slots(range(self.num_envs)).reshape(-1)


def open_all(folders: Sequence[str | Path]) -> list[StoredReplay]:
    """Several stored buffers of the same columns, none of them empty.

    Raises:
        ConfigError: They differ, or one is empty.
    """
    stored = [StoredReplay(Path(folder)) for folder in folders]
    for one in stored:
        if one.dtype is None:
            raise ConfigError(f"{one.folder} is empty")
        if one.dtype != stored[0].dtype:
            raise ConfigError(
                f"{one.folder} has the columns {describe(one.dtype)}, {stored[0].folder} has {describe(stored[0].dtype)}"
            )
    return stored


def describe(dtype: np.dtype[Any] | None) -> str:
    """Columns of a buffer in words."""
    if dtype is None or dtype.fields is None:
        return "none"
    return ", ".join(
        f"{name} {kind.base.name}{list(kind.shape) if kind.shape else ''}" for name, (kind, *_) in dtype.fields.items()
    )


def write_replay(target: Path, transitions: np.ndarray) -> None:
    """Writes transitions as a stored buffer of one slot, atomically.

    Raises:
        ConfigError: Something is there already.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; give another --output")
    count = len(transitions)
    with filled_folder(target) as folder:
        segment = Segment(f"0-0-{count}.npy", 0, count)
        write_segment(folder / segment.file, [transitions.reshape(-1, 1)])
        (folder / "index-0.json").write_bytes(Index((0, 1), 1, count, count, [segment]).dump())


def inspect(folder: str | Path) -> dict[str, Any]:
    """Facts of a stored buffer: transitions, columns, ranks, bytes, rewards, and the share of terminations."""
    stored = StoredReplay(Path(folder))
    files = [stored.folder / segment.file for index in stored.ranks for segment in index.segments]
    facts: dict[str, Any] = {
        "folder": str(stored.folder),
        "transitions": len(stored),
        "num_envs": stored.num_envs,
        "decisions_made": stored.decisions,
        "ranks": len(stored.ranks),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "columns": describe(stored.dtype),
    }
    if len(stored):
        rows = stored.transitions()
        rewards = rows["rewards"].astype(np.float64)
        facts |= {
            "reward_mean": float(rewards.mean()),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
            "terminations": int(rows["terminations"].sum()),
        }
    return facts


def merge(folders: Sequence[str | Path], output: str | Path) -> int:
    """Joins stored buffers into one, in the given order.

    Returns:
        Its transitions.
    """
    parts = [one.transitions() for one in open_all(folders)]
    write_replay(Path(output), np.concatenate(parts))
    return sum(map(len, parts))


def split(folder: str | Path, output: str | Path, parts: int) -> list[int]:
    """Cuts a stored buffer into `parts` of equal size, oldest first: `output/0`, `output/1`, …

    Returns:
        Transitions of each.
    """
    (stored,) = open_all([folder])
    if not 1 <= parts <= len(stored):
        raise ConfigError(f"--parts is {parts}; {stored.folder} has {len(stored)} transitions")
    target = Path(output)
    if target.exists():
        raise ConfigError(f"{target} exists; give another --output")
    pieces = np.array_split(stored.transitions(), parts)
    for number, piece in enumerate(pieces):
        write_replay(target / str(number), piece)
    return [len(piece) for piece in pieces]
