"""Attacks from inside the sandboxes of agents, and by agents without one."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import os
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.attack.tries import CannotRunError, attack

SANDBOXES = ("bubblewrap", "unshare")


@contextlib.contextmanager
def model() -> Iterator[str]:
    """A UNIX socket that says what it was told."""
    folder = tempfile.mkdtemp(prefix="rlhpc-t-")
    path = f"{folder}/way/model"
    os.mkdir(f"{folder}/way", 0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.sendall(b"model heard " + connection.recv(100))

        threading.Thread(target=serve, daemon=True).start()
        yield path
        server.shutdown(socket.SHUT_RDWR)
    shutil.rmtree(folder, ignore_errors=True)


def ticket(number: int, path: str, question: str, timeout_s: float) -> dict[str, Any]:
    keys = dict.fromkeys(("model", "far", "api_key", "session_id", "process_key", "host"), "k")
    task = {"messages": [], "question": question, "answer": "", "meta": {}, "seed": 1, "id": number, "kwargs": {}}
    return {**keys, "id": number, "timeout_s": timeout_s, "base_url": "http://127.0.0.1:1/v1", "socket": path,
            "looks": False, "task": task}  # fmt: skip


@contextlib.contextmanager
def episodes(script: Path, sandbox: str | None, **options: Any) -> Iterator[tuple[Any, queue.SimpleQueue[Any]]]:
    from rlhpc.language.agents.agent_processes import AgentProcesses, Program

    if sandbox == "bubblewrap" and not shutil.which("bwrap"):
        raise CannotRunError("no bwrap here")
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    known = {field.name for field in dataclasses.fields(Program)}
    chosen = {name: value for name, value in {**options, "sandbox": sandbox}.items() if name in known}
    program = Program("command", None, (sys.executable, str(script), "{question}"), None, 4, **chosen)
    agent_processes = AgentProcesses(program, lambda number, said: outcomes.put((number, said)))
    try:
        yield agent_processes, outcomes
    finally:
        agent_processes.close()


class Stage:
    """One nursery, in which attacks of a class are episodes one after another.

    Args:
        sources: By their names.
        sandbox: None for none.
        options: Of `Program`.
    """

    def __init__(self, sources: dict[str, str], sandbox: str | None, **options: Any) -> None:
        self._stack = contextlib.ExitStack()
        atexit.register(self._stack.close)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhpc-t-", dir="/var/tmp")))
        self.script, self.sources, self._numbers = folder / "agents/agent.py", list(sources), itertools.count()
        self.script.parent.mkdir()
        words = {str(number): source for number, source in enumerate(sources.values())}
        self.script.write_text(f"{PRELUDE}\nexec({words!r}[sys.argv[1]])\n")
        self.path = self._stack.enter_context(model())
        self.agent_processes, self._outcomes = self._stack.enter_context(episodes(self.script, sandbox, **options))

    def begin(self, name: str, timeout_s: float = 60.0) -> int:
        number = next(self._numbers)
        self.agent_processes.run(ticket(number, self.path, str(self.sources.index(name)), timeout_s))
        return number

    def outcomes(self, *numbers: int) -> list[dict[str, Any]]:
        said = dict(self._outcomes.get(timeout=120) for _ in numbers)
        return [said[number] for number in numbers]

    def run(self, name: str, timeout_s: float = 60.0) -> dict[str, Any]:
        return self.outcomes(self.begin(name, timeout_s))[0]


#: What each attack begins with: `libc`, `way`, `path`, and `say`, which tells that something got through.
PRELUDE = r"""
import ctypes, fcntl, mmap, os, resource, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
path = os.environ.get("RLHPC_SOCKET", "")
way = os.path.dirname(path)
def say(*words):
    print(*words, flush=True)
def sh(words):
    return subprocess.run(words, shell=True, capture_output=True).returncode == 0
