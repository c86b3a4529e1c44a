"""Sandbox for untrusted Python programs, without root privileges: no network, no files except the program's, no other
processes, and limits on all resources.

It confines programs by namespaces (a separate root with the interpreter's folders read-only and an empty folder in
memory, no network, no other processes), Landlock, seccomp and resource limits. Not every cluster allows all mechanisms. So a
sandbox tests itself when it is created: a test program attempts forbidden actions, and each action that succeeds is recorded
as a limit that this machine does not enforce.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import math
import os
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.scratch import make_temporary_folder, temporary_folder

log = logging.getLogger(__name__)
MECHANISMS = ("namespaces", "landlock", "seccomp")
_FOLDER = Path(__file__).parent
_BOOT_CODE = (
    "import sys; sys.path.append({!r}); import confine, harness; confine.main(harness, *map(int, sys.argv[1:]))"
)
_SYSTEM_PATHS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_PACKAGES = ("site-packages", "dist-packages")
_MB = 1 << 20
_START_S = 30.0
"""Time limit of the self-test, and of a killed program's exit, in seconds."""
_MAX_RECORD_BYTES = 16 * _MB


@dataclass
class SandboxResult:
    """Result of running a program.

    Attributes:
        status: `ok`; `error` (the program raised, or exited with a code other than 0); `timeout`; `output` (the program wrote
            too much); `killed` (a signal ended it: limits of CPU time and file size, crashes).
        stdout: Standard output, up to the limit.
        stderr: Standard error, up to the limit; contains the traceback of an exception.
        error: Exception that ended the program, as one line.
        checks: Results (`value`, `passed` or `error`) by number of the check; checks that did not run are missing.
        seconds: Wall time, including the start.
        cpu_s: CPU time of the program.
        memory: Peak memory, in bytes.
        have: Mechanisms that confined the program.
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
    """Runner of untrusted programs, each in a separate process. Thread-safe.

    Args:
        wall_s: Maximum wall time of a program.
        cpu_s: Maximum CPU time; None for `wall_s`.
        memory_mb: Maximum address space of a process.
        file_mb: Maximum size of a file.
        disk_mb: Maximum total size of a program's files; enforced only with namespaces, which put its folder in memory.
        output_kb: Maximum size of stdout and of stderr.
        processes: Maximum number of processes, including the program. More than one requires namespaces.
        open_files: Maximum number of open files of a process.
        packages: Whether programs may import installed packages.
        read: Additional folders that programs may read.
        allow_unconfined: Whether to run programs even if this machine cannot enforce some limits.
        mechanisms: Subset of `MECHANISMS` to use.

    Raises:
        ConfigError: This machine cannot confine programs, and `allow_unconfined` is false; the message names the missing
            limits.
    """

    def __init__(
        self,
        *,
        wall_s: float = 5.0,
        cpu_s: float | None = None,
        memory_mb: int = 512,
        file_mb: int = 16,
        disk_mb: int = 64,
        output_kb: int = 256,
        processes: int = 1,
        open_files: int = 64,
        packages: bool = True,
        read: Sequence[str] = (),
        allow_unconfined: bool = False,
        mechanisms: Sequence[str] = MECHANISMS,
    ) -> None:
        unknown_mechanisms = sorted(set(mechanisms) - set(MECHANISMS))
        if unknown_mechanisms:
            raise ConfigError(f"sandbox: mechanisms has {unknown_mechanisms}; allowed: {', '.join(MECHANISMS)}")
        bounds = {
            "wall_s": wall_s,
            "memory_mb": memory_mb,
            "file_mb": file_mb,
            "disk_mb": disk_mb,
            "output_kb": output_kb,
            "processes": processes,
            "open_files": open_files,
        }
        for name, configured_bound in bounds.items():
            if configured_bound <= 0:
                raise ConfigError(f"sandbox: {name} is {configured_bound}; it must be above 0")
        self.wall_s, self.output_bytes = wall_s, output_kb * 1024
        filters = {
            f"{has_mount} {has_processes}": build_seccomp_filter(
                os.uname().machine, allows_fork=has_processes, files_read_only=has_mount
            )
            for has_mount in (False, True)
            for has_processes in (False, True)
        }
        self._job: dict[str, Any] = {
            "cpu_s": math.ceil(cpu_s or wall_s),
            "memory": memory_mb * _MB,
            "file_size": file_mb * _MB,
            "disk": disk_mb * _MB,
            "processes": processes,
            "open_files": open_files,
            "need": [],
            "mechanisms": list(mechanisms),
            "read": readable_paths(read),
            "packages": [path for path in sys.path if packages and Path(path).name in _PACKAGES],
            "filters": {
                name: filter_code.hex() if filter_code and "seccomp" in mechanisms else ""
                for name, filter_code in filters.items()
            },
        }
        self._limits: dict[str, str] = {}
        self._test_limits()
        if unenforced_limits := self.unenforced():
            message = f"this machine does not enforce: {', '.join(unenforced_limits)}"
            if not allow_unconfined:
                raise ConfigError(
                    f"sandbox: {message}. Untrusted programs are not run like this: allow user namespaces "
                    "(sysctl user.max_user_namespaces) or use a kernel with Landlock (5.13), "
                    "or accept the risk with allow_unconfined: true"
                )
            log.warning("sandbox: %s; programs run all the same (allow_unconfined)", message)

    def limits(self) -> dict[str, str]:
        """Returns the mechanisms that enforce each limit, as tested on this machine; "" for a limit that is not enforced."""
        return dict(self._limits)

    def unenforced(self) -> list[str]:
        """Returns the names of the limits that this machine does not enforce. Omits the disk limit, because a program
        without this limit can only fill a disk until the program ends.
        """
        return [name for name, mechanisms in self._limits.items() if not mechanisms and name != "disk"]

    def run(self, source: str, stdin: str = "", wall_s: float | None = None) -> SandboxResult:
        """Runs a program as `__main__` and returns its result. `wall_s` replaces the sandbox's time limit."""
        return self._start_job({"source": source, "setup": "", "checks": [], "main": True}, stdin, wall_s)

    def check(
        self, source: str, checks: Sequence[dict[str, str]], setup: str = "", wall_s: float | None = None
    ) -> SandboxResult:
        """Runs a program as a module, then each check in its namespace; returns the result.

        Args:
            source: The program.
            checks: `{"kind": "value", "source": expression}` returns the encoded value, for comparison outside the sandbox.
                `{"kind": "do" or "script", "source": statements}` reports whether the statements ran without an exception.
                `{"kind": "raises", "source": statements}` returns the exception that ended the statements, with its
                classes, as a value.
            setup: Statements to run between the program and the checks.
            wall_s: Maximum wall time; None for the sandbox's limit.
        """
        return self._start_job({"source": source, "setup": setup, "checks": list(checks), "main": False}, "", wall_s)

    def _start_job(self, job: dict[str, Any], stdin: str, wall_s: float | None) -> SandboxResult:
        start_time = time.monotonic()
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
        (result_read, result_write), (status_read, status_write) = os.pipe(), os.pipe()
        fds = (job_fd, result_write, status_write)
        try:
            # The kernel kills the keeper when the thread that started it ends. This thread waits for the keeper below.
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT_CODE.format(str(_FOLDER)), *map(str, fds), str(os.getpid())],
                stdin=stdin_fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
                cwd="/",
                env=environment(),
                start_new_session=True,
            )
        except BaseException:
            for fd in (result_read, status_read):
                os.close(fd)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            for fd in (*fds, stdin_fd):
                os.close(fd)
        assert keeper.stdout and keeper.stderr
        read_fds = {
            "stdout": keeper.stdout.fileno(),
            "stderr": keeper.stderr.fileno(),
            "result": result_read,
            "status": status_read,
        }
        try:
            run_outcome, outputs = self._collect_result(keeper, read_fds, start_time + (wall_s or self.wall_s))
        finally:
            if keeper.poll() is None:
                _kill(keeper)
                keeper.wait()
            keeper.stdout.close()
            keeper.stderr.close()
            os.close(result_read)
            os.close(status_read)
            shutil.rmtree(folder, ignore_errors=True)
        return _build_result(run_outcome, outputs, nonce, time.monotonic() - start_time)

    def _collect_result(
        self, keeper: subprocess.Popen[bytes], read_fds: dict[str, int], deadline: float
    ) -> tuple[str, dict[str, bytes]]:
        """Reads the outputs until the program has ended and all pipes are closed; kills the program when it exceeds a
        limit. Returns `timeout`, `output` or "", and the outputs by name.
        """
        outputs = dict.fromkeys(read_fds, b"")
        run_outcome, kill_time = "", 0.0
        with selectors.DefaultSelector() as selector:
            for name, fd in read_fds.items():
                selector.register(fd, selectors.EVENT_READ, name)
            while selector.get_map():
                current_time = time.monotonic()
                if not run_outcome and current_time >= deadline:
                    run_outcome = "timeout"
                if run_outcome and not kill_time:
                    kill_time = current_time
                    _kill(keeper)
                if kill_time and current_time > kill_time + _START_S:
                    raise RlhpcError(f"sandbox: process {keeper.pid} cannot be killed; is its file system stuck?")
                for key, _ in selector.select(1.0 if kill_time else max(0.0, deadline - current_time)):
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        selector.unregister(key.fd)
                    max_bytes = self.output_bytes if key.data in ("stdout", "stderr") else _MAX_RECORD_BYTES
                    output = outputs[key.data] + chunk
                    outputs[key.data] = output[:max_bytes]
                    if len(output) > max_bytes and not run_outcome:
                        run_outcome = "output"
        return run_outcome, outputs

    def _test_limits(self) -> None:
        """Runs a program that attempts forbidden actions; records the mechanisms that enforce each limit."""
        with (
            temporary_folder("try") as temporary_path,
            socket.create_server(("127.0.0.1", 0)) as server,
            ipc_objects() as ipc_ids,
        ):
            folder, secret_file = str(temporary_path), temporary_path / "secret"
            secret_file.write_text("secret")
            secret_file.chmod(0o600)
            targets = {
                "port": server.getsockname()[1],
                "pid": os.getpid(),
                "secret": str(secret_file),
                "folder": folder,
                "memory": self._job["memory"],
                "processes": self._job["processes"],
                "ipc": ipc_ids,
            }
            test_source = (_FOLDER / "self_test.py").read_text()
            checks = [{"kind": "value", "source": f"run_attempts({targets!r})"}]
            self_test_result = self.check(test_source, checks, wall_s=_START_S)
        if "value" not in self_test_result.checks.get(0, {}):
            raise RlhpcError(
                f"sandbox: the trial run failed: {self_test_result.status} {self_test_result.error or self_test_result.stderr}"
            )
        mechanisms = self_test_result.have
        self._job["need"] = sorted(name for name in mechanisms if name not in ("user", "mount_error"))
        for name, is_possible in self_test_result.checks[0]["value"]["d"]:
            mechanism_names = [
                _MECHANISM_NAMES[key].format(mechanisms.get(key))
                for key in _MECHANISMS_BY_LIMIT[name]
                if key in mechanisms
            ]
            self._limits[name] = (
                "" if is_possible else ", ".join(mechanism_names) or _DEFAULT_MECHANISMS.get(name, "permissions")
            )
        if not {"pid", "seccomp"} & set(mechanisms):  # child processes would outlive the program
            self._limits["processes"] = ""
        self._limits["disk"] = "size of its folder in memory" if "mount" in mechanisms else ""


