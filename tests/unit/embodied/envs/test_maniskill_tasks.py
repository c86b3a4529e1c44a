"""ManiSkill's tasks: resets and generators of slots."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.extras import need_extra

need_extra("embodied")
from rlhpc.embodied.envs.maniskill_tasks import SlotDraws, SlotGenerator

N = 6


def task(env_id: str = "PickCube-v1", group_size: int = 1) -> Any:
    from rlhpc.embodied.envs.maniskill import find_task
    from rlhpc.embodied.envs.maniskill_tasks import seeded_task

    cls = seeded_task(find_task(env_id).cls, True, False, [100 + slot // group_size for slot in range(N)])
    kwargs = {"sim_backend": "physx_cpu", "render_backend": "none", "obs_mode": "state", "reconfiguration_freq": 0}
    with torch.inference_mode():
        return cls(num_envs=N, **kwargs)


def initialize_calls(env: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes how many slots each of the task's own `_initialize_episode` calls starts."""
    calls: list[int] = []
    own = type(env).__mro__[3]  # below the subclasses of maniskill_tasks
    initialize = own._initialize_episode

    def noted(self: Any, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        calls.append(len(env_idx))
        initialize(self, env_idx, options)

    monkeypatch.setattr(own, "_initialize_episode", noted)
    return calls


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
    assert env._episode_rng is env._batched_episode_rng[2]
    np.testing.assert_array_equal(env._batched_episode_rng.uniform(0, 1), real.uniform(0, 1))


@pytest.mark.parametrize(
    "env_id", ["PickCube-v1", "StackCube-v1", "PlugCharger-v1", "RollBall-v1", "PegInsertionSide-v1"]
)
@torch.inference_mode()
def test_groups_start_alike_in_one_call(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: in one call for all slots of a reset, whose number does not grow with the slots."""
    env = task(env_id, group_size=2)
    calls = initialize_calls(env, monkeypatch)
    env.reset_slots({slot: 10 + slot // 2 for slot in range(N)})
    state = env.get_state().numpy()
    assert calls == [N]
    env.reset_slots({0: 40, 1: 40, 4: 41, 5: 41})
    later = env.get_state().numpy()
    assert calls == [N, 4]
    for rows in (state, later):
        equal = [[bool(np.array_equal(rows[i], rows[j])) for j in range(N)] for i in range(N)]
        assert equal == [[i // 2 == j // 2 for j in range(N)] for i in range(N)]
    np.testing.assert_array_equal((state != later).any(1), np.isin(np.arange(N), [0, 1, 4, 5]))


@torch.inference_mode()
def test_a_slots_start_follows_from_its_seed_whichever_slots_reset_with_it() -> None:
    env = task()
    env.reset_slots({slot: 10 + slot for slot in range(N)})
    together = env.get_state().numpy()
    env.reset_slots({slot: 50 + slot for slot in range(N)})
    env.reset_slots({1: 11, 3: 13, 4: 14})
    np.testing.assert_array_equal(env.get_state().numpy()[[1, 3, 4]], together[[1, 3, 4]])


def test_draws_of_slots_have_the_distributions_of_torch_and_numpy() -> None:
    count = 20_000
    seeds = torch.arange(count)
    draws = SlotDraws(seeds, seeds)
    generator = SlotGenerator(draws, lambda: np.random.RandomState(0))
    with draws:
        uniform, again = torch.rand((count, 2)), torch.rand(size=(count,))
        normal = torch.randn(count, 2, dtype=torch.float64)
        shifted = torch.normal(mean=torch.full((count,), 3.0), std=0.5)
        sized = torch.normal(-1.0, 2.0, (count,))
        integers, from_zero = torch.randint(2, 5, (count,)), torch.randint(high=3, size=(count, 1), dtype=torch.int32)
        filled, unit = torch.zeros(count, 3), torch.zeros(count)
        filled[:, 1:].uniform_(-2, 6)
        unit.uniform_()
        torch.manual_seed(4)
        other = torch.rand(7)
    torch.manual_seed(4)
    assert torch.equal(other, torch.rand(7)), "a draw that has no row per slot is torch's"
    assert normal.dtype == torch.float64 and from_zero.dtype == torch.int32 and integers.dtype == torch.int64
    assert not torch.equal(uniform[:, 0], again) and 0 <= float(uniform.min()) < float(uniform.max()) < 1
    assert integers.unique(return_counts=True)[0].tolist() == [2, 3, 4] and from_zero.unique().tolist() == [0, 1, 2]
    assert integers.bincount()[2:].min() > count / 3.2
    for numbers, mean, std in (
        (uniform, 0.5, 12**-0.5), (normal, 0, 1), (shifted, 3, 0.5), (sized, -1, 2),
        (filled[:, 1:], 2, 8 * 12**-0.5), (unit, 0.5, 12**-0.5),
        (torch.from_numpy(generator.normal(1, 3, (count, 2))), 1, 3),
        (torch.from_numpy(generator.uniform(-2, 4, (count, 1))), 1, 6 * 12**-0.5),
    ):  # fmt: skip
        assert float(numbers.mean()) == pytest.approx(mean, abs=0.03 * std)
        assert float(numbers.std()) == pytest.approx(std, rel=0.02)
    assert not filled[:, 0].any() and filled[0, 1] != filled[0, 2]
    assert generator.choice(3) == np.random.RandomState(0).choice(3)
    assert generator.normal(0, 1, 2).tolist() == np.random.RandomState(0).normal(0, 1, 2).tolist()


def test_maniskills_tasks_draw_with_what_has_rows_of_slots() -> None:
    """Reads ManiSkill's source: another function of torch in a task would draw jointly, and groups would differ."""
    import mani_skill

    known = {"rand", "randn", "randint", "normal", "uniform_"}
    used: dict[str, set[str]] = {}
    folder = Path(mani_skill.__file__).parent / "envs"
    for file in [*(folder / "tasks").rglob("*.py"), *(folder / "utils/randomization").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner, name = node.func.value, node.func.attr
            from_torch = isinstance(owner, ast.Name) and owner.id == "torch" and name.startswith(("rand", "normal"))
            if from_torch or name in ("uniform_", "normal_", "random_", "bernoulli", "multinomial", "exponential_"):
                used.setdefault(name, set()).add(file.name)
    assert known & used.keys() == known and sum(map(len, used.values())) > 40
    assert {name: files for name, files in used.items() if name not in known} == {}
