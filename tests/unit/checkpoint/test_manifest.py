"""Manifests of checkpoints: digests, sizes and damage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.checkpoint import CheckpointWriter, find_resumable, manifest, read_manifest, store, verify
from rlhpc.checkpoint.manifest import COMPLETE, MANIFEST, is_trusted, seal
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError
from tests.unit.checkpoint.saving import _flip, names, save


def test_save_has_manifest_and_nothing_else_left(paths: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("runner: {}")
    with CheckpointWriter(paths, 3) as writer:
        writer.add_bytes("runner.json", b"{}")
        writer.add_bytes("nested/part.bin", b"x")
        writer.add_file("config.yaml", tmp_path / "source")
        final = writer.commit({"env_steps": 7})
    assert final == paths.checkpoint(3)
    assert names(paths) == ["global_step_3"]
    assert verify(final) == []
    manifest = json.loads((final / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["global_step"] == 3 and manifest["meta"] == {"env_steps": 7}
    assert set(manifest["files"]) == {"runner.json", "nested/part.bin", "config.yaml"}
    assert manifest["files"]["runner.json"]["size"] == 2


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A machine of four cores, where any file is worth a thread; the threads that hashed."""
    seen: set[str] = set()
    monkeypatch.setattr(manifest, "_MIN_THREADED_BYTES", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    digest = manifest.digest

    def watched(path: Path) -> tuple[int, str]:
        seen.add(threading.current_thread().name)
        time.sleep(0.02)
        return digest(path)

    for module in (manifest, store):
        monkeypatch.setattr(module, "digest", watched)
    return seen


def test_files_are_hashed_side_by_side(paths: RunPaths, many_cores: set[str]) -> None:
    contents = {f"{n:02}.bin": os.urandom(50 + n) for n in range(12)}
    with CheckpointWriter(paths, 1) as writer:
        for name, content in contents.items():
            writer.add_bytes(name, content)
        final = writer.commit({})
    found = read_manifest(final)["files"]
    assert found == {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    assert len(many_cores) == 4 and verify(final) == []
    for name in ("03.bin", "09.bin"):
        (final / name).write_bytes(bytes(len(contents[name])))
    assert [fault.partition(":")[0] for fault in verify(final)] == ["03.bin", "09.bin"]


def _truncate(path: Path) -> None:
    part = path / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-5])


def _alter_manifest(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["meta"]["env_steps"] += 1
    (path / "manifest.json").write_text(json.dumps(manifest))


def _drop_entry(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["actor-0.pt"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def _escape(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = {"size": 1, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = {
    "truncated": (_truncate, "model.safetensors", "truncated"),
    "bit flip": (_flip, "model.safetensors", "checksum"),
    "missing file": (lambda p: (p / "actor-0.pt").unlink(), "actor-0.pt", "missing"),
    "empty file": (lambda p: (p / "actor-0.pt").write_bytes(b""), "actor-0.pt", "0 bytes"),
    "missing COMPLETE": (lambda p: (p / "COMPLETE").unlink(), "COMPLETE", "did not end"),
    "empty COMPLETE": (lambda p: (p / "COMPLETE").write_bytes(b""), "COMPLETE", "altered"),
    "missing manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json", "missing"),
    "altered manifest": (_alter_manifest, "manifest.json", "altered"),
    "dropped entry": (_drop_entry, "manifest.json", "altered"),
    "manifest not JSON": (lambda p: (p / "manifest.json").write_text("{"), "manifest.json", "not JSON"),
    "manifest a list": (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json", "not a JSON object"),
    "manifest binary": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json", "not JSON"),
    "other format": (lambda p: (p / "manifest.json").write_text('{"format": 9}'), "manifest.json", "format 9"),
    "path outside": (_escape, "manifest.json", "bad entry"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_skipped_by_auto_and_an_error_by_name(paths: RunPaths, kind: str) -> None:
    damage, file, reason = DAMAGE[kind]
    good, bad = save(paths, 10), save(paths, 20)
    damage(bad)

    faults = verify(bad)
    assert any(file in fault and reason in fault for fault in faults), faults

    found = find_resumable(paths, "auto")
    assert (found.path, found.step) == (good, 10)
    assert [path for path, _ in found.skipped] == [bad]
    assert file in found.skipped[0][1] and reason in found.skipped[0][1]

    for asked in (bad, "global_step_20"):
        with pytest.raises(CheckpointError) as caught:
            find_resumable(paths, asked)
        for part in (str(bad), file, reason, "resume_dir=auto"):
            assert part in str(caught.value)


def test_wrong_step_folder_and_plain_file(paths: RunPaths) -> None:
    save(paths, 1).rename(paths.checkpoint(2))
    assert "is of step 1" in verify(paths.checkpoint(2))[0]
    paths.checkpoint(3).write_text("a file")
    assert verify(paths.checkpoint(3)) == ["not a folder"]
    assert verify(paths.checkpoint(4)) == ["no such folder"]
    assert find_resumable(paths, "auto").path is None


def test_sizes_only_does_not_read(paths: RunPaths) -> None:
    path = save(paths, 1)
    _flip(path)
    assert verify(path, checks_digests=False) == [] and verify(path) != []


def test_the_manifest_has_every_file_that_a_rank_wrote_whatever_the_listing_shows(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's node may list a folder as it was some time ago. Each rank's own node knows what the rank wrote, in whatever
    way: summed on the way, copied first and written later, written by a library, or linked."""
    import random

    import torch

    from rlhpc.checkpoint.async_writer import HostBuffers, Writes, write_file
    from rlhpc.runs.checkpointing import merge_checksums

    listed = Path.rglob
    large = torch.arange(1 << 19, dtype=torch.float32)
    save(paths, 1)
    for step in range(2, 8):
        draw = random.Random(step)
        with CheckpointWriter(paths, step) as writer:
            reports = []
            for rank in range(2):
                writes = Writes(writer.staging, HostBuffers())
                with writes.collect():
                    write_file(writer.staging / f"actor-{rank}.pt", {"weights": large}, lambda f, v: torch.save(v, f))
                    write_file(writer.staging / f"small-{rank}.pt", {"step": step}, lambda f, v: torch.save(v, f))
                    (writer.staging / f"library-{rank}").mkdir()
                    (writer.staging / f"library-{rank}" / "shard.pt").write_bytes(b"by a library")
                    os.link(paths.checkpoint(1) / "actor-0.pt", writer.staging / f"linked-{rank}.npy")
                reports.append(writes.write())
            everything = {path.relative_to(writer.staging).as_posix() for path in listed(writer.staging, "*.*")}
            with monkeypatch.context() as patch:
                stale = {path for path in listed(writer.staging, "*") if draw.random() < 0.5}
                patch.setattr(
                    Path, "rglob", lambda self, pattern, stale=stale: (p for p in listed(self, pattern) if p in stale)
                )
                final = writer.commit({}, merge_checksums(reports))
        assert {*read_manifest(final)["files"]} == everything and len(everything) == 8
        assert verify(final) == []
        for name in everything:
            file = final / name
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(b"damage")
            assert verify(final), name
            file.write_bytes(content)


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
