"""What ManiSkill gives, as arrays and spaces of rlhpc."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces


def joint_action_space(space: Any) -> tuple[spaces.Box, dict[str, int] | None]:
    """One Box; the actions of several robots are joined, and the dict says how wide each one's are."""
    if isinstance(space, spaces.Box):
        return space, None
    parts = dict(space.spaces)
    low, high = (np.concatenate([getattr(p, end) for p in parts.values()]) for end in ("low", "high"))
    return spaces.Box(low, high, dtype=np.float32), {name: int(np.prod(part.shape)) for name, part in parts.items()}


def convert(obs: Any) -> Any:
    """ManiSkill's observation as arrays: `[n, D]`, or a dict of `state`, `rgb` and `depth`."""
    if isinstance(obs, torch.Tensor):
        return obs.float().cpu().numpy()
    if "sensor_data" not in obs:
        return _flat_state(obs)
    found = {"state": _flat_state(obs["state"] if "state" in obs else {"agent": obs["agent"], "extra": obs["extra"]})}
    pictures = list(obs["sensor_data"].values())
    if "rgb" in pictures[0]:
        found["rgb"] = torch.cat([picture["rgb"] for picture in pictures], -1).cpu().numpy()
    if "depth" in pictures[0]:
        depth = torch.cat([picture["depth"] for picture in pictures], -1)
        found["depth"] = depth.float().cpu().numpy() / np.float32(1000)
    return found


def _flat_state(obs: Any) -> np.ndarray:
    from mani_skill.utils import common

    state = obs if isinstance(obs, torch.Tensor) else common.flatten_state_dict(obs, use_torch=True)
    array: np.ndarray = state.float().cpu().numpy()
    return array


def space_of(obs: Any) -> Any:
    """The space of one slot of an observation."""
    if isinstance(obs, dict):
        return spaces.Dict({name: space_of(part) for name, part in obs.items()})
    if obs.dtype == np.uint8:
        return spaces.Box(0, 255, obs.shape[1:], np.uint8)
    return spaces.Box(-np.inf, np.inf, obs.shape[1:], np.float32)


def select(mask: np.ndarray, yes: Any, no: Any) -> Any:
    """Rows of `yes` where `mask [n]`, of `no` elsewhere."""
    if isinstance(yes, dict):
        return {name: select(mask, yes[name], no[name]) for name in yes}
    return np.where(mask.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)


def join_states(parts: list[Any]) -> Any:
    """Nested states of neighbouring slots as one, as arrays."""
    if isinstance(parts[0], dict):
        return {name: join_states([part[name] for part in parts]) for name in parts[0]}
    return np.concatenate([part.cpu().numpy() for part in parts])


def row_of(state: Any, slot: int) -> Any:
    """One slot's row of a nested state."""
    if isinstance(state, dict):
        return {name: row_of(part, slot) for name, part in state.items()}
    return state[slot : slot + 1].cpu()


def flat(values: Any, n: int) -> np.ndarray:
    """One number per slot, `[n]`."""
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return np.broadcast_to(array.reshape(-1), (n,))


def picture(env: Any) -> np.ndarray:
    """What a task's human camera shows, uint8 `[n, H, W, 3]`."""
    frames: np.ndarray = env.render_rgb_array().cpu().numpy()
    return frames
