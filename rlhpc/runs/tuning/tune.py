"""Command `rlhpc tune`: measures the costs of a step, searches placements, verifies the best, and writes a configuration."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.config import config_to_yaml, find_config, total_steps
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import select
from rlhpc.config.yaml_files import dump_yaml
from rlhpc.jobs.paths import CONFIG, RunPaths
from rlhpc.jobs.plan import count_noun
from rlhpc.runs.config_changes import training_fingerprint
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.plan import memory_at_start
from rlhpc.runs.task_type import all_task_types, task_type_of
from rlhpc.runs.tuning.calibrate import Calibration, ShortRuns, device_size
from rlhpc.runs.tuning.costs import Costs
from rlhpc.runs.tuning.queueing_model import QueueingModel
from rlhpc.runs.tuning.search import RankedCandidate, Space, search
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape, configured_placements
from rlhpc.runs.tuning.workload import Workload
from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import replace_durably
from rlhpc.runtime.os_resources import total_memory
from rlhpc.runtime.ownership import require_own_run_folder
from rlhpc.runtime.plugins import load_attribute
from rlhpc.runtime.text import align_columns, format_bytes

#: Number of candidates in the table and in tune.json.
_NUM_LISTED = 10
#: Key → value in short runs, for task types with the key. The values turn off evaluations and early stopping.
SHORT_RUN_OVERRIDES = {
    "runner.val_check_interval": "-1", "runner.stop_return": "null", "runner.keep_best": "null", "runner.patience": "0",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TuneRequest:
    """Options of `rlhpc tune`.

    Attributes:
        config: File of the configuration.
        overrides: Overrides of the configuration.
        site: Site file.
        nodes, accelerators: Number of nodes, and of accelerators per node; None for the configured numbers.
        verify: Number of best candidates to verify by short runs.
        max_staleness: Largest `algorithm.max_staleness` to consider; None for the configured value.
        samples: Number of samples for the computation of hours; None for the samples of the complete run.
        steps: Number of measured steps of a short run.
        deadline_s: Maximum seconds of a short run.
    """

    config: str
    overrides: tuple[str, ...] = ()
    site: str | None = None
    nodes: int | None = None
    accelerators: int | None = None
    verify: int = 0
    max_staleness: int | None = None
    samples: int | None = None
    steps: int = 10
    deadline_s: float = 1800.0

    def machines(self) -> tuple[str, ...]:
        """Returns the overrides that request `nodes` and `accelerators`."""
        machine_sizes = {"num_nodes": self.nodes, "accelerators_per_node": self.accelerators}
        return tuple(
            f"cluster.{key}={machine_size}" for key, machine_size in machine_sizes.items() if machine_size is not None
        )


def workload_of(cfg: RunConfig, max_staleness: int | None) -> Workload:
    """Returns the workload of one step of a run.

    Raises:
        ConfigError: The task type has no workload.
    """
    task_type = task_type_of(cfg)
    if not task_type.planning.workload:
        tunable_names = ", ".join(
            sorted(other_type.name for other_type in all_task_types() if other_type.planning.workload)
        )
        raise ConfigError(
            f"runner.task_type is {task_type.name}, and what a step of such a run consists of is not known; rlhpc tune "
            f"takes: {tunable_names}"
        )
    configured_staleness = int(select(cfg, "algorithm.max_staleness") or 0)
    build_workload = load_attribute(task_type.planning.workload, f"the workload of the kind {task_type.name}")
    workload: Workload = build_workload(cfg, configured_staleness if max_staleness is None else max_staleness)
    return workload


def space_of(request: TuneRequest, workload: Workload, costs: Costs, cfg: RunConfig, *, is_local: bool) -> Space:
    """Returns the search space on the requested machines. If `is_local` is true, the memory of this machine is the limit."""
    target = load_config(request.config, [*request.overrides, *request.machines()], site=request.site, check=False)
    configured_placement = configured_candidate(cfg, workload)
    labels = {placement.label for placement in configured_placement.placements.values()}
    memory = total_memory() if is_local else 0
    shape = ClusterShape.from_config(target, labels, memory, device_size() if is_local else 0)
    return Space(QueueingModel(workload, costs, shape), configured_placement)


def configured_candidate(cfg: RunConfig, workload: Workload) -> Candidate:
    """Returns the placement and settings of the configuration."""
    worker_classes = task_type_of(cfg).groups.worker_classes_of(cfg)
    placements = {
        group: placement for group, placement in configured_placements(cfg).items() if group in worker_classes
    }
    return Candidate(placements, {knob.key: select(cfg, knob.key) for knob in workload.knobs})


def tune(request: TuneRequest, report: Callable[[str], None]) -> dict[str, Any]:
    """Searches for the best placement of a run; writes tune.json and the configuration of the winner.

    Args:
        request: Configuration and options.
        report: Function that prints progress messages.

    Returns:
        The content of tune.json.

    Raises:
        ConfigError, PlacementError: A check failed before the first short run, or no placement is allowed.
        RlhpcError: The short run of the unchanged configuration failed.
    """
    cfg = load_config(request.config, request.overrides, site=request.site)
    if request.machines() and cfg.cluster.node_groups:
        raise ConfigError(
            "--nodes and --gpus are for configurations without cluster.node_groups; change those in the file"
        )
    workload = workload_of(cfg, request.max_staleness)
    configured_start = configured_candidate(cfg, workload)
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    require_own_run_folder(paths.root)
    try:
        paths.tuning.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="short-", dir=paths.tuning))
        (folder / CONFIG).write_text(config_to_yaml(cfg))
    except OSError as error:
        raise unwritten_page_error(error, paths.tuning) from error
    short_run_overrides = [
        f"{key}={override_value}"
        for key, override_value in SHORT_RUN_OVERRIDES.items()
        if key in task_type_of(cfg).schema
    ]
    runs = ShortRuns(folder / CONFIG, folder, tuple(short_run_overrides), request.steps, request.deadline_s)
    try:
        record = _tune(request, cfg, workload, configured_start, runs, report)
    except RlhpcError:  # the message may name a log, so the logs stay
        shutil.rmtree(folder / "runs", ignore_errors=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    _write_results(paths, request, record)
    return record


def _tune(
    request: TuneRequest,
    cfg: RunConfig,
    workload: Workload,
    configured_start: Candidate,
    runs: ShortRuns,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Measures the costs, searches, and verifies the best candidates; returns the content of tune.json."""
    labels = {placement.label for placement in configured_start.placements.values()}
    calibration = Calibration(workload, ClusterShape.from_config(cfg, labels), configured_start, runs, report)
    costs = calibration.costs()
    workload = dataclasses.replace(workload, knobs=calibration.knobs())
    space = space_of(request, workload, costs, cfg, is_local=True)
    report(f"searching {sum(1 for _ in space.iter_sizes())} numbers of ranks and settings")
    best_candidates = search(
        space, max(_NUM_LISTED, request.verify), lambda candidate: is_allowed(request, candidate, is_local=True)
    )
    if not best_candidates:
        raise ConfigError(
            f"no placement of {', '.join(workload.groups)} on {_format_machines(space.model.shape)} is allowed; rlhpc plan "
            "says why of one"
        )
    record = _build_record(request, cfg, space, best_candidates, calibration.failed_overrides)
    _verify(record, request, runs, report)
    return record


