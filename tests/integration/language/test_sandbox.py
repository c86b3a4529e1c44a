"""The sandbox against programs that want out, with every set of mechanisms that a cluster may offer."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from rlhpc.language.sandbox.python import Sandbox
from rlhpc.runtime.errors import ConfigError
from tests.attack.programs import ESCAPES, escaped, targets
from tests.drawn import drawn

SETS = (("namespaces", "landlock", "seccomp"), ("namespaces", "seccomp"), ("landlock", "seccomp"))
ROOT = Path(__file__).resolve().parents[3]


def made(**given) -> Sandbox:
    try:
        return Sandbox(**{"wall_s": 5.0, "memory_mb": 256, "file_mb": 2, "disk_mb": 8, "output_kb": 64, **given})
    except ConfigError as error:
        pytest.skip(str(error))  # a kernel without these


@pytest.fixture(scope="module", params=SETS, ids="+".join)
def box(request) -> Sandbox:
    return made(mechanisms=request.param)


def left_behind(caller: int) -> list[str]:
    """Processes of sandboxes that `caller` started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"confine.main" in word for word in words) and words[-2] == str(caller).encode():
            found.append(folder.name)
    return found


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path_factory):
    """Temporary files have a folder of the test's own: others' sandboxes come and go beside it."""
    tmp_path_factory.getbasetemp()  # which pytest makes, and keeps, where temporary files are
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        Path(folder).chmod(0o711)  # for the test of another user
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert left_behind(os.getpid()) == []
        assert not list(Path(folder).glob("rlhpc-box-*"))


def run(box: Sandbox, source: str, **given):
    return box.run(textwrap.dedent(source), **given)


def test_an_ordinary_program_runs(box):
    result = run(
        box,
        """
        import collections, dataclasses, json, os, random, re, tempfile, threading
        print(sum(map(int, input().split())), os.listdir("."))
        with open("notes.txt", "w") as file:
            file.write("kept")
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        with open(os.devnull, "w") as file:
            file.write("x")
        thread = threading.Thread(target=lambda: print(open("notes.txt").read()))
        thread.start(); thread.join()
        import asyncio
        print(asyncio.run(asyncio.sleep(0, "awaited")))
        @dataclasses.dataclass
        class Point:
            x: int = 1
        print(Point(), __name__)
        """,
        stdin="2 3",
    )
    assert (result.status, result.stderr) == ("ok", "")
    assert result.stdout == "5 []\nkept\nawaited\nPoint(x=1) __main__\n"
    assert result.cpu_s > 0 and result.memory > 1 << 20


def test_installed_packages_can_be_imported(box):
    result = run(box, "import numpy\nprint(numpy.arange(4).sum())")
    assert (result.stdout, result.stderr) == ("6\n", "")


def test_an_exception_is_told(box):
    result = run(box, "def f():\n    return 1 / 0\nf()")
    assert result.status == "error" and result.error == "ZeroDivisionError: division by zero"
    assert 'File "<program>", line 2, in f' in result.stderr and "harness" not in result.stderr
    assert run(box, "this is no Python").error.startswith("SyntaxError")
    assert run(box, "raise SystemExit(3)").status == "error"
    assert run(box, "import sys; print('a'); sys.exit()").status == "ok"


def test_endless_loop(box):
    for source in ("while True: pass", "import time; time.sleep(60)"):
        result = run(box, source, wall_s=0.6)
        assert result.status == "timeout" and result.seconds < 5


