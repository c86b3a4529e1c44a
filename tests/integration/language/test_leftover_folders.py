"""Folders on the node of a rank that is killed with all that it has started: they go with the rank's session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.eventually import wait_until
from tests.extras import need_extra

need_extra("llm")

from rlhpc.runtime.scratch import remove_stale
from tests.sandboxes import SANDBOXES

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
_RANK = """
import sys
sys.path[:0] = [{here!r}, {root!r}]
from rlhpc.runtime.scratch import Scratch
scratch = Scratch.create()
print(scratch.sockets, flush=True)
"""
#: What a rank is doing when it is killed, by the name of the folder that it has for that.
WORK = {
    "services": """
from rlhpc.language.config.agents import ServiceConfig
from rlhpc.language.agents.services import Services
program = "import time; print('up', flush=True); time.sleep(1000)"
services = Services([ServiceConfig("search", [sys.executable, "-c", program], ready="line: up")])
import time; time.sleep(1000)
""",
    "box": """
from rlhpc.language.sandbox.python import Sandbox
sandbox = Sandbox(wall_s=1000.0, cpu_s=1000.0, allow_unconfined=True)  # which tries itself out, in a folder that goes
(scratch.sockets / "begun").touch()
sandbox.run("import time; time.sleep(1000)")
""",
    "judges": """
import math
from rlhpc.language.rewards import RewardPool, Term
with RewardPool([Term("none", math.fabs)], timeout_s=60, processes=1):
    import time; time.sleep(1000)
""",
    "episode": """
from gateway_things import Scripted, episodes_of, run_all
locked = "mkdir -p deep/er; touch deep/er/file; chmod 500 deep/er deep; touch begun; sleep 1000"
words = ("bash", "-c", locked)
with episodes_of(Scripted(lambda prompt: "x"), command=words, sandbox=sys.argv[1], timeout_s=999.0) as episodes:
    run_all(episodes, 1, seconds=999.0)
""",
    "shell": """
from gateway_things import Scripted, episodes_of, run_all
call = '<tool_call>{"name": "shell", "arguments": {"command": "touch begun; sleep 1000"}}</tool_call>'
options = {"servers": [{"command": [], "url": None, "shell": True}]}
engine = Scripted(lambda prompt: call)
with episodes_of(engine, kind="mcp", options=options, sandbox=sys.argv[1], timeout_s=999.0) as episodes:
    run_all(episodes, 1, seconds=999.0)
""",
}


def kill_all(rank: subprocess.Popen[str]) -> None:
    """Kills a rank and all below it, none of which gets to do anything about it."""
    processes: list[psutil.Process] = []
    while len(found := [psutil.Process(rank.pid), *psutil.Process(rank.pid).children(recursive=True)]) > len(processes):
        processes = found
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended before it could be stopped
                one.send_signal(signal.SIGSTOP)
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    rank.wait()
    psutil.wait_procs(processes, 60)


def found_in(folder: Path, pattern: str) -> list[Path]:
    """What matches; nothing while a part of the folder is being removed."""
    with contextlib.suppress(FileNotFoundError):
        return list(folder.glob(pattern))
    return []


@pytest.mark.parametrize("name", WORK)
def test_a_killed_ranks_folders_go_with_its_session(name: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = _RANK.format(here=str(HERE), root=str(ROOT)) + WORK[name]
    with subprocess.Popen(
        [sys.executable, "-c", program, SANDBOXES[0]], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
    ) as rank:  # fmt: skip
        assert rank.stdout is not None
        session = Path(rank.stdout.readline().strip())
        try:
            begun = {"episode": "/**/begun", "shell": "/**/begun"}.get(name, "")
            if name == "box":
                wait_until(lambda: rank.poll() is not None or (session / "begun").exists(), 120)
            wait_until(lambda: rank.poll() is not None or bool(found_in(session, f"**/rlhpc-{name}-*{begun}")), 120)
            assert rank.poll() is None, "the rank has ended by itself"
        finally:
            kill_all(rank)
    try:
        assert [path.name for path in temporary.rglob("*") if path.name.startswith("rlhpc-")] == []
    finally:
        remove_stale()  # as `rlhpc clean` does, and the next session of this user here: maybe one has begun meanwhile
    assert not session.exists()
