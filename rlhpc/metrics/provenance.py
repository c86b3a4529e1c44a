"""Provenance of a run's numbers: provenance.json and the results of evaluations.

In provenance.json, the facts about the first start are at the top level. `segments` has one entry for each start, so that a
resume on another node or from another commit is visible.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import operator
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.metrics.environment import record_environment
from rlhpc.runtime.disk_errors import storage_error
from rlhpc.runtime.env_references import to_plain
from rlhpc.runtime.files import is_count, is_number, read_file, read_json, read_yaml, replace_durably
from rlhpc.runtime.host import node_name
from rlhpc.runtime.repository import git_state
from rlhpc.runtime.text import parenthesized_interval, printable

#: Group → entries of its ranks.
Placement = Mapping[str, Sequence[Mapping[str, Any]]]
#: Maximum number of accelerators of a node in a placement.
_MAX_SLOTS = 1024
_PACKAGES = (
    "torch",
    "numpy",
    "gymnasium",
    "safetensors",
    "pyzmq",
    "omegaconf",
    "submitit",
    "snakemake",
    "transformers",
)
_SLURM = (
    "JOB_ID",
    "JOB_NAME",
    "JOB_PARTITION",
    "JOB_ACCOUNT",
    "JOB_NODELIST",
    "JOB_NUM_NODES",
    "RESTART_COUNT",
    "HET_SIZE",
)


class PlacedStart(NamedTuple):
    """Start of a run in a Slurm job.

    Attributes:
        job: Id of the job.
        start_time: Unix time of the start.
        placement: Placement of its ranks.
    """

    job: str
    start_time: float
    placement: Placement


def write_provenance(
    paths: RunPaths, cfg: object, command: Sequence[str] | str, resumed_provenance: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Adds this start to the run's provenance record; starts after the first only append to `segments`.

    Args:
        paths: The run.
        cfg: Resolved configuration (DictConfig or dict); its checksum is recorded.
        command: Command line, as argv or as text.
        resumed_provenance: For a start that continues the run, `step` and `changes`: how its training configuration differs
            from that of the start before, as texts.

    Returns:
        The complete record.
    """
    segment = {**_start_record(cfg, command), **record_environment(paths, cfg)}
    if resumed_provenance is not None:
        segment["resumed"] = dict(resumed_provenance)
    record = read_provenance(paths)
    if not record:
        record = {"format": 1, "run": paths.root.name, "created": segment["started"], **segment, "segments": []}
        del record["started"]
    record.setdefault("segments", []).append(segment)
    _write_record(paths, record)
    return record


def update_provenance(paths: RunPaths, **facts: Any) -> None:
    """Adds or replaces keys of the record, e.g. `placement={"actor": [{"rank", "node", "accelerators"}]}`."""
    _write_record(paths, {**read_provenance(paths), **facts})


def record_placement(paths: RunPaths, placement: Placement) -> None:
    """Records the placement of the current start's ranks, in the last entry of `segments` and at the top level.

    Args:
        paths: The run.
        placement: Group → entries of its ranks: `{"rank", "node_rank", "accelerators", …}`.
    """
    segment_starts = list(read_provenance(paths).get("segments") or ())
    if segment_starts:
        segment_starts[-1] = {**segment_starts[-1], "placement": placement}
    update_provenance(paths, placement=placement, segments=segment_starts)


def placed_starts(record: Mapping[str, Any]) -> list[PlacedStart]:
    """Returns the run's starts in Slurm jobs for which a placement is recorded, in order."""
    slurm_starts = []
    for start_record in record.get("segments") or ():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            start_time = datetime.fromisoformat(str(start_record["started"])).timestamp()
            slurm_starts.append(
                PlacedStart(str(start_record["slurm"]["JOB_ID"]), start_time, dict(start_record["placement"]))
            )
    return slurm_starts


