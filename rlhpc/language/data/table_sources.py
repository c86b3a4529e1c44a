"""Data sources that read problems from tables: JSON Lines, Parquet, HDF5 and folders of `datasets`."""

from __future__ import annotations

import abc
import gzip
import json
import random
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhpc.config.options import NoOptions, check_options, read_options
from rlhpc.language.data.chat_messages import Message, is_plain, last_turn, message_text, read_messages, read_tools
from rlhpc.language.data.images import check_images, image_names, read_images
from rlhpc.language.data.procedural import is_in_part
from rlhpc.language.data.prompts import Prompt
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files, read_json
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.text import first_line

if TYPE_CHECKING:
    from rlhpc.language.config.data import DataSourceConfig

_Row = dict[str, Any]


class _Table(abc.ABC):
    """Rows with named columns.

    Attributes:
        path: File or folder that holds the rows.
        sparse: Whether null can mean a missing key, because all objects of a column have the same keys.
    """

    path: Path
    sparse = False

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows."""

    @abc.abstractmethod
    def row(self, index: int) -> _Row:
        """Returns one complete row."""

    def rows(self, columns: Sequence[str]) -> Iterator[_Row]:
        """Yields all rows in order with only the given columns; columns that a row lacks are absent."""
        for index in range(len(self)):
            row = self.row(index)
            yield {name: row[name] for name in columns if name in row}

    def columns(self, index: int) -> list[str]:
        """Returns the columns of one row."""
        return list(self.row(index))

    def place(self, index: int) -> str:
        """Returns the file and position of a row, for messages."""
        return f"{self.path}, row {index}"


class JsonLines(_Table):
    """Table in a file with one JSON object per line; `.gz` files are decompressed and empty lines skipped.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                numbered_lines = [(line_number, line) for line_number, line in enumerate(file, 1) if line.strip()]
        except (
            OSError,
            EOFError,
            zlib.error,
        ) as error:  # the file is unreadable, truncated, damaged, or not a gzip file
            raise ConfigError(f"{path} cannot be read: {first_line(error)}") from None
        # Unparsed lines take a third of the memory of parsed rows.
        self._lines = [line for _, line in numbered_lines]
        self._numbers = array("q", (line_number for line_number, _ in numbered_lines))

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> _Row:
        try:
            row = read_json(self._lines[index])
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.place(index)} is not UTF-8: {error.reason}") from None
        except ValueError as error:
            raise ConfigError(f"{self.place(index)} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self.place(index)} is a JSON {type(row).__name__}, not an object with columns as keys")
        return row

    def place(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"


class _ParquetFile(_Table):
    """Table in a Parquet file, held in memory as an Arrow table."""

    sparse = True

    def __init__(self, path: Path) -> None:
        require_package("pyarrow.parquet", "Parquet files need pyarrow")
        import pyarrow.parquet

        self.path = path
        try:
            self._table = pyarrow.parquet.read_table(path, partitioning=None)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"{path} cannot be read as Parquet: {first_line(error)}") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> _Row:
        row: _Row = self._table.slice(index, 1).to_pylist()[0]
        return row

    def rows(self, columns: Sequence[str]) -> Iterator[_Row]:
        selected_table = self._table.select([name for name in columns if name in self._table.column_names])
        if not selected_table.column_names:
            yield from ({} for _ in range(len(self)))
            return
        for batch in selected_table.to_batches(max_chunksize=4096):
            yield from batch.to_pylist()

    def columns(self, index: int) -> list[str]:
        return list(self._table.column_names)


@dataclass(frozen=True)
class Hdf5Options:
    """Options of source `hdf5`."""

    group: str = "/"
    """Group of the file; its data sets are the columns."""


