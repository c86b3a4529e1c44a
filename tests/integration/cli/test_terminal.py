"""What a person at a terminal sees and presses: the bar, Ctrl-C, how to go on, and the first error of a run that fails."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.state import run_state
from rlhpc.runtime.os_resources import readable_descriptors
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
RLHPC = [sys.executable, "-m", "rlhpc.cli"]
TINY = [
    "runner.segments=1", "runner.save_interval=-1", "runner.logger.logger_backends=[jsonl]", "env.train.num_envs=2",
    "env.eval.num_envs=2", "env.eval.num_episodes=2", "algorithm.rollout_steps=16", "actor.global_batch_size=32",
    "algorithm.update_epochs=1",
]  # fmt: skip


def at_a_terminal(argv: list[str], folder: Path, press: str = "", limit: float = 270) -> tuple[int, str]:
    """Runs a command on a terminal; Ctrl-C once the pattern `press` was shown.

    Returns:
        The exit status, and all that was shown.
    """
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.pop("MAKELEVEL", None)
        os.execv(argv[0], argv)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    shown, end = b"", time.monotonic() + limit
    while True:
        assert time.monotonic() < end, shown.decode()
        if not readable_descriptors([fd], 0.2):
            continue
        try:
            data = os.read(fd, 1 << 16)
        except OSError:  # the terminal's other end is closed
            break
        shown += data
        if press and re.search(press.encode(), shown):
            os.write(fd, b"\x03")
            press = ""
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode().replace("\r\n", "\n")


@pytest.mark.long
@pytest.mark.parametrize("name", ["train", "run"])
def test_ctrl_c_says_what_is_saved_and_how_to_go_on(name: str, tmp_path: Path) -> None:
    words = [name, QUICKSTART, *TINY, "runner.max_steps=5000"]
    code, shown = at_a_terminal([*RLHPC, *words], tmp_path, press=r"step (?:[3-9]|\d\d+)/5000")
    assert code == 130, shown
    assert "^C" not in shown
    paths = RunPaths(tmp_path / "runs" / "quickstart")
    step, _ = paths.checkpoint_steps()[-1]
    assert f"rlhpc: interrupted; saved up to step {step} of 5000 in " in shown
    again = re.findall(r"^rlhpc: go on: rlhpc (.*)$", shown, re.M)
    resume = ["runner.resume_dir=auto"] if name == "train" else []
    assert [shlex.split(line) for line in again] == [[*words, *resume]]
    assert "Traceback" not in shown and run_state(paths)[0] != "running"
    if name == "train":  # what it says to type does go on
        go_on = [*shlex.split(again[0]), f"runner.max_steps={step + 2}"]
        done = warm.run([*RLHPC, *go_on], cwd=tmp_path, check=True, timeout=240, capture_output=True, text=True)
        assert f"rlhpc: goes on from step {step} (" in done.stderr
        assert paths.checkpoint_steps()[-1][0] == step + 2


BREAKS = """
import gymnasium

class Breaks(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        raise ValueError("the gripper is stuck")

gymnasium.register("Breaks-v0", Breaks, max_episode_steps=10)
"""


@pytest.mark.long
def test_a_failure_is_shown_with_its_logs(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    done = subprocess.run(
        [*RLHPC, "run", QUICKSTART, *TINY, "env.train.env_id=breaks:Breaks-v0", "runner.max_steps=2", "--", "--config",
         "retries=0"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "the gripper is stuck" in done.stderr
    assert "log: runs/quickstart/logs/workflow/train_segment_0.log; Snakemake's: runs/quickstart/logs/" in done.stderr
    assert f"goes on from the last checkpoint: rlhpc run {QUICKSTART}" in done.stderr
    assert "jobid" not in done.stderr and "MissingOutput" not in done.stderr


def test_a_mistake_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    for words in (["runner.max_step=2"], ["--profile", "no/such"]):
        done = warm.run([*RLHPC, "run", QUICKSTART, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stderr.count("rlhpc: error:") == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_dry_run_shows_the_jobs_and_writes_nothing(tmp_path: Path) -> None:
    done = warm.run([*RLHPC, "run", QUICKSTART, *TINY, "-n"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "train_segment" in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
