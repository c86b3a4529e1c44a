"""ManiSkill's simulation on an accelerator keeps what the one on the CPU promises (`tests/accelerators.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from tests.accelerators import kind
from tests.extras import need_extra

need_extra("embodied")
from rlhpc.embodied.envs.maniskill_data import convert_obs

pytestmark = pytest.mark.gpu
SLOTS, LIMIT = 6, 5


def build(where: str, **changes: Any) -> Any:
    options = {"env_type": "maniskill", "env_id": "PushCube-v1", "simulators": 0, "max_episode_steps": LIMIT, **changes}
    section = OmegaConf.structured(EnvSideConfig(**options, kwargs={"sim_backend": f"physx_{where}"}))
    return make_env(section, SLOTS, seed=4)


@pytest.fixture(params=[1, 2], ids=["each by itself", "in groups of two"])
def group(request: pytest.FixtureRequest) -> int:
    """How many slots begin alike."""
    return int(request.param)


@pytest.fixture
def both(group: int) -> Iterator[tuple[Any, Any]]:
    """One on the accelerator, one on the CPU."""
    made = build(kind(), group_size=group), build("cpu", group_size=group)
    yield made
    for env in made:
        env.close()


def form(value: Any) -> Any:
    """Type, dtype and shape of everything nested."""
    if isinstance(value, dict):
        return {key: form(part) for key, part in value.items()}
    return type(value).__name__, str(value.dtype), tuple(value.shape)


def actions(env: Any) -> np.ndarray:
    drawn = np.random.default_rng(0).uniform(-1, 1, (2 * LIMIT, SLOTS, *env.action_space.shape))
    return np.asarray(drawn, np.float32)


def test_what_it_gives_has_the_same_form(both: tuple[Any, Any]) -> None:
    """Spaces, observations, rewards, endings, and what is told of an episode that ended; the simulation is where it was to
    be."""
    there, here = both
    assert there._simulations[0].device.type == kind()
    assert there.action_space == here.action_space and there.observation_space == here.observation_space
    assert form(there.reset()[0]) == form(here.reset()[0])
    for row in actions(here):
        mine, theirs = there.step(row), here.step(row)
        assert [form(part) for part in mine[:4]] == [form(part) for part in theirs[:4]]
        assert form(mine[4]) == form(theirs[4])
        np.testing.assert_array_equal(mine[3], theirs[3])  # all end at the limit
        assert np.isfinite(mine[0]).all() and (mine[1] >= 0).all() and (mine[1] <= 1).all()


def test_observations_stay_there_with_the_same_numbers(group: int) -> None:
    """As tensors, also the last of each episode; what the host's road would have given is the same to the last bit."""
    env = build(kind(), group_size=group)
    env.reset()
    env.on_device = True
    for row in actions(env):
        obs, rewards, _, _, infos = env.step(row)
        for shown in (obs, infos.get("final_obs", obs)):
            assert isinstance(shown, torch.Tensor) and shown.device.type == kind() and shown.shape[0] == SLOTS
        raw = env._simulations[0].get_obs()
        np.testing.assert_array_equal(convert_obs(raw, on_device=True).cpu().numpy(), convert_obs(raw))
        np.testing.assert_array_equal(obs.cpu().numpy(), convert_obs(raw))
        assert isinstance(rewards, np.ndarray) and rewards.dtype == np.float32
    depth = {"sensor_data": {"eye": {"depth": torch.arange(3000, dtype=torch.int16, device=kind()).reshape(3, 1000)}}}
    depth |= {"agent": {}, "extra": {"x": torch.ones(3, 1, device=kind())}}
    expected = np.arange(3000, dtype=np.float32).reshape(3, 1000) / np.float32(1000)
    np.testing.assert_array_equal(convert_obs(depth, on_device=True)["depth"].cpu().numpy(), expected)
    env.close()


def test_chunks_have_the_same_form(both: tuple[Any, Any]) -> None:
    for env in both:
        env.reset()
    chunk = actions(both[1])[: LIMIT + 2].swapaxes(0, 1)
    mine, theirs = (env.chunk_step(chunk) for env in both)
    assert [form(part) for part in mine] == [form(part) for part in theirs]
    np.testing.assert_array_equal(mine[4]["chunk"]["mask"], theirs[4]["chunk"]["mask"])


def test_slots_begin_alike_in_a_group_only(both: tuple[Any, Any], group: int) -> None:
    """Also in their second episode, when nothing but the slots that ended is reset."""
    for env in both:
        first = env.reset()[0]
        second = [env.step(row)[0] for row in actions(env)[:LIMIT]][-1]
        assert np.abs(first - second).max(1).min() > 1e-4
        for obs in (first, second):
            alike = [np.allclose(obs[i], obs[i + 1], atol=1e-6) for i in range(0, SLOTS, 2)]
            assert alike == [group == 2] * 3
            assert not np.allclose(obs[0], obs[2], atol=1e-4)


def test_a_saved_episode_goes_on(both: tuple[Any, Any], group: int) -> None:
    """Bit for bit on the CPU; elsewhere it is played again as far as it was."""
    for env, where in zip(both, (kind(), "cpu"), strict=True):
        env.reset()
        every = actions(env)
        for row in every[: LIMIT + 2]:
            env.step(row)
        state, expected = env.state_dict(), [env.step(row) for row in every[LIMIT + 2 :]]
        again = build(where, group_size=group)
        again.load_state_dict(state)
        for row, one in zip(every[LIMIT + 2 :], expected, strict=True):
            other = again.step(row)
            np.testing.assert_array_equal(other[3], one[3])
            if where == "cpu":
                np.testing.assert_array_equal(other[0], one[0])
        np.testing.assert_array_equal(other[4]["episode"]["length"], one[4]["episode"]["length"])
        again.close()
