"""An export's README.md: a model card in Hugging Face's format, with results and the forward pass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.shown import interval_text

#: Hugging Face's identifier for a licence that the card does not name.
UNKNOWN_LICENCE = "other"


def results_beside(checkpoint: Path, step: int, number: str = "return_mean") -> list[dict[str, Any]]:
    """Evaluations with this number of a checkpoint that lies in its run: the contents of `eval/global_step_<N>/*.json`."""
    run = RunPaths.around(checkpoint)
    if run is None:
        return []
    found = []
    for path in sorted(run.eval_result(step, "*").parent.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and isinstance(content.get(number), int | float):
            found.append(content)
    return found


def head(
    *,
    library: str,
    task: str,
    licence: str | None,
    name: str,
    tags: Sequence[str],
    results: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The card's metadata, as YAML between two lines of dashes."""
    facts: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": task,
        "license": licence or UNKNOWN_LICENCE,
        "tags": list(tags),
    }
    if results:
        rows = [
            {
                "task": {"type": task, "name": task.replace("-", " ")},
                "dataset": _dataset(result),
                "metrics": _metrics(result),
            }
            for result in results
        ]
        facts["model-index"] = [{"name": name, "results": rows}]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---\n"


def _dataset(result: Mapping[str, Any]) -> dict[str, str]:
    suite = str(result.get("suite", "default"))
    if "env_id" in result:
        return {"type": str(result["env_id"]), "name": f"{result['env_id']} ({suite})"}
    return {"type": suite, "name": suite}


def _metrics(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "return_mean" not in result:
        return [{"type": "accuracy", "name": "accuracy", "value": result["accuracy"]}]
    rates = [key for key in ("success_once", "success_at_end") if key in result]
    return [
        {"type": "mean_reward", "name": "mean return", "value": _between(result)},
        *({"type": key, "name": key.replace("_", " "), "value": result[key]} for key in rates),
    ]


def accuracy_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of a language model's evaluations, in Markdown; "" without one."""
    lines = []
    for result in results:
        between = interval_text(result.get("accuracy_ci95"), ".1%", " to ") or "–"
        passed = {int(k): share for k, share in (result.get("pass_at_k") or {}).items() if int(k) > 1}
        several = f"pass@{max(passed)} {passed[max(passed)]:.1%}" if passed else ""
        number = f"{result.get('n', '')} {result.get('unit', 'problems')}"
        lines.append(
            f"| {result.get('suite', 'default')} | {number} | {result['accuracy']:.1%} | {between} | {several} |\n"
        )
    if not lines:
        return ""
    head = "| suite | of | accuracy | 95 % interval | several samples |\n|---|---|---|---|---|\n"
    return f"{head}{''.join(lines)}\n"


def _between(result: Mapping[str, Any]) -> str:
    return f"{result['return_mean']:.2f} +/- {float(result.get('return_std') or 0):.2f}"
