"""Comparison of a run with the run that a bundle holds: weights, metrics and evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import MANIFEST, MODEL, RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.publishing.layout import RUN
from rlhpc.publishing.promise import is_determined
from rlhpc.publishing.reader import Bundle
from rlhpc.runtime.files import is_number, read_file, read_json
from rlhpc.runtime.text import align_columns

#: Fields of an evaluation that say where it was made.
_NOT_RESULTS = ("checkpoint", "model", "video", "seconds")
_MAX_ROWS = 40


@dataclass
class Comparison:
    """Differences between the run of a bundle and its repetition.

    Attributes:
        weights: Texts about checkpoints whose weights differ; `num_weights` files with weights were compared.
        metrics: Metric → (first step that differs, largest difference relative to the larger value).
        evaluations: (suite and step, field, value in the bundle, value here).
        missing_evaluations: Evaluations that exist only in the bundle. The run's command does not repeat an evaluation that a
            separate command made.
        num_weights, num_rows, num_results: Number of compared files with weights, metric rows, and evaluation results.
    """

    weights: list[str] = field(default_factory=list)
    metrics: dict[str, tuple[int, float]] = field(default_factory=dict)
    evaluations: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    missing_evaluations: list[str] = field(default_factory=list)
    num_weights: int = 0
    num_rows: int = 0
    num_results: int = 0

    @property
    def is_equal(self) -> bool:
        """True if weights and metrics could be compared and do not differ."""
        return not (self.weights or self.metrics or self.evaluations) and bool(self.num_weights and self.num_rows)

    def to_json(self) -> dict[str, Any]:
        """Returns the comparison as a JSON object."""
        return {
            "equal": self.is_equal,
            "compared": {"weights": self.num_weights, "rows": self.num_rows, "results": self.num_results},
            "weights": self.weights,
            "metrics": {name: {"step": step, "difference": d} for name, (step, d) in sorted(self.metrics.items())},
            "evaluations": [list(evaluation_row) for evaluation_row in self.evaluations],
            "missing_evaluations": self.missing_evaluations,
        }

    def render(self) -> list[str]:
        """Returns the comparison as lines of text."""
        comparison_text = (
            f"{self.num_weights} files with weights, {self.num_rows} rows of metrics, {self.num_results} evaluations"
        )
        lines = [
            f"not repeated, because the run's command does not make it: eval/{name}.json"
            for name in self.missing_evaluations
        ]
        if self.is_equal:
            return [f"the same bit for bit: {comparison_text}", *lines]
        lines = [f"compared: {comparison_text}", *lines, *self.weights]
        if self.metrics:
            rows = [("metric", "differs from step", "by at most")]
            sorted_metrics = sorted(
                self.metrics.items(), key=lambda metric_item: (metric_item[1][0], -metric_item[1][1], metric_item[0])
            )
            rows += [
                (name, str(step), f"{relative_difference:.2%}")
                for name, (step, relative_difference) in sorted_metrics[:_MAX_ROWS]
            ]
            lines += align_columns(rows, right_from=1)
            if len(sorted_metrics) > _MAX_ROWS:
                lines.append(f"… and {len(sorted_metrics) - _MAX_ROWS} more metrics")
        if self.evaluations:
            evaluation_texts = [tuple(map(str, evaluation_row)) for evaluation_row in self.evaluations[:_MAX_ROWS]]
            lines += align_columns([("evaluation", "", "in the bundle", "here"), *evaluation_texts], right_from=2)
        return lines


def compare(bundle: Bundle, paths: RunPaths) -> Comparison:
    """Compares the run in a bundle with its repetition, in all that both have.

    Args:
        bundle: The bundle.
        paths: The repetition.
    """
    comparison = Comparison()
    for checkpoint in bundle.record["checkpoints"]:
        step = int(checkpoint.get("global_step") or 0)
        manifest = read_json_file(paths.checkpoint(step) / MANIFEST)
        if manifest is None:
            comparison.weights.append(f"checkpoint of step {step}: not there any more, or never made")
            continue
        local_files = weight_files(manifest)
        for name, checksum in sorted(weight_files(checkpoint).items()):
            comparison.num_weights += 1
            if local_files.get(name) != checksum:
                comparison.weights.append(f"weights of step {step}: {name} differs")
    name = f"{RUN}/{paths.metrics.name}"
    rows_text = bundle.read(name).decode(errors="replace") if name in bundle.sizes else ""
    _compare_rows(comparison, _read_rows(rows_text.splitlines()), _read_rows(_lines(paths.metrics)))
    prefix = f"{RUN}/eval/"
    for name in sorted(bundle.sizes):
        if name.startswith(prefix) and name.endswith(".json"):
            _compare_results(comparison, name.removeprefix(prefix), read_json(bundle.read(name)), paths)
    return comparison


def weight_files(checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of the files with weights, of a checkpoint's entry in a record or of its manifest."""
    suffix = Path(MODEL).suffix
    return {
        str(name): str(file_facts["sha256"])
        for name, file_facts in (checkpoint.get("files") or {}).items()
        if Path(name).suffix == suffix or str(name).startswith("shards/")
    }


def _compare_rows(comparison: Comparison, original_rows: Mapping[int, Any], repetition: Mapping[int, Any]) -> None:
    for step in sorted(original_rows.keys() | repetition.keys()):
        comparison.num_rows += 1
        first_row, second_row = original_rows.get(step, {}), repetition.get(step, {})
        for name in sorted(first_row.keys() | second_row.keys()):
            if is_determined(name) and first_row.get(name) != second_row.get(name):
                first_step, largest_difference = comparison.metrics.get(name, (step, 0.0))
                comparison.metrics[name] = (
                    first_step,
                    max(largest_difference, _compute_difference(first_row.get(name), second_row.get(name))),
                )


def _compare_results(comparison: Comparison, name: str, original_result: Any, paths: RunPaths) -> None:
    local_result = read_json_file(paths.eval / name)
    if local_result is None:
        comparison.missing_evaluations.append(name.removesuffix(".json"))
        return
    comparison.num_results += 1
    for key, original_value in sorted(original_result.items()) if isinstance(original_result, dict) else []:
        if key not in _NOT_RESULTS and not key.endswith("_s") and local_result.get(key) != original_value:
            comparison.evaluations.append((name.removesuffix(".json"), key, original_value, local_result.get(key)))


def _compute_difference(original_value: Any, repetition_value: Any) -> float:
    """Returns the difference of two numbers relative to the larger one; 1 if one is missing or is no number."""
    if not (is_number(original_value) and is_number(repetition_value)):
        return 1.0
    return abs(original_value - repetition_value) / max(abs(original_value), abs(repetition_value), 1e-30)


def _read_rows(lines: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Returns the rows of metrics by step; leaves out lines that are no rows."""
    rows = dict[int, dict[str, Any]]()
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows[row["step"]] = row
    return rows


def _lines(path: Path) -> Sequence[str]:
    try:
        return read_file(path).decode(errors="replace").splitlines()
    except OSError:
        return ()
