"""The rows of a killed and resumed run, as the tracking services' own readers find them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.extras import find_python, needs_python

ROOT = Path(__file__).resolve().parents[2]
PYTHON = find_python("loggers")
SCRIPT = str(Path(__file__).with_name("tracking_services.py"))


def start(folder: Path, *arguments: str, kill: bool = False) -> str:
    """Runs the script without credentials; waits for whatever the services' libraries left behind, too."""
    secrets = ("WANDB", "MLFLOW", "SWANLAB", "TRACKIO", "HF_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(secrets)}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(folder)}
    process = subprocess.Popen(
        [PYTHON, SCRIPT, str(folder), *arguments], env=environment, cwd=folder, start_new_session=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = process.communicate(timeout=280)
    assert process.returncode == (-9 if kill else 0)
    deadline = time.monotonic() + 60
    while [pid for pid in psutil.pids() if session(pid) == process.pid]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return out


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.long
@pytest.mark.timeout(120)
@needs_python("loggers")
def test_the_pages_commands_are_the_services_own() -> None:
    """Each has the command and the options that docs/how-to/loggers.md says how to look at a run with."""
    rows = re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", (ROOT / "docs/how-to/loggers.md").read_text(), re.M)
    seen = []
    for service, shown in rows:
        for command in re.findall(rf"(?<!/){service} (\w+)", shown):
            seen.append(service)
            argv = [str(Path(PYTHON).parent / service), command, "--help"]
            said = subprocess.run(argv, capture_output=True, text=True, timeout=60)
            assert said.returncode == 0, said.stderr
            for option in re.findall(r"--[a-z-]+", shown):
                assert option in said.stdout, (service, command, option)
    assert sorted(seen) == ["mlflow", "swanlab", "trackio", "wandb"]


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_python("loggers")
def test_a_killed_run_goes_on_in_the_same_one_with_each_row_once(tmp_path: Path) -> None:
    start(tmp_path, "write", "1", "5", "-", "kill", kill=True)  # as if the last checkpoint were that of step 3
    before = json.loads((tmp_path / "run/loggers.json").read_text())
    assert set(before) == {"wandb", "mlflow", "swanlab", "trackio"}
    start(tmp_path, "write", "4", "7", "3", "end")
    assert json.loads((tmp_path / "run/loggers.json").read_text()) == before
    found: dict[str, Any] = json.loads(start(tmp_path, "read"))
    for name, content in found.items():
        rows = sorted(content["rows"])
        assert [step for step, _, _ in rows] == [1, 2, 3, 4, 5, 6, 7], (name, rows)
        # 1 to 3 from the start that was killed, 6 and 7 from the second, 4 and 5 from either.
        assert [value for _, value, _ in rows[:3]] == [11, 21, 31] and [v for _, v, _ in rows[5:]] == [60, 70], name
        assert all(value in (10 * step, 10 * step + 1) for step, value, _ in rows), name
        assert all(part != part for _, _, part in rows), (name, "not a number")
        assert float(content["gamma"]) == 0.9, name
    # MLflow's rows are transactions: what was there stays.
    assert [value for _, value, _ in found["mlflow"]["rows"]][3:5] == [41, 51]
