"""Progress of a workflow, from Snakemake's log and a run's files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from rlhpc.cli.follow import Track, WorkflowFollower, WorkflowLog, find_error, last_row
from rlhpc.jobs.paths import RunPaths

START = """[Sun Nov 22 09:35:00 2026]
localcheckpoint train_segment:
    input: configs/quickstart.yaml, runs/q/workflow/plan.txt
    output: runs/q/workflow/segment_{0}.json
    log: runs/q/logs/workflow/train_segment_{0}.log
    jobid: 5
    wildcards: segment={0}

"""
EVALUATES = """[Sun Nov 22 09:35:00 2026]
rule eval:
    output: runs/q/eval/global_step_{0}/far.json
    log: runs/q/logs/workflow/eval_{0}_far.log (check log file(s) for error details)
    wildcards: step={0}, suite=far

"""
FINISHED = "[Sun Nov 22 09:36:00 2026]\nFinished jobid: 5 (Rule: {})\n1 of 10 steps (10%) done\n"


class Watched:
    """A run that is followed, with its files in the test's hand."""

    def __init__(self, folder: Path) -> None:
        self.path, self.paths = folder / "snakemake.log", RunPaths(folder / "runs" / "q")
        self.paths.root.mkdir(parents=True)
        self.path.touch()
        self.shown = io.StringIO()
        self.log = WorkflowLog(self.path, folder)
        self.follower = WorkflowFollower(self.log, {"run": Track("q", self.paths, 4)}, self.shown)

    def say(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)
        self.follower.update()

    def step(self, step: int) -> None:
        with self.paths.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "train/episode_return": 2.0 * step, "time/wall_s": step}) + "\n")
        self.follower.update()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_one_bar_for_all_segments_and_every_phase_by_name(watched: Watched) -> None:
    watched.say(START.format(0))
    watched.step(1)
    watched.step(2)
    watched.say(FINISHED.format("train_segment") + START.format(1) + EVALUATES.format(2))
    watched.step(3)
    watched.step(4)
    watched.say(FINISHED.format("train_segment") + EVALUATES.format(4))
    watched.follower.close()
    assert watched.shown.getvalue().splitlines() == [
        "  starting processes", "q: step 4/4, return 8.0", "  evaluating checkpoint 4, far",
    ]  # fmt: skip


def test_what_the_queue_says_is_shown_until_training_begins(watched: Watched) -> None:
    watched.say(START.format(0))
    watched.say("rlhpc: q segment 0: submitted Slurm job 7; logs in runs/q\n")
    watched.say("rlhpc: q segment 0: Slurm job 7 pending: Resources\n")
    watched.say("rlhpc: q segment 0: Slurm job 7 pending: Resources\n")
    watched.step(1)
    watched.say("rlhpc: q segment 0: Slurm job 7 running, step 1/4\n")
    watched.follower.close()
    phase, queue, bar = watched.shown.getvalue().splitlines()
    assert (phase, queue) == ("  starting processes", "  q segment 0: Slurm job 7 pending: Resources")
    assert bar.startswith("q: step 1/4, return 2.0")


def test_rows_of_before_are_no_progress(watched: Watched) -> None:
    watched.step(3)
    watched.follower = WorkflowFollower(watched.log, {"run": Track("q", watched.paths, 4)}, watched.shown)
    watched.say(START.format(1))
    assert "step" not in watched.shown.getvalue()
    watched.step(4)
    watched.follower.close()
    assert "step 4/4" in watched.shown.getvalue()


def test_half_a_line_waits_for_its_end(watched: Watched) -> None:
    text = EVALUATES.format(2)
    watched.say(text[:60])
    watched.say(text[60:])
    assert watched.shown.getvalue() == "  evaluating checkpoint 2, far\n"


def test_the_real_error_is_the_failed_rules_own(watched: Watched, tmp_path: Path) -> None:
    own = tmp_path / "runs/q/logs/workflow/eval_2_far.log"
    own.parent.mkdir(parents=True)
    own.write_text("eval: episode 3/10\nrlhpc: error: the simulator is gone\n  log: x.err\n")
    watched.say(EVALUATES.format(2).replace("rule eval:", "Error in rule eval:"))
    assert find_error(watched.log, watched.path) == ("rlhpc: error: the simulator is gone\n  log: x.err", own)
    own.unlink()
    watched.say("WorkflowError:\nno such file\n")
    assert find_error(watched.log, watched.path)[0].startswith("WorkflowError:\nno such file")


def test_the_last_row_is_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) == {}
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert last_row(path) == {"step": 2}


def test_the_log_says_the_same_in_whatever_pieces_it_is_written(tmp_path: Path) -> None:
    """Looks between any two bytes, also where nothing has come, end no block."""
    text = (START.format(0) + FINISHED.format("train_segment") + EVALUATES.format(20)).encode()
    for size in (1, 7, 40, len(text)):
        path = tmp_path / f"log-{size}"
        log, started = WorkflowLog(path, tmp_path), []
        for at in range(0, len(text), size):
            with path.open("ab") as file:
                file.write(text[at : at + size])
            started += log.read() + log.read()
        assert [(job.rule, job.wildcards) for job in started] == [
            ("train_segment", {"segment": "0"}), ("eval", {"step": "20", "suite": "far"}),
        ]  # fmt: skip
        assert started[1].log == tmp_path / "runs/q/logs/workflow/eval_20_far.log"
        assert log.running_counts == {"train_segment": 0, "eval": 1}


def test_what_follows_a_block_without_an_empty_line_is_none_of_it(tmp_path: Path) -> None:
    """As Snakemake 9 writes: a job is known to run before its command has said anything, and to have failed by its log."""
    path = tmp_path / "log"
    starts = (
        "localrule train_segment:\n    input: run.yaml\n    log: train.log\n    jobid: 3\n    wildcards: segment=0\n"
        "    resources: tmpdir=/tmp, attempt=1\n"
    )
    path.write_text(starts)
    log = WorkflowLog(path, tmp_path)
    assert [(job.rule, job.wildcards) for job in log.read()] == [("train_segment", {"segment": "0"})]
    fails = (
        "rlhpc: error: stuck\n[Fri Nov 27 19:57:33 2026]\nError in rule train_segment:\n    message: None\n    jobid: 3\n"
        "    log: train.log (check log file(s) for error details)\n    shell:\n        rlhpc submit\n"
        "        (command exited with non-zero exit code)\nLogfile train.log:\n====\n    log: other.log\n"
    )
    path.write_text(starts + fails)
    assert log.read() == [] and [(job.rule, job.log) for job in log.failed_jobs] == [
        ("train_segment", tmp_path / "train.log")
    ]
    assert log.running_counts == {"train_segment": 0}
