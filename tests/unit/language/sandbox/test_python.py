"""The filter of system calls, run by an interpreter of its instructions: for machines that the tests do not run on, too."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from rlhpc.language.sandbox import python

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PID = 4242
ALLOW = 0


def verdict(code: bytes, machine: str, number: int, arguments: tuple[int, ...] = (), arch: int | None = None) -> int:
    """0 where the call passes, its errno where it is refused, -1 where the process is killed."""
    arguments = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack(
        "=IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *(a % (1 << 64) for a in arguments)
    )
    program = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    at, register = 0, 0
    while True:
        operation, yes, no, k = program[at]
        k = PID if k == python.PID_MARK else k
        at += 1
        match operation:
            case 0x20:
                (register,) = struct.unpack_from("=I", data, k)
            case 0x54:
                register &= k
            case 0x15:
                at += yes if register == k else no
            case 0x35:
                at += yes if register >= k else no
            case 0x45:
                at += yes if register & k else no
            case 0x06:
                return {0x7FFF0000: ALLOW, 0x00050000: k & 0xFFFF, 0x80000000: -1}[k & 0xFFFF0000]
            case _:
                raise AssertionError(f"unknown operation {operation:#x}")


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request) -> str:
    return request.param


def calls(machine: str, **given):
    code = python.build_seccomp_filter(machine, **{"allows_fork": False, "files_read_only": False, **given})
    assert code is not None
    numbers = python.syscall_numbers(machine)
    return lambda name, *arguments: verdict(code, machine, numbers[name], arguments)


def test_what_reaches_out_is_refused(machine):
    call = calls(machine)
    for name in (
        "socket",
        "ptrace",
        "process_vm_writev",
        "mount",
        "bpf",
        "keyctl",
        "shmget",
        "unshare",
        "io_uring_setup",
        *(
            "shmctl",
            "semop",
            "semctl",
            "semtimedop",
            "msgsnd",
            "msgrcv",
            "msgctl",
            "mq_unlink",
        ),  # by a number or a name
        *("sync", "syncfs", "flock"),
    ):
        assert call(name) == errno.EPERM, name
    assert call("clone3") == errno.ENOSYS


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [("x86_64", (31, 65, 66, 220, 69, 70, 71, 241)), ("aarch64", (195, 193, 191, 192, 189, 188, 187, 181))],
)
def test_numbers_of_messages_and_semaphores(architecture, wanted):
    """As in the kernel's tables."""
    names = ("shmctl", "semop", "semctl", "semtimedop", "msgsnd", "msgrcv", "msgctl", "mq_unlink")
    assert tuple(python.syscall_numbers(architecture)[name] for name in names) == wanted


def test_what_a_computation_needs_passes(machine):
    code = python.build_seccomp_filter(machine, allows_fork=False, files_read_only=False)
    plain = {"x86_64": (0, 1, 3, 9, 11, 12, 39, 53, 202, 231), "aarch64": (63, 64, 57, 222, 215, 214, 172, 199, 98, 94)}
    for number in plain[machine]:  # read, write, close, mmap, munmap, brk, getpid, socketpair, futex, exit_group
        assert verdict(code, machine, number) == ALLOW


def test_threads_but_no_processes(machine):
    threads, child = 0x3D0F00, 17  # what the C library asks for a thread, and for a child
    call = calls(machine)
    assert call("clone", threads) == ALLOW and call("clone", child) == errno.EPERM
    several = calls(machine, allows_fork=True)
    assert several("clone", child) == ALLOW and several("clone", 0x10000000 | child) == errno.EPERM
    assert call("clone", 0x20000000 | threads) == errno.EPERM
    if machine == "x86_64":
        assert call("fork") == call("vfork") == errno.EPERM and several("fork") == ALLOW


def test_signals_to_itself_only(machine):
    call = calls(machine)
    for name in ("kill", "tgkill", "rt_sigqueueinfo"):
        assert call(name, PID, 9) == ALLOW
        for other in (1, 0, -1, PID + 1):
            assert call(name, other, 9) == errno.EPERM, (name, other)
    assert calls(machine, allows_fork=True)("kill", 1, 9) == ALLOW


def test_limits_and_priorities_of_others(machine):
    call = calls(machine)
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler"):
        assert call(name, 0) == ALLOW and call(name, 1) == errno.EPERM
    assert call("prctl", 1, 0) == errno.EPERM and call("prctl", 15) == ALLOW
    assert call("ioctl", 0, 0x5412) == errno.EPERM and call("ioctl", 0, 0x5413) == ALLOW
    assert call("fcntl", 3, 8, 1) == errno.EPERM and call("fcntl", 3, 1) == ALLOW


def test_files_where_they_are_not_mounted_read_only(machine):
    call, mounted = calls(machine), calls(machine, files_read_only=True)
    for name in ("fchmod", "fchownat", "utimensat", "truncate", "fsetxattr", "fchmodat2"):
        assert call(name) == errno.EPERM and mounted(name) == ALLOW, name
    assert call("openat", 0, 0, os.O_RDONLY | os.O_TRUNC) == errno.EPERM
    assert call("openat", 0, 0, os.O_WRONLY | os.O_TRUNC | os.O_CREAT) == ALLOW and call("openat", 0, 0, 0) == ALLOW


def test_other_abis(machine):
    code = python.build_seccomp_filter(machine, allows_fork=False, files_read_only=False)
    assert verdict(code, machine, 1, arch=0x40000003) == -1  # i386
    if machine == "x86_64":
        assert verdict(code, machine, 0x40000000 | 41) == errno.ENOSYS  # x32
    assert python.build_seccomp_filter("riscv64", allows_fork=False, files_read_only=False) is None