def is_allowed(request: TuneRequest, candidate: Candidate, *, is_local: bool) -> bool:
    """Returns whether a candidate passes the checks of the configuration and the memory check of a start.

    The memory check uses estimates, because measurements of short runs are valid only for their number of ranks.

    Args:
        request: Configuration, options and machines.
        candidate: Placement and settings.
        is_local: True if the candidate runs on machines like this machine.
    """
    override_words = [*request.overrides, *request.machines(), *candidate.overrides()]
    try:
        cfg = load_config(request.config, override_words, site=request.site)
    except RlhpcError:
        return False
    memory = memory_at_start(cfg, "local" if is_local and cfg.cluster.num_nodes == 1 else "slurm")
    return memory is None or not memory.refusals()


def _format_machines(shape: ClusterShape) -> str:
    num_nodes = len(shape.cores)
    node_size = f"{shape.accelerators // num_nodes} accelerators" if shape.accelerators else f"{max(shape.cores)} cores"
    return f"{count_noun(num_nodes, 'node')} with {node_size}"


def _build_record(
    request: TuneRequest,
    cfg: RunConfig,
    space: Space,
    best_candidates: Sequence[RankedCandidate],
    failed_overrides: dict[str, str],
) -> dict[str, Any]:
    model, workload = space.model, space.model.workload
    steps = total_steps(cfg) if request.samples is None else math.ceil(request.samples / workload.samples)
    num_units = model.shape.accelerators or len(model.shape.cores)
    configured_start = space.configured
    if not request.machines() and not any(
        _is_same_candidate(configured_start, ranked_candidate.candidate) for ranked_candidate in best_candidates
    ):
        best_candidates = [*best_candidates, RankedCandidate(configured_start, model.predict(configured_start))]
    rows = [
        {
            "mode": ranked_candidate.candidate.mode,
            "configured": not request.machines() and _is_same_candidate(configured_start, ranked_candidate.candidate),
            "placement": ranked_candidate.candidate.placement(),
            "settings": {
                key: setting_value
                for key, setting_value in ranked_candidate.candidate.settings.items()
                if setting_value != configured_start.settings[key]
            },
            "overrides": [*request.machines(), *ranked_candidate.candidate.overrides()],
            **dataclasses.asdict(ranked_candidate.prediction),
            "hours": ranked_candidate.prediction.step_s * steps * num_units / 3600,
            "measured_step_s": None,
            "error": None,
        }
        for ranked_candidate in best_candidates
    ]
    return {
        "format": 1,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "config": request.config,
        "overrides": list(request.overrides),
        "kind": task_type_of(cfg).name,
        "fingerprint": training_fingerprint(cfg),
        "machines": {
            "nodes": len(model.shape.cores),
            "accelerators": model.shape.accelerators,
            "cores": list(model.shape.cores),
        },
        "unit": workload.unit,
        "samples_per_step": workload.samples,
        "samples": steps * workload.samples,
        "hours_of": "accelerators" if model.shape.accelerators else "nodes",
        "knobs": {knob.key: list(knob.values) for knob in workload.knobs},
        "staleness": max((k.values[-1] for k in workload.knobs if k.key == workload.staleness), default=0),
        "refused": failed_overrides,
        "costs": model.costs.to_json(),
        "rows": rows,
        "winner": 0,
    }


