"""Archive of the Python environment, which each node of a run unpacks to its own disk before ranks start there.

An interpreter with torch and vLLM opens tens of thousands of small files. Where the environment is on a shared filesystem,
each rank opens them there. With `cluster.environment_archive`, each node reads one large file instead, and its ranks open the
files on the node's disk.

A process on each node (`python -m rlhpc.runtime.environment_archive ARCHIVE FOLDER`) unpacks the archive, unless another job
of the user has done so, and removes the folder when no job uses it any more. It lives as long as the session: its standard
input ends with the driver.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import ConfigError, RlhpcError, StepFailed
from rlhpc.runtime.files import read_json
from rlhpc.runtime.host import node_name
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.scratch import remove_folder, scratch_root
from rlhpc.runtime.text import format_bytes

KEY = "cluster.environment_archive"
#: Member of the archive that describes it, and which marks a folder with all members.
_MANIFEST = "environment.json"
#: Folders of the archive for the environment, and for the interpreter that it was made from.
_ENVIRONMENT, _BASE = "environment", "base"
#: Installations of the operating system, which each node has on its own disk.
_SYSTEM_PREFIXES = ("/usr", "/usr/local")
#: Folders of an interpreter that ranks do not need.
_OMITTED = frozenset({"test", "site-packages", "idlelib", "share", "include"})
#: Seconds that the nodes may take to unpack the archive, and seconds between two looks at the run meanwhile.
_UNPACK_TIMEOUT_S, _CHECK_S = 1800.0, 0.2
#: Seconds that the nodes may take to remove the environment before the session ends without them.
_CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ArchivedEnvironment:
    """Description of an archived environment.

    Attributes:
        prefix: Folder of the environment when it was archived.
        version: Version of Python, such as `3.11.7`.
        packages: Digest of the names and versions of the installed packages.
        num_files: Number of archived files.
        num_bytes: Bytes that the archive takes when it is unpacked.
        base: Interpreter in the archive, relative to its folder; "" if the environment uses that of the operating system.
    """

    prefix: str
    version: str
    packages: str
    num_files: int
    num_bytes: int
    base: str


def _digest_installed_packages(prefix: Path) -> str:
    package_names = sorted(path.name for path in prefix.glob("lib/python*/site-packages/*.dist-info"))
    return hashlib.blake2b("\n".join(package_names).encode(), digest_size=12).hexdigest()


def _iter_archived_files(root: Path, omitted_names: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yields the files, links and empty folders below a folder."""
    for folder, folder_names, files in os.walk(root):
        folder_names[:] = sorted(name for name in folder_names if name not in omitted_names)
        for name in (*files, *(name for name in folder_names if (Path(folder) / name).is_symlink())):
            yield Path(folder) / name


