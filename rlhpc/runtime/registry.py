"""Registry: small records on the shared filesystem, through which the processes of a run find each other.

Each generation (job id and restart count) has a folder with mode 0700. Each file has one writer, which writes a temporary
file and renames it, so that a reader sees either the complete file or no file. A file in the parent folder names the current
generation; a process of an older generation is refused (fencing).
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.runtime.disk_errors import advice, is_full, storage_error
from rlhpc.runtime.errors import OwnershipError, RegistryError, RlhpcError, StaleGeneration
from rlhpc.runtime.files import read_file, read_json, replace_durably
from rlhpc.runtime.ownership import make_private, owner, require_own_run_folder, require_private

CURRENT = "current"

#: Folder of the ranks' records.
MEMBERS = "members"
#: Folder of the departures: records of ranks that have left while their groups continue.
DEPARTED = "left"
#: Folder of the endpoints for robots outside the cluster.
ROBOTS = "robots"
#: Folder of the records of weight receivers.
WEIGHTS = "weights"


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
        try:
            require_own_run_folder(parent.parent)
            make_private(parent, parents=True)
            for folder in (
                root,
                *(root / record_type for record_type in (MEMBERS, DEPARTED, WEIGHTS, "channels", "groups")),
            ):
                make_private(folder)
        except OSError as error:
            if is_full(error):
                raise storage_error(error, root, "the registry") from error
            raise RegistryError(f"cannot make the registry folder {root}: {error.strerror}") from error
        write_atomic(parent / CURRENT, generation.encode())
        return cls(root)

    @staticmethod
    def job_generation(parent: Path, job: str, restart: str) -> str:
        """Returns the name of a new generation in a Slurm job: `<job>-<restart>`.

        If a driver has already started in the same job, the name has a suffix: `<job>-<restart>.<n>`.
        """
        name = f"{job}-{restart}"
        folders = [path.name for path in parent.glob(f"{name}*")] if parent.is_dir() else []
        earlier = [
            int(folder[len(name) + 1 :] or 0)
            for folder in folders
            if folder[len(name) + 1 :].isdigit() or folder == name
        ]
        return f"{name}.{max(earlier) + 1}" if earlier else name

    @staticmethod
    def next_local_generation(parent: Path) -> str:
        """Returns the name of a new generation outside a Slurm job: `local-<n>`."""
        used_numbers = (
            [int(path.name[6:]) for path in parent.glob("local-*") if path.name[6:].isdigit()]
            if parent.is_dir()
            else []
        )
        return f"local-{max(used_numbers, default=-1) + 1}"

    def check_current(self) -> None:
        """Checks that this generation is still current (fencing).

        Raises:
            StaleGeneration: Another generation has taken over.
        """
        try:
            current = (self.root.parent / CURRENT).read_text()
        except FileNotFoundError:
            raise StaleGeneration(self.removal_message()) from None
        if current != self.generation:
            raise StaleGeneration(
                f"generation {self.generation} was replaced by {current}: this process is from an earlier attempt and may "
                f"not take part in the run any more"
            )

    def removal_message(self) -> str:
        """Returns the message for a registry that was removed; the message has the removed folder."""
        folders = {"run folder": self.root.parent.parent, "registry": self.root.parent, "registry folder": self.root}
        name, folder = next(
            (label_and_folder for label_and_folder in folders.items() if not label_and_folder[1].is_dir()),
            ("registry", self.root.parent),
        )
        return f"the {name} {folder} was removed while the run went on: it ends, and its logs may be gone with it"

    def require_whole(self, keys: CurveKeys) -> None:
        """Checks that this generation is still current and still has its original keys. The driver calls this regularly.

        If a registry is removed and created again, a generation's name may be used again, but its keys are new.

        Raises:
            StaleGeneration: The registry was removed, or another driver has taken over.
        """
        self.check_current()
        try:
            current_keys = self.load_keys()
        except FileNotFoundError:
            raise StaleGeneration(self.removal_message()) from None
        if current_keys != keys:
            raise StaleGeneration(
                f"the registry {self.root} was removed and another driver has made it anew: this process is from an "
                "earlier start and may not take part in the run any more"
            )

    def put(self, kind: str, name: str, record: dict[str, Any]) -> None:
        """Publishes a record as `<kind>/<name>.json`, together with the generation; makes the kind's folder if needed."""
        self.check_current()
        record_json = json.dumps({"generation": self.generation, **record}).encode()
        folder = self.root / kind
        if not folder.is_dir():
            make_private(folder)
        write_atomic(folder / f"{name}.json", record_json, durable=False)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Returns a record; None if it has not been published yet."""
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
        """Returns a number that changes whenever the record is published again; 0 before its first publication.

        Opens the file, because a network filesystem may answer `stat` from a cache that is up to a minute old.
        """
        try:
            fd = os.open(self.root / kind / f"{name}.json", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            return os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)

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
        require_private(self.root)
        path = self.root / "keys.json"
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != self.root.lstat().st_uid or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise OwnershipError(
                    f"{path} is {owner(status)}'s, mode {stat.S_IMODE(status.st_mode):04o}: keys that others can read or "
                    "write are not used. Start the run again under another runner.name"
                )
            public, secret = read_json(file.read())
        return CurveKeys(public.encode(), secret.encode())


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
    """

    def __init__(self, registry: GenerationFolder, keys: CurveKeys, fail: Callable[[RlhpcError], None]) -> None:
        self._registry, self._keys, self._fail = registry, keys, fail
        self._is_stopped = threading.Event()
        threading.Thread(target=self._watch, name="rlhpc-registry", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_stopped.wait(LOOK_S):
            try:
                self._registry.require_whole(self._keys)
            except (StaleGeneration, OwnershipError) as error:
                if not self._is_stopped.is_set():
                    self._fail(error)
                return
            except (OSError, ValueError):
                continue  # a filesystem may stall for a while, which does not mean that the registry was removed

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
