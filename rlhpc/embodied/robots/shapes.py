"""What a robot shows and takes, as a configuration says it and as a robot tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from rlhpc.runtime.errors import ConfigError

_KEY = "env.train.kwargs"


def observed(said: Any) -> spaces.Space[Any]:
    """The space of observations that `kwargs.observes` names: a shape or a mapping of shapes, of three numbers for pictures.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(said, Mapping):
        return spaces.Dict({str(name): _box(f"{_KEY}.observes.{name}", shape) for name, shape in said.items()})
    return _box(f"{_KEY}.observes", said)


def _box(key: str, shape: Any) -> spaces.Box:
    sizes = [shape] if isinstance(shape, int) else shape
    try:
        sizes = tuple(sizes)
    except TypeError:
        sizes = ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{key} is {shape!r}; it must be a shape, such as 7 or [64, 64, 3]")
    if len(sizes) == 3:
        return spaces.Box(0, 255, sizes, np.uint8)
    return spaces.Box(-np.inf, np.inf, sizes, np.float32)


def taken(said: Any) -> spaces.Box:
    """The space of actions that `kwargs.acts` names by its bounds.

    Raises:
        ConfigError: It is something else.
    """
    try:
        low, high = (np.atleast_1d(np.asarray(said[name], np.float32)) for name in ("low", "high"))
        if set(said) != {"low", "high"} or low.shape != high.shape or low.ndim != 1 or not (low < high).all():
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ConfigError(
            f"{_KEY}.acts is {said!r}; it must be the bounds of each number of a command: "
            "{low: [-1, -1], high: [1, 1]}, low below high"
        ) from None
    return spaces.Box(low, high, dtype=np.float32)


def told(observation: Any, action: Any) -> dict[str, Any]:
    """A robot's spaces, in words that JSON has."""
    parts = observation.spaces if isinstance(observation, spaces.Dict) else {"": observation}
    seen = {
        name: ["pictures" if part.dtype == np.uint8 else "numbers", list(part.shape or ())]
        for name, part in parts.items()
    }
    bounds = {name: np.asarray(getattr(action, name), float).reshape(-1).tolist() for name in ("low", "high")}
    return {"observes": seen, "acts": bounds}


def misfit(wanted: Mapping[str, Any], found: Any) -> str:
    """Where what a robot tells differs from what a run's configuration says; empty if it does not."""
    for name in ("observes", "acts"):
        here, there = wanted[name], found.get(name) if isinstance(found, Mapping) else None
        same = here == there
        if name == "acts" and isinstance(there, Mapping):
            same = all(_near(here[bound], there.get(bound)) for bound in ("low", "high"))
        if not same:
            return f"{_KEY}.{name} of the run says {here}, and this robot {there}"
    return ""


def _near(here: list[float], there: Any) -> bool:
    return isinstance(there, list) and len(here) == len(there) and np.allclose(here, np.asarray(there, float))
