"""A policy that takes time: what is played until a chunk is there, where episodes end, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc import ConfigError
from rlhpc.config.typed import default_section, typed
from rlhpc.embodied.config import EvalEnvConfig, ModelConfig, RealTimeEvalEnvConfig
from rlhpc.embodied.evaluation.episodes import (
    RealTime,
    evaluate_policy,
    evaluation_metrics,
    evaluation_rows,
    play,
    real_time,
)
from rlhpc.embodied.models import build_model
from rlhpc.embodied.models.base import Policy

MODEL = {
    "model_type": "flow", "hidden_sizes": [32], "activation": "tanh", "ortho_init": False, "log_std_init": 0.0,
    "num_action_chunks": 6, "value_per_action": False, "kwargs": {"num_steps": 4},
}  # fmt: skip
STATE, ACTION = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (1,), np.float32)


def policy(**changes: Any) -> Policy:
    return build_model(OmegaConf.create(MODEL | changes), STATE, ACTION, seed=1).eval()


def pendulum(**section: Any) -> EvalEnvConfig:
    given = {"env_type": "gymnasium", "env_id": "Pendulum-v1", "max_episode_steps": 12, "kwargs": {}, "wrappers": []}
    given |= {"num_envs": 2, "num_episodes": 4, "simulators": 0, "simulator_python": None, "ignore_terminations": False}
    return typed(
        EvalEnvConfig,
        OmegaConf.merge(
            OmegaConf.structured(RealTimeEvalEnvConfig), given, {"real_time_chunking": section} if section else {}
        ),
    )


def test_until_a_chunk_is_there_that_before_is_played() -> None:
    acting = policy()
    late = RealTime(acting, 2, 3, 0.0)
    shown = torch.rand(3, 2, 3, generator=torch.Generator().manual_seed(0))
    whole = [acting.predict_action_batch(obs, mode="eval")[0] for obs in shown]
    first, _ = late.predict_action_batch(shown[0])
    torch.testing.assert_close(first, whole[0][:, :3])
    late.on_episode_end(np.array([1]))
    second, _ = late.predict_action_batch(shown[1])
    torch.testing.assert_close(second[0], torch.cat([whole[0][0, 3:5], whole[1][0, 2:3]]))
    torch.testing.assert_close(second[1], whole[1][1, :3])  # a new episode, which begins with its chunk
    late.on_episode_end(np.array([], int))
    third, _ = late.predict_action_batch(shown[2])
    torch.testing.assert_close(third, torch.cat([whole[1][:, 3:5], whole[2][:, 2:3]], 1))


def test_a_guided_chunk_goes_on_where_that_before_has_been() -> None:
    """Of those of a policy that was not trained, the ends differ less than without guidance."""
    acting = policy()
    shown = torch.rand(2, 8, 3, generator=torch.Generator().manual_seed(0))
    jumps = {}
    for most in (0.0, 5.0):
        late = RealTime(acting, 2, 3, most)
        with torch.inference_mode():  # as in an evaluation
            late.predict_action_batch(shown[0])
            played, _ = late.predict_action_batch(shown[1])
        decided = acting.predict_action_batch(shown[0], mode="eval")[0]
        torch.testing.assert_close(played[:, :2], decided[:, 3:5])
        jumps[most] = (played[:, 2] - decided[:, 5]).abs().mean().item()
    assert jumps[5.0] < 0.9 * jumps[0.0]


def test_without_delay_and_guidance_it_is_the_evaluation_that_waits() -> None:
    acting = policy()
    waits = evaluate_policy(acting, pendulum(), seed=1)
    alike = pendulum(inference_delay=0, execution_horizon=6, max_guidance_weight=0.0)
    assert evaluate_policy(acting, alike, seed=1) == waits
    late = evaluate_policy(acting, pendulum(inference_delay=2, execution_horizon=3), seed=1)
    assert late["length_mean"] == waits["length_mean"] and late["return_mean"] != waits["return_mean"]


def test_an_older_configuration_waits() -> None:
    assert real_time(policy(), typed(EvalEnvConfig, OmegaConf.create({"env_id": "Pendulum-v1"}))) is None


@pytest.mark.parametrize(
    ("model", "section", "said"),
    [
        ({"model_type": "mlp", "kwargs": {}}, {"inference_delay": 1}, "which MLPPolicy does not"),
        ({}, {"inference_delay": 4, "execution_horizon": 3}, "inference_delay is 4 and execution_horizon 3"),
        ({}, {"inference_delay": 2, "execution_horizon": 5}, "no more than the 6 actions"),
        ({}, {"inference_delay": 4}, "inference_delay is 4 and execution_horizon 2"),
    ],
    ids=["no flow", "too late", "too short", "half of it"],
)
def test_what_does_not_fit_is_one_message(model: dict[str, Any], section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate_policy(policy(**model), pendulum(**section), seed=1)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_ranks_play_the_episodes_that_one_rank_plays(parts: int) -> None:
    """A slot's number among all slots seeds its environment and its policy's noise, whichever rank has it; there may be more
    ranks than slots."""
    section = pendulum()
    section.num_envs, section.num_episodes = 5, 12
    cfg: Any = SimpleNamespace(env=SimpleNamespace(eval=section), runner=SimpleNamespace(seed=1, on_nonfinite="stop"))
    whole = evaluate_policy(policy(), section, seed=1)
    rows = [evaluation_rows(cfg, policy(), 1, torch.device("cpu"), part, parts) for part in range(parts)]
    assert sum(len(part or []) for part in rows) == 12
    metrics = evaluation_metrics(cfg, rows)
    assert metrics == pytest.approx({name: whole[name] for name in metrics}, rel=1e-6)
    assert {"return_mean", "return_std", "episodes", "seed"} <= metrics.keys()
    assert evaluation_metrics(cfg, [rows[0], None]) == {"nonfinite": 1.0}


def test_a_camera_that_the_environment_does_not_show_is_one_message() -> None:
    """Not that of a fault in the policy; a policy that fails otherwise does so as before."""
    space = spaces.Dict({"state": STATE, "wrist": spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    cfg = OmegaConf.merge(default_section(ModelConfig), {"model_type": "cnn", "hidden_sizes": [8]})
    seeing = build_model(cfg, space, spaces.Box(-1, 1, (1,), np.float32), seed=1)
    env: Any = SimpleNamespace(
        observation_space=spaces.Dict({"state": STATE}), max_episode_steps=5, task_names=(),
        reset=lambda: ({"state": np.zeros((1, 3), np.float32)}, {}),
    )  # fmt: skip
    said = r"env\.eval shows no 'wrist', which the policy was trained with; it shows state"
    with pytest.raises(ConfigError, match=said):
        play(seeing, env, np.array([1]), torch.device("cpu"))
    env.observation_space = space  # the environment's own space says that it has one
    with pytest.raises(KeyError, match="wrist"):
        play(seeing, env, np.array([1]), torch.device("cpu"))
