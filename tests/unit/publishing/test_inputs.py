"""Inputs of a run: which values of a configuration they are, their checksums, and where they are found again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from rlhpc.publishing.file_set import FileSet
from rlhpc.publishing.inputs import Inputs, find_input
from rlhpc.publishing.reader import Bundle
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.redaction import Redactor


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\0weights")
    (tmp_path / "train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def inputs(include: bool = False, made: tuple[Path, ...] = ()) -> tuple[Inputs, FileSet]:
    files = FileSet(Redactor(["opensesame-0123"]))
    return Inputs(files, are_included=include, workflow_outputs=made), files


def test_files_and_folders_by_checksum(data: Path) -> None:
    found, files = inputs()
    assert found.move_path("train.jsonl", "data.train.path") == "inputs/0-train.jsonl"
    assert found.move_path(f"{data}/model", "actor.model.model_path") == "inputs/1-model"
    assert found.move_path("train.jsonl", "data.eval[0].path") == "inputs/0-train.jsonl"
    first, second = found.record
    assert first["files"] == {"": {"size": 3, "sha256": hashlib.sha256(b"{}\n").hexdigest()}}
    assert second["files"] == {"model.safetensors": {"size": 8, "sha256": hashlib.sha256(b"\0weights").hexdigest()}}
    assert not files.files


@pytest.mark.parametrize(
    ("value", "key"),
    [("model", "actor.model.model_type"), ("/etc/hostname", "cluster.scratch"), ("/etc/hostname", "runner.run_dir"),
     ("/bin/sh", "env.train.simulator_python"), ("none.jsonl", "data.train.path"), ("builtin:tiny", "actor.model.model_path"),
     ("", "data.train.path")],
)  # fmt: skip
def test_what_is_no_input(data: Path, value: str, key: str) -> None:
    found, _ = inputs()
    assert found.move_path(value, key) == value and found.record == []


def test_what_the_workflow_makes_is_no_input(data: Path) -> None:
    found, _ = inputs(made=(data / "model",))
    assert found.move_path("model/model.safetensors", "actor.model.model_path") == "model/model.safetensors"
    assert found.record == []


def test_included_files_are_exact_or_refused(data: Path) -> None:
    found, files = inputs(include=True)
    found.move_path("model", "actor.model.model_path")
    assert list(files.files) == ["inputs/0-model/model.safetensors"]
    (data / "train.jsonl").write_text('{"question": "opensesame-0123"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl: it has a secret"):
        found.move_path("train.jsonl", "data.train.path")


def test_a_model_of_the_hub_by_its_commit(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    (folder / "blobs").mkdir()
    (folder / "blobs" / ("0" * 64)).write_bytes(b"large")
    (folder / "blobs" / "small").write_bytes(b"{}")
    (folder / "snapshots" / "abc123").mkdir(parents=True)
    (folder / "snapshots" / "abc123" / "model.safetensors").symlink_to(folder / "blobs" / ("0" * 64))
    (folder / "snapshots" / "abc123" / "config.json").symlink_to(folder / "blobs" / "small")
    monkeypatch.setenv("HF_HUB_CACHE", str(data / "hub"))
    found, _ = inputs()
    assert found.move_path("org/name", "actor.model.model_path") == "org/name"
    [entry] = found.record
    assert entry["hub"] == "org/name" and entry["commit"] == "abc123"
    assert entry["files"]["model.safetensors"] == {"size": 5, "sha256": "0" * 64}
    assert entry["files"]["config.json"]["sha256"] == hashlib.sha256(b"{}").hexdigest()


class CodeBundle(Bundle):
    """Bundle whose code has a data set."""

    def __init__(self, checksum: str) -> None:
        self.record = {"code": [{"role": "project", "working_folder": "sub"}]}
        self.checksums = {"code/project/data.jsonl": checksum}


def test_an_input_is_found_in_the_code_at_its_path_or_where_the_user_says(data: Path) -> None:
    original = hashlib.sha256(b"{}\n").hexdigest()
    entry = {"name": "inputs/0-data.jsonl", "path": "../data.jsonl", "files": {"": {"size": 3, "sha256": original}}}
    here = data / "train.jsonl"
    assert find_input(CodeBundle(original), entry, {}) == Path("project/data.jsonl")
    assert find_input(CodeBundle("other"), entry, {}) is None
    assert find_input(CodeBundle("other"), {**entry, "path": str(here)}, {}) == here
    for name in ("inputs/0-data.jsonl", "../data.jsonl"):
        assert find_input(CodeBundle(original), entry, {name: here}) == here  # the user's word counts first
    here.write_text("[]\n")
    with pytest.raises(ConfigError, match="do not have the checksums in the bundle"):
        find_input(CodeBundle("other"), entry, {"inputs/0-data.jsonl": here})
