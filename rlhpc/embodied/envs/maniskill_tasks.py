"""Subclasses of ManiSkill's tasks with one seed per slot, and with several slots in one CPU simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import sapien
import sapien.render
import torch
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from sapien import physx
from torch.overrides import TorchFunctionMode

from rlhpc.embodied.envs.maniskill_physx import BatchedScene, clear_contacts
from rlhpc.embodied.envs.tensor_env import combine_seeds, draw_normal, draw_uniform


class SlotDraws(TorchFunctionMode):
    """Random numbers of the slots that reset together, each slot's from its own seed, in one call and on their device.

    Within this context, torch's draws with one row per slot, such as `torch.rand((b, 3))`, return numbers that follow from the
    row's seed and the number of the draw. Slots with equal seeds draw the same numbers. Draws of other shapes remain torch's.

    Args:
        seeds: Seeds of the slots that reset, int64 `[b]` on the simulation's device.
        all_seeds: Seeds of all slots, for tasks that draw for all whichever reset.
    """

    def __init__(self, seeds: torch.Tensor, all_seeds: torch.Tensor) -> None:
        super().__init__()
        self._seeds = {len(all_seeds): all_seeds, len(seeds): seeds}
        self._num_draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces the numbers of a draw (`TorchFunctionMode`)."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.rand, torch.randn):
            rows = self.rows(tuple(result.shape), is_normal=func is torch.randn)
            return result if rows is None else rows.to(result)
        if func is torch.normal:
            mean, std = (kwargs.get(name, args[i] if len(args) > i else None) for i, name in enumerate(("mean", "std")))
            rows = self.rows(tuple(result.shape), is_normal=True)
            return result if rows is None else (mean + (1.0 if std is None else std) * rows.to(result)).to(result)
        if func is torch.randint:
            low, high = _integer_bounds(args, kwargs)
            rows = self.rows(tuple(result.shape), is_normal=False) if high - low <= 1 << 24 else None
            return result if rows is None else (low + (rows.double() * (high - low)).floor()).to(result)
        if func == torch.Tensor.uniform_:
            rows = self.rows(tuple(result.shape), is_normal=False)
            first, last = (
                kwargs.get(name, args[i] if len(args) > i else i - 1) for i, name in ((1, "from"), (2, "to"))
            )
            return result if rows is None else result.copy_(first + (last - first) * rows)
        return result

    def rows(self, shape: tuple[int, ...], *, is_normal: bool) -> torch.Tensor | None:
        """Draws uniform or standard normal numbers, float32; None if `shape` has no row per slot."""
        if not shape or shape[0] not in self._seeds:
            return None
        self._num_draws += 1
        seeds = combine_seeds(self._seeds[shape[0]], self._num_draws)
        return (draw_normal if is_normal else draw_uniform)(seeds, math.prod(shape[1:])).reshape(shape)


def _integer_bounds(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Returns the bounds of a call of `torch.randint`, whose first argument is `high` if it is the only number."""
    numbers = [value for value in args if isinstance(value, int)]
    low = kwargs.get("low", numbers[0] if len(numbers) > 1 else 0)
    return int(low), int(kwargs["high"] if "high" in kwargs else numbers[-1])


class SlotGenerator:
    """NumPy generator of the slots that reset together: `SlotDraws` for `normal` and `uniform` with one row per slot.

    Everything else is drawn by the generator of the first slot.

    Args:
        draws: Draws of the slots.
        build_first: Generator of the first slot.
    """

    def __init__(self, draws: SlotDraws, build_first: Callable[[], np.random.RandomState]) -> None:
        self._draws, self._build_first = draws, build_first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._build_first(), name)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        """Draws normal numbers (`numpy.random.RandomState.normal`)."""
        rows = self._draws.rows(size, is_normal=True) if isinstance(size, tuple) else None
        return (
            self._build_first().normal(loc, scale, size) if rows is None else loc + scale * rows.double().cpu().numpy()
        )

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        """Draws uniform numbers (`numpy.random.RandomState.uniform`)."""
        rows = self._draws.rows(size, is_normal=False) if isinstance(size, tuple) else None
        if rows is None:
            return self._build_first().uniform(low, high, size)
        return low + (np.asarray(high) - low) * rows.double().cpu().numpy()


