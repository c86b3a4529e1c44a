"""Run folder of a start: the checkpoint that it continues from, its status and the end of its segments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.provenance import resumes_with_changes
from rlhpc.runs.configuration import load_config
from rlhpc.runs.report import write_report
from rlhpc.runs.run_folder import RunFolder, fail_status, keep_traceback, note, read_segment_done
from rlhpc.runtime.errors import ConfigError, RlhpcError, StaleGeneration

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*overrides: str) -> RunConfig:
    return load_config(ROOT / "configs/quickstart.yaml", ["runner.name=run", "runner.max_steps=10", *overrides])


def saved(paths: RunPaths, step: int) -> None:
    with CheckpointWriter(paths, step) as writer:
        writer.add_bytes("runner.json", b"{}")
        writer.commit({})


def opened(cfg: RunConfig, segment: int | None = None) -> RunFolder:
    folder = RunFolder.plan(cfg, segment)
    folder.open(cfg)
    return folder


def test_a_new_run_starts_at_its_first_step() -> None:
    folder = opened(config())
    assert (folder.segment, folder.end_step, folder.total, folder.resume.path) == (None, 10, 10, None)
    assert folder.paths.config.is_file() and json.loads(folder.paths.provenance.read_text())["command"]


def test_a_resume_with_another_configuration_is_recorded_with_its_step_and_numbers() -> None:
    first = opened(config("actor.optim.lr=0.001"))
    saved(first.paths, 4)
    cfg = config("actor.optim.lr=0.002", "env.train.env_id=Acrobot-v1", "runner.resume_dir=auto", "runner.max_steps=12")
    folder = RunFolder.plan(cfg, resume_with=True)
    folder.open(cfg)
    again = RunFolder.plan(cfg, resume_with=True)
    again.open(cfg)
    record = json.loads(first.paths.provenance.read_text())
    assert [start.get("resumed") for start in record["segments"]] == [
        None, {"step": 4, "changes": ["env.train.env_id", "actor.optim.lr: 0.001 → 0.002"]}, {"step": 4, "changes": []}
    ]  # fmt: skip
    assert resumes_with_changes(record) == [(4, "env.train.env_id; actor.optim.lr: 0.001 → 0.002")]
    assert (
        "from step 4 on: <code>env.train.env_id; actor.optim.lr: 0.001 → 0.002</code>"
        in write_report(first.paths).read_text()
    )


def test_a_run_with_checkpoints_says_how_to_continue() -> None:
    saved(opened(config()).paths, 4)
    with pytest.raises(ConfigError, match=r"newest: global_step_4.*runner\.resume_dir=auto"):
        RunFolder.plan(config())
    continued = RunFolder.plan(config("runner.resume_dir=auto"))
    assert continued.resume.step == 4 and not continued.foreign
    with pytest.raises(ConfigError, match=r"actor\.optim\.lr"):
        RunFolder.plan(config("runner.resume_dir=auto", "actor.optim.lr=0.5"))
    other = RunFolder.plan(config("runner.name=other", f"runner.resume_dir={continued.resume.path}"))
    assert other.foreign and other.resume.step == 4


def test_a_segment_ends_at_its_share_and_continues_by_itself() -> None:
    cfg = config("runner.segments=2")
    folder = opened(cfg, 0)
    assert folder.end_step == 5 and read_segment_done(folder.paths, 0) is None
    saved(folder.paths, 5)
    record = folder.finish_segment(5, "segment_end")
    assert read_segment_done(folder.paths, 0) == record and record["checkpoint"].endswith("global_step_5")
    assert folder.finished_segments() == [5]
    following = RunFolder.plan(cfg, 1)
    assert following.end_step == 10 and following.resume.step == 5
    with pytest.raises(ConfigError, match="segment 2 does not exist"):
        RunFolder.plan(cfg, 2)


def test_the_status_has_numbers_that_json_has() -> None:
    folder = opened(config())
    folder.write_status("running", 3, force=True, elapsed_s=float("inf"), note="x")
    status = json.loads(folder.paths.driver_state.read_text())
    assert (status["state"], status["step"], status["elapsed_s"], status["note"]) == ("running", 3, None, "x")
    folder.write_status("running", 4)  # within two seconds
    assert json.loads(folder.paths.driver_state.read_text())["step"] == 3
    fail_status(folder, 5, RlhpcError("first line\nsecond"))
    status = json.loads(folder.paths.driver_state.read_text())
    assert (status["state"], status["stop_reason"]) == ("failed", "first line")


def test_the_status_keeps_the_figures_of_the_last_step_however_the_run_ends() -> None:
    """By them the tables of runs compare runs that have ended."""
    folder = opened(config())
    folder.step_facts = {"reward": 0.5, "elapsed_s": 3.0}
    folder.write_status("running", 3, force=True, eta_s=9.0)
    for end in ("finished", "failed"):
        if end == "finished":
            folder.write_status(end, 3, force=True, elapsed_s=4.0)
        else:
            fail_status(folder, 3, RlhpcError("why"))
        status = json.loads(folder.paths.driver_state.read_text())
        assert (status["state"], status["reward"], "eta_s" in status) == (end, 0.5, False)
        assert status["elapsed_s"] == (4.0 if end == "finished" else 3.0)


def test_a_removed_folder_ends_the_run() -> None:
    folder = opened(config())
    shutil.rmtree(folder.paths.root)
    with pytest.raises(StaleGeneration, match="was removed"):
        folder.write_status("running", 1, force=True)
    fail_status(folder, 1, RuntimeError("x"))
    assert not folder.paths.root.exists()


def test_an_unexpected_error_leaves_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    folder, error = opened(config()), RuntimeError("unexpected")
    keep_traceback(folder, error)
    log = folder.paths.segment_logs(0) / "driver.err"
    assert "RuntimeError: unexpected" in log.read_text() and error.__notes__ == [f"traceback in {log}"]
    keep_traceback(folder, KeyboardInterrupt())
    assert "KeyboardInterrupt" not in log.read_text()
    note("goes on")
    assert capsys.readouterr().err.endswith("rlhpc: goes on\n")
