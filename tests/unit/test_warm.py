"""A process that tests start warm is what subprocess would have started."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rlhpc.runtime.os_resources import adopt_orphans
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import json, os, resource, signal, sys
def lines(name):
    return sorted(open("/proc/self/" + name).read().split(chr(0)))
out = [getattr(sys, name) for name in ("stdout", "stderr")]
known = {
    "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "safe": sys.flags.safe_path, "folder": os.getcwd(),
    "command": lines("cmdline"), "environ": lines("environ"), "os.environ": dict(os.environ), "comm": lines("comm"),
    "descriptors": [n for n in range(3, 100) if os.path.exists(f"/proc/self/fd/{n}") and os.get_inheritable(n)],
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "umask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE), "input": sys.stdin.read(),
    "handlers": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "mask": len(signal.pthread_sigmask(0, [])), "streams": [[s.encoding, s.errors, s.line_buffering] for s in out],
    "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(), "file": globals().get("__file__"),
}
print(json.dumps(known))
print("said", file=sys.stderr)
sys.exit(3)
"""


def both(command: list[str], tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    """What a program says of itself when it is started cold and warm."""
    known = []
    for module in (subprocess, warm):
        done = module.run(command, capture_output=True, text=True, input="in\n", **options)
        assert (done.returncode, done.stderr) == (3, "said\n")
        known.append(json.loads(done.stdout))
    return known


@pytest.mark.parametrize("how", ["-c", "-P -c", "-u -c", "script", "-m"])
def test_it_is_what_a_cold_one_is(how: str, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    program = {"script": [str(tmp_path / "look.py")], "-m": ["-m", "look"]}.get(how) or [*how.split(), LOOK]
    environment = {**os.environ, "PYTHONPATH": "/nowhere:.", "OWN": "é\n"}
    reader, writer = os.pipe()
    cold, hot = both([sys.executable, *program, "a", "", "b c"], tmp_path, cwd=tmp_path, env=environment, pass_fds=[reader],
                     start_new_session=how == "-m")  # fmt: skip
    os.close(reader), os.close(writer)
    assert hot == cold
    assert hot["parent"] == os.getpid() and hot["leads"] == (how == "-m")


def test_limits_umask_group_and_ignored_signals_are_the_callers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mask, before = os.umask(0o027), signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        cold, hot = both([sys.executable, "-c", LOOK], Path(), process_group=0, env=dict(os.environ))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.umask(mask)
        signal.signal(signal.SIGUSR1, before)
    assert hot == cold and hot["files"] == [soft - 1, hard] and hot["group"]


ENDS = {
    "returns": ("print('x')", 0),
    "says a number": ("raise SystemExit(300)", 300 & 255),
    "says words": ("raise SystemExit('words')", 1),
    "raises": ("def f():\n    1 / 0\nf()", 1),
    "is interrupted": (  # also where the tests run in a shell's background, which ignores the signal
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT)",
        -signal.SIGINT,
    ),
    "is killed": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "has a thread": (
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        0,
    ),
    "has something to do at its end": ("import atexit; atexit.register(print, 'end')", 0),
    "cannot say": ("import os; os.close(1); print('x')", 120),
}


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_a_cold_one_does(how: str) -> None:
    source, code = ENDS[how]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    cold, hot = (
        module.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
        for module in (subprocess, warm)
    )
    assert hot.returncode == cold.returncode == code
    assert hot.stdout == cold.stdout
    assert hot.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]
    if how == "raises":
        assert hot.stderr == cold.stderr


def test_it_has_the_heavy_packages_and_so_have_those_it_starts() -> None:
    inner = "import os, sys; print('torch' in sys.modules, os.getppid())"
    outer = (
        "import os, subprocess, sys; "
        f"print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    )
    done = warm.run([sys.executable, "-c", outer], capture_output=True, text=True, check=True)
    pid, loaded, parent = done.stdout.split()
    assert loaded == "True" and parent == pid


def test_what_the_package_has_done_before_its_program_is_done() -> None:
    """A driver is started so, and with it all of a submitted run."""
    source = (
        "import ctypes, sys; known = ctypes.c_int(); ctypes.CDLL(None).prctl(37, ctypes.byref(known), 0, 0, 0); "
        "print(known.value, 'torch' in sys.modules)"
    )
    for module, preexec_fn, said in (
        (subprocess, adopt_orphans, "1 False\n"), (warm, adopt_orphans, "1 True\n"), (warm, lambda: None, "0 False\n"),
    ):  # fmt: skip
        done = module.run([sys.executable, "-c", source], preexec_fn=preexec_fn, capture_output=True, text=True)
        assert done.stdout == said


def test_what_is_random_differs() -> None:
    source = "import random, uuid, numpy; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    one, two = (
        warm.run([sys.executable, "-c", source], capture_output=True, text=True).stdout.split() for _ in range(2)
    )
    assert all(a != b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("why", ["early variable", "a module of that name", "another working directory that is gone"])
def test_what_it_could_not_do_alike_starts_cold(why: str, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if why == "early variable":
        environment["OMP_NUM_THREADS"] = "3"
    else:
        (tmp_path / "torch.py").write_text("")
        environment["PYTHONPATH"] = str(tmp_path)
    if why.startswith("another"):
        with pytest.raises(FileNotFoundError):
            warm.run([sys.executable, "-c", ""], cwd=tmp_path / "gone")
        return
    done = warm.run(
        [sys.executable, "-c", "import sys; print('torch' in sys.modules)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n"


def test_several_threads_start_processes_at_once() -> None:
    said: list[str] = []

    def one(number: int) -> None:
        done = warm.run([sys.executable, "-c", f"print({number})"], capture_output=True, text=True, timeout=60)
        said.append(done.stdout.strip())

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [str(n) for n in range(8)]


def test_a_timeout_kills_it() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


def test_a_runs_fork_server_is_warm_whatever_it_sets_for_its_ranks() -> None:
    """It is in most tests, and imports for two seconds otherwise."""
    source = (
        "from pathlib import Path\n"
        "from rlhpc.runtime.launchers.local import ForkServerProcess\n"
        "server = ForkServerProcess(None)\n"  # imports nothing itself
        "print('libtorch_cpu' in Path(f'/proc/{server.process.pid}/maps').read_text())\n"
        "server.control.close()\n"
        "server.process.wait()\n"
    )
    done = warm.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"