def read(name):
    try:
        with open(name, "rb") as file:
            return file.read(1 << 16)
    except OSError:
        return b""
"""

#: Each tries to take the place of the socket by which later episodes reach the model.
SOCKET: dict[str, str] = {
    "mount_setattr on the way": """
tree = libc.syscall(428, -100, way.encode(), 1 | 0o2000000)
attr = struct.pack("QQQQ", 0, 1, 0, 0)
if tree >= 0 and libc.syscall(442, tree, b"", 0x1000, attr, 32) == 0 and libc.syscall(429, tree, b"", -100, way.encode(), 4) == 0:
    say("a writable clone is there")
""",
    "through the root of other processes": """
for pid in ["self", "1", *filter(str.isdigit, os.listdir("/proc"))]:
    try:
        s = socket.socket(socket.AF_UNIX)
        at = f"/proc/{pid}/root{path}"
        os.rename(at, at + "x")
        say("renamed through", pid)
    except OSError:
        pass
""",
    "by a descriptor of the folder": """
for flags in (os.O_RDONLY, os.O_PATH):
    fd = os.open(way, flags | os.O_DIRECTORY)
    for act in (lambda: os.mkdir("x", dir_fd=fd), lambda: os.rename("model", "m2", src_dir_fd=fd, dst_dir_fd=fd),
                lambda: os.unlink("model", dir_fd=fd), lambda: os.open("n", os.O_CREAT | os.O_WRONLY, dir_fd=fd)):
        try:
            act(); say("changed by a descriptor")
        except OSError:
            pass
""",
    "an overlay in namespaces of its own": """
os.makedirs("up"); os.makedirs("w2")
if sh(f"unshare -Urm sh -c 'mount -t overlay overlay -o lowerdir={way},upperdir=up,workdir=w2 {way} && rm {path}'"):
    say("removed below an overlay") if not os.path.exists(path) else None
""",
    "another's mount namespace": """
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    except OSError:
        continue
    if pid != str(os.getpid()) and os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt") and libc.setns(fd, 0) == 0:
        say("in the namespace of", pid)
""",
    "a descriptor of who leads there": """
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid == os.getpid():
        continue
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        continue
    for number in range(20):
        if (fd := libc.syscall(438, pidfd, number, 0)) >= 0 and stat.S_ISSOCK(os.fstat(fd).st_mode):
            try:
                os.rename(path, path + "x"); say("renamed")
            except OSError:
                pass
""",
    "attributes, owner and times of the socket": """
for act in (lambda: os.chmod(path, 0), lambda: os.chown(path, 1, 1), lambda: os.utime(path), lambda: os.setxattr(path, "user.x", b"y"),
            lambda: os.chmod(way, 0), lambda: os.link(path, "mine"), lambda: os.link(path, way + "/second")):
    try:
        act(); say("changed")
    except OSError:
        pass
""",
}  # fmt: skip

SOCKET["honest"] = """
s = socket.create_connection(("127.0.0.1", 8000), 10)
s.sendall(b"my key")
print(s.recv(100).decode())
"""


@functools.cache
def socket_stage(sandbox: str) -> Stage:
    return Stage(SOCKET, sandbox)


def take_the_socket(sandbox: str, name: str) -> str:
    stage = socket_stage(sandbox)

    def state() -> tuple[Any, ...]:
        found = os.stat(stage.path)
        return found.st_ino, found.st_mode, found.st_uid, found.st_mtime

    before = state()
    first, second = stage.run(name), stage.run("honest")
    try:
        changed = state() != before
    except OSError:
        changed = True
    if first.get("response") or second != {"response": "model heard my key"} or changed:
        socket_stage.cache_clear()  # its way to the model is no longer what it was
        return f"{first.get('response')}; a later episode: {second}"
    if "Traceback" in str(first):
        raise CannotRunError(str(first))
    return ""


for _sandbox in SANDBOXES:
    for _name in list(SOCKET)[:-1]:
        attack("socket of the model", f"{_sandbox}: {_name}")(functools.partial(take_the_socket, _sandbox, _name))

#: Each looks for the text SEC+RET, which lies where no sandbox must show it; SEEN are the paths.
SECRETS: dict[str, str] = {
    "roots and folders of processes": """
