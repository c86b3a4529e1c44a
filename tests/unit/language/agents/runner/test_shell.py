"""Attacks from inside the sandboxes of agents: on the other episodes, on the user's files, and on the node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.language.agents.agent_processes import AgentProcesses, Program
from rlhpc.language.sandbox import python
from rlhpc.runtime.errors import ConfigError
from tests.sandboxes import SANDBOXES

Run = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def model() -> Iterator[str]:
    """A UNIX socket that says `model`, and what it was told, to whoever connects."""
    folder = tempfile.mkdtemp(prefix="rlhpc-t-")
    path = f"{folder}/way/model"
    os.mkdir(f"{folder}/way", 0o700)
    server = socket.socket(socket.AF_UNIX)
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
    server.close()


def ticket(number: int, path: str, question: str, timeout_s: float = 60.0) -> dict[str, Any]:
    keys = dict.fromkeys(("model", "far", "api_key", "session_id", "process_key", "host"), "k")
    task = {"messages": [], "question": question, "answer": "", "meta": {}, "seed": 1, "id": number, "kwargs": {}}
    url = "http://127.0.0.1:1/v1"
    return {
        **keys, "id": number, "timeout_s": timeout_s, "base_url": url, "socket": path, "looks": False, "task": task
    }  # fmt: skip


@contextlib.contextmanager
def episodes(script: Path, sandbox: str, **options: Any) -> Iterator[tuple[AgentProcesses, queue.SimpleQueue[Any]]]:
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    known = {field.name for field in dataclasses.fields(Program)}
    program = Program(
        "command", None, (sys.executable, str(script), "{question}"), None, 4, sandbox=sandbox,
        **{name: value for name, value in options.items() if name in known},
    )  # fmt: skip
    agent_processes = AgentProcesses(program, lambda number, outcome: outcomes.put((number, outcome)))
    try:
        yield agent_processes, outcomes
    finally:
        agent_processes.close()


def run_one(script: Path, sandbox: str, question: str, path: str, timeout_s: float = 60.0, **options: Any) -> Any:
    with episodes(script, sandbox, **options) as (agent_processes, outcomes):
        agent_processes.run(ticket(0, path, question, timeout_s))
        return outcomes.get(timeout=timeout_s + 60)[1]


THIEF = r"""
import ctypes, os, socket, subprocess, sys, threading, time
path = os.environ["RLHPC_SOCKET"]
way, above = os.path.dirname(path), os.path.dirname(os.path.dirname(path))
if sys.argv[1] == "honest":
    s = socket.create_connection(("127.0.0.1", 8000), 10)
    s.sendall(b"my key")
    print(s.recv(100).decode())
    sys.exit()
done = []
libc = ctypes.CDLL(None)
def attempt(name, what):
    try:
        if what() is not False:
            done.append(name)
    except OSError:
        pass
def sh(words):
    return subprocess.run(words, shell=True, capture_output=True).returncode == 0
def listen(at):
    s = socket.socket(socket.AF_UNIX); s.bind(at); s.listen(8)
    def serve():
        while True:
            c, _ = s.accept()
            c.recv(100); c.sendall(b"thief")
    threading.Thread(target=serve, daemon=True).start()
rel = os.path.relpath(way, os.getcwd())
attempt("unmount", lambda: libc.umount2(way.encode(), 2) == 0)
attempt("remount", lambda: libc.mount(b"none", way.encode(), None, 32 | 4096, None) == 0)
attempt("unmount elsewhere", lambda: sh(f"unshare -Urm sh -c 'umount {way} || mount -o remount,rw,bind {way}'"))
attempt("bind what is below", lambda: sh(f"mkdir -p x; unshare -Urm sh -c 'mount --bind {above} x && touch x/way/y'"))
attempt("permissions", lambda: os.chmod(way, 0o777))
attempt("through the working folder", lambda: open(rel + "/planted", "w"))
attempt("make a file", lambda: open(way + "/other", "w"))
attempt("rename the socket", lambda: os.rename(path, path + "-true"))
attempt("remove the socket", lambda: os.unlink(path))
attempt("rename the folder", lambda: os.rename(way, way + "-true"))
attempt("link over it", lambda: (os.symlink("/nowhere", "link"), os.replace("link", path)))
if sys.argv[1] == "above":
    attempt("rename what is above it", lambda: (os.rename(above, above + "-true"), os.makedirs(way)))
attempt("listen in its place", lambda: listen(path))
print("; ".join(done), flush=True)
if sys.argv[1] == "stay":
    open("ready", "w").close()
    time.sleep(8)
