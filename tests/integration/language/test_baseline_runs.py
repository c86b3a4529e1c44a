"""Runs that an earlier commit made are evaluated, exported, resumed and reported with the results that they had then.

`python -m tests.baseline record NAME` records anew what a run does, after a change that is meant; `make` trains it anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.baseline.check import check
from tests.baseline.runs import LANGUAGE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built-in models, made once."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_run_of_the_baseline_does_what_it_did(name: str, tmp_path: Path, models: Path) -> None:
    check(name, tmp_path, models)