class Hdf5File(_Table):
    """Table in an HDF5 file or a group of the file: each data set is a column, and its first axis is the row.

    Texts are UTF-8 strings. A column with the attribute `encoding = "json"` holds JSON texts, such as conversations or
    lists of tests.

    Raises:
        ConfigError: The file cannot be read, has no such group, or has columns of different lengths.
    """

    def __init__(self, path: Path, group: str = "/") -> None:
        import h5py
        import numpy as np

        from rlhpc.checkpoint.hdf5 import has, member, members, open_hdf5, require_local

        self.path = path
        self._columns: dict[str, list[Any]] = {}
        try:
            with open_hdf5(path) as file:
                if group.strip("/") and not has(file, group):
                    raise ConfigError(f"{path} has no group {group!r}; it has: {', '.join(file)}")
                for name, column in members(member(file, group)):
                    if not isinstance(column, h5py.Dataset) or not column.shape:
                        continue
                    require_local(column)
                    column_values = column.asstr()[...] if h5py.check_string_dtype(column.dtype) else column[...]
                    self._columns[name] = np.asarray(column_values).tolist()
                    if column.attrs.get("encoding") == "json":
                        self._columns[name] = [read_json(json_text) for json_text in self._columns[name]]
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError, KeyError, MemoryError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} cannot be read as HDF5: {first_line(error)}") from None
        column_lengths = {name: len(column_values) for name, column_values in self._columns.items()}
        if len(set(column_lengths.values())) > 1:
            lengths_text = ", ".join(f"{name} {column_length}" for name, column_length in column_lengths.items())
            raise ConfigError(f"{path}: the columns have different lengths: {lengths_text}")
        self._length = next(iter(column_lengths.values()), 0)

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> _Row:
        return {name: column_values[index] for name, column_values in self._columns.items()}


class _DatasetFolder(_Table):
    """Table in a folder written by `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk`, memory-mapped.

    Args:
        path: The folder.
        split_name: Split of a `DatasetDict`; optional if it has only one split.
        key: Name of the configuration section in messages.
    """

    sparse = True

    def __init__(self, path: Path, split_name: str | None, key: str) -> None:
        datasets = require_package("datasets", "source hf needs datasets")
        self.path = path
        try:
            loaded_dataset = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{key}.path is {str(path)!r}, which is no folder written by save_to_disk of datasets: "
                f"{first_line(error)}; Parquet and JSONL files have sources of their own (parquet, jsonl)"
            ) from None
        if isinstance(loaded_dataset, datasets.DatasetDict):
            split_names = ", ".join(loaded_dataset)
            if split_name is None and len(loaded_dataset) > 1:
                raise ConfigError(f"{key}.split is not set; {path} has the parts {split_names}")
            name = next(iter(loaded_dataset)) if split_name is None else split_name
            if name not in loaded_dataset:
                raise ConfigError(f"{key}.split is {name!r}; {path} has the parts {split_names}")
            loaded_dataset = loaded_dataset[name]
        elif split_name is not None:
            raise ConfigError(f"{key}.split is {split_name!r}, but {path} is one part without a name; leave split out")
        self._rows = loaded_dataset

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> _Row:
        row: _Row = self._rows[index]
        return row

    def rows(self, columns: Sequence[str]) -> Iterator[_Row]:
        selected_columns = [name for name in columns if name in self._rows.column_names]
        if not selected_columns:
            yield from ({} for _ in range(len(self)))
            return
        yield from self._rows.select_columns(selected_columns)

    def columns(self, index: int) -> list[str]:
        return list(self._rows.column_names)


class _JoinedTables(_Table):
    """Concatenation of tables."""

    def __init__(self, tables: Sequence[_Table]) -> None:
        self._tables = list(tables)
        self.sparse = any(table.sparse for table in tables)
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, index: int) -> tuple[_Table, int]:
        table_index = bisect_right(self._ends, index)
        return self._tables[table_index], index - (self._ends[table_index - 1] if table_index else 0)

    def row(self, index: int) -> _Row:
        table, row_index = self._locate(index)
        return table.row(row_index)

    def rows(self, columns: Sequence[str]) -> Iterator[_Row]:
        for table in self._tables:
            yield from table.rows(columns)

    def columns(self, index: int) -> list[str]:
        table, row_index = self._locate(index)
        return table.columns(row_index)

    def place(self, index: int) -> str:
        table, row_index = self._locate(index)
        return table.place(row_index)


Result = TypeVar("Result")