_MECHANISM_NAMES = {
    "net": "network namespace", "ipc": "IPC namespace", "pid": "process namespace",
    "mount": "own root, read-only", "seccomp": "seccomp",
    "landlock": "Landlock {}",
}  # fmt: skip
_DEFAULT_MECHANISMS = dict.fromkeys(("processes", "memory", "cpu", "file size", "open files"), "resource limit")
_MECHANISMS_BY_LIMIT = {
    "network": ("net", "seccomp"), "signals": ("pid", "seccomp"), "environments": ("pid", "mount", "landlock"),
    "reading": ("mount", "landlock"), "writing": ("mount", "landlock"), "processes": ("pid", "seccomp"),
    "ipc": ("ipc", "seccomp"), "memory": (), "cpu": (), "file size": (), "open files": (),
}  # fmt: skip


def environment() -> dict[str, str]:
    """Returns the environment variables of a program. The only inherited variable is LD_LIBRARY_PATH."""
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **threads, **libraries}


def readable_paths(extra_folders: Sequence[str]) -> list[str]:
    """Returns the existing folders that a Python program reads: system libraries, interpreter, packages, `extra_folders`."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [*_SYSTEM_PATHS, sys.base_prefix, sys.prefix, sys.exec_prefix, *libraries, *extra_folders]
    paths = (str(Path(path).absolute()) for path in folders if path)
    return [path for path in dict.fromkeys(paths) if os.path.lexists(path) and path != "/"]


def _kill(keeper: subprocess.Popen[bytes]) -> None:
    for kill_function in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill_function(keeper.pid, signal.SIGKILL)


def _parse_records(record_bytes: bytes, nonce: str) -> list[tuple[str, Any]]:
    """Returns the harness's records as (label, payload), in order. A program that knows the nonce may have written all but
    the first record of a run.

    Raises:
        ValueError: The text does not have the harness's format.
    """
    records = []
    for line in record_bytes.split(b"\n")[:-1]:
        record_nonce, _, record = line.decode(errors="replace").partition(" ")
        if record_nonce != nonce:
            continue  # a line without the nonce
        record_type, _, fields = record.partition(" ")
        check_number, _, payload = (
            fields.partition(" ") if record_type in ("value", "passed", "error") else ("", "", fields)
        )
        try:
            records.append((f"{record_type} {int(check_number)}" if check_number else record_type, json.loads(payload)))
        except RecursionError:
            raise ValueError("nested too deep") from None
    return records


def _build_result(run_outcome: str, output_bytes: dict[str, bytes], nonce: str, duration_s: float) -> SandboxResult:
    """Builds the result of a program. The first record shows that the program was confined. The program may have written
    later records, so a malformed or unknown record fails the program and never raises an error of the sandbox.

    Raises:
        RlhpcError: The program could not be confined, and was not run.
    """
    stdout, stderr = (output_bytes[name].decode(errors="replace") for name in ("stdout", "stderr"))
    first_line, line_end, remainder = output_bytes["result"].partition(b"\n")
    start_records = dict(_parse_records(first_line + line_end, nonce))
    if "have" not in start_records and (start_records or not run_outcome):
        reason = start_records.get("failed") or stderr.strip() or "no word from it"
        raise RlhpcError(f"sandbox: the program could not be confined, and was not run: {reason}")
    checks: dict[int, dict[str, Any]] = {}
    processed_labels, error = set(), ""
    try:
        for label, payload in _parse_records(remainder, nonce):
            record_type, _, check_number = label.partition(" ")
            if record_type not in ("end", "value", "passed", "error") or (record_type == "end") == bool(check_number):
                raise ValueError(f"an unknown record {label[:40]!r}")
            if label in processed_labels:
                continue  # written by a process that the program forked
            processed_labels.add(label)
            if record_type == "end":
                error = str(payload)
            else:
                checks.setdefault(int(check_number), {})[record_type] = True if record_type == "passed" else payload
    except ValueError as format_error:
        checks, error = {}, f"it wrote to the channel of its judge: {format_error}"
        run_outcome = run_outcome or "error"
    exit_report = json.loads(output_bytes["status"]) if output_bytes["status"] else {"code": -signal.SIGKILL}
    status = run_outcome or ("ok" if exit_report["code"] == 0 else "killed" if exit_report["code"] < 0 else "error")
    return SandboxResult(
        status,
        stdout,
        stderr,
        error,
        checks,
        duration_s,
        exit_report.get("cpu_s", 0.0),
        exit_report.get("memory", 0),
        start_records.get("have", {}),
    )


_PRIVATE, _REMOVE, _CREATE = 0, 0, 0o100 | 0o2


@contextlib.contextmanager
def ipc_objects() -> Iterator[dict[str, Any]]:
    """Creates a shared-memory segment, a message queue with one message, and a named queue; yields their identifiers.

    A segment or message queue that the kernel does not support has the identifier -1.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(_PRIVATE, ctypes.c_size_t(4096), 0o600)
    segment_address = libc.shmat(segment, None, 0) if segment >= 0 else None
    if segment >= 0:
        libc.shmctl(segment, _REMOVE, None)  # the kernel removes it when this process detaches or ends
    queue = libc.msgget(_PRIVATE, 0o600)
    name = f"/rlhpc-try-{secrets.token_hex(8)}"
    queue_descriptor = libc.mq_open(name.encode(), _CREATE, 0o600, None) if hasattr(libc, "mq_open") else -1
    try:
        if queue >= 0:
            libc.msgsnd(queue, ctypes.c_char_p(bytes([1, *bytes(15)])), ctypes.c_size_t(8), 0)
        yield {"segment": segment, "queue": queue, "name": name}
    finally:
        if segment_address is not None:
            libc.shmdt(ctypes.c_void_p(segment_address))
        if queue >= 0:
            libc.msgctl(queue, _REMOVE, None)
        if queue_descriptor >= 0:
            libc.mq_close(queue_descriptor)
            libc.mq_unlink(name.encode())