for pid in ["self", *filter(str.isdigit, os.listdir("/proc"))]:
    for part in ("root", "cwd"):
        for at in SEEN:
            if word in read(f"/proc/{pid}/{part}{at}"):
                say(pid, part, at)
""",
    "descriptors that were left open": """
for fd in range(3, 200):
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and word in os.pread(fd, 1 << 16, 0):
            say("read", fd)
        if stat.S_ISDIR(status.st_mode):
            for at in SEEN:
                if word in read(f"/proc/self/fd/{fd}/../../../../..{at}") or word in read(f"/proc/self/fd/{fd}/{at.lstrip('/')}"):
                    say("through", fd, at)
    except OSError:
        pass
""",
    "variables of this and other processes": """
for pid in filter(str.isdigit, os.listdir("/proc")):
    if word in read(f"/proc/{pid}/environ") or word in read(f"/proc/{pid}/cmdline"):
        say("variables or arguments of", pid)
""",
    "handles instead of names": """
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]
handle, mount = Handle(128), ctypes.c_int()
here = os.open("/", os.O_RDONLY)
for at in SEEN:
    for name in (at, os.path.dirname(at), "/"):
        if libc.name_to_handle_at(-100, name.encode(), ctypes.byref(handle), ctypes.byref(mount), 0) == 0:
            fd = libc.open_by_handle_at(here, ctypes.byref(handle), os.O_RDONLY)
            if fd >= 0 and os.path.isfile(at) and word in os.read(fd, 1 << 16):
                say("by a handle", at)
""",
    "below what is mounted over it": """
for at in SEEN:
    for above in (at, os.path.dirname(at), os.path.dirname(os.path.dirname(at))):
        libc.umount2(above.encode(), 2)
    for words in (f"unshare -Urm sh -c 'umount -l {os.path.dirname(at)}; cat {at}'", f"unshare -Urmpf sh -c 'mkdir -p x; mount --rbind / x; cat x{at}'"):
        if word in subprocess.run(words, shell=True, capture_output=True).stdout:
            say("uncovered", at)
    if word in read(at):
        say("read", at)
""",
    "links in a folder that is shown": """
for name in ("link", "folder", "deep/link"):
    at = os.path.join(os.path.dirname(sys.argv[0]), name)
    if word in read(at):
        say("through", name)
    try:
        for below in os.listdir(at):
            if word in read(f"{at}/{below}"):
                say("through", name, below)
    except OSError:
        pass
""",
    "sockets of the user's programs": """
for at in SEEN + ["\\0rlhpc-t-abstract"]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as s:
            s.settimeout(1)
            try:
                s.connect(at); s.send(b"hi")
                say("connected to", repr(at))
            except OSError:
                pass
""",
    "memory of processes outside": """
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid != os.getpid() and word in read(f"/proc/{pid}/mem"):
        say("memory of", pid)
for name in ("/proc/kcore", "/dev/mem", "/proc/kallsyms", "/dev/kmsg", "/proc/1/mem", "/proc/keys", "/proc/net/unix", "/proc/sysvipc/shm"):
    if word in read(name):
        say("read", name)
