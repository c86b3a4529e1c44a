"""Code of a run in its bundle: that of its start, whatever has happened to the repository since."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.provenance import read_provenance
from rlhpc.publishing.code import add_code
from rlhpc.publishing.file_set import FileSet
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.redaction import Redactor
from tests.finished_runs import make_repository, make_run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    make_repository(folder, {"train.py": "x = 1\n", "big.csv": "1\n" * (1 << 20), ".gitignore": "runs\n"})
    (folder / "link.py").symlink_to("train.py")
    monkeypatch.chdir(folder)
    return folder


def code_of(paths: RunPaths, *, include: bool = True) -> tuple[dict[str, Any], FileSet]:
    files = FileSet(Redactor(["opensesame-0123"]))
    record = read_provenance(paths)
    for start in record["segments"]:  # that of rlhpc takes long, and is the same
        start["code"] = [code for code in start["code"] if code["role"] == "project"]
    [entry] = add_code(files, paths, record, is_included=include)
    return entry, files


def content(files: FileSet, name: str) -> bytes:
    found = files.files[name].content
    return found if isinstance(found, bytes) else found.read_bytes()


def test_the_files_are_those_of_the_start(project: Path) -> None:
    (project / "train.py").write_text("x = 2\n")
    paths = make_run(project / "runs")
    (project / "train.py").write_text("x = 3\n")
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.org", "commit", "-qam", "later"], check=True)
    entry, files = code_of(paths)
    assert content(files, "code/project/train.py") == b"x = 2\n" and b"+x = 2" in content(files, "code/project.diff")
    assert entry["left_out"] == ["big.csv"] and "missing" not in entry
    assert set(files.files) == {"code/project.diff", "code/project/train.py", "code/project/.gitignore"}
    entry, files = code_of(paths, include=False)
    assert set(files.files) == {"code/project.diff"} and entry["dirty"]


def test_what_cannot_be_had_any_more_is_said(project: Path) -> None:
    (project / "train.py").write_text("x = 2\n")
    paths = make_run(project / "runs")
    state = read_provenance(paths)["segments"][0]["code"][0]
    difference = paths.provenance_files / state["diff"]
    difference.write_text(difference.read_text().replace("-x = 1", "-x = 9"))
    assert code_of(paths)[0]["missing"] == "the recorded changes do not fit the commit"
    difference.unlink()
    entry, files = code_of(paths)
    assert "the changes to the commit were not recorded" in entry["missing"] and not files.files
    shutil.rmtree(project / ".git")
    subprocess.run(["git", "init", "--quiet"], check=True)
    (project / "train.py").write_text("x = 1\n")
    clean = make_run(project / "runs", name="other")
    assert not read_provenance(clean)["segments"][0].get("code", [{}])[0].get("commit")


def test_a_change_to_a_program_is_recorded_with_the_checksum_of_the_original(project: Path) -> None:
    (project / "train.py").write_text('key = "opensesame-0123"\n')
    entry, files = code_of(make_run(project / "runs"))
    assert content(files, "code/project/train.py") == b'key = "<redacted>"\n'
    assert list(entry["redacted"]) == ["train.py"] and len(entry["redacted"]["train.py"]) == 64


def test_a_binary_file_of_the_commit_with_a_secret_is_refused(project: Path) -> None:
    (project / "model.bin").write_bytes(b"\0opensesame-0123")
    subprocess.run(["git", "add", "model.bin"], check=True)
    with pytest.raises(ConfigError, match=r"model\.bin: it has a secret"):
        code_of(make_run(project / "runs"))
