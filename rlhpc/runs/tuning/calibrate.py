"""Calibration of the cost model: makes short runs and computes costs from their measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.logger import read_metrics
from rlhpc.runs.tuning.costs import Costs, Curve, word_of
from rlhpc.runs.tuning.queueing_model import QueueingModel
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape, GroupPlacement
from rlhpc.runs.tuning.workload import Knob, Workload
from rlhpc.runtime.errors import ConfigError, RlhpcError, Stopped
from rlhpc.runtime.host import node_name

#: Numbers of unmeasured steps at the beginning of a short run, which include set-up, and at its end.
_NUM_FIRST_SKIPPED, _NUM_LAST_SKIPPED = 2, 1
_POLL_S, _GRACE_S = 0.1, 30.0
#: Python program that restricts its process to some cores and then executes a command.
_RUN_ON_CORES = "import os, sys; os.sched_setaffinity(0, eval(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"


@dataclass(frozen=True)
class MeasuredCosts:
    """Measurements of a short run.

    Attributes:
        step_s: Median of the seconds from the end of a step to the end of the next.
        metrics: Metric → median over the steps.
        memory: Group → maximum bytes of host memory of a rank on this machine (proportional set size).
        device_memory: Group → maximum bytes of accelerator memory of a rank on this machine.
    """

    step_s: float
    metrics: Mapping[str, float]
    memory: Mapping[str, float] = field(default_factory=dict)
    device_memory: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ShortRuns:
    """Short runs of a configuration, with a few steps each.

    Attributes:
        config: File of the configuration, with all values resolved.
        folder: Parent of `logs` and of the runs' folders. Each run's folder is removed after the run.
        common_overrides: Overrides of every run.
        steps: Number of measured steps.
        deadline_s: Maximum seconds of a run.
    """

    config: Path
    folder: Path
    common_overrides: tuple[str, ...]
    steps: int
    deadline_s: float

    def run(self, name: str, overrides: Sequence[str], cores: frozenset[int] = frozenset()) -> MeasuredCosts:
        """Runs the configuration with overrides and returns the measurements.

        Args:
            name: Name of the run and of its log.
            overrides: Overrides of the configuration.
            cores: Cores that the run may use; empty for all.

        Raises:
            RlhpcError: The run failed (the message quotes the run's error), or exceeded the deadline.
        """
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        num_steps = _NUM_FIRST_SKIPPED + self.steps + _NUM_LAST_SKIPPED
        override_words = [
            *self.common_overrides, *overrides, f"runner.run_dir={json.dumps(str(self.folder / 'runs'))}",
            f"runner.name={name}", f"runner.max_steps={num_steps}", "runner.segments=1", "runner.save_interval=-1",
            "runner.resume_dir=null", "runner.logger.logger_backends=[jsonl]",
        ]  # fmt: skip
        command = [sys.executable, "-P", "-m", "rlhpc.cli", "train", str(self.config), *override_words]
        if cores:
            command = [sys.executable, "-P", "-c", _RUN_ON_CORES, repr(set(cores)), *command]
        paths = RunPaths.from_run_dir(self.folder / "runs", name)
        try:
            with log.open("wb") as output:
                observation = _observe_run(command, output, paths, self.deadline_s)
            if observation.code != 0:
                raise _run_error(name, observation.code, log)
            rows = read_metrics(paths.metrics)
        finally:
            shutil.rmtree(paths.root, ignore_errors=True)
        return _summarize(rows, observation)


@dataclass
class _Observation:
    code: int = 0
    memory: dict[str, float] = field(default_factory=dict)
    device_memory: dict[str, float] = field(default_factory=dict)


def _observe_run(command: Sequence[str], output: Any, paths: RunPaths, deadline_s: float) -> _Observation:
    """Runs a command and samples the memory of the run's ranks; returns the exit code and the maximum memory by group.

    Raises:
        RlhpcError: The command exceeded the deadline.
    """
    observation, start_time, sampled_at = _Observation(), time.monotonic(), 0.0
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0)
    try:
        while process.poll() is None:
            now = time.monotonic()
            if now - start_time > deadline_s:
                raise RlhpcError(
                    f"a short run did not end within {deadline_s:.0f} s (log {output.name}); give it longer with --deadline, "
                    "or fewer steps with --steps"
                )
            if now - sampled_at > min(1.0, (now - start_time) / 20):  # more often in short runs
                sampled_at = now
                _sample_memory(paths, observation)
            time.sleep(_POLL_S)
    finally:
        _end_process(process)
    observation.code = process.returncode
    return observation


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Ends a run that is still running, by SIGTERM and then SIGKILL. The run need not save."""
    for signal_number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second SIGTERM ends the run at once
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def _sample_memory(paths: RunPaths, observation: _Observation) -> None:
    """Samples the memory of the run's ranks on this machine, and updates the maximum per group."""
    local_node, pids = node_name(), dict[int, str]()
    for file in paths.registry.glob("*/members/*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads(file.read_bytes())
            if record["node"] == local_node or str(record["node"]).startswith(f"{local_node}-v"):
                pids[int(record["pid"])] = str(record["group"])
    device_bytes_by_pid = _measure_device_memory() if pids else {}
    for pid, group in pids.items():
        with contextlib.suppress(psutil.Error):
            pss_bytes = float(psutil.Process(pid).memory_full_info().pss)
            observation.memory[group] = max(observation.memory.get(group, 0.0), pss_bytes)
        if pid in device_bytes_by_pid:
            observation.device_memory[group] = max(observation.device_memory.get(group, 0.0), device_bytes_by_pid[pid])


def _measure_device_memory() -> dict[int, float]:
    """Returns the accelerator memory in bytes of each process that computes on an accelerator, by pid."""
    nbytes_by_pid: dict[int, float] = {}
    for line in _query_nvidia_smi("--query-compute-apps=pid,used_memory"):
        pid, _, used_mib = line.partition(",")
        if pid.strip().isdigit() and used_mib.strip().isdigit():
            nbytes_by_pid[int(pid)] = nbytes_by_pid.get(int(pid), 0.0) + float(used_mib) * 2**20
    return nbytes_by_pid


def device_size() -> int:
    """Returns the bytes of the smallest accelerator's memory; 0 if there is no accelerator, or if unknown."""
    memory_sizes = [int(line) for line in _query_nvidia_smi("--query-gpu=memory.total") if line.strip().isdigit()]
    return min(memory_sizes, default=0) * 2**20


def _query_nvidia_smi(query_option: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        completed_process = subprocess.run(
            ["nvidia-smi", query_option, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return completed_process.stdout.splitlines() if completed_process.returncode == 0 else []


def _run_error(name: str, code: int, log: Path) -> RlhpcError:
    """Builds the error for a failed run, with the last error message in the run's log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    error_line = next((i for i, line in enumerate(lines) if line.startswith("rlhpc: error: ")), None)
    message = "\n".join(lines[-1:] if error_line is None else lines[error_line:]).removeprefix("rlhpc: error: ")
    error_class = ConfigError if code == ConfigError.exit_code else RlhpcError
    return error_class(f"the short run {name} failed (log {log}): {message or f'exit code {code}'}")


def _summarize(rows: Sequence[Mapping[str, Any]], observation: _Observation) -> MeasuredCosts:
    end_times = [float(row["time/wall_s"]) for row in rows]
    step_times = [
        end_time - previous_end
        for previous_end, end_time in zip(
            end_times[_NUM_FIRST_SKIPPED - 1 :], end_times[_NUM_FIRST_SKIPPED:], strict=False
        )
    ]
    counted_rows = rows[_NUM_FIRST_SKIPPED : len(rows) - _NUM_LAST_SKIPPED]
    metric_names = {
        name for row in counted_rows for name, metric_value in row.items() if isinstance(metric_value, (int, float))
    }
    medians = {
        name: statistics.median(float(row[name]) for row in counted_rows if isinstance(row.get(name), (int, float)))
        for name in metric_names
    }
    return MeasuredCosts(
        statistics.median(step_times[: len(counted_rows)]), medians, observation.memory, observation.device_memory
    )


#: Function that makes a short run, given its name, overrides and cores.
Run = Callable[[str, Sequence[str], frozenset[int]], MeasuredCosts]

#: Relative spread of unchanged runs above which the machine counts as disturbed by other work. Calibration then repeats an
#: unchanged run after every other run.
_MAX_STEADY_SPREAD = 0.1


@dataclasses.dataclass
class Calibration:
    """Measurement of the costs of a workload's phases on this machine.

    Attributes:
        workload: Workload with the phases of a step.
        shape: Cluster that the configuration requests.
        configured: Placement and settings of the configuration.
        runs: Short runs.
        report: Function that prints progress messages.
    """

    workload: Workload
    shape: ClusterShape
    configured: Candidate
    runs: ShortRuns
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        measured_with = dict(override_word.split("=", 1) for override_word in self.workload.measured_with)
        short_run_settings = {self.workload.stages: 1, self.workload.staleness: 0}
        settings = {
            key: short_run_settings[key] if key in measured_with else setting_value
            for key, setting_value in self.configured.settings.items()
        }
        self.plain = dataclasses.replace(self.configured, settings=settings)
        self.samples: dict[str, list[tuple[float, float]]] = {phase.name: [] for phase in self.workload.phases}
        self.plain_runs: list[MeasuredCosts] = []
        self.failed_overrides: dict[str, str] = {}

    def costs(self) -> Costs:
        """Makes all short runs and returns the costs.

        Raises:
            RlhpcError: The unchanged configuration fails.
        """
        for name in ("plain", "again"):
            self._add_samples(self._without_drift(self._run_plain(name), self.plain_runs[-1].step_s))
        for divisor, overrides in self.workload.smaller.items():
            if (short_run := self._try_run(f"part_{divisor}", overrides)) is not None:
                self._add_samples(short_run, divisor)
        costs = self._without_factors()
        costs = dataclasses.replace(costs, scaling=self._measure_scaling(costs))
        costs = dataclasses.replace(costs, together_s=self._measure_multi_rank_costs(costs))
        for knob in self.workload.knobs:
            for knob_value in knob.values:
                if knob_value != self.plain.settings[knob.key]:
                    costs = self._add_value_costs(costs, knob, knob_value)
        self._run_plain("last")
        median_step_s = statistics.median(short_run.step_s for short_run in self.plain_runs)
        return dataclasses.replace(
            costs.times(median_step_s / self.plain_runs[0].step_s), spread=self._measure_spread()
        )

    def _measure_spread(self) -> float:
        """Returns the relative spread of the step times of all unchanged runs."""
        steps = [short_run.step_s for short_run in self.plain_runs]
        return (max(steps) - min(steps)) / statistics.fmean(steps)

    def knobs(self) -> tuple[Knob, ...]:
        """Returns the variable keys without the values that failed in a short run."""
        return tuple(
            Knob(knob.key, tuple(v for v in knob.values if word_of(knob.key, v) not in self.failed_overrides))
            for knob in self.workload.knobs
        )

    # -- runs -----------------------------------------------------------------------------------------------------

    def _run(self, name: str, overrides: Iterable[str], cores: frozenset[int] = frozenset()) -> MeasuredCosts:
        short_run = self.runs.run(name, [*self.workload.measured_with, *overrides], cores)
        self.report(f"{' '.join(overrides) or 'as it is'}: {short_run.step_s:.3g} s a step")
        return short_run

    def _try_run(
        self, name: str, overrides: Sequence[str], cores: frozenset[int] = frozenset()
    ) -> MeasuredCosts | None:
        """Makes a short run, and corrects its measurements for drift on a disturbed machine. Returns None if the run fails."""
        try:
            short_run = self._run(name, overrides, cores)
            if self._measure_spread() <= _MAX_STEADY_SPREAD:
                return short_run
            # Other work disturbs the machine; the unchanged runs before and after this run measure the drift.
            step_s_before = self.plain_runs[-1].step_s
            return self._without_drift(short_run, (step_s_before + self._run_plain("plain").step_s) / 2)
        except Stopped:
            raise
        except RlhpcError as error:
            self.failed_overrides[" ".join(overrides)] = str(error).splitlines()[0]
            self.report(f"{' '.join(overrides)}: left out: {error}")
            return None

    def _run_plain(self, name: str) -> MeasuredCosts:
        """Runs the unchanged configuration."""
        self.plain_runs.append(self._run(name, ()))
        return self.plain_runs[-1]

    def _without_drift(self, measured_costs: MeasuredCosts, plain_step_s: float) -> MeasuredCosts:
        """Returns a run's measurements without the drift of the machine.

        The drift is the ratio of `plain_step_s`, the step time of an unchanged run at that time in seconds, to the step time
        of the first unchanged run.
        """
        drift = plain_step_s / self.plain_runs[0].step_s
        metrics = {
            name: metric_value / drift if name.startswith("time/") else metric_value
            for name, metric_value in measured_costs.metrics.items()
        }
        return dataclasses.replace(measured_costs, step_s=measured_costs.step_s / drift, metrics=metrics)

    def _add_samples(self, measured_costs: MeasuredCosts, divisor: int = 1) -> None:
        for phase in self.workload.phases:
            fraction = 1.0 / self.plain.ranks(phase.group) / divisor
            self.samples[phase.name].append((fraction, measured_costs.metrics.get(phase.metric, 0.0)))

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _without_factors(self) -> Costs:
        """Returns costs with curves, overheads, threads, memory and spread, but without scaling and factors."""
        curves = {name: Curve.through(samples) for name, samples in self.samples.items()}
        levelled_runs = [self._without_drift(short_run, short_run.step_s) for short_run in self.plain_runs]
        turn_phases = [phase for phase in self.workload.phases if phase.turn]
        hop_times = [
            short_run.metrics.get(self.workload.turns, 0.0)
            - sum(short_run.metrics.get(phase.metric, 0.0) for phase in turn_phases)
            for short_run in levelled_runs
        ]
        costs = Costs(
            curves,
            hop_s=max(0.0, statistics.median(hop_times)) if turn_phases else 0.0,
            threads=self._model(Costs(curves)).threads(self.plain),
            memory=_find_maximum_by_group([short_run.memory for short_run in self.plain_runs]),
            device_memory=_find_maximum_by_group([short_run.device_memory for short_run in self.plain_runs]),
            spread=self._measure_spread(),
        )
        predicted_s = self._model(costs).predict(self.plain).step_s
        return dataclasses.replace(costs, overhead_s=max(0.0, self.plain_runs[0].step_s - predicted_s))

    def _model(self, costs: Costs) -> QueueingModel:
        return QueueingModel(self.workload, costs, self.shape)

    def _measure_scaling(self, costs: Costs) -> dict[str, float]:
        """Returns the exponent of each phase's speed-up with threads, from one short run with one thread per rank."""
        if max(costs.threads.values()) < 2 or len(self.shape.cores) > 1 or "SLURM_JOB_ID" in os.environ:
            return {}
        num_ranks = sum(len(placement.processes) for placement in self.plain.placements.values())
        cpus = sorted(os.sched_getaffinity(0))
        exponents: dict[str, float] = {}
        if (short_run := self._try_run("one_thread", (), frozenset(cpus[: max(1, num_ranks)]))) is None:
            return exponents
        for phase in self.workload.phases:
            plain_s = costs.curves[phase.name].seconds_at(1.0 / self.plain.ranks(phase.group))
            one_thread_s, threads = short_run.metrics.get(phase.metric, 0.0), costs.threads[phase.group]
            if plain_s > 0 and one_thread_s > plain_s and threads > 1:
                exponents[phase.name] = min(1.0, math.log(one_thread_s / plain_s) / math.log(threads))
        return exponents

    def _measure_multi_rank_costs(self, costs: Costs) -> dict[str, float]:
        """Returns the extra seconds of each phase with two ranks, compared with one rank that has half of the work.

        Makes one short run with twice as many ranks; returns {} if the machines have too few resources.
        """
        placements = {}
        for group, placement in self.plain.placements.items():
            pool, num_resources = self.shape.pools[placement.label], len(placement.resources)
            if group not in self.workload.groups or len(placement.processes) != 1 or placement.processes[0] != (0,):
                continue
            node = pool.resources[0][0]
            if pool.by_node and self.shape.cores[node] > 1:
                placements[group] = GroupPlacement.from_range(placement.label, 0, 1, 2)
            elif not pool.by_node and len(pool.resources) >= 2 * num_resources:
                placements[group] = GroupPlacement.from_range(placement.label, 0, 2)
        if not placements:
            return {}
        doubled_candidate = dataclasses.replace(self.plain, placements={**self.plain.placements, **placements})
        placement_word = word_of("cluster.component_placement", doubled_candidate.placement())
        if (short_run := self._try_run("two_ranks", [placement_word])) is None:
            return {}
        expected_s = self._model(costs).predict(doubled_candidate).phases
        return {
            phase.name: max(0.0, short_run.metrics.get(phase.metric, 0.0) - expected_s[phase.name])
            for phase in self.workload.phases
            if phase.group in placements
        }

    def _add_value_costs(self, costs: Costs, knob: Knob, knob_value: Any) -> Costs:
        """Makes a short run with another value of a key; returns the costs with this value's factors and extra seconds."""
        override_word = word_of(knob.key, knob_value)
        if (short_run := self._try_run(f"{knob.key.rpartition('.')[2]}_{knob_value}", [override_word])) is None:
            return costs
        changed_candidate = dataclasses.replace(self.plain, settings={**self.plain.settings, knob.key: knob_value})
        expected_s = self._model(costs).predict(changed_candidate).phases
        time_factors = {
            phase.name: short_run.metrics[phase.metric] / expected_s[phase.name]
            for phase in self.workload.phases
            if expected_s[phase.name] > 0
            and short_run.metrics.get(phase.metric, 0.0) > 0
            # If steps overlap, a wait does not measure the work of the phase's group.
            and (knob.key != self.workload.staleness or not phase.waits)
        }
        costs = dataclasses.replace(costs, factors={**costs.factors, override_word: time_factors})
        extra_s = short_run.step_s - self._model(costs).predict(changed_candidate).step_s
        return dataclasses.replace(costs, extra_s={**costs.extra_s, override_word: extra_s})


def _find_maximum_by_group(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the maximum bytes of each group over all runs."""
    return {group: max(run.get(group, 0.0) for run in runs) for run in runs for group in run}
