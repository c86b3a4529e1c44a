"""Delivery of one alert (`python -m rlhpc.jobs.alert_delivery`): records it, runs the command, and posts to the webhook.

The process reads the alert and its destinations from its standard input (`alerts.start_delivery`). Both hooks run at the same
time. When the deadline passes, or when the command writes without end, the command is killed with all its descendants.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.jobs.alerts import Alert, AlertTargets
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import write_json
from rlhpc.runtime.os_resources import adopt_orphans, readable_descriptors, start_bound_to_parent
from rlhpc.runtime.text import cut, one_line

#: Bytes of a command's output that are kept, and after which the command is killed.
_KEPT_BYTES, _MAX_BYTES = 2048, 1 << 20
#: Seconds to kill the descendants of a command.
_KILL_S = 1.0
#: Maximum length of a text for Discord, which accepts 2000 characters.
_MAX_TEXT = 1900


def main() -> int:
    """Delivers the alert on standard input. Returns 0 if all hooks succeeded or another process delivers the alert."""
    request = json.loads(sys.stdin.buffer.read())
    alert = Alert.from_json(request["alert"])
    targets = AlertTargets(
        tuple(request["command"]), request["url"], request["url_variable"], request["timeout_s"], (), request["secrets"]
    )
    path = RunPaths(Path(alert.folder)).alert(alert.name)
    if request["record"]:
        if not Path(alert.folder).is_dir():
            return 1  # the run folder was removed, and must not come back
        if not alert.create_record(["not delivered yet"]):
            return 0
    errors = [targets.public(error) for error in deliver(alert, targets)]
    if request["record"]:
        with contextlib.suppress(OSError):
            write_json(path, {**alert.to_json(), "errors": errors})
    else:
        print(json.dumps(errors), flush=True)
    return 1 if errors else 0


def deliver(alert: Alert, targets: AlertTargets) -> list[str]:
    """Runs the command and posts to the webhook; returns a sentence for each that failed."""
    deadline, errors = time.monotonic() + targets.timeout_s, []
    post_errors: list[str] = []
    post = threading.Thread(target=lambda: post_errors.extend(_post(alert, targets)), daemon=True)
    if targets.url:
        post.start()
    if targets.command and (error := _run(targets.command, alert, deadline)):
        errors.append(f"runner.alerts.command: {error}")
    if targets.url:
        post.join(max(0.0, deadline - time.monotonic()))
        reasons = [f"no answer within {targets.timeout_s:g} s"] if post.is_alive() else post_errors
        errors += [f"runner.alerts.webhook: {reason}" for reason in reasons]
    return errors


# -- the command ------------------------------------------------------------------------------------------------------


def environment_of(alert: Alert) -> dict[str, str]:
    """Returns the environment variables in which a command finds the alert."""
    fields = alert.to_json()
    field_names = ("rule", "run", "folder", "text", "message", "step", "metric", "value", "threshold", "next_command")
    return {f"RLHPC_ALERT_{name.upper()}": _format_variable(fields[name]) for name in field_names}


def _format_variable(field_value: Any) -> str:
    return "" if field_value is None else str(field_value).replace("\0", "")


def _run(command: Sequence[str], alert: Alert, deadline: float) -> str:
    """Runs a command with the alert on its standard input; returns how it failed, "" if it succeeded."""
    adopt_orphans()
    try:
        process = start_bound_to_parent(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **environment_of(alert)},
        )  # fmt: skip
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror or error}"
    assert process.stdin is not None and process.stdout is not None
    writer = threading.Thread(
        target=_write, args=(process.stdin, json.dumps(alert.to_json()).encode() + b"\n"), daemon=True
    )
    writer.start()  # a command need not read its input
    output, reason = _read(process, process.stdout.fileno(), deadline)
    _kill_all(process)
    output_text = one_line(output.decode("utf-8", "replace").strip().replace("\n", " "))
    return "" if not reason else reason + (f": {cut(output_text, 300)}" if output_text else "")


def _write(stdin: Any, input_bytes: bytes) -> None:
    with contextlib.suppress(OSError, ValueError), stdin:
        stdin.write(input_bytes)


def _read(process: subprocess.Popen[bytes], output: int, deadline: float) -> tuple[bytes, str]:
    """Reads a command's output until its end; returns the first bytes of the output, and how the command failed."""
    head, num_bytes, is_open = b"", 0, True
    while time.monotonic() < deadline:
        if is_open and readable_descriptors([output], 0.05):
            output_bytes = os.read(output, 1 << 16)
            head, num_bytes, is_open = (
                (head + output_bytes)[:_KEPT_BYTES],
                num_bytes + len(output_bytes),
                bool(output_bytes),
            )
            if num_bytes > _MAX_BYTES:
                return head, f"was killed after {_MAX_BYTES >> 20} MiB of output"
            continue
        if (exit_code := process.poll()) is not None:
            outcome_text = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
            return head, "" if exit_code == 0 else outcome_text
        if not is_open:
            time.sleep(0.02)
    return head, "did not end in time, and was killed"


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a command and all its descendants; those in a separate session have become children of this process."""
    deadline = time.monotonic() + _KILL_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while time.monotonic() < deadline and (children := _read_child_pids()):
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _read_child_pids() -> list[int]:
    children_text = ""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children_text += path.read_text() + " "
    return [int(pid_text) for pid_text in children_text.split()]


# -- the webhook ------------------------------------------------------------------------------------------------------


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, because a redirect would repeat a post at another address without content."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def payload_of(alert: Alert) -> Mapping[str, Any]:
    """Returns the JSON content of a post: `text` is shown by Slack and Mattermost, `content` by Discord."""
    # neither service may read a mention of everyone from an error message
    alert_text = (
        cut(alert.text, _MAX_TEXT).replace("<!", "< !").replace("@everyone", "@ everyone").replace("@here", "@ here")
    )
    return {"text": alert_text, "content": alert_text, "allowed_mentions": {"parse": []}, "alert": alert.to_json()}


def _post(alert: Alert, targets: AlertTargets) -> list[str]:
    """Posts an alert; returns how that failed, without the URL."""
    body_bytes = json.dumps(payload_of(alert)).encode()
    request = urllib.request.Request(
        targets.url, body_bytes, {"Content-Type": "application/json", "User-Agent": "rlhpc"}, method="POST"
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=targets.timeout_s) as response:
            response.read(_KEPT_BYTES)
    except urllib.error.HTTPError as error:
        error_text = error.read(200).decode("utf-8", "replace").strip() if error.fp else ""
        return [f"answered {error.code}" + (f": {one_line(error_text)}" if error_text else "")]
    except Exception as error:  # of the network, the certificate, or an invalid URL, whose text may contain it
        reason = getattr(error, "reason", None)
        return [f"cannot be reached ({type(error).__name__}{f': {reason}' if isinstance(reason, OSError) else ''})"]
    return []


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # the thread of a hanging post does not hold the process
