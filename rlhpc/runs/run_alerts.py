"""Alerts that the driver of a run reports: a diverging metric, a stalled step, lost ranks, and the end of the run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rlhpc.config.sections import RunConfig
from rlhpc.jobs.alerts import AlertSender, AlertTargets, ending_name, send_stalled
from rlhpc.jobs.signals import EXIT_REQUEUE, MAX_RESTARTS, StopRequest
from rlhpc.metrics.alert_rules import RuleBreach, RuleWatch, rules_of
from rlhpc.metrics.logger import read_metrics
from rlhpc.metrics.phase_times import active_s
from rlhpc.runs.run_folder import RunFolder, note
from rlhpc.runtime.text import first_line, format_names

#: Seconds between two checks of the thread that watches the run.
_CHECK_S = 1.0
#: Number of steps whose metrics are checked at once in a run without a hook.
CHECKED_STEPS = 10
#: Maximum number of ranks that an alert names.
_MAX_NAMED = 8


class WatchedRunner(Protocol):
    """Runner whose steps are watched."""

    step: int

    @property
    def stall_limit_s(self) -> float | None: ...


class RunAlerts:
    """Alerts of one start of a run. As a context manager, reports an exception that ends the start.

    In a job, the job reports how the driver ended, because only the job knows whether the driver starts again. The driver then
    reports only the end of the complete run.

    Args:
        cfg: Configuration.
        run: The open run folder.
        stop: Request to stop, which tells why the start ends early.

    Attributes:
        has_hook: Whether the run has a command or a webhook.
    """

    def __init__(self, cfg: RunConfig, run: RunFolder, stop: StopRequest) -> None:
        alerts = cfg.runner.alerts
        self._run, self._stop_request, self._is_in_job = run, stop, MAX_RESTARTS in os.environ
        self._sender = AlertSender(run.paths, AlertTargets.from_config(alerts), "driver")
        self.has_hook = bool(self._sender.targets)
        history = read_metrics(run.paths.metrics) if run.continues_run else []
        self._last_step = run.resume.step if run.continues_run else 0
        rules = rules_of(alerts.rules, alerts.silenced)
        self._rules = RuleWatch(rules, [row for row in history if row["step"] <= self._last_step])
        self._reported_names: set[str] = set()
        self._lock = threading.Lock()
        self._losses: dict[str, tuple[list[int], str]] = {}
        self._runner: WatchedRunner | None = None
        self._active_at = active_s()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rlhpc-alerts", daemon=True)

    def __enter__(self) -> RunAlerts:
        if self.has_hook:
            self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._is_in_job:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            self._send_end(
                "cancelled" if is_interrupt else "failed", "Ctrl-C, twice" if is_interrupt else first_line(error)
            )
        self._is_over.set()
        self._send_losses()
        self._sender.close()

    def watch(self, runner: WatchedRunner) -> None:
        """Begins to watch for steps that do not end."""
        self._active_at, self._runner = active_s(), runner

    def record_steps(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        """Evaluates the rules for metrics on finished steps, and removes them from the list.

        Args:
            rows: Steps with their metrics.
        """
        self._active_at = active_s()
        for step, row in rows:
            if step > self._last_step:  # otherwise it is repeated after a failure
                self._last_step = step
                for rule_breach in self._rules.add(step, row):
                    self._report_breach(rule_breach)
        rows.clear()

    def _report_breach(self, breach: RuleBreach) -> None:
        """Prints and sends a breach, once for each rule and metric."""
        name = f"{breach.rule}-{breach.metric}"
        if name in self._reported_names:
            return
        self._reported_names.add(name)
        value_text = "null" if breach.value is None else f"{breach.value:.6g}"
        finding = f"{breach.metric} is {value_text}, {breach.explanation}"
        note(f"warning: step {breach.step}: {finding} (to silence it: runner.alerts.silenced=[{breach.rule}])")
        self._sender.send(
            breach.rule, name, finding,
            step=breach.step, metric=breach.metric, value=breach.value, threshold=breach.threshold,
        )  # fmt: skip

    def record_lost(self, role: str, ranks: Sequence[int], reason: str) -> None:
        """Records the loss of ranks; losses of about the same time become one alert for each role."""
        self._active_at = active_s()
        with self._lock:
            known_ranks, first_reason = self._losses.get(role, ([], reason))
            self._losses[role] = ([*known_ranks, *ranks], first_reason)

    def record_end(self, run_result: Mapping[str, Any]) -> None:
        """Reports how this start ended: it completed the run, or stopped before its end."""
        reason, step = str(run_result["stop_reason"]), int(run_result["global_step"])
        if run_result["finished"]:
            if reason != "segment_end":
                self._sender.send("completed", f"completed-step_{step}", f"the run is complete ({reason})", step=step)
        elif not self._is_in_job:
            is_preempted = self._stop_request.exit_code == EXIT_REQUEUE
            self._send_end("preempted" if is_preempted else "cancelled", self._stop_request.reason, step)

    def _send_end(self, rule: str, reason: str, step: int | None = None) -> None:
        step = self._runner.step if step is None and self._runner is not None else step
        attempt = f"{self._run.started:.3f}-{os.getpid()}"
        self._sender.send(rule, ending_name(self._run.segment, attempt), reason, step=step)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_over.wait(_CHECK_S):
            with contextlib.suppress(Exception):  # no fault here may end the training, nor the thread
                self._check_stall()
                self._send_losses()
                self._sender.poll()

    def _check_stall(self) -> None:
        runner, silent_s = self._runner, active_s() - self._active_at
        limit_s = runner.stall_limit_s if runner is not None else None
        if runner is not None and limit_s is not None and silent_s > limit_s:
            send_stalled(self._sender, runner.step, silent_s, limit_s)

    def _send_losses(self) -> None:
        with self._lock:
            losses, self._losses = self._losses, {}
        step = self._runner.step if self._runner is not None else 0
        for role, (ranks, reason) in losses.items():
            ranks_text = format_names(sorted(set(ranks)), limit=_MAX_NAMED)
            self._sender.send(
                "lost", f"lost-{role}-step_{step + 1}",
                f"lost {role} rank{'s' * (len(set(ranks)) > 1)} {ranks_text}: {reason}",
                step=step,
            )  # fmt: skip
