"""Problems from the columns of files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhpc.language.data.conversations import Message, is_plain, last_turn, read_messages, read_tools, written
from rlhpc.language.data.images import check_images, names_of, read_images
from rlhpc.language.data.parts import belongs
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.tables import DatasetFolder, Hdf5File, Joined, JsonLines, ParquetFile, Row, Table
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files

if TYPE_CHECKING:
    from rlhpc.language.config import DataSourceConfig


Found = TypeVar("Found")


class ColumnProblems:
    """Rows of a table as problems.

    A prompt column holds a text or a list of chat messages; a conversation that ends with the assistant's turn has its
    demonstration there. Columns that the configuration does not name go to `meta`, as far as JSON can hold them, so
    that templates and rewards find them. All prompts are looked at once, here, so that a bad row does not end a run
    halfway through.

    Args:
        cfg: A section `data.train` or `data.eval[i]`.
        table: The rows.
        part: Side of `eval_fraction`.
        key: What messages call the section.
        filters: `column=value` that rows must fulfil, or None.

    Raises:
        ConfigError: A column is missing, or a prompt is neither text nor conversation; names file and row.
    """

    def __init__(self, cfg: DataSourceConfig, table: Table, *, part: str, key: str, filters: str | None) -> None:
        self._table, self._key = table, key
        self._prompt, self._answer = cfg.prompt_key, cfg.answer_key
        self._response, self._level = cfg.response_key, cfg.level_key
        self._tools, self._demonstrates = cfg.tools_key, False
        self._images, base = cfg.images_key, expand_home(cfg.path or "")
        self._folder = base if base.is_dir() else base.parent
        rows = self._select(filters, part, cfg.eval_fraction)
        if cfg.size is not None and cfg.size < len(rows):
            rows = sorted(random.Random(cfg.seed).sample(rows, cfg.size))
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        number = self._rows[index]
        row = self._table.row(number)
        messages, response, turn = self._demonstration(row, number)
        named = {self._prompt, self._answer, self._response, self._level, self._images, self._tools}
        return Prompt(
            id=number,
            messages=tuple(messages),
            answer=_text(row[self._answer]) if self._answer else "",
            meta={name: plain(value) for name, value in row.items() if name not in named and _is_plain(value)},
            response=response,
            level=_text(row[self._level]) if self._level else "",
            images=self._shown(row, number, read_images) if self._images else (),
            tools=self._shown_tools(row, number),
            turn=turn,
            place=self._table.place(number),
        )

    @property
    def sparse(self) -> bool:
        """Says whether null stands for keys that are absent (`Table.sparse`)."""
        return self._table.sparse

    def place(self, index: int) -> str:
        """File and row of a problem, for messages."""
        return self._table.place(self._rows[index])

    def columns(self, index: int) -> list[str]:
        """The columns of a problem's row."""
        return self._table.columns(self._rows[index])

    def expect_responses(self) -> None:
        """Reads the column of responses as demonstrations: texts or messages. Otherwise it may hold anything."""
        self._demonstrates = True

    def require_responses(self) -> None:
        """Sees to it that each problem has a demonstration.

        Raises:
            ConfigError: One has none; names file and row.
        """
        self.expect_responses()
        chosen = set(self._rows)
        for number, row in enumerate(self._table.rows([self._prompt, self._response])):
            if number in chosen and not self._demonstration(row, number)[1]:
                if self._response not in row:
                    self._missing("response_key", self._response, number)
                raise ConfigError(
                    f"{self._table.place(number)}: the demonstration, column {self._response!r}, is empty"
                )

    def require_answers(self, why: str) -> None:
        """Sees to it that each problem has a reference answer.

        Args:
            why: What needs it, for the message.

        Raises:
            ConfigError: One has none; names file and row.
        """
        if not self._answer:
            raise ConfigError(
                f"{self._key}.answer_key is null, and {why} compares with a reference answer; name its column"
            )
        chosen = set(self._rows)
        for number, row in enumerate(self._table.rows([self._answer])):
            if number in chosen and not _text(row[self._answer]).strip():
                raise ConfigError(
                    f"{self._table.place(number)}: column {self._answer!r} is {_excerpt(row[self._answer])}, and {why} "
                    "compares with a reference answer; take the row out, or another reward"
                )

    def _select(self, filters: str | None, part: str, fraction: float) -> list[int]:
        wanted_keys = {"prompt_key": self._prompt, "answer_key": self._answer, "level_key": self._level,
                       "images_key": self._images, "tools_key": self._tools}  # fmt: skip
        column, _, wanted = (filters or "").partition("=")
        if filters:
            wanted_keys["split"] = column
        needed = {name: value for name, value in wanted_keys.items() if value}
        rows = []
        for number, row in enumerate(self._table.rows(list(needed.values()))):
            for name, needs in needed.items():
                if needs not in row:
                    self._missing(name, needs, number)
            if filters and _text(row[column]) != wanted:
                continue
            messages, _ = self._conversation(row[self._prompt], number)
            content = json.dumps(messages, sort_keys=True, default=_python)
            self._shown_tools(row, number)
            if self._images:
                self._shown(row, number, check_images)
                content += names_of(row[self._images])  # many pictures have one question
            if belongs(content, part, fraction):
                rows.append(number)
        if filters and not rows and len(self._table):
            raise ConfigError(
                f"{self._key}.split is {filters!r}; of {len(self._table)} rows none fits and is in this part"
            )
        return rows

    def _conversation(self, value: Any, number: int) -> tuple[list[Message], Message | None]:
        """Messages up to where the model is to speak, and the last assistant's turn or None."""
        if isinstance(value, str) and (value.strip() or (value and self._images)):
            return [{"role": "user", "content": value}], None
        why = ""
        if isinstance(value, (list, tuple)):
            try:
                messages = read_messages(value, sparse=self._table.sparse, pictures=self._images is not None)
                before, turn = last_turn(messages)
                if before:
                    return before, turn
                why = ": it has the assistant's turn alone"
            except ConfigError as error:
                why = f": {error}"
        raise ConfigError(
            f"{self._table.place(number)}: column {self._prompt!r} is {_excerpt(value)}{why}; a prompt is a text that is not "
            'empty, or a list of messages {"role": …, "content": …}'
        )

    def _demonstration(self, row: Row, number: int) -> tuple[list[Message], str, Message | None]:
        """Messages up to where the model is to speak, and the demonstration: as text, and as a message where it is more."""
        messages, turn = self._conversation(row[self._prompt], number)
        value = row.get(self._response)
        if value is None or value in ("", [], ()):
            return messages, written(turn) if turn else "", turn if turn and not is_plain(turn) else None
        if not self._demonstrates or isinstance(value, (bool, int, float)):
            return messages, _text(value), None
        place = f"{self._table.place(number)}: column {self._response!r}"
        if isinstance(value, str):
            before, last = list[Message](), {"role": "assistant", "content": value}
        else:
            try:
                before, final = last_turn(read_messages(value, sparse=self._table.sparse))
            except ConfigError as error:
                raise ConfigError(f"{place} is {_excerpt(value)}: {error}; a demonstration is a text, or a list of messages "
                                  "of which the last is the assistant's") from None  # fmt: skip
            if final is None:
                raise ConfigError(f"{place} is {_excerpt(value)}: the last message is not the assistant's")
            last = final
        if turn is not None and turn != last:
            raise ConfigError(
                f"{place} is a demonstration, and column {self._prompt!r} ends with another, the assistant's turn: set "
                f"{self._key}.response_key to a column that is not there, or take the turn away"
            )
        return [*messages, *before], written(last), None if is_plain(last) else last

    def _shown_tools(self, row: Row, number: int) -> tuple[dict[str, Any], ...]:
        if not self._tools:
            return ()
        try:
            return read_tools(row[self._tools], sparse=self._table.sparse)
        except ConfigError as error:
            raise ConfigError(f"{self._table.place(number)}: column {self._tools!r}: {error}") from None

    def _shown(self, row: Row, number: int, how: Callable[[Any, Path], Found]) -> Found:
        try:
            return how(row[self._images or ""], self._folder)
        except ConfigError as error:
            raise ConfigError(f"{self._table.place(number)}: column {self._images!r}: {error}") from None

    def _missing(self, name: str, column: str, number: int) -> None:
        way_out = (
            f"; set {self._key}.answer_key=null where there is no reference answer" if name == "answer_key" else ""
        )
        raise ConfigError(
            f"{self._key}.{name} is {column!r}, but {self._table.place(number)} has no such column; it has: "
            f"{', '.join(self._table.columns(number))}{way_out}"
        )


