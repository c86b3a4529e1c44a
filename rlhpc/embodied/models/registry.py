"""Models by name: built in, registered, an entry point of group `rlhpc.models`, or `module:Class`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rlhpc.embodied.envs.spaces import space_from_json
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.lookup import load_attribute
from rlhpc.runtime.trust import Trust, without_variables

if TYPE_CHECKING:
    from rlhpc.embodied.models.base import Policy

_BUILT_IN = {
    "mlp": "rlhpc.embodied.models.mlp",
    "cnn": "rlhpc.embodied.models.images",
    "resnet": "rlhpc.embodied.models.images",
    "sac": "rlhpc.embodied.models.sac",
    "flow": "rlhpc.embodied.models.flow",
    "vla": "rlhpc.embodied.models.vla",
    "pi0": "rlhpc.embodied.models.pi0",
}
_registered: dict[str, Any] = {}


def register_model(name: str) -> Callable[[Any], Any]:
    """Decorator for a class `(cfg, observation_space, action_space) -> Policy`; twice is an error."""

    def add(factory: Any) -> Any:
        if name.lower() in _registered:
            raise ConfigError(f"model type {name!r} is registered twice")
        _registered[name.lower()] = factory
        return factory

    return add


def model_types() -> list[str]:
    """All names."""
    return sorted({*_BUILT_IN, *_registered, *(e.name.lower() for e in entry_points(group="rlhpc.models"))})


def find_model(name: str) -> Any:
    """The factory of a model type.

    Raises:
        ConfigError: Unknown; names the nearest and all allowed ones.
    """
    lower = name.lower()
    if lower not in _registered and lower in _BUILT_IN:
        importlib.import_module(_BUILT_IN[lower])
    if lower in _registered:
        return _registered[lower]
    for entry in entry_points(group="rlhpc.models"):
        if entry.name.lower() == lower:
            return entry.load()
    if ":" in name:
        return load_attribute(name, "actor.model.model_type")
    near = difflib.get_close_matches(lower, model_types(), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(
        f"actor.model.model_type is {name!r}, which is unknown{hint} allowed: {', '.join(model_types())}, or module:Class"
    )


def policy_section(actor: Any) -> Any:
    """Section `actor.model` as `build_model` wants it: the adapters of `actor.lora`, if any, are among its options."""
    from omegaconf import OmegaConf

    if not int(actor.lora.rank):
        return actor.model
    section = actor.model.copy()
    OmegaConf.set_readonly(section, False)
    section.kwargs = {**section.kwargs, "lora": OmegaConf.to_container(actor.lora)}
    return section


def build_model(cfg: Any, observation_space: Any, action_space: Any, seed: int | None = None) -> Policy:
    """Builds the policy of section `actor.model`.

    Args:
        cfg: The section.
        observation_space, action_space: Of one environment slot.
        seed: Initialises the weights from this seed, without touching torch's global generator.

    Raises:
        ConfigError: Unknown type, or spaces that it cannot take.
    """
    import torch

    factory = find_model(str(cfg.model_type))
    if seed is None:
        policy: Policy = factory(cfg, observation_space, action_space)
        return policy
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        seeded: Policy = factory(cfg, observation_space, action_space)
        return seeded


def policy_from_spec(spec: dict[str, Any], trust: Trust | None = None, origin: str = "the description") -> Policy:
    """Inverse of `Policy.spec`: the network, with fresh weights.

    Args:
        spec: As read.
        trust: What it may name of code; nothing by default.
        origin: Where it is from, for messages.

    Raises:
        ConfigError: It names code, or describes no policy.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    trust = trust or Trust()
    try:
        named = {"actor": {"model": spec["model"]}}
        trust.check(named, origin)
        section = named if trust.everything else without_variables(named, trust, origin)
        cfg = OmegaConf.create(section).actor.model
        return build_model(cfg, space_from_json(spec["observation_space"]), space_from_json(spec["action_space"]))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        MemoryError,
        OmegaConfBaseException,
    ) as error:
        if isinstance(error, RlhpcError):
            raise
        said = str(error).strip().split("\n")[0]
        raise ConfigError(f"{origin} describes no policy that can be built: {type(error).__name__}: {said}") from error
