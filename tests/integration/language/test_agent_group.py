"""Whole runs whose agents have ranks of their own: the same run, wherever agents are, and whoever of them is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from test_agent_runs import AGENT
from test_reasoning import LanguageRun
from test_replicas import Disturbed

pytestmark = pytest.mark.long

GROUP = (*AGENT, "agent.target=outside_agents:slow_digits",
         "cluster.component_placement={'actor,rollout': '0', agent: '0:0-1'}")  # fmt: skip


@pytest.mark.chaos
def test_agents_on_ranks_of_their_own_and_one_of_these_is_lost(tmp_path: Path) -> None:
    """The run is that of agents beside the engine, to the last bit; what a lost rank had under way, the other begins again."""
    beside = LanguageRun(tmp_path / "beside", *AGENT)
    beside.train()
    run = Disturbed(tmp_path / "group", pause_s=4.0, settings=GROUP)

    def left() -> list[int]:
        return [int(path.name[5:]) for path in run.pause.parent.glob("left-*")]

    def under_way() -> bool:
        """Whether the rank that will be lost has episodes."""
        with contextlib.suppress(KeyError, OSError, psutil.NoSuchProcess):
            below = {p.pid for p in psutil.Process(run.members()["agent-1"]).children(recursive=True)}
            return bool(below & {*left()})
        return False

    run.until(under_way)
    before, started = run.members(), left()
    os.kill(before["agent-1"], signal.SIGKILL)
    run.until(lambda: "agent goes on without rank 1" in run.said())
    run.hurry()
    said = run.end()
    assert "agent[1] ended; other ranks begin its episodes again, and nothing else is lost" in said, said
    assert "start again from" not in said
    rows = run.rows()
    again = [row.pop("agent/begun_again") for row in rows]
    assert again[0] > 0 and rows == beside.rows()
    deadline = time.monotonic() + 10
    while there := [pid for pid in {*started, *left()} if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, there
        time.sleep(0.05)
    keys = [path for path in run.root.rglob("*") if path.is_file() and b"rk-" in path.read_bytes()]
    assert keys == [], "no file of the run has an episode's key"
