"""Fixtures of the tests of this folder."""

from __future__ import annotations

import json

import pytest

from tests.unit.embodied.models.released import STATISTICS


@pytest.fixture
def statistics(tmp_path):
    file = tmp_path / "dataset_statistics.json"
    file.write_text(json.dumps(STATISTICS))
    return str(file)
