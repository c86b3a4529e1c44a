"""`rlhpc trace`: what it asks a run for, what it merges, and one line and exit code 2 for every mistake."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.config.constraints import parse_steps
from tests.extras import need_extra
from tests.trace_decoders import decode
from tests.unit.live.test_server import UnixConnection, get

T0 = 1_790_000_000_000_000_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run with a recorded step on two hosts, one of which is 2 s behind, and a rank that dropped spans."""
    root = tmp_path / "run"
    (root / "trace").mkdir(parents=True)
    (root / "config.yaml").write_text("runner: {name: run}\n")

    def write(group: str, host: str, lines: list[dict[str, object]]) -> None:
        header = {"rlhpc_trace": 1, "group": group, "rank": 0, "host": host, "host_id": host, "pid": 5}
        text = "".join(json.dumps(line) + "\n" for line in [header, *lines])
        (root / "trace" / f"{group}-0.jsonl").write_text(text)

    write("driver", "gpu1", [{"spans": [["step 7", "step", T0, T0 + 1000, "main", {"step": 7}]]}])
    behind = T0 - 2_000_000_000
    clock = [[behind, T0 + 500, T0 + 500, behind + 1000]]
    write("env", "cpu1", [{"spans": [["a", "call", behind, behind + 900, "main", None]], "clock": clock, "dropped": 4}])
    return root


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.pftrace"])
def test_a_trace_is_merged(name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "-o", str(tmp_path / name), "--only", "7"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path / name}: steps 7, 2 ranks, 2 spans, 0 messages"
    assert said[1].startswith("  clock of cpu1: -2.000000 s from the driver's, ± 0.00")
    assert said[2] == "  env-0 dropped 4 spans and messages"
    assert {one.name for one in decode(tmp_path / name).slices} == {"step 7", "a"}


def test_many_steps_are_listed_as_intervals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [*range(1, 150), 151, 160, 161]
    spans = [["step", "step", T0 + n, T0 + n + 1, "main", {"step": n}] for n in steps]
    with (run / "trace" / "driver-0.jsonl").open("a") as file:
        file.write(json.dumps({"spans": spans}) + "\n")
    assert main(["trace", str(run), "-o", str(tmp_path / "t.json")]) == 0
    listed = "1-149,151,160-161"
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{tmp_path / 't.json'}: steps {listed}, 2 ranks")
    assert parse_steps(listed) == {*steps}
    assert main(["trace", str(run), "-o", str(tmp_path / "t.json"), "--only", "200-203,150"]) == 2
    assert f"no trace of step 150,200-203; recorded steps: {listed}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to do: rlhpc trace {run} --steps 3 records, -o trace.json.gz merges"),
        (["--steps", "0"], "--steps is '0'; give a number from 1 to 100000"),
        (["--steps", "1e3"], "--steps is '1e3'; give a number from 1 to 100000"),
        (["--steps", "٣"], "--steps is '٣'; give a number from 1 to 100000"),
        (["--steps", "3"], "{run}: no driver of this run is at work"),
        (
            ["--steps", "3", "-o", "t.json"],
            "--steps asks a run to record; merge what it has recorded with a second command",
        ),
        (["-o", "t.txt"], "t.txt: a trace's file ends with .json, .json.gz, .pftrace"),
        (["--open", "--port", "70000"], "--port is 70000; it must be between 0 and 65535"),
        (["--open", "--port", "0", "--socket", "s"], "--open takes either --port or --socket"),
        (["-o", "no/t.json"], "no/t.json: the folder no does not exist"),
        (["-o", "t.json", "--only", "9-7"], "--only is '9-7'; write steps such as 10-12 or 3,7-9"),
        (["-o", "t.json", "--only", ""], "--only is ''; write steps such as 10-12 or 3,7-9"),
        (["-o", "t.json", "--only", "8"], "{run}: no trace of step 8; recorded steps: 7"),
    ],
)
def test_mistakes(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    before = sorted(run.parent.rglob("*"))
    assert main(["trace", str(run), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rlhpc: error: {message.format(run=run)}") and said.count("rlhpc: error:") == 1
    assert sorted(run.parent.rglob("*")) == before


def test_a_run_without_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("runner: {name: run}\n")
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "t.json")]) == 2
    assert "has no recorded trace: train with runner.trace.steps=10-12" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_the_interface_on_a_port_answers_no_other_user_and_nobody_without_the_token(run: Path) -> None:
    need_extra("trace")
    with subprocess.Popen(
        [sys.executable, "-m", "rlhpc.cli", "trace", str(run), "--open"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            local, _, token = address.partition("/?")
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            assert browser.open(address, timeout=20).status == 200
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{local}/localtrace", timeout=20)
            ask = f"import urllib.request; urllib.request.urlopen({local + '/localtrace?' + token!r}, timeout=20)"
            other = subprocess.run(
                ["/usr/bin/python3", "-c", ask], user=65534, group=65534, capture_output=True, text=True, cwd="/"
            )
            assert other.returncode == 1
            assert "Connection reset" in other.stderr or "Remote end closed" in other.stderr, other.stderr
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def test_the_interface_on_a_socket_that_only_its_user_can_open(run: Path, tmp_path: Path) -> None:
    need_extra("trace")
    path = tmp_path / "trace.sock"
    command = [sys.executable, "-m", "rlhpc.cli", "trace", str(run), "--open", "--socket", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(3)]
            assert f"ssh -N -L 8080:{path} " in lines[1]
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            connection = UnixConnection(path)
            response, body = get(connection, "/localtrace")
            connection.close()
            assert response.status == 200 and b"step 7" in body
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    assert not path.exists()
