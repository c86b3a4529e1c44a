"""Sections of environments: evaluation takes the task of training, and each value has its range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.typed import plain, typed
from rlhpc.embodied.config import BcConfig, PpoConfig
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
TASK = {
    "env_type": "gymnasium", "env_id": "Pendulum-v1", "max_episode_steps": 50, "kwargs": {"g": 9.0},
    "wrappers": ["flatten"], "ignore_terminations": True,
}  # fmt: skip


def load(cls: type[Any], config: str, *overrides: str) -> Any:
    return typed(cls, load_config(CONFIGS / config, ["runner.name=x", *overrides], check=False))


def train_task() -> list[str]:
    return [f"env.train.{key}={value}" for key, value in TASK.items()]


@pytest.mark.parametrize(("cls", "config"), [(PpoConfig, "quickstart.yaml"), (BcConfig, "base/bc.yaml")])
def test_evaluation_takes_the_task_of_training_but_for_what_it_names(cls: type[Any], config: str) -> None:
    eval_section = plain(load(cls, config, *train_task()).env.eval)
    assert {key: eval_section[key] for key in TASK} == TASK
    eval_section = plain(
        load(cls, config, *train_task(), "env.eval.max_episode_steps=7", "env.eval.kwargs={}").env.eval
    )
    assert {key: eval_section[key] for key in TASK} == {**TASK, "max_episode_steps": 7, "kwargs": {}}


def test_evaluation_has_its_own_slots_and_seed() -> None:
    env = load(
        PpoConfig, "quickstart.yaml", "env.train.num_envs=64", "env.train.seed=5", "env.train.reward_scale=2"
    ).env
    assert (env.eval.num_envs, env.eval.seed, env.eval.reward_scale) == (10, None, 1.0)


@pytest.mark.parametrize(
    ("config", "override", "says"),
    [
        ("quickstart.yaml", "env.train.num_envs=0", "env.train.num_envs is 0; it must be"),
        ("quickstart.yaml", "env.train.simulator_timeout_s=0", "env.train.simulator_timeout_s is 0"),
        ("quickstart.yaml", "env.train.simulators=-1", "env.train.simulators is -1"),
        ("quickstart.yaml", "env.eval.noise=random", "seeded, zero"),
        ("quickstart.yaml", "env.eval.real_time_chunking.inference_delay=-1", "inference_delay is -1"),
        ("quickstart.yaml", "env.train.env_type=gymnasum", "did you mean 'gymnasium'"),
        ("quickstart.yaml", "rollout.pipeline_stage_num=0", "rollout.pipeline_stage_num is 0"),
        ("embodied/pendulum_sac.yaml", "env.eval.real_time_chunking.inference_delay=1", "real_time_chunking"),
        ("base/bc.yaml", "env.train.num_envs=4", "env.train.num_envs"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(config: str, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / config, ["runner.name=x", override])
    assert says in str(caught.value)
