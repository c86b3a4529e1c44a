"""Runs untrusted Python without root: no network, no files but its own, no other process, and bounds on all it uses.

What confines a program: namespaces (a root of its own with the interpreter's folders read-only and an empty folder in
memory, no network, no other processes), Landlock, seccomp and resource limits. Clusters differ in what they allow, so a
sandbox tries itself when it is made: a program attempts what it must not be able to do, and what succeeds is not enforced.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.language.rewards import ipc, seccomp
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.scratch import make_temporary_folder, temporary_folder

log = logging.getLogger(__name__)
MECHANISMS = ("namespaces", "landlock", "seccomp")
_INSIDE = Path(__file__).parent / "inside"
_BOOT = "import sys; sys.path.append({!r}); import confine, harness; confine.main(harness, *map(int, sys.argv[1:]))"
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_PACKAGES = ("site-packages", "dist-packages")
_MB = 1 << 20
_START_S = 30.0
"""Most time of the trial run, and of a killed program to be gone."""
_MOST_TOLD = 16 * _MB


@dataclass
class SandboxResult:
    """How a program ended.

    Attributes:
        status: `ok`; `error` (it raised, or exited with another code than 0); `timeout`; `output` (it wrote too much);
            `killed` (by a signal: limits of CPU time and file size, crashes).
        stdout: What it wrote, up to the cap.
        stderr: The same; a traceback where it raised.
        error: The exception it ended with, as one line.
        checks: By number, what each check gave: `value`, `passed` or `error`. Those that were not reached are missing.
        seconds: Wall time, the start included.
        cpu_s: CPU time of the program.
        memory: Its peak, in bytes.
        have: What confined it.
    """

    status: str = "killed"
    stdout: str = ""
    stderr: str = ""
    error: str = ""
    checks: dict[int, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_s: float = 0.0
    memory: int = 0
    have: dict[str, str] = field(default_factory=dict)


class Sandbox:
    """Runs programs, each in a process of its own. Thread-safe.

    Args:
        wall_s: Most wall time of a program.
        cpu_s: Most CPU time; None takes `wall_s`.
        memory_mb: Most address space of a process.
        file_mb: Largest file.
        disk_mb: All its files together, where its folder is in memory (with namespaces).
        output_kb: Most that it may write to stdout and stderr, each.
        processes: Most processes, itself included. More than one needs namespaces.
        open_files: Most open files of a process.
        packages: Whether it may import what is installed beside Python.
        read: Further folders that it may read.
        allow_unconfined: Run although something cannot be enforced here.
        mechanisms: What to use of `MECHANISMS`.

    Raises:
        ConfigError: This machine cannot confine programs, and `allow_unconfined` is not given; names what is missing.
    """

    def __init__(
        self, *, wall_s: float = 5.0, cpu_s: float | None = None, memory_mb: int = 512, file_mb: int = 16, disk_mb: int = 64,
        output_kb: int = 256, processes: int = 1, open_files: int = 64, packages: bool = True, read: Sequence[str] = (),
        allow_unconfined: bool = False, mechanisms: Sequence[str] = MECHANISMS,
    ) -> None:  # fmt: skip
        unknown = sorted(set(mechanisms) - set(MECHANISMS))
        if unknown:
            raise ConfigError(f"sandbox: mechanisms has {unknown}; allowed: {', '.join(MECHANISMS)}")
        bounds = {"wall_s": wall_s, "memory_mb": memory_mb, "file_mb": file_mb, "disk_mb": disk_mb,
                  "output_kb": output_kb, "processes": processes, "open_files": open_files}  # fmt: skip
        for name, value in bounds.items():
            if value <= 0:
                raise ConfigError(f"sandbox: {name} is {value}; it must be above 0")
        self.wall_s, self.output_bytes = wall_s, output_kb * 1024
        filters = {
            f"{mounted} {several}": seccomp.build(os.uname().machine, fork=several, files_read_only=mounted)
            for mounted in (False, True)
            for several in (False, True)
        }
        self._job: dict[str, Any] = {
            "cpu_s": math.ceil(cpu_s or wall_s), "memory": memory_mb * _MB, "file_size": file_mb * _MB,
            "disk": disk_mb * _MB, "processes": processes, "open_files": open_files, "need": [],
            "mechanisms": list(mechanisms), "read": readable(read),
            "packages": [path for path in sys.path if packages and Path(path).name in _PACKAGES],
            "filters": {name: code.hex() if code and "seccomp" in mechanisms else "" for name, code in filters.items()},
        }  # fmt: skip
        self._limits: dict[str, str] = {}
        self._try_out()
        missing = self.unenforced()
        if missing:
            told = f"this machine does not enforce: {', '.join(missing)}"
            if not allow_unconfined:
                raise ConfigError(
                    f"sandbox: {told}. Untrusted programs are not run like this: allow user namespaces "
                    "(sysctl user.max_user_namespaces) or use a kernel with Landlock (5.13), "
                    "or accept the risk with allow_unconfined: true"
                )
            log.warning("sandbox: %s; programs run all the same (allow_unconfined)", told)

    def limits(self) -> dict[str, str]:
        """What is enforced, and by what, as tried here; "" for what is not."""
        return dict(self._limits)

    def unenforced(self) -> list[str]:
        """Names of the limits that do not hold here. A bound on all files together is not counted: it only fills a disk
        until the program ends."""
        return [name for name, how in self._limits.items() if not how and name != "disk"]

    def run(self, source: str, stdin: str = "", wall_s: float | None = None) -> SandboxResult:
        """Runs a program, as `__main__`."""
        return self._start({"source": source, "setup": "", "checks": [], "main": True}, stdin, wall_s)

    def check(
        self, source: str, checks: Sequence[dict[str, str]], setup: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """Runs a program as a module, then each check in its namespace.

        Args:
            source: The program.
            checks: `{"kind": "value", "source": expression}`: its value comes back, encoded, to be compared out here.
                `{"kind": "do" or "script", "source": statements}`: whether they ran without an exception.
                `{"kind": "raises", "source": statements}`: the exception that they ended with, and its classes, as a value.
            setup: Statements to run between the two.
            wall_s: Most wall time, instead of the sandbox's own.
        """
        return self._start({"source": source, "setup": setup, "checks": list(checks), "main": False}, "", wall_s)

    def _start(self, job: dict[str, Any], stdin: str, wall_s: float | None) -> SandboxResult:
        started = time.monotonic()
        folder = str(make_temporary_folder("box"))
        nonce = secrets.token_hex(16)
        job_fd = os.memfd_create("job")
        with open(job_fd, "wb", closefd=False) as file:
            file.write(json.dumps({**self._job, **job, "nonce": nonce, "folder": folder}).encode())
        os.lseek(job_fd, 0, os.SEEK_SET)
        stdin_fd = os.memfd_create("stdin") if stdin else os.open(os.devnull, os.O_RDONLY)
        if stdin:
            with open(stdin_fd, "wb", closefd=False) as file:
                file.write(stdin.encode())
            os.lseek(stdin_fd, 0, os.SEEK_SET)
        (result, result_in), (status, status_in) = os.pipe(), os.pipe()
        given = (job_fd, result_in, status_in)
        try:
            # The keeper asks to be killed with the thread that started it: this one, which waits for it below.
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT.format(str(_INSIDE)), *map(str, given), str(os.getpid())],
                stdin=stdin_fd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=given, cwd="/",
                env=environment(), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            for fd in (result, status):
                os.close(fd)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            for fd in (*given, stdin_fd):
                os.close(fd)
        assert keeper.stdout and keeper.stderr
        reading = {
            "stdout": keeper.stdout.fileno(),
            "stderr": keeper.stderr.fileno(),
            "result": result,
            "status": status,
        }
        try:
            outcome, texts = self._collect(keeper, reading, started + (wall_s or self.wall_s))
        finally:
            _end(keeper)
            keeper.stdout.close()
            keeper.stderr.close()
            os.close(result)
            os.close(status)
            shutil.rmtree(folder, ignore_errors=True)
        return _result(outcome, texts, nonce, time.monotonic() - started)

    def _collect(
        self, keeper: subprocess.Popen[bytes], reading: dict[str, int], deadline: float
    ) -> tuple[str, dict[str, bytes]]:
        """Reads until all ends are closed, which is when the program is gone; kills it when it is over a bound."""
        texts = dict.fromkeys(reading, b"")
        outcome, killed_at = "", 0.0
        with selectors.DefaultSelector() as selector:
            for name, fd in reading.items():
                selector.register(fd, selectors.EVENT_READ, name)
            while selector.get_map():
                now = time.monotonic()
                if not outcome and now >= deadline:
                    outcome = "timeout"
                if outcome and not killed_at:
                    killed_at = now
                    _kill(keeper)
                if killed_at and now > killed_at + _START_S:
                    raise RlhpcError(f"sandbox: process {keeper.pid} cannot be killed; is its file system stuck?")
                for key, _ in selector.select(1.0 if killed_at else max(0.0, deadline - now)):
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fd)
                    most = self.output_bytes if key.data in ("stdout", "stderr") else _MOST_TOLD
                    whole = texts[key.data] + part
                    texts[key.data] = whole[:most]
                    if len(whole) > most and not outcome:
                        outcome = "output"
        return outcome, texts

    def _try_out(self) -> None:
        """Lets a program attempt what it must not, and notes what stopped it."""
        with (
            temporary_folder("try") as place,
            socket.create_server(("127.0.0.1", 0)) as server,
            ipc.objects() as reached,
        ):
            folder, secret = str(place), place / "secret"
            secret.write_text("secret")
            secret.chmod(0o600)
            known = {"port": server.getsockname()[1], "pid": os.getpid(), "secret": str(secret), "folder": folder,
                     "memory": self._job["memory"], "processes": self._job["processes"], "ipc": reached}  # fmt: skip
            source = (_INSIDE / "attempts.py").read_text()
            checks = [{"kind": "value", "source": f"attempts({known!r})"}]
            result = self._start({"source": source, "setup": "", "checks": checks, "main": False}, "", _START_S)
        if "value" not in result.checks.get(0, {}):
            raise RlhpcError(f"sandbox: the trial run failed: {result.status} {result.error or result.stderr}")
        have = result.have
        self._job["need"] = sorted(name for name in have if name not in ("user", "mount_error"))
        for name, through in result.checks[0]["value"]["d"]:
            ways = [_WAYS[key].format(have.get(key)) for key in _STOPS[name] if key in have]
            self._limits[name] = "" if through else ", ".join(ways) or _ELSE.get(name, "permissions")
        if not {"pid", "seccomp"} & set(have):  # those it started would outlive it
            self._limits["processes"] = ""
        self._limits["disk"] = "size of its folder in memory" if "mount" in have else ""


_WAYS = {
    "net": "network namespace", "ipc": "IPC namespace", "pid": "process namespace",
    "mount": "own root, read-only", "seccomp": "seccomp",
    "landlock": "Landlock {}",
}  # fmt: skip
_ELSE = dict.fromkeys(("processes", "memory", "cpu", "file size", "open files"), "resource limit")
_STOPS = {
    "network": ("net", "seccomp"), "signals": ("pid", "seccomp"), "environments": ("pid", "mount", "landlock"),
    "reading": ("mount", "landlock"), "writing": ("mount", "landlock"), "processes": ("pid", "seccomp"),
    "ipc": ("ipc", "seccomp"), "memory": (), "cpu": (), "file size": (), "open files": (),
}  # fmt: skip


def environment() -> dict[str, str]:
    """What a program sees of the environment: nothing of ours, but where the interpreter's libraries are."""
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **threads, **libraries}