"""


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_no_episode_takes_the_place_of_the_model(sandbox: str, model: str, tmp_path: Path) -> None:
    """Neither is another one's key read, nor is it answered, beside the attacker and after it."""
    script = tmp_path / "agent.py"
    script.write_text(THIEF)
    with episodes(script, sandbox) as (agent_processes, outcomes):
        for number, question in enumerate(("go", "above", "honest")):
            agent_processes.run(ticket(number, model, question))
            _, outcome = outcomes.get(timeout=90)
            expected = "model heard my key" if question == "honest" else ""
            if (sandbox, question) != (
                "bubblewrap",
                "above",
            ):  # its /tmp, and what is above the folder there, is its own
                assert outcome == {"response": expected}, question
        agent_processes.run(ticket(3, model, "stay"))
        agent_processes.run(ticket(4, model, "honest"))
        said = dict(outcomes.get(timeout=90) for _ in range(2))
    assert said == {3: {"response": ""}, 4: {"response": "model heard my key"}}


READER = r"""
import os, socket, subprocess, sys
def read(path):
    try:
        return open(path).read()
    except OSError:
        return ""
def connect(path):
    s = socket.socket(socket.AF_UNIX)
    try:
        s.connect(path)
        return s.recv(100).decode()
    except OSError:
        return ""
found, word = [], "SEC" + "RET"
for path in sys.argv[1].split():
    if word in read(path) or word in connect(path):
        found.append(path)
roots = sorted({os.path.dirname(path) for path in sys.argv[1].split()})
for root in roots:
    for folder, _, names in os.walk(root):
        found += [name for name in names if word in read(os.path.join(folder, name))]
print("; ".join(found))
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Secrets where a user's are, on a filesystem that no sandbox hides because of its name."""
    with tempfile.TemporaryDirectory(prefix="rlhpc-t-", dir="/var/tmp") as folder:
        root = Path(folder)
        project, run, home = root / "project", root / "project/runs/first", root / "gpfs/home/a"
        for path in (project / "data", run, home / ".ssh", root / "run/user/0"):
            path.mkdir(parents=True)
        (root / "home").mkdir()
        (root / "home/a").symlink_to(home)
        for path in (project / "data/train.jsonl", run / "keys.json", home / ".ssh/id_rsa", root / "elsewhere"):
            path.write_text("SECRET")
        (project / "agent.py").write_text(READER)
        (project / "helper.py").write_text("print('helped')\n")
        monkeypatch.setenv("HOME", str(root / "home/a"))
        bus = socket.socket(socket.AF_UNIX)
        bus.bind(os.path.relpath(root / "run/user/0/bus"))
        bus.listen(8)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    bus.accept()[0].sendall(b"SECRET")

        threading.Thread(target=serve, daemon=True).start()
        yield {"root": root, "project": project, "run": run, "home": home, "bus": root / "run/user/0/bus"}
        bus.shutdown(socket.SHUT_RDWR)
        bus.close()


needs_bubblewrap = pytest.mark.parametrize("sandbox", SANDBOXES[1:])


def secrets_in(places: dict[str, Path]) -> str:
    root = places["root"]
    return " ".join(map(str, (
        places["project"] / "data/train.jsonl", places["run"] / "keys.json", places["home"] / ".ssh/id_rsa",
        root / "home/a/.ssh/id_rsa", places["bus"], root / "elsewhere",
    )))  # fmt: skip


@needs_bubblewrap
def test_a_sandbox_shows_no_secret(sandbox: str, places: dict[str, Path], model: str) -> None:
    """Of the data set, the run folder, the home folder by both of its names, and the user's daemons; though the agent's own
    folder, which is shown, is above two of them. And `read` shows what it names, but nothing hidden within it."""
    hidden = (str(places["run"]), str(places["project"] / "data/train.jsonl"))
    agent = places["project"] / "agent.py"
    assert run_one(agent, sandbox, secrets_in(places), model, hidden=hidden) == {"response": ""}
    everything = run_one(agent, sandbox, secrets_in(places), model, hidden=hidden, read=("/",))
    for path in (places["home"] / ".ssh/id_rsa", places["run"] / "keys.json"):
        assert str(path) not in everything["response"].split("; ")
    named = run_one(agent, sandbox, secrets_in(places), model, hidden=hidden, read=(hidden[1], "~/.ssh"))
    assert set(named["response"].split("; ")) == {
        hidden[1], "train.jsonl", "id_rsa", str(places["home"] / ".ssh/id_rsa"),
        str(places["root"] / "home/a/.ssh/id_rsa"),
    }  # fmt: skip


WORKER = r"""
import os, pathlib, runpy, socket, sqlite3, ssl, subprocess, sys, tempfile
def sh(words):
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else f"{words}: {done.stderr}"
runpy.run_path(sys.argv[0].replace("agent.py", "helper.py"))
print(sh("echo a b | awk '{print $2}'; mktemp >/dev/null && echo made"))
print(sh("test -w . && test -w $HOME && test -w /tmp && test -w /dev/shm && ! touch /usr/x 2>/dev/null && echo writes"))
print(sh("if command -v git >/dev/null; then git init -q r && cd r && git -c user.name=a -c user.email=b commit -q "
         "--allow-empty -m m && git log --format=%s; else echo m; fi"))
print(sh("echo 'int main(){return 0;}' > a.c; if command -v cc >/dev/null; then cc a.c && ./a.out; fi && echo compiled"))
print(sh("$0 -c 'import json, ctypes; print(1)' || echo no".replace("$0", sys.executable)))
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "x").write_text("x")
"""


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_ordinary_work_goes_on(sandbox: str, places: dict[str, Path], model: str) -> None:
    """A home folder that is a symbolic link is none in its way."""
    agent = places["project"] / "agent.py"
    agent.write_text(WORKER)
    outcome = run_one(agent, sandbox, "", model, hidden=(str(places["run"]),))
    words = outcome.get("response", str(outcome)).splitlines()
    if sandbox == "unshare":  # its folders are the user's
        words = ["writes" if "touch /usr/x" in line else line for line in words]
    assert words == ["helped", "b", "made", "writes", "m", "compiled", "1"], outcome


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"agent\.sandbox_read names '/nowhere/x', which is not there"),
        episodes(tmp_path / "agent.py", "unshare", read=("/nowhere/x",)),
    ):
        pass