#: Placeholder in the filter for the program's process id, which is known only in that process.
PID_MARK = 0x51D0C0DE

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_SYSCALL_TABLE = """
ptrace 101 117 · process_vm_readv 310 270 · process_vm_writev 311 271 · process_madvise 440 440
process_mrelease 448 448 · kcmp 312 272 · pidfd_open 434 434 · pidfd_getfd 438 438 · pidfd_send_signal 424 424
unshare 272 97 · setns 308 268 · mount 165 40 · umount2 166 39 · pivot_root 155 41 · chroot 161 51
move_mount 429 429 · open_tree 428 428 · fsopen 430 430 · fsconfig 431 431 · fsmount 432 432 · fspick 433 433
mount_setattr 442 442 · open_tree_attr 467 467 · bpf 321 280 · perf_event_open 298 241 · userfaultfd 323 282
io_uring_setup 425 425 · io_uring_enter 426 426 · io_uring_register 427 427 · keyctl 250 219 · add_key 248 217
request_key 249 218 · personality 135 92 · modify_ldt 154 - · shmget 29 194 · shmat 30 196 · semget 64 190
msgget 68 186 · mq_open 240 180 · memfd_create 319 279 · memfd_secret 447 447 · name_to_handle_at 303 264
open_by_handle_at 304 265 · fanotify_init 300 262 · setpriority 141 140 · ioprio_set 251 30 · migrate_pages 256 238
move_pages 279 239 · tkill 200 130 · chmod 90 - · fchmod 91 52 · fchmodat 268 53 · fchmodat2 452 452 · chown 92 -
fchown 93 55 · lchown 94 - · fchownat 260 54 · utime 132 - · utimes 235 - · futimesat 261 - · utimensat 280 88
setxattr 188 5 · lsetxattr 189 6 · fsetxattr 190 7 · setxattrat 463 463 · removexattr 197 14 · lremovexattr 198 15
fremovexattr 199 16 · removexattrat 466 466 · truncate 76 45 · file_setattr 469 469 · openat2 437 437 · fork 57 -
vfork 58 - · clone 56 220 · clone3 435 435 · kill 62 129 · tgkill 234 131 · rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240 · prctl 157 167 · prlimit64 302 261 · sched_setaffinity 203 122 · sched_setparam 142 118
sched_setscheduler 144 119 · sched_setattr 314 274 · ioctl 16 29 · fcntl 72 25 · socket 41 198 · open 2 - · openat 257 56
shmctl 31 195 · semop 65 193 · semctl 66 191 · semtimedop 220 192 · msgsnd 69 189 · msgrcv 70 188 · msgctl 71 187
mq_unlink 241 181 · sync 162 81 · syncfs 306 267 · flock 73 32
"""
_FORBIDDEN_CALLS = """
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_open pidfd_getfd
    pidfd_send_signal unshare setns mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick
    mount_setattr open_tree_attr bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl
    add_key request_key personality modify_ldt shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv
    msgctl mq_open mq_unlink memfd_create memfd_secret name_to_handle_at open_by_handle_at fanotify_init setpriority
    ioprio_set migrate_pages move_pages socket sync syncfs flock
"""
_ATTRIBUTE_CALLS = """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr
    fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat truncate file_setattr
"""
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020080
_TRUNCATE, _ACCESS = 0o1000, 0o3
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: insert input into a terminal
_SIGNAL_OWNER = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP: I/O signals to any process of the user
_FCNTL_OWNER = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: the same

