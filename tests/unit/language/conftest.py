"""Fixtures of the tests of language models."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlhpc.language.models.tiny import make_tiny_model  # needs an extra, as the tests that use it

    folder = tmp_path_factory.mktemp("models") / "causal"
    make_tiny_model(folder, hidden=32, layers=2)
    return folder
