"""README.md of an export: a model card in Hugging Face's form, with results and the forward pass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

#: Hugging Face's word for a licence that the card does not name.
UNKNOWN_LICENCE = "other"


def results_beside(checkpoint: Path, step: int) -> list[dict[str, Any]]:
    """The evaluations of a checkpoint, where it lies in its run: the content of `eval/global_step_<N>/*.json`."""
    if checkpoint.parent.name != "checkpoints":
        return []
    found = []
    for path in sorted((checkpoint.parent.parent / "eval" / f"global_step_{step}").glob("*.json")):
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
    """The card's metadata: YAML between two lines of dashes."""
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


def policy_card(
    config: Mapping[str, Any],
    checkpoint: str,
    results: Sequence[Mapping[str, Any]],
    *,
    licence: str | None,
    standalone: bool,
) -> str:
    """The card of an embodied policy.

    Args:
        config: Content of the export's config.json.
        checkpoint: Name of the checkpoint.
        results: From `results_beside`.
        licence: An SPDX identifier.
        standalone: Whether `policy.pt2` and `policy.py` are in the folder.
    """
    env = config["env_id"] or "the run's environment"
    name, version, step = config["run"] or checkpoint, config["rlhpc_version"], config["global_step"]
    tags = ["reinforcement-learning", "rlhpc", *([str(config["env_id"])] if config["env_id"] else [])]
    text = head(
        library="rlhpc", task="reinforcement-learning", licence=licence, name=str(name), tags=tags, results=results
    )
    text += (
        f"# {name}: a policy for {env}\n\nTrained with rlhpc {version}; global step {step}, from `{checkpoint}`.\n\n"
    )
    if results:
        text += "| suite | episodes | mean return | 95 % interval | success once |\n|---|---|---|---|---|\n"
        for result in results:
            low, high = result.get("return_ci95") or (float("nan"),) * 2
            success = f"{result['success_once']:.1%}" if "success_once" in result else ""
            text += (
                f"| {result.get('suite', 'default')} | {result.get('episodes', '')} | {result['return_mean']:.2f} | "
            )
            text += f"{low:.2f} to {high:.2f} | {success} |\n"
        text += "\n"
    text += "| file | content |\n|---|---|\n| `model.safetensors` | the weights |\n"
    text += "| `config.json` | the policy's specification and the environment it was trained in |\n"
    if standalone:
        text += "| `policy.pt2` | the same policy as a torch program: `[B, …]` in, actions `[B, chunk, dim]` out |\n"
        text += "| `policy.py` | acts with it, without rlhpc: `python policy.py` plays an episode |\n"
    text += f"\n## The network\n\n{_forward(config['policy'])}\n\n## With rlhpc\n\n"
    text += '```python\nfrom rlhpc.checkpoint.convert import load_exported\n\npolicy = load_exported(".")\n'
    text += 'actions, extras = policy.predict_action_batch(obs, mode="eval")   # obs: tensor [B, …]\n```\n'
    return text


def _forward(spec: Mapping[str, Any]) -> str:
    """What the network computes, in words that one can rebuild it from."""
    model, action = spec.get("model") or {}, spec.get("action_space") or {}
    kind = model.get("model_type", spec.get("model_type", "a model of its own"))
    if kind != "mlp":
        return f"`model_type` is `{kind}`; `config.json` has its options."
    layers = " → ".join(
        f"Linear({width}) → {model.get('activation', 'tanh')}" for width in model.get("hidden_sizes", ())
    )
    last = {
        "Discrete": "logits; the action is the largest",
        "Box": "the mean of a Gaussian, clipped to the action space",
    }
    gives = last.get(str(action.get("type")), "logits for each part of the action")
    return (
        "Observations are flattened (several in the order of their names). `actor.*` of `model.safetensors`: "
        f"{layers} → Linear: {gives}. `critic.*`: the same layers, and the value."
    )
