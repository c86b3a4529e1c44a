"""Registry: small records on the shared filesystem, through which the processes of a run find each other.

Each generation (job id and restart count) has a folder with mode 0700. Each file has one writer, which writes a temporary
file and renames it, so that a reader sees either the complete file or no file. A file in the parent folder names the current
generation; a process of an older generation is refused (fencing).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.runtime.disk_errors import advice, is_full, storage_error
from rlhpc.runtime.errors import OwnershipError, RegistryError, RlhpcError, StaleGeneration, StorageError
from rlhpc.runtime.files import (
    MISSING_NAME_S,
    is_count,
    move_aside,
    read_file,
    read_json,
    repeat_look,
    replace_durably,
    server_status,
)
from rlhpc.runtime.ownership import make_private, owner, require_own_run_folder, require_private

CURRENT = "current"

#: File with the times of the stages of a run's start, in a generation's folder.
TIMELINE = "timeline.json"

#: Folder of the ranks' records.
MEMBERS = "members"
#: Folder of the departures: records of ranks that have left while their groups continue.
DEPARTED = "left"
#: Folder and name of the table of all ranks, which the driver writes, so that other commands need not read a file per rank.
RANKS = "ranks"
#: Folder of the endpoints for robots outside the cluster.
ROBOTS = "robots"
#: Folder of the records of weight receivers.
WEIGHTS = "weights"
#: File with the number of steps that `rlhpc trace --steps` asks the driver to record; the driver removes it.
_TRACE_REQUEST = "trace.json"


def write_atomic(path: Path, data: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Replaces a file atomically: readers see the old content or the new content, even after a crash.

    Raises:
        StorageError: The disk is full.
        RegistryError: The write failed for another reason, for example because the folder no longer exists.
    """
    try:
        replace_durably(path, data, mode=mode, sync=durable, parents=False)
    except OSError as error:
        if is_full(error):
            raise storage_error(error, path, "the registry") from error
        raise RegistryError(f"cannot write {path}: {error.strerror}. {advice(error, path)}") from error


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise storage_error(error, folder, "the registry") from error
        raise RegistryError(f"cannot make the registry folder {folder}: {error.strerror}") from error


def _generation_names(parent: Path, job_id: str | None, restart: str) -> Iterator[str]:
    """Yields names of new generations, starting after the last one that the listing has."""
    prefix = f"{job_id}-{restart}." if job_id else "local-"
    names = [path.name for path in parent.iterdir()]
    used_numbers = [int(name[len(prefix) :]) for name in names if re.fullmatch(re.escape(prefix) + r"\d+", name)]
    if job_id and not used_numbers and f"{job_id}-{restart}" not in names:
        yield f"{job_id}-{restart}"
    for number in itertools.count(max(used_numbers, default=0 if job_id else -1) + 1):
        yield f"{prefix}{number}"


