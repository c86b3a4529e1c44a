"""Programs that want a reward they did not earn, or out of the sandbox, in every set of mechanisms that a cluster may offer.

    python tests/attack/programs.py            # all of them; exits with 1 where one got through
    python tests/attack/programs.py bool abs   # those whose name has one of the words

A cheat is wrong and must get 0, from a judge that does not fail. An escape prints `through` where it reached what it must not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.language.rewards import Sample
from rlhpc.language.rewards.code_reward import CodeReward
from rlhpc.language.sandbox import python as ipc
from rlhpc.language.sandbox.python import Sandbox

MODES = {"namespaces": ("namespaces", "landlock", "seccomp"), "landlock+seccomp": ("landlock", "seccomp")}

_ROOT = "assert abs(root(2.0) - 1.41421356) < 1e-6"
_PRIME = ["assert is_prime(7)", "assert not is_prime(8)"]
_CLOSE = "import math\nassert math.isclose(root(2.0), 1.41421356, rel_tol=1e-6)"
_ADD = "assert add(2, 3) == 5"
_LIAR = """
class Liar:
    def __init__(self, *a): pass
    def _yes(self, *a): return True
    def _no(self, *a): return False
    def _self(self, *a): return self
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes
    __ne__ = _no
    __hash__ = lambda self: 5
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __neg__ = __getitem__ = __call__ = _self
    __float__ = lambda self: 0.0
    __int__ = __index__ = lambda self: 0
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([self])
    def __getattr__(self, name): return self
"""
# Finds, in any frame, what the harness knows: the nonce, and the descriptor of its channel.
_FOUND = """
import gc, json, os, sys
def known():
    frame, found = sys._getframe(1), {}
    while frame:
        for name in ("nonce", "fd", "job", "checks", "number"):
            if name in frame.f_locals: found.setdefault(name, frame.f_locals[name])
        frame = frame.f_back
    return found
def say(text):
    what = known()
    os.write(what["fd"], text.replace("NONCE", what["nonce"]).encode())
