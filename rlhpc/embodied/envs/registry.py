"""Environments by name: built in, registered, an entry point of group `rlhpc.envs`, or `module:Class`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import load_attribute

Factory = Callable[..., VectorEnv]
_BUILT_IN = {
    "gymnasium": "rlhpc.embodied.envs.gymnasium_env:GymnasiumVectorEnv",
    "libero": "rlhpc.embodied.envs.libero:LiberoVectorEnv",
    "maniskill": "rlhpc.embodied.envs.maniskill:ManiSkillVectorEnv",
    "metaworld": "rlhpc.embodied.envs.metaworld:MetaWorldVectorEnv",
}
_registered: dict[str, Factory] = {}


def register_env(name: str) -> Callable[[Factory], Factory]:
    """Decorator for a class or function `(cfg, num_envs, slot_offset, seed) -> VectorEnv`; twice is an error."""

    def add(factory: Factory) -> Factory:
        if name.lower() in _registered or name.lower() in _BUILT_IN:
            raise ConfigError(f"environment type {name!r} is registered twice")
        _registered[name.lower()] = factory
        return factory

    return add


def env_types() -> list[str]:
    """All names."""
    return sorted({*_BUILT_IN, *_registered, *(e.name.lower() for e in entry_points(group="rlhpc.envs"))})


def find_env(name: str) -> Factory:
    """The factory of an environment type.

    Raises:
        ConfigError: Unknown; names the nearest and all allowed ones.
    """
    lower = name.lower()
    if lower in _registered:
        return _registered[lower]
    if lower in _BUILT_IN:
        built_in: Factory = load_attribute(_BUILT_IN[lower], "env_type")
        return built_in
    for entry in entry_points(group="rlhpc.envs"):
        if entry.name.lower() == lower:
            loaded: Factory = entry.load()
            return loaded
    if ":" in name:
        given: Factory = load_attribute(name, "env.env_type")
        return given
    near = difflib.get_close_matches(lower, env_types(), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(
        f"env.env_type is {name!r}, which is unknown{hint} allowed: {', '.join(env_types())}, or module:Class"
    )


def make_env(cfg: Any, num_envs: int, slot_offset: int = 0, seed: int = 0, stage: str = "train") -> VectorEnv:
    """Builds the vector environment of a section `env.train` or `env.eval`.

    Args:
        cfg: The section.
        num_envs: Slots of this vector (a rank's share of `cfg.num_envs`).
        slot_offset: Global number of the first slot: slot i is seeded by (seed, i), whoever simulates it.
        seed: Of the run.
        stage: "train" or "eval".

    Raises:
        ConfigError: It cannot be built.
    """
    del stage
    from rlhpc.embodied.envs.processes import ProcessVectorEnv, process_count

    factory = find_env(str(cfg.env_type))
    share = {"num_envs": num_envs, "slot_offset": slot_offset, "seed": seed}
    if processes := process_count(cfg, factory, num_envs):
        return ProcessVectorEnv(factory, cfg, **share, processes=processes)
    return factory(cfg, **share)
