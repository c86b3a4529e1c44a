"""What writers of episodes share: all that is written gets its name at the end, or goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.runtime.errors import ConfigError


class EpisodeWriter(ABC):
    """Use it in a `with`: what was written is discarded if that fails."""

    @abstractmethod
    def __len__(self) -> int:
        """Episodes so far."""

    @abstractmethod
    def add(self, trajectory: Mapping[str, Any]) -> None:
        """One episode, with the fields of `rlhpc.embodied.data.trajectory`.

        Raises:
            ConfigError: It cannot be one of these.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives it its name."""

    @abstractmethod
    def discard(self) -> None:
        """Removes what is unfinished."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class _Unwanted(Exception):
    """Leaves the folder as it was."""


class FolderWriter(EpisodeWriter):
    """One that writes a folder, which takes its name when `close` is called.

    Args:
        folder: It is not there yet, or empty.

    Attributes:
        root: Where it is written until then.
        finished: Enter it to give the folder its name, unless what is done in it fails.

    Raises:
        ConfigError: There is something.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there already; give a folder that is not, or is empty")
        self.finished = ExitStack()
        self.root = self.finished.enter_context(filled_folder(folder))

    def discard(self) -> None:
        """See `EpisodeWriter.discard`."""
        with suppress(_Unwanted), self.finished:
            raise _Unwanted
