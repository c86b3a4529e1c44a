"""An export's README.md: a model card in Hugging Face's format, with results and the forward pass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhpc.jobs.paths import RunPaths

#: Hugging Face's identifier for a licence that the card does not name.
UNKNOWN_LICENCE = "other"


def results_beside(checkpoint: Path, step: int) -> list[dict[str, Any]]:
    """Evaluations of a checkpoint that lies in its run: the contents of `eval/global_step_<N>/*.json`."""
    run = RunPaths.around(checkpoint)
    if run is None:
        return []
    found = []
    for path in sorted(run.eval_result(step, "*").parent.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("return_mean") is not None and "env_id" in content:
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
                "dataset": {
                    "type": str(result["env_id"]),
                    "name": f"{result['env_id']} ({result.get('suite', 'default')})",
                },
                "metrics": [
                    {"type": "mean_reward", "name": "mean return", "value": _between(result)},
                    *(
                        {"type": key, "name": key.replace("_", " "), "value": result[key]}
                        for key in ("success_once", "success_at_end")
                        if key in result
                    ),
                ],
            }
            for result in results
        ]
        facts["model-index"] = [{"name": name, "results": rows}]
    return f"---\n{yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)}---\n"


def _between(result: Mapping[str, Any]) -> str:
    return f"{result['return_mean']:.2f} +/- {float(result.get('return_std') or 0):.2f}"
