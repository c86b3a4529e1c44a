"""Another configuration under the name of a run: refused, continued when asked for, and a run made longer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.integration.tiny_run import CONFIG, TinyRun

SHORT = ("runner.max_steps=2", "runner.save_interval=-1", "algorithm.update_epochs=1")


def rlhpc(*words: str, code: int = 0) -> tuple[str, str]:
    done = warm.run([sys.executable, "-m", "rlhpc.cli", *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A finished run of two steps, submitted as a job of this machine."""
    run = TinyRun(tmp_path_factory.mktemp("same"), *SHORT)
    rlhpc("submit", str(CONFIG), "--executor", "local", *run.overrides)
    return run


def kept(run: TinyRun) -> dict[Path, int]:
    """The run's files but those by which its job ends, which may take a moment longer than the waiting."""
    files = (path for path in run.root.rglob("*") if path.is_file() and path.suffix != ".json")
    return {path: path.stat().st_mtime_ns for path in files if path.parent.name not in ("submit", "segment_0")}


def submit(run: TinyRun, *more: str, code: int = 0) -> tuple[str, str]:
    return rlhpc("submit", str(CONFIG), "--executor", "local", *run.overrides, *more, code=code)


def test_another_configuration_is_refused_and_nothing_happens(run: TinyRun) -> None:
    before = kept(run)
    for said in (
        submit(run, "actor.optim.lr=0.5", code=2)[1],
        run.train("actor.optim.lr=0.5", "runner.resume_dir=auto", "runner.max_steps=4", code=2),
    ):
        assert said.startswith("rlhpc: error: run ") and "actor.optim.lr: 0.001 → 0.5" in said
        assert "runner.name=" in said and "--resume-with" in said and "Traceback" not in said
    assert kept(run) == before
    assert json.loads(submit(run)[0])["state"] == "finished"
    assert json.loads(submit(run, "env.eval.num_episodes=3")[0])["state"] == "finished"


@pytest.mark.long
def test_longer_then_with_other_values(run: TinyRun) -> None:
    shorter = submit(run, "runner.max_steps=1", code=2)[1]
    assert "ended at step 2" in shorter and "runner.max_steps" in shorter
    longer = json.loads(submit(run, "runner.max_steps=3")[0])
    assert longer["state"] == "finished" and longer["result"]["global_step"] == 3
    changed = ("runner.max_steps=4", "actor.optim.lr=0.002")
    submit(run, *changed, code=2)
    result = json.loads(submit(run, *changed, "--resume-with")[0])
    assert result["result"]["global_step"] == 4
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]
    assert json.loads(submit(run, *changed)[0])["state"] == "finished"  # that is the run's configuration now


def test_a_live_job_is_not_taken_for_another_run(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, "runner.max_steps=100000")
    submit(run, "--no-wait")
    try:
        said = submit(run, "actor.optim.lr=0.5", "--no-wait", code=2)[1]
        assert "segment 0 of" in said and "actor.optim.lr: 0.001 → 0.5" in said and "rlhpc cancel" in said
        assert json.loads(submit(run, "--no-wait")[0])["state"] == "attached"
    finally:
        rlhpc("cancel", str(run.root))


def test_a_job_reads_what_was_submitted(tmp_path: Path) -> None:
    """Not the file as it is when the job starts, or starts again."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: [{CONFIG}]\n")
    run = TinyRun(tmp_path / "runs", *SHORT)
    words = ["--executor", "local", *run.overrides]
    rlhpc("submit", str(mine), *words)
    saved = run.root / "submit" / "segment_0.yaml"
    assert saved.read_text().startswith(f"# As submitted from {mine}\n")
    assert json.loads((run.root / "submit" / "segment_0.json").read_text())["command"][-4:-2] == ["train", str(saved)]