""",
}  # fmt: skip


@functools.cache
def secrets_stage(sandbox: str) -> Stage:
    """Secrets beside the agent, in a home folder, in a run and in data; a descriptor and sockets of the user."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhpc-t-", dir="/var/tmp")))
    data, run, home = root / "data", root / "runs/first", root / "home/a"
    for folder in (data, run, home / ".ssh", root / "run"):
        folder.mkdir(parents=True)
    secrets = [data / "train.jsonl", run / "keys.json", home / ".ssh/id_rsa", root / "notes"]
    for file in secrets:
        file.write_text("SECRET")
    for at in [str(root / "run/bus"), "\0rlhpc-t-abstract"]:
        bus = stack.enter_context(socket.socket(socket.AF_UNIX))
        with contextlib.suppress(OSError):
            bus.bind(at)
            bus.listen(8)
    head = f"word = b'SEC' + b'RET'\nSEEN = {[*map(str, secrets), str(root / 'run/bus')]!r}\n"
    os.environ["HOME"], home_before = str(home), os.environ.get("HOME", "/root")
    descriptor = os.open(secrets[0], os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    stage = Stage({name: head + source for name, source in SECRETS.items()}, sandbox, hidden=(str(run), str(data)))
    os.environ["HOME"] = home_before
    os.close(descriptor)
    agent = stage.script.parent
    (agent / "deep").mkdir()
    (agent / "link").symlink_to(secrets[0])
    (agent / "folder").symlink_to(home / ".ssh")
    (agent / "deep/link").symlink_to(secrets[1])
    return stage


def look_for_secrets(sandbox: str, name: str) -> str:
    said = secrets_stage(sandbox).run(name)
    if "Traceback" in str(said):
        raise CannotRunError(str(said))
    return str(said["response"]) if said.get("response") else ""


_OPEN = "unshare shows the user's files"
for _sandbox in SANDBOXES:
    for _name in SECRETS:
        _files = _sandbox == "unshare" and _name not in ("variables of this and other processes", "memory of processes outside",
                                                         "descriptors that were left open", "handles instead of names")  # fmt: skip
        attack("what a sandbox shows", f"{_sandbox}: {_name}", _OPEN if _files else "")(
            functools.partial(look_for_secrets, _sandbox, _name)
        )

#: Each takes about three times what it may (64 MB of files, 64 MB of memory, 20 processes), and stays.
GREED: dict[str, str] = {
    "files that have no name any more": """
kept = []
for number in range(4):
    fd = os.open("f", os.O_CREAT | os.O_RDWR, 0o600); os.unlink("f"); kept.append(fd)
    for _ in range(48):
        os.write(fd, bytes(size))
""",
    "files in memory": """
kept = []
for number in range(4):
    fd = libc.memfd_create(b"x", 0); kept.append(fd)
    for _ in range(48):
        os.write(fd, bytes(size))
""",
    "files in memory that are mapped only": """
for number in range(4):
    fd = libc.memfd_create(b"x", 0)
    for _ in range(48):
        os.write(fd, bytes(size))
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap(None, ctypes.c_size_t(48 * size), 3, 1, fd, ctypes.c_long(0))
    os.close(fd)
""",
    "a filesystem of its own": """
words = "mkdir -p t && mount -t tmpfs -o size=256m tmpfs t && for i in 1 2 3 4; do head -c 48000000 /dev/zero > t/$i; done && echo ok && sleep 100"
child = subprocess.Popen(["unshare", "-Urm", "sh", "-c", words], stdout=subprocess.PIPE)
if child.stdout.readline() != b"ok\\n":
    sys.exit()
""",
    "segments that nobody maps": """
kept = []
for number in range(6):
    i = libc.shmget(0, 32 * size, 0o600)
    if i < 0:
        sys.exit()
    kept.append(i)
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(i, None, 0)
    ctypes.memset(at, 1, 32 * size); libc.shmdt(ctypes.c_void_p(at))
import atexit
atexit.register(lambda: [libc.shmctl(i, 0, None) for i in kept])
""",
    "pipes that nobody reads": """
kept = []
for number in range(180):
    r, w = os.pipe(); kept += [r, w]
    try:
        fcntl.fcntl(w, 1031, size)
    except OSError:
        break
    os.set_blocking(w, False)
    try:
        os.write(w, bytes(size))
    except OSError:
        pass
got = sum(struct.unpack("i", fcntl.ioctl(fd, 0x541B, bytes(4)))[0] for fd in kept[::2])
if got < 150 * size:
    sys.exit()
""",
    "many small files": """
for number in range(20_000):
    with open(f"{number}", "w") as file:
        file.write("x")
""",
    "space that is set aside": """
for number in range(4):
    fd = os.open(f"f{number}", os.O_CREAT | os.O_RDWR, 0o600)
    os.posix_fallocate(fd, 0, 48 * size)
""",
    "threads": """
threading.stack_size(64 << 10)
for _ in range(600):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
""",
    "processes in sessions of their own": """
for _ in range(60):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(100)
        os._exit(0)
""",
    "processes that stop": """
import signal
for _ in range(60):
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
""",
    "memory that is locked, in many processes": """
for _ in range(6):
    if os.fork() == 0:
        kept = mmap.mmap(-1, 32 * size)
        for at in range(0, 32 * size, 4096):
            kept[at] = 1
        time.sleep(100)
""",
    "half of it twice": """
kept = bytearray(b"x" * (40 * size))
if os.fork() == 0:
    for at in range(0, len(kept), 4096):
        kept[at] = 2
    time.sleep(100)
""",
}  # fmt: skip


@functools.cache
def greed_stage(sandbox: str) -> Stage:
    end = 'print("took it", flush=True)\ntime.sleep(100)\n'
    sources = {name: f"size = 1 << 20\n{source}\n{end}" for name, source in GREED.items()}
    limits = {"disk_mb": 64, "memory_mb": 64, "processes": 20}
    return Stage({**sources, "modest": "print('well')"}, sandbox, limits=limits)


def take_too_much(sandbox: str, name: str) -> str:
    stage = greed_stage(sandbox)
    said, beside = stage.outcomes(stage.begin(name, 20.0), stage.begin("modest"))
    if beside != {"response": "well"}:
        return f"another episode suffered: {beside}"
    if said.get("timeout"):
        return "kept it until its time was over"
    return "" if "error" in said or said.get("response") == "" else str(said)


for _sandbox in SANDBOXES:
    for _name in GREED:
        _kernel = "a cgroup alone bounds files that are mapped but not open" if _name.endswith("mapped only") else ""
        attack("limits of an episode", f"{_sandbox}: {_name}", _kernel)(
            functools.partial(take_too_much, _sandbox, _name)
        )

#: Each leaves something where an episode may write, or a process, and ends in some way.
LEFT: dict[str, str] = {
    "a folder that cannot be listed, and its time is over": "os.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0); time.sleep(100)",
    "names that are no texts": "\nfor name in (b'\\xff\\xfe', b'-rf', b' ', b'a\\nb', b'*'): os.mkdir(name); open(name + b'/' + name, 'w').close()\ntime.sleep(100)",
    "links to a folder outside": "os.symlink('/var/tmp/KEEP', 'l'); os.symlink('/var/tmp/KEEP', 'work'); os.makedirs('d'); os.symlink('/var/tmp/KEEP', 'd/l'); time.sleep(100)",
    "sockets, pipes and devices": "\nos.mkfifo('p'); s = socket.socket(socket.AF_UNIX); s.bind('s')\ntry: os.mknod('n', 0o20600, os.makedev(1, 3))\nexcept OSError: pass\ntime.sleep(100)",
    "files that are still open, of a process that left": "\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        f = open('open', 'w')\n        while True: f.write('x'); f.flush(); time.sleep(0.05)\n    os._exit(0)\ntime.sleep(0.5)",
    "a folder whose owner is gone": "\nimport signal\nos.makedirs('x/y'); os.kill(os.getppid(), signal.SIGKILL)",
    "a process that makes it anew": "\nhere = os.getcwd()\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        try: os.makedirs(here + '/again', exist_ok=True); open(here + '/again/x', 'w').close()\n        except OSError: pass\n        time.sleep(0.001)\ntime.sleep(0.3)",
}  # fmt: skip


@functools.cache
def left_stage(sandbox: str) -> tuple[Stage, Path]:
    kept = Path(tempfile.mkdtemp(prefix="rlhpc-t-", dir="/var/tmp"))
    atexit.register(shutil.rmtree, kept, True)
    return Stage({name: source.replace("/var/tmp/KEEP", str(kept)) for name, source in LEFT.items()}, sandbox), kept


def leave_something(sandbox: str, name: str) -> str:
    stage, kept = left_stage(sandbox)
    (kept / "file").write_text("keep")
    before = episode_folders()
    stage.run(name, 4.0)
    left, living = episode_folders() - before, processes_of(stage.script)
    if (kept / "file").read_text() != "keep":
        return "a file outside was removed"
    return f"left {left} {living}" if left or living else ""


def episode_folders() -> set[str]:
    bases = (tempfile.gettempdir(), "/dev/shm")
    return {p.name for base in bases for kind in ("episode", "shell") for p in Path(base).glob(f"rlhpc-{kind}-*")}


def processes_of(script: Path) -> list[int]:
    """Returns the processes whose arguments name a script, for which it waits as they end."""
    import psutil

    until = time.monotonic() + 3
    while living := [p.pid for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or [])]:
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return living