def pack(archive: Path, prefix: Path | None = None) -> ArchivedEnvironment:
    """Writes the archive of an environment: its files, and those of its interpreter unless the operating system has that.

    Args:
        archive: File to write; a file of this name is replaced once the new one is complete.
        prefix: Folder of the environment; by default that of this process.

    Raises:
        ConfigError: This Python is that of the operating system, or the archive cannot be written.
    """
    prefix, base_prefix = prefix or Path(sys.prefix), Path(sys.base_prefix).resolve()
    if str(prefix) in _SYSTEM_PREFIXES:
        raise ConfigError(
            f"{sys.executable} is the operating system's Python, which each node has on its own disk: run the command in the "
            "environment that the ranks use"
        )
    archive_sources = [(prefix, _ENVIRONMENT, frozenset[str]())]
    has_base = base_prefix != prefix.resolve() and str(base_prefix) not in _SYSTEM_PREFIXES
    if has_base:
        archive_sources.append((base_prefix, _BASE, _OMITTED))
    partial_archive = archive.with_name(f".{archive.name}.{os.getpid()}")
    files = [(path, f"{name}/{path.relative_to(root)}") for root, name, omitted_names in archive_sources
             for path in _iter_archived_files(root, omitted_names) if path not in (archive, partial_archive)]  # fmt: skip
    # the disk uses whole blocks of 4 KiB
    num_bytes = sum(-(-path.lstat().st_size // 4096) * 4096 for path, _ in files)
    executable = Path(getattr(sys, "_base_executable", sys.executable)).name
    environment = ArchivedEnvironment(
        str(prefix), ".".join(map(str, sys.version_info[:3])), _digest_installed_packages(prefix), len(files), num_bytes,
        f"{_BASE}/bin/{executable}" if has_base else "",
    )  # fmt: skip
    try:
        with tarfile.open(partial_archive, "w", format=tarfile.PAX_FORMAT) as tar:
            manifest = json.dumps(asdict(environment)).encode()
            member = tarfile.TarInfo(_MANIFEST)
            member.size, member.mtime = len(manifest), int(time.time())
            tar.addfile(member, io.BytesIO(manifest))
            for path, name in files:
                tar.add(path, name, recursive=False)
        partial_archive.replace(archive)
    except OSError as error:
        raise ConfigError(f"cannot write {archive}: {error.strerror or error}") from error
    finally:
        partial_archive.unlink(missing_ok=True)
    return environment


def read_manifest(archive: Path) -> ArchivedEnvironment:
    """Reads the description of an archived environment; reads only the start of the archive.

    Raises:
        ConfigError: There is no such archive, or it is not one of `rlhpc pack`.
    """
    try:
        with tarfile.open(archive) as tar:
            member = tar.next()
            file = tar.extractfile(member) if member is not None and member.name == _MANIFEST else None
            fields: Any = read_json(file.read()) if file is not None else None
        return ArchivedEnvironment(**fields)
    except (OSError, tarfile.TarError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it is no tar archive"
        raise ConfigError(f"{KEY}: cannot read {archive}: {reason}. Write it with: rlhpc pack {archive}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{KEY}: cannot read {archive}: it is no archive of rlhpc pack. Write it with: rlhpc pack {archive}"
        ) from error


def check_archive(archive: Path) -> ArchivedEnvironment:
    """Checks that an archive has the packages of this process's environment.

    Raises:
        ConfigError: The archive cannot be read, or the environment is another one or has changed since.
    """
    environment = read_manifest(archive)
    version_text = ".".join(map(str, sys.version_info[:3]))
    for name, archived_value, current_value in (
        ("Python", environment.version, version_text),
        ("the environment", environment.prefix, sys.prefix),
        ("its packages", environment.packages, _digest_installed_packages(Path(sys.prefix))),
    ):
        if archived_value != current_value:
            difference_text = (
                "have changed"
                if name == "its packages"
                else f"is {current_value}, and the archive has {archived_value}"
            )
            raise ConfigError(
                f"{KEY}: {archive} is not of this environment: {name} {difference_text}. Write it again with: rlhpc "
                f"pack {archive}"
            )
    return environment


# -- on a node --------------------------------------------------------------------------------------------------------------


def folder_of(archive: Path, scratch_root: str | None = None) -> Path:
    """Returns the folder to which the nodes unpack an archive; jobs of this user that use the same archive share it.

    Args:
        archive: The archive.
        scratch_root: The run's `cluster.scratch`; by default that of this process.
    """
    status = archive.stat()
    identity = f"{archive.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
    return (Path(scratch_root) if scratch_root else _root()) / f"rlhpc-{os.getuid()}-environment-{digest}"


def python_of(folder: Path) -> str:
    """Returns the interpreter of an unpacked environment."""
    return str(folder / _ENVIRONMENT / "bin" / "python")


def _root() -> Path:
    return scratch_root() or Path("/tmp")


@contextlib.contextmanager
def _lock_exclusively(folder: Path) -> Iterator[None]:
    """Waits until no other process unpacks or removes a folder, and locks the folder during the block."""
    path = folder.with_name(f"{folder.name}.lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_file_of(descriptor, path):  # another process may have removed the file before it was locked
                yield
                return
        finally:
            os.close(descriptor)


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def acquire(archive: Path, folder: Path) -> int:
    """Unpacks an archive, unless it is unpacked already; returns the descriptor that marks the folder as used.

    Raises:
        ConfigError: The node's disk has too little space, or the archive cannot be unpacked.
        OwnershipError: Another user has a folder of this name.
    """
    environment = read_manifest(archive)
    with _lock_exclusively(folder):
        try:
            make_private(folder)
        except OSError as error:
            raise ConfigError(
                f"cluster.scratch: cannot make {folder} on node {node_name()}: {error.strerror}; it must be a folder of every "
                "node"
            ) from error
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not (folder / _MANIFEST).exists():
            try:
                _unpack(archive, environment, folder)
            except BaseException:
                _remove(folder)
                os.close(descriptor)
                raise
        return descriptor


def _unpack(archive: Path, environment: ArchivedEnvironment, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < environment.num_bytes:
        raise ConfigError(
            f"{KEY}: the environment takes {format_bytes(environment.num_bytes)}, and {folder.parent} of node {node_name()} "
            f"has {format_bytes(free_bytes)} free: name a larger disk of the nodes with cluster.scratch, or set {KEY}=null"
        )
    for path in folder.iterdir():  # a process was killed while it unpacked
        remove_folder(path) if path.is_dir() else path.unlink()
    command = ["tar", "--extract", f"--file={archive}", f"--directory={folder}", f"--exclude={_MANIFEST}"]
    completed_process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if completed_process.returncode:
        raise ConfigError(
            f"{KEY}: cannot unpack {archive} to {folder} on node {node_name()}: "
            f"{completed_process.stderr.strip() or completed_process.returncode}"
        )
    if environment.base:
        # a virtual environment names its interpreter in this file, and by a link
        settings = folder / _ENVIRONMENT / "pyvenv.cfg"
        base_prefix = folder / environment.base
        lines = [line for line in settings.read_text().splitlines() if not line.startswith("home ")]
        settings.write_text("\n".join([f"home = {base_prefix.parent}", *lines, ""]))
        for name in ("python", "python3", base_prefix.name):
            link = folder / _ENVIRONMENT / "bin" / name
            link.unlink(missing_ok=True)
            link.symlink_to(base_prefix)
    (folder / _MANIFEST).write_text(json.dumps(asdict(environment)))


def release(folder: Path, descriptor: int) -> None:
    """Marks a folder as no longer used by this process; removes it if no other process uses it."""
    try:
        with _lock_exclusively(folder), contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Removes a folder and its lock file, which this process has locked."""
    remove_folder(folder)
    folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)


def remove_unused() -> list[Path]:
    """Removes this user's unpacked environments that no process uses, such as those of killed jobs; returns their folders."""
    removed_folders = []
    for folder in sorted(_root().glob(f"rlhpc-{os.getuid()}-environment-*")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or not folder.is_dir() or folder.lstat().st_uid != os.getuid():
                continue
            release(folder, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
            if not folder.exists():
                removed_folders.append(folder)
    return removed_folders


def main() -> None:
    """Keeps an archive unpacked on this node: `python -m rlhpc.runtime.environment_archive ARCHIVE FOLDER`.

    Prints `ready NODE` or `failed REASON`. Ends with its standard input, or at SIGTERM.
    """
    archive, folder = map(Path, sys.argv[1:])
    # no signal may end the process between two steps of its work, so that none is left half done
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    for signal_number in signals - {signal.SIGTERM}:
        signal.signal(signal_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        remove_unused()
        descriptor = acquire(archive, folder)
    except (RlhpcError, OSError) as error:
        print(f"failed {error}".replace("\n", " "), flush=True)
        sys.exit(1)
    print(f"ready {os.environ.get('SLURMD_NODENAME') or node_name()}", flush=True)
    threading.Thread(target=_await_end_of_input, daemon=True).start()
    signal.sigwait({signal.SIGTERM})
    release(folder, descriptor)


def _await_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


# -- in the driver ----------------------------------------------------------------------------------------------------------


class UnpackedEnvironment:
    """Environment that is unpacked on the nodes of a session until the session ends.

    Args:
        archive: The archive.
        commands: For each component of the job, its nodes and the words that run a command once on each of them; the words
            are empty for this host alone.
        check: Called while the nodes unpack; raises if the run was stopped or has failed.
        environment: Environment variables of the commands.

    Attributes:
        python: Interpreter of the unpacked environment, on each node.

    Raises:
        ConfigError: A node has too little space, or cannot unpack the archive.
        StepFailed: The nodes did not answer.
    """

    def __init__(
        self,
        archive: Path,
        commands: Sequence[tuple[Sequence[str], Sequence[str]]],
        check: Callable[[], None],
        environment: dict[str, str],
    ) -> None:
        self._folder = folder_of(archive)
        self.python = python_of(self._folder)
        self._missing_nodes = {node for nodes, _ in commands for node in nodes}
        self._failure, self._condition = "", threading.Condition()
        self._processes: list[subprocess.Popen[str]] = []
        program = run_module(__name__, str(archive.resolve()), str(self._folder))
        for _, command_words in commands:
            self._processes.append(subprocess.Popen(
                [*command_words, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=environment, start_new_session=True,
            ))  # fmt: skip
            threading.Thread(
                target=self._read, args=(self._processes[-1],), name="rlhpc-environment", daemon=True
            ).start()
        try:
            self._await_nodes(check)
        except BaseException:
            self.close()
            raise

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            state_word, _, message_text = line.rstrip().partition(" ")
            with self._condition:
                if state_word == "ready":
                    self._missing_nodes = {
                        node for node in self._missing_nodes if not _is_same_node(node, message_text)
                    }
                elif state_word == "failed":
                    self._failure = self._failure or message_text
                else:
                    lines = [*lines[-9:], line.rstrip()]
                self._condition.notify_all()
        process.wait()
        with self._condition:
            self._failure = self._failure or "; ".join(lines) or f"a process ended with exit code {process.returncode}"
            self._condition.notify_all()

    def _await_nodes(self, check_alive: Callable[[], None]) -> None:
        deadline = time.monotonic() + _UNPACK_TIMEOUT_S
        with self._condition:
            while self._missing_nodes and not self._failure:
                if time.monotonic() > deadline:
                    raise StepFailed(
                        f"{KEY}: {', '.join(sorted(self._missing_nodes))} did not unpack the environment in "
                        f"{_UNPACK_TIMEOUT_S:.0f} s"
                    )
                self._condition.wait(_CHECK_S)
                check_alive()
            if self._failure and self._missing_nodes:
                if self._failure.startswith(("cluster.", "/")):
                    raise ConfigError(self._failure)
                raise StepFailed(f"{KEY}: {', '.join(sorted(self._missing_nodes))}: {self._failure}")

    def close(self) -> None:
        """Removes the environment from the nodes, unless another job uses it, and waits for the removal."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.terminate()


def _is_same_node(name: str, reported_name: str) -> bool:
    return name.partition(".")[0] == reported_name.partition(".")[0]


if __name__ == "__main__":
    main()
