"""Errors of remote calls: their report by a rank, and the driver's exception for a report."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from rlhpc.runtime.disk_errors import explain_error
from rlhpc.runtime.errors import NonFinite, RlhpcError, StaleGeneration, StrangerConnected, UserError, WorkerFailed


def describe_error(error: BaseException) -> dict[str, Any]:
    """Returns a picklable report of an exception: text, traceback, exit code, and the pickled exception if possible."""
    error = explain_error(error, "this rank")
    try:
        pickled_error = pickle.dumps(error)
        pickle.loads(pickled_error)
    except Exception:
        pickled_error = b""
    return {
        "text": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "exit_code": error.exit_code if isinstance(error, RlhpcError) else 1,
        "pickled": pickled_error,
    }


def worker_failed(error: dict[str, Any], call_text: str, record: dict[str, Any]) -> WorkerFailed:
    """Returns the driver-side exception for an error that a worker reported with `describe_error`."""
    error_cause = pickle.loads(error["pickled"]) if error["pickled"] else None
    origin = f"raised in {call_text} on node {record['node']} (pid {record['pid']}, log {record['log_err']})"
    message = f"{error['text']}\n  {origin}\n{error['traceback'].rstrip()}"
    if isinstance(
        error_cause, (UserError, NonFinite, StaleGeneration, StrangerConnected)
    ):  # a traceback would not help
        message = f"{error_cause}\n  {origin}"
    failure = WorkerFailed(
        message,
        group=record["group"],
        rank=record["rank"],
        node=record["node"],
        log_path=record["log_err"],
        remote_traceback=error["traceback"],
    )
    failure.exit_code = error["exit_code"]
    failure.__cause__ = error_cause
    return failure
