"""README.md of an exported policy: a model card with results and the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.checkpoint.export_folder import head
from rlhpc.runtime.text import interval_text


def policy_card(
    config: Mapping[str, Any],
    checkpoint: str,
    results: Sequence[Mapping[str, Any]],
    *,
    licence: str | None,
    standalone: bool = False,
    released: bool = False,
) -> str:
    """The card of an embodied policy.

    Args:
        config: Content of the export's config.json.
        checkpoint: Name of the checkpoint.
        results: From `results_beside`.
        licence: An SPDX identifier.
        standalone: Whether `policy.pt2` and `policy.py` are in the folder.
        released: The folder is as the policy's family is released.
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
            success = f"{result['success_once']:.1%}" if "success_once" in result else ""
            text += (
                f"| {result.get('suite', 'default')} | {result.get('episodes', '')} | {result['return_mean']:.2f} | "
            )
            text += f"{interval_text(result.get('return_ci95'), '.2f', ' to ') or '–'} | {success} |\n"
        text += "\n"
    if released:
        kind = config["policy"]["model"]["model_type"]
        text += f"The folder is as models of the family {kind} are released, for their own code.\n\n## With rlhpc\n\n"
        return text + f"```yaml\nactor: {{model: {{model_type: {kind}, model_path: <this folder>}}}}\n```\n"
    text += "| file | content |\n|---|---|\n| `model.safetensors` | the weights |\n"
    text += "| `config.json` | the policy's specification and the environment it was trained in |\n"
    if standalone:
        text += "| `policy.pt2` | the same policy as a torch program: `[B, …]` in, actions `[B, chunk, dim]` out |\n"
        text += "| `policy.py` | acts with it, without rlhpc: `python policy.py` plays an episode |\n"
    text += f"\n## The network\n\n{_forward(config['policy'])}\n\n## With rlhpc\n\n"
    text += '```python\nfrom rlhpc import load_exported\n\npolicy = load_exported(".")\n'
    text += 'actions, extras = policy.predict_action_batch(obs, mode="eval")   # obs: tensor [B, …]\n```\n'
    return text


def _forward(spec: Mapping[str, Any]) -> str:
    """What the network computes, in enough detail to rebuild it."""
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
