"""ManiSkill's tasks as rlhpc builds them: a seed for every slot, and many slots on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import sapien
import sapien.render
import torch
from gymnasium import spaces
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from sapien import physx

from rlhpc.embodied.envs.maniskill_physx import BatchedScene, clear_contacts
from rlhpc.embodied.envs.observations import as_arrays


class Generators(Sequence[np.random.RandomState]):
    """A generator for each of `seeds`, made when it is first drawn from: to make those of a thousand slots takes longer than
    to simulate a step, and few tasks draw from them."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds, self._made = list(seeds), dict[int, np.random.RandomState]()

    def __getitem__(self, slot: Any) -> Any:
        if slot not in self._made:
            self._made[slot] = np.random.RandomState(self._seeds[slot])
        return self._made[slot]

    def __setitem__(self, slot: int, generator: np.random.RandomState) -> None:
        self._made[slot] = generator

    def __iter__(self) -> Iterator[np.random.RandomState]:
        return (self[slot] for slot in range(len(self)))

    def __len__(self) -> int:
        return len(self._seeds)


def rendering_task(task: type) -> Any:
    """A subclass of a ManiSkill task that renders where SAPIEN does already in this process: it has one renderer, and the
    textures of a task from an MJCF file open it, under another name of the device, where nothing is rendered."""

    base: Any = task

    class Task(base):
        @property
        def backend(self) -> Any:
            return self._backend

        @backend.setter
        def backend(self, value: Any) -> None:
            value.render_device = open_renderer(value.render_device)
            self._backend = value

    Task.__name__ = Task.__qualname__ = task.__name__
    return Task


def open_renderer(device: Any) -> Any:
    """A device, or the one that SAPIEN's renderer is on if it refuses that; None where nothing is to be rendered."""
    if device is None:
        return None
    try:
        sapien.render.RenderSystem(device)
    except RuntimeError:
        try:
            return sapien.render.RenderSystem().device
        except RuntimeError:  # it cannot render here at all, which ManiSkill says
            return device
    return device


