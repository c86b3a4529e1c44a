"""Errors of the package: exit codes, restartable failures, and threads that survive the handler of a report."""

from __future__ import annotations

import logging

import pytest

from rlhpc.runtime.errors import (
    ConfigError,
    NonFinite,
    RlhpcError,
    StaleGeneration,
    StepFailed,
    Stopped,
    WorkerFailed,
    guard_handler,
    log_errors,
)


@pytest.mark.parametrize(
    ("error", "exit_code", "restartable"),
    [
        (RlhpcError("no"), 1, False),
        (ConfigError("no"), 2, False),
        (StaleGeneration("no"), 1, False),
        (StepFailed("no", group="env", rank=1, node="n2"), 1, True),
        (Stopped("no", 75), 75, False),
    ],
)
def test_each_error_has_an_exit_code_and_may_be_tried_again(
    error: RlhpcError, exit_code: int, restartable: bool
) -> None:
    assert (error.exit_code, error.restartable) == (exit_code, restartable)


def failed(cause: BaseException | None = None, remote_traceback: str = "") -> WorkerFailed:
    error = WorkerFailed(
        "gone", group="rollout", rank=3, node="n1", log_path="a.err", remote_traceback=remote_traceback
    )
    error.__cause__ = cause
    return error


def test_a_worker_that_was_killed_is_started_again() -> None:
    assert failed().restartable, "killed, without an exception"
    assert not failed(remote_traceback="Traceback ...").restartable, "its program raised"
    assert failed(StepFailed("no"), "Traceback ...").restartable, "its error says so"
    assert not failed(NonFinite("nan"), "Traceback ...").restartable
    assert (failed().group, failed().rank, failed().node, failed().log_path) == ("rollout", 3, "n1", "a.err")


def test_the_handler_of_a_report_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    handled = []

    @guard_handler
    def handle(number: int) -> None:
        handled.append(1 / number)

    with caplog.at_level(logging.ERROR):
        for number in (1, 0, 2):
            handle(number)
    assert handled == [1.0, 0.5], "the reports after the bad one are handled"
    (record,) = caplog.records
    assert "a report could not be handled" in record.getMessage() and "handle" in record.getMessage()
    assert record.exc_info and record.exc_info[0] is ZeroDivisionError


def test_logged_errors_end_the_block_alone(caplog: pytest.LogCaptureFixture) -> None:
    with log_errors("the file is gone"):
        raise OSError(2, "no such file")
    assert [record.getMessage() for record in caplog.records] == ["the file is gone"]
    with pytest.raises(KeyboardInterrupt), log_errors("never said"):
        raise KeyboardInterrupt
    assert len(caplog.records) == 1
