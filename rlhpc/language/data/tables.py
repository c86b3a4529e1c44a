"""Files of rows: JSON lines, Parquet, HDF5, and folders of Hugging Face `datasets`."""

from __future__ import annotations

import gzip
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json
from rlhpc.runtime.plugins import required
from rlhpc.runtime.text import first_line

Row = dict[str, Any]


class Table(Protocol):
    """Rows with named columns.

    Attributes:
        sparse: Whether a key that an object lacks may stand in it as null, since all objects of a column share their keys.
    """

    sparse: bool

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """One row, whole."""

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        """All rows in order, with those of `columns` that they have."""

    def columns(self, index: int) -> list[str]:
        """The columns of one row."""

    def place(self, index: int) -> str:
        """File and position of a row, for messages."""


class JsonLines:
    """One JSON object per line; `.gz` is unpacked. Empty lines do not count."""

    sparse = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                numbered = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
        except (
            OSError,
            EOFError,
            zlib.error,
        ) as error:  # no gzip, one that is cut off or damaged, or an unreadable file
            raise ConfigError(f"{path} cannot be read: {first_line(error)}") from None
        # Bytes rather than parsed rows: a third of the memory.
        self._lines = [line for _, line in numbered]
        self._numbers = array("q", (number for number, _ in numbered))

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> Row:
        try:
            row = read_json(self._lines[index])
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.place(index)} is not UTF-8: {error.reason}") from None
        except ValueError as error:
            raise ConfigError(f"{self.place(index)} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self.place(index)} is a JSON {type(row).__name__}, not an object with columns as keys")
        return row

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        for index in range(len(self)):
            row = self.row(index)
            yield {name: row[name] for name in columns if name in row}

    def columns(self, index: int) -> list[str]:
        return list(self.row(index))

    def place(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"


class ParquetFile:
    """One Parquet file, in memory as Arrow keeps it."""

    sparse = True

    def __init__(self, path: Path) -> None:
        required("pyarrow.parquet", "Parquet files need pyarrow")
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path, partitioning=None)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{path} cannot be read as Parquet: {first_line(error)}") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        row: Row = self._table.slice(index, 1).to_pylist()[0]
        return row

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        chosen = self._table.select([name for name in columns if name in self._table.column_names])
        if not chosen.column_names:
            yield from ({} for _ in range(len(self)))
            return
        for batch in chosen.to_batches(max_chunksize=4096):
            yield from batch.to_pylist()

    def columns(self, index: int) -> list[str]:
        return list(self._table.column_names)

    def place(self, index: int) -> str:
        return f"{self.path}, row {index}"


class Hdf5File:
    """One HDF5 file, or a group in it: each data set is a column, its first axis the rows.

    Texts are UTF-8 strings; a column with the attribute `encoding = "json"` holds JSON texts (a conversation, a list of
    tests).
    """

    sparse = False

    def __init__(self, path: Path, group: str = "/") -> None:
        import h5py
        import numpy as np

        from rlhpc.checkpoint.hdf5 import checked, has, member, members, open_hdf5

        self.path = path
        self._columns: dict[str, list[Any]] = {}
        try:
            with open_hdf5(path) as file:
                if group.strip("/") and not has(file, group):
                    raise ConfigError(f"{path} has no group {group!r}; it has: {', '.join(file)}")
                for name, column in members(member(file, group)):
                    if not isinstance(column, h5py.Dataset) or not column.shape:
                        continue
                    checked(column)
                    values = column.asstr()[...] if h5py.check_string_dtype(column.dtype) else column[...]
                    self._columns[name] = np.asarray(values).tolist()
                    if column.attrs.get("encoding") == "json":
                        self._columns[name] = [read_json(value) for value in self._columns[name]]
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} cannot be read as HDF5: {first_line(error)}") from None
        lengths = {name: len(values) for name, values in self._columns.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ConfigError(f"{path}: the columns have different lengths: {said}")
        self._length = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> Row:
        return {name: values[index] for name, values in self._columns.items()}

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        chosen = [name for name in columns if name in self._columns]
        for index in range(len(self)):
            yield {name: self._columns[name][index] for name in chosen}

    def columns(self, index: int) -> list[str]:
        return list(self._columns)

    def place(self, index: int) -> str:
        return f"{self.path}, row {index}"


class DatasetFolder:
    """What `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, memory-mapped.

    Args:
        path: The folder.
        split: Which part of a `DatasetDict`; may be left out where there is one.
        key: What messages call the section.
    """

    sparse = True

    def __init__(self, path: Path, split: str | None, key: str) -> None:
        datasets = required("datasets", "source hf needs datasets")
        self.path = path
        try:
            loaded = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{key}.path is {str(path)!r}, which is no folder written by save_to_disk of datasets: "
                f"{first_line(error)}; Parquet and JSONL files have sources of their own (parquet, jsonl)"
            ) from None
        if isinstance(loaded, datasets.DatasetDict):
            parts = ", ".join(loaded)
            if split is None and len(loaded) > 1:
                raise ConfigError(f"{key}.split is not set; {path} has the parts {parts}")
            name = next(iter(loaded)) if split is None else split
            if name not in loaded:
                raise ConfigError(f"{key}.split is {name!r}; {path} has the parts {parts}")
            loaded = loaded[name]
        elif split is not None:
            raise ConfigError(f"{key}.split is {split!r}, but {path} is one part without a name; leave split out")
        self._rows = loaded

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        row: Row = self._rows[index]
        return row

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        chosen = [name for name in columns if name in self._rows.column_names]
        if not chosen:
            yield from ({} for _ in range(len(self)))
            return
        yield from self._rows.select_columns(chosen)

    def columns(self, index: int) -> list[str]:
        return list(self._rows.column_names)

    def place(self, index: int) -> str:
        return f"{self.path}, row {index}"


class Joined:
    """Several tables, one after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = list(tables)
        self.sparse = any(table.sparse for table in tables)
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _find(self, index: int) -> tuple[Table, int]:
        which = bisect_right(self._ends, index)
        return self._tables[which], index - (self._ends[which - 1] if which else 0)

    def row(self, index: int) -> Row:
        table, inside = self._find(index)
        return table.row(inside)

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        for table in self._tables:
            yield from table.rows(columns)

    def columns(self, index: int) -> list[str]:
        table, inside = self._find(index)
        return table.columns(inside)

    def place(self, index: int) -> str:
        table, inside = self._find(index)
        return table.place(inside)
