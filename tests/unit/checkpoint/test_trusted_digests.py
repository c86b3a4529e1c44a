"""Checkpoints that are taken for this user's own, and those that are not."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.checkpoint.manifest import COMPLETE, MANIFEST, seal, verify
from rlhpc.checkpoint.trusted_digests import is_trusted
from rlhpc.jobs.paths import RunPaths


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with CheckpointWriter(RunPaths(tmp_path / "run"), 3) as writer:
        writer.add_bytes("config.yaml", b"env: {train: {env_type: mine:Env}}\n")
        writer.add_bytes("model.safetensors", bytes(20))
        return writer.commit()


def test_what_a_run_has_written_is_own_wherever_it_lies(checkpoint: Path, tmp_path: Path) -> None:
    assert is_trusted(checkpoint)
    assert is_trusted(shutil.copytree(checkpoint, tmp_path / "elsewhere"))


def alter(folder: Path) -> None:
    (folder / "config.yaml").write_text("env: {train: {env_type: evil:Env}}\n")


def alter_all(folder: Path) -> None:
    """Changes a file, with its checksums."""
    alter(folder)
    size, raw = (folder / "config.yaml").stat().st_size, json.loads((folder / MANIFEST).read_text())
    raw["files"]["config.yaml"] = {
        "size": size, "sha256": hashlib.sha256((folder / "config.yaml").read_bytes()).hexdigest(),
    }  # fmt: skip
    manifest = json.dumps(raw).encode()
    (folder / MANIFEST).write_bytes(manifest)
    (folder / COMPLETE).write_bytes(seal(manifest))
    assert not verify(folder)


@pytest.mark.parametrize(
    "change",
    [
        alter,
        alter_all,
        lambda folder: (folder / "config.yaml").unlink(),
        lambda folder: (folder / COMPLETE).unlink(),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{}"),
        shutil.rmtree,
    ],
)
def test_what_was_changed_is_not(checkpoint: Path, change: Callable[[Path], object]) -> None:
    change(checkpoint)
    assert not is_trusted(checkpoint)


def test_another_user_does_not_trust_it(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert not is_trusted(checkpoint)


def test_a_home_that_cannot_be_written_is_no_reason_not_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with CheckpointWriter(RunPaths(tmp_path / "run"), 3) as writer:
        writer.add_bytes("config.yaml", b"{}")
        folder = writer.commit()
    assert not verify(folder) and not is_trusted(folder)
