"""Export of a checkpoint: model.safetensors, config.json and README.md in the Hugging Face layout, with policy.pt2 and
policy.py, which act without rlhpc.

export/global_step_<N>/config.json   {"architectures", "model_type", "policy": {...}, "env_id", "global_step", ...}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhpc.checkpoint.export_folder import (
    checkpoint_results,
    default_output,
    filled_folder,
    format_card_header,
    read_object,
    require_free,
)
from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.checkpoint.store import require_valid
from rlhpc.jobs.paths import CONFIG, MODEL
from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import CheckpointError, ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home, read_yaml, write_durably
from rlhpc.runtime.text import interval_text
from rlhpc.runtime.trust import Trust

if TYPE_CHECKING:
    from rlhpc.embodied.models import Policy


def policy_card(
    config: Mapping[str, Any],
    checkpoint: str,
    results: Sequence[Mapping[str, Any]],
    *,
    licence: str | None,
    is_standalone: bool = False,
    is_released: bool = False,
) -> str:
    """Returns the model card of an embodied policy.

    Args:
        config: Content of the export's config.json.
        checkpoint: Name of the checkpoint.
        results: Evaluation results from `checkpoint_results`.
        licence: SPDX identifier of the licence.
        is_standalone: Whether the folder contains `policy.pt2` and `policy.py`.
        is_released: Whether the folder has the release format of the policy's family.
    """
    env_name = config["env_id"] or "the run's environment"
    name, version, step = config["run"] or checkpoint, config["rlhpc_version"], config["global_step"]
    tags = ["reinforcement-learning", "rlhpc", *([str(config["env_id"])] if config["env_id"] else [])]
    card = format_card_header(
        library="rlhpc", task="reinforcement-learning", licence=licence, name=str(name), tags=tags, results=results
    )
    card += f"# {name}: a policy for {env_name}\n\nTrained with rlhpc {version}; global step {step}, from `{checkpoint}`.\n\n"
    if results:
        card += "| suite | episodes | mean return | 95 % interval | success once |\n|---|---|---|---|---|\n"
        for evaluation in results:
            success_text = f"{evaluation['success_once']:.1%}" if "success_once" in evaluation else ""
            card += (
                f"| {evaluation.get('suite', 'default')} | {evaluation.get('episodes', '')} | "
                f"{evaluation['return_mean']:.2f} | "
                f"{interval_text(evaluation.get('return_ci95'), '.2f', ' to ') or '–'} | {success_text} |\n"
            )
        card += "\n"
    if is_released:
        model_type = config["policy"]["model"]["model_type"]
        card += (
            f"The folder is as models of the family {model_type} are released, for their own code.\n\n## With rlhpc\n\n"
        )
        return card + f"```yaml\nactor: {{model: {{model_type: {model_type}, model_path: <this folder>}}}}\n```\n"
    card += (
        "| file | content |\n|---|---|\n| `model.safetensors` | the weights |\n"
        "| `config.json` | the policy's specification and the environment it was trained in |\n"
    )
    if is_standalone:
        card += (
            "| `policy.pt2` | the same policy as a torch program: `[B, …]` in, actions `[B, chunk, dim]` out |\n"
            "| `policy.py` | acts with it, without rlhpc: `python policy.py` plays an episode |\n"
        )
    return (
        f"{card}\n## The network\n\n{_describe_network(config['policy'])}\n\n## With rlhpc\n\n"
        '```python\nfrom rlhpc import load_exported\n\npolicy = load_exported(".")\n'
        'actions, extras = policy.predict_action_batch(obs, mode="eval")   # obs: tensor [B, …]\n```\n'
    )


def _describe_network(policy_spec: Mapping[str, Any]) -> str:
    """Returns the type, layers and action distribution of the network as a sentence for the model card."""
    model, action_space = policy_spec.get("model") or {}, policy_spec.get("action_space") or {}
    model_type = model.get("model_type", policy_spec.get("model_type", "a model of its own"))
    if model_type != "mlp":
        return f"`model_type` is `{model_type}`; `config.json` has its options."
    layers_text = " → ".join(
        f"Linear({width}) → {model.get('activation', 'tanh')}" for width in model.get("hidden_sizes", ())
    )
    output_texts = {
        "Discrete": "logits; the action is the largest",
        "Box": "the mean of a Gaussian, clipped to the action space",
    }
    output_text = output_texts.get(str(action_space.get("type")), "logits for each part of the action")
    return (
        "Observations are flattened (several in the order of their names). `actor.*` of `model.safetensors`: "
        f"{layers_text} → Linear: {output_text}. `critic.*`: the same layers, and the value."
    )


EXPORT_FORMAT = 1


def export_checkpoint(checkpoint: Path, output: Path | None = None, *, licence: str | None = None) -> Path:
    """Writes the export folder of a checkpoint atomically, and replaces an existing folder.

    Args:
        checkpoint: A `global_step_<N>` folder of any run, on any machine.
        output: Target folder; by default `export/global_step_<N>` of the checkpoint's run.
        licence: SPDX identifier for the model card.

    Returns:
        The export folder.

    Raises:
        CheckpointError: The checkpoint has faults, or the target cannot be written.
    """
    checkpoint, target, step = _prepare_export(checkpoint, output)
    config = _build_config(checkpoint, step)
    try:
        model = (checkpoint / MODEL).read_bytes()
        standalone_files = _list_standalone_files(checkpoint, config)
        card = policy_card(
            config,
            checkpoint.name,
            checkpoint_results(checkpoint, step),
            licence=licence,
            is_standalone=bool(standalone_files),
        )
        _write_folder(
            target,
            {
                MODEL: model,
                "config.json": json.dumps(
                    _replace_nonfinite(config), indent=2, sort_keys=True, allow_nan=False
                ).encode()
                + b"\n",
                "README.md": card.encode(),
                **standalone_files,
            },
        )
    except OSError as error:
        raise _export_error(checkpoint, target, error) from error
    return target


def write_release_folder(
    checkpoint: Path, output: Path | None = None, *, licence: str | None = None, trust_code: bool = False
) -> Path:
    """Writes a checkpoint's policy in the release format of its family atomically, and replaces an existing folder.

    Args:
        checkpoint, output, licence: As in `export_checkpoint`.
        trust_code: As in `load_exported`.

    Returns:
        Path of the folder.

    Raises:
        ConfigError: The policy's family has no release format.
        CheckpointError: The checkpoint has faults, or the target cannot be written.
    """
    checkpoint, target, step = _prepare_export(checkpoint, output)
    policy: Any = load_exported(checkpoint, trust_code=trust_code)
    if not hasattr(policy, "release"):
        model_type = policy.spec()["model"]["model_type"]
        raise ConfigError(
            f"--released is for openvla and lerobot; {checkpoint} is of model_type {model_type}: leave it out"
        )
    try:
        evaluations = checkpoint_results(checkpoint, step)
        card = policy_card(
            _build_config(checkpoint, step), checkpoint.name, evaluations, licence=licence, is_released=True
        )
        with filled_folder(target) as staging:
            policy.release(staging, step)
            write_durably(staging / "README.md", card.encode())
    except OSError as error:
        raise _export_error(checkpoint, target, error) from error
    return target


def _prepare_export(checkpoint: Path, output: Path | None) -> tuple[Path, Path, int]:
    """Checks the checkpoint and the target; returns both as absolute paths, and the checkpoint's step."""
    checkpoint = expand_home(checkpoint).absolute()
    require_valid(checkpoint, hint="or convert another checkpoint with: rlhpc convert <checkpoint>")
    step = int(read_manifest(checkpoint)["global_step"])
    target = default_output(checkpoint, step) if output is None else expand_home(output).absolute()
    require_free(target)
    return checkpoint, target, step


