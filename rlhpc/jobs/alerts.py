"""Alerts of a run: their content, their destinations, and the processes that deliver them.

The driver, its job and a waiting command report alerts. Each alert has a name, under which the run folder records it once
(`alerts/<name>.json`). The first process that creates the file delivers the alert, also over restarts of the driver.

A separate process (`alert_delivery`) creates the file, runs the user's command and posts to the webhook. Neither a hanging
command, nor a hanging service, nor a hanging filesystem delays the process that reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.config.alerts import AlertsConfig, command_words
from rlhpc.jobs.paths import RunPaths, segment_name
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.runtime.allocation import in_slurm_job
from rlhpc.runtime.env_references import mask_values, read_values, variable_of
from rlhpc.runtime.files import create_exclusively, expand_home, read_file, read_yaml
from rlhpc.runtime.imports import python_path, run_module

#: Name of the rule of an alert that `rlhpc status --test-alert` sends.
TEST = "test"
#: Maximum number of alerts of one start of a process, against a rule that alerts without end.
_MAX_ALERTS = 100
#: Additional seconds for a delivery to end after its deadline.
_KILL_S = 2.0
#: Maximum size of a run's configuration file.
_MAX_CONFIG_BYTES = 1 << 21
#: References to deliveries that outlive their sender: Python warns when it collects the Popen of a running process.
_unfinished: list[subprocess.Popen[bytes]] = []
#: Rule → command that a user may want next; of a rule for metrics, the last one.
_NEXT_COMMANDS = {
    "completed": "rlhpc report", "failed": "rlhpc logs", "cancelled": "rlhpc status", "preempted": "rlhpc status",
    "lost": "rlhpc status", "stalled": "rlhpc status", "": "rlhpc watch",
}  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """Alert of a run, as hooks receive it in JSON.

    Attributes:
        rule: Name of the rule: an event of the run, or a rule for metrics.
        name: Name under which the run folder records the alert; two alerts with one name are the same alert.
        run, folder: Name and folder of the run.
        message: Description of the event.
        step: Step at which it happened; None before the first step.
        metric: Metric of the rule; "" for an event.
        value, threshold: The metric's value, and the number that it has passed; None for a value that is not finite.
        reporter: `driver`, `job` or `waiter`.
        time: Unix time of the report.
    """

    rule: str
    name: str
    run: str
    folder: str
    message: str
    step: int | None = None
    metric: str = ""
    value: float | None = None
    threshold: float | None = None
    reporter: str = "driver"
    time: float = field(default_factory=time.time)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Alert:
        """Builds an alert from the content of its file; ignores other fields."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__ if name in content})

    @property
    def next_command(self) -> str:
        """Command that shows more about the alert."""
        command = _NEXT_COMMANDS.get(self.rule, _NEXT_COMMANDS[""])
        return f"{command} {shlex.quote(self.folder)}"

    @property
    def text(self) -> str:
        """Alert as one line: run, rule, event, step, next command."""
        step_text = "" if self.step is None else f" at step {self.step}"
        return f"{self.run}: {self.rule}: {self.message}{step_text}. Next: {self.next_command}"

    def to_json(self) -> dict[str, Any]:
        """Returns the alert with its text and the next command."""
        return {**asdict(self), "text": self.text, "next_command": self.next_command}

    def create_record(self, errors: Collection[str] = ()) -> bool:
        """Creates the alert's record in the run folder; returns whether this process delivers the alert.

        If the record cannot be written, as on a full disk, an alert that may come twice is better than none.

        Args:
            errors: Failures of its delivery, until they are known.
        """
        path = RunPaths(Path(self.folder)).alert(self.name)
        try:
            path.parent.mkdir(exist_ok=True)
            content = json.dumps({**self.to_json(), "errors": [*errors]}).encode()
            return create_exclusively(path, content, mode=0o600)
        except OSError:
            return not path.exists()


