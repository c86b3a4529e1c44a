"""Progress in a log file and on a terminal; timers."""

from __future__ import annotations

import io

from rlhpc.metrics import PhaseTimers, ProgressBar

ROW = {"train/episode_return": 123.45, "time/env_steps_per_s": 2345.6}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_every_interval_when_no_terminal() -> None:
    now, stream = [0.0], io.StringIO()
    with ProgressBar(100, initial=10, name="run", stream=stream, clock=lambda: now[0]) as bar:
        for step in range(11, 31):
            now[0] += 1.0
            bar.update(step, ROW)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run: step 20/100, return 123.5, 2,346 env steps/s, ETA 01:20"
    assert len(lines) == 2 and lines[1].startswith("run: step 30/100")


def test_short_runs_print_one_line_and_missing_values_nothing() -> None:
    stream = io.StringIO()
    bar = ProgressBar(2, stream=stream)
    assert bar.eta_s() is None
    bar.update(2, {"train/episode_return": float("nan")})
    bar.close()
    bar.close()
    assert stream.getvalue() == "train: step 2/2\n"


def test_bar_on_a_terminal() -> None:
    stream = Terminal()
    with ProgressBar(4, initial=1, stream=stream) as bar:
        bar.update(2, ROW)
        bar.message("saved global_step_2")
        bar.update(4, {"eval/return_mean": 500.0})
    text = stream.getvalue()
    assert "saved global_step_2" in text and "4/4" in text
    assert "ETA" in text and "return 123.5, eval 500.0, 2,346 env steps/s" in text


def test_timers_add_up_and_start_over() -> None:
    timers = PhaseTimers()
    for _ in range(2):
        with timers("rollout"):
            pass
    timers.add("sync", 1.5)
    timers.add("sync", 0.5)
    assert timers.get("sync") == 2.0
    spent = timers.pop()
    assert set(spent) == {"time/rollout_s", "time/sync_s"} and spent["time/rollout_s"] >= 0
    assert timers.pop() == {}
