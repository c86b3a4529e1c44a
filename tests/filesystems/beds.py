"""Mounts of a shared folder for several hosts, and small real filesystems."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import IO

import pytest

from tests.extras import PROGRAMS_REQUIRED, ROOT, need_programs
from tests.filesystems.faults import Faults

_PROGRAM = Path(__file__).with_name("mount.py")
_START_S = 30.0


def need_mounts() -> None:
    """Skips the test where filesystems cannot be mounted. In CI, a missing program or package fails it instead."""
    need_programs("unshare", "mount", "mkfs.ext4")
    reasons = [
        *(["no root"] if os.geteuid() else []),
        *([] if os.path.exists("/dev/fuse") else ["no /dev/fuse"]),
        *([] if importlib.util.find_spec("mfusepy") else ["no package mfusepy"]),
        *([] if shutil.which("ldconfig", path="/sbin:/usr/sbin") and _has_libfuse() else ["no libfuse2"]),
    ]
    if reasons:
        reason = f"filesystems cannot be mounted here: {', '.join(reasons)}"
        if os.environ.get(PROGRAMS_REQUIRED):
            pytest.fail(f"{reason}, and {PROGRAMS_REQUIRED} is set", pytrace=False)
        pytest.skip(reason, allow_module_level=True)


def _has_libfuse() -> bool:
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    return "libfuse.so.2" in listed


def is_readable(stream: IO[str], timeout_s: float) -> bool:
    """Waits until a pipe has something to read, or is closed; returns whether it came in time."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


class Client:
    """One client of a shared folder: a mount with its own caches, and a simulated host that sees it as `bed.path`.

    Args:
        name: Host name of the client.
        backing: Folder that all clients share.
        mount: Mount point, which is created.
        shared: Path of the mount inside the client's host.
        faults: Faults of the client.
    """

    def __init__(self, name: str, backing: Path, mount: Path, shared: Path, faults: Faults) -> None:
        self.name, self.path, self.faults = name, mount, faults
        self._shared = shared
        self._jobs: list[subprocess.Popen[str]] = []
        mount.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(backing), str(mount), json.dumps(asdict(faults))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._answer() != "ready":
            _, words = self._server.communicate(timeout=10)
            raise RuntimeError(f"client {name} did not mount: {words[-1000:]}")

    def _answer(self) -> str:
        assert self._server.stdout is not None
        if not is_readable(self._server.stdout, _START_S):
            self._server.kill()
            raise TimeoutError(f"the mount of client {self.name} did not answer within {_START_S:.0f} s")
        return self._server.stdout.readline().strip()

    def set(self, **changes: object) -> None:
        """Changes faults of the mounted client; cache times and the kind of `flock` stay as they were at the mount."""
        self.faults = replace(self.faults, **changes)  # type: ignore[arg-type]
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(asdict(self.faults)) + "\n")
        self._server.stdin.flush()
        assert self._answer() == "ok"

    def start(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command on the client's host: own host name, PID namespace and /dev/shm; the shared folder is at the same
        path on every host. Killing the returned process kills all processes of the command, like the death of a host.
        """
        mounts = f'mount --bind "{self.path}" "{self._shared}" && mount -t tmpfs none /dev/shm'
        script = f'hostname {self.name} && {mounts} && exec "$@"'
        inside = [
            "unshare",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            script,
            "sh",
        ]
        job = subprocess.Popen(
            [*inside, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1",
                "RLHPC_HOST_ID": self.name, **(env or {}),
            },
        )  # fmt: skip
        self._jobs.append(job)
        return job

    def run(self, *command: str, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Runs a command on the client's host; returns its exit code, and its output with the errors."""
        job = self.start(*command, env=env)
        try:
            output, errors = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            job.kill()
            output, errors = job.communicate(timeout=10)
            raise AssertionError(
                f"{' '.join(command)[:200]} on {self.name} took longer than {timeout_s:.0f} s:\n{(output + errors)[-3000:]}"
            ) from None
        return job.returncode, output + errors

    def close(self) -> None:
        """Kills the commands of the host, and unmounts."""
        for job in self._jobs:
            if job.poll() is None:
                job.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.communicate(timeout=10)
        subprocess.run(["umount", "-l", str(self.path)], stderr=subprocess.DEVNULL, check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.communicate(timeout=5)
        if self._server.poll() is None:
            self._server.kill()
            self._server.wait(10)


class SharedFolder:
    """Shared folder with its clients; the block's end unmounts them.

    Attributes:
        backing: The server's folder.
        path: Path of the folder on the clients' hosts.
    """

    def __init__(self, folder: Path, *faults: Faults) -> None:
        self.backing, self.path = folder / "server", folder / "shared"
        self._folder, self._faults = folder, faults
        self.clients: list[Client] = []

    def __enter__(self) -> SharedFolder:
        self.backing.mkdir(parents=True)
        self.path.mkdir()
        try:
            for number, faults in enumerate(self._faults):
                name = f"host{number}"
                self.clients.append(Client(name, self.backing, self._folder / name, self.path, faults))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        while self.clients:
            self.clients.pop().close()


@contextlib.contextmanager
def small_filesystem(folder: Path, kind: str, megabytes: int) -> Iterator[Path]:
    """Mounts a real filesystem of a few megabytes: "tmpfs", or "ext4" on a loop device."""
    mount = folder / kind
    mount.mkdir(parents=True)
    if kind == "tmpfs":
        _call("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(mount))
    else:
        image = folder / "disk.img"
        image.write_bytes(b"")
        os.truncate(image, megabytes << 20)
        _call("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image))
        _call("mount", "-o", "loop", str(image), str(mount))
    try:
        yield mount
    finally:
        deadline = time.monotonic() + 10
        while subprocess.run(["umount", str(mount)], stderr=subprocess.DEVNULL, check=False).returncode:
            if time.monotonic() > deadline:
                _call("umount", "-l", str(mount))
                break
            time.sleep(0.1)


def remount(mount: Path, *, read_only: bool) -> None:
    """Changes a mounted filesystem to read-only, as the kernel does after an error, or back."""
    _call("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(mount))


def _call(*command: Sequence[str] | str) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)
