"""Metric rows: order, merging, what a resume keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import MetricLogger, read_metrics
from rlhpc.metrics.logger import series
from rlhpc.runtime.errors import ConfigError, RlhpcError


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths.from_run_dir(tmp_path, "run")


def write(paths: RunPaths, first: int, last: int, resume: int | None = None) -> None:
    with MetricLogger(paths, ["jsonl"], resume_step=resume) as logger:
        for step in range(first, last + 1):
            logger.log(step, {"train/b": step / 3, "train/a": step})


def test_one_row_a_step_in_fixed_order(paths: RunPaths) -> None:
    with MetricLogger(paths, ["jsonl"]) as logger:
        logger.log(1, {"train/z": np.float32(0.5), "train/a": torch.tensor(2.0), "rollout/env_steps": 7})
        assert paths.metrics.read_text() == '{"step": 1, "rollout/env_steps": 7, "train/a": 2.0, "train/z": 0.5}\n'
        logger.log(1, {"eval/return_mean": 3})
        logger.log(2, {"train/a": float("nan")})
    assert paths.metrics.read_text().splitlines() == [
        '{"step": 1, "eval/return_mean": 3, "rollout/env_steps": 7, "train/a": 2.0, "train/z": 0.5}',
        '{"step": 2, "train/a": null}',
    ]
    assert series(read_metrics(paths.metrics), "train/a") == ([1.0], [2.0])


def test_merging_after_commit_replaces_the_row_whole(paths: RunPaths) -> None:
    with MetricLogger(paths, ["jsonl"]) as logger:
        logger.log(1, {"train/a": 1})
        logger.log(2, {"train/a": 2})
        logger.commit()
        logger.log(2, {"eval/return_mean": 9.5})
        logger.log(3, {"train/a": 3})
    assert [row["step"] for row in read_metrics(paths.metrics)] == [1, 2, 3]
    assert read_metrics(paths.metrics)[1] == {"step": 2, "eval/return_mean": 9.5, "train/a": 2}


def test_steps_do_not_go_back(paths: RunPaths) -> None:
    with MetricLogger(paths, ["jsonl"]) as logger:
        logger.log(5, {})
        with pytest.raises(ValueError, match="step 4"):
            logger.log(4, {})
    with MetricLogger(paths, ["jsonl"], resume_step=5) as logger, pytest.raises(ValueError):
        logger.log(4, {})


def test_resumed_rows_equal_uninterrupted_ones(paths: RunPaths, tmp_path: Path) -> None:
    other = RunPaths.from_run_dir(tmp_path, "uninterrupted")
    write(other, 1, 20)
    write(paths, 1, 13)
    write(paths, 9, 20, resume=8)
    assert paths.metrics.read_bytes() == other.metrics.read_bytes()


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_torn_last_line_is_repaired(paths: RunPaths, tmp_path: Path, cut: int) -> None:
    other = RunPaths.from_run_dir(tmp_path, "uninterrupted")
    write(other, 1, 9)
    write(paths, 1, 6)
    paths.metrics.write_bytes(paths.metrics.read_bytes()[:-cut])
    assert [row["step"] for row in read_metrics(paths.metrics)] == ([1, 2, 3, 4, 5, 6] if cut == 1 else [1, 2, 3, 4, 5])
    write(paths, 6, 9, resume=5)
    assert paths.metrics.read_bytes() == other.metrics.read_bytes()


def test_resume_merges_into_the_kept_row_and_drops_repeats(paths: RunPaths) -> None:
    write(paths, 1, 3)
    with paths.metrics.open("a") as file:
        file.write('garbage\n[1]\n{"no": "step"}\n{"step": 3, "train/a": 30}\n{"step": 4}\n')
    with MetricLogger(paths, ["jsonl"], resume_step=3) as logger:
        logger.log(3, {"eval/return_mean": 1.5})
    rows = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[-1] == {
        "step": 3,
        "eval/return_mean": 1.5,
        "train/a": 30,
    }


def test_resume_from_nothing_keeps_no_rows(paths: RunPaths) -> None:
    write(paths, 1, 3)
    MetricLogger(paths, ["jsonl"], resume_step=0).close()
    assert paths.metrics.read_bytes() == b""


def test_fresh_run_sets_old_rows_aside(paths: RunPaths) -> None:
    for last in (1, 2, 3):
        write(paths, 1, last)
    assert [
        len(read_metrics(paths.root / name)) for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    ] == [
        1,
        2,
        3,
    ]


def test_unknown_backend_names_the_nearest(paths: RunPaths) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        MetricLogger(paths, ["jsonl", "tensorbord"])
    assert not paths.root.exists()


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RlhpcError, match="metrics could not be written"):
        MetricLogger(RunPaths.from_run_dir(tmp_path, "run"))


def test_tensorboard_hides_what_came_after_the_resumed_step(paths: RunPaths) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last, resume in ((1, 5, None), (3, 4, 2)):
        with MetricLogger(paths, resume_step=resume) as logger:
            for step in range(first, last + 1):
                logger.log(step, {"train/a": step * 10 + (resume or 0)})
    events = EventAccumulator(str(paths.tensorboard))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/a")] == [(1, 10), (2, 20), (3, 32), (4, 42)]


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboards_file_is_opened_once(paths: RunPaths) -> None:
    opened: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open" and "tfevents" in str(arguments[0]):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    with MetricLogger(paths) as logger:
        for step in range(1, 31):
            logger.log(step, {"train/a": step, "train/b": step / 2})
            logger.commit()
    watching = False
    assert len(opened) == 1


def test_metrics_of_earlier_versions_have_today_s_names(paths: RunPaths) -> None:
    """A run that goes on under new names is one curve; what counted success in two ways stays apart."""
    paths.metrics.parent.mkdir(parents=True, exist_ok=True)
    before = {"step": 1, "train/success_rate": 0.25, "rollout/success_rate": 0.5, "eval/success_rate": 0.125}
    paths.metrics.write_text(json.dumps(before) + "\n")
    with MetricLogger(paths, ["jsonl"], resume_step=1) as logger:
        logger.log(2, {"train/success_once": 0.75, "rollout/success_once": 1.0, "eval/success_at_end": 0.5})
    rows = read_metrics(paths.metrics)
    assert series(rows, "train/success_once") == ([1.0, 2.0], [0.25, 0.75])
    assert series(rows, "rollout/success_once") == ([1.0, 2.0], [0.5, 1.0])
    assert series(rows, "eval/success_at_end") == ([1.0, 2.0], [0.125, 0.5])
    assert not any("success_rate" in name for row in rows for name in row)


@pytest.mark.parametrize("commits", [(), (2,), (2, 6)])
@pytest.mark.parametrize("lost", [range(4, 7), range(1, 7), range(6, 7)])
def test_tensorboard_gets_at_a_resume_what_it_missed(paths: RunPaths, lost: range, commits: tuple[int, ...]) -> None:
    """Rows from the step on at which its disk was full, each row once; whatever was committed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricLogger(paths, ["jsonl", "tensorboard"]) as logger:
        [feed] = logger._feeds
        own, write = feed._logger, feed._logger.log

        def full(step: int, row: Any) -> None:
            if step in lost:
                raise OSError("disk full")
            write(step, row)

        own.log = full
        for step in range(1, 7):
            logger.log(step, {"train/a": step})
            if step in commits:
                logger.commit()
    with MetricLogger(paths, ["jsonl", "tensorboard"], resume_step=6) as logger:
        for step in (7, 8):
            logger.log(step, {"train/a": step})
    events = EventAccumulator(str(paths.tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("train/a")] == [1, 2, 3, 4, 5, 6, 7, 8]
