"""Judges: what they say of rewards that raise, and what is left of those that are ended."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil

from rlhpc.language.rewards import RewardPool, Sample, Term
from rlhpc.language.rewards.pool_server import judge


def raising(sample: Sample) -> float:
    raise ValueError("no unit")


def infinite(sample: Sample) -> float:
    return float("inf")


def length(sample: Sample) -> float:
    return float(len(sample.response))


class Busy:
    """Writes its process's folder and a daemon's id into a file, then takes too long."""

    memory_mb = 4096
    preload = ("json", "nosuch_module")

    def __call__(self, sample: Sample) -> float:
        if sample.response == "wait":
            daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(sample.answer).write_text(f"{daemon.pid} {os.environ['TMPDIR']}")
            time.sleep(100)
        return 1.0


def test_a_reward_that_fails_leaves_the_others() -> None:
    values, errors = judge({"a": raising, "b": length, "c": infinite}, Sample("q", "abc", ""))
    assert values == {"b": 3.0} and errors == "a: ValueError: no unit; c: ValueError: it gave inf"
    assert judge({"b": length}, Sample("q", "", "")) == ({"b": 0.0}, "")


def test_a_judge_that_takes_too_long_is_replaced_with_all_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with RewardPool([Term("busy", Busy)], timeout_s=2.0, failed=-1.0) as pool:
        (scored,) = pool.score([Sample("q", "wait", str(note))])
        assert scored.failed and scored.total == -1.0 and "took longer than reward.timeout_s" in scored.reason
        assert [each.total for each in pool.score([Sample("q", "go", "")] * 3)] == [1.0] * 3
        daemon, folder = note.read_text().split(" ", 1)
        deadline = time.monotonic() + 30
        while psutil.pid_exists(int(daemon)) or Path(folder).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