def _is_same_candidate(first_candidate: Candidate, second_candidate: Candidate) -> bool:
    first_processes, second_processes = (
        {name: placement.processes for name, placement in candidate.placements.items()}
        for candidate in (first_candidate, second_candidate)
    )
    return first_processes == second_processes and first_candidate.settings == second_candidate.settings


def _verify(record: dict[str, Any], request: TuneRequest, runs: ShortRuns, report: Callable[[str], None]) -> None:
    """Runs the best candidates and the unchanged configuration for a few steps; records the measurements and the winner.

    The winner is the fastest candidate, unless the configured candidate is slower by at most the spread of equal runs.
    """
    if not request.verify:
        return
    rows = record["rows"]
    rows_to_run = [row for index, row in enumerate(rows) if index < request.verify or row["configured"]]
    for index, row in enumerate(rows_to_run):
        try:
            measured_costs = runs.run(f"verify_{index}", row["overrides"])
        except RlhpcError as error:
            row["note"] = str(error).splitlines()[0]
            report(f"verify {index + 1} of {len(rows_to_run)}: {error}")
            continue
        row["measured_step_s"] = measured_costs.step_s
        row["error"] = row["step_s"] / measured_costs.step_s - 1
        report(
            f"verify {index + 1} of {len(rows_to_run)}: {measured_costs.step_s:.3g} s a step, predicted {row['step_s']:.3g} s "
            f"({row['error']:+.0%})"
        )
    measured_rows = [row for row in rows_to_run if row["measured_step_s"] is not None]
    if measured_rows:
        fastest_row = min(measured_rows, key=lambda row: row["measured_step_s"])
        limit_s = fastest_row["measured_step_s"] * (1 + record["costs"]["spread"])
        configured_rows = [row for row in measured_rows if row["configured"] and row["measured_step_s"] <= limit_s]
        record["winner"] = rows.index((configured_rows or [fastest_row])[0])


