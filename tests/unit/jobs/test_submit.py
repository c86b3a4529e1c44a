"""Submission: a driver that is not this run's is not killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlhpc.jobs import submit as submit_module
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Claim
from rlhpc.runtime.errors import UserError
from tests.unit.jobs.foreign_folder import claim_of, folder


def test_a_driver_that_is_none_is_not_killed(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = folder(tmp_path, executor="local")
    gone = {**ProcessId.of(bystander.pid).to_json(), "start": 1}
    claim_of(files, executor="local", job=gone, driver=ProcessId.of(bystander.pid).to_json())
    assert Claim.newest(files) is not None
    with pytest.raises(UserError, match="left alone"):
        submit_module._await_orphan(files, 0.0, open("/dev/null", "w"))  # noqa: SIM115
    assert bystander.poll() is None
