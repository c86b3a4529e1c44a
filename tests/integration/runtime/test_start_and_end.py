"""Processes that do not start, waits that somebody ends, and scripts that end with something under way."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlhpc import Channel, Cluster, DeadlineExceeded
from rlhpc.runtime.comm import background
from rlhpc.runtime.os_resources import MIN_OPEN_FILES
from tests import warm
from tests.probes import Spawned
from tests.stderr import error_lines

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
RLHPC = [sys.executable, "-P", "-m", "rlhpc.cli"]


def folders() -> set[str]:
    return {str(p) for root in ("/tmp", "/dev/shm") for p in Path(root).glob(f"rlhpc-{os.getuid()}-*")}


# -- ranks that do not start ------------------------------------------------------------------------------------------


def test_a_fork_server_that_cannot_start_is_reported_at_once(tmp_path: Path) -> None:
    """Its words are in a log of the run, which the message names. Here something hides a module that it imports."""
    (tmp_path / "secrets.py").write_text("raise SystemExit('this module is mine')")
    source = (
        "import sys, time\n"
        "from rlhpc import cli\n"
        "from rlhpc.runtime import scratch, session\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.exit(cli.main(['train', {QUICKSTART!r}, 'runner.run_dir={tmp_path / 'runs'}']))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    log = tmp_path / "runs/quickstart/logs/segment_0/forkserver.err"
    assert done.returncode == 1 and "this module is mine" in log.read_text(), done.stderr
    assert "the fork server of node" in done.stderr and str(log) in done.stderr and "this module is mine" in done.stderr


def test_roles_ask_for_a_fresh_interpreter() -> None:
    cluster = Cluster.local(1, 0)
    spawned = Spawned.create_group("spawned").launch(cluster, name="asks")
    forked = Spawned.create_group("forked").launch(cluster, name="does_not")
    assert "rlhpc.runtime.worker_process" in spawned.command().wait()[0]
    assert "rlhpc.runtime.launchers.fork_server" in forked.command().wait()[0]
    spawned.shutdown()
    forked.shutdown()


# -- waits that somebody ends -----------------------------------------------------------------------------------------

#: An environment that is built in the environment's rank and takes for ever there; the check before the start is spared.
SLOW = """
import os, sys, time
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Slow(CartPoleEnv):
    def __init__(self, **kw):
        if "fork_server" in " ".join(sys.orig_argv):
            open(os.environ["MARK"], "w").close()
            time.sleep(600)
        super().__init__(**kw)

