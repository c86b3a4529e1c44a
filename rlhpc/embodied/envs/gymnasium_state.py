"""What a checkpoint keeps of a gymnasium environment: the attributes of it and its wrappers, or how its episode came about."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import gymnasium
import numpy as np

from rlhpc.embodied.envs.interface import reset_env, step_env

_MUJOCO = ("model", "data", "mujoco_renderer")
_NOT_STATE = ("screen", "surf", "clock", "viewer", "window", "spec", "observation_space", "action_space")
#: Simulators whose state cannot be read, or is large, but whose resets leave nothing behind: classes, and packages.
#: (BipedalWalker keeps its Box2D world.)
_REPLAYED = ("LunarLander", "LunarLanderContinuous", "gym_hil", "gym_pusht", "gymnasium_robotics", "shimmy")


def is_replayed(env: Any) -> bool:
    """Whether an episode under way is played again when a run resumes."""
    kind = type(env.unwrapped)
    return kind.__name__ in _REPLAYED or kind.__module__.partition(".")[0] in _REPLAYED


def generator_state(env: Any) -> Any:
    """Of the generator that the next episode is drawn from."""
    random = env.unwrapped.np_random
    return random.get_state(legacy=False) if isinstance(random, np.random.RandomState) else random.bit_generator.state


def save(env: Any, begun: tuple[Any, list[Any]] | None) -> bytes:
    """An environment as bytes.

    Args:
        env: With its wrappers.
        begun: Of one that is replayed: its seed or generator's state at its last reset, and the actions since.
    """
    if begun is not None:
        return pickle.dumps((*begun, [_attributes(layer) for layer in _layers(env) if layer is not env.unwrapped]))
    return pickle.dumps([_attributes(layer) for layer in _layers(env)])


def can_save(env: Any, begun: tuple[Any, list[Any]] | None) -> bool:
    """Whether `save` can."""
    try:
        save(env, begun)
    except Exception:  # simulators hold handles of every kind, and pickling them fails in as many ways
        return False
    return True


def restore(env: Any, saved: bytes) -> tuple[Any, list[Any]] | None:
    """Puts an environment into a saved state; returns `begun` of one that was replayed."""
    found = pickle.loads(saved)
    if isinstance(found, list):
        _take_over(env, found)
        return None
    start, actions, *wrappers = found
    seed = start if isinstance(start, int) else None
    if seed is None:
        random = env.unwrapped.np_random
        if isinstance(random, np.random.RandomState):
            random.set_state(start)
        else:
            random.bit_generator.state = start
    name = str(getattr(env.unwrapped.spec, "id", env.unwrapped))
    reset_env(env, name, seed=seed)
    for action in actions:
        step_env(env, name, action)
    _take_over(env, wrappers[0] if wrappers else [])
    return start, actions


def _layers(env: Any) -> Iterator[Any]:
    """The wrappers from the outermost in, and what they wrap."""
    while env is not env.unwrapped and isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def _attributes(layer: Any) -> dict[str, Any]:
    """Those of a wrapper or an environment, without what renders, without spaces, and without code."""
    found = {k: v for k, v in vars(layer).items() if k != "env" and not k.endswith(_NOT_STATE)}
    found = {k: v for k, v in found.items() if not _is_code(v)}
    if "mujoco_renderer" in found:
        found = {k: v for k, v in found.items() if k not in _MUJOCO}
        found["data"] = _mujoco_arrays(layer.data)
    if "ale" in found:
        found["ale"] = layer.ale.cloneState(include_rng=True)
    return found


def _is_code(value: Any) -> bool:
    """Modules, and functions without a name to pickle them by: they come with the construction."""
    return isinstance(value, ModuleType) or (isinstance(value, FunctionType) and "<" in value.__qualname__)


def _take_over(env: Any, saved: list[dict[str, Any]]) -> None:
    for layer, attributes in zip(_layers(env), saved, strict=False):
        if "mujoco_renderer" in vars(layer):
            for name, value in attributes.pop("data").items():
                _set_mujoco(layer.data, name, value)
        if "ale" in attributes:
            layer.ale.restoreState(attributes.pop("ale"))
        vars(layer).update(attributes)


def _mujoco_arrays(data: Any) -> dict[str, Any]:
    """Everything that an `MjData` holds, including derived quantities, which after a step are those of the previous
    substep."""
    names = (name for name in dir(data) if not name.startswith("_"))
    values = ((name, getattr(data, name)) for name in names if name not in ("contact", "model"))
    return {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in values if isinstance(v, (np.ndarray, float))}


def _set_mujoco(data: Any, name: str, value: Any) -> None:
    """Restores one of them; arrays whose size varies with the contacts are made anew by the next step."""
    if not isinstance(value, np.ndarray):
        setattr(data, name, value)
    elif (array := getattr(data, name)).shape == value.shape and array.flags.writeable:
        array[...] = value