@dataclass(frozen=True)
class AlertTargets:
    """Destinations of alerts, resolved.

    Attributes:
        command: Words of the command; empty if there is no command.
        url: URL of the webhook, a secret; "" if there is no webhook.
        url_variable: Environment variable that contains the URL, for messages.
        timeout_s: Seconds for a delivery.
        silenced: Rules that do not alert.
        secrets: Values of environment variables that no text may show, by variable.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    url_variable: str = ""
    timeout_s: float = 10.0
    silenced: Collection[str] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.command or self.url)

    def public(self, text: str) -> str:
        """Returns a text without secrets."""
        if self.url:
            text = text.replace(self.url, f"${{oc.env:{self.url_variable}}}")
        return mask_values(text, self.secrets)

    @classmethod
    def from_config(cls, alerts: AlertsConfig) -> AlertTargets:
        """Returns the destinations of a loaded configuration."""
        from rlhpc.config.typed import plain

        reference = plain(alerts, resolve=False)["webhook"]
        return cls(
            _expand(command_words(alerts.command)), alerts.webhook or "", variable_of(reference) or "", alerts.timeout_s,
            tuple(alerts.silenced), read_values(),
        )  # fmt: skip

    @classmethod
    def from_file(cls, path: Path, environment: Mapping[str, str]) -> AlertTargets:
        """Returns the destinations in a run's configuration file, which keeps the reference to the webhook; no
        destinations without a readable file.

        Args:
            path: The file, as `config_to_yaml` formats it.
            environment: Variables to which the file refers.
        """
        try:
            config_text = read_file(path, _MAX_CONFIG_BYTES).decode()
            alerts = read_yaml(config_text)["runner"]["alerts"]
            variable_names = {match[1] for match in _REFERENCE.finditer(config_text)}
            variable = variable_of(alerts.get("webhook")) or ""
            command_arguments = _expand(
                _resolve(argument, environment) for argument in command_words(alerts.get("command"))
            )
            return cls(
                command_arguments, environment.get(variable, ""), variable, float(alerts.get("timeout_s", cls.timeout_s)),
                tuple(map(str, alerts.get("silenced") or ())), {n: environment[n] for n in variable_names if n in environment},
            )  # fmt: skip
        except Exception:  # no file, of another version, or damaged: no reason to end a job or a wait
            return cls()


_REFERENCE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,([^}]*))?\}")


def _resolve(argument: str, environment: Mapping[str, str]) -> str:
    """Returns a word with the values of the environment variables that it refers to."""
    return _REFERENCE.sub(lambda match: environment.get(match[1], (match[2] or "").strip()), argument)


def _expand(words: Any) -> tuple[str, ...]:
    program, *arguments = [*words] or [""]
    return (str(expand_home(program)), *arguments) if program else ()


class AlertSender:
    """Sender of a process's alerts. All methods return at once, except `close`; none of them raises an error.

    Args:
        paths: The run.
        targets: Destinations of the alerts.
        reporter: `driver`, `job` or `waiter`.
    """

    def __init__(self, paths: RunPaths, targets: AlertTargets, reporter: str) -> None:
        self._paths, self.targets, self._reporter = paths, targets, reporter
        self._deliveries: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._names: set[str] = set()
        self._has_warned = False

    def send(self, rule: str, name: str, message: str, **fields: Any) -> None:
        """Starts the delivery of an alert, unless its rule is silenced or this process has sent it already. Without a hook,
        only alerts about metrics are recorded in the run folder, for `rlhpc status`.

        Args:
            rule, name, message: See `Alert`.
            fields: Further fields of `Alert`.
        """
        has_reader = bool(self.targets) or "metric" in fields
        if not has_reader or rule in self.targets.silenced or name in self._names or len(self._names) >= _MAX_ALERTS:
            return
        self._names.add(name)
        alert = Alert(
            rule, safe_name(name), self._paths.root.name, str(self._paths.root), self.targets.public(message),
            reporter=self._reporter, **fields,
        )  # fmt: skip
        if not self.targets:
            alert.create_record()
            return
        self.poll()
        try:
            self._deliveries.append((alert.name, start_delivery(alert, self.targets)))
        except Exception as error:  # no process can be started
            self._warn(f"{type(error).__name__}: {error}")

    def poll(self) -> None:
        """Collects deliveries that have ended, and prints a warning about the first one that failed."""
        running_deliveries = []
        for name, process in self._deliveries:
            if process.poll() is None:
                running_deliveries.append((name, process))
            elif process.returncode:
                record = read_json_file(self._paths.alert(name)) or {}
                self._warn("; ".join(map(str, record.get("errors") or ())) or "the delivery was killed")
        self._deliveries = running_deliveries

    def close(self) -> None:
        """Waits for the deliveries, but only in a Slurm job, whose end would kill them. Elsewhere they end by themselves."""
        if in_slurm_job(os.environ):
            deadline = time.monotonic() + self.targets.timeout_s + _KILL_S
            for _, process in self._deliveries:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        self.poll()
        _unfinished.extend(process for _, process in self._deliveries)

    def _warn(self, reason: str) -> None:
        """Prints the first failure; later ones are recorded in the run folder only."""
        if not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(OSError, ValueError):
                print(
                    f"rlhpc: warning: an alert could not be delivered: {self.targets.public(reason)}. The run goes on; try "
                    f"the hooks: rlhpc status CONFIG --test-alert",
                    file=sys.stderr,
                    flush=True,
                )


def safe_name(raw_name: str) -> str:
    """Returns a text as the name of an alert's file: only letters, digits, `.`, `_`, `-` and `=`, at most 150."""
    return re.sub(r"[^A-Za-z0-9._=-]", "_", raw_name).lstrip(".")[:150] or "alert"


