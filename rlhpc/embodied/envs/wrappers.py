"""Gymnasium wrappers of environments, by name and with settings (`env.train.wrappers`).

An entry is a name, the path of a class (`module:Class`), or a mapping from a name or path to settings:

    wrappers: [statistics, {atari: {screen_size: 84}}, "minigrid.wrappers:ImgObsWrapper", {frame_stack: {stack_size: 4}}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.config.typed import plain
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

_GYMNASIUM_WRAPPERS = {
    "atari": "AtariPreprocessing", "clip_action": "ClipAction", "clip_reward": "ClipReward", "dtype": "DtypeObservation",
    "filter": "FilterObservation", "flatten": "FlattenObservation", "frame_skip": "MaxAndSkipObservation",
    "frame_stack": "FrameStackObservation", "grayscale": "GrayscaleObservation", "normalize": "NormalizeObservation",
    "normalize_reward": "NormalizeReward", "pixels": "AddRenderObservation", "rescale": "RescaleObservation",
    "rescale_action": "RescaleAction", "resize": "ResizeObservation", "statistics": "RecordEpisodeStatistics",
    "time": "TimeAwareObservation",
}  # fmt: skip

#: Wrappers that need no registration. The wrapper modules of rlhpc import no other module of rlhpc, because exported policies
#: contain them.
BUILT_IN = {
    **{name: f"gymnasium.wrappers:{wrapper}" for name, wrapper in _GYMNASIUM_WRAPPERS.items()},
    "fire_reset": "rlhpc.embodied.envs.atari:FireReset",
    "life_loss": "rlhpc.embodied.envs.atari:LifeLoss",
    "panda_state": "rlhpc.embodied.envs.gym_hil:PandaState",
}

#: Classes or functions `(env, **settings) -> env`, by name.
WRAPPERS: Registry[Any] = Registry("wrapper", "env.wrappers", "rlhpc.wrappers", BUILT_IN)


def parse_entry(item: Any, key: str, example: str = "{frame_stack: {stack_size: 4}}") -> tuple[str, dict[str, Any]]:
    """Returns the name and the settings of an entry.

    Args:
        item: Name, or mapping from a name to settings.
        key: Key of the entry, for messages.
        example: Entry with settings, for messages.

    Raises:
        ConfigError: The entry has a different form.
    """
    if isinstance(item, str):
        return item, {}
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, settings),) = item.items()
        if isinstance(name, str) and (settings is None or isinstance(settings, Mapping)):
            return name, {
                str(setting_name): _plain_setting(setting) for setting_name, setting in (settings or {}).items()
            }
    raise ConfigError(
        f"{key} is {plain(item)!r}; allowed: a name, module:Class, or one of them with its settings: {example}"
    )


def _plain_setting(value: Any) -> Any:
    """Converts a setting to plain values. Lists become tuples, because wrappers need tuples as shapes."""
    value = plain(value)
    return tuple(value) if isinstance(value, list) else value


def wrap(env: Any, wrappers: Sequence[Any] | None, key: str = "env.wrappers") -> Any:
    """Wraps an environment; the first wrapper is the innermost.

    Raises:
        ConfigError: A wrapper is unknown, cannot be imported, lacks a package, or refuses its settings or the
            environment.
    """
    from gymnasium.error import DependencyNotInstalled

    for i, wrapper_entry in enumerate(wrappers or []):
        entry_key = f"{key}[{i}]"
        name, settings = parse_entry(wrapper_entry, entry_key)
        wrapper = WRAPPERS.find(name, entry_key)
        try:
            env = wrapper(env, **settings)
        except (DependencyNotInstalled, ImportError) as error:
            problem = f"{entry_key} is {name!r}, which needs a package that is not installed ({error})"
            raise ConfigError(f"{problem}; those of simulators come with pip install 'rlhpc[embodied]'") from None
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            raise ConfigError(
                f"{entry_key} is {name!r}, which refuses {settings or 'the environment'}: {error}"
            ) from None
    return env