@dataclass(frozen=True)
class GenerationFolder:
    """Registry folder of one generation."""

    root: Path

    @property
    def generation(self) -> str:
        return self.root.name

    @classmethod
    def create(cls, parent: Path, generation: str) -> GenerationFolder:
        """Creates the folder of a new generation and makes it the current generation.

        Raises:
            OwnershipError: A folder with this name belongs to another user, is open to others, or is a link.
            StorageError, RegistryError: The folder cannot be created.
        """
        root = parent / generation
        with _storage_errors(root):
            require_own_run_folder(parent.parent)
            make_private(parent, parents=True)
            for folder in (
                root,
                *(root / record_type for record_type in (MEMBERS, DEPARTED, WEIGHTS, "channels", "groups")),
            ):
                make_private(folder)
        write_atomic(parent / CURRENT, generation.encode())
        return cls(root)

    @classmethod
    def create_next(cls, parent: Path, job_id: str | None = None, restart: str = "0") -> GenerationFolder:
        """Creates the folder of the next unused generation and makes it the current generation.

        Its name is `<job>-<restart>` in a Slurm job, with the suffix `.<n>` if a driver has already started in the same job,
        and `local-<n>` outside a job. A name is unused if its folder can be created, because a listing may be outdated. In an
        old folder, the records of ranks that have ended would be read.

        Raises:
            OwnershipError, StorageError, RegistryError: As for `create`.
        """
        with _storage_errors(parent):
            require_own_run_folder(parent.parent)
            make_private(parent, parents=True)
            for generation in _generation_names(parent, job_id, restart):
                try:
                    (parent / generation).mkdir(mode=0o700)
                except FileExistsError:
                    continue
                break
        return cls.create(parent, generation)

    def check_current(self) -> None:
        """Checks that this generation is still current (fencing).

        Raises:
            StaleGeneration: Another generation has taken over.
        """
        current_generation = None
        for _ in repeat_look(0.05, MISSING_NAME_S):
            if (current_generation := self._read_current()) is not None:
                break
        if current_generation is None:
            raise StaleGeneration(self.removal_message())
        if current_generation != self.generation:
            raise StaleGeneration(
                f"generation {self.generation} was replaced by {current_generation}: this process is from an earlier attempt "
                f"and may not take part in the run any more"
            )

    def _read_current(self) -> str | None:
        try:
            return read_file(self.root.parent / CURRENT).decode()
        except FileNotFoundError:
            return None

    def removal_message(self) -> str:
        """Returns the message for a registry that was removed; the message names the removed folder."""
        folders = {"run folder": self.root.parent.parent, "registry": self.root.parent, "registry folder": self.root}
        name, folder = next(
            (label_and_folder for label_and_folder in folders.items() if not label_and_folder[1].is_dir()),
            ("registry", self.root.parent),
        )
        return f"the {name} {folder} was removed while the run went on: it ends, and its logs may be gone with it"

    def require_whole(self, keys: CurveKeys) -> int:
        """Checks that this generation is still current and still has its original keys. The driver calls this regularly.

        If a registry is removed and created again, a generation's name may be used again, but its keys are new.

        Returns:
            Time of the last change in the folder itself, in nanoseconds.

        Raises:
            StaleGeneration: The registry was removed, or another driver has taken over.
        """
        self.check_current()
        try:
            current_keys, changed_at = self._read_keys()
        except FileNotFoundError:
            raise StaleGeneration(self.removal_message()) from None
        if current_keys != keys:
            raise StaleGeneration(
                f"the registry {self.root} was removed and another driver has made it anew: this process is from an "
                "earlier start and may not take part in the run any more"
            )
        return changed_at

    def request_trace(self, num_steps: int) -> None:
        """Asks the driver to record the next steps; the driver reads requests when the folder changes."""
        write_atomic(self.root / _TRACE_REQUEST, json.dumps({"steps": num_steps}).encode(), durable=False)

    def take_trace_request(self) -> int:
        """Returns the requested number of steps and removes the request; 0 if there is no request or it is malformed."""
        path = self.root / _TRACE_REQUEST
        taken_path = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        try:
            if not move_aside(path, taken_path):  # first, so that a later request is not removed unread
                return 0
            request = read_json(read_file(taken_path))
        except (OSError, ValueError):
            request = None
        with contextlib.suppress(OSError):
            taken_path.unlink()
        steps = request.get("steps") if isinstance(request, dict) else None
        return int(steps) if steps is not None and is_count(steps) else 0

    def put(self, kind: str, name: str, record: dict[str, Any]) -> None:
        """Publishes a record as `<kind>/<name>.json`, together with the generation; makes the kind's folder if needed."""
        self.check_current()
        record_json = json.dumps({"generation": self.generation, **record}).encode()
        folder = self.root / kind
        if not folder.is_dir():
            make_private(folder)
        write_atomic(folder / f"{name}.json", record_json, durable=False)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Returns a record; None if it has not been published yet.

        Raises:
            ValueError: The file is not a record.
            StaleGeneration: The record is of another generation.
        """
        try:
            record = read_json(read_file(self.root / kind / f"{name}.json"))
        except FileNotFoundError:
            return None
        if not isinstance(record, dict):
            raise ValueError(f"{kind}/{name} is no record")
        if record.get("generation") != self.generation:
            raise StaleGeneration(f"{kind}/{name} carries generation {record.get('generation')}, not {self.generation}")
        return record

    def version(self, kind: str, name: str) -> int:
        """Returns a number that changes whenever the record is published again; 0 before its first publication."""
        try:
            return server_status(self.root / kind / f"{name}.json").mtime_ns
        except FileNotFoundError:
            return 0

    def remove(self, kind: str, name: str) -> None:
        (self.root / kind / f"{name}.json").unlink(missing_ok=True)

    def wait_for(
        self, kind: str, name: str, timeout: float, purpose: str, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Returns a record; waits until it is published, and polls with growing intervals.

        Raises:
            RegistryError: The record was not published within `timeout` seconds; the message has the purpose.
        """
        deadline, pause = time.monotonic() + timeout, 0.002
        while (record := self.get(kind, name)) is None:
            check()
            if time.monotonic() > deadline:
                raise RegistryError(
                    f"waited {timeout:.0f} s for {purpose}; {self.root / kind / name}.json never appeared"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        return record

    def save_keys(self, keys: CurveKeys) -> None:
        """Writes the generation's key pair, readable only by its owner."""
        write_atomic(self.root / "keys.json", json.dumps([keys.public.decode(), keys.secret.decode()]).encode())

    def load_keys(self) -> CurveKeys:
        """Returns the generation's key pair.

        Raises:
            OwnershipError: The file belongs to another user or is open to others, who could then join the run.
        """
        return self._read_keys()[0]

    def _read_keys(self) -> tuple[CurveKeys, int]:
        """Returns the keys, and the time of the last change in the folder, in nanoseconds; see `load_keys`."""
        require_private(self.root)
        path = self.root / "keys.json"
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status, folder_status = os.fstat(file.fileno()), self.root.lstat()
            if status.st_uid != folder_status.st_uid or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise OwnershipError(
                    f"{path} is {owner(status)}'s, mode {stat.S_IMODE(status.st_mode):04o}: keys that others can read or "
                    "write are not used. Start the run again under another runner.name"
                )
            public_key, secret_key = read_json(file.read())
        return CurveKeys(public_key.encode(), secret_key.encode()), folder_status.st_mtime_ns


@dataclass(frozen=True)
class CurveKeys:
    """CURVE key pair of a generation, which authenticates and encrypts all sockets between hosts."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> CurveKeys:
        import zmq

        return cls(*zmq.curve_keypair())


#: Seconds between two checks, each of which reads two small files on the shared filesystem.
LOOK_S = 5.0


class RegistryWatch:
    """Thread that checks whether the registry still belongs to this driver.

    Args:
        registry: Registry of the driver's generation.
        keys: Original keys of the generation.
        fail: Called once with the error if the registry no longer belongs to this driver; then the thread ends.
        publish: Called after each check, to update the driver's records.
        on_change: Called after a check that finds that files were added to the generation's folder.
    """

    def __init__(
        self,
        registry: GenerationFolder,
        keys: CurveKeys,
        fail: Callable[[RlhpcError], None],
        publish: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._registry, self._keys, self._fail, self._publish = registry, keys, fail, publish
        self._on_change, self._changed_at = on_change, 0
        self._is_stopped = threading.Event()
        threading.Thread(target=self._watch, name="rlhpc-registry", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_stopped.wait(LOOK_S):
            try:
                changed_at = self._registry.require_whole(self._keys)
                self._publish()
                if changed_at != self._changed_at:
                    self._on_change()
                    self._changed_at = changed_at
            except (StaleGeneration, OwnershipError) as error:
                if not self._is_stopped.is_set():
                    self._fail(error)
                return
            except (OSError, ValueError, RegistryError, StorageError):
                continue  # a filesystem may stall or be full for a while, but the registry still belongs to this driver

    def owns_registry(self) -> bool:
        """Returns whether the registry still belongs to this driver, so that the driver may change its files."""
        try:
            self._registry.require_whole(self._keys)
        except (RlhpcError, OSError, ValueError):
            return False
        return True

    def stop(self) -> None:
        """Ends the checks; errors are no longer reported."""
        self._is_stopped.set()
