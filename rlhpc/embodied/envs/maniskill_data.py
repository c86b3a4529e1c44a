"""Conversion of ManiSkill's observations, actions and states to arrays and spaces of rlhpc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rlhpc.embodied.envs.observations import as_arrays


def joint_action_space(space: Any) -> tuple[spaces.Box, dict[str, int] | None]:
    """Returns the action space as one Box. For several robots, the Box joins their action spaces, and a dict has the
    width of each robot's actions; for one robot, the dict is None.
    """
    if isinstance(space, spaces.Box):
        return space, None
    subspaces = dict(space.spaces)
    low, high = (np.concatenate([getattr(subspace, end) for subspace in subspaces.values()]) for end in ("low", "high"))
    return spaces.Box(low, high, dtype=np.float32), {
        name: int(np.prod(subspace.shape)) for name, subspace in subspaces.items()
    }


def convert_obs(obs: Any, on_device: bool = False) -> Any:
    """Converts ManiSkill's observation to `[n, D]`, or a dict of `state`, `rgb` and `depth`.

    Args:
        obs: Observation from ManiSkill.
        on_device: True returns tensors on their device; False returns arrays with the same numbers.
    """
    tensors = _obs_tensors(obs)
    return tensors if on_device else as_arrays(tensors)


def _obs_tensors(obs: Any) -> Any:
    if isinstance(obs, torch.Tensor):
        return obs.float()
    if "sensor_data" not in obs:
        return _flat_state(obs)
    tensors = {"state": _flat_state(obs["state"] if "state" in obs else {"agent": obs["agent"], "extra": obs["extra"]})}
    camera_images = list(obs["sensor_data"].values())
    if "rgb" in camera_images[0]:
        tensors["rgb"] = torch.cat([camera_image["rgb"] for camera_image in camera_images], -1)
    if "depth" in camera_images[0]:
        depth = torch.cat([camera_image["depth"] for camera_image in camera_images], -1).float()
        # Divides by a tensor on the device: with a host number, kernels multiply by the inverse, which rounds differently.
        tensors["depth"] = depth / torch.full((), 1000.0, device=depth.device)
    return tensors


def _flat_state(obs: Any) -> torch.Tensor:
    from mani_skill.utils import common

    state = obs if isinstance(obs, torch.Tensor) else common.flatten_state_dict(obs, use_torch=True)
    return state.float()


def space_of(obs: Any) -> Any:
    """Returns the space of one slot of an observation."""
    if isinstance(obs, dict):
        return spaces.Dict({name: space_of(array) for name, array in obs.items()})
    if obs.dtype == np.uint8:
        return spaces.Box(0, 255, obs.shape[1:], np.uint8)
    return spaces.Box(-np.inf, np.inf, obs.shape[1:], np.float32)


def select(mask: np.ndarray, if_true: Any, if_false: Any) -> Any:
    """Selects rows from `if_true` where `mask [n]` is true, and from `if_false` elsewhere. Accepts arrays and tensors."""
    if isinstance(if_true, dict):
        return {name: select(mask, if_true[name], if_false[name]) for name in if_true}
    if isinstance(if_true, torch.Tensor):
        return torch.where(
            torch.from_numpy(mask).to(if_true.device).reshape(-1, *[1] * (if_true.ndim - 1)), if_true, if_false
        )
    return np.where(mask.reshape(-1, *[1] * (if_true.ndim - 1)), if_true, if_false)


def join_states(states: list[Any]) -> Any:
    """Concatenates nested states of consecutive slots to arrays."""
    if isinstance(states[0], dict):
        return {name: join_states([state[name] for state in states]) for name in states[0]}
    return np.concatenate([state.cpu().numpy() for state in states])


def row_of(state: Any, slot: int) -> Any:
    """Returns one slot's row of a nested state."""
    if isinstance(state, dict):
        return {name: row_of(child, slot) for name, child in state.items()}
    return state[slot : slot + 1].cpu()


def to_rows(values: Sequence[Any], n: int) -> list[np.ndarray]:
    """Converts each value to an array `[n]`, float32 or bool; a single copy fetches all values from an accelerator."""
    tensors = [torch.as_tensor(value).reshape(-1).expand(n) for value in values]
    stacked_rows = torch.stack([tensor.to(tensors[0].device, torch.float32) for tensor in tensors]).cpu().numpy()
    return [
        row.astype(bool) if tensor.dtype == torch.bool else row
        for tensor, row in zip(tensors, stacked_rows, strict=True)
    ]


def picture(env: Any) -> np.ndarray:
    """Renders a task's human camera, uint8 `[n, H, W, 3]`."""
    frames: np.ndarray = env.render_rgb_array().cpu().numpy()
    return frames
