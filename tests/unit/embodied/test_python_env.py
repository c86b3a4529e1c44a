"""Calls in another Python environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.embodied import python_env
from tests.eventually import wait_until

ROOT = Path(__file__).parents[3]


def record(folder: str) -> str:
    """Records until it is interrupted, and then takes a while to write what it has."""
    Path(folder, "started").touch()
    try:
        time.sleep(60)
    except KeyboardInterrupt as error:
        time.sleep(1)
        Path(folder, "kept").touch()
        error.add_note("complete episodes: 3")
        raise
    return "not interrupted"


def main(folder: str) -> int:
    from rlhpc.runtime.exit_codes import report_errors

    return report_errors(lambda: print(python_env.call_where_importable(folder, record, folder)) or 0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_call_in_order(tmp_path: Path, signum: signal.Signals) -> None:
    """The other process is waited for, and what it has to say is said."""
    (tmp_path / "config.json").write_text(json.dumps({"policy": {"model": {"model_type": "lerobot"}}}))
    # A Python of its own: with the one that looks for lerobot, the call would stay in this process.
    hidden = "import importlib.util as u, sys; u.find_spec = lambda name: None;"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{hidden} from {__name__} import main; sys.exit(main(sys.argv[1]))", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), python_env.PYTHON: sys.executable}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: process.poll() is not None or (tmp_path / "started").exists(), 60)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "rlhpc: interrupted; complete episodes: 3\n")
    assert (tmp_path / "kept").exists()
