"""Confinement of a program: drops privileges, then runs the program. It runs in a separate, single-threaded interpreter.

It uses three processes: the *keeper*, which the caller starts and kills; with a process namespace, the *init* process of the
namespace, which takes every process of the namespace with it when it ends; and the *program*. Each process asks the kernel to
kill it when its parent ends.
"""

# This file makes raw system calls, and pathlib would slow down the start.
# ruff: noqa: PTH103, PTH106, PTH102, PTH112, PTH114, PTH115, PTH116, PTH120, PTH123, PTH208, PTH211
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38
_NEW_USER = 0x10000000
_NAMESPACES = {"mount": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000}
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_MOUNT_FLAGS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NOBODY_UID, _INNER_UID = 65534, 1000
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_BOX = "/box"
_PID_MARK = 0x51D0C0DE
_THREADS = 32

Job = dict[str, Any]


def _require_success(result: int, action: str) -> int:
    if result < 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{action}: {os.strerror(errno)}")
    return result


def _call_prctl(prctl_option: int, option_value: int = 0, third: Any = 0) -> int:
    argument = third if not isinstance(third, int) else ctypes.c_ulong(third)
    return int(_libc.prctl(prctl_option, ctypes.c_ulong(option_value), argument, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def _write_file(path: str, file_text: str) -> None:
    with open(path, "w") as file:
        file.write(file_text)


# --- namespaces


def _write_id_maps(keeper: int) -> bytes:
    """Writes the user and group maps of the keeper's namespace. Maps two users if the kernel permits it: root, which makes
    the mounts, and nobody, which runs the program. Otherwise maps root to another id. Returns b"2" for two users, b"1" for
    one user, or b"0" after a failure.
    """
    for rows in (f"0 0 1\n{_NOBODY_UID} {_NOBODY_UID} 1\n", f"{_INNER_UID} 0 1\n"):
        try:
            _write_file(f"/proc/{keeper}/gid_map", rows)
            _write_file(f"/proc/{keeper}/uid_map", rows)
            return b"2" if str(_NOBODY_UID) in rows else b"1"
        except OSError:
            continue
    return b"0"


def _enter_user_namespace() -> int:
    """Enters a user namespace; returns the program's user id in the namespace, or 0 if no namespace is available."""
    keeper, uid, gid = os.getpid(), os.geteuid(), os.getegid()
    if uid:
        if _libc.unshare(_NEW_USER):
            return 0
        try:
            _write_file("/proc/self/setgroups", "deny")
            _write_file("/proc/self/gid_map", f"{_INNER_UID} {gid} 1")
            _write_file("/proc/self/uid_map", f"{_INNER_UID} {uid} 1")
        except OSError:
            return 0
        return _INNER_UID
    (request_read, request_write), (reply_read, reply_write) = os.pipe(), os.pipe()
    helper_pid = os.fork()
    if helper_pid == 0:  # the kernel accepts a map of two rows only from the parent namespace
        os.close(request_write)
        if os.read(request_read, 1):
            os.write(reply_write, _write_id_maps(keeper))
        os._exit(0)
    os.close(reply_write)
    if _libc.unshare(_NEW_USER) == 0:
        os.write(request_write, b"1")
    os.close(request_write)
    identity_code = os.read(reply_read, 1)
    os.waitpid(helper_pid, 0)
    os.close(request_read)
    os.close(reply_read)
    return {b"2": _NOBODY_UID, b"1": _INNER_UID}.get(identity_code, 0)


def _mount(
    source_path: str | None, target: str, filesystem_type: str | None, mount_flags: int, options: str | None = None
) -> None:
    arguments = [
        None if argument is None else argument.encode() for argument in (source_path, target, filesystem_type, options)
    ]
    return_code = _libc.mount(*arguments[:3], ctypes.c_ulong(mount_flags), arguments[3])
    _require_success(return_code, f"mount {target}")


def _list_mounts_below(root: str) -> list[tuple[str, int]]:
    """Returns the mounts below `root` as (mount point, flags)."""
    mounts = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.split(" ")
            mount_point = fields[4]
            for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                mount_point = mount_point.replace(escape, character)
            if mount_point.startswith(root + "/"):
                mount_flags = sum(_MOUNT_FLAGS.get(name, 0) for name in fields[5].split(","))
                mounts.append((mount_point, mount_flags))
    return mounts


def _bind(root: str, path: str) -> None:
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _BIND | _REC)


def _enter_new_root(job: Job, user: int) -> None:
    """Builds and enters a new root with the readable folders (read-only), the devices, and an empty folder in memory."""
    root = job["folder"]
    _mount(None, "/", None, _PRIVATE | _REC)
    _mount("none", root, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m,nr_inodes=10k")
    for path in (*job["read"], *_DEVICES):
        if os.path.lexists(path) and not os.path.lexists(root + path):
            _bind(root, path)
    for mount_point, flags in _list_mounts_below(root):
        _mount(None, mount_point, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | flags)
    os.mkdir(root + _BOX)
    options = f"mode=700,uid={user},gid={user},size={job['disk']},nr_inodes=4k"
    _mount("none", root + _BOX, "tmpfs", _NOSUID | _NODEV, options)
    os.mkdir(root + "/proc")
    try:
        _mount("proc", root + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    except OSError:
        os.rmdir(root + "/proc")  # the mount fails in containers that hide parts of /proc; programs do not need /proc
    os.chdir(root)
    _require_success(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _require_success(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")
    _mount(None, "/", None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV)


# --- Landlock


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


_READ, _READ_FOLDER, _EXECUTE, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 0, 1 << 1, 1 << 14
_MAKE_DEVICES = (1 << 6) | (1 << 11)  # character and block


def landlock_version() -> int:
    """Returns the Landlock version of this kernel; 0 if there is no Landlock."""
    return max(0, int(_libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def _apply_landlock(box: str, readable_paths: list[str]) -> int:
    """Restricts this process with Landlock; returns Landlock's version, or 0 if there is no Landlock. The process may read
    `readable_paths` and fully access `box`. Version 4 also forbids TCP; version 6 also forbids signals and abstract sockets to
    other processes.
    """
    version = landlock_version()
    if not version:
        return 0
    all_rights = (1 << (13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16)) - 1
    ruleset_attributes = _Ruleset(all_rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    attribute_size = ctypes.c_size_t(8 if version < 4 else 16 if version < 6 else 24)
    ruleset_fd = _require_success(
        int(_libc.syscall(444, ctypes.byref(ruleset_attributes), attribute_size, ctypes.c_uint32(0))), "landlock"
    )
    for path, access_rights in [
        *((path, _READ | _READ_FOLDER | _EXECUTE) for path in readable_paths),
        *((path, _READ | _WRITE_FILE | _TRUNCATE) for path in _DEVICES),
        (box, all_rights & ~_MAKE_DEVICES),
    ]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            access_rights &= _READ | _EXECUTE | _WRITE_FILE | _TRUNCATE
        path_rule = struct.pack("=Qi", access_rights & all_rights, fd)
        return_code = _libc.syscall(445, ruleset_fd, 1, ctypes.c_char_p(path_rule), ctypes.c_uint32(0))
        _require_success(int(return_code), f"landlock {path}")
        os.close(fd)
    _require_success(int(_libc.syscall(446, ruleset_fd, ctypes.c_uint32(0))), "landlock")
    os.close(ruleset_fd)
    return version


# --- seccomp, capabilities, limits


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _apply_seccomp(filter_hex: str) -> bool:
    filter_code = bytes.fromhex(filter_hex).replace(struct.pack("I", _PID_MARK), struct.pack("I", os.getpid()))
    buffer = ctypes.create_string_buffer(filter_code, len(filter_code))
    program = _FilterProgram(len(filter_code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    return _call_prctl(_SECCOMP, 2, ctypes.byref(program)) == 0


def _drop_capabilities() -> None:
    for capability in range(64):
        _call_prctl(_CAPBSET_DROP, capability)
    header, no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _require_success(_libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(no_capabilities)), "capset")


def _count_threads(uid: int) -> int:
    """Returns the number of a user's threads on this machine. RLIMIT_NPROC counts all these threads if the kernel does not
    count per user namespace.
    """
    num_threads = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    num_threads += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return num_threads


def _set_limits(job: Job, num_threads: int) -> None:
    for name, soft_limit, hard_limit in (
        ("CPU", job["cpu_s"], job["cpu_s"] + 1),
        ("AS", job["memory"], job["memory"]),
        ("CORE", 0, 0),
        ("FSIZE", job["file_size"], job["file_size"]),
        ("NOFILE", job["open_files"], job["open_files"]),
        ("NPROC", num_threads, num_threads),
        ("MEMLOCK", 0, 0),
        ("MSGQUEUE", 0, 0),
    ):
        resource_id = getattr(resource, f"RLIMIT_{name}")
        max_value = resource.getrlimit(resource_id)[1]
        resource_limits = (
            (soft_limit, hard_limit)
            if max_value == resource.RLIM_INFINITY
            else (min(soft_limit, max_value), min(hard_limit, max_value))
        )
        resource.setrlimit(resource_id, resource_limits)


# --- the three processes


def _end_with_parent(parent: int, lifeline: int) -> None:
    """Makes the kernel kill this process when its parent ends; exits at once if the parent has already ended."""
    _call_prctl(_PDEATHSIG, signal.SIGKILL)
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    if poller.poll(0) or os.getppid() not in (0, parent):
        os._exit(1)


def _wait_for_child(child: int, status: int) -> None:
    """Waits for the child, reports its exit if `status` is a descriptor, and exits. If this process is the init of a
    namespace, its exit ends all processes of the namespace.
    """
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    _call_prctl(_DUMPABLE, 0)
    while True:
        pid, wait_status, usage = os.wait4(-1, 0)
        if pid == child:
            if status >= 0:
                exit_report = {"code": os.waitstatus_to_exitcode(wait_status), "cpu_s": usage.ru_utime + usage.ru_stime}
                os.write(status, json.dumps({**exit_report, "memory": usage.ru_maxrss * 1024}).encode())
            os._exit(0)


def _run_program(
    harness: Any,
    job: Job,
    mechanisms: dict[str, str],
    user: int,
    num_threads: int,
    parent: int,
    lifeline: int,
    result: int,
) -> None:
    """Confines this process, then runs the job's program in it."""
    with contextlib.suppress(OSError):
        _write_file("/proc/self/oom_score_adj", "1000")
    box = _BOX if "mount" in mechanisms else job["folder"]
    readable_paths = [*job["read"], *(["/proc"] if "mount" in mechanisms else [])]
    _set_limits(job, num_threads)
    if (
        user == _NOBODY_UID and "mount" in mechanisms
    ):  # without the mount, user nobody may not be able to read the interpreter
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _drop_capabilities()
    _end_with_parent(parent, lifeline)  # after the change of user, which resets this setting
    os.close(lifeline)
    os.chdir(box)
    os.umask(0o077)
    _require_success(_call_prctl(_NO_NEW_PRIVS, 1), "no_new_privs")
    if "landlock" in job["mechanisms"] and (version := _apply_landlock(box, readable_paths)):
        mechanisms["landlock"] = str(version)
    # Signals are allowed only if a process namespace hides all other processes.
    filter_hex = job["filters"][f"{'mount' in mechanisms} {'pid' in mechanisms and job['processes'] > 1}"]
    if filter_hex and _apply_seccomp(filter_hex):
        mechanisms["seccomp"] = "yes"
    missing_mechanisms = sorted(set(job["need"]) - set(mechanisms))
    if missing_mechanisms:
        raise OSError(f"{', '.join(missing_mechanisms)} could be had before, but not now")
    # The first record; the program may forge later records.
    harness.write_record(result, job["nonce"], "have", mechanisms)
    os.environ.update(HOME=box, TMPDIR=box)
    harness.run(job, result)


def main(harness: Any, job_fd: int, result: int, status: int, caller: int) -> None:
    """Runs the keeper. `harness` is the module `harness` of this folder; it is an argument because this interpreter cannot
    import it from a package.
    """
    _call_prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != caller:
        os._exit(1)
    with os.fdopen(job_fd, "rb") as file:
        job: Job = json.loads(file.read())
    mechanisms: dict[str, str] = {}
    user = 0
    uid, has_namespace_count = (
        os.geteuid(),
        tuple(int(n) for n in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14),
    )
    if "namespaces" in job["mechanisms"]:
        user = _enter_user_namespace()
        if user:
            mechanisms["user"] = str(user)
            mechanisms |= {
                name: "yes" for name, namespace_flag in _NAMESPACES.items() if _libc.unshare(namespace_flag) == 0
            }
        if "pid" not in mechanisms:
            mechanisms.pop("mount", None)  # the namespace's init builds the new root
    threads = job["processes"] + _THREADS + (3 if user and has_namespace_count else _count_threads(uid))
    keeper, (lifeline, lifeline_write) = os.getpid(), os.pipe()
    child = os.fork()
    if child:
        os.close(lifeline)
        os.close(result)
        _wait_for_child(child, -1 if "pid" in mechanisms else status)
    os.close(lifeline_write)
    if "pid" in mechanisms:
        _end_with_parent(keeper, lifeline)
        if "mount" in mechanisms:
            try:
                _enter_new_root(job, user)
            except OSError as error:
                _libc.umount2(job["folder"].encode(), _DETACH)
                del mechanisms["mount"]
                mechanisms["mount_error"] = str(error)
        keeper, (inner_lifeline, lifeline_write) = os.getpid(), os.pipe()
        child = os.fork()
        if child:
            os.close(inner_lifeline)
            os.close(result)
            _wait_for_child(child, status)
        os.close(lifeline_write)
        os.close(lifeline)
        lifeline = inner_lifeline
    os.close(status)
    try:
        _run_program(harness, job, mechanisms, user, threads, keeper, lifeline, result)
    except BaseException as error:
        harness.write_record(result, job["nonce"], "failed", f"{type(error).__name__}: {error}")
    os._exit(1)