class _ColumnProblems:
    """Problems in the rows of a table.

    The prompt column holds a text or a list of chat messages. If a conversation ends with an assistant turn, this turn is the
    demonstration. Other columns go to `meta` if JSON can represent them, so that templates and rewards can use them. The
    constructor checks all prompts, so that an invalid row does not end a running job.

    Args:
        cfg: Section `data.train` or `data.eval[i]`.
        table: The rows.
        split_part: Side of the train/eval split (`eval_fraction`).
        key: Name of the configuration section in messages.
        filters: `column=value` that rows must match, or None.

    Raises:
        ConfigError: A column is missing, or a prompt is neither text nor conversation; the message names file and row.
    """

    def __init__(self, cfg: DataSourceConfig, table: _Table, *, split_part: str, key: str, filters: str | None) -> None:
        self._table = table
        self._key = key
        self._prompt = cfg.prompt_key
        self._answer = cfg.answer_key
        self._response = cfg.response_key
        self._level = cfg.level_key
        self._tools = cfg.tools_key
        self._has_demonstrations = False
        self._images, base_folder = cfg.images_key, expand_home(cfg.path or "")
        self._folder = base_folder if base_folder.is_dir() else base_folder.parent
        rows = self._select(filters, split_part, cfg.eval_fraction)
        if cfg.size is not None and cfg.size < len(rows):
            rows = sorted(random.Random(cfg.seed).sample(rows, cfg.size))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        row_number = self._rows[index]
        row = self._table.row(row_number)
        messages, response, turn = self._split_demonstration(row, row_number)
        field_columns = {self._prompt, self._answer, self._response, self._level, self._images, self._tools}
        return Prompt(
            id=row_number,
            messages=tuple(messages),
            answer=_to_text(row[self._answer]) if self._answer else "",
            meta={
                name: to_plain(cell_value)
                for name, cell_value in row.items()
                if name not in field_columns and _is_plain(cell_value)
            },
            response=response,
            level=_to_text(row[self._level]) if self._level else "",
            images=self._read_image_column(row, row_number, read_images) if self._images else (),
            tools=self._read_row_tools(row, row_number),
            turn=turn,
            place=self._table.place(row_number),
        )

    @property
    def sparse(self) -> bool:
        """True if null can mean a missing key (`_Table.sparse`)."""
        return self._table.sparse

    def place(self, index: int) -> str:
        """Returns the file and row of a problem, for messages."""
        return self._table.place(self._rows[index])

    def columns(self, index: int) -> list[str]:
        """Returns the columns of a problem's row."""
        return self._table.columns(self._rows[index])

    def expect_responses(self) -> None:
        """Declares that the response column holds demonstrations: texts or messages. Otherwise it may hold any value."""
        self._has_demonstrations = True

    def require_responses(self) -> None:
        """Checks that each problem has a demonstration.

        Raises:
            ConfigError: A problem has no demonstration; the message names its file and row.
        """
        self.expect_responses()
        selected_rows = set(self._rows)
        for row_number, row in enumerate(self._table.rows([self._prompt, self._response])):
            if row_number in selected_rows and not self._split_demonstration(row, row_number)[1]:
                if self._response not in row:
                    self._refuse_missing_column("response_key", self._response, row_number)
                raise ConfigError(
                    f"{self._table.place(row_number)}: the demonstration, column {self._response!r}, is empty"
                )

    def require_answers(self, reason: str) -> None:
        """Checks that each problem has a reference answer.

        Args:
            reason: Name of the reward that needs the answers, for the message.

        Raises:
            ConfigError: A problem has no answer; the message names its file and row.
        """
        if not self._answer:
            raise ConfigError(
                f"{self._key}.answer_key is null, and {reason} compares with a reference answer; name its column"
            )
        selected_rows = set(self._rows)
        for row_number, row in enumerate(self._table.rows([self._answer])):
            if row_number in selected_rows and not _to_text(row[self._answer]).strip():
                raise ConfigError(
                    f"{self._table.place(row_number)}: column {self._answer!r} is "
                    f"{_format_excerpt(row[self._answer])}, and {reason} "
                    "compares with a reference answer; take the row out, or another reward"
                )

    def _select(self, filters: str | None, part: str, fraction: float) -> list[int]:
        """Checks all rows; returns the numbers of the rows that match the filter and belong to the part."""
        column_keys = {
            "prompt_key": self._prompt,
            "answer_key": self._answer,
            "level_key": self._level,
            "images_key": self._images,
            "tools_key": self._tools,
        }
        column, _, filter_value = (filters or "").partition("=")
        if filters:
            column_keys["split"] = column
        required_columns = {name: column_name for name, column_name in column_keys.items() if column_name}
        rows = []
        for row_number, row in enumerate(self._table.rows(list(required_columns.values()))):
            for name, required_column in required_columns.items():
                if required_column not in row:
                    self._refuse_missing_column(name, required_column, row_number)
            if filters and _to_text(row[column]) != filter_value:
                continue
            messages, _ = self._conversation(row[self._prompt], row_number)
            message_json = json.dumps(messages, sort_keys=True, default=_to_python)
            self._read_row_tools(row, row_number)
            if self._images:
                self._read_image_column(row, row_number, check_images)
                message_json += image_names(row[self._images])  # many images share one question
            if is_in_part(message_json, part, fraction):
                rows.append(row_number)
        if filters and not rows and len(self._table):
            raise ConfigError(
                f"{self._key}.split is {filters!r}; of {len(self._table)} rows none fits and is in this part"
            )
        return rows

    def _conversation(self, value: Any, number: int) -> tuple[list[Message], Message | None]:
        """Returns the messages before the model's response, and the final assistant turn or None."""
        if isinstance(value, str) and (value.strip() or (value and self._images)):
            return [{"role": "user", "content": value}], None
        reason = ""
        if isinstance(value, (list, tuple)):
            try:
                messages = read_messages(value, is_sparse=self._table.sparse, has_pictures=self._images is not None)
                prior_messages, turn = last_turn(messages)
                if prior_messages:
                    return prior_messages, turn
                reason = ": it has the assistant's turn alone"
            except ConfigError as error:
                reason = f": {error}"
        raise ConfigError(
            f"{self._table.place(number)}: column {self._prompt!r} is {_format_excerpt(value)}{reason}; a prompt is a "
            f"text that is "
            'not empty, or a list of messages {"role": …, "content": …}'
        )

    def _split_demonstration(self, row: _Row, row_number: int) -> tuple[list[Message], str, Message | None]:
        """Returns the messages before the response, and the demonstration as text, and as a message if text is not enough."""
        messages, turn = self._conversation(row[self._prompt], row_number)
        response_value = row.get(self._response)
        if response_value is None or response_value in ("", [], ()):
            return messages, message_text(turn) if turn else "", turn if turn and not is_plain(turn) else None
        if not self._has_demonstrations or isinstance(response_value, (bool, int, float)):
            return messages, _to_text(response_value), None
        column_place = f"{self._table.place(row_number)}: column {self._response!r}"
        if isinstance(response_value, str):
            prior_messages, response_message = list[Message](), {"role": "assistant", "content": response_value}
        else:
            try:
                prior_messages, final_message = last_turn(read_messages(response_value, is_sparse=self._table.sparse))
            except ConfigError as error:
                raise ConfigError(
                    f"{column_place} is {_format_excerpt(response_value)}: {error}; a demonstration is a text, or a "
                    f"list of messages "
                    "of which the last is the assistant's"
                ) from None
            if final_message is None:
                raise ConfigError(
                    f"{column_place} is {_format_excerpt(response_value)}: the last message is not the assistant's"
                )
            response_message = final_message
        if turn is not None and turn != response_message:
            raise ConfigError(
                f"{column_place} is a demonstration, and column {self._prompt!r} ends with another, the assistant's turn: set "
                f"{self._key}.response_key to a column that is not there, or take the turn away"
            )
        return (
            [*messages, *prior_messages],
            message_text(response_message),
            None if is_plain(response_message) else response_message,
        )

    def _read_row_tools(self, row: _Row, row_number: int) -> tuple[dict[str, Any], ...]:
        if not self._tools:
            return ()
        try:
            return read_tools(row[self._tools], is_sparse=self._table.sparse)
        except ConfigError as error:
            raise ConfigError(f"{self._table.place(row_number)}: column {self._tools!r}: {error}") from None

    def _read_image_column(self, row: _Row, row_number: int, read_value: Callable[[Any, Path], Result]) -> Result:
        try:
            return read_value(row[self._images or ""], self._folder)
        except ConfigError as error:
            raise ConfigError(f"{self._table.place(row_number)}: column {self._images!r}: {error}") from None

    def _refuse_missing_column(self, name: str, column: str, row_number: int) -> None:
        way_out = (
            f"; set {self._key}.answer_key=null where there is no reference answer" if name == "answer_key" else ""
        )
        raise ConfigError(
            f"{self._key}.{name} is {column!r}, but {self._table.place(row_number)} has no such column; it has: "
            f"{', '.join(self._table.columns(row_number))}{way_out}"
        )


