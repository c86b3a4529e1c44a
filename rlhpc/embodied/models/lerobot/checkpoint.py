"""Description of a policy's folder in the format of LeRobot's `save_pretrained`, read from its JSON files without the
LeRobot package.

config.json                {"type": "act", "input_features": {"observation.state": {"type": "STATE", "shape": [2]}}, …}
model.safetensors          weights
policy_preprocessor.json   normalisation and other steps, with their statistics in separate files
policy_postprocessor.json

π0 and π0.5 are also read from openpi's folders (`openpi_folder`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from rlhpc.config.options import read_options
from rlhpc.embodied.config.model_options import (
    KEY,
    LerobotDiffusionOptions,
    LerobotFlowOptions,
    LerobotOptions,
    LerobotPiOptions,
)
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.lerobot import openpi_folder
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_json
from rlhpc.runtime.text import cut

if TYPE_CHECKING:
    from rlhpc.embodied.config import ModelConfig

#: Supported families, and the configuration key of the number of actions that their networks predict at once.
FAMILIES = {
    "act": "chunk_size", "diffusion": "horizon", "smolvla": "chunk_size", "pi0": "chunk_size", "pi05": "chunk_size",
}  # fmt: skip
#: Families of LeRobot that people look for, with the reason why they are not supported.
_UNSUPPORTED = {
    "groot": "GR00T N1.7 came with LeRobot 0.6, which needs transformers 5.4; here is LeRobot 0.4.4, which has N1.5 alone",
}
#: Declarations of `actor.model.kwargs`, by family.
OPTIONS: dict[str, type[LerobotOptions]] = {
    "act": LerobotOptions,
    "diffusion": LerobotDiffusionOptions,
    "smolvla": LerobotFlowOptions,
    **dict.fromkeys(("pi0", "pi05"), LerobotPiOptions),
}
_KEY = "actor.model.model_path"
_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 1}}
_INPUT = {"type": "object", "required": ["type", "shape"], "properties": {"type": {"type": "string"}, "shape": _SHAPE}}
_ACTION = {"type": "object", "required": ["shape"], "properties": {"shape": _SHAPE}}
#: JSON schema of the entries of config.json that every family has.
_SCHEMA = {
    "required": ["output_features"],
    "properties": {
        "input_features": {"type": "object", "additionalProperties": _INPUT},
        "output_features": {"type": "object", "required": ["action"], "properties": {"action": _ACTION}},
        "n_obs_steps": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1}]},
    },
}


@dataclass(frozen=True)
class FolderDescription:
    """Description of a policy's folder, from its config.json.

    Attributes:
        path: Path of the folder.
        family: One of `FAMILIES`.
        sources: Entry of the environment's observations that feeds each input of the policy; None for images.
        cameras: Camera of the environment for each image input: observation entry, and index within it.
        num_obs_steps: Number of observations that the policy takes, ending with the current one (`n_obs_steps`).
        config: Content of config.json; of an openpi folder, LeRobot's for the same policy.
        options: Options of `actor.model.kwargs`.
        is_openpi: True for a folder in openpi's layout (`openpi_folder`).
    """

    path: Path
    family: str
    sources: dict[str, str | None]
    cameras: dict[str, tuple[str, int]]
    num_obs_steps: int
    config: dict[str, Any]
    options: LerobotOptions
    is_openpi: bool = False


def describe(cfg: ModelConfig, observation_space: Any, action_space: Any) -> FolderDescription:
    """Reads a folder and checks it against an environment and the configuration.

    Raises:
        ConfigError: The folder has no policy, the policy's family is not supported, the policy was made for another
            task, or an option is unknown.
    """
    path, config = _read_folder(cfg.model_path)
    family = str(config["type"])
    options = read_options(OPTIONS[family], cfg.kwargs, KEY, f"lerobot's {family}")
    is_openpi = "input_features" not in config
    if isinstance(options, LerobotPiOptions):
        config = _with_options(config, options)
    if is_openpi:
        config = _openpi_features(path, config, options.cameras, observation_space, action_space)
    num_obs_steps = config.get("n_obs_steps") or 1
    if num_obs_steps != 1 and family != "diffusion":
        raise ConfigError(
            f"{_KEY}: {path}/config.json has n_obs_steps {num_obs_steps}; {family} sees one observation: 1"
        )
    if config.get("adapt_to_pi_aloha"):
        raise ConfigError(f"{_KEY}: {path}/config.json has adapt_to_pi_aloha, which is not here: set it false")
    if config.get("temporal_ensemble_coeff") is not None:
        raise ConfigError(
            f"{_KEY}: {path}/config.json has temporal_ensemble_coeff {config['temporal_ensemble_coeff']}; chunks are "
            "played as they are here: set it null"
        )
    _check_actions(cfg, path, config, action_space, FAMILIES[family], num_obs_steps)
    obs_sources = _match_sources(path, config, observation_space, num_obs_steps)
    inputs = [name for name, obs_source in obs_sources.items() if obs_source is None]
    cameras = match_cameras(inputs, environment_cameras(observation_space, num_obs_steps), options.cameras, path)
    return FolderDescription(path, family, obs_sources, cameras, num_obs_steps, config, options, is_openpi)


def _with_options(config: dict[str, Any], options: LerobotPiOptions) -> dict[str, Any]:
    """Returns the configuration of π0 or π0.5 with the values of the options that replace the folder's.

    Raises:
        ConfigError: π0 has no state in its prompt.
    """
    if options.discrete_state_input and config["type"] == "pi0":
        raise ConfigError(
            f"{KEY}.discrete_state_input is true; π0 takes the state as numbers, and π0.5 alone has it in its prompt"
        )
    config = dict(config)
    if options.train_expert_only is not None:
        config["train_expert_only"] = options.train_expert_only
    if (horizon := options.action_horizon) is not None:
        config |= {"chunk_size": horizon, "n_action_steps": min(horizon, config.get("n_action_steps") or horizon)}
    return config


def _openpi_features(
    path: Path, config: dict[str, Any], camera_names: Any, observation_space: Any, action_space: Any
) -> dict[str, Any]:
    """Returns the configuration of an openpi folder with the features of an environment."""
    boxes = boxes_of(observation_space)
    state = boxes.get("state", boxes.get(""))
    state_dim = 0 if state is None or len(state.shape) == 3 else math.prod(state.shape)
    num_cameras = len(environment_cameras(observation_space, 1))
    return openpi_folder.with_features(
        config, path, num_cameras, camera_names, state_dim, math.prod(action_space.shape or ())
    )


def check_folder(cfg: ModelConfig) -> None:
    """Checks that a folder was written by LeRobot's `save_pretrained` or by openpi, for a supported family.

    Raises:
        ConfigError: The folder is invalid; the message says why.
    """
    _read_folder(cfg.model_path)


def _read_folder(model_path: str | None) -> tuple[Path, dict[str, Any]]:
    """Reads a folder's config.json; returns the folder's path and the content, after checking the family."""
    if not model_path:
        raise ConfigError(f"{_KEY} is not set; model_type lerobot takes a folder that LeRobot's save_pretrained wrote")
    path = expand_home(model_path).absolute()
    try:
        config = read_json((path / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_KEY}: {path}/config.json cannot be read: {error}") from error
    if openpi_folder.is_openpi(config):
        return path, openpi_folder.read_openpi(path, config)
    if not isinstance(config, dict) or not isinstance(config.get("input_features"), dict):
        raise ConfigError(f"{_KEY}: {path}/config.json has no input_features: LeRobot's save_pretrained writes them")
    if not (path / MODEL).is_file():
        raise ConfigError(f"{_KEY}: {path} has no {MODEL}")
    family = str(config.get("type"))
    if family not in FAMILIES:
        if family in _UNSUPPORTED:
            raise ConfigError(f"{_KEY}: {path}/config.json is of type {family!r}; {_UNSUPPORTED[family]}")
        raise ConfigError(f"{_KEY}: {path}/config.json is of type {family!r}; here are: {', '.join(FAMILIES)}")
    horizon = {FAMILIES[family]: {"type": "integer", "minimum": 1}}
    schema = {"required": list(horizon), "properties": horizon, "allOf": [_SCHEMA]}
    if schema_fault := best_match(Draft202012Validator(schema).iter_errors(config)):
        fault_path = ".".join(map(str, schema_fault.absolute_path)) or "its top level"
        raise ConfigError(
            f"{_KEY}: {path}/config.json: {fault_path}: {cut(schema_fault.message, 200)}; write the folder with "
            f"LeRobot's save_pretrained"
        )
    return path, config


def _check_actions(
    cfg: ModelConfig, path: Path, config: Mapping[str, Any], space: Any, horizon_key: str, num_obs_steps: int
) -> None:
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"model_type 'lerobot' needs continuous actions; these are {space}")
    shape = config["output_features"]["action"]["shape"]
    if shape != [math.prod(space.shape)]:
        raise ConfigError(
            f"{_KEY}: {path}/config.json has actions of shape {shape}, the environment {list(space.shape)}"
        )
    if cfg.num_action_chunks > config[horizon_key] - (num_obs_steps - 1):
        reason = (
            f", {num_obs_steps - 1} of which are before the present one (n_obs_steps {num_obs_steps})"
            if num_obs_steps > 1
            else ""
        )
        owner_text = (
            f"{KEY}.action_horizon is" if cfg.kwargs.get("action_horizon") else f"{path}/config.json has {horizon_key}"
        )
        raise ConfigError(
            f"actor.model.num_action_chunks is {cfg.num_action_chunks}; {owner_text} {config[horizon_key]}{reason}"
        )


def image_boxes(space: Any, num_obs_steps: int) -> dict[str, Any]:
    """Returns the boxes of images in an observation, `[H, W, C]`, or `[num_obs_steps, H, W, C]` for several steps."""
    return {key: box for key, box in boxes_of(space).items() if len(box.shape) == 3 + (num_obs_steps > 1)}


def environment_cameras(space: Any, num_steps: int) -> dict[str, tuple[str, int]]:
    """Returns the cameras of an environment by name, each as observation entry and index within it. An entry with
    several images, such as `rgb`, has cameras `rgb_0`, `rgb_1`, …. `num_steps` is the number of observations that the
    policy takes.
    """
    cameras: dict[str, tuple[str, int]] = {}
    for key, box in image_boxes(space, num_steps).items():
        num_cameras = box.shape[-1] // 3
        cameras |= {
            (key or "pictures") if num_cameras == 1 else f"{key or 'pictures'}_{i}": (key, i)
            for i in range(num_cameras)
        }
    return cameras


def match_cameras(
    inputs: Sequence[str], cameras: Mapping[str, tuple[str, int]], camera_names: Any, path: Path
) -> dict[str, tuple[str, int]]:
    """Returns the environment's camera for each image input.

    `observation.images.X` is the camera X. If no names match, the cameras of a single entry, such as `rgb`, are
    assigned to the inputs in order.

    Args:
        inputs: Image inputs, in the folder's order.
        cameras: Result of `environment_cameras`.
        camera_names: `actor.model.kwargs.cameras`, which names a camera for each input, or None.
        path: Folder, for messages.

    Raises:
        ConfigError: An input's camera is ambiguous, or a camera is unused.
    """
    short_names = {name: name.removeprefix("observation.").removeprefix("images.") for name in inputs}
    cameras_text = (
        f"{path}/config.json has cameras {', '.join(short_names.values())}, the environment "
        f"{', '.join(cameras) or 'none'}"
    )
    if camera_names is not None:
        user_cameras = {
            str(name).removeprefix("observation.").removeprefix("images."): str(camera)
            for name, camera in camera_names.items()
        }
        if set(user_cameras) != set(short_names.values()) or not set(user_cameras.values()) <= set(cameras):
            raise ConfigError(
                f"actor.model.kwargs.cameras is {user_cameras}; it names one of the environment's for each of the "
                f"folder's: {cameras_text}"
            )
        return {name: cameras[user_cameras[short_names[name]]] for name in inputs}
    if set(short_names.values()) == set(cameras):
        return {name: cameras[short_names[name]] for name in inputs}
    obs_keys = {obs_key for obs_key, _ in cameras.values()}
    by_position = len(obs_keys) <= 1 and not set(short_names.values()) & set(cameras) and len(inputs) == len(cameras)
    if not by_position:
        env_cameras = list(cameras)
        example_text = ", ".join(
            f"{name}: {env_cameras[i % len(env_cameras)]}" for i, name in enumerate(short_names.values())
        )
        raise ConfigError(
            f"{_KEY}: {cameras_text}; which is which does not follow from their names: set "
            f"actor.model.kwargs.cameras={{{example_text}}}, each with the right one"
        )
    return dict(zip(inputs, cameras.values(), strict=True))


def _match_sources(path: Path, config: Mapping[str, Any], space: Any, num_obs_steps: int) -> dict[str, str | None]:
    boxes = boxes_of(space)
    if num_obs_steps > 1 and any(len(box.shape) < 2 or box.shape[0] != num_obs_steps for box in boxes.values()):
        shapes_text = ", ".join(f"{key or 'numbers'} {list(box.shape)}" for key, box in boxes.items())
        raise ConfigError(
            f"{_KEY}: {path}/config.json has n_obs_steps {num_obs_steps}; the environment shows {shapes_text}. "
            f"Have it show the last {num_obs_steps} of each: "
            f"env.train.wrappers=[{{frame_stack: {{stack_size: {num_obs_steps}}}}}], after all others"
        )
    sources_by_input: dict[str, str | None] = {}
    num_cameras = 0
    for name, feature in config["input_features"].items():
        shape = feature["shape"]
        if feature["type"] == "VISUAL":
            sources_by_input[name], num_cameras = None, num_cameras + 1
            continue
        short_name = name.removeprefix("observation.")
        source_key = next((key for key in (short_name, "state", "") if key in boxes), None)
        if source_key is None or [math.prod(boxes[source_key].shape) // num_obs_steps] != shape:
            shapes_text = ", ".join(f"{key or 'numbers'} {list(box.shape)}" for key, box in boxes.items())
            raise ConfigError(
                f"{_KEY}: {path}/config.json has input {name} of shape {shape}; the environment shows {shapes_text}"
            )
        sources_by_input[name] = source_key
    num_env_cameras = sum(box.shape[-1] // 3 for box in image_boxes(space, num_obs_steps).values())
    if num_cameras > num_env_cameras:
        raise ConfigError(
            f"{_KEY}: {path}/config.json has {num_cameras} cameras, the environment shows {num_env_cameras}"
        )
    return sources_by_input