_LD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16


def _pack_instruction(opcode: int, k: int, true_jump: int = 0, false_jump: int = 0) -> bytes:
    return struct.pack("HBBI", opcode, true_jump, false_jump, k)


def _refuse(error: int = errno.EPERM) -> bytes:
    return _pack_instruction(_RET, _ERRNO | error)


def syscall_numbers(machine: str) -> dict[str, int]:
    """Returns the system call numbers by name for a machine (`os.uname().machine`)."""
    column = _MACHINES[machine][1]
    rows = (fields.split() for line in _SYSCALL_TABLE.strip().splitlines() for fields in line.split("·"))
    return {name: int(row[column]) for name, *row in rows if row[column] != "-"}


class _FilterBuilder:
    def __init__(self, machine: str) -> None:
        self.calls = syscall_numbers(machine)
        arch = _MACHINES[machine][0]
        self.code = [
            _pack_instruction(_LD, _ARCH_AT),
            _pack_instruction(_JEQ, arch, 1, 0),
            _pack_instruction(_RET, _KILL),
            _pack_instruction(_LD, _NUMBER_AT),
        ]
        if machine == "x86_64":  # the x32 ABI has other numbers for the same calls
            self.code += [_pack_instruction(_JGE, 0x40000000, 0, 1), _refuse(errno.ENOSYS)]

    def refuse(self, names: Iterable[str], error: int = errno.EPERM) -> None:
        for name in names:
            if name in self.calls:
                self.code += [_pack_instruction(_JEQ, self.calls[name], 0, 1), _refuse(error)]

    def inspect(self, names: Iterable[str], argument: int, *body: bytes) -> None:
        """Appends a check of one argument of system calls. `body` tests the low half of the argument; the call is allowed if
        `body` runs to its end.
        """
        for name in names:
            if name in self.calls:
                load_instruction = _pack_instruction(_LD, _ARGS_AT + 8 * argument)
                allow = _pack_instruction(_RET, _ALLOW)
                self.code += [
                    _pack_instruction(_JEQ, self.calls[name], 0, len(body) + 2),
                    load_instruction,
                    *body,
                    allow,
                ]


