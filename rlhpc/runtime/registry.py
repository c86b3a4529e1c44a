"""The registry: small facts on the shared filesystem through which the groups of a run meet.

One folder per generation (job id and restart count), mode 0700. Each file has one writer, which writes a temporary name,
fsyncs and renames; so a reader sees all of a file or none. The folder's parent names the current generation, and a
process of an older one that wakes up is refused (fencing).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import RegistryError, StaleGeneration

CURRENT = "current"


def write_atomic(path: Path, data: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Writes `data` so that a reader, or a crash, sees the old file or the new one and nothing between.

    Raises:
        RegistryError: The filesystem refused (read-only, full, quota).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            os.write(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RegistryError(
            f"cannot write {path}: {error.strerror}. Check the quota and that the run folder's filesystem is writable."
        ) from error


@dataclass(frozen=True)
class Registry:
    """One generation's folder."""

    root: Path

    @property
    def generation(self) -> str:
        return self.root.name

    @classmethod
    def create(cls, parent: Path, generation: str) -> Registry:
        """Makes the folder of a new generation and declares it the current one."""
        root = parent / generation
        try:
            for folder in (parent, root, root / "members", root / "channels", root / "groups"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RegistryError(f"cannot make the registry folder {root}: {error.strerror}") from error
        write_atomic(parent / CURRENT, generation.encode())
        return cls(root)

    @staticmethod
    def job_generation(parent: Path, job: str, restart: str) -> str:
        """`<job>-<restart>`; `<job>-<restart>.<n>` for the n-th time that a driver starts within the same job."""
        name = f"{job}-{restart}"
        taken = [p.name for p in parent.glob(f"{name}*")] if parent.is_dir() else []
        earlier = [
            int(found[len(name) + 1 :] or 0) for found in taken if found[len(name) + 1 :].isdigit() or found == name
        ]
        return f"{name}.{max(earlier) + 1}" if earlier else name

    @staticmethod
    def next_local_generation(parent: Path) -> str:
        """`local-<n>`: the generation's name where no scheduler gives a job id and a restart count."""
        taken = [int(p.name[6:]) for p in parent.glob("local-*") if p.name[6:].isdigit()] if parent.is_dir() else []
        return f"local-{max(taken, default=-1) + 1}"

    def check_current(self) -> None:
        """Fencing.

        Raises:
            StaleGeneration: Another generation has taken over since.
        """
        try:
            current = (self.root.parent / CURRENT).read_text()
        except FileNotFoundError:
            raise StaleGeneration(f"registry {self.root.parent} is gone; this process belongs to no live run") from None
        if current != self.generation:
            raise StaleGeneration(
                f"generation {self.generation} was replaced by {current}: this process is from an earlier attempt and may "
                f"not take part in the run any more"
            )

    def put(self, kind: str, name: str, record: dict[str, Any]) -> None:
        """Publishes `record` as `<kind>/<name>.json`, stamped with the generation."""
        self.check_current()
        data = json.dumps({"generation": self.generation, **record}).encode()
        write_atomic(self.root / kind / f"{name}.json", data, durable=False)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """The record, or None while nobody has published it."""
        try:
            record: dict[str, Any] = json.loads((self.root / kind / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None
        if record.get("generation") != self.generation:
            raise StaleGeneration(f"{kind}/{name} carries generation {record.get('generation')}, not {self.generation}")
        return record

    def version(self, kind: str, name: str) -> int:
        """Changes whenever the record is published anew; 0 while there is none."""
        try:
            return os.stat(self.root / kind / f"{name}.json").st_mtime_ns
        except FileNotFoundError:
            return 0

    def remove(self, kind: str, name: str) -> None:
        (self.root / kind / f"{name}.json").unlink(missing_ok=True)

    def wait_for(
        self, kind: str, name: str, timeout: float, whom: str, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Polls for a record with back-off.

        Raises:
            RegistryError: It did not appear in `timeout` seconds; the message says for whom it waited.
        """
        deadline, pause = time.monotonic() + timeout, 0.002
        while (record := self.get(kind, name)) is None:
            check()
            if time.monotonic() > deadline:
                raise RegistryError(f"waited {timeout:.0f} s for {whom}; {self.root / kind / name}.json never appeared")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        return record

    def save_keys(self, keys: Keys) -> None:
        """Writes the generation's key pair, readable by its owner alone."""
        write_atomic(self.root / "keys.json", json.dumps([keys.public.decode(), keys.secret.decode()]).encode())

    def load_keys(self) -> Keys:
        public, secret = json.loads((self.root / "keys.json").read_bytes())
        return Keys(public.encode(), secret.encode())


@dataclass(frozen=True)
class Keys:
    """CURVE key pair of one generation: it authenticates and encrypts every socket, in both directions."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> Keys:
        import zmq

        return cls(*zmq.curve_keypair())
