"""Runs that were imported from RLinf's configurations train."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc import cli
from rlhpc.jobs.paths import RunPaths
from tests.unit.cli.foreign.rlinf_configs import put
from tests.unit.test_rlinf_corpus import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imported_run_trains(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = put(tmp_path, f"{family}.yaml", FAMILIES[family])
    assert cli.main(["config", "import", str(source), "-o", "ours.yaml", "cluster.accelerators_per_node=0"]) == 0
    assert cli.main(["train", "ours.yaml", "runner.name=swing"]) == 0
    paths = RunPaths.from_run_dir("runs", "swing")
    assert (paths.root / "checkpoints" / "global_step_2").is_dir()
