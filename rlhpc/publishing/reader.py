"""Reader of untrusted bundles: it checks all content before it writes or runs any of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from rlhpc.checkpoint.manifest import is_plain_name
from rlhpc.publishing.layout import CHECKSUMS, CONFIG, FORMAT, METADATA, README, RECORD, RUNS, SFT_CONFIG, TOP_FOLDERS
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import open_file, read_json, read_yaml

#: Maximum number of files, and bytes of a file that is parsed.
_MAX_FILES, _MAX_PARSED = 200_000, 64 << 20
#: Uncompressed bytes for each byte of the file, and bytes that are never too many: a zip bomb has thousands.
_MAX_RATIO, _SMALL = 200, 256 << 20
_PART = 1 << 20
_TOP_FILES = (METADATA, README, RECORD, CHECKSUMS, CONFIG, SFT_CONFIG)


class Bundle:
    """Bundle whose files have been checked. Use `open_bundle`.

    Attributes:
        path: The zip file or folder.
        sizes: Name → size of each file.
        checksums: Name → SHA-256 of each file, as the bundle lists it.
        record: Content of `bundle.json`.
        config: Content of `config.yaml`.
        sft_config: Content of `sft.yaml`; None if the bundle has no such file.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile | None) -> None:
        self.path, self._archive = path, archive
        self.sizes = self._list_folder() if archive is None else self._list_archive(archive)
        for name in self.sizes:
            root_name = name.partition("/")[0]
            if name not in _TOP_FILES and (root_name == name or root_name not in TOP_FOLDERS):
                self._refuse(f"{_to_ascii(name)} does not belong into a bundle")
        self.checksums = self._read_checksums()
        for name, expected_checksum in self.checksums.items():
            if self._checksum(name) != expected_checksum:
                self._refuse(f"{name}: its checksum is not the one in {CHECKSUMS}")
        self.record = self._read_record()
        self.config = self._read_config(CONFIG)
        self.sft_config = self._read_config(SFT_CONFIG) if SFT_CONFIG in self.sizes else None
        if (sft := (self.config.get("workflow") or {}).get("sft")) not in (None, SFT_CONFIG) or (
            sft and not self.sft_config
        ):
            self._refuse(
                f"{CONFIG}: workflow.sft is {_to_ascii(str(sft))}; allowed: {SFT_CONFIG}, if the bundle has it"
            )

    def read(self, name: str) -> bytes:
        """Returns the content of a file that is to be parsed.

        Raises:
            ConfigError: The bundle has no such file, or it is too large.
        """
        if name not in self.sizes:
            self._refuse(f"{name} is missing")
        if self.sizes[name] > _MAX_PARSED:
            self._refuse(f"{name} has {self.sizes[name] >> 20} MB; at most {_MAX_PARSED >> 20} MB are allowed")
        with self._open_file(name) as file:
            return file.read(_MAX_PARSED + 1)

    def extract(self, target: Path) -> None:
        """Writes the files into a folder, which must be new or empty; checks the checksums again while writing.

        Raises:
            ConfigError: The bundle has changed since it was checked.
            OSError: A file cannot be written.
        """
        for name in sorted(self.sizes):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            checksum = hashlib.sha256()
            with self._open_file(name) as source_file, path.open("xb") as file:
                for file_part in self._parts(name, source_file):
                    checksum.update(file_part)
                    file.write(file_part)
            if name in self.checksums and checksum.hexdigest() != self.checksums[name]:
                self._refuse(f"{name} has changed while the bundle was read")

    def _list_archive(self, archive: zipfile.ZipFile) -> dict[str, int]:
        sizes_by_name, total_bytes = dict[str, int](), 0
        archive_bytes = self.path.stat().st_size
        if len(archive.infolist()) > _MAX_FILES:
            self._refuse(f"it has {len(archive.infolist())} files; at most {_MAX_FILES} are allowed")
        for zip_info in archive.infolist():
            # `filename` ends at a NUL; the name as it is in the file does not.
            name = zip_info.orig_filename
            self._check_name(name.removesuffix("/"))
            file_type = stat.S_IFMT(zip_info.external_attr >> 16)
            if file_type not in (0, stat.S_IFDIR if name.endswith("/") else stat.S_IFREG):
                self._refuse(f"{name} is a link or a device")
            if name.endswith("/"):
                continue
            if zip_info.flag_bits & 1 or zip_info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                self._refuse(f"{name} is encrypted, or compressed in an unusual way")
            if name in sizes_by_name:
                self._refuse(f"{name} is there twice")
            sizes_by_name[name] = zip_info.file_size
            total_bytes += zip_info.file_size
        if total_bytes > max(_SMALL, _MAX_RATIO * archive_bytes):
            self._refuse(f"its files have {total_bytes >> 20} MB, compressed {archive_bytes >> 10} KB: that is no run")
        return sizes_by_name

    def _list_folder(self) -> dict[str, int]:
        sizes_by_name = dict[str, int]()
        for folder, folders, file_names in os.walk(self.path):
            for name in (*folders, *file_names):
                path = Path(folder) / name
                file_status, relative_name = path.lstat(), str(path.relative_to(self.path))
                self._check_name(relative_name)
                if not stat.S_ISREG(file_status.st_mode) and not stat.S_ISDIR(file_status.st_mode):
                    self._refuse(f"{relative_name} is a link or a device")
                if stat.S_ISREG(file_status.st_mode):
                    sizes_by_name[relative_name] = file_status.st_size
                if len(sizes_by_name) > _MAX_FILES:
                    self._refuse(f"it has more than {_MAX_FILES} files")
        return sizes_by_name

    def _check_name(self, name: str) -> None:
        if not is_plain_name(name) or not name.isprintable() or len(os.fsencode(name)) > 1024:
            self._refuse(f"{_to_ascii(name)} is no name of a file below the bundle's folder")

    def _read_checksums(self) -> dict[str, str]:
        metadata = self._parse_json(METADATA)
        entities = metadata.get("@graph") if isinstance(metadata, dict) else None
        graph_entities = [e for e in entities if isinstance(e, dict)] if isinstance(entities, list) else []
        expected_checksum = next(
            (str(entity.get("sha256")) for entity in graph_entities if entity.get("@id") == CHECKSUMS), ""
        )
        if CHECKSUMS not in self.sizes or self._checksum(CHECKSUMS) != expected_checksum:
            self._refuse(f"{CHECKSUMS}: its checksum is not the one in {METADATA}")
        checksums = dict[str, str]()
        for line in self.read(CHECKSUMS).decode(errors="replace").splitlines():
            checksum, _, name = line.partition("  ")
            checksums[name] = checksum
        if unmatched_names := (self.sizes.keys() - {CHECKSUMS, METADATA}) ^ checksums.keys():
            self._refuse(f"{_to_ascii(min(unmatched_names))} is not both in the bundle and in {CHECKSUMS}")
        return checksums

    def _read_record(self) -> dict[str, Any]:
        record = self._parse_json(RECORD)
        field_types: dict[str, Any] = {
            "run": str, "state": str, "versions": dict, "system": dict, "command": dict, "not_promised": list, "inputs": list,
            "checkpoints": list, "code": list, "global_step": int,
        }  # fmt: skip
        if not isinstance(record, dict) or not isinstance(record.get("format"), int) or record["format"] < 1:
            self._refuse(f"{RECORD}: it is not the record of a bundle")
        if record["format"] > FORMAT:
            self._refuse(f"{RECORD}: format is {record['format']}; this version of rlhpc reads {FORMAT}: update rlhpc")
        for key, expected_type in field_types.items():
            if not isinstance(record.get(key), expected_type):
                self._refuse(f"{RECORD}: {key} is missing, or is not of type {expected_type.__name__}")
        for key in ("inputs", "checkpoints", "code"):
            if not all(isinstance(record_entry, dict) for record_entry in record[key]):
                self._refuse(f"{RECORD}: {key} has an entry that is no object")
        for name in [
            str(code_entry[key]) for code_entry in record["code"] for key in ("folder", "diff") if code_entry.get(key)
        ] + [str(input_entry["name"]) for input_entry in record["inputs"] if input_entry.get("name")]:
            self._check_name(name)
        for record_entry in (*record["inputs"], *record["checkpoints"]):
            files = record_entry.get("files") or {}
            if not isinstance(files, dict) or not all(
                isinstance(file_facts, dict)
                and isinstance(file_facts.get("sha256"), str)
                and isinstance(file_facts.get("size"), int)
                for file_facts in files.values()
            ):
                self._refuse(
                    f"{RECORD}: files of "
                    f"{_to_ascii(str(record_entry.get('name') or record_entry.get('global_step')))} have no checksums"
                )
        return dict(record)

    def _read_config(self, name: str) -> dict[str, Any]:
        """Returns a configuration whose run folder is inside the bundle and that includes no other file."""
        try:
            config = read_yaml(self.read(name))
        except (ValueError, yaml.YAMLError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._refuse(f"{name} cannot be read: {problem}")
        if not isinstance(config, dict) or not isinstance(config.get("runner"), dict):
            self._refuse(f"{name} is not the configuration of a run")
        for key in ("defaults", "sweep"):
            if config.get(key):
                self._refuse(f"{name}: {key} is not allowed, because the configuration of a bundle is complete")
        run_name, run_dir = config["runner"].get("name"), config["runner"].get("run_dir")
        if run_dir != RUNS:
            self._refuse(f"{name}: runner.run_dir is {_to_ascii(str(run_dir))}; allowed: {RUNS}")
        if not is_plain_name(run_name) or "/" in run_name:
            self._refuse(f"{name}: runner.name is {_to_ascii(str(run_name))}, which is no name of a folder")
        return dict(config)

    def _parse_json(self, name: str) -> Any:
        try:
            return read_json(self.read(name))
        except (ValueError, RecursionError):
            self._refuse(f"{name} is not JSON")

    def _checksum(self, name: str) -> str:
        checksum = hashlib.sha256()
        with self._open_file(name) as file:
            for file_part in self._parts(name, file):
                checksum.update(file_part)
        return checksum.hexdigest()

    def _parts(self, name: str, file: BinaryIO) -> Iterator[bytes]:
        """Yields the content of a file in parts; refuses more than the listed size."""
        num_read = 0
        try:
            while file_part := file.read(_PART):
                num_read += len(file_part)
                if num_read > self.sizes[name]:
                    break
                yield file_part
        except (zipfile.BadZipFile, EOFError, zlib.error) as error:
            self._refuse(f"{name} is damaged: {error}")
        if num_read != self.sizes[name]:
            self._refuse(f"{name} has another size than the bundle says")

    @contextlib.contextmanager
    def _open_file(self, name: str) -> Iterator[BinaryIO]:
        try:
            file: Any = open_file(self.path / name) if self._archive is None else self._archive.open(name)
        except (OSError, zipfile.BadZipFile, KeyError, NotImplementedError) as error:
            self._refuse(f"{name} cannot be read: {error}")
        with file:
            yield file

    def _refuse(self, reason: str) -> Any:
        raise ConfigError(f"{self.path}: refused, nothing was written: {reason}")


@contextlib.contextmanager
def open_bundle(path: Path) -> Iterator[Bundle]:
    """Yields a bundle after all checks; writes nothing.

    Raises:
        ConfigError: The path is no bundle, or the bundle is damaged or hostile.
    """
    if path.is_dir():
        yield Bundle(path, None)
        return
    try:
        archive = zipfile.ZipFile(open_file(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; rlhpc bundle RUN writes a bundle") from None
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ConfigError(f"{path}: it is no zip file ({error}); rlhpc bundle RUN writes a bundle") from error
    with archive:
        yield Bundle(path, archive)


def _to_ascii(name: str) -> str:
    return ascii(name[:200])