def _refuse_unless(expected_argument: int) -> tuple[bytes, bytes]:
    return _pack_instruction(_JEQ, expected_argument, 1, 0), _refuse()


def _refuse_if_any(refused_arguments: Iterable[int]) -> list[bytes]:
    return [
        instruction
        for argument in refused_arguments
        for instruction in (_pack_instruction(_JEQ, argument, 0, 1), _refuse())
    ]


def build_seccomp_filter(machine: str, *, allows_fork: bool, files_read_only: bool) -> bytes | None:
    """Builds the seccomp filter of a program; returns None for a machine whose system call numbers are unknown.

    Args:
        machine: `os.uname().machine`.
        allows_fork: Whether the program may start processes and signal them, which requires a process namespace.
        files_read_only: Whether files outside the sandbox are mounted read-only, so that the filter need not protect their
            attributes.
    """
    if machine not in _MACHINES:
        return None
    program = _FilterBuilder(machine)
    program.refuse(_FORBIDDEN_CALLS.split())
    program.refuse(["clone3"], errno.ENOSYS)  # a filter cannot read its flags; the C library then uses clone
    namespace_check = [_pack_instruction(_JSET, _CLONE_NEW, 0, 1), _refuse()]
    if allows_fork:
        program.inspect(["clone"], 0, *namespace_check)
    else:
        program.refuse(["fork", "vfork", "tkill"])
        program.inspect(["clone"], 0, *namespace_check, _pack_instruction(_JSET, _CLONE_THREAD, 1, 0), _refuse())
        program.inspect(["kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"], 0, *_refuse_unless(PID_MARK))
    targeted_calls = ["prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"]
    program.inspect(targeted_calls, 0, *_refuse_unless(0))
    program.inspect(["prctl"], 0, *_refuse_if_any([1]))  # PR_SET_PDEATHSIG ends the program with its keeper
    program.inspect(["ioctl"], 1, *_refuse_if_any([*_TERMINAL_INPUT, *_SIGNAL_OWNER]))
    program.inspect(["fcntl"], 1, *_refuse_if_any(_FCNTL_OWNER))
    if not files_read_only:
        program.refuse(_ATTRIBUTE_CALLS.split())
        program.refuse(["openat2"], errno.ENOSYS)
        # Landlock before version 3 allows a program to truncate a file by opening it read-only with O_TRUNC.
        truncate_check = (
            _pack_instruction(_AND, _TRUNCATE | _ACCESS),
            _pack_instruction(_JEQ, _TRUNCATE, 0, 1),
            _refuse(),
        )
        program.inspect(["open"], 1, *truncate_check)
        program.inspect(["openat"], 2, *truncate_check)
    program.code.append(_pack_instruction(_RET, _ALLOW))
    return b"".join(program.code)
