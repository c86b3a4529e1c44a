"""Sweep operations of the commands: lookup, plan, progress display, status and cancellation."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TextIO

from rlhpc.cli.follow import WorkflowLog, last_row
from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home

if TYPE_CHECKING:
    from rlhpc.jobs.plan import JobPlan
    from rlhpc.runs.sweep import Sweep, SweepRun

#: Seconds between two updates of the runs' progress.
_UPDATE_INTERVAL_S = 2.0


def sweep_paths(sweep_text: str, overrides: Sequence[str] = ()) -> SweepPaths | None:
    """Returns the sweep that the user names by its folder, or by its configuration; None if the user names a run.

    Raises:
        ConfigError: The sweep has not been started.
    """
    location = expand_home(sweep_text).absolute()
    if location.is_dir():
        paths = SweepPaths(location)
        return paths if paths.is_there and not overrides else None
    if not location.is_file():
        return None
    from rlhpc.runs.sweep import load_sweep

    sweep = load_sweep(location, overrides)
    if sweep is None:
        return None
    if not sweep.paths.is_there:
        raise ConfigError(
            f"{sweep.paths.root}: the sweep of {sweep_text} has not begun; start it: rlhpc run {shlex.quote(sweep_text)}"
        )
    return sweep.paths


def render_sweep(sweep: SweepPaths) -> str:
    """Renders a line for each run of a sweep, including runs that have not started or are no longer in the sweep."""
    from rlhpc.jobs.state import find_runs
    from rlhpc.jobs.status import render_runs
    from rlhpc.runs.headlines import run_headlines
    from rlhpc.runs.sweep import read_sweep

    names = [str(run["name"]) for run in read_sweep(sweep)["runs"]]
    run_names = {paths.root.name for paths in find_runs(sweep.root, depth=1)}
    notes = {name: "not in the sweep any more" for name in run_names - set(names) if not name.startswith("sft-")}
    ordered_names = [*(name for name in sorted(run_names) if name.startswith("sft-")), *names, *sorted(notes)]
    cancelled_text = "; cancelled, rlhpc run goes on with it" if sweep.cancel_mark.exists() else ""
    return f"sweep {sweep.root.name}: {len(names)} runs{cancelled_text}\n" + render_runs(
        sweep.root, [sweep.run(name) for name in ordered_names], notes, headlines=run_headlines
    )


def cancel_sweep(sweep: SweepPaths) -> list[str]:
    """Ends the jobs of all runs of a sweep, and prevents its workflow from starting others.

    Returns:
        A sentence for every job that was ended.

    Raises:
        RlhpcError: A job could not be ended; all other jobs have been ended.
    """
    from rlhpc.jobs.cancel import cancel, require_ownership
    from rlhpc.jobs.state import find_runs

    runs = list(find_runs(sweep.root, depth=1))
    for paths in runs:
        require_ownership(paths)
    try:
        sweep.cancel_mark.touch()
    except OSError as error:
        raise RlhpcError(f"{sweep.cancel_mark}: cannot be written: {error.strerror}") from error
    messages: list[str] = []
    errors: list[RlhpcError] = []

    def cancel_run(paths: RunPaths) -> list[str]:
        try:
            return [f"{paths.root.name}: {message}" for message in cancel(paths)]
        except RlhpcError as error:
            errors.append(error)
            return []

    with ThreadPoolExecutor(16) as pool:  # each call waits until its run has saved
        for sentences in pool.map(cancel_run, runs):
            messages += sentences
    if errors:
        raise RlhpcError("; ".join([*messages, *map(str, errors)]))
    return messages


# -- plan -------------------------------------------------------------------------------------------------------------


def render_sweep_plan(sweep: Sweep, launcher: str) -> str:
    """Renders the number of runs and jobs of a sweep, their maximum cost, and the plan of the first run."""
    from rlhpc.jobs.accelerators import with_likely_accelerators
    from rlhpc.jobs.plan import build_plan, count_noun, render_plan

    job_plans = [build_plan(with_likely_accelerators(run.cfg, launcher), launcher=launcher) for run in sweep.runs]
    job_counts = sum(map(_count_jobs, sweep.runs), Counter[str]())
    num_seeds = len({run.point.seed for run in sweep.runs})
    limit_text = f", at most {sweep.section.max_queued} training jobs queued or running at once"
    lines = [
        f"sweep {sweep.name}: {count_noun(len(sweep.runs), 'run')} ("
        f"{count_noun(len(sweep.runs) // num_seeds, 'configuration')}, {count_noun(num_seeds, 'seed')})"
        f"{limit_text if sweep.section.max_queued else ''}",
        "jobs         " + ", ".join(f"{num_jobs} {job_type}" for job_type, num_jobs in job_counts.items() if num_jobs),
    ]
    lines += [
        f"shared       {run.point.name} makes {' and '.join(sorted(run.prepares))} for those that need the same"
        for run in sweep.runs
        if run.prepares
    ]
    if job_plans[0].launcher == "slurm":
        lines.append(f"at most      {_cost(sweep, job_plans)}")
    lines += ["", *(f"  {run.point.name}" for run in sweep.runs), "", f"# {sweep.runs[0].point.name}, as an example"]
    return "\n".join([*lines, render_plan(job_plans[0])])


def _count_jobs(run: SweepRun) -> Counter[str]:
    """Returns the number of jobs of a run, by type."""
    from rlhpc.runs.task_type import task_type_of

    cfg, task_type = run.cfg, task_type_of(run.cfg)
    preparation = task_type.offline.preparation(cfg)
    num_suites, prepares_sft = len(cfg.workflow.eval_suites), "sft" in run.prepares
    return Counter(
        training=cfg.runner.segments + prepares_sft,
        evaluation=num_suites * (cfg.runner.segments + preparation.evaluates_start),
        export=1 + prepares_sft,
        recording=("demos" in run.prepares) + bool(task_type.offline.recording(cfg)[0]),
    )


def _cost(sweep: Sweep, job_plans: Sequence[JobPlan]) -> str:
    """Formats the maximum node hours and GPU hours of the training jobs: each job may use its complete walltime."""
    from rlhpc.jobs.slurm import minutes_of

    nodes = accelerators = 0.0
    for run, plan in zip(sweep.runs, job_plans, strict=True):
        for component in plan.components:
            time_limit = dict(component.options).get("time")
            if time_limit is None:
                return "unknown: no walltime (cluster.time, or a site file) says how long a job may take"
            job_hours = run.cfg.runner.segments * minutes_of(time_limit) / 60
            nodes += job_hours * len(component.nodes)
            accelerators += job_hours * sum(plan.nodes[n].accelerators for n in component.nodes)
    return f"{nodes:.4g} node hours and {accelerators:.4g} GPU hours of training, if every job takes its whole walltime"


# -- run --------------------------------------------------------------------------------------------------------------


class SweepFollower:
    """Progress display of a sweep's workflow: a line when a run starts to train, fails or is done, and the overall progress.

    Args:
        log: Snakemake's output.
        sweep: The sweep.
        stream: Output stream; stderr by default.
    """

    def __init__(self, log: WorkflowLog, sweep: Sweep, stream: TextIO | None = None) -> None:
        from rlhpc.config import total_steps
        from rlhpc.runs.sweep import rule_prefixes

        self._log, self._sweep, self._stream = log, sweep, stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._prefixes = rule_prefixes([run.point.name for run in sweep.runs])
        self._totals = {run.point.name: total_steps(run.cfg) for run in sweep.runs}
        self._paths = {run.point.name: run.paths for run in sweep.runs}
        self._printed_failures: set[tuple[str, str]] = set()
        self._failures: dict[str, int] = {}
        self._progress_text, self._next_update = "", 0.0
        self.finished_names: list[str] = []

    def update(self) -> None:
        """Reads new output, and updates the display."""
        for job in self._log.read():
            name, rule = self.split_rule(job.rule)
            if name and rule in ("train_segment", "sft"):
                self._print_line(name, "training" if rule == "train_segment" else "training on demonstrations first")
            elif rule == "compare":
                self._print_line("", "writing the page")
        for name, prefix in self._prefixes.items():
            rule = f"{prefix}report"
            has_failed = any(job.rule == rule for job in self._log.failed_jobs)
            if self._log.running_counts.get(rule) == 0 and not has_failed and name not in self.finished_names:
                self.finished_names.append(name)
                self._print_line(name, f"done ({len(self.finished_names)})")
        for job in self._log.failed_jobs:
            name, rule = self.split_rule(job.rule)
            self._print_line(name, f"failed: {rule}" + (f", see {job.log}" if job.log else ""))
        if self._is_terminal and time.monotonic() > self._next_update:
            self._next_update = time.monotonic() + _UPDATE_INTERVAL_S
            self._print_progress()

    def split_rule(self, rule: str) -> tuple[str, str]:
        """Returns the run of a rule ("" for a rule of the sweep itself), and the rule's name without the run's prefix."""
        matching_names = {prefix: name for name, prefix in self._prefixes.items() if rule.startswith(prefix)}
        prefix = max(matching_names, key=len, default="")
        return matching_names.get(prefix, ""), rule.removeprefix(prefix)

    def _print_line(self, name: str, text: str) -> None:
        if (name, text) not in self._printed_failures:
            self._printed_failures.add((name, text))
            self._clear_progress()
            self._stream.write(f"  {f'{name}: ' if name else ''}{text}\n")
            self._stream.flush()

    def _print_progress(self) -> None:
        training_jobs = [
            name for name, prefix in self._prefixes.items() if self._log.running_counts.get(f"{prefix}train_segment")
        ]
        steps = {name: int(last_row(path.metrics).get("step", 0)) for name, path in self._paths.items()}
        finished_fraction = sum(min(steps[name], total_steps) for name, total_steps in self._totals.items()) / max(
            1, sum(self._totals.values())
        )
        self._clear_progress()
        self._progress_text = (
            f"  {len(self.finished_names)} of {len(self._paths)} runs done, {len(training_jobs)} training, "
            f"{finished_fraction:.0%} of all steps"
        )
        self._stream.write(self._progress_text[:110])
        self._stream.flush()

    def _clear_progress(self) -> None:
        if self._progress_text:
            self._stream.write("\r\x1b[2K")
            self._progress_text = ""

    def close(self) -> None:
        """Updates the display a last time, and clears the progress line."""
        self._next_update = float("inf")
        self.update()
        self._clear_progress()
        self._stream.flush()


def render_sweep_ending(sweep: Sweep) -> list[str]:
    """Returns the lines to print after a sweep: the runs that did not finish, and each configuration with its score."""
    from rlhpc.jobs.state import states

    run_states = [run_state for _, run_state in states([run.paths for run in sweep.runs])]
    failed_runs = [
        (run.point.name, run_state)
        for run, run_state in zip(sweep.runs, run_states, strict=True)
        if run_state.state != "finished"
    ]
    lines = [f"{sweep.name}: {len(run_states) - len(failed_runs)} of {len(run_states)} runs finished"]
    lines += [
        f"  {name}: {run_state.state}{f', {run_state.reason}' if run_state.reason else ''}"
        for name, run_state in failed_runs[:10]
    ]
    lines += [f"  and {len(failed_runs) - 10} more"] if len(failed_runs) > 10 else []
    if sweep.paths.is_there:
        from rlhpc.runs.sweep_page import rank_sweep, render_ranking

        lines += render_ranking(rank_sweep(sweep.paths))
    return lines
