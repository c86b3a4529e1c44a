"""Fixtures of the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.from_run_dir(tmp_path, "run")