#: Each stops by itself at a size that any node has.
GREEDY = r"""
import ctypes, mmap, os, sys, threading, time
what, size = sys.argv[1], 1 << 20
if what == "none":
    print("well")
    sys.exit()
folder = {"files": os.environ["TMPDIR"], "shm": "/dev/shm"}.get(what, ".")
if what == "file":
    with open("big", "wb") as file:
        for _ in range(128):
            file.write(b"x" * size)
if what in ("files", "shm"):
    for number in range(128):
        with open(f"{folder}/{number}", "wb") as file:
            file.write(b"x" * size)
if what == "memory":
    kept = [bytearray(b"x" * size) for _ in range(700)]
if what == "processes":  # twice the bound, and no more whatever happens
    for _ in range(40):
        if os.fork() == 0:
            break
if what == "children":
    for _ in range(8):
        if os.fork() == 0:
            break
    kept = bytearray(b"x" * (32 * size))
if what == "shared":
    kept = mmap.mmap(-1, 400 * size)
    for at in range(0, 400 * size, size):
        kept[at : at + size] = b"x" * size
if what in ("nameless", "memfd"):
    for number in range(3):
        if what == "memfd":
            fd = os.memfd_create("x")
        else:
            fd = os.open("f", os.O_CREAT | os.O_RDWR)
            os.unlink("f")
        for _ in range(48):
            os.write(fd, b"x" * size)
if what == "segments":
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    for number in range(5):
        segment = libc.shmget(0, 32 * size, 0o600)
        at = ctypes.c_void_p(libc.shmat(segment, None, 0))
        ctypes.memset(at, 1, 32 * size)
        libc.shmdt(at)
if what == "threads":
    threading.stack_size(64 << 10)
    for _ in range(400):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
time.sleep(100)
"""
#: Of each: what is said of it, where it is not the program itself that ends.
GREEDS = {
    "file": "", "files": "disk_mb", "shm": "disk_mb", "memory": "", "children": "memory_mb", "shared": "memory_mb",
    "processes": "more than 20 processes", "threads": "more than 320 threads", "nameless": "disk_mb", "memfd": "memory_mb",
    "segments": "memory_mb",
}  # fmt: skip


@pytest.mark.parametrize("greed", GREEDS)
@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_who_takes_too_much_loses_its_own_episode_alone(sandbox: str, greed: str, model: str, tmp_path: Path) -> None:
    if sandbox == "unshare" and greed == "shm":  # there, it is the user's
        greed = "files"
    script = tmp_path / "agent.py"
    script.write_text(GREEDY)
    limits = {"disk_mb": 64, "memory_mb": 128, "processes": 20}
    with episodes(script, sandbox, limits=limits) as (agent_processes, outcomes):
        agent_processes.run(ticket(0, model, greed, timeout_s=100.0))
        agent_processes.run(ticket(1, model, "none"))
        said = dict(outcomes.get(timeout=120) for _ in range(2))
    assert said[1] == {"response": "well"}
    error = said[0]["error"]
    assert not said[0].get("timeout") and GREEDS[greed] in error, error


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_no_segment_outlives_its_episode(sandbox: str, model: str, tmp_path: Path) -> None:
    """Nor does an episode see those of the user."""

    def segments() -> list[str]:
        return [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]

    script = tmp_path / "agent.py"
    script.write_text(
        "import ctypes\nctypes.CDLL(None).shmget(0, 4096, 0o600)\nprint(len(open('/proc/sysvipc/shm').readlines()) - 1)"
    )
    with python.ipc_objects():
        before = segments()
        assert before and run_one(script, sandbox, "", model) == {"response": "1"}
        assert segments() == before


@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_nothing_stays_of_an_episode_whatever_it_leaves(
    sandbox: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its folder, though it is deep, locked or full, and though the episode's time is over."""
    (scratch := tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    script = tmp_path / "agent.py"
    script.write_text(
        textwrap.dedent("""
        import os, time
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        open("f", "w").close()
        os.chmod(".", 0)
        time.sleep(100)
    """)
    )
    assert run_one(script, sandbox, "", model, timeout_s=5.0)["timeout"]
    assert list(scratch.iterdir()) == []
