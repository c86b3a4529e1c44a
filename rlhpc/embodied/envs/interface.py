"""Checked access to one Gymnasium environment: `reset` and `step`, with results in plain Python types.

An exported policy contains the source of these functions (`standalone`), so they use only `InterfaceError` of rlhpc.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Mapping
from typing import Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names


class InterfaceError(ConfigError):
    """Error of an environment that does not follow Gymnasium's interface."""


def reset_env(env: Any, env_id: str, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Starts an episode: `env.reset(**options)`.

    Raises:
        InterfaceError: `reset` does not accept these options, or does not return (observation, info).
    """
    try:
        result = env.reset(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, TypeError) and not takes_options(env, options):
            raise refusal(env_id, f"reset() does not take seed and options ({error})") from None
        if wrapper := failed_wrapper(error):
            raise refusal(env_id, f"its wrapper {wrapper} fails on what reset() returns ({error})") from error
        raise
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise refusal(env_id, f"reset() returned {describe(result)}")
    return result[0], result[1]


def step_env(env: Any, env_id: str, action: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
    """Executes an action: `env.step(action)`.

    Raises:
        InterfaceError: `step` does not return (observation, reward, terminated, truncated, info), or their types are wrong.
    """
    try:
        result = env.step(action)
    except (TypeError, ValueError) as error:
        if wrapper := failed_wrapper(error):
            raise refusal(env_id, f"its wrapper {wrapper} fails on what step() returns ({error})") from error
        raise
    if not isinstance(result, (tuple, list)) or len(result) != 5:
        raise refusal(env_id, f"step() returned {describe(result)}")
    observation, reward, terminated, truncated, info = result
    if reward.__class__ is not float:
        reward = to_number(env_id, "reward", reward)
    if terminated.__class__ is not bool:
        terminated = to_flag(env_id, "terminated", terminated)
    if truncated.__class__ is not bool:
        truncated = to_flag(env_id, "truncated", truncated)
    if info.__class__ is not dict and not isinstance(info, Mapping):
        raise refusal(env_id, f"step() returned {describe(info)} as info")
    return observation, reward, terminated, truncated, info


def success_of(env_id: str, info: Mapping[str, Any]) -> bool | None:
    """Returns the success in `info`, under key `success` or `is_success`; None without either.

    Raises:
        InterfaceError: The success is neither true nor false.
    """
    success = info.get("success")
    if success is None:
        success = info.get("is_success")
    return success if success is None or success.__class__ is bool else to_flag(env_id, "info's success", success)


def to_number(env_id: str, name: str, value: Any) -> float:
    """Converts a number, or an array with one number, to a float."""
    if isinstance(value, float):  # numpy's float64 is a subclass of float
        return float(value)
    scalar = to_scalar(value)
    try:
        if isinstance(scalar, numbers.Real):
            return float(scalar)
    except OverflowError:
        pass
    raise refusal(env_id, f"step() returned {describe(value)} as {name}, which must be a number")


def to_flag(env_id: str, name: str, value: Any) -> bool:
    """Converts a truth value, 0, 1, or an array with one such element to a bool."""
    scalar = to_scalar(value)
    if isinstance(scalar, numbers.Real) and (scalar == 0 or scalar == 1):
        return bool(scalar)
    raise refusal(env_id, f"step() returned {describe(value)} as {name}, which must be true or false")


def to_scalar(value: Any) -> Any:
    """Returns the Python value of an array or tensor with one element; returns other values unchanged."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        return value.item()
    return value


def takes_options(env: Any, options: Mapping[str, Any]) -> bool:
    """Returns whether `reset` takes these options, and whether the environments within its wrappers take seed and
    options.
    """
    while True:
        try:
            inspect.signature(env.reset).bind(**options)
        except TypeError:
            return False
        except ValueError:  # a builtin without a signature
            return True
        if env is getattr(env, "unwrapped", env) or not hasattr(env, "env"):
            return True
        env, options = env.env, {"seed": None, "options": None}


def failed_wrapper(error: Exception) -> str:
    """Returns the name of the wrapper in which an error was raised; empty if it was raised in the environment itself."""
    name, trace = "", error.__traceback__
    while trace is not None:
        layer: Any = trace.tb_frame.f_locals.get("self")
        if hasattr(layer, "unwrapped"):
            name = "" if layer is layer.unwrapped else type(layer).__name__
        trace = trace.tb_next
    return name


def describe(value: Any) -> str:
    """Describes a value's type and shape in words."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({format_names((type(item).__name__ for item in value), limit=6)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and type {value.dtype}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:60]
    return f"an object of type {type(value).__name__}"


def refusal(env_id: str, problem: str) -> InterfaceError:
    """Builds the error for an environment's problem; the message describes the required interface."""
    return InterfaceError(
        f"env_id {env_id!r}: {problem}; gymnasium's interface is required: reset(seed=…, options=…) returns "
        "(observation, info), and step(action) returns (observation, reward, terminated, truncated, info). Change the "
        "environment, or put a gymnasium.Wrapper around it where it is registered"
    )