def seeded_task(task: type, batched: bool, seeded: bool, build_seeds: list[int]) -> Any:
    """A subclass of a ManiSkill task whose slots are each reset with a seed of their own.

    Args:
        task: Subclass of `BaseEnv`.
        batched: It takes `num_envs > 1` with `sim_backend="physx_cpu"`, without rendering.
        seeded: Slots draw their first states one by one, each from its seed; otherwise all that reset together at once, from
            the seed of the first of them.
        build_seeds: What tasks draw when they are built (the size of a peg) follows from these, one per slot.
    """

    base: Any = rendering_task(task)

    class Task(base):
        _slot_seeds: list[int] | None = None

        def reset_slots(self, seeds: dict[int, int]) -> Any:
            """Resets the slots that `seeds` names; the observation of all."""
            if not self.gpu_sim_enabled:
                clear_contacts(self.scene.px)
            elif isinstance(self.scene, BatchedScene):
                self.scene.px.clear_contacts(seeds)
            before = self._slot_seeds or [0] * self.num_envs
            self._slot_seeds = [seeds.get(slot, seed) for slot, seed in enumerate(before)]
            chosen = torch.tensor(sorted(seeds), device=self.device)
            options = {"env_idx": chosen} if self.num_envs > 1 else None
            # From seeds BaseEnv makes two generators for every slot, whichever are reset.
            given = self._slot_seeds if seeded or self.reconfiguration_freq else None
            return self.reset(seed=given, options=options)[0]

        def reset(self, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
            """Resets as ManiSkill does; the constructor's own call uses `build_seeds`."""
            built = self._slot_seeds is not None
            return super().reset(seed=seed if built else build_seeds, options=options)

        def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
            if self._slot_seeds is None or len(self._slot_seeds) == 1:
                super()._initialize_episode(env_idx, options)
                return
            # torch.manual_seed also queues seeds for a GPU that is not used yet, with a traceback each.
            seed_torch = torch.manual_seed if self.device.type == "cuda" else torch.default_generator.manual_seed
            if not seeded:
                first = int(env_idx[0])
                self._batched_episode_rng = BatchedRNG.from_rngs(Generators(self._slot_seeds))
                self._episode_rng = self._batched_episode_rng[first]
                with torch.random.fork_rng():
                    seed_torch(self._slot_seeds[first])
                    super()._initialize_episode(env_idx, options)
                return
            mask = self.scene._reset_mask
            for slot in env_idx.tolist():
                seed_torch(self._slot_seeds[slot])
                self._episode_rng = self._batched_episode_rng[slot]
                self.scene._reset_mask = torch.zeros_like(mask)
                self.scene._reset_mask[slot] = True
                super()._initialize_episode(torch.tensor([slot], device=self.device), options)
            self.scene._reset_mask = mask

    class Batched(Task):
        @property
        def backend(self) -> Any:
            return self._backend

        @backend.setter
        def backend(self, value: Any) -> None:
            # The name alone makes BaseEnv refuse more than one environment.
            value.sim_backend = "physx_cpu_batched"
            self._backend = value

        def _setup_scene(self) -> None:
            self._set_scene_config()
            scenes = [sapien.Scene([physx.PhysxCpuSystem()]) for _ in range(self.num_envs)]
            self.scene = BatchedScene(
                scenes, sim_config=self.sim_config, device=self.device, parallel_in_single_scene=False,
                backend=self.backend,
            )  # fmt: skip
            self.scene.px.timestep = 1.0 / self._sim_freq

    chosen = Batched if batched else Task
    chosen.__name__ = chosen.__qualname__ = task.__name__
    return chosen


#: Metres of one action of size 1 in `pd_ee_delta_pos`.
_REACH = 0.1
_OPEN, _CLOSED = 1.0, -1.0


def _state(obs: Any) -> np.ndarray:
    """The state, from observations that have it beside pictures."""
    state: np.ndarray = obs["state"] if isinstance(obs, dict) else obs
    return state


def _towards(tcp: np.ndarray, target: np.ndarray, gripper: np.ndarray | float, gain: float = 1.0) -> np.ndarray:
    """Actions `[N, 4]` that move the gripper's centre to `target [N, 3]`."""
    actions = np.empty((len(tcp), 4), np.float32)
    actions[:, :3] = np.clip(gain * (target - tcp) / _REACH, -1, 1)
    actions[:, 3] = gripper
    return actions


def push_cube(obs: Any) -> np.ndarray:
    """PushCube-v1: behind the cube, down, and on until the cube lies on the goal.

    Args:
        obs: `[N, 35]`: qpos 9, qvel 9, tcp pose 7, goal 3, cube pose 7.
    """
    obs = _state(obs)
    tcp, goal, cube = obs[:, 18:21], obs[:, 25:28], obs[:, 28:31]
    gap, aside = cube[:, 0] - tcp[:, 0], np.abs(tcp[:, 1] - cube[:, 1])
    low = tcp[:, 2] < 0.04
    pushing = low & (gap > 0.01) & (aside < 0.02)
    behind = ~pushing & (gap > 0.045) & (aside < 0.015)
    # On its way to behind the cube, the hand stays above it.
    target = np.stack([cube[:, 0] - 0.07, cube[:, 1], np.full(len(obs), 0.08)], 1)
    target[behind, 2] = 0.015
    push = np.stack([goal[:, 0] - 0.02, cube[:, 1], np.full(len(obs), 0.015)], 1)
    target = np.where(pushing[:, None], push, target)
    return _towards(tcp, target, _CLOSED)


def pick_cube(obs: Any) -> np.ndarray:
    """PickCube-v1: over the cube, down, grasp, to the goal.

    Args:
        obs: `[N, 42]`: qpos 9, qvel 9, is_grasped 1, tcp pose 7, goal 3, cube pose 7, and differences of these.
    """
    obs = _state(obs)
    tcp, goal, cube = obs[:, 19:22], obs[:, 26:29], obs[:, 29:32]
    return _grasp_and_carry(tcp, cube, obs[:, 18] > 0.5, goal - cube)


def _grasp_and_carry(tcp: np.ndarray, cube: np.ndarray, grasped: np.ndarray, carry: np.ndarray) -> np.ndarray:
    """Actions that grasp the cube from above and, once it is held, move it by `carry [N, 3]`."""
    aside = np.linalg.norm(tcp[:, :2] - cube[:, :2], axis=1)
    above = aside < 0.012
    at = above & (np.abs(tcp[:, 2] - cube[:, 2]) < 0.012)
    target = cube + np.array([0, 0, 0.08])
    target[above] = cube[above]
    target = np.where(grasped[:, None], tcp + carry, target)
    return _towards(tcp, target, np.where(grasped | at, _CLOSED, _OPEN))


def stack_cube(obs: Any) -> np.ndarray:
    """StackCube-v1: grasp the first cube, over the second, down, let go.

    Args:
        obs: `[N, 48]`: qpos 9, qvel 9, tcp pose 7, first cube's pose 7, second's 7, and differences of these.
    """
    obs = _state(obs)
    tcp, cube, base = obs[:, 18:21], obs[:, 25:28], obs[:, 32:35]
    fingers = obs[:, 7]
    near = np.linalg.norm(tcp - cube, axis=1) < 0.02
    grasped = near & (fingers < 0.03) & (fingers > 0.015)
    offset = base - cube
    aside = np.linalg.norm(offset[:, :2], axis=1)
    carry = offset + np.array([0, 0, 0.04])
    # First up, then across, then down onto it.
    carry[:, 2] += np.where(aside > 0.02, 0.06, 0.0)
    low = cube[:, 2] < base[:, 2] + 0.045
    carry[:, :2] *= ~(low & (aside > 0.03))[:, None]
    actions = _grasp_and_carry(tcp, cube, grasped, carry)
    placed = (aside < 0.01) & (np.abs(offset[:, 2] + 0.04) < 0.005)
    actions[placed, 3] = _OPEN
    # Lets go and moves away upwards.
    actions[placed & (fingers > 0.03), :3] = (0, 0, 0.5)
    actions[placed & (fingers <= 0.03), :3] = 0
    return actions


def joint_action_space(space: Any) -> tuple[spaces.Box, dict[str, int] | None]:
    """One Box; the actions of several robots are joined, and the dict says how wide each one's are."""
    if isinstance(space, spaces.Box):
        return space, None
    parts = dict(space.spaces)
    low, high = (np.concatenate([getattr(p, end) for p in parts.values()]) for end in ("low", "high"))
    return spaces.Box(low, high, dtype=np.float32), {name: int(np.prod(part.shape)) for name, part in parts.items()}


def convert(obs: Any, on_device: bool = False) -> Any:
    """ManiSkill's observation: `[n, D]`, or a dict of `state`, `rgb` and `depth`.

    Args:
        obs: What ManiSkill gave.
        on_device: As tensors where they are, with the same numbers; otherwise as arrays.
    """
    found = _tensors(obs)
    return found if on_device else as_arrays(found)


def _tensors(obs: Any) -> Any:
    if isinstance(obs, torch.Tensor):
        return obs.float()
    if "sensor_data" not in obs:
        return _flat_state(obs)
    found = {"state": _flat_state(obs["state"] if "state" in obs else {"agent": obs["agent"], "extra": obs["extra"]})}
    pictures = list(obs["sensor_data"].values())
    if "rgb" in pictures[0]:
        found["rgb"] = torch.cat([picture["rgb"] for picture in pictures], -1)
    if "depth" in pictures[0]:
        depth = torch.cat([picture["depth"] for picture in pictures], -1).float()
        # By a tensor there: kernels multiply by the inverse of a number of the host, which rounds otherwise.
        found["depth"] = depth / torch.full((), 1000.0, device=depth.device)
    return found


def _flat_state(obs: Any) -> torch.Tensor:
    from mani_skill.utils import common

    state = obs if isinstance(obs, torch.Tensor) else common.flatten_state_dict(obs, use_torch=True)
    return state.float()


def space_of(obs: Any) -> Any:
    """The space of one slot of an observation."""
    if isinstance(obs, dict):
        return spaces.Dict({name: space_of(part) for name, part in obs.items()})
    if obs.dtype == np.uint8:
        return spaces.Box(0, 255, obs.shape[1:], np.uint8)
    return spaces.Box(-np.inf, np.inf, obs.shape[1:], np.float32)


def select(mask: np.ndarray, yes: Any, no: Any) -> Any:
    """Rows of `yes` where `mask [n]`, of `no` elsewhere; of arrays or tensors."""
    if isinstance(yes, dict):
        return {name: select(mask, yes[name], no[name]) for name in yes}
    if isinstance(yes, torch.Tensor):
        return torch.where(torch.from_numpy(mask).to(yes.device).reshape(-1, *[1] * (yes.ndim - 1)), yes, no)
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


def flat(values: Sequence[Any], n: int) -> list[np.ndarray]:
    """Each as one number per slot, `[n]`, float32 or bool; those on an accelerator come together, in one copy."""
    there = [torch.as_tensor(value).reshape(-1).expand(n) for value in values]
    together = torch.stack([one.to(there[0].device, torch.float32) for one in there]).cpu().numpy()
    return [row.astype(bool) if one.dtype == torch.bool else row for one, row in zip(there, together, strict=True)]


def picture(env: Any) -> np.ndarray:
    """What a task's human camera shows, uint8 `[n, H, W, 3]`."""
    frames: np.ndarray = env.render_rgb_array().cpu().numpy()
    return frames
