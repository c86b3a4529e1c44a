"""Sizes of logs: what a process knows of its own streams, and the file in which a driver writes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlhpc.runtime.log_sizes import LOG_SIZES, LogSizesFile, Positions, read_log_sizes
from tests.eventually import wait_until

PROGRAM = """
import os, subprocess, sys
from rlhpc.runtime.log_sizes import stream_positions
first = stream_positions()
print("x" * 99, flush=True)
subprocess.run(["sh", "-c", "echo child >&2"])
os.write(2, repr((first, stream_positions())).encode())
"""


def test_a_process_knows_how_far_its_streams_have_grown(tmp_path: Path) -> None:
    """Also by a child, in a file that had content before; a pipe has no size."""
    (tmp_path / "out").write_text("earlier\n")
    with (tmp_path / "out").open("a") as out, (tmp_path / "err").open("a") as err:
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=out, stderr=err, check=True, timeout=60)
    said = (tmp_path / "err").read_text().partition("child\n")[2]
    (_, first_err), (out_size, err_size) = eval(said)
    assert first_err == 0 and out_size == len("earlier\n") + 100 and err_size == len("child\n")
    piped = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert piped.stderr.endswith("((0, 0), (0, 0))")


def test_the_file_follows_the_rows(tmp_path: Path) -> None:
    rows: list[tuple[str, str, Positions]] = [("env-0", "ready", (1, 22)), ("env-1", "starting", (0, 0))]
    file = LogSizesFile(tmp_path, lambda: rows)
    wait_until(lambda: bool(read_log_sizes(tmp_path)), 30)
    assert read_log_sizes(tmp_path) == {"env-0": ("1", "22", "ready"), "env-1": ("0", "0", "starting")}
    inode = (tmp_path / LOG_SIZES).stat().st_ino
    rows[:] = [("env-0", "ended", (1, 23))]
    wait_until(lambda: read_log_sizes(tmp_path) == {"env-0": ("1", "23", "ended")}, 30)
    assert (tmp_path / LOG_SIZES).stat().st_ino == inode, "overwritten in place"
    written = (tmp_path / LOG_SIZES).stat().st_mtime_ns
    rows[:] = [("env-0", "ended", (1, 24))]
    file.stop()
    assert read_log_sizes(tmp_path) == {"env-0": ("1", "24", "ended")}
    assert (tmp_path / LOG_SIZES).stat().st_mtime_ns > written and read_log_sizes(tmp_path / "none") == {}


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    rows: list[tuple[str, str, Positions]] = [("env-0", "ready", (1, 22))]
    file = LogSizesFile(tmp_path / "gone", lambda: rows)
    file.stop()
    (tmp_path / "gone").mkdir()
    file = LogSizesFile(tmp_path / "gone", lambda: rows)
    file.stop()
    assert read_log_sizes(tmp_path / "gone") == {"env-0": ("1", "22", "ready")}
