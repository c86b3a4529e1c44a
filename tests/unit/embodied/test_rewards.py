"""Success classifier, and the environment whose rewards are its probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section, typed
from rlhpc.embodied.config import ModelConfig, PlayedEnvConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.models import build_model
from rlhpc.embodied.rewards import SuccessModel, SuccessRewardEnv, reward_model
from rlhpc.runtime.errors import ConfigError

POLE = make_env(typed(PlayedEnvConfig, OmegaConf.structured(PlayedEnvConfig(env_id="CartPole-v1"))), 1)
SEES, ACTS = POLE.observation_space, POLE.action_space
POLE.close()


def model(model_type: str = "success", observation_space: Any = SEES) -> Any:
    cfg = OmegaConf.merge(default_section(ModelConfig), {"model_type": model_type, "hidden_sizes": [8]})
    policy = build_model(cfg, observation_space, ACTS, seed=1)
    with torch.no_grad():
        for parameter in policy.parameters():  # the last layer begins at nearly nothing
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    return policy.eval()


def save(folder: Path, policy: Any) -> str:
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(policy.spec()))
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(dict(policy.state_dict())))
    return str(folder)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a classifier."""
    return save(tmp_path_factory.mktemp("judge") / "judge", model())


def environments(judge: str, count: int, **changes: Any) -> tuple[list[SuccessRewardEnv], Any]:
    """Environments with the classifier's rewards, and one with the simulator's."""
    section = {"env_id": "CartPole-v1", "max_episode_steps": 3, "ignore_terminations": True, "reward_model": judge}
    cfg = typed(PlayedEnvConfig, OmegaConf.structured(PlayedEnvConfig(**{**section, **changes})))
    envs = [SuccessRewardEnv(make_env(cfg, 4, 0, seed=1), cfg, torch.device("cpu")) for _ in range(count)]
    plain = make_env(cfg, 4, 0, seed=1)
    for env in (*envs, plain):
        env.reset()
    return envs, plain


@pytest.mark.parametrize("relative", [False, True])
def test_rewards_are_its_probabilities(judge: str, relative: bool) -> None:
    """Of what each step led to, before a reset; of a chunk, at its last action; and a restored environment goes on alike."""
    envs, plain = environments(judge, 2, reward_scale=2.0, use_rel_reward=relative)
    before, rng = np.zeros(4), np.random.default_rng(0)
    for _ in range(7):
        actions = rng.integers(2, size=(4, 1))
        _, rewards, *_ = envs[0].step(actions)
        obs, _, _, truncations, infos = plain.step(actions)
        last_obs = np.where(truncations[:, None], infos["final_obs"], obs) if truncations.any() else obs
        with torch.no_grad():
            probability = model().value(torch.from_numpy(last_obs)).numpy()
        np.testing.assert_allclose(
            rewards, 2 * (probability - before if relative else probability), rtol=1e-5, atol=1e-6
        )
        before = np.where(truncations, 0, probability)
    state = envs[0].state_dict()
    envs[1].load_state_dict(envs[1].merge_states([envs[0].slot_state(state, i) for i in range(4)]))
    chunk = rng.integers(2, size=(4, 3, 1))
    (_, one, *_, infos), (_, two, *_) = (env.chunk_step(chunk) for env in envs)
    np.testing.assert_array_equal(one, two)
    last = infos["chunk"]["mask"].sum(1) - 1
    np.testing.assert_array_equal(infos["chunk"]["rewards"][np.arange(4), last], one)
    assert np.count_nonzero(infos["chunk"]["rewards"]) <= 4
    envs[1].load_state_dict(state)
    np.testing.assert_array_equal(envs[1].chunk_step(chunk)[1], one)


def test_the_rest_of_the_environment_is_the_simulators(judge: str) -> None:
    [env], plain = environments(judge, 1)
    assert (env.num_envs, env.max_episode_steps, env.restarts) == (4, 3, 0)
    assert env.observation_space == plain.observation_space and env.action_space == plain.action_space
    for _ in range(3):
        obs, _, terminations, truncations, infos = env.step(np.ones((4, 1), np.int64))
        expected = plain.step(np.ones((4, 1), np.int64))
    np.testing.assert_array_equal(obs, expected[0])
    assert truncations.all() and not terminations.any()
    np.testing.assert_array_equal(infos["episode"]["return"], expected[4]["episode"]["return"])
    env.close()


def test_a_slot_whose_simulator_failed_gets_no_reward(judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [env], _ = environments(judge, 1)
    step = env.env.step

    def failing(actions: np.ndarray) -> Any:
        *outcome, infos = step(actions)
        return (*outcome, {**infos, "lost": np.array([False, True, False, False])})

    monkeypatch.setattr(env.env, "step", failing)
    rewards = env.step(np.ones((4, 1), np.int64))[1]
    assert rewards[1] == 0 and (np.delete(rewards, 1) > 0).all()


def test_it_judges_and_does_not_act() -> None:
    judge = model()
    obs = torch.zeros(3, 4)
    with pytest.raises(ConfigError, match=r"judges what it sees and does not act"):
        judge.predict_action_batch(obs)
    with pytest.raises(ConfigError, match=r"does not act"):
        judge.features(obs, True, False)
    assert isinstance(judge, SuccessModel) and judge.value(obs).shape == (3,)


def test_it_learns_labels() -> None:
    judge = model()
    optimizer = torch.optim.Adam(judge.parameters(), 0.05)
    obs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    labels = (obs[:, 0] > 0).float()
    for _ in range(60):
        optimizer.zero_grad()
        judge.bc_loss({"obs": obs, "success": labels}).mean().backward()
        optimizer.step()
    assert ((judge.value(obs) > 0.5).float() == labels).float().mean() > 0.95


def test_a_folder_without_a_fitting_classifier_is_refused(judge: str, tmp_path: Path) -> None:
    assert isinstance(reward_model(judge, SEES), SuccessModel)
    with pytest.raises(ConfigError, match=r"which sees Box.*; env.train has Box"):
        reward_model(judge, spaces.Box(-1, 1, (3,), np.float32))
    with pytest.raises(ConfigError, match=r"it must be a model of success"):
        reward_model(save(tmp_path / "policy", model("mlp")), SEES)
    with pytest.raises(ConfigError, match=r"env.train.reward_model is 'nowhere', which is no folder"):
        reward_model("nowhere", SEES)
