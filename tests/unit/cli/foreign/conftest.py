"""Fixtures of the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.foreign.rlinf_configs import CUBE, MLP, put


@pytest.fixture
def project(tmp_path: Path) -> Path:
    put(tmp_path, "env/cube.yaml", CUBE)
    put(tmp_path, "model/mlp.yaml", MLP)
    return tmp_path
