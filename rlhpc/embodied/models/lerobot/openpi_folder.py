"""Folders of openpi's PyTorch policies π0 and π0.5, read as LeRobot's and written as openpi's.

config.json                 {"action_dim": 32, "action_horizon": 50, "paligemma_variant": "gemma_2b", …}
model.safetensors           weights, under the names of openpi's `PI0Pytorch`
assets/<asset>/norm_stats.json   {"norm_stats": {"state": {"mean": …, "std": …, "q01": …, "q99": …}, "actions": {…}}}

What the folder does not say follows from openpi's transforms: a policy sees the cameras `CAMERAS`, of which a robot may lack
some, π0 normalises by mean and deviation and π0.5 by quantiles, and π0.5 reads the state as words of its prompt.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.embodied.models.normalization import NORM_STATS, read_norm_stats
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json
from rlhpc.runtime.text import format_names

#: openpi's cameras, in its order (`IMAGE_KEYS`).
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
#: Variants of networks that LeRobot builds.
_VARIANTS = ("gemma_2b", "gemma_300m")
_KEY = "actor.model.model_path"
#: Terms that openpi's and LeRobot's normalisers add to a deviation or a range.
_OPENPI_EPS, _LEROBOT_EPS = 1e-6, 1e-8
_STATE, _ACTION = "observation.state", "action"


def is_openpi(config: Any) -> bool:
    """Returns whether the content of a config.json is openpi's."""
    return isinstance(config, dict) and "type" not in config and {"action_dim", "action_horizon"} <= config.keys()


