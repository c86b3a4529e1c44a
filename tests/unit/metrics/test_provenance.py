"""provenance.json: first start, resumes, placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import read_provenance, update_provenance, write_provenance
from rlhpc.runtime.errors import RlhpcError


def test_segments_are_appended_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths.of(tmp_path, "run")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = write_provenance(paths, OmegaConf.create({"a": 1}), ["rlhpc", "train", "a b.yaml"])
    assert first["command"] == "rlhpc train 'a b.yaml'" and first["slurm"]["JOB_ID"] == "77"
    assert {"rlhpc", "python", "torch", "numpy"} <= set(first["versions"])
    update_provenance(paths, placement={"actor": [{"rank": 0, "node": "n", "accelerators": []}]})
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    write_provenance(paths, {"a": 1}, "rlhpc train again")
    record = json.loads(paths.provenance.read_text())
    assert [segment["slurm"]["JOB_ID"] for segment in record["segments"]] == ["77", "78"]
    assert record["command"] == first["command"] and "actor" in record["placement"]
    assert record["segments"][0]["config_sha256"] == record["segments"][1]["config_sha256"]


def test_damaged_record_is_replaced(tmp_path: Path) -> None:
    paths = RunPaths.of(tmp_path, "run")
    paths.root.mkdir()
    paths.provenance.write_text("{")
    assert read_provenance(paths) == {}
    assert len(write_provenance(paths, None, "x")["segments"]) == 1


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RlhpcError, match=r"provenance could not be written"):
        write_provenance(RunPaths.of(tmp_path, "run"), None, "x")