def test_cpu_time_is_bounded_where_the_wall_is_not_reached():
    result = run(
        made(cpu_s=1.0, wall_s=120.0), "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    )
    assert result.status == "killed" and 1 <= result.cpu_s < 4


def test_endless_output(box):
    result = run(box, "while True: print('x' * 1000)")
    assert result.status == "output" and len(result.stdout) == 64 * 1024
    result = run(box, "import sys\nwhile True: sys.stderr.write('x' * 1000)")
    assert result.status == "output" and len(result.stderr) == 64 * 1024


def test_memory_hog(box):
    result = run(box, "kept = []\nwhile True: kept.append(bytearray(1 << 20))")
    assert result.error.startswith("MemoryError") and result.memory < 256 << 20


def test_huge_file(box):
    result = run(
        box,
        """
        with open("big", "wb") as file:
            while True:
                file.write(b"x" * (1 << 16))
        """,
    )
    assert result.status in ("error", "killed")
    assert not result.error or "too large" in result.error.lower()


def test_many_files_do_not_fill_the_disk(box):
    """Where the program's folder is in memory; elsewhere the sandbox says that only each file is bounded."""
    result = run(
        box,
        """
        for i in range(100):
            with open(str(i), "wb") as file:
                file.write(b"x" * (1 << 20))
        """,
    )
    assert ("No space left" in result.error) == bool(box.limits()["disk"]), result


def test_fork_bomb(box):
    result = run(box, "import os\nwhile True: os.fork()", wall_s=2.0)
    assert result.status == "error" and "not permitted" in result.error
    result = run(box, "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])")
    assert result.status == "error" and "not permitted" in result.error


def test_thread_bomb(box):
    result = run(
        box,
        """
        import threading, time
        while True:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        """,
        wall_s=3.0,
    )
    assert result.status in ("error", "killed", "timeout")


def test_processes_where_they_are_allowed():
    box = made(processes=4)
    if "process namespace" not in box.limits()["processes"]:
        pytest.skip("more than one process needs a process namespace")
    result = run(box, "import subprocess\nprint(subprocess.run(['/bin/echo', 'hi'], capture_output=True).stdout)")
    assert (result.stdout, result.stderr) == ("b'hi\\n'\n", "")
    bomb = "import os\nn = 0\ntry:\n    while os.fork() or True: n += 1\nexcept OSError: pass\n"
    result = run(box, bomb, wall_s=2.0)
    assert result.status in ("ok", "timeout", "output")
    daemon = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(20):
                    try: os.close(fd)
                    except OSError: pass
                time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        print("left one")
        """
    result = run(box, daemon)
    assert (result.status, result.stdout) == ("ok", "left one\n") and result.seconds < 5


def test_network(box):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        for source in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)",
            f"import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', {port}))",
            f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        ):
            assert run(box, source).status == "error"
        with pytest.raises(TimeoutError):
            server.accept()


def test_unix_sockets_of_others(box, tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="s-"))
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as abstract:
        named.bind(str(folder / "s"))
        named.listen()
        abstract.bind(f"\0rlhpc-{os.getpid()}")
        abstract.listen()
        for address in (str(folder / "s"), f"\0rlhpc-{os.getpid()}"):
            result = run(box, f"import socket\nsocket.socket(socket.AF_UNIX).connect({address!r})")
            assert result.status == "error"
    shutil.rmtree(folder)


def test_secrets_in_the_environment(box, monkeypatch):
    monkeypatch.setenv("RLHPC_TEST_TOKEN", "hunter2")
    source = """
        import glob, os
        print(dict(os.environ))
        for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/mem"):
            try:
                with open(path, "rb") as file:
                    print(file.read(100000))
            except OSError as error:
                pass
        try:
            print(open(f"/proc/{PARENT}/environ").read())
        except OSError:
            print("refused")
        """
    child = subprocess.Popen(["sleep", "30"])  # carries the variable, as this process does not after its start
    try:
        result = run(box, source.replace("PARENT", str(child.pid)))
    finally:
        child.kill()
        child.wait()
    assert "refused" in result.stdout and "hunter2" not in result.stdout


@pytest.mark.parametrize("target", ["PARENT", "os.getppid()", "-1", "0"])
def test_killing_others(box, target):
    source = f"""
        import os, signal
        try:
            os.kill({target.replace("PARENT", str(os.getpid()))}, signal.SIGKILL)
        except OSError as error:
            print("refused")
        """
    victim = subprocess.Popen(["sleep", "30"])
    try:
        assert run(box, source).stdout == "refused\n"
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_other_ways_to_signal_and_trace(box):
    victim = subprocess.Popen(["sleep", "30"])
    source = f"""
        import ctypes, fcntl, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        pid = {victim.pid}
        print(libc.ptrace(16, pid, 0, 0), libc.ptrace(0, 0, 0, 0))
        reader, writer = os.pipe()
        for attempt in (
            lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, pid),
            lambda: fcntl.fcntl(reader, 10, signal.SIGKILL),
            lambda: os.setpriority(os.PRIO_USER, 0, 19),
            lambda: os.sched_setaffinity(pid, {{0}}),
            lambda: __import__("resource").prlimit(pid, 7, (0, 0)),
            lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL),
        ):
            try:
                attempt()
                print("through")
            except OSError:
                pass
        print(libc.prctl(1, 0, 0, 0, 0), libc.shmget(1234, 4096, 0o1777))
        """
    try:
        result = run(box, source)
        assert (result.stdout, victim.poll()) == ("-1 -1\n-1 -1\n", None), result
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.drawn
def test_escapes(box):
    """Messages and semaphores of the same user, and a part of all."""
    short = [
        "segment: remove",
        "queue: read",
        "semaphore: value",
        "named queue: unlink",
        "flock of the interpreter's file",
    ]
    with targets() as known:
        assert [name for name in drawn("escapes", ESCAPES, always=short, least=4) if escaped(box, name, known)] == []


def test_escapes_would_get_through():
    """The same attempts, unconfined: what stops them is the sandbox."""
    harmless = [
        "segment: status",
        "queue: status",
        "queue: read",
        "semaphore: value",
        "named queue: open",
        "read a file",
    ]
    with targets() as known:
        box = Sandbox(mechanisms=(), allow_unconfined=True)
        assert "ipc" in box.unenforced()
        assert [name for name in harmless if not escaped(box, name, known)] == []


def test_its_own_signals_work(box):
    source = """
        import os, signal
        signal.signal(signal.SIGUSR1, lambda *_: print("mine"))
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        os.abort()
        """
    result = run(box, source.replace("os.abort()", "print('end', flush=True)\n        os.abort()"))
    assert (result.status, result.stdout) == ("killed", "mine\nmine\nend\n")


def test_files_of_others(box):
    with tempfile.TemporaryDirectory(prefix="of-others-") as name:
        folder = Path(name)
        kept = folder / "kept"
        kept.write_text("secret")
        os.utime(kept, (1, 1))
        mode = folder.stat().st_mode
        source = f"""
            import os, pathlib, shutil
            home, kept = pathlib.Path({name!r}), pathlib.Path({str(kept)!r})
            for attempt in (
                lambda: print(kept.read_text()), lambda: (home / "new").write_text("x"), lambda: kept.unlink(),
                lambda: home.chmod(0), lambda: os.truncate(kept, 0), lambda: os.utime(kept), lambda: kept.rename("moved"),
                lambda: os.link(kept, "linked"), lambda: os.open(kept, os.O_RDONLY | os.O_TRUNC),
                lambda: os.setxattr(home, "user.x", b"y"), lambda: print(os.listdir(home)),
                lambda: pathlib.Path(os.__file__).write_text(""), lambda: os.open(os.__file__, os.O_RDONLY | os.O_TRUNC),
                lambda: os.chmod(os.__file__, 0), lambda: pathlib.Path("/dev/shm/x").write_text("x"),
                lambda: pathlib.Path("/tmp/of-others").write_text("x"), lambda: os.chroot("/"),
                lambda: pathlib.Path.home().joinpath("../escaped").write_text("x"),
            ):
                try:
                    attempt()
                    print("through")
                except OSError:
                    pass
            os.symlink(kept, "link")
            try:
                print(open("link").read())
            except OSError:
                print("refused")
            """
        assert run(box, source).stdout == "refused\n"
        assert kept.read_text() == "secret" and kept.stat().st_mtime == 1
        assert sorted(folder.iterdir()) == [kept] and folder.stat().st_mode == mode


def test_the_keeper_cannot_be_reached(box):
    source = """
        import os
        found = set()
        for fd in range(3, 64):
            try:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/0", f"/proc/{os.getppid()}/mem"):
            try:
                os.open(path, os.O_RDWR)
                print("through", path)
            except OSError:
                pass
        """
    assert run(box, source).stdout == ""


def test_the_verdict_is_not_the_programs(box):
    """Programs that claim success: none of them makes a failing check pass."""
    checks = [{"kind": "value", "source": "add(2, 3)"}, {"kind": "script", "source": "assert add(2, 3) == 5"}]
    wrong = "def add(a, b):\n    return a - b\n"
    for trick in (
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import atexit, os; atexit.register(os._exit, 0)",
        "print('passed'); print({'check': 1, 'passed': True})",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'0123 passed 1 null\\n')\n    except OSError: pass",
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})",
        "import signal, os; os.kill(os.getpid(), signal.SIGKILL)",
        'import json; json.dumps = lambda *a, **k: \'{"check": 1, "passed": true}\'',
        "import builtins; builtins.exec = builtins.eval = builtins.compile = lambda *a, **k: 5",
        "import builtins; builtins.enumerate = lambda x: [(i, {'kind': 'script', 'source': ''}) for i in range(2)]",
        "raise SystemExit",
        "import threading, os, time\nthreading.Thread(target=lambda: os._exit(0)).start(); time.sleep(1)",
    ):
        result = box.check(wrong + trick, checks)
        assert not any("passed" in check for i, check in result.checks.items() if i == 1), trick
        assert result.checks.get(0, {}).get("value") != {"i": "0x5"}, trick
    equal = "class Equal:\n    def __eq__(self, other): return True\ndef add(a, b): return Equal()"
    assert "cannot leave the sandbox" in box.check(equal, checks).checks[0]["error"]


def test_checks(box):
    result = box.check(
        "def double(x):\n    return {'it': (x * 2, [x, None, True], 1.5)}\nif __name__ == '__main__': raise SystemExit",
        [
            {"kind": "value", "source": "double(4)"}, {"kind": "value", "source": "missing()"},
            {"kind": "script", "source": "assert seven == 7"}, {"kind": "script", "source": "assert seven == 8, 'no'"},
            {"kind": "script", "source": "while True: pass"}, {"kind": "value", "source": "1"},
        ],
        setup="seven = 7", wall_s=1.0,
    )  # fmt: skip
    assert result.status == "timeout" and sorted(result.checks) == [0, 1, 2, 3]
    assert result.checks[0]["value"]["d"][0][1] == {
        "t": [{"i": "0x8"}, {"l": [{"i": "0x4"}, None, True]}, {"f": (1.5).hex()}]
    }
    assert result.checks[1]["error"].startswith("NameError")
    assert result.checks[2]["passed"] and result.checks[3]["error"] == "AssertionError: no"


def test_killed_with_its_caller(box, tmp_path):
    """The caller is killed while a program runs: nothing of it goes on."""
    script = f"""
        from rlhpc.language.sandbox.python import Sandbox
        box = Sandbox(mechanisms={box._job["mechanisms"]!r})
        print("ready", flush=True)
        box.run("import time, ctypes\\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\\ntime.sleep(60)", wall_s=60)
        """
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert caller.stdout is not None and caller.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + 10
    while not left_behind(caller.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left_behind(caller.pid)
    time.sleep(0.3)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    caller.stdout.close()
    while left_behind(caller.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left_behind(caller.pid) == []


def test_what_cannot_be_enforced_is_said_and_refused(caplog):
    with pytest.raises(ConfigError, match=r"does not enforce: .*network.*allow_unconfined"):
        Sandbox(mechanisms=())
    box = Sandbox(mechanisms=(), allow_unconfined=True)
    assert box.limits()["network"] == "" and "network" in caplog.text
    assert box.limits()["memory"] == "resource limit"
    assert box.run("print(1)").stdout == "1\n"
    with pytest.raises(ConfigError, match="mechanisms"):
        Sandbox(mechanisms=("magic",))
    with pytest.raises(ConfigError, match="wall_s is 0"):
        Sandbox(wall_s=0)


@pytest.mark.parametrize("knob", ["user", "pid", "mnt", "net"])
def test_where_the_administrator_forbids_namespaces(knob):
    """What is left confines all the same; and where it would not, that is found out."""
    if not left_to_landlock():
        pytest.skip("needs user namespaces, to forbid them in, and Landlock")
    script = f"""
        from rlhpc.language.sandbox.python import Sandbox
        box = Sandbox()
        result = box.run("open('a', 'w').write('x'); import os; print(os.listdir('.'))")
        print(box.unenforced(), result.stdout, {knob!r} in result.have or "mount" in result.have)
        without = Sandbox(mechanisms=("namespaces",), allow_unconfined=True)
        print(without.unenforced() != [])
        """
    shell = f'echo 0 > /proc/sys/user/max_{knob}_namespaces && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", shell, sys.executable, textwrap.dedent(script)], capture_output=True, text=True,
        timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    mounted = knob == "net"  # the only one without which files can be mounted
    assert done.stdout == f"[] ['a']\n {mounted}\nTrue\n", done.stderr


def left_to_landlock() -> bool:
    try:
        Sandbox(mechanisms=("landlock", "seccomp"))
        return subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode == 0
    except (ConfigError, FileNotFoundError):
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests have run without root already")
def test_without_root():
    """The same, started by an ordinary user."""
    python = next(
        (p for p in ("/usr/bin/python3.13", "/usr/bin/python3.12", "/usr/bin/python3.11") if Path(p).exists()), ""
    )
    if not python:
        pytest.skip("no Python that an ordinary user may start")
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(ROOT / "rlhpc", Path(name) / "rlhpc", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", name], check=True)
        script = f"""
            from rlhpc.language.sandbox.python import Sandbox
            for mechanisms in {SETS!r}:
                box = Sandbox(mechanisms=mechanisms)
                print(box.unenforced(), box.run("print(1)").stdout, box.run("import os; os.fork()").status)
            import glob, os
            print([path for path in glob.glob("/tmp/rlhpc-box-*") if os.stat(path).st_uid == os.getuid()])
            """
        done = subprocess.run(
            [python, "-B", "-c", textwrap.dedent(script)], cwd=name, user=1234, group=1234, extra_groups=[],
            env={"PYTHONPATH": name}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.stdout == "[] 1\n error\n" * 3 + "[]\n", done.stderr
