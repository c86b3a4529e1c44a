"""What `rlhpc plan --when` makes of the scheduler's answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rlhpc.jobs.slurm import Allowance, EstimatedStart, forget_partitions, has_gpus
from rlhpc.runs.configuration import load_config
from rlhpc.runs.start_estimate import (
    JobShape,
    StartEstimate,
    StartTimes,
    _shapes,
    moment,
    render,
    sort_answers,
    verdict,
    walltimes,
)
from rlhpc.runs.tuning.tune import TuneRequest
from rlhpc.runtime.errors import ConfigError

NOW = time.mktime((2026, 3, 2, 12, 0, 0, 0, 0, -1))  # a Monday
DAY = 86400.0


def answer(
    gpus: int, start: float | None, train_s: float | None, *, own: bool = False, usable: float | None = None
) -> StartTimes:
    words = () if own else (f"cluster.num_nodes={gpus // 4}",)
    shape = JobShape(gpus // 4, gpus, "gpu", 600, words, own, "", train_s, usable)
    return StartTimes(
        shape, EstimatedStart(None if start is None else NOW + start, "" if start is not None else "no such nodes")
    )


def test_fewer_now_end_before_more_later() -> None:
    few, many = answer(4, 0, 20 * 3600.0), answer(8, DAY, 11 * 3600.0, own=True)
    found = StartEstimate(sort_answers([many, few]), None, "", (), NOW)
    assert found.answers[0] is few
    first, words = verdict(found)
    assert first.startswith(
        "4 GPUs in gpu now end before 8 GPUs in gpu from Tuesday 12:00: Tuesday 08:00, not Tuesday 23:00"
    )
    assert words == "for the first: cluster.num_nodes=1"
    late = answer(4, 0, 60 * 3600.0)
    assert sort_answers([many, late])[0] is many


@pytest.mark.parametrize("phase", [0.0, 14.5, 29.5, 30.5, 59.5])
def test_shapes_that_start_together_are_not_told_apart(phase: float) -> None:
    """Whatever the second of the minute is at which they do."""
    configured, other = answer(4, phase + 1.0, 600.0, own=True), answer(8, phase, 600.0)
    later = answer(16, phase + DAY, 600.0)
    found = StartEstimate(sort_answers([later, other, configured]), None, "", (), NOW)
    assert list(found.answers) == [configured, other, later]
    assert "before 16 GPUs in gpu from Tuesday" in verdict(found)[0]


def test_without_costs_the_sooner_start_is_better() -> None:
    soon, later, never = answer(8, 600, None), answer(4, DAY, None, own=True), answer(16, None, None)
    found = StartEstimate(sort_answers([never, later, soon]), None, "nobody knows", ("3 nodes: why",), NOW)
    assert list(found.answers) == [soon, later, never]
    text = render(found)
    assert "8 GPUs in gpu from 12:10 start before 4 GPUs in gpu from Tuesday 12:00" in text
    assert "no such nodes" in text
    assert "not possible on 3 nodes: why" in text
    assert "nobody knows" in text


def test_what_an_account_has_left() -> None:
    allowed = Allowance("rl", {"gres/gpu": (6000.0, 3000.0)}, 0.25)
    text = render(StartEstimate([answer(4, 0, 20 * 3600.0), answer(8, 0, 5 * 3600.0)], allowed, "", (), NOW))
    assert "account rl: 50 of 100 GPU-hours left; fair share 0.25" in text
    assert "1 node in gpu: 80 GPU-hours are more than that" in text
    assert "2 nodes in gpu: 40" not in text


def test_a_run_longer_than_a_job_takes_several() -> None:
    assert answer(4, 0, 100.0, usable=40.0).shape.jobs == 3
    assert answer(4, 0, 100.0).shape.jobs == 1
    assert answer(4, 0, None).shape.jobs is None


def test_walltimes_worth_asking_about() -> None:
    cfg = load_config("configs/quickstart.yaml", ["cluster.time=10:00:00", "cluster.signal_lead_s=120"])
    assert walltimes(cfg, 3600.0) == [600, 77, 150]  # as configured, what holds the run, a quarter
    assert walltimes(cfg, 90000.0) == [600, 150]
    assert walltimes(cfg, None) == [600, 150]
    assert walltimes(load_config("configs/quickstart.yaml", ["cluster.time=00:12:00"]), None) == [12]
    assert walltimes(load_config("configs/quickstart.yaml"), 3600.0) == [None, 77]


def test_moments() -> None:
    assert [moment(NOW + s, NOW) for s in (10.0, 3600.0, DAY, 10 * DAY)] == [
        "now",
        "13:00",
        "Tuesday 12:00",
        "2026-03-12 12:00",
    ]


def test_a_walltime_within_the_reserve_never_ends() -> None:
    """A job of it would be over before it trained: it takes no number of jobs, and anything else is better."""
    none, some = answer(8, 0, 3600.0, usable=0.0), answer(4, DAY, 3600.0, usable=600.0)
    assert none.shape.jobs is None and none.end is None and some.shape.jobs == 6
    assert sort_answers([none, some])[0] is some
    words = [
        "cluster.accelerators_per_node=0", "cluster.time=00:02:00", "cluster.signal_lead_s=300", "runner.save_reserve_s=60",
    ]  # fmt: skip
    cfg = load_config("configs/quickstart.yaml", words)
    with pytest.raises(ConfigError, match="no step has room"):
        _shapes(
            TuneRequest("configs/quickstart.yaml", tuple(words)),
            cfg,
            cfg.cluster.num_nodes,
            cfg.cluster.partition,
            None,
        )


def partition(name: str, start: float, *, leaves_gpus_idle: bool, own: bool = False) -> StartTimes:
    shape = JobShape(
        1, 0, name, 60, () if own else (f"cluster.partition={name}",), own, "", None, None, leaves_gpus_idle
    )
    return StartTimes(shape, EstimatedStart(NOW + start))


def test_a_run_without_gpus_takes_none_of_them_where_others_are_as_good() -> None:
    gpu, cpu = partition("gpu", 0, leaves_gpus_idle=True, own=True), partition("cpu", 20, leaves_gpus_idle=False)
    found = StartEstimate(sort_answers([gpu, cpu]), None, "", (), NOW)
    assert verdict(found)[-1] == "for the first: cluster.partition=cpu" and "GPU" not in "\n".join(verdict(found))
    later = partition("cpu", DAY, leaves_gpus_idle=False, own=True)
    found = StartEstimate(sort_answers([later, partition("gpu", 0, leaves_gpus_idle=True)]), None, "", (), NOW)
    *_, note, words = verdict(found)
    assert note == "the nodes of gpu have GPUs, which this run would not use: ask whether the site allows that"
    assert words == "for the first: cluster.partition=gpu"


def test_which_partitions_have_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "gpu": "gpu|gpu:a100:4",
        "cpu": "cpu*|(null)",
        "all": "all|(null)\nall|gpu:a100:4(S:0)",
        "": "cpu*|(null)\ngpu|gpu:4",
    }
    cases = "".join(f"*--partition={name}*) printf '%s\\n' '{text}';;\n" for name, text in rows.items() if name)
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\ncase \"$*\" in\n{cases}*) printf '%s\\n' '{rows['']}';;\nesac\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    forget_partitions()
    assert [has_gpus(name) for name in ("gpu", "cpu", "all", None)] == [True, False, False, False]
    (tmp_path / "sinfo").unlink()
    forget_partitions()
    assert not has_gpus("gpu")  # nobody says
    forget_partitions()
