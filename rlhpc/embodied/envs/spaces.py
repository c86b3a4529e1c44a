"""Gymnasium spaces to JSON and back: an exported policy carries the spaces it was trained for."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rlhpc.runtime.errors import ConfigError


def _numbers(array: np.ndarray) -> Any:
    """A list of the numbers, or one number if all are equal. JSON has no infinity: it becomes the word `inf` or `-inf`,
    which numpy reads."""
    flat = [float(x) if np.isfinite(x) else str(float(x)) for x in array.reshape(-1)]
    return flat[0] if flat and all(x == flat[0] for x in flat) else flat


def require_bounded(space: Any) -> None:
    """Refuses actions that critics of actions cannot read.

    Raises:
        ConfigError: They are no Box, or have no bounds.
    """
    if not isinstance(space, spaces.Box) or not space.is_bounded():
        raise ConfigError(
            f"off-policy learning needs bounded continuous actions (Box); the environment's are {space}: take another "
            "env.train.env_id, or runner.task_type=embodied (PPO)"
        )


def space_to_json(space: Any) -> dict[str, Any]:
    """A JSON description of a Box, Discrete, MultiDiscrete, MultiBinary space, or a Dict of them."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": {key: space_to_json(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        return {"type": "Box", "shape": list(space.shape), "dtype": str(space.dtype), "low": _numbers(space.low),
                "high": _numbers(space.high)}  # fmt: skip
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": int(np.prod(space.shape))}
    raise ConfigError(
        f"space {space} is not supported; supported: Box, Discrete, MultiDiscrete, MultiBinary, Dict. Wrap the environment "
        f"(env.train.wrappers), for example with gymnasium.wrappers:FlattenObservation"
    )


def space_from_json(data: dict[str, Any]) -> Any:
    """The space that `space_to_json` described."""
    kind = data["type"]
    if kind == "Dict":
        return spaces.Dict({key: space_from_json(part) for key, part in data["spaces"].items()})
    if kind == "Box":
        dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
        low, high = (np.broadcast_to(np.asarray(data[k], np.float64).reshape(-1), (int(np.prod(shape)),)) if
                     np.size(data[k]) == 1 else np.asarray(data[k], np.float64) for k in ("low", "high"))  # fmt: skip
        return spaces.Box(low.reshape(shape).astype(dtype), high.reshape(shape).astype(dtype), dtype=dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(data["nvec"]), start=np.array(data["start"]) if "start" in data else None)
    return spaces.MultiBinary(data["n"])