def read_openpi(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns LeRobot's configuration of an openpi folder, without features, which follow from the environment.

    Raises:
        ConfigError: The folder has no weights, other weights, or a network that LeRobot does not have.
    """
    names = weight_types(path / MODEL)
    families = {"pi05": "time_mlp_in.weight" in names, "pi0": "action_time_mlp_in.weight" in names}
    if sum(families.values()) != 1:
        raise ConfigError(
            f"{_KEY}: {path}/{MODEL} has {len(names)} weights, and neither π0's action_time_mlp_in nor π0.5's time_mlp_in; "
            "convert a JAX checkpoint with openpi's examples/convert_jax_model_to_pytorch.py"
        )
    variants = {name: config.get(name) for name in ("paligemma_variant", "action_expert_variant")}
    for name, variant in variants.items():
        if variant not in _VARIANTS:
            raise ConfigError(f"{_KEY}: {path}/config.json has {name} {variant!r}; here are: {', '.join(_VARIANTS)}")
    for name in ("action_dim", "action_horizon"):
        if not isinstance(config[name], int) or config[name] < 1:
            raise ConfigError(f"{_KEY}: {path}/config.json has {name} {config[name]!r}; allowed: a positive number")
    return {
        "type": next(family for family, is_family in families.items() if is_family),
        **variants,
        "chunk_size": config["action_horizon"],
        "n_action_steps": config["action_horizon"],
        "max_state_dim": config["action_dim"],
        "max_action_dim": config["action_dim"],
    }


def weight_types(file: Path) -> dict[str, str]:
    """Returns the dtype of each weight of a safetensors file, as in its header.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        return {name: str(entry["dtype"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{_KEY}: {file} cannot be read: {error}") from error


def with_features(
    config: dict[str, Any], path: Path, num_cameras: int, camera_names: Any, state_dim: int, action_dim: int
) -> dict[str, Any]:
    """Returns a configuration of `read_openpi` with the features of an environment.

    Cameras that the environment lacks are not inputs: openpi masks them, so that they change nothing.

    Args:
        config: Configuration.
        path: Folder, for messages.
        num_cameras: Number of the environment's cameras.
        camera_names: `actor.model.kwargs.cameras`, whose keys are the policy's cameras, or None for the first ones.
        state_dim, action_dim: Numbers in the environment's state and action.

    Raises:
        ConfigError: The policy has no such camera, or takes smaller states or actions.
    """
    names = [str(name).rsplit(".", 1)[-1] for name in camera_names or CAMERAS[:num_cameras]]
    if not names or not set(names) <= set(CAMERAS) or num_cameras > len(CAMERAS):
        raise ConfigError(
            f"{_KEY}: {path} is a policy of openpi, whose cameras are {', '.join(CAMERAS)}; the environment shows "
            f"{num_cameras}, and actor.model.kwargs.cameras names {', '.join(names) or 'none'}"
        )
    for label, dim in (("state", state_dim), ("actions", action_dim)):
        if not 0 < dim <= config["max_action_dim"]:
            raise ConfigError(
                f"{_KEY}: the environment's {label} {'has' if label == 'state' else 'have'} {dim} numbers; {path} takes 1 to "
                f"{config['max_action_dim']} (action_dim)"
            )
    # The networks' order of the cameras is that of the features.
    images = {f"observation.images.{name}": _feature("VISUAL", 3, 224, 224) for name in CAMERAS if name in names}
    return {
        **config,
        "input_features": {**images, _STATE: _feature("STATE", state_dim)},
        "output_features": {_ACTION: _feature("ACTION", action_dim)},
    }


def _feature(kind: str, *shape: int) -> dict[str, Any]:
    return {"type": kind, "shape": list(shape)}


def lerobot_statistics(source: Any, path: Path, config: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Converts openpi's statistics to those with which LeRobot's normalisers compute the same results.

    openpi divides by std + 1e-6 and by q99 - q01 + 1e-6, LeRobot by std + 1e-8 and by q99 - q01.

    Args:
        source: `actor.model.kwargs.statistics` (`read_norm_stats`), or None for the folder's.
        path: Folder.
        config: Configuration with features.

    Raises:
        ConfigError: The statistics are missing, or have fewer numbers than the environment.
    """
    statistics = read_norm_stats(source, str(path)) or {}
    is_pi05 = config["type"] == "pi05"
    needed_stats = ("q01", "q99") if is_pi05 else ("mean", "std")
    features = {_STATE: ("state", config["input_features"]), _ACTION: ("actions", config["output_features"])}
    lerobot_stats: dict[str, dict[str, list[float]]] = {}
    for name, (column, side) in features.items():
        dim = math.prod(side[name]["shape"])
        rows = {stat: list((statistics.get(column) or {}).get(stat) or []) for stat in needed_stats}
        if any(len(row) < dim for row in rows.values()):
            lengths_text = ", ".join(f"{stat}: {len(row) or 'none'}" for stat, row in rows.items())
            raise ConfigError(
                f"actor.model.kwargs.statistics: those of {path} have for {column} {lengths_text}; {config['type']} needs "
                f"{' and '.join(needed_stats)} of {dim} numbers"
            )
        low, high = ([float(number) for number in rows[stat][:dim]] for stat in needed_stats)
        added_eps = _OPENPI_EPS if is_pi05 else _OPENPI_EPS - _LEROBOT_EPS
        lerobot_stats[name] = {needed_stats[0]: low, needed_stats[1]: [number + added_eps for number in high]}
    return lerobot_stats


def processor_files(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the contents of LeRobot's files for a configuration with features: config.json and both processors.

    openpi writes the state of π0.5 into the prompt before it pads it, LeRobot after it; so here nothing is padded.
    """
    is_pi05 = config["type"] == "pi05"
    normalisation = "QUANTILES" if is_pi05 else "MEAN_STD"
    norm_map = {"VISUAL": "IDENTITY", "STATE": normalisation, "ACTION": normalisation}
    actions = config["output_features"]
    device = _step("device", device="cpu", float_dtype=None)
    tokenizer = _step(
        "tokenizer", max_length=200 if is_pi05 else 48, task_key="task", padding_side="right", padding="max_length",
        truncation=True, tokenizer_name="google/paligemma-3b-pt-224",
    )  # fmt: skip
    features = {**config["input_features"], **actions}
    normaliser = _step("normalizer", eps=_LEROBOT_EPS, features=features, norm_map=norm_map)
    start = [_step("rename_observations", rename_map={}), _step("to_batch")]
    state_dim = math.prod(config["input_features"][_STATE]["shape"])
    words = {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {"max_state_dim": state_dim}}
    if is_pi05:
        steps = [*start, normaliser, words, tokenizer, device]
    else:
        steps = [*start, _step("pi0_new_line"), tokenizer, device, normaliser]
    unnormaliser = _step("unnormalizer", eps=_LEROBOT_EPS, features=actions, norm_map=norm_map)
    return {
        "config.json": dict(config),
        "policy_preprocessor.json": {"name": "policy_preprocessor", "steps": steps},
        "policy_postprocessor.json": {"name": "policy_postprocessor", "steps": [unnormaliser, device]},
    }


def _step(name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": f"{name}_processor", "config": config}


def clean_instruction(text: str) -> str:
    """Returns an instruction as openpi's tokenizer reads it."""
    return text.strip().replace("_", " ").replace("\n", " ")


def write_openpi(policy: Any, source: Path, target: Path) -> None:
    """Writes a policy of LeRobot as the openpi folder from which it was read: the same names, dtypes and statistics.

    Raises:
        ConfigError: The policy's weights are not those of the folder.
    """
    import torch
    from safetensors.torch import save_file

    types = weight_types(source / MODEL)
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    weights = {name.removeprefix("model."): weight for name, weight in policy.state_dict().items()}
    if missing_names := sorted(types.keys() - weights.keys()):
        raise ConfigError(f"{source}/{MODEL} has weights that the policy lacks: {format_names(missing_names)}")
    # Without the second name of tied embeddings, which openpi does not write.
    saved_weights = {
        name: weights[name].detach().cpu().to(dtypes[dtype]).contiguous().clone() for name, dtype in types.items()
    }
    save_file(saved_weights, target / MODEL)
    config = read_json((source / "config.json").read_bytes())
    if config["action_horizon"] == policy.config.chunk_size:
        shutil.copyfile(source / "config.json", target / "config.json")
    else:  # actor.model.kwargs.action_horizon
        config["action_horizon"] = policy.config.chunk_size
        (target / "config.json").write_text(json.dumps(config, indent=2))
    for file in sorted({*source.glob(NORM_STATS), *source.glob(f"assets/**/{NORM_STATS}")}):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
