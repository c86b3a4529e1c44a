"""Files of others that are no files: a pipe that nobody writes to, a device without an end, a size that no memory holds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.jobs.elastic.records import read_stays
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.status import newest_generation, print_logs, render_status
from rlhpc.metrics.logger import read_last_metrics, read_metrics
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import open_file, read_file, read_yaml_file
from rlhpc.runtime.registry import GenerationFolder
from rlhpc.runtime.repository import git_state


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ODD: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "endless": _endless, "folder": Path.mkdir}
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", [*ODD, "huge"])
def test_what_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    {**ODD, "huge": _huge}[kind](path)
    with pytest.raises(OSError, match=r"is no regular file|has more than 256 MB"):
        read_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_metrics(path)
    assert read_json_file(path) is None
    if kind != "huge":
        assert read_last_metrics(path) == []
        with pytest.raises(OSError, match="is no regular file"):
            open_file(path)
    with pytest.raises((OSError, ValueError)):
        read_yaml_file(path)


@pytest.mark.parametrize("kind", ODD)
def test_a_run_folder_of_them(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunPaths(tmp_path / "run")
    (run.registry / "local-0/members").mkdir(parents=True)
    (run.root / "logs/segment_0").mkdir(parents=True)
    places = (
        run.driver_state, run.attendance, run.root / "metrics.jsonl", run.registry / "local-0/members/env-0.json",
        run.registry / "current", run.root / "logs/segment_0/env-0.err", run.config, run.provenance,
    )  # fmt: skip
    for path in places:
        ODD[kind](path)
    assert newest_generation(run) is not None and read_stays(run) == []
    assert "state" in render_status(run)
    print_logs(run)
    with pytest.raises(OSError):
        GenerationFolder(run.registry / "local-0").get("members", "env-0")


@pytest.mark.parametrize("name", [".git", ".git/HEAD", ".git/config", ".git/commondir"])
def test_a_repository_of_them(name: str, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, capture_output=True)
    path = tmp_path / name
    path.rename(tmp_path / "moved") if path.exists() else None
    os.mkfifo(path)
    git_state(tmp_path)
