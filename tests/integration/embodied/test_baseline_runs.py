"""Runs that an earlier commit made are evaluated, exported, resumed and reported with the results that they had then.

`python -m tests.baseline record NAME` records anew what a run does, after a change that is meant; `make` trains it anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.baseline.check import check, check_files
from tests.baseline.runs import EMBODIED


def test_every_run_has_an_archive_and_a_record() -> None:
    check_files()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built-in models, made once."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", EMBODIED)
def test_a_run_of_the_baseline_does_what_it_did(name: str, tmp_path: Path, models: Path) -> None:
    check(name, tmp_path, models)