def jsonl(cfg: DataSourceConfig, *, part: str, key: str) -> _ColumnProblems:
    """Returns the problems of source `jsonl`."""
    _refuse_kwargs(cfg, key)
    table = _JoinedTables(
        [JsonLines(file) for file in find_files(cfg.path, (".jsonl", ".jsonl.gz", ".ndjson"), f"{key}.path")]
    )
    return _ColumnProblems(cfg, table, split_part=part, key=key, filters=_filter(cfg, key))


def parquet(cfg: DataSourceConfig, *, part: str, key: str) -> _ColumnProblems:
    """Returns the problems of source `parquet`."""
    _refuse_kwargs(cfg, key)
    table = _JoinedTables([_ParquetFile(file) for file in find_files(cfg.path, (".parquet",), f"{key}.path")])
    return _ColumnProblems(cfg, table, split_part=part, key=key, filters=_filter(cfg, key))


def hdf5(cfg: DataSourceConfig, *, part: str, key: str) -> _ColumnProblems:
    """Returns the problems of source `hdf5`; `kwargs` are `Hdf5Options`."""
    hdf5_files = find_files(cfg.path, (".h5", ".hdf5"), f"{key}.path")
    group = read_options(Hdf5Options, cfg.kwargs, f"{key}.kwargs", "source hdf5").group
    table = _JoinedTables([Hdf5File(file, group) for file in hdf5_files])
    return _ColumnProblems(cfg, table, split_part=part, key=key, filters=_filter(cfg, key))


