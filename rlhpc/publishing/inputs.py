"""Inputs of a run: its data sets and models, their checksums, and where a repetition of the run finds them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import digest
from rlhpc.publishing.file_set import FileSet
from rlhpc.publishing.layout import CODE, INPUTS
from rlhpc.publishing.reader import Bundle
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_file

#: Last words of keys whose values are paths, even without a slash.
_PATH_KEY = re.compile(r"((path|file|dir|folder)s?|init_from|model)$")
#: Sections and keys whose paths are no inputs: outputs, programs and the cluster's files.
_NOT_INPUTS = re.compile(
    r"(cluster|runner\.(name|run_dir|resume_dir|logger)|workflow)\b|.*(python|command|servers|services)\b"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Inputs:
    """Inputs found in a configuration.

    Args:
        files: Files of the bundle, to which included inputs are added.
        are_included: Whether the inputs' files go into the bundle, and not only their checksums.
        workflow_outputs: Files and folders that the run makes itself.

    Attributes:
        record: Entry of each input: key, path as the configuration had it, name in the bundle's folder, files with checksums.
    """

    def __init__(self, files: FileSet, *, are_included: bool, workflow_outputs: Sequence[Path] = ()) -> None:
        self.record: list[dict[str, Any]] = []
        self._files, self._include, self._workflow_outputs = files, are_included, workflow_outputs
        self._names: dict[str, str] = {}

    def is_made(self, path: str) -> bool:
        """Returns whether the run makes this file or folder itself."""
        absolute_path = Path(os.path.normpath(Path(path).absolute()))
        return any(absolute_path.is_relative_to(folder) for folder in self._workflow_outputs)

    def move_path(self, value: str, key: str) -> str:
        """Returns the path of an input in a bundle's folder; other values unchanged. Records the input.

        Raises:
            ConfigError: The input cannot be read, or must not be in a bundle.
        """
        if not value or len(value) > 4096 or "\n" in value or _NOT_INPUTS.match(key) or self.is_made(value):
            return value
        if os.sep not in value and not _is_path_key(key):
            return value
        try:
            path = expand_home(value)
            if not path.exists():
                self._record_hub_model(value, key)
                return value
        except (ConfigError, OSError, ValueError):
            return value
        if value not in self._names:
            self._names[value] = f"{INPUTS}/{len(self._names)}-{Path(os.path.normpath(path.absolute())).name}"
            self._add_input(key, value, path)
        return self._names[value]

    def _add_input(self, key: str, value: str, path: Path) -> None:
        name = self._names[value]
        checksums = input_checksums(path)
        if self._include:
            for file, file_facts in checksums.items():
                target = f"{name}/{file}" if file else name
                # The bytes of a data set matter as a program's do: what is not certain is not replaced.
                self._files.add_file(target, path / file if file else path, is_exact=True)
                file_facts["size"], file_facts["sha256"] = self._files.files[target].checksum()
        self.record.append({"key": key, "path": value, "name": name, "included": self._include, "files": checksums})

    def _record_hub_model(self, model_name: str, key: str) -> None:
        if _HUB_NAME.fullmatch(model_name) and _is_path_key(key):
            self.record.append({"key": key, "hub": model_name, **_find_cached_files(model_name)})


def input_checksums(path: Path) -> dict[str, dict[str, Any]]:
    """Returns size and SHA-256 of each file of an input, by path below it; "" stands for the input itself, if it is a file.

    Raises:
        ConfigError: A file cannot be read.
    """
    try:
        if path.is_file():
            return {"": dict(zip(("size", "sha256"), digest(path), strict=True))}
        return {name: dict(zip(("size", "sha256"), digest(file), strict=True)) for name, file in _iter_files(path)}
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: cannot be read: {error.strerror}") from error


def find_input(bundle: Bundle, input_entry: Mapping[str, Any], user_paths: Mapping[str, Path]) -> Path | None:
    """Returns the path of an input here whose checksums are those of the bundle; None if there is none.

    Args:
        bundle: Bundle whose code may have the input; such a path is relative to the folder of the code.
        input_entry: Entry of the input in the bundle's record.
        user_paths: Name in the bundle, or path as the bundle has it → path that the user names.

    Raises:
        ConfigError: The files that the user names have other checksums.
    """
    name, original_path = str(input_entry["name"]), str(input_entry.get("path") or "")
    user_path = user_paths.get(name) or user_paths.get(original_path)
    if not user_path and (path := _find_in_code(bundle, original_path, input_entry.get("files") or {})):
        return path
    try:
        path = expand_home(user_path or original_path).absolute()
        if path.exists() and input_checksums(path) == input_entry.get("files"):
            return path
    except (ConfigError, OSError, ValueError):
        pass
    if user_path:
        raise ConfigError(f"--input {name}={user_path}: its files do not have the checksums in the bundle")
    return None


def _find_in_code(bundle: Bundle, original_path: str, files: Mapping[str, Any]) -> Path | None:
    """Returns the path, in the bundle's code, of an input with these files; None if the code does not have them."""
    for code_entry in bundle.record["code"]:
        relative_path = os.path.normpath(
            f"{code_entry.get('role')}/{code_entry.get('working_folder') or '.'}/{original_path}"
        )
        base_path = f"{CODE}/{relative_path}"
        names_by_file = {file: f"{base_path}/{file}" if file else base_path for file in files}
        if names_by_file and all(
            bundle.checksums.get(name) == files[file]["sha256"] for file, name in names_by_file.items()
        ):
            return Path(relative_path)
    return None


def _is_path_key(key: str) -> bool:
    """Returns whether a key's value is a path, by the key's last word, without indices of lists."""
    return bool(_PATH_KEY.search(re.sub(r"\[\d+\]", "", key)))


def _iter_files(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(folder)), file


def _find_cached_files(name: str) -> dict[str, Any]:
    """Returns the commit and the files of a model or data set in the cache of the Hugging Face hub; {} if it is not cached."""
    home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for repo_kind in ("models", "datasets"):
        folder = cache / f"{repo_kind}--{name.replace('/', '--')}"
        try:
            commit_id = read_file(folder / "refs" / "main", 1 << 10).decode().strip()
        except (OSError, ValueError):
            continue
        files = {}
        for file, path in _iter_files(folder / "snapshots" / commit_id):
            blob = path.resolve()
            # The cache names large files by their checksum.
            checksum = blob.name if _SHA256.fullmatch(blob.name) else hashlib.sha256(path.read_bytes()).hexdigest()
            files[file] = {"size": blob.stat().st_size, "sha256": checksum}
        return {"commit": commit_id, "files": files}
    return {}
