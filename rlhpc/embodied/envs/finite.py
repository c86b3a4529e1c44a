"""Numbers of simulators that are not finite, in arrays or in tensors on an accelerator. It imports NumPy alone: simulators
live in processes without torch.

Of tensors, only what is said of whole slots comes to the host.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def is_tensor(part: Any) -> bool:
    """Whether a part of an observation is a tensor, on an accelerator that it is to stay on."""
    return hasattr(part, "is_floating_point")


def is_finite(array: Any) -> bool:
    """Whether all numbers of an array are finite, in one pass without a temporary; integers always are."""
    if is_tensor(array):
        return not array.is_floating_point() or bool(array.isfinite().all())
    if array.dtype.kind != "f":
        return True
    flat = array.reshape(-1)
    # A square may overflow although the number itself does not: only then is each number checked.
    return math.isfinite(np.vdot(flat, flat)) or bool(np.isfinite(array).all())


def bad_rows(array: Any, lead: int = 1) -> np.ndarray:
    """Which rows hold a number that is not finite: bool, of the shape of the `lead` leading axes."""
    if is_tensor(array):
        found = ~array.isfinite()
        if found.ndim > lead:
            found = found.flatten(lead).any(-1)
        there: np.ndarray = found.cpu().numpy()
        return there
    if array.dtype.kind != "f":
        return np.zeros(array.shape[:lead], bool)
    finite = np.isfinite(array)
    bad: np.ndarray = ~finite.all(tuple(range(lead, array.ndim)))
    return bad


def cleaned(obs: Any) -> Any:
    """An observation (or another array) with 0 in place of what is not finite."""
    if isinstance(obs, dict):
        return {key: cleaned(part) for key, part in obs.items()}
    if is_finite(obs):
        return obs
    return obs.where(obs.isfinite(), 0) if is_tensor(obs) else np.where(np.isfinite(obs), obs, obs.dtype.type(0))


def all_finite(obs: Any) -> bool:
    """Whether all numbers of an observation are finite."""
    return all(map(is_finite, obs.values())) if isinstance(obs, dict) else is_finite(obs)


def bad_slots(obs: Any) -> np.ndarray:
    """Which slots show a number that is not finite: bool `[N]`."""
    parts = obs.values() if isinstance(obs, dict) else (obs,)
    bad: np.ndarray = np.logical_or.reduce([bad_rows(part) for part in parts])
    return bad
