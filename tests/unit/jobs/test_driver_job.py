"""Failure messages of a driver's output."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.jobs.driver_job import first_failure

CHATTER = "2026-11-27 INFO an ordinary line of a library, about eighty bytes long, of which there are many\n"


@pytest.mark.parametrize("before", [0, 100, 110_000])
def test_the_reason_is_found_however_much_was_printed_before(tmp_path: Path, before: int) -> None:
    output = tmp_path / "driver.err"
    earlier = "rlhpc: error: of an earlier attempt\n"
    output.write_text(earlier + CHATTER * before + "rlhpc: error: CUDA out of memory on actor-3\n  log: x\n")
    assert first_failure(output, len(earlier)) == "CUDA out of memory on actor-3\n  log: x"


@pytest.mark.parametrize("before", [0, 110_000])
def test_without_a_message_the_last_lines_count(tmp_path: Path, before: int) -> None:
    output = tmp_path / "driver.err"
    output.write_text(CHATTER * before + "Segmentation fault\n")
    assert first_failure(output).endswith("Segmentation fault")
    assert first_failure(tmp_path / "missing") == ""