def _export_error(checkpoint: Path, target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} could not be exported: {error.filename or target}: {error.strerror}. "
        f"{advice(error, target)}, or give another output folder"
    )


def load_exported(folder: str | Path, *, trust_code: bool = False, trust: Trust | None = None) -> Policy:
    """Loads the policy of an export folder (or of a checkpoint folder), in eval mode, on the CPU.

    Args:
        folder: Export or checkpoint folder.
        trust_code: Import code that the folder names as `module:Class`. Otherwise only models that are built in, registered or
            provided by an installed package are allowed, so that an untrusted folder cannot run code.
        trust: Detailed trust settings, instead of `trust_code`.

    Raises:
        CheckpointError: Files are missing, or the weights do not fit the policy that config.json describes.
        ConfigError: The folder names code that is not trusted.
    """
    from rlhpc.embodied.models.registry import load_policy  # imports torch

    return load_policy(expand_home(folder), trust or Trust(trust_code))


def _build_config(checkpoint: Path, step: int) -> dict[str, Any]:
    from rlhpc import __version__

    policy_spec = read_object(checkpoint / "model.json")
    run_config: dict[str, Any] = {}
    if (checkpoint / CONFIG).is_file():
        try:
            run_config = read_yaml((checkpoint / CONFIG).read_bytes()) or {}
        except (ValueError, yaml.YAMLError) as error:
            raise CheckpointError(f"{checkpoint / CONFIG}: cannot be read as YAML: {error}") from error
    env = _get_nested(run_config, "env", "eval") or _get_nested(run_config, "env", "train") or {}
    return {
        "format": EXPORT_FORMAT,
        "architectures": ["rlhpc.models.Policy"],
        "model_type": policy_spec.get("model_type", "rlhpc"),
        "policy": policy_spec,
        "env_id": env.get("env_id") or _get_nested(run_config, "env", "train", "env_id"),
        "env": env,
        "run": _get_nested(run_config, "runner", "name"),
        "global_step": step,
        "rlhpc_version": __version__,
    }


def _replace_nonfinite(json_value: Any) -> Any:
    """Converts non-finite floats to strings, because JSON cannot store them and old checkpoints contain them."""
    if isinstance(json_value, dict):
        return {key: _replace_nonfinite(child) for key, child in json_value.items()}
    if isinstance(json_value, list):
        return [_replace_nonfinite(child) for child in json_value]
    return str(json_value) if isinstance(json_value, float) and not math.isfinite(json_value) else json_value


def _get_nested(tree: Any, *key_path: str) -> Any:
    for key in key_path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _write_folder(target: Path, files: dict[str, bytes]) -> None:
    with filled_folder(target) as staging:
        for name, file_content in files.items():
            write_durably(staging / name, file_content)


def _list_standalone_files(checkpoint: Path, config: dict[str, Any]) -> dict[str, bytes]:
    """Returns name and content of the files with which the policy acts without rlhpc. Returns {} if torch.export cannot trace
    the policy, or if its code is not trusted.
    """

    from rlhpc.embodied.standalone_policy import SCRIPT, program_of, wrapper_files  # torch

    try:
        program = program_of(load_exported(checkpoint))
    except (
        RlhpcError,
        KeyError,
        TypeError,
    ):  # code that is not trusted, or a description of something other than a policy
        return {}
    if program is None:
        return {}
    return {"policy.pt2": program, "policy.py": SCRIPT.encode(), **wrapper_files(config["env"])}
