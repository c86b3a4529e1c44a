"""Executors of submitit on filesystems that lose the reply to a rename."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.executors import make_local_executor, make_slurm_executor


def _exists_already(self: Path, target: Path, real: Callable[..., Any] = Path.rename) -> Path:
    """Renames a file and reports the answer to the request that was sent again."""
    real(self, target)
    raise FileExistsError(17, "File exists", str(self), None, str(target))


def _executors(folder: Path) -> list[Any]:
    return [
        make_local_executor(str(folder), timeout_min=5, max_num_timeout=0),
        make_slurm_executor(str(folder), "name", {}, max_num_timeout=0),
    ]


@pytest.mark.parametrize("number", range(2), ids=["local", "slurm"])
def test_the_files_of_a_job_are_where_it_looks_for_them_though_a_reply_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    executor = _executors(tmp_path)[number]
    if number:
        monkeypatch.setattr(executor, "_make_submission_command", lambda path: ["echo", "Submitted batch job 7"])
    else:
        monkeypatch.setattr("rlhpc.jobs.executors._CONTROLLER", "pass")
    monkeypatch.setattr(Path, "rename", _exists_already)
    job = executor.submit(print)
    assert job.paths.submitted_pickle.is_file()
    if number:
        assert job.paths.submission_file.is_file()
        assert any(path.resolve() == job.paths.submission_file for path in tmp_path.iterdir() if path.is_symlink())
