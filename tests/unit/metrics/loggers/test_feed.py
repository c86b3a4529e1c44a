"""Feed of a logger: one that hangs or fails holds up nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import MetricLogger, read_metrics
from rlhpc.metrics.loggers import feed
from tests.unit.metrics.loggers.own_loggers import OWN, Lines, write


class Broken(Lines):
    """Fails at the given step, as a full disk or a network that is down does; or hangs there."""

    def __init__(self, at: int, hang: bool = False) -> None:
        super().__init__("broken")
        self.at, self.hang = at, hang

    def log(self, step: int, row: Mapping[str, float]) -> None:
        if step == self.at:
            if self.hang:
                threading.Event().wait()
            raise ConnectionError("network is down\nand so on")
        super().log(step, row)


BROKEN = f"{__name__}:Broken"


def test_a_logger_that_comes_later_gets_the_earlier_rows(paths: RunPaths) -> None:
    write(paths, 1, 4, None, ["jsonl"])
    write(paths, 4, 5, 3, [OWN, "tensorboard"])
    assert (paths.root / "rows.txt").read_text().splitlines() == ["1 10", "2 20", "3 30", "4 43", "5 53"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(paths.tensorboard))
    events.Reload()
    assert [event.step for event in events.Scalars("train/a")] == [1, 2, 3, 4, 5]


def test_a_logger_that_fails_is_given_up_and_the_run_goes_on(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    with MetricLogger(paths, [BROKEN, OWN], None, {BROKEN: {"at": 3}}, {"seed": 7}) as logger:
        for step in range(1, 6):
            logger.log(step, {"train/a": step})
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and "is given up: ConnectionError: network is down." in said
    assert [row["step"] for row in read_metrics(paths.metrics)] == [1, 2, 3, 4, 5]
    assert len((paths.root / "rows.txt").read_text().splitlines()) == 5
    with MetricLogger(paths, [BROKEN], 5, {BROKEN: {"at": -1}}, {"seed": 7}) as logger:
        logger.log(6, {"train/a": 6})
    assert [line.split()[0] for line in (paths.root / "broken.txt").read_text().splitlines()] == list("123456")


@pytest.mark.parametrize("limit", ["time", "rows"])
def test_a_logger_that_hangs_holds_up_nothing(
    paths: RunPaths, limit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "CLOSE_S", 0.2)
    monkeypatch.setattr(feed, "_MAX_QUEUED_ROWS", 3 if limit == "rows" else 100)
    write(paths, 1, 9, None, [BROKEN], at=1, hang=True)
    assert ("3 rows behind" if limit == "rows" else "did not end in time") in capsys.readouterr().err
    assert len(read_metrics(paths.metrics)) == 9
