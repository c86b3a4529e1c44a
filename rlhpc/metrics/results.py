"""Describes in a few words how a run ended."""

from __future__ import annotations

from typing import Any

from rlhpc.jobs.claim import read_json
from rlhpc.jobs.paths import RunPaths


def last_result(paths: RunPaths, suite: str = "default") -> tuple[int, dict[str, Any], str]:
    """The step at which the last finished segment ended, its evaluation, and that evaluation in words ("" without one)."""
    done = [record for path in paths.segments.glob("*.json") if (record := read_json(path))]
    step = max((int(record["global_step"]) for record in done if "global_step" in record), default=0)
    result = read_json(paths.eval_result(step, suite)) or {}
    return step, result, describe_result(result)


def read_results(paths: RunPaths, suite: str) -> list[dict[str, Any]]:
    """The readable results of a suite, by step: the contents of `eval/global_step_<N>/<suite>.json`."""
    found = []
    for path in paths.eval_results():
        result = read_json(path)
        if result and str(result.get("suite", path.stem)) == suite and str(result.get("global_step", "")).isdigit():
            found.append({**result, "global_step": int(result["global_step"])})
    return sorted(found, key=lambda result: int(result["global_step"]))


def describe_result(result: dict[str, Any]) -> str:
    """An evaluation in a few words, with its interval."""
    if "return_mean" in result:
        low, high = result["return_ci95"]
        text = f"mean return {result['return_mean']:.1f} (95 % interval {low:.1f} to {high:.1f})"
        if "success_once" in result:
            low, high = result["success_once_ci95"]
            text += f", success {result['success_once']:.0%} ({low:.0%} to {high:.0%})"
        return f"{text} over {result['episodes']} episodes of {result['env_id']}"
    if "accuracy" in result:
        low, high = result["accuracy_ci95"]
        of = f"{result['n']} {result.get('unit', 'problems')}"
        return f"accuracy {result['accuracy']:.1%} (95 % interval {low:.1%} to {high:.1%}) on {of}"
    return ""