def readable(further: Sequence[str]) -> list[str]:
    """Folders that a Python program reads: the system's libraries, the interpreter and its packages."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [*_SYSTEM, sys.base_prefix, sys.prefix, sys.exec_prefix, *libraries, *further]
    whole = (str(Path(path).absolute()) for path in folders if path)
    return [path for path in dict.fromkeys(whole) if os.path.lexists(path) and path != "/"]


def _kill(keeper: subprocess.Popen[bytes]) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(keeper.pid, signal.SIGKILL)


def _end(keeper: subprocess.Popen[bytes]) -> None:
    if keeper.poll() is None:
        _kill(keeper)
        keeper.wait()


def _records(text: bytes, nonce: str) -> list[tuple[str, Any]]:
    """What the harness wrote, in order. From the second on, a program that knows the nonce may have written it.

    Raises:
        ValueError: It is not what the harness writes.
    """
    found = []
    for line in text.split(b"\n")[:-1]:
        begin, _, told = line.decode(errors="replace").partition(" ")
        if begin != nonce:
            continue  # not even the nonce
        kind, _, rest = told.partition(" ")
        number, _, payload = rest.partition(" ") if kind in ("value", "passed", "error") else ("", "", rest)
        try:
            found.append((f"{kind} {int(number)}" if number else kind, json.loads(payload)))
        except RecursionError:
            raise ValueError("nested too deep") from None
    return found


def _result(outcome: str, texts: dict[str, bytes], nonce: str, seconds: float) -> SandboxResult:
    """What became of a program. It was confined where the first record says so; then all that follows is its own doing,
    and what is malformed or forged makes it a program that failed, never one that could not be judged."""
    stdout, stderr = (texts[name].decode(errors="replace") for name in ("stdout", "stderr"))
    first, mark, rest = texts["result"].partition(b"\n")
    began = dict(_records(first + mark, nonce))
    if "have" not in began and (began or not outcome):
        why = began.get("failed") or stderr.strip() or "no word from it"
        raise RlhpcError(f"sandbox: the program could not be confined, and was not run: {why}")
    checks: dict[int, dict[str, Any]] = {}
    told, error = set(), ""
    try:
        for what, payload in _records(rest, nonce):
            kind, _, number = what.partition(" ")
            if kind not in ("end", "value", "passed", "error") or (kind == "end") == bool(number):
                raise ValueError(f"an unknown record {what[:40]!r}")
            if what in told:
                continue  # a process that the program forked has come this far, too
            told.add(what)
            if kind == "end":
                error = str(payload)
            else:
                checks.setdefault(int(number), {})[kind] = True if kind == "passed" else payload
    except ValueError as fault:
        checks, error = {}, f"it wrote to the channel of its judge: {fault}"
        outcome = outcome or "error"
    end = json.loads(texts["status"]) if texts["status"] else {"code": -signal.SIGKILL}
    status = outcome or ("ok" if end["code"] == 0 else "killed" if end["code"] < 0 else "error")
    return SandboxResult(
        status, stdout, stderr, error, checks, seconds, end.get("cpu_s", 0.0), end.get("memory", 0),
        began.get("have", {}),
    )  # fmt: skip
