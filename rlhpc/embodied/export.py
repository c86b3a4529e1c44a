"""A checkpoint as a folder for others: model.safetensors + config.json + README.md, the Hugging Face layout; and
policy.pt2 + policy.py, which act without rlhpc.

export/global_step_<N>/config.json   {"architectures", "model_type", "policy": {...}, "env_id", "global_step", ...}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlhpc.checkpoint.export_folder import default_output, filled_folder, read_object, require_free, results_beside
from rlhpc.checkpoint.manifest import read_manifest
from rlhpc.checkpoint.store import require_valid
from rlhpc.embodied.card import policy_card
from rlhpc.jobs.paths import CONFIG, MODEL
from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import CheckpointError, ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home, read_yaml, write_durably
from rlhpc.runtime.trust import Trust

if TYPE_CHECKING:
    from rlhpc.embodied.models import Policy

EXPORT_FORMAT = 1


def export_checkpoint(checkpoint: Path, output: Path | None = None, *, licence: str | None = None) -> Path:
    """Write the export folder of a checkpoint, atomically; an existing one is replaced.

    Args:
        checkpoint: A `global_step_<N>` folder of any run, on any machine.
        output: Target folder; by default `export/global_step_<N>` of the run the checkpoint lies in.
        licence: SPDX identifier for the model card.

    Returns:
        The export folder.

    Raises:
        CheckpointError: The checkpoint has faults, or the target cannot be written.
    """
    checkpoint, target, step = _from_and_to(checkpoint, output)
    config = _config(checkpoint, step)
    try:
        model = (checkpoint / MODEL).read_bytes()
        acting = _acting(checkpoint, config)
        results = results_beside(checkpoint, step)
        card = policy_card(config, checkpoint.name, results, licence=licence, standalone=bool(acting))
        _write_folder(
            target,
            {
                MODEL: model,
                "config.json": json.dumps(_finite(config), indent=2, sort_keys=True, allow_nan=False).encode() + b"\n",
                "README.md": card.encode(),
                **acting,
            },
        )
    except OSError as error:
        raise _not_written(checkpoint, target, error) from error
    return target


def release_checkpoint(
    checkpoint: Path, output: Path | None = None, *, licence: str | None = None, trust_code: bool = False
) -> Path:
    """Write a checkpoint's policy as its family is released, atomically; an existing folder is replaced.

    Args:
        checkpoint, output, licence: As `export_checkpoint` has them.
        trust_code: As `load_exported` has it.

    Returns:
        The folder.

    Raises:
        ConfigError: The policy's family has no such form.
        CheckpointError: The checkpoint has faults, or the target cannot be written.
    """
    checkpoint, target, step = _from_and_to(checkpoint, output)
    policy: Any = load_exported(checkpoint, trust_code=trust_code)
    if not hasattr(policy, "release"):
        kind = policy.spec()["model"]["model_type"]
        raise ConfigError(f"--released is for openvla and lerobot; {checkpoint} is of model_type {kind}: leave it out")
    try:
        results = results_beside(checkpoint, step)
        card = policy_card(_config(checkpoint, step), checkpoint.name, results, licence=licence, released=True)
        with filled_folder(target) as staging:
            policy.release(staging, step)
            write_durably(staging / "README.md", card.encode())
    except OSError as error:
        raise _not_written(checkpoint, target, error) from error
    return target


def _from_and_to(checkpoint: Path, output: Path | None) -> tuple[Path, Path, int]:
    """A valid checkpoint, a free target, and the step."""
    checkpoint = expand_home(checkpoint).absolute()
    require_valid(checkpoint, hint="or convert another checkpoint with: rlhpc convert <checkpoint>")
    step = int(read_manifest(checkpoint)["global_step"])
    target = default_output(checkpoint, step) if output is None else expand_home(output).absolute()
    require_free(target)
    return checkpoint, target, step


def _not_written(checkpoint: Path, target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} could not be exported: {error.filename or target}: {error.strerror}. "
        f"{advice(error, target)}, or give another output folder"
    )


def load_exported(folder: str | Path, *, trust_code: bool = False, trust: Trust | None = None) -> Policy:
    """The policy of an export folder (or of a checkpoint folder), in eval mode, on the CPU.

    Args:
        folder: The folder.
        trust_code: Import what the folder names as `module:Class`. Without it only models are built that are built in,
            registered or an installed package's: a folder from elsewhere cannot run code.
        trust: The same in detail, instead of `trust_code`.

    Raises:
        CheckpointError: Files are missing, or the weights do not fit the policy that config.json describes.
        ConfigError: It names code, and nobody said that it is trusted.
    """
    from rlhpc.embodied.models.saved import load_policy  # with torch, which an export does without

    return load_policy(expand_home(folder), trust or Trust(trust_code))


def _config(checkpoint: Path, step: int) -> dict[str, Any]:
    from rlhpc import __version__

    spec = read_object(checkpoint / "model.json")
    run: dict[str, Any] = {}
    if (checkpoint / CONFIG).is_file():
        try:
            run = read_yaml((checkpoint / CONFIG).read_bytes()) or {}
        except (ValueError, yaml.YAMLError) as error:
            raise CheckpointError(f"{checkpoint / CONFIG}: cannot be read as YAML: {error}") from error
    env = _at(run, "env", "eval") or _at(run, "env", "train") or {}
    return {
        "format": EXPORT_FORMAT,
        "architectures": ["rlhpc.models.Policy"],
        "model_type": spec.get("model_type", "rlhpc"),
        "policy": spec,
        "env_id": env.get("env_id") or _at(run, "env", "train", "env_id"),
        "env": env,
        "run": _at(run, "runner", "name"),
        "global_step": step,
        "rlhpc_version": __version__,
    }


def _finite(value: Any) -> Any:
    """The value with words in place of infinities, which JSON lacks and checkpoints of earlier versions contain."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _at(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _write_folder(target: Path, files: dict[str, bytes]) -> None:
    with filled_folder(target) as staging:
        for name, data in files.items():
            write_durably(staging / name, data)


def _acting(checkpoint: Path, config: dict[str, Any]) -> dict[str, bytes]:
    """The files by which the policy acts without rlhpc; none if torch.export cannot follow it, or if it is code that is
    not trusted."""
    from rlhpc.embodied.standalone import SCRIPT, program_of, wrapper_files

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
