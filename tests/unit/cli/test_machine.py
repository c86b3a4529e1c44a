"""Commands for this machine and this cluster: their output, exit codes, and the mistakes that they refuse."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.jobs import shared_probe
from rlhpc.runtime import environment_archive, scratch

NODE = os.uname().nodename.split(".")[0]


def test_the_doctor_writes_the_findings_that_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a probe job, it looks at this machine and the folder of the runs."""
    code = main(["doctor", "--nodes", "0", "--folder", str(tmp_path / "runs"), "--json", str(tmp_path / "found.json")])
    shown = capsys.readouterr().out
    findings = json.loads((tmp_path / "found.json").read_text())
    text = json.dumps(findings)
    assert findings and code == int('"fail"' in text), "1, if anything fails"
    assert len(shown.splitlines()) >= len(findings)


def test_clean_removes_from_the_scratch_folder_of_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "local").mkdir(mode=0o1777)
    (tmp_path / "site.yaml").write_text(f"cluster: {{scratch: {tmp_path / 'local'}}}\n")
    monkeypatch.setenv("RLHPC_SCRATCH", "")  # so that what the command sets is taken back
    for name in ("_SOCKET_ROOT", "_SHM_ROOT"):
        monkeypatch.setattr(scratch, name, tmp_path)
    monkeypatch.setattr(shared_probe, "remove_unused_folders", list)  # those of other tests
    monkeypatch.setattr(environment_archive, "remove_unused", list)
    left = tmp_path / "local" / f"rlhpc-{os.getuid()}-dead-spill"
    left.mkdir(mode=0o700)
    assert main(["clean", "--site", str(tmp_path / "site.yaml")]) == 0
    assert capsys.readouterr().out == f"{NODE}: left {left}, which a live run has\n", "it may be about to start"
    os.utime(left, (time.time() - 3600,) * 2)
    assert main(["clean", "--site", str(tmp_path / "site.yaml")]) == 0
    assert f"{NODE}: removed {left}" in capsys.readouterr().out and not left.exists()
    assert main(["clean", "--site", str(tmp_path / "site.yaml")]) == 0
    assert capsys.readouterr().out == f"{NODE}: nothing to remove\n"


def test_pack_says_how_the_archive_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "environment"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "tool").write_bytes(bytes(5000))
    pack = environment_archive.pack
    monkeypatch.setattr(environment_archive, "pack", lambda archive: pack(archive, prefix))  # not that of the tests
    archive = tmp_path / "environment.tar"
    assert main(["pack", str(archive)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{archive}: ") and f"files of {prefix}" in first and first.endswith("on each node")
    assert second == f"use it with {environment_archive.KEY}={archive}"
    assert archive.stat().st_size > 0


def test_explain_takes_a_name_a_message_or_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain"]) == 0
    assert "  no-usable-gpu " in capsys.readouterr().out
    assert main(["explain", "value-not-allowed"]) == 0
    shown = capsys.readouterr().out
    assert main(["explain", "actor.optim.lr is -1.0; it must be above 0 and at most 10"]) == 0
    assert capsys.readouterr().out == shown
    log = "a\nrlhpc: error: actor.optim.lr is -1.0; it must be above 0 and at most 10\nrlhpc: error: another\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(log))
    assert main(["explain", "-"]) == 0
    assert capsys.readouterr().out == shown, "the first error of the log"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "a=b"], "doctor takes no key=value words: a=b"),
        (["doctor", "--nodes", "-1"], "--nodes must be at least 0"),
        (["doctor", "--start", "nan"], "--start more than 0"),
        (["clean", "a=b"], "clean takes no key=value words: a=b"),
        (["pack", "x.tar", "a=b"], "pack takes no key=value words: a=b"),
        (["explain", "an elephant"], "no explanation fits this text"),
    ],
)
def test_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
