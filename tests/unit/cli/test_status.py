"""Commands that inspect runs, on folders with what a run has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.config import config_to_yaml
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.configuration import load_config

ROOT = Path(__file__).resolve().parents[3]


def run_of(name: str, value: float) -> RunPaths:
    paths = RunPaths.from_run_dir("runs", name)
    paths.root.mkdir(parents=True)
    paths.config.write_text(config_to_yaml(load_config(ROOT / "configs/quickstart.yaml", [f"runner.name={name}"])))
    rows = [{"step": step, "time/wall_s": float(step), "train/episode_return": value * step} for step in (1, 2)]
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = paths.segment_logs(0) / "driver.err"
    log.parent.mkdir(parents=True)
    log.write_text("first\nlast\n")
    return paths


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_status_of_a_run_and_of_a_folder_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_of("a", 1.0)
    run_of("b", 2.0)
    assert main(["status", "runs/a"]) == 0
    assert capsys.readouterr().out.startswith("run          a  (")
    assert main(["status", "runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "a", "b"]
    assert main(["status", "runs/c"]) == 2
    assert "runs there: a, b" in capsys.readouterr().err


def test_status_names_the_resumes_with_another_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    resumed = [
        {},
        {"step": 4, "changes": []},
        {"step": 6, "changes": ["actor.optim.lr: 0.001 → 0.01\n\x1b[2J", "a: 1 → 2"]},
    ]
    run_of("a", 1.0).provenance.write_text(json.dumps({"segments": [{"resumed": record} for record in resumed]}))
    assert main(["status", "runs/a"]) == 0
    changed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed")]
    assert len(changed) == 1 and changed[0].startswith("changed      from step 6 on: actor.optim.lr: 0.001 → 0.01")
    assert changed[0].endswith("; a: 1 → 2") and "\x1b" not in changed[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--lines", "-1"), "--lines is -1; it must be 0 or more"),
        (("--rank", "-1"), "--rank is -1; ranks count from 0"),
        (("--start", "0"), "--start is '0'; allowed: 1, 2, …, last or all"),
    ],
)
def test_options_of_logs_are_checked(words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_of("a", 1.0)
    assert main(["logs", "runs/a", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_report_goes_into_the_run_and_its_curves_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    paths = run_of("a", 1.0)
    assert main(["report", "runs/a", "--curves", "curves"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert str(paths.report) in written and paths.report.is_file()
    assert Path("curves/page.html").is_file() and list(Path("curves").glob("*.svg"))


def test_runs_are_compared_by_label(capsys: pytest.CaptureFixture[str]) -> None:
    run_of("a-s1", 1.0)
    run_of("a-s2", 2.0)
    assert main(["compare", "runs/a-s1", "mine=runs/a-s2", "--output", "page.html"]) == 0
    assert capsys.readouterr().out == f"{Path('page.html')}\n"
    assert ">mine<" in Path("page.html").read_text()
    assert main(["compare", "runs/a-s1", "--metric", "eval/x"]) == 2
    assert "--metric is for a sweep" in capsys.readouterr().err