def _write_results(paths: RunPaths, request: TuneRequest, record: dict[str, Any]) -> None:
    """Writes tune.json, and a configuration that includes the original file and applies the changes of the winner."""
    winner = record["rows"][record["winner"]]
    original_config = find_config(request.config).absolute()
    base_path = (
        os.path.relpath(original_config, paths.tuning)
        if original_config.is_relative_to(Path.cwd())
        else str(original_config)
    )
    file_content: dict[str, Any] = {"defaults": [base_path]}
    for override_word in winner["overrides"]:
        key, override_value = override_word.split("=", 1)
        section, key_parts = file_content, key.split(".")
        for key_part in key_parts[:-1]:
            section = section.setdefault(key_part, {})
        section[key_parts[-1]] = json.loads(override_value)
    header = f"# Made by rlhpc tune: {winner['step_s']:.4g} s a step predicted.\n"
    try:
        replace_durably(paths.tuning_record, json.dumps(record, indent=1).encode() + b"\n")
        replace_durably(paths.tuned_config, (header + dump_yaml(file_content, sort_keys=False)).encode())
    except OSError as error:
        raise unwritten_page_error(error, paths.tuning) from error


#: Relative spread of equal runs above which the output warns of other work on the machine.
_MAX_QUIET_SPREAD = 0.2
_BUSY_WARNING = (
    "that much says that others are at work on this machine: measure again when it is quiet, or with more --steps"
)


def render(record: Mapping[str, Any], tuned_path: str, command: str) -> str:
    """Formats the content of tune.json as text.

    Args:
        record: Content of tune.json.
        tuned_path: Path of the winner's configuration.
        command: Command that runs the winner's configuration.
    """
    has_accelerators = record["hours_of"] == "accelerators"
    is_verified = any(row["measured_step_s"] is not None for row in record["rows"])
    header = [
        "",
        "placement",
        "changes",
        "s a step",
        "idle",
        "memory",
        "GPU-hours" if has_accelerators else "node hours",
    ]
    table = [[*header, *(["measured", "error"] if is_verified else [])]]
    for index, row in enumerate(record["rows"]):
        cells = [
            f"{index + 1}{'*' if index == record['winner'] else ''}",
            _format_placement(row["placement"]) + (" (as configured)" if row["configured"] else ""),
            " ".join(f"{key}={_format_value(setting_value)}" for key, setting_value in row["settings"].items()) or "-",
            f"{row['step_s']:.3g}",
            f"{row['idle']:.0%}",
            format_bytes(row["device_memory"] if has_accelerators else row["memory"]),
            f"{row['hours']:.3g}",
        ]
        if is_verified:
            measured_s, error = row["measured_step_s"], row["error"]
            cells += ["-", "-"] if measured_s is None else [f"{measured_s:.3g}", f"{error:+.0%}"]
        table.append(cells)
    machines, noise = record["machines"], record["costs"]["spread"]
    node_text = (
        f", {machines['accelerators']} accelerators" if has_accelerators else f", {sum(machines['cores'])} cores"
    )
    lines = [
        f"{count_noun(machines['nodes'], 'node')}{node_text}; hours for {record['samples']} {record['unit']}"
        f"; runs of the same were up to {noise:.0%} apart",
        *([_BUSY_WARNING] if noise > _MAX_QUIET_SPREAD else []),
        *align_columns(table, right_from=3),
        f"* {tuned_path}",
        f"  {command}",
    ]
    return "\n".join(lines)


def _format_placement(placement: Mapping[str, Any]) -> str:
    """Formats a placement, with one entry for all groups with the same placement."""
    groups_by_placement: dict[str, list[str]] = {}
    for group, placement_section in placement.items():
        placement_text = (
            f"{placement_section['node_group']} {placement_section['placement']}"
            if isinstance(placement_section, Mapping)
            else str(placement_section)
        )
        groups_by_placement.setdefault(placement_text, []).append(group)
    return "; ".join(f"{','.join(groups)}: {placement_text}" for placement_text, groups in groups_by_placement.items())


def _format_value(setting_value: Any) -> str:
    return (
        "null"
        if setting_value is None
        else str(setting_value).lower()
        if isinstance(setting_value, bool)
        else str(setting_value)
    )
