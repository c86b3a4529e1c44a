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

from rlhpc.algorithms.nonfinite import NonFinite
from rlhpc.config.typed import default_section, typed
from rlhpc.embodied.config import ModelConfig, PlayedEnvConfig, SacConfig
from rlhpc.embodied.data.replay_buffer import ReplayBuffer
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.models import build_model
from rlhpc.embodied.rewards import SuccessModel, SuccessRewardEnv, SuccessTrainer, reward_model
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


CAMERA = spaces.Dict(
    {"image": spaces.Box(0, 255, (8, 8, 3), np.uint8), "state": spaces.Box(-1, 1, (2,), np.float32)}
)  # fmt: skip


def trainer(scratch: Path, **options: Any) -> SuccessTrainer:
    cfg = default_section(SacConfig)
    OmegaConf.update(cfg, "actor.model", {"hidden_sizes": [16], "kwargs": {"encoder": "cnn"}})
    OmegaConf.update(cfg, "env.train.reward_scale", 3.0)
    OmegaConf.update(cfg, "algorithm.random_shift", 1)
    section = {"train": True, "min_marks": 4, "batch_size": 16, "updates": 40, "lr": 3e-3, "size": 20, **options}
    OmegaConf.update(cfg, "algorithm.success_classifier", section)
    return SuccessTrainer(typed(SacConfig, cfg), CAMERA, spaces.Box(-1, 1, (1,)), torch.device("cpu"), scratch)


def frames(done: list[bool], seed: int = 0) -> dict[str, np.ndarray]:
    """Transitions of one slot, whose next image is bright where the task is done."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 60, (1, len(done), 8, 8, 3)) + 190 * np.array(done)[None, :, None, None, None]
    states = rng.uniform(-1, 1, (1, len(done), 2)).astype(np.float32)
    return {
        "obs.image": np.zeros_like(images, np.uint8), "obs.state": states, "next_obs.image": images.astype(np.uint8),
        "next_obs.state": states, "rewards": np.full((1, len(done)), 5, np.float32),
        "terminations": np.zeros((1, len(done)), bool),
    }  # fmt: skip


def play(judge: SuccessTrainer, replay: ReplayBuffer, steps: range) -> list[dict[str, float]]:
    """Steps of a run in which a person marks a success and a failure, and sees another frame of each kind."""
    metrics = []
    for step in steps:
        columns = frames([True, False, False, False], seed=step)
        marks = np.array([[1, -1, 0, 0]], np.int8)
        columns["rewards"] = judge.receive(columns, marks)
        columns["terminations"] = marks != 0
        replay.add(columns)
        metrics.append({**judge.update(replay), "reward": float(columns["rewards"][0, 2])})
    return metrics


def test_rewards_are_the_classifiers_once_it_predicts_new_marks_and_a_resumed_one_goes_on_alike(tmp_path: Path) -> None:
    judge, replay = trainer(tmp_path), ReplayBuffer(100, range(1), 1, 0, tmp_path)
    metrics = play(judge, replay, range(4))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    judge.save(folder)
    replay.save(folder)
    metrics += play(judge, replay, range(4, 12))
    used = [row["classifier_used"] for row in metrics]
    first = used.index(1.0)
    assert first >= 3 and used[first:] == [1.0] * (12 - first), (
        "four marks of each kind, predicted before they were learned"
    )
    assert [row["reward"] for row in metrics[: first + 1]] == [5.0] * (first + 1), "the environment's until then"
    assert all(0 <= row["reward"] < 0.6 for row in metrics[first + 1 :]), "the scaled probability of a failure"
    assert metrics[-1]["classifier_accuracy"] == 1 and metrics[-1]["classifier_marks"] == 24
    assert metrics[-1]["classifier_successes"] == 0.25 and metrics[-1]["classifier_loss"] < 0.1
    again, replay = trainer(tmp_path), ReplayBuffer(100, range(1), 1, 0, tmp_path)
    again.load(folder)
    replay.load(folder)
    assert play(again, replay, range(4, 12)) == metrics[4:]
    assert isinstance(reward_model(str(folder / "success_classifier"), CAMERA), SuccessModel)


def test_rewards_are_the_environments_again_when_accuracy_falls(tmp_path: Path) -> None:
    judge, replay = trainer(tmp_path), ReplayBuffer(100, range(1), 1, 0, tmp_path)
    play(judge, replay, range(12))
    assert judge.is_used
    columns = frames([False, True])
    marks = np.array([[1, -1]], np.int8)  # the task now looks otherwise
    assert judge.receive(columns, marks).tolist() == [[5, 5]], "a mark is its step's reward"
    assert not judge.is_used and judge.accuracy() == 0.75
    assert judge.receive(frames([False]), np.zeros((1, 1), np.int8)).tolist() == [[5]]


def test_frames_after_which_an_episode_went_on_are_failures(tmp_path: Path) -> None:
    """They are learned although no mark names them; those that ended an episode are not."""
    losses = []
    for terminated in (False, True):
        judge, replay = trainer(tmp_path), ReplayBuffer(100, range(1), 1, 0, tmp_path)
        judge.receive(frames([True, False]), np.array([[1, -1]], np.int8))
        columns = frames([True] * 20, seed=1)  # these look like the success
        columns["terminations"][:] = terminated
        replay.add(columns)
        losses.append([judge.update(replay)["classifier_loss"] for _ in range(4)][-1])
    assert losses[0] > 5 * losses[1]


def test_a_classifier_waits_for_marks_of_both_kinds_and_stops_at_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    judge, replay = trainer(tmp_path), ReplayBuffer(100, range(1), 1, 0, tmp_path)
    before = {name: tensor.clone() for name, tensor in judge.model.state_dict().items()}
    judge.receive(frames([True, True]), np.array([[1, 1]], np.int8))
    metrics = judge.update(replay)
    assert "classifier_loss" not in metrics and "classifier_accuracy" not in metrics and metrics["classifier_used"] == 0
    assert all(tensor.equal(before[name]) for name, tensor in judge.model.state_dict().items())
    judge.receive(frames([False]), np.array([[-1]], np.int8))
    judge.update(replay)
    with torch.no_grad():
        next(judge.model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFinite, match=r"the loss of the success classifier is not finite"):
        judge.update(replay)
