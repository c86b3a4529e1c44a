"""Fixtures of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.embodied.robots.remote_robot import Inside


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    environment = Inside(tmp_path)
    yield environment
    environment.env.close()