def jsonl(cfg: DataSourceConfig, *, part: str, key: str) -> ColumnProblems:
    """Source `jsonl`."""
    _no_kwargs(cfg, key)
    table = Joined([JsonLines(file) for file in find_files(cfg.path, (".jsonl", ".jsonl.gz", ".ndjson"), key)])
    return ColumnProblems(cfg, table, part=part, key=key, filters=_filter(cfg, key))


def parquet(cfg: DataSourceConfig, *, part: str, key: str) -> ColumnProblems:
    """Source `parquet`."""
    _no_kwargs(cfg, key)
    table = Joined([ParquetFile(file) for file in find_files(cfg.path, (".parquet",), key)])
    return ColumnProblems(cfg, table, part=part, key=key, filters=_filter(cfg, key))


def hdf5(cfg: DataSourceConfig, *, part: str, key: str) -> ColumnProblems:
    """Source `hdf5`; `kwargs: {group: train}` takes the columns of a group."""
    files = find_files(cfg.path, (".h5", ".hdf5"), key)
    table = Joined([Hdf5File(file, **cfg.kwargs) for file in files])
    return ColumnProblems(cfg, table, part=part, key=key, filters=_filter(cfg, key))


def hf(cfg: DataSourceConfig, *, part: str, key: str) -> ColumnProblems:
    """Source `hf`."""
    _no_kwargs(cfg, key)
    if not cfg.path:
        raise ConfigError(f"{key}.path is not set; source hf reads a folder written by save_to_disk of datasets")
    folder = expand_home(cfg.path)
    if not folder.is_dir():
        raise ConfigError(
            f"{key}.path is {cfg.path!r}; there is no such folder. A dataset of the hub gets one by "
            "datasets.load_dataset(NAME).save_to_disk(FOLDER)"
        )
    filters = cfg.split if cfg.split and "=" in cfg.split else None
    table = DatasetFolder(folder, None if filters else cfg.split, key)
    return ColumnProblems(cfg, table, part=part, key=key, filters=filters)


def plain(value: Any) -> Any:
    """The value as JSON would return it: tuples become lists, numpy's numbers Python's."""
    return json.loads(json.dumps(value, default=_python))


def _python(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON")


def _excerpt(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)[:80] if _is_plain(value) else type(value).__name__


def _is_plain(value: Any) -> bool:
    try:
        plain(value)
    except (TypeError, ValueError):
        return False
    return True


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)


def _filter(cfg: DataSourceConfig, key: str) -> str | None:
    if cfg.split is not None and "=" not in cfg.split:
        raise ConfigError(f"{key}.split is {cfg.split!r}; source {cfg.source} takes a filter column=value")
    return cfg.split


def _no_kwargs(cfg: DataSourceConfig, key: str) -> None:
    if cfg.kwargs:
        raise ConfigError(f"{key}.kwargs has {', '.join(cfg.kwargs)}; source {cfg.source} takes none")
