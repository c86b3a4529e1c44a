"""ManiSkill's tasks: resets and generators of slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.extras import need_extra

need_extra("embodied")
N = 6


def task(env_id: str = "PickCube-v1") -> Any:
    from rlhpc.embodied.envs.maniskill import find_task
    from rlhpc.embodied.envs.maniskill_tasks import seeded_task

    cls = seeded_task(find_task(env_id).cls, True, False, list(range(100, 100 + N)))
    kwargs = {"sim_backend": "physx_cpu", "render_backend": "none", "obs_mode": "state", "reconfiguration_freq": 0}
    with torch.inference_mode():
        return cls(num_envs=N, **kwargs)


@torch.inference_mode()
def played(env: Any) -> list[np.ndarray]:
    """What all slots show after a reset of all, then of one, then of three."""
    found = []
    for seeds in ({slot: 10 + slot for slot in range(N)}, {2: 70}, {0: 80, 4: 84, 5: 85}):
        found.append(env.reset_slots(seeds).numpy().copy())
    return found


def test_a_reset_of_some_slots_follows_from_their_seeds_and_makes_no_generator_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env, again = task(), task()
    made: list[int] = []
    real = np.random.RandomState

    def counted(seed: Any = None) -> Any:
        made.append(seed)
        return real(seed)

    expected = played(env)
    before = torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    from rlhpc.embodied.envs import maniskill_tasks

    monkeypatch.setattr(maniskill_tasks.np.random, "RandomState", counted)
    for one, other in zip(expected, played(again), strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(made) <= {10, 70, 80}, "a slot's generator is made for who draws from it"
    assert torch.equal(torch.get_rng_state(), moved) and not torch.equal(moved, before)
    everywhere, one, three = expected
    assert len({row.tobytes() for row in everywhere}) == N
    np.testing.assert_array_equal((everywhere != one).any(1), np.arange(N) == 2)
    np.testing.assert_array_equal((one != three).any(1), np.isin(np.arange(N), [0, 4, 5]))


def test_a_slots_own_generator_is_that_of_its_seed() -> None:
    """A task that draws from `_batched_episode_rng` gets what ManiSkill's generators, made for all slots, would give."""
    from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG

    env = task()
    seeds = {slot: 10 + slot for slot in range(N)} | {2: 76, 3: 77}
    with torch.inference_mode():
        env.reset_slots({slot: 10 + slot for slot in range(N)})
        env.reset_slots({2: 76, 3: 77})
    real = BatchedRNG.from_seeds([seeds[slot] for slot in range(N)])
    np.testing.assert_array_equal(env._batched_episode_rng[[1, 3]].normal(size=2), real[[1, 3]].normal(size=2))
    assert env._episode_rng is env._batched_episode_rng[2]  # the task has drawn from this one
    drawn, expected = env._batched_episode_rng.uniform(0, 1), real.uniform(0, 1)
    np.testing.assert_array_equal(np.delete(drawn, 2), np.delete(expected, 2))
