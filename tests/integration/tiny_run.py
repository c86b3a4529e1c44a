"""A tiny run of the quickstart task, started as a person would: through the command line, in its own process tree."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
TINY = (
    "runner.segments=1", "runner.max_steps=20", "runner.save_interval=3", "algorithm.rollout_steps=32",
    "algorithm.update_epochs=2", "actor.global_batch_size=64",
    "env.eval.num_episodes=4", "runner.logger.logger_backends=[jsonl]",
)  # fmt: skip


class TinyRun:
    """A run of the quickstart configuration with few and short steps, in a folder of its own."""

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        self.run_dir, self.overrides = run_dir, [*TINY, f"runner.run_dir={run_dir}", *overrides]
        self.root = run_dir / "quickstart"

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "rlhpc.cli", "train", str(CONFIG), *self.overrides, *more]

    def start(self, *more: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return warm.Popen(self.command(*more), start_new_session=True, **pipes)

    def train(self, *more: str, code: int = 0, timeout: float = 240) -> str:
        """Runs to the end; returns stderr."""
        done = warm.run(self.command(*more), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == code, done.stderr
        return done.stderr

    def lose(self, rank: str, after: int) -> str:
        """Runs to the end, and kills a rank once the checkpoint of a step is complete; returns stderr."""
        process = self.start()
        wait_until(lambda: (self.checkpoint(after) / "COMPLETE").exists())
        record = self.root / "registry" / "local-0" / "members" / f"{rank}.json"
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
        return str(said)

    def rows(self) -> list[dict[str, Any]]:
        """Metric rows without the clock's, and without what was lost."""
        lines = (self.root / "metrics.jsonl").read_text().splitlines()
        left_out = ("time/", "energy/", "env/lost_")
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(left_out)} for line in lines]

    def lost(self) -> dict[str, int]:
        """What the newest row says of it: `ranks`, `steps`, `episodes`."""
        try:
            row = json.loads((self.root / "metrics.jsonl").read_text().splitlines()[-1])
        except (FileNotFoundError, ValueError, IndexError):
            return {}
        return {name.removeprefix("env/lost_"): count for name, count in row.items() if name.startswith("env/lost_")}

    def checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / f"global_step_{step}"

    def steps(self) -> int:
        """Steps whose metrics have been written."""
        try:
            return (self.root / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def status(self) -> dict[str, Any]:
        try:
            return json.loads((self.root / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """SIGKILL to the process and everything below it, at once."""
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def wait_until(condition: Any, timeout: float = 150, pause: float = 0.005) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for never happened"
        time.sleep(pause)
