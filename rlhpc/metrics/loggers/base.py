"""Logger interface, and the facts about the run that a logger receives."""

from __future__ import annotations

import contextlib
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.redaction import is_secret_key, is_secret_section, redact_addresses

_stdout_lock = threading.Lock()
_num_redirections = 0
_stdout = sys.stdout


@former_members(memory="saved_state")
@dataclass(frozen=True)
class RunFacts:
    """Facts about the run whose rows a logger receives."""

    name: str
    """`runner.name`."""
    folder: Path
    """The run folder; a logger writes its files to its own folder below it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration, nested, without secrets."""
    saved_state: dict[str, Any] = field(default_factory=dict)
    """State that the logger needs when the run is resumed, such as the service's id of the run: JSON values, stored in
    `loggers.json` after `open`, `commit` and `close`. Empty at a fresh start."""


class RunLogger(Protocol):
    """Destination of metric rows, built with the arguments under its name in `runner.logger.kwargs`.

    All methods are called on one thread, which is not the training thread. An exception ends this logger with a
    warning; the run and the other loggers continue.
    """

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        """Starts the logger, or continues if the run is resumed.

        Args:
            run: The run.
            resume_step: The step that the run continues from; None for a fresh start.

        Returns:
            Last step that the destination already has; None if it has no rows. `log` receives only rows of later steps,
            beginning with those in metrics.jsonl.
        """

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Adds a row. Values may be NaN. Steps ascend; two rows may have the same step and different metrics."""

    def commit(self) -> None:
        """Makes the logged rows durable as far as possible, because a checkpoint is about to be written."""

    def close(self) -> None:
        """Closes the logger at the end of this start; the run may be resumed later. It is also called after a failure of
        `open` or `log`.
        """


class ServiceLogger:
    """Base class of loggers whose library has a run object with `log` and `finish`; `open` stores it in `_run`."""

    _run: Any = None

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def commit(self) -> None:
        """Does nothing: the library decides when it writes, and a resumed run logs rows again that were lost."""

    def close(self) -> None:
        if self._run is not None:
            with printing_to_stderr():
                self._run.finish()


def require(name: str) -> Any:
    """Imports the optional package with the name of a logger.

    Raises:
        ConfigError: The package is missing; the message names what to install.
    """
    return require_package(name, f"logger {name!r} needs a package that cannot be imported", name)


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Redirects standard output to stderr during the block, for libraries that print.

    Standard output is reserved for rlhpc's results. Several threads may be in the block at once. They do not wait for each
    other, because a service may hang; the last thread that leaves the block restores standard output.
    """
    global _num_redirections, _stdout
    with _stdout_lock:
        if not _num_redirections:
            _stdout, sys.stdout = sys.stdout, sys.stderr
        _num_redirections += 1
    try:
        yield
    finally:
        with _stdout_lock:
            _num_redirections -= 1
            if not _num_redirections:
                sys.stdout = _stdout


_MASK = "***"


def public_config(raw_config: Any, resolved_config: Any) -> Any:
    """Returns a configuration without secrets.

    The function hides texts whose key names a secret, all texts below `headers` and similar sections, and user names and
    keys within addresses. References to the environment stay `${oc.env:NAME}`.

    Args:
        raw_config: Nested containers as written, interpolations unresolved.
        resolved_config: The same containers with resolved interpolations.
    """
    return _mask_secrets("", raw_config, resolved_config, depth=0, hides_values=False)


def _mask_secrets(key: str, unresolved_value: Any, value: Any, *, depth: int, hides_values: bool) -> Any:
    if isinstance(unresolved_value, str) and "${oc.env:" in unresolved_value:
        return unresolved_value
    if isinstance(value, Mapping):
        raw_section = unresolved_value if isinstance(unresolved_value, Mapping) else value
        is_hidden = hides_values or is_secret_section(key, is_top=depth == 1)
        return {
            str(k): _mask_secrets(str(k), raw_section.get(k, v), v, depth=depth + 1, hides_values=is_hidden)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        unresolved_items = (
            unresolved_value
            if isinstance(unresolved_value, (list, tuple)) and len(unresolved_value) == len(value)
            else value
        )
        return [
            _mask_secrets(key, unresolved_items[i], v, depth=depth, hides_values=hides_values)
            for i, v in enumerate(value)
        ]
    if isinstance(value, str):
        if value and (hides_values or is_secret_key(key)):
            return _MASK
        return redact_addresses(value, _MASK)
    return value


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a flat mapping with nested keys joined by dots; lists are not flattened."""
    flat_config: dict[str, Any] = {}
    for key, config_value in config.items():
        is_nested = isinstance(config_value, Mapping) and config_value
        flat_config |= (
            flatten_config(config_value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": config_value}
        )
    return flat_config


_BLOCK_BYTES = 32768
#: Bytes of the file's header, and of each fragment's header (checksum, length, type).
_HEADER_BYTES = 7
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: Path) -> Iterator[bytes]:
    """Yields the complete records of a file in LevelDB's log format; a killed process may have left an incomplete record."""
    file_bytes = path.read_bytes()
    offset, record = _HEADER_BYTES, b""
    while offset + _HEADER_BYTES <= len(file_bytes):
        block_remainder = _BLOCK_BYTES - offset % _BLOCK_BYTES
        if block_remainder < _HEADER_BYTES:  # padding
            offset += block_remainder
            continue
        _, fragment_length, record_type = struct.unpack_from("<IHB", file_bytes, offset)
        offset += _HEADER_BYTES
        if not _FULL <= record_type <= _LAST or offset + fragment_length > len(file_bytes):
            return
        fragment = file_bytes[offset : offset + fragment_length]
        offset += fragment_length
        record = fragment if record_type in (_FULL, _FIRST) else record + fragment
        if record_type in (_FULL, _LAST):
            yield record


def last_step_in(
    paths: Iterable[Path], parse: Callable[[bytes], Any], record_type: str, step_of: Callable[[Any], int]
) -> int | None:
    """Returns the last step in files of earlier starts; None if they contain no step.

    Args:
        paths: The files.
        parse: Function that parses a record.
        record_type: Type of the records that have a step.
        step_of: Function that returns the step of a parsed record.
    """
    steps = (parse(record) for path in paths for record in records(path))
    return max((step_of(record) for record in steps if record.WhichOneof("record_type") == record_type), default=None)