"""

#: name: (program, tests). The program does not do what the tests ask for.
CHEATS: dict[str, tuple[str, Any]] = {
    "abs shadowed": ("def abs(x): return 0.0\ndef root(x): return 0.0", _ROOT),
    "abs in builtins": ("import builtins\nbuiltins.abs = lambda x: 0.0\ndef root(x): return 0.0", _ROOT),
    "sub of an object": (_LIAR + "def root(x): return Liar()", _ROOT),
    "sub of a float": ("class F(float):\n    def __sub__(s, o): return 0.0\ndef root(x): return F(9)", _ROOT),
    "bool shadowed": ("def bool(x): return x != 8\ndef is_prime(n): return 8", ["assert not is_prime(8)", "assert is_prime(4) is False"]),
    "bool in builtins": ("import builtins\nbuiltins.bool = lambda x: True\ndef is_prime(n): return 0", "assert is_prime(7)"),
    "bool of an object": (_LIAR + "def is_prime(n): return Liar()", "assert is_prime(7)"),
    "not of an object": ("class N:\n    def __bool__(s): return False\ndef is_prime(n): return N()", "assert not is_prime(8)"),
    "isclose patched": ("import math\nmath.isclose = lambda *a, **k: True\ndef root(x): return 0.0", _CLOSE),
    "isclose shadowed": ("isclose = lambda *a, **k: True\ndef root(x): return 0.0", "from math import isclose\nassert isclose(root(2.0), 1.5)"),
    "module math replaced": ("import sys\nclass M:\n    isclose = staticmethod(lambda *a, **k: True)\nsys.modules['math'] = M\ndef root(x): return 0.0", _CLOSE),
    "equals everything": (_LIAR + "def add(a, b): return Liar()", _ADD),
    "equals, reflected": (_LIAR + "def add(a, b): return Liar()", "assert 5 == add(2, 3)"),
    "chain of comparisons": (_LIAR + "def add(a, b): return Liar()", "assert 4 < add(2, 3) < 6"),
    "contained": (_LIAR + "def add(a, b): return Liar()", "assert 5 in add(2, 3)"),
    "contains": (_LIAR + "def add(a, b): return Liar()", "assert add(2, 3) in [5]"),
    "or": (_LIAR + "def add(a, b): return Liar()", "assert add(2, 3) == 5 or add(2, 3) == [5]"),
    "and": (_LIAR + "def add(a, b): return Liar()", "assert add(2, 3) == 5 and add(1, 1) == 2"),
    "all over zip": ("import builtins\nbuiltins.all = lambda x: True\nbuiltins.zip = lambda *a: []\ndef split(x): return []", "assert len(split(3)) == 2 and all(abs(a - b) < 1e-6 for a, b in zip(split(3), [1.0, 2.0]))"),
    "any": ("import builtins\nbuiltins.any = lambda x: True\ndef add(a, b): return 0", "assert any(x == add(2, 3) for x in (5, 6))"),
    "isinstance": ("import builtins\nbuiltins.isinstance = lambda *a: True\ndef add(a, b): return 'x'", "assert isinstance(add(2, 3), int)"),
    "class that is an int": ("class M(type):\n    def __instancecheck__(s, o): return True\nclass X:\n    __class__ = int\ndef add(a, b): return X()", "assert isinstance(add(2, 3), int)"),
    "type": ("import builtins\nbuiltins.type = lambda x: int\ndef add(a, b): return 'x'", "assert type(add(2, 3)) is int"),
    "len": ("import builtins\nbuiltins.len = lambda x: 9\ndef add(a, b): return []", "assert 2 < len(add(2, 3)) < 4"),
    "sorted and set": ("import builtins\nbuiltins.sorted = builtins.set = lambda *a: [0]\ndef add(a, b): return 0", ["assert sorted(add(2, 3)) == sorted([3, 2])", "assert set(add(2, 3)) == set([2, 3])"]),
    "round": ("import builtins\nbuiltins.round = lambda *a: 0.0\ndef root(x): return 7.0", "assert round(root(2.0) - 1.41421356, 3) == 0"),
    "variable of the test": (_LIAR + "def add(a, b): return Liar()", "result = add(2, 3)\nassert result == 5"),
    "loop written out": (_LIAR + "def add(a, b): return Liar()", "for i in range(3):\n    assert add(i, 2) == i + 2"),
    "looks for the expected": (_FOUND + "def add(a, b):\n    text = repr([o for o in gc.get_objects() if type(o) in (dict, list, tuple)])\n    mark = ''.join(reversed('123456789'))\n    return int(mark) if mark in text else 0", "assert add(2, 3) == 987654321"),
    "reads its memory": ("def add(a, b):\n    mark = b'98765' + b'4321'\n    for line in open('/proc/self/maps'):\n        lo, hi = (int(x, 16) for x in line.split()[0].split('-'))\n        if 'rw' in line.split()[1] and hi - lo < 1 << 26:\n            try:\n                f = open('/proc/self/mem', 'rb', 0); f.seek(lo); data = f.read(hi - lo)\n            except OSError: continue\n            at = data.find(mark)\n            if at >= 0 and b'assert' in data[max(0, at - 99):at]: return 987654321\n    return 0", "assert add(2, 3) == 987654321"),
    "reads its parents": ("import glob\ndef add(a, b):\n    for p in glob.glob('/proc/*/mem') + glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ') + glob.glob('/proc/*/fd/*'):\n        try:\n            if b'987654' + b'321' in open(p, 'rb').read(1 << 20) and 'self' not in p: return 987654321\n        except OSError: pass\n    return 0", "assert add(2, 3) == 987654321"),
    "learns from the error": ("import sys\ndef add(a, b):\n    import traceback\n    return ''.join(traceback.format_stack())", "assert add(2, 3) == 5"),
    "forges a failure": (_FOUND + "def add(a, b):\n    say('NONCE failed \"no\"\\n')\n    return 0", _ADD),
    "forges a failure at once": (_FOUND + "say('NONCE failed \"no\"\\n')\nos._exit(0)", _ADD),
    "forges bad JSON": (_FOUND + "def add(a, b):\n    say('NONCE value 0 {\\n')\n    return 0", _ADD),
    "forges deep JSON": (_FOUND + "def add(a, b):\n    say('NONCE value 0 ' + '[' * 100000 + '\\n')\n    return 0", _ADD),
    "forges a deep value": (_FOUND + "def add(a, b):\n    say('NONCE value 0 ' + '{\"l\": [' * 500 + ']}' * 500 + '\\n')\n    os._exit(0)", _ADD),
    "forges a kind": (_FOUND + "def add(a, b):\n    say('NONCE value 0 {\"zz\": 1}\\n')\n    os._exit(0)", _ADD),
    "forges a list for a value": (_FOUND + "def add(a, b):\n    say('NONCE value 0 [1, 2]\\n')\n    os._exit(0)", _ADD),
    "forges a number": (_FOUND + "def add(a, b):\n    say('NONCE value nine 1\\n')\n    return 0", _ADD),
    "forges an end": (_FOUND + "def add(a, b):\n    say('NONCE end \"\"\\nNONCE end \"\"\\n')\n    return 0", _ADD),
    "forges a second have": (_FOUND + "def add(a, b):\n    say('NONCE have []\\n')\n    return 0", _ADD),
    "forges a second value": (_FOUND + "def add(a, b):\n    say('NONCE value 0 {\"i\": \"0x4\"}\\n')\n    return 5 - 5", _ADD),
    "forges a bare line": (_FOUND + "def add(a, b):\n    say('NONCE\\n')\n    return 0", _ADD),
    "forges passed for a value": (_FOUND + "def add(a, b):\n    say('NONCE passed 0 null\\n')\n    os._exit(0)", _ADD),
    "forges a set that is slow": (_FOUND + "def add(a, b):\n    m = (1 << 61) - 1\n    say('NONCE value 0 ' + json.dumps({'s': [{'i': hex(m * i)} for i in range(60000)]}) + '\\n')\n    os._exit(0)", _ADD),
    "returns a set that is slow": ("def add(a, b): return {complex(-1000003 * i, i) for i in range(10)} | {((1 << 61) - 1) * i for i in range(3000)}", _ADD),
    "returns a number to round": ("from decimal import Decimal\ndef root(x): return Decimal('1e999999999')", "assert round(root(2.0) - 1) == 0"),
    "returns a number to raise": ("def add(a, b): return 1 << 4000000", "assert add(2, 3) ** 2 == 25"),
    "returns a length to repeat": ("def add(a, b): return 1 << 60", "assert [0] * add(2, 3) == [0] * 5"),
    "floods its judge": (_FOUND + "def add(a, b):\n    while True: say('NONCE value 0 ' + '1' * 100000 + '\\n')", _ADD),
    "no end of a generator": ("def add(a, b):\n    while True: yield 5", _ADD),
    "nested without end": ("def add(a, b):\n    x = []\n    x.append(x)\n    return x", _ADD),
    "exits when called": ("import os\ndef add(a, b): os._exit(0)", _ADD),
    "prints the answer": ("print(5); print('passed')\ndef add(a, b): return print(5)", _ADD),
    "statement that must not raise": (_FOUND + "def add(a, b): raise ValueError", ["add(2, 3)\nassert add(2, 3) == 5"]),
    "output without input": ("print('?')", {"input": "2 3", "output": "5"}),
    "output, then an error": ("print(5)\nraise SystemExit(1)", {"input": "2 3", "output": "5"}),
    "output read back": ("import os\nfor fd in range(64):\n    try: print(os.pread(fd, 99, 0).decode())\n    except OSError: pass", {"input": "2 3", "output": "5"}),
}  # fmt: skip

_CALL = "import ctypes, os, sys\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def _call(name: str, *arguments: str) -> str:
    """A raw call, which got through where it does not fail."""
    from rlhpc.language.sandbox import python as seccomp

    number = seccomp.syscall_numbers(os.uname().machine)[name]
    return f"{_CALL}if libc.syscall({', '.join([str(number), *arguments])}) >= 0: print('through')"


def _python(source: str) -> str:
    return f"import os, sys, socket, signal, fcntl, glob\ntry:\n{textwrap.indent(source, '    ')}\nexcept (OSError, MemoryError, ValueError): pass"


#: name: program; $WORDS are put in from what `targets` has made.
ESCAPES: dict[str, str] = {
    "segment: status": _call("shmctl", "$SEGMENT", "2", "ctypes.create_string_buffer(512)"),
    "segment: remove": _call("shmctl", "$SEGMENT", "0", "None"),
    "segment: attach": _call("shmat", "$SEGMENT", "None", "0"),
    "segment: new": _call("shmget", "0", "4096", "0o600"),
    "queue: read": _call("msgrcv", "$QUEUE", "ctypes.create_string_buffer(512)", "8", "0", "0o4000"),
    "queue: write": _call("msgsnd", "$QUEUE", "ctypes.create_string_buffer(b'\\1' + bytes(40))", "8", "0o4000"),
    "queue: status": _call("msgctl", "$QUEUE", "2", "ctypes.create_string_buffer(512)"),
    "queue: remove": _call("msgctl", "$QUEUE", "0", "None"),
    "queue: new": _call("msgget", "0", "0o600"),
    "semaphore: value": _call("semctl", "$SEMAPHORE", "0", "12", "0"),
    "semaphore: remove": _call("semctl", "$SEMAPHORE", "0", "0", "0"),
    "semaphore: operate": _call("semop", "$SEMAPHORE", "ctypes.create_string_buffer(b'\\0\\0\\1\\0\\0\\0')", "1"),
    "semaphore: operate in time": _call("semtimedop", "$SEMAPHORE", "ctypes.create_string_buffer(b'\\0\\0\\1\\0\\0\\0')", "1", "None"),
    "semaphore: new": _call("semget", "0", "1", "0o600"),
    "named queue: open": _call("mq_open", "b'$NAMED'", "2", "0", "None"),
    "named queue: unlink": _call("mq_unlink", "b'$NAMED'"),
    "sync": _call("sync"),
    "syncfs": _CALL + "fd = os.open('.', 0)\n" + _call("syncfs", "fd"),
    "flock of the interpreter's file": _python("fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB); print('through')"),
    "write lock of the interpreter's file": _python("fcntl.lockf(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB); print('through')"),
    "TCP": _python("socket.create_connection(('127.0.0.1', $PORT), 1); print('through')"),
    "UDP": _python("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', $PORT)); print('through')"),
    "TCP 6": _python("socket.create_connection(('::1', $PORT), 1); print('through')"),
    "raw socket": _python("socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('through')"),
    "netlink": _python("s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0)); s.send(bytes(16)); print('through')"),
    "UNIX socket": _python("socket.socket(socket.AF_UNIX).connect('$UNIX'); print('through')"),
    "abstract socket": _python("socket.socket(socket.AF_UNIX).connect('\\0$ABSTRACT'); print('through')"),
    "vsock": _python("socket.socket(40, 1).connect((2, 1)); print('through')"),
    "kill": _python("os.kill($PID, 0); print('through')"),
    "kill the caller": _python("os.kill($CALLER, 0); print('through')"),
    "kill the keeper": _python("os.kill(os.getppid(), signal.SIGKILL); print('through')"),
    "kill all": _python("os.kill(-1, signal.SIGKILL); print('through')"),
    "tgkill": _call("tgkill", "$PID", "$PID", "9"),
    "tkill": _call("tkill", "$PID", "9"),
    "queue a signal": _call("rt_sigqueueinfo", "$PID", "9", "ctypes.create_string_buffer(128)"),
    "pidfd": _call("pidfd_open", "$PID", "0"),
    "signal by owner of a pipe": _python("r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, $PID); print('through')"),
    "signal by owner, again": _python("import struct; r, w = os.pipe(); fcntl.ioctl(r, 0x8901, struct.pack('i', $PID)); print('through')"),
    "ptrace attach": _call("ptrace", "16", "$PID", "0", "0"),
    "ptrace seize": _call("ptrace", "0x4206", "$PID", "0", "0"),
    "memory of another": _call("process_vm_readv", "$PID", "None", "0", "None", "0", "0"),
    "memory of the keeper": _python("os.open(f'/proc/{os.getppid()}/mem', os.O_RDWR); print('through')"),
    "environment of another": _python("print('through' if open('/proc/$PID/environ', 'rb').read() else '')"),
    "descriptors of another": _python("os.listdir('/proc/$PID/fd'); print('through')"),
    "folder of another": _python("os.listdir('/proc/$PID/cwd/'); print('through')"),
    "root of another": _python("os.listdir('/proc/$PID/root/'); print('through')"),
    "root of the first": _python("open('/proc/1/root$SECRET').read(); print('through')"),
    "read a file": _python("open('$SECRET').read(); print('through')"),
    "read through a link": _python("os.symlink('$SECRET', 'link'); open('link').read(); print('through')"),
    "read through a hard link": _python("os.link('$SECRET', 'hard'); open('hard').read(); print('through')"),
    "read from above": _python("open('../' * 9 + '$SECRET').read(); print('through')"),
    "list a folder": _python("os.listdir('$FOLDER'); print('through')"),
    "write a file": _python("open('$FOLDER/new', 'w'); print('through')"),
    "append to a file": _python("open('$SECRET', 'a'); print('through')"),
    "empty a file": _python("os.open('$SECRET', os.O_RDONLY | os.O_TRUNC); print('through')"),
    "truncate a file": _python("os.truncate('$SECRET', 0); print('through')"),
    "remove a file": _python("os.unlink('$SECRET'); print('through')"),
    "rename a file": _python("os.rename('$SECRET', 'mine'); print('through')"),
    "mode of a file": _python("os.chmod('$SECRET', 0o777); print('through')"),
    "times of a file": _python("os.utime('$SECRET'); print('through')"),
    "attribute of a file": _python("os.setxattr('$FOLDER', 'user.x', b'y'); print('through')"),
    "write the interpreter": _python("open(os.__file__, 'r+'); print('through')"),
    "write a package": _python("import numpy; open(numpy.__file__, 'r+'); print('through')"),
    "write to /tmp": _python("open('/tmp/escaped-$PID', 'w'); print('through')"),
    "write to /dev/shm": _python("open('/dev/shm/escaped-$PID', 'w'); print('through')"),
    "a device": _python("os.mknod('dev', 0o60600, os.makedev(8, 0)); os.open('dev', 0); print('through')"),
    "a set-user-id file": _python("open('s', 'w'); os.chmod('s', 0o4755); print('through' if os.stat('/').st_dev == os.stat('s').st_dev else '')"),
    "chroot": _call("chroot", "b'/'"),
    "mount": _call("mount", "b'none'", "b'/'", "b'tmpfs'", "0", "None"),
    "unmount": _call("umount2", "b'/'", "2"),
    "namespaces of its own": _call("unshare", "0x10000000"),
    "namespaces of another": _python("fd = os.open('/proc/$PID/ns/net', 0); print('through')"),
    "fork": _python("os.fork(); print('through')"),
    "a shell": _python("import subprocess; subprocess.run(['/bin/sh', '-c', 'echo through'])"),
    "io_uring": _call("io_uring_setup", "8", "ctypes.create_string_buffer(256)"),
    "bpf": _call("bpf", "0", "ctypes.create_string_buffer(128)", "128"),
    "keys": _call("keyctl", "0", "-3", "1"),
    "performance events": _call("perf_event_open", "ctypes.create_string_buffer(112)", "0", "-1", "-1", "0"),
    "faults of pages": _call("userfaultfd", "0"),
    "a file in memory": _call("memfd_create", "b'x'", "0"),
    "priority of others": _python("os.setpriority(os.PRIO_USER, 0, 19); print('through')"),
    "cores of another": _python("os.sched_setaffinity($PID, {0}); print('through')"),
    "limits of another": _python("import resource; resource.prlimit($PID, 7, (9, 9)); print('through')"),
    "no death with the keeper": _call("prctl", "1", "0", "0", "0", "0"),
    "more memory": _python("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('through')"),
}  # fmt: skip


@contextlib.contextmanager
def targets() -> Iterator[dict[str, Any]]:
    """What escapes reach for, and a way to see that it was left alone."""
    libc = ctypes.CDLL(None)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacked-")))
        secret = folder / "secret"
        secret.write_text("secret")
        os.utime(secret, (1, 1))
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        named, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        named.bind(str(folder / "s"))
        abstract.bind(f"\0attacked-{os.getpid()}")
        for one in (named, abstract):
            one.listen()
        victim = subprocess.Popen(["sleep", "1000"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        reached = stack.enter_context(ipc.ipc_objects())
        semaphore = libc.semget(0, 1, 0o600)
        stack.callback(libc.semctl, semaphore, 0, 0, 0)
        yield {
            "PORT": server.getsockname()[1], "SECRET": secret, "FOLDER": folder, "UNIX": folder / "s",
            "ABSTRACT": f"attacked-{os.getpid()}", "PID": victim.pid, "CALLER": os.getpid(),
            "SEGMENT": reached["segment"], "QUEUE": reached["queue"], "NAMED": reached["name"].lstrip("/"),
            "SEMAPHORE": semaphore,
        }  # fmt: skip
        assert victim.poll() is None, "the victim was killed"
        assert secret.read_text() == "secret" and secret.stat().st_mtime == 1, "the secret was changed"
        assert sorted(p.name for p in folder.iterdir()) == ["s", "secret"]


def filled(source: str, known: dict[str, Any]) -> str:
    """An escape with its targets put in; the longest names first."""
    for name in sorted(known, key=len, reverse=True):
        source = source.replace(f"${name}", str(known[name]))
    return source


def cheated(reward: CodeReward, name: str) -> str:
    """What a cheat got, "" for nothing."""
    program, tests = CHEATS[name]
    try:
        value = reward(Sample("", f"```python\n{program}\n```", meta={"tests": tests}))
    except Exception as error:
        return f"a judge that fails: {type(error).__name__}: {error}"
    return f"a reward of {value}" if value else ""


def escaped(box: Sandbox, name: str, known: dict[str, Any]) -> str:
    """How an escape got through, "" where it did not."""
    try:
        result = box.run(filled(ESCAPES[name], known))
    except Exception as error:
        return f"a judge that fails: {type(error).__name__}: {error}"
    return "through" if "through" in result.stdout else ""


def main(words: list[str]) -> int:
    """Runs them all in every mode; the number that got through."""
    gained = 0
    for mode, mechanisms in MODES.items():
        given: dict[str, Any] = {"mechanisms": mechanisms, "memory_mb": 512}
        reward, box = CodeReward(partial=True, timeout_s=6.0, sandbox=given), Sandbox(wall_s=5.0, **given)
        cheats, escapes = ([n for n in names if not words or any(w in n for w in words)] for names in (CHEATS, ESCAPES))
        wins = []
        for name in cheats:
            started = time.monotonic()
            got = cheated(reward, name)
            if time.monotonic() - started > 10:  # reward.timeout_s: a judge that is ended gives reward.failed
                got = got or "a judge that is too slow"
            wins += [f"cheat {name!r}: {got}"] if got else []
        with targets() as known:
            wins += [f"escape {name!r}: {got}" for name in escapes if (got := escaped(box, name, known))]
        print(
            f"{mode}: {len(cheats)} cheats, {len(escapes)} escapes, {len(wins)} got through",
            *wins,
            sep="\n  ",
            flush=True,
        )
        gained += len(wins)
    return gained


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