gymnasium.register("Slow-v0", entry_point=Slow, max_episode_steps=50)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR2, 75)])
def test_a_signal_ends_the_wait_for_ranks(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "slow_env.py").write_text(SLOW)
    mark = tmp_path / "mark"
    driver = warm.Popen(
        [*RLHPC, "train", QUICKSTART, f"runner.run_dir={tmp_path / 'runs'}", "env.train.env_id=slow_env:Slow-v0",
         "runner.segments=1", "env.train.simulators=0"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MARK": str(mark)}, stderr=warm.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.05)
    tree = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(number)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == code and "nothing to save" in said and "Traceback" not in said, said
    _, left = psutil.wait_procs(tree, timeout=10)  # what was killed is seen for another moment
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    assert '"state": "stopped"' in (tmp_path / "runs/quickstart/status.json").read_text()


@pytest.mark.parametrize("how", ["refused", "killed"])
def test_a_fork_server_that_still_imports_ends_with_its_driver(tmp_path: Path, how: str) -> None:
    """The import of a module that takes for ever stands for that of torch."""
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(600)\n")
    end = "sys.exit(2)" if how == "refused" else "os.kill(os.getpid(), 9)"
    source = (
        "import os, sys\nfrom rlhpc import Session\nfrom rlhpc.runtime.launchers.local import ForkServerProcess\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "Session.prewarm(['takes_long'])\n"
        "server = ForkServerProcess._prewarmed\n"
        "print(server.process.pid, server.scratch.token, flush=True)\n"
        "sys.stdin.readline()\n" + end
    )
    driver = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pid, token = driver.stdout.readline().split()
    server = psutil.Process(int(pid))
    while "takes_long" not in " ".join(server.cmdline()) or server.status() != psutil.STATUS_SLEEPING:
        time.sleep(0.02)
    time.sleep(0.5)
    driver.communicate("\n", timeout=60)
    server.wait(60)  # the import would take ten minutes
    assert not [path for path in folders() if token in path]


def test_a_wait_that_is_over_names_who_is_at_it(launch) -> None:
    """Not only who was waited for, which itself waits."""
    busy, waiting, silent = launch(1, "hung"), launch(1, "waiting"), launch(1, "silent")
    os.kill(pid := silent.identity().wait()[0]["pid"], signal.SIGSTOP)
    busy.nap(60)
    silent.add(1)
    handle = waiting.consume(Channel.create("nothing"), 1)
    with pytest.raises(DeadlineExceeded) as caught:
        handle.wait(timeout=1.0)
    os.kill(pid, signal.SIGCONT)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("hung[0] on node ") and "nap (" in lines[0] and "probes.py:" in lines[0]
    assert busy._records[0]["log_err"] in lines[0]
    assert lines[1].strip().startswith("silent[0] on node ") and "does not even say" in lines[1]
    assert lines[2].strip() == "waited 1.0 s for waiting.consume() on ranks [0]" and len(lines) == 3


# -- what a shell hands over ------------------------------------------------------------------------------------------

FAULT = """
import sys
from rlhpc import cli
from rlhpc.embodied.runners.rollout_runner import EmbodiedRunner
def one_step(self):
    raise KeyError("reward")
EmbodiedRunner.one_step = one_step
sys.exit(cli.main(sys.argv[1:]))
"""


def test_an_error_that_nobody_has_foreseen_leaves_its_traceback(tmp_path: Path) -> None:
    words = ["train", QUICKSTART, f"runner.run_dir={tmp_path}", "runner.segments=1"]
    done = warm.run([sys.executable, "-c", FAULT, *words], capture_output=True, text=True, timeout=100)
    log = tmp_path / "quickstart/logs/segment_0/driver.err"
    assert done.returncode == 1 and "Traceback" not in done.stderr and f"traceback in {log}" in done.stderr, done.stderr
    assert "in one_step" in log.read_text() and "KeyError: 'reward'" in log.read_text()
    status = json.loads((tmp_path / "quickstart/status.json").read_text())
    assert (
        status["state"] == "failed"
        and "KeyError: 'reward'" in status["stop_reason"]
        and str(log) in status["stop_reason"]
    )


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("$RLHPC help 2>&- >&- <&-", 0, ""),
        ("$RLHPC help >/dev/full", 1, "rlhpc: error: cannot write standard output"),
        ("PYTHONIOENCODING=ascii $RLHPC help train", 0, ""),
        ("mkdir gone && cd gone && rmdir ../gone && $RLHPC help", 2, "rlhpc: error: the working directory has been removed"),
    ],
    ids=["closed", "full", "ascii", "removed"],
)  # fmt: skip
def test_streams_and_folders_of_all_kinds(line: str, code: int, says: str, tmp_path: Path) -> None:
    environment = {**os.environ, "RLHPC": str(Path(sys.executable).parent / "rlhpc")}
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and done.stderr.startswith(says), done.stderr
    assert len(error_lines(done.stderr)) == bool(says), done.stderr


# -- limits -----------------------------------------------------------------------------------------------------------


def test_too_few_descriptors_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    few = 24

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    done = subprocess.run(
        [*RLHPC, "train", QUICKSTART, f"runner.run_dir={tmp_path / 'runs'}"],
        preexec_fn=limit, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "runs").exists(), done.stderr
    assert (
        f"may open {few} files" in done.stderr and str(MIN_OPEN_FILES) in done.stderr and "Traceback" not in done.stderr
    )


# -- scripts that end with something under way ------------------------------------------------------------------------

PENDING = """
import os, sys, threading
os.environ["RLHPC_WAIT_DEADLINE_S"] = "600"
sys.path.insert(0, {root!r})
from rlhpc import Channel, Cluster, NodePlacementStrategy
from tests.probes import Probe
group = Probe.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0]), "pending")
mine = Channel.create("mine")
theirs = Channel.create("theirs", home="pending")
works = [mine.get(async_op=True), mine.get("other", async_op=True), theirs.get(async_op=True)]
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise RuntimeError('mine')", 1),
        ("from rlhpc import Session; Session.running().stop()\n"
         "try:\n    works[0].wait(60)\nexcept Exception as error: print(type(error).__name__, error)\n"
         "try:\n    works[2].wait(60)\nexcept Exception as error: print(type(error).__name__, error)", 0),
    ],
    ids=["end", "exception", "stop"],
)  # fmt: skip
def test_a_script_does_not_outlive_its_pending_operations(end: str, code: int) -> None:
    source = PENDING.format(root=str(ROOT), end=end)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=90)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("ChannelError") == 2 * ("stop()" in end), done.stdout + done.stderr


def test_background_threads_end_when_there_is_nothing_to_do(launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(1, "keeper")
    monkeypatch.setattr(background, "LINGER_S", 0.05)
    channel = Channel.create("many", home="keeper")
    for round_ in range(3):
        for number in range(20):
            channel.put((round_, number), key="k", async_op=True)
        assert [channel.get("k") for _ in range(20)] == [(round_, number) for number in range(20)]
        deadline = time.monotonic() + 10
        while (
            left := [t.name for t in threading.enumerate() if t.name == "rlhpc-put-many"]
        ) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left and "put-many" not in background._queues
