"""A training run whose simulator process is killed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import warm


@pytest.mark.long
@pytest.mark.chaos
def test_a_run_goes_on_and_counts(tmp_path: Path) -> None:
    """The real command; a simulator is killed from outside while it trains."""
    root = Path(__file__).resolve().parents[3]
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", str(root / "configs/quickstart.yaml"), f"runner.run_dir={tmp_path}",
        "runner.segments=1", "runner.max_steps=60", "runner.save_interval=-1", "env.train.simulators=2",
        "runner.logger.logger_backends=[jsonl]",
    ]  # fmt: skip
    run = warm.Popen(command, stdout=warm.DEVNULL, stderr=warm.PIPE, text=True, cwd=root)
    metrics = tmp_path / "quickstart" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    try:
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        processes = psutil.Process(run.pid).children(recursive=True)
        simulators = [p for p in processes if "rlhpc.embodied.envs.subprocess_main" in " ".join(p.cmdline())]
        assert len(simulators) == 2
        simulators[0].kill()
        assert run.wait(timeout=120) == 0, run.stderr and run.stderr.read()
    finally:
        run.kill()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert rows[-1]["step"] == 60 and rows[-1]["env/restarts"] == 1 and "env/restarts" not in rows[1]
    # Each slot of the simulator loses the one transition in which it died.
    assert [row["env/failed"] for row in rows if "env/failed" in row] == [4]
