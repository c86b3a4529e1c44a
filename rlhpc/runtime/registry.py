"""The registry: small records on the shared filesystem through which the groups of a run find each other.

One folder per generation (job id and restart count), mode 0700. Each file has one writer, which writes a temporary name,
fsyncs it and renames it, so a reader sees all of a file or none. The folder's parent names the current generation, and a
process of an older one that wakes up is refused (fencing).
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
#: Kind of the records of members whose groups continue without them.
DEPARTED = "left"
#: Where those who come from outside the cluster are met.
ROBOTS = "robots"
#: Where those who take in weights compute.
WEIGHTS = "weights"


def write_atomic(path: Path, data: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Replaces a file atomically: readers see the old content or the new one, also after a crash.

    Raises:
        StorageError: The disk is full.
        RegistryError: The filesystem refused for another reason, or the folder is gone.
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
        """Creates the folder of a new generation and declares it the current one.

        Raises:
            OwnershipError: A folder of that name is another user's, open to others, or a link.
            StorageError, RegistryError: The filesystem refused.
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
        """Returns `<job>-<restart>`; `<job>-<restart>.<n>` for the n-th time that a driver starts within the same job."""
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
        """Returns `local-<n>`: the generation's name when no scheduler gives a job id and a restart count."""
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
        """Returns the message for a registry that has vanished; it names the removed folder of the run."""
        folders = {"run folder": self.root.parent.parent, "registry": self.root.parent, "registry folder": self.root}
        name, folder = next(
            (label_and_folder for label_and_folder in folders.items() if not label_and_folder[1].is_dir()),
            ("registry", self.root.parent),
        )
        return f"the {name} {folder} was removed while the run went on: it ends, and its logs may be gone with it"

    def require_whole(self, keys: CurveKeys) -> None:
        """Checks that this generation is still current, with the keys it began with. The driver calls this from time to time.

        A name can occur again after a registry was removed and created anew; keys cannot.

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
        """Publishes `record` as `<kind>/<name>.json`, stamped with the generation."""
        self.check_current()
        record_json = json.dumps({"generation": self.generation, **record}).encode()
        write_atomic(self.root / kind / f"{name}.json", record_json, durable=False)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Returns the record; None until it has been published."""
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
        """Returns a number that changes whenever the record is published again; 0 before the first time.

        The file is opened for it: a network filesystem may answer `stat` from a cache that is a minute old.
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
        """Waits for a record, polling with growing intervals, and returns it.

        Raises:
            RegistryError: It did not appear within `timeout` seconds; the message names the awaited process.
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
            OwnershipError: The file is not this user's, so its creator could join the run.
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
    """CURVE key pair of one generation: it authenticates and encrypts every socket, in both directions."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> CurveKeys:
        import zmq

        return cls(*zmq.curve_keypair())


#: How often two small files on the shared filesystem are read.
LOOK_S = 5.0


class RegistryWatch:
    """A thread that checks whether the registry is still this driver's.

    Args:
        registry: The registry of the driver's generation.
        keys: The keys that the driver began with.
        fail: Called once with the error; then the watch ends.
    """

    def __init__(self, registry: GenerationFolder, keys: CurveKeys, fail: Callable[[RlhpcError], None]) -> None:
        self._registry, self._keys, self._fail = registry, keys, fail
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="rlhpc-registry", daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self._registry.require_whole(self._keys)
            except (StaleGeneration, OwnershipError) as error:
                if not self._over.is_set():
                    self._fail(error)
                return
            except (OSError, ValueError):
                continue  # a filesystem that stalls or is being written to is no reason to end

    def owns_registry(self) -> bool:
        """Returns whether the registry is still this driver's; another driver's files must not be changed."""
        try:
            self._registry.require_whole(self._keys)
        except (RlhpcError, OSError, ValueError):
            return False
        return True

    def stop(self) -> None:
        """Ends the watch: from now on nothing is reported."""
        self._over.set()