for _sandbox in SANDBOXES:
    for _name in LEFT:
        attack("what an episode leaves", f"{_sandbox}: {_name}")(functools.partial(leave_something, _sandbox, _name))


#: Programs without a sandbox against what runs them: each must spoil its own episode alone.
HARNESS: dict[str, str] = {
    "ends all that it sees of its user's harness": """
import signal
for pid in (os.getppid(),):
    os.kill(pid, signal.SIGSTOP)
time.sleep(0.5); os.kill(os.getppid(), signal.SIGCONT); os.kill(os.getppid(), signal.SIGTERM); time.sleep(30)
""",
    "an outcome without an end": "\nfor fd in range(3, 40):\n    try: os.write(fd, b'{\"reward\": ' * 200000)\n    except OSError: pass\ntime.sleep(30)",
    "the tty, the group, the session": """
import signal
for act in (lambda: os.killpg(os.getpgid(os.getppid()), signal.SIGKILL), lambda: os.setpgid(0, os.getppid()), os.setsid):
    try: act()
    except OSError: pass
time.sleep(30)
""",
    "a child that catches every end": """
import signal
if os.fork() == 0:
    libc.prctl(36, 1, 0, 0, 0); os.setsid()
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except OSError: pass
    for _ in range(50):
        if os.fork() == 0: time.sleep(100)
    time.sleep(100)
""",
    "closes what it has and prints": "\nos.closerange(0, 100)\nos.kill(os.getpid(), 11)",
    "prints without end": "\nend = time.time() + 5\nwhile time.time() < end: os.write(1, b'x' * 65536); os.write(2, b'\\xff\\x00\\n' * 9999)",
    "a status that is no error": "\nprint(\"{'reward': 1e9}\"); sys.exit(256)",
}  # fmt: skip


@functools.cache
def harness_stage() -> Stage:
    return Stage({**HARNESS, "modest": "time.sleep(1); print('well')"}, None)


def spoil_the_harness(name: str) -> str:
    stage = harness_stage()
    numbers = [stage.begin(each, 15.0) for each in ("modest", name, "modest")]
    first, _, third = stage.outcomes(*numbers)
    later = stage.run("modest")
    if any(said != {"response": "well"} for said in (first, third, later)):
        return f"others suffered: {first} {third} {later}"
    living = processes_of(stage.script)
    return f"living: {living}" if living else ""


for _name in HARNESS:
    attack("harness without a sandbox", _name)(functools.partial(spoil_the_harness, _name))
