"""Export folders, which are created next to their target and renamed when complete, and the metadata of model cards."""

from __future__ import annotations

import contextlib
import glob
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.files import (
    create_folder,
    follow_umask,
    fsync_file,
    fsync_folder,
    read_json,
    remove_tree,
    replace_folder,
)
from rlhpc.runtime.text import interval_text

#: Prefix of the names of folders that are being filled.
_STAGING = "tmp"


def default_output(checkpoint: Path, step: int) -> Path:
    """Returns `export/global_step_<N>` of the run that contains the checkpoint."""
    return (RunPaths.from_checkpoint(checkpoint) or RunPaths(checkpoint.parent)).export(step)


@contextlib.contextmanager
def filled_folder(target: Path) -> Iterator[Path]:
    """Yields a new folder next to `target`, which replaces `target` if the block succeeds.

    All written files are on disk before the folder is renamed. An exception leaves `target` unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    staging, replaced_target = (target.with_name(f".{prefix}_{target.name}-{token}") for prefix in (_STAGING, "old"))
    create_folder(staging)
    try:
        yield staging
        follow_umask(staging)
        for path in staging.rglob("*"):
            (fsync_folder if path.is_dir() else fsync_file)(path)
        fsync_folder(staging)
        replace_folder(staging, target, replaced_target)
    finally:
        remove_tree(staging)


def remove_staging(target: Path) -> None:
    """Removes the folders next to `target` that killed processes were filling (`filled_folder`)."""
    for staging in target.parent.glob(f".{_STAGING}_{glob.escape(target.name)}-*"):
        remove_tree(staging)


def require_free(target: Path) -> None:
    """Refuses a target that exists and is neither an export nor an empty folder.

    Raises:
        CheckpointError: `target` would be overwritten.
    """
    is_export = any((target / name).is_file() for name in ("config.json", "adapter_config.json"))
    if target.exists() and not is_export and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not an export folder; give another output folder")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object that the folder of a policy must contain.

    Raises:
        CheckpointError: The file is missing, cannot be read, or is not a JSON object.
    """
    try:
        json_object = read_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the policy cannot be rebuilt") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(json_object, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return json_object


#: Hugging Face's identifier for a licence without an identifier.
UNKNOWN_LICENCE = "other"


def checkpoint_results(checkpoint: Path, step: int, metric: str = "return_mean") -> list[dict[str, Any]]:
    """Returns the evaluations of a checkpoint in a run folder: files `eval/global_step_<N>/*.json` with field `metric`."""
    run_paths = RunPaths.from_checkpoint(checkpoint)
    if run_paths is None:
        return []
    evaluations = []
    for path in sorted(run_paths.eval_result(step, "*").parent.glob("*.json")):
        try:
            evaluation = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(evaluation, dict) and isinstance(evaluation.get(metric), int | float):
            evaluations.append(evaluation)
    return evaluations


def format_card_header(
    *,
    library: str,
    task: str,
    licence: str | None,
    name: str,
    tags: Sequence[str],
    results: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Formats the metadata of a model card, as YAML between two lines of dashes."""
    front_matter: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": task,
        "license": licence or UNKNOWN_LICENCE,
        "tags": list(tags),
    }
    if results:
        rows = [
            {
                "task": {"type": task, "name": task.replace("-", " ")},
                "dataset": _dataset(evaluation),
                "metrics": _metrics(evaluation),
            }
            for evaluation in results
        ]
        front_matter["model-index"] = [{"name": name, "results": rows}]
    return f"---\n{yaml.safe_dump(front_matter, sort_keys=False, allow_unicode=True)}---\n"


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
        {"type": "mean_reward", "name": "mean return", "value": _mean_and_std(result)},
        *({"type": key, "name": key.replace("_", " "), "value": result[key]} for key in rates),
    ]


def format_accuracy_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Formats a table of a language model's evaluations, in Markdown; "" if there are no evaluations."""
    lines = []
    for evaluation in results:
        accuracy_interval = interval_text(evaluation.get("accuracy_ci95"), ".1%", " to ") or "–"
        pass_rates = {int(k): rate for k, rate in (evaluation.get("pass_at_k") or {}).items() if int(k) > 1}
        pass_at = f"pass@{max(pass_rates)} {pass_rates[max(pass_rates)]:.1%}" if pass_rates else ""
        samples = f"{evaluation.get('n', '')} {evaluation.get('unit', 'problems')}"
        lines.append(
            f"| {evaluation.get('suite', 'default')} | {samples} | {evaluation['accuracy']:.1%} | {accuracy_interval} "
            f"| {pass_at} |\n"
        )
    if not lines:
        return ""
    header = "| suite | of | accuracy | 95 % interval | several samples |\n|---|---|---|---|---|\n"
    return f"{header}{''.join(lines)}\n"


def _mean_and_std(result: Mapping[str, Any]) -> str:
    return f"{result['return_mean']:.2f} +/- {float(result.get('return_std') or 0):.2f}"