def resumes_with_changes(record: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Returns the step and the changes, as one text, of each resume with another training configuration, in order."""
    changed_resumes = []
    for start_record in record.get("segments") or ():
        resume_record = start_record.get("resumed", {})
        if (
            is_count(resume_record.get("step"))
            and isinstance(config_changes := resume_record.get("changes"), list)
            and config_changes
        ):
            changed_resumes.append((int(resume_record["step"]), printable("; ".join(map(str, config_changes)))))
    return changed_resumes


def read_provenance(paths: RunPaths) -> dict[str, Any]:
    """Returns the run's provenance record; {} if the file is missing or invalid."""
    try:
        record = read_json(read_file(paths.provenance))
    except (OSError, ValueError):
        return {}
    return _drop_mistyped(record) if isinstance(record, dict) else {}


def _drop_mistyped(record: dict[str, Any]) -> dict[str, Any]:
    """Removes the fields of a record that have a wrong type, because another program may have written the file."""
    field_types: dict[str, type] = {
        "segments": list,
        **dict.fromkeys(("git", "versions", "slurm", "placement", "system", "resumed"), dict),
        "code": list,
    }
    typed_fields: dict[str, Any] = {
        name: field_value
        for name, field_value in record.items()
        if isinstance(field_value, field_types.get(name, object))
    }
    if "segments" in typed_fields:
        typed_fields["segments"] = [
            _drop_mistyped(start_record) for start_record in typed_fields["segments"] if isinstance(start_record, dict)
        ]
    if "placement" in typed_fields and not all(map(_is_group, typed_fields["placement"].values())):
        del typed_fields["placement"]
    return typed_fields


def _is_group(ranks: Any) -> bool:
    """Returns whether a value is a valid list of a group's rank entries."""
    return isinstance(ranks, list) and all(
        isinstance(rank, dict) and is_count(rank.get("rank", 0)) and is_count(rank.get("node_rank", 0))
        and isinstance(rank.get("accelerators", []), list)
        and all(is_count(slot) and slot < _MAX_SLOTS for slot in rank.get("accelerators", []))
        for rank in ranks
    )  # fmt: skip


def _write_record(paths: RunPaths, record: dict[str, Any]) -> None:
    try:
        replace_durably(paths.provenance, json.dumps(record, indent=2, default=str).encode() + b"\n")
    except OSError as error:
        raise storage_error(error, paths.provenance, "provenance") from error


def _start_record(cfg: object, command: Sequence[str] | str) -> dict[str, Any]:
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command if isinstance(command, str) else shlex.join(command),
        "folder": str(Path.cwd()),
        "host": node_name(),
        "user": os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid()),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cpus_granted": len(os.sched_getaffinity(0)),
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "slurm": {
            key: variable_value for key in _SLURM if (variable_value := os.environ.get(f"SLURM_{key}")) is not None
        },
        "config_sha256": _compute_config_checksum(cfg),
    }


def versions() -> dict[str, str]:
    """Returns the installed versions of the packages that influence the results, without importing the packages."""
    from rlhpc import __version__

    package_versions = {"rlhpc": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            package_versions[package] = metadata.version(package)
    return package_versions


def _compute_config_checksum(cfg: object) -> str | None:
    if cfg is None:
        return None
    if "omegaconf" in sys.modules:
        from omegaconf import OmegaConf

        if OmegaConf.is_config(cfg):
            cfg = to_plain(cfg)  # without secrets, which could be guessed from the checksum
    return hashlib.sha256(json.dumps(cfg, sort_keys=True, default=str).encode()).hexdigest()


Result = TypeVar("Result", bound=Mapping[str, Any])
#: Placeholder for the metric of the largest available k, such as `pass_at_4`.
PASS_AT_K = "pass_at_k"
_PASS_AT = re.compile(r"pass_at_(\d+)")
#: Keys of the number of problems or episodes in an evaluation's result.
_COUNTS = ("n", "problems", "episodes", "rows")


@dataclass(frozen=True)
class EvaluationPoint:
    """Value of one metric in one evaluation.

    Attributes:
        step: Global step.
        value: Value of the metric.
        low, high: Ends of its 95 % interval; both are `value` if the evaluation has no interval.
        count: Number of episodes or problems; 0 if unknown.
        in_training: True for an evaluation during training, False for one of a checkpoint.
    """

    step: int
    value: float
    low: float
    high: float
    count: int
    in_training: bool


#: Type check of each field of an evaluation's result; a field that is not listed may have any type.
_FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("global_step", "n", "episodes", "samples", "steps", "successes"), is_count),
    **dict.fromkeys(
        ("accuracy", "return_mean", "return_std", "return_ci95_low", "return_ci95_high", "success_once", "success_at_end",
         "majority", "reward_mean", "truncated", "recall", "specificity"), is_number,
    ),
    **dict.fromkeys(("suite", "env_id", "unit", "backend", "video"), lambda field_value: isinstance(field_value, str)),
    **dict.fromkeys(("response_tokens", "reward_terms"), lambda field_value: _is_mapping(field_value, is_number)),
    "pass_at_k": lambda field_value: _is_mapping(field_value, is_number) and all(map(str.isdecimal, field_value)),
    "pass_at_k_ci95": lambda field_value: _is_mapping(field_value, _is_interval),
    **dict.fromkeys(
        ("levels", "tasks"), lambda field_value: _is_mapping(field_value, lambda scores: isinstance(scores, dict))
    ),
}  # fmt: skip