class Generators(Sequence[np.random.RandomState]):
    """Random generators, one for each of `seeds`, created on first use. The creation of a thousand generators would
    take longer than a simulation step, and few tasks draw from them.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = list(seeds)
        self._generators = dict[int, np.random.RandomState]()

    def __getitem__(self, slot: Any) -> Any:
        if slot not in self._generators:
            self._generators[slot] = np.random.RandomState(self._seeds[slot])
        return self._generators[slot]

    def __setitem__(self, slot: int, generator: np.random.RandomState) -> None:
        self._generators[slot] = generator

    def __iter__(self) -> Iterator[np.random.RandomState]:
        return (self[slot] for slot in range(len(self)))

    def __len__(self) -> int:
        return len(self._seeds)


def rendering_task(task: type) -> Any:
    """Returns a subclass of a ManiSkill task that uses this process's existing SAPIEN renderer. A process can have only
    one renderer. A task with an MJCF file's textures would open the renderer under another device name, and its images
    would be empty.
    """

    base_class: Any = task

    class RenderingTask(base_class):
        @property
        def backend(self) -> Any:
            return self._backend

        @backend.setter
        def backend(self, value: Any) -> None:
            value.render_device = open_renderer(value.render_device)
            self._backend = value

    RenderingTask.__name__ = RenderingTask.__qualname__ = task.__name__
    return RenderingTask


def open_renderer(device: Any) -> Any:
    """Returns `device`, or the device of SAPIEN's renderer if SAPIEN refuses `device`. Returns None without rendering."""
    if device is None:
        return None
    try:
        sapien.render.RenderSystem(device)
    except RuntimeError:
        try:
            return sapien.render.RenderSystem().device
        except RuntimeError:  # SAPIEN cannot render on this machine, and ManiSkill raises the error
            return device
    return device


def seeded_task(task: type, batched: bool, seeded: bool, build_seeds: list[int]) -> Any:
    """Returns a subclass of a ManiSkill task that resets each slot with a separate seed.

    Args:
        task: Subclass of `BaseEnv`.
        batched: True allows `num_envs > 1` with `sim_backend="physx_cpu"`, without rendering.
        seeded: True resets one slot after the other, each with generators of its seed. False resets all slots of a reset in
            one call (`SlotDraws`).
        build_seeds: Seeds of the values that tasks draw at construction (the size of a peg), one per slot.
    """

    base_class: Any = rendering_task(task)

    class SeededTask(base_class):
        _slot_seeds: list[int] | None = None

        def reset_slots(self, seeds: dict[int, int]) -> Any:
            """Resets the slots that are keys of `seeds`; returns the observations of all slots."""
            if not self.gpu_sim_enabled:
                clear_contacts(self.scene.px)
            elif isinstance(self.scene, BatchedScene):
                self.scene.px.clear_contacts(seeds)
            previous_seeds = self._slot_seeds or [0] * self.num_envs
            self._slot_seeds = [seeds.get(slot, seed) for slot, seed in enumerate(previous_seeds)]
            slot_indices = torch.tensor(sorted(seeds), device=self.device)
            options = {"env_idx": slot_indices} if self.num_envs > 1 else None
            # With seeds, BaseEnv creates two generators for every slot, even for slots that are not reset.
            seeds_to_use = self._slot_seeds if seeded or self.reconfiguration_freq else None
            return self.reset(seed=seeds_to_use, options=options)[0]

        def reset(self, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
            """Resets the task (ManiSkill's `reset`); the call in the constructor uses `build_seeds`."""
            is_built = self._slot_seeds is not None
            return super().reset(seed=seed if is_built else build_seeds, options=options)

        def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
            if self._slot_seeds is None or len(self._slot_seeds) == 1:
                super()._initialize_episode(env_idx, options)
                return
            # torch.manual_seed also queues a seed and a traceback for a GPU that is not in use yet.
            seed_torch = torch.manual_seed if self.device.type == "cuda" else torch.default_generator.manual_seed
            if not seeded:
                first_slot = int(env_idx[0])
                generators = BatchedRNG.from_rngs(Generators(self._slot_seeds))
                all_seeds = torch.tensor(self._slot_seeds, device=self.device)
                draws = SlotDraws(all_seeds[env_idx], all_seeds)
                self._batched_episode_rng = generators
                self._episode_rng = SlotGenerator(draws, lambda: generators[first_slot])
                with torch.random.fork_rng(), draws:
                    seed_torch(self._slot_seeds[first_slot])
                    super()._initialize_episode(env_idx, options)
                self._episode_rng = generators[first_slot]
                return
            mask = self.scene._reset_mask
            for slot in env_idx.tolist():
                seed_torch(self._slot_seeds[slot])
                self._episode_rng = self._batched_episode_rng[slot]
                self.scene._reset_mask = torch.zeros_like(mask)
                self.scene._reset_mask[slot] = True
                super()._initialize_episode(torch.tensor([slot], device=self.device), options)
            self.scene._reset_mask = mask

    class BatchedTask(SeededTask):
        @property
        def backend(self) -> Any:
            return self._backend

        @backend.setter
        def backend(self, value: Any) -> None:
            # BaseEnv refuses more than one environment only because of the backend's name.
            value.sim_backend = "physx_cpu_batched"
            self._backend = value

        def _setup_scene(self) -> None:
            self._set_scene_config()
            scenes = [sapien.Scene([physx.PhysxCpuSystem()]) for _ in range(self.num_envs)]
            self.scene = BatchedScene(
                scenes,
                sim_config=self.sim_config,
                device=self.device,
                parallel_in_single_scene=False,
                backend=self.backend,
            )
            self.scene.px.timestep = 1.0 / self._sim_freq

    task_class = BatchedTask if batched else SeededTask
    task_class.__name__ = task_class.__qualname__ = task.__name__
    return task_class
