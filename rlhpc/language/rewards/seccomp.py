"""The system calls that a sandboxed program is refused, as a classic BPF program for `seccomp(2)`.

What passes is everything an ordinary computation needs. What is refused is what reaches beyond the process: sockets,
signals to others, tracing, new processes, new namespaces, mounts, kernel keyrings, limits and priorities of others; System V
objects and POSIX queues, which outlive their maker and of which a number or a name is enough to reach another's; writing out
all file systems, and locks on whole files that others read; and, where the files outside are not mounted read-only, changes
of their attributes, which Landlock does not cover.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

#: Stands in the filter for the process id of the program, which only the program's own process knows.
PID_MARK = 0x51D0C0DE

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NUMBERS = """
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
_REACHING_OUT = """
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_open pidfd_getfd
    pidfd_send_signal unshare setns mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick
    mount_setattr open_tree_attr bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl
    add_key request_key personality modify_ldt shmget shmat shmctl semget semop semctl semtimedop msgget msgsnd msgrcv
    msgctl mq_open mq_unlink memfd_create memfd_secret name_to_handle_at open_by_handle_at fanotify_init setpriority
    ioprio_set migrate_pages move_pages socket sync syncfs flock
"""
_ATTRIBUTES = """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr
    fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat truncate file_setattr
"""
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020080
_TRUNCATE, _ACCESS = 0o1000, 0o3
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into somebody's terminal
_SIGNAL_OWNER = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP: I/O signals to any process of the user
_FCNTL_OWNER = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: the same

_LD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16


def _instruction(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, k)


def _refuse(error: int = errno.EPERM) -> bytes:
    return _instruction(_RET, _ERRNO | error)


def numbers(machine: str) -> dict[str, int]:
    """System call numbers of a machine (`os.uname().machine`)."""
    column = _MACHINES[machine][1]
    rows = (entry.split() for line in _NUMBERS.strip().splitlines() for entry in line.split("·"))
    return {name: int(row[column]) for name, *row in rows if row[column] != "-"}


class _Program:
    def __init__(self, machine: str) -> None:
        self.calls = numbers(machine)
        arch = _MACHINES[machine][0]
        self.code = [
            _instruction(_LD, _ARCH_AT), _instruction(_JEQ, arch, 1, 0), _instruction(_RET, _KILL),
            _instruction(_LD, _NUMBER_AT),
        ]  # fmt: skip
        if machine == "x86_64":  # the x32 ABI has numbers of its own for the same calls
            self.code += [_instruction(_JGE, 0x40000000, 0, 1), _refuse(errno.ENOSYS)]

    def refuse(self, names: Iterable[str], error: int = errno.EPERM) -> None:
        for name in names:
            if name in self.calls:
                self.code += [_instruction(_JEQ, self.calls[name], 0, 1), _refuse(error)]

    def inspect(self, names: Iterable[str], argument: int, *body: bytes) -> None:
        """For these calls: `body` looks at the low half of an argument; falling through it allows."""
        for name in names:
            if name in self.calls:
                load = _instruction(_LD, _ARGS_AT + 8 * argument)
                allow = _instruction(_RET, _ALLOW)
                self.code += [_instruction(_JEQ, self.calls[name], 0, len(body) + 2), load, *body, allow]


def _unless(value: int) -> tuple[bytes, bytes]:
    return _instruction(_JEQ, value, 1, 0), _refuse()


def _if_any(values: Iterable[int]) -> list[bytes]:
    return [part for value in values for part in (_instruction(_JEQ, value, 0, 1), _refuse())]


def build(machine: str, *, fork: bool, files_read_only: bool) -> bytes | None:
    """The filter, or None for a machine whose system calls are not known here.

    Args:
        machine: `os.uname().machine`.
        fork: The program may start processes and signal them. Only where a process namespace hides all others.
        files_read_only: The files outside are mounted read-only, so their attributes need no guard.
    """
    if machine not in _MACHINES:
        return None
    program = _Program(machine)
    program.refuse(_REACHING_OUT.split())
    program.refuse(["clone3"], errno.ENOSYS)  # its flags are behind a pointer; the C library falls back to clone
    new = [_instruction(_JSET, _CLONE_NEW, 0, 1), _refuse()]
    if fork:
        program.inspect(["clone"], 0, *new)
    else:
        program.refuse(["fork", "vfork", "tkill"])
        program.inspect(["clone"], 0, *new, _instruction(_JSET, _CLONE_THREAD, 1, 0), _refuse())
        program.inspect(["kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"], 0, *_unless(PID_MARK))
    own = ["prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"]
    program.inspect(own, 0, *_unless(0))
    program.inspect(["prctl"], 0, *_if_any([1]))  # PR_SET_PDEATHSIG: it is what ends the program with its keeper
    program.inspect(["ioctl"], 1, *_if_any([*_TERMINAL_INPUT, *_SIGNAL_OWNER]))
    program.inspect(["fcntl"], 1, *_if_any(_FCNTL_OWNER))
    if not files_read_only:
        program.refuse(_ATTRIBUTES.split())
        program.refuse(["openat2"], errno.ENOSYS)
        # A file opened for reading may be emptied by the same call, which Landlock lets pass before its third version.
        empties = (_instruction(_AND, _TRUNCATE | _ACCESS), _instruction(_JEQ, _TRUNCATE, 0, 1), _refuse())
        program.inspect(["open"], 1, *empties)
        program.inspect(["openat"], 2, *empties)
    program.code.append(_instruction(_RET, _ALLOW))
    return b"".join(program.code)