def _is_interval(bounds_value: Any) -> bool:
    return isinstance(bounds_value, list) and len(bounds_value) == 2 and all(map(is_number, bounds_value))


def _is_mapping(mapping_value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return isinstance(mapping_value, dict) and all(map(is_valid, mapping_value.values()))


def typed_result(result: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns an evaluation's result without fields of a wrong type, and the names of those fields.

    A field that is null counts as missing.
    """
    typed_fields, mistyped_fields = dict[str, Any](), list[str]()
    for name, field_value in result.items():
        type_check = _FIELD_CHECKS.get(name) or (_is_interval if name.endswith("_ci95") else None)
        if field_value is None:
            continue
        if type_check is not None and not type_check(field_value):
            mistyped_fields.append(name)
        elif name in ("levels", "tasks"):
            scores_by_part = {part_name: typed_result(scores) for part_name, scores in field_value.items()}
            typed_fields[name] = {part_name: scores for part_name, (scores, _) in scores_by_part.items()}
            mistyped_fields += [
                f"{name}.{part_name}.{field}" for part_name, (_, fields) in scores_by_part.items() for field in fields
            ]
        else:
            typed_fields[name] = field_value
    return typed_fields, mistyped_fields


def typed_results(paths: RunPaths, metric: str) -> list[dict[str, Any]]:
    """Returns the evaluation results that have metric `metric`, sorted by suite and step, without fields of a wrong type."""
    results = [result | {metric: float(result[metric])} for result in read_all_results(paths) if metric in result]
    return sorted(results, key=lambda result: (result["suite"], result["global_step"]))


def list_skipped_results(paths: RunPaths) -> list[str]:
    """Returns a text for each evaluation result that has fields of a wrong type: `global_step_2/default.json: n, accuracy`."""
    mistyped_by_path = [(path, typed_result(read_json_file(path) or {})[1]) for path in paths.eval_results()]
    return [
        f"{path.parent.name}/{path.name}: {', '.join(field_names)}"
        for path, field_names in mistyped_by_path
        if field_names
    ]


def last_result(paths: RunPaths, suite: str = "default") -> tuple[int, dict[str, Any], str]:
    """Returns (step, evaluation, evaluation as text) of the best checkpoint, otherwise of the last finished segment's end.

    The step is 0 if no segment has finished. The evaluation is {} and its text "" if the step was not evaluated.
    """
    finished_segments = [record for path in paths.segments.glob("*.json") if (record := read_json_file(path))]
    steps = [record["global_step"] for record in finished_segments if is_count(record.get("global_step"))]
    step = (paths.best_step() or max(steps)) if steps else 0
    evaluation, _ = typed_result(read_json_file(paths.eval_result(step, suite)) or {})
    return step, evaluation, describe_result(evaluation)


def read_results(paths: RunPaths, suite: str) -> list[dict[str, Any]]:
    """Returns the readable results of a suite, sorted by step."""
    return select_suite(read_all_results(paths), suite)


def read_all_results(paths: RunPaths) -> list[dict[str, Any]]:
    """Returns the readable results of all suites, sorted by step: the contents of `eval/global_step_<N>/<suite>.json`."""
    all_results = []
    for path in paths.eval_results():
        evaluation, _ = typed_result(read_json_file(path) or {})
        if "global_step" in evaluation:
            all_results.append({**with_pass_at(evaluation), "suite": evaluation.get("suite", path.stem)})
    return sorted(all_results, key=lambda result: int(result["global_step"]))


def with_pass_at(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result with its pass@k values under separate names: `pass_at_4`, `pass_at_4_ci95`."""
    renamed_metrics = dict(result)
    for key in (PASS_AT_K, f"{PASS_AT_K}_ci95"):
        if isinstance(pass_values := result.get(key), Mapping):
            renamed_metrics |= {key.replace("_k", f"_{k}", 1): pass_value for k, pass_value in pass_values.items()}
    return renamed_metrics


def largest_pass_at(metric_names: Iterable[str]) -> str | None:
    """Returns the name of the pass@k with the largest k above 1, such as `pass_at_8`; None if no name has such a k."""
    ks = [int(match[1]) for name in metric_names if (match := _PASS_AT.fullmatch(name.rpartition("/")[2]))]
    return f"pass_at_{max(ks)}" if max(ks, default=1) > 1 else None


def metric_title(name: str) -> str:
    """Returns the last part of a metric's name as text for a reader: pass@4, success once."""
    last_part = name.rpartition("/")[2]
    return _PASS_AT.sub(r"pass@\1", last_part) if _PASS_AT.fullmatch(last_part) else last_part.replace("_", " ")


def interval_of(result: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Returns the 95 % interval of metric `name` in an evaluation's result.

    The interval is the recorded one. Otherwise it is computed from the standard deviation for a mean return, or by Wilson's
    formula for a share. If neither is possible, both ends are the metric's value.
    """
    estimate = float(result[name])
    base_name = name.removesuffix("_mean")
    bounds = result.get(f"{name}_ci95") or result.get(f"{base_name}_ci95")
    bounds = bounds or (result.get(f"{base_name}_ci95_low"), result.get(f"{base_name}_ci95_high"))
    if isinstance(bounds, Sequence) and len(bounds) == 2 and all(isinstance(bound, int | float) for bound in bounds):
        return float(bounds[0]), float(bounds[1])
    num_samples, std = _count_samples(result), result.get("return_std")
    if name == "return_mean" and isinstance(std, int | float) and num_samples:
        half_width = 1.96 * float(std) / math.sqrt(num_samples)
        return estimate - half_width, estimate + half_width
    if num_samples and is_share(name) and 0.0 <= estimate <= 1.0:
        from rlhpc.metrics.statistics import wilson_interval  # imports numpy

        return wilson_interval(estimate * num_samples, num_samples)
    return estimate, estimate


def is_share(name: str) -> bool:
    """Returns whether the metric of this name is a share of episodes or problems."""
    return name in ("accuracy", "majority", "truncated") or name.startswith(("success_", "pass_at_"))


def evaluations_of(
    rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], name: str, prefix: str = "eval"
) -> list[EvaluationPoint]:
    """Returns metric `name` of all evaluations of one suite, sorted by step.

    If a step was evaluated both during training and as a checkpoint, the evaluation of the checkpoint counts: the weights are
    the same, and only this evaluation has an interval.

    Args:
        rows: Metric rows of the run.
        results: Evaluations of checkpoints on the suite.
        name: Name of the metric, such as `accuracy`.
        prefix: Prefix of the suite's metrics in `rows`.
    """
    by_step: dict[int, EvaluationPoint] = {}
    for row in rows:
        if _is_number(row.get(f"{prefix}/{name}")):
            logged_metrics = {
                key.removeprefix(f"{prefix}/"): metric for key, metric in row.items() if key.startswith(f"{prefix}/")
            }
            by_step[int(row["step"])] = _make_evaluation_point(logged_metrics, name, int(row["step"]), in_training=True)
    for evaluation in results:
        if _is_number(evaluation.get(name)):
            step = int(evaluation["global_step"])
            by_step[step] = _make_evaluation_point(evaluation, name, step, in_training=False)
    return [by_step[step] for step in sorted(by_step)]


def evaluations_by_suite(
    paths: RunPaths, rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], name: str
) -> dict[str, list[EvaluationPoint]]:
    """Returns metric `name` of all evaluations, during training and of checkpoints, keyed by suite.

    Args:
        paths: Files of the run, whose configuration names the suite of the metrics `eval/<name>`.
        rows: Metric rows of the run.
        results: Evaluations of checkpoints.
        name: Name of the metric, such as `accuracy`.
    """
    logged_names = {key for row in rows for key in row if key.startswith("eval/") and key.endswith(f"/{name}")}
    prefix_by_suite = {key.split("/")[1]: key.rpartition("/")[0] for key in sorted(logged_names) if key.count("/") > 1}
    if f"eval/{name}" in logged_names:
        prefix_by_suite = {_find_trained_suite(paths): "eval", **prefix_by_suite}
    suites = dict.fromkeys([*(str(evaluation["suite"]) for evaluation in results), *prefix_by_suite])
    by_suite = {
        s: evaluations_of(rows, select_suite(results, s), name, prefix_by_suite.get(s, f"eval/{s}")) for s in suites
    }
    return {suite: evaluations for suite, evaluations in by_suite.items() if evaluations}


def scored_results(
    paths: RunPaths, rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], suite: str, name: str
) -> list[dict[str, Any]]:
    """Returns all results of a suite that have metric `name`, sorted by step.

    They are evaluations of checkpoints and, at other steps, evaluations during training.
    """
    checkpoint_results = {
        int(evaluation["global_step"]): dict(evaluation)
        for evaluation in select_suite(results, suite)
        if name in evaluation
    }
    prefix = "eval/" if suite == _find_trained_suite(paths) else f"eval/{suite}/"
    logged_results = {
        int(row["step"]): {"suite": suite, "global_step": int(row["step"])}
        | {key.removeprefix(prefix): metric_value for key, metric_value in row.items() if key.startswith(prefix)}
        for row in rows
        if _is_number(row.get(f"{prefix}{name}"))
    }
    by_step = logged_results | checkpoint_results
    return [by_step[step] for step in sorted(by_step)]


def _find_trained_suite(paths: RunPaths) -> str:
    """Returns the suite that training logs as `eval/<name>`: the first of `data.eval`, or `default` for embodied runs."""
    return _find_configured_suite(paths, "data", "eval", 0, "name")


def _find_configured_suite(paths: RunPaths, *key_path: str | int) -> str:
    """Returns the suite's name at a path of keys in the run's configuration; `default` if the path does not exist."""
    try:
        return str(functools.reduce(operator.getitem, key_path, read_yaml(read_file(paths.config))))
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, IndexError):
        return "default"


def _make_evaluation_point(result: Mapping[str, Any], name: str, step: int, *, in_training: bool) -> EvaluationPoint:
    low_bound, high_bound = interval_of(result, name)
    return EvaluationPoint(step, float(result[name]), low_bound, high_bound, _count_samples(result), in_training)


def _count_samples(result: Mapping[str, Any]) -> int:
    return next((int(result[key]) for key in _COUNTS if _is_number(result.get(key)) and result[key] > 0), 0)


def _is_number(json_value: Any) -> bool:
    return isinstance(json_value, int | float) and not isinstance(json_value, bool) and math.isfinite(json_value)


def judging_suite(paths: RunPaths, results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the suite by which runs are compared: the first of `workflow.eval_suites`.

    If that suite has no result, it is the suite of the first result.
    """
    configured_suite = _find_configured_suite(paths, "workflow", "eval_suites", 0)
    suites = [str(evaluation["suite"]) for evaluation in results]
    return suites[0] if suites and configured_suite not in suites else configured_suite


def select_suite(results: Sequence[Result], suite: str) -> list[Result]:
    """Returns the results of a suite."""
    return [evaluation for evaluation in results if str(evaluation["suite"]) == suite]


def describe_result(result: dict[str, Any]) -> str:
    """Formats an evaluation's result briefly, with its 95 % interval; "" if it has neither a mean return nor an accuracy."""
    if "return_mean" in result:
        description = f"mean return {result['return_mean']:.1f}" + parenthesized_interval(
            result.get("return_ci95"), ".1f", "95 % interval "
        )
        if "success_once" in result:
            description += f", success {result['success_once']:.0%}" + parenthesized_interval(
                result.get("success_once_ci95"), ".0%"
            )
        return f"{description} over {result.get('episodes', '?')} episodes of {result.get('env_id', '?')}"
    if "accuracy" in result:
        sample_text = f"{result.get('n', '?')} {result.get('unit', 'problems')}"
        interval_text = parenthesized_interval(result.get("accuracy_ci95"), ".1%", "95 % interval ")
        return f"accuracy {result['accuracy']:.1%}{interval_text}{describe_samples(result)} on {sample_text}"
    return ""


def describe_samples(result: Mapping[str, Any]) -> str:
    """Formats the metrics over several samples per problem, as `, pass@4 70.0%, majority 55.0%`; "" with one sample."""
    name = largest_pass_at(metrics := with_pass_at(result))
    if name is None:
        return ""
    majority = result.get("majority")
    return f", {metric_title(name)} {metrics[name]:.1%}" + ("" if majority is None else f", majority {majority:.1%}")