def hf(cfg: DataSourceConfig, *, part: str, key: str) -> _ColumnProblems:
    """Returns the problems of source `hf`.

    Raises:
        ConfigError: The path is not set, or there is no such folder.
    """
    _refuse_kwargs(cfg, key)
    if not cfg.path:
        raise ConfigError(f"{key}.path is not set; source hf reads a folder written by save_to_disk of datasets")
    folder = expand_home(cfg.path)
    if not folder.is_dir():
        raise ConfigError(
            f"{key}.path is {cfg.path!r}; there is no such folder. A dataset of the hub gets one by "
            "datasets.load_dataset(NAME).save_to_disk(FOLDER)"
        )
    filters = cfg.split if cfg.split and "=" in cfg.split else None
    table = _DatasetFolder(folder, None if filters else cfg.split, key)
    return _ColumnProblems(cfg, table, split_part=part, key=key, filters=filters)


def to_plain(column_value: Any) -> Any:
    """Converts a value to types of parsed JSON, such as tuples to lists and NumPy numbers to Python numbers."""
    return json.loads(json.dumps(column_value, default=_to_python))


def _to_python(array_value: Any) -> Any:
    if hasattr(array_value, "tolist"):
        return array_value.tolist()
    if hasattr(array_value, "isoformat"):
        return array_value.isoformat()
    raise TypeError(f"{type(array_value).__name__} has no JSON")


def _format_excerpt(column_value: Any) -> str:
    return (
        json.dumps(to_plain(column_value), ensure_ascii=False)[:80]
        if _is_plain(column_value)
        else type(column_value).__name__
    )


def _is_plain(column_value: Any) -> bool:
    try:
        to_plain(column_value)
    except (TypeError, ValueError):
        return False
    return True


def _to_text(column_value: Any) -> str:
    if column_value is None:
        return ""
    return column_value if isinstance(column_value, str) else json.dumps(to_plain(column_value), ensure_ascii=False)


def _filter(cfg: DataSourceConfig, key: str) -> str | None:
    if cfg.split is not None and "=" not in cfg.split:
        raise ConfigError(f"{key}.split is {cfg.split!r}; source {cfg.source} takes a filter column=value")
    return cfg.split


def _refuse_kwargs(cfg: DataSourceConfig, key: str) -> None:
    check_options(NoOptions, cfg.kwargs, f"{key}.kwargs", f"source {cfg.source}")
