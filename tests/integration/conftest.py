from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Tests and the processes of some import what lies beside them by its own name.
sys.path.insert(0, str(Path(__file__).parent / "runs"))
sys.path.insert(0, str(Path(__file__).parent / "language"))
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tiny_run import TinyRun


@pytest.fixture
def tiny(tmp_path: Path) -> TinyRun:
    return TinyRun(tmp_path)