def start_delivery(alert: Alert, targets: AlertTargets, *, writes_record: bool = True) -> subprocess.Popen[bytes]:
    """Starts the process that records and delivers an alert, in a separate session. It ends soon after the deadline.

    Args:
        alert: The alert.
        targets: Its destinations.
        writes_record: Whether to record the alert in the run folder, and deliver it only if it is not recorded yet. Otherwise
            the process prints the failures as a JSON list.

    Raises:
        OSError: The process cannot be started.
    """
    request = {
        "alert": alert.to_json(), "command": [*targets.command], "url": targets.url, "url_variable": targets.url_variable,
        "timeout_s": targets.timeout_s, "record": writes_record, "secrets": dict(targets.secrets),
    }  # fmt: skip
    process = subprocess.Popen(
        run_module("rlhpc.jobs.alert_delivery"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if writes_record else subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(request).encode())
    return process


def delivery_errors(alert: Alert, targets: AlertTargets) -> list[str]:
    """Delivers an alert without a record, and waits; returns a sentence for each hook that failed."""
    process = start_delivery(alert, targets, writes_record=False)
    assert process.stdout is not None
    with process.stdout as stdout:
        try:
            process.wait(targets.timeout_s + 10 * _KILL_S)
            return [str(error) for error in json.loads(stdout.read())]  # a few lines, which fit into the pipe
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return ["runner.alerts: the delivery did not end"]
        except ValueError:
            return [f"runner.alerts: the delivery ended with exit code {process.returncode}"]


def past_alerts(paths: RunPaths) -> list[tuple[Alert, list[str]]]:
    """Returns the recorded alerts of a run in their order, with the failures of their deliveries."""
    alert_contents = [read_json_file(path) for path in sorted(paths.alerts.glob("*.json"))]
    alerts: list[tuple[Alert, list[str]]] = []
    for alert_content in alert_contents:
        try:
            if alert_content is not None:
                alert = Alert.from_json(alert_content)
                float(alert.time)
                alerts.append((alert, [str(error) for error in alert_content.get("errors") or ()]))
        except (TypeError, ValueError):
            continue  # being written, or planted
    return sorted(alerts, key=lambda pair: float(pair[0].time))


def stall_limit_s(durations_s: Collection[float], alerts: AlertsConfig, start_limit_s: float) -> float:
    """Returns the seconds without a finished step after which a run counts as stalled.

    Args:
        durations_s: Durations of the last steps of this start.
        alerts: Section `runner.alerts`.
        start_limit_s: Seconds that a start may take before its first step.
    """
    if not durations_s:
        return max(alerts.stall_floor_s, start_limit_s)
    return max(alerts.stall_floor_s, alerts.stall_factor * statistics.median(durations_s))


def send_stalled(sender: AlertSender, step: int, silent_s: float, limit_s: float, reason: str = "") -> None:
    """Sends the alert of a run that stalls after `step`; the driver and a waiting command send the same one."""
    sender.send(
        "stalled", f"stalled-step_{step + 1}",
        f"no step has ended for {silent_s:.0f} s, which is more than {limit_s:.0f} s{reason}",
        step=step, value=silent_s, threshold=limit_s,
    )  # fmt: skip


def send_requeued(sender: AlertSender, segment: int, claim: int, reason: str, step: int | None = None) -> None:
    """Sends the alert of a job that ended early and starts again; the job and a waiting command send the same one.

    Args:
        sender: The sender.
        segment: The segment that the job trains.
        claim: Number of the claim under which the job trained.
        reason: Why the job ended, and what follows.
        step: Step of the newest checkpoint.
    """
    sender.send("preempted", f"requeued-{segment_name(segment)}-claim_{claim}", reason, step=step)


def ending_name(segment: int | None, attempt: str) -> str:
    """Returns the name of the alert about the end of a submission, or of a start without a job.

    The first report of an end decides how the run ended.

    Args:
        segment: The segment; None for a complete run.
        attempt: Token of the submission, or an identity of the start.
    """
    return f"end-{segment_name(segment or 0)}-{attempt}"
