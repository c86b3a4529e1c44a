from __future__ import annotations

import string
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 64 tokens, for files that have none of their own."""
    from rlhpc.language.models.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, vocabulary=string.printable[:60], hidden=32, layers=2)
    return folder
