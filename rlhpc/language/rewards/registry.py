"""Rewards by name: built in, registered, an entry point of group `rlhpc.text_rewards`, or `module:name`."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from rlhpc.language.rewards.base import Reward
from rlhpc.runtime.errors import ConfigError

ENTRY_POINTS = "rlhpc.text_rewards"
_BUILT_IN = {
    "math": "rlhpc.language.rewards.mathematics:MathReward",
    "exact": "rlhpc.language.rewards.texts:ExactReward",
    "format": "rlhpc.language.rewards.texts:FormatReward",
    "length": "rlhpc.language.rewards.texts:LengthReward",
    "code": "rlhpc.language.rewards.programs:CodeReward",
    "reasoning_gym": "rlhpc.language.rewards.procedural:ReasoningGymReward",
    "http": "rlhpc.language.rewards.service:HTTPReward",
}
_registered: dict[str, Callable[..., Any]] = {}


def register_reward(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a class whose objects take a `Sample`, or a function of one; twice is an error."""

    def add(factory: Callable[..., Any]) -> Callable[..., Any]:
        if name.lower() in _registered or name.lower() in _BUILT_IN:
            raise ConfigError(f"reward {name!r} is registered twice")
        _registered[name.lower()] = factory
        return factory

    return add


def reward_names() -> list[str]:
    """All names."""
    return sorted({*_BUILT_IN, *_registered, *(e.name.lower() for e in entry_points(group=ENTRY_POINTS))})


def find_reward(name: str) -> Callable[..., Any]:
    """The class or function of a reward.

    Raises:
        ConfigError: Unknown; names the nearest and all allowed ones.
    """
    lower = name.lower()
    if lower in _registered:
        return _registered[lower]
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name.lower() == lower:
            loaded: Callable[..., Any] = entry.load()
            return loaded
    module, colon, attribute = _BUILT_IN.get(lower, name).partition(":")
    if not colon:
        near = difflib.get_close_matches(lower, reward_names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(
            f"reward.terms has name {name!r}, which is unknown{hint} allowed: {', '.join(reward_names())}, or module:function"
        )
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward.terms has name {name!r}, which cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"reward.terms has name {name!r}, which is a {type(found).__name__}, not a class or function")
    return found


def check_arguments(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Whether a reward takes these arguments.

    Raises:
        ConfigError: It does not; names those that it takes.
    """
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return
    given = [] if isinstance(factory, type) else [None]  # the sample
    try:
        signature.bind(*given, **kwargs)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values()][len(given) :]
        raise ConfigError(
            f"reward.terms: kwargs of {name!r}: {error}; it takes: {', '.join(names) or 'none'}"
        ) from None


def build_reward(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> Reward:
    """A class is built with `kwargs`; a function gets them beside the sample.

    Raises:
        ConfigError: The class does not accept them.
    """
    if not isinstance(factory, type):
        return functools.partial(factory, **kwargs) if kwargs else factory
    try:
        reward: Reward = factory(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.terms: {name!r} with kwargs {kwargs}: {error}") from None
    return reward
