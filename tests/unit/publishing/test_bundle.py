"""Writing of bundles: the same bytes twice, as a file and as a folder, whole or not at all."""

from __future__ import annotations

import hashlib
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.publishing.bundle import write_bundle
from rlhpc.publishing.contents import BundleOptions
from rlhpc.runtime.errors import ConfigError
from tests.finished_runs import make_run

OPTIONS = BundleOptions(checkpoints="include", code="commit")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs")


def test_twice_is_the_same(run: RunPaths, tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip", "folder"):
        write_bundle(run, tmp_path / name, OPTIONS)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        assert all((tmp_path / "folder" / name).read_bytes() == archive.read(name) for name in names)
    assert len(names) == sum(path.is_file() for path in (tmp_path / "folder").rglob("*"))


def test_the_checksums_are_those_of_sha256sum(run: RunPaths, tmp_path: Path) -> None:
    write_bundle(run, tmp_path / "folder", OPTIONS)
    command = ["sha256sum", "--quiet", "--strict", "--check", "checksums.sha256"]
    subprocess.run(command, cwd=tmp_path / "folder", check=True, capture_output=True)
    (tmp_path / "folder" / "run" / "metrics.jsonl").write_text("other\n")
    assert subprocess.run(command, cwd=tmp_path / "folder", capture_output=True, check=False).returncode == 1


def test_an_output_that_exists_stays(run: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_text("mine")
    (tmp_path / "link.zip").symlink_to(tmp_path / "nowhere")
    for name in ("a.zip", "link.zip"):
        with pytest.raises(ConfigError, match="it exists; remove it, or choose another place with -o"):
            write_bundle(run, tmp_path / name, OPTIONS)
    assert (tmp_path / "a.zip").read_text() == "mine" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["a.zip", "folder"])
def test_nothing_half_written_stays(run: RunPaths, tmp_path: Path, name: str) -> None:
    (run.segment_logs(0) / "rollout.err").write_bytes(hashlib.sha256(b"").digest() * (1 << 16))
    (tmp_path / "out").mkdir()
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))  # as on a full disk: a write fails in the middle
    try:
        with pytest.raises(ConfigError, match="cannot be written: File too large"):
            write_bundle(run, tmp_path / "out" / name, OPTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command(run: RunPaths, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhpc.cli", "bundle", "runs/small", "--code", "commit", "--author", "A. Turing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    size_line = done.stdout.splitlines()[1]
    assert done.stdout.splitlines()[0] == "small.crate.zip"
    assert size_line.endswith(hashlib.sha256((tmp_path / "small.crate.zip").read_bytes()).hexdigest())
    assert "checkpoints: 1 by checksum (--checkpoints include takes the files)" in done.stdout
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert again.returncode == 2 and "it exists" in again.stderr
