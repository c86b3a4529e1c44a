"""Set of files that leave the user's machine: texts are redacted, and binary files with secrets are refused."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import digest
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import open_file
from rlhpc.runtime.redaction import Redactor

#: Largest text, in bytes, that is redacted; a larger one is searched as a binary file is.
_MAX_TEXT = 256 << 20


@dataclass(frozen=True)
class BundleFile:
    """File of a bundle.

    Attributes:
        name: Path in the bundle.
        content: The content, or the file that has it.
    """

    name: str
    content: bytes | Path

    def checksum(self) -> tuple[int, str]:
        """Returns size and SHA-256."""
        if isinstance(self.content, Path):
            return digest(self.content)
        return len(self.content), hashlib.sha256(self.content).hexdigest()


@dataclass
class FileSet:
    """Files of a bundle, gathered without secrets.

    Attributes:
        redactor: Redaction of all texts.
        files: Name → file.
    """

    redactor: Redactor
    files: dict[str, BundleFile] = field(default_factory=dict)

    def add_text(self, name: str, file_text: str, *, is_code: bool = False) -> None:
        """Adds a redacted text."""
        self.files[name] = BundleFile(name, self.redactor.text(file_text, is_code=is_code).encode())

    def add_bytes(self, name: str, content: bytes) -> None:
        """Adds a content that the caller has checked."""
        self.files[name] = BundleFile(name, content)

    def add_json(self, name: str, json_value: Any) -> None:
        """Adds a redacted JSON file."""
        json_bytes = json.dumps(self.redactor.value(json_value), indent=1, sort_keys=True, default=str).encode() + b"\n"
        self.files[name] = BundleFile(name, json_bytes)

    def add_file(self, name: str, path: Path, *, is_code: bool = False, is_exact: bool = False) -> None:
        """Adds a file: a text is redacted; a binary file with something that would have to be is refused.

        Args:
            name: Path in the bundle.
            path: The file.
            is_code: Whether it is a program.
            is_exact: Whether the bytes matter, because their checksum was recorded: then a text is refused as well.

        Raises:
            ConfigError: The file cannot be read, or must not be in a bundle.
        """
        try:
            file_text = _read_text(path)
            if file_text is not None and not is_exact:
                self.add_text(name, file_text, is_code=is_code)
                return
            if file_text is not None:
                problem = (
                    "a secret or the path of a home folder"
                    if self.redactor.text(file_text, is_code=True) != file_text
                    else ""
                )
            else:
                problem = self.redactor.find_in_binary(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        if problem:
            raise ConfigError(
                f"{path}: it has {problem}, which cannot be taken out of it; remove the file, or leave it out of the bundle"
            )
        self.files[name] = BundleFile(name, path)


def _read_text(path: Path) -> str | None:
    """Returns a file's text; None for a binary file."""
    with open_file(path) as file:
        head = file.read(1 << 16)
        if b"\0" in head or os.fstat(file.fileno()).st_size > _MAX_TEXT:
            return None
        try:
            file_text = (head + file.read()).decode()
        except UnicodeDecodeError:
            return None
    return None if "\0" in file_text else file_text
