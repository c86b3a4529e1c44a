"""Configurations of runs with simulators: defaults that depend on other keys, and keys of one kind of run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.typed import typed
from rlhpc.embodied.config import BcConfig, PpoConfig, SacConfig, minibatch_size
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
NAME = ["runner.name=x", "env.train.env_id=CartPole-v1"]
OPEN = "actor.global_batch_size=null"


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (["env.train.num_envs=8", "algorithm.rollout_steps=32"], 64),  # CleanRL's four minibatches
        (["env.train.num_envs=3", "algorithm.rollout_steps=5"], 5),
        (["env.train.num_envs=7", "algorithm.rollout_steps=1"], 7),
        (["algorithm.rollout_parts=2"], 64),
        (
            [
                "runner.use_training_pipeline=true",
                "algorithm.rollout_parts=2",
                "env.train.num_envs=3",
                "algorithm.rollout_steps=10",
            ],
            15,
        ),
        (
            ["runner.use_training_pipeline=true", "algorithm.rollout_parts=3", "algorithm.rollout_steps=9"],
            24,
        ),
        (["actor.global_batch_size=32"], 32),
    ],
)
def test_a_batch_that_is_left_open_fits_every_rollout(overrides: list[str], size: int) -> None:
    cfg = load_config(CONFIGS / "quickstart.yaml", [OPEN, *overrides])
    assert minibatch_size(typed(PpoConfig, cfg)) == size


def test_each_kind_of_run_has_its_own_defaults() -> None:
    ppo = typed(PpoConfig, load_config(CONFIGS / "base/ppo.yaml", NAME, check=False))
    sac = typed(SacConfig, load_config(CONFIGS / "embodied/pendulum_sac.yaml", []))
    cloning = typed(BcConfig, load_config(CONFIGS / "base/bc.yaml", NAME, check=False))
    assert ppo.env.train.auto_reset and ppo.actor.enable_offload is False
    assert sac.actor.optim.clip_grad is None and sac.algorithm.critic_actor_ratio == 1
    assert cloning.actor.global_batch_size == 256 and cloning.workflow.demos_episodes == 100


@pytest.mark.parametrize(
    ("config", "override", "says"),
    [
        ("quickstart", "algorithm.tau=0.1", "algorithm.tau"),
        ("quickstart", "algorithm.clip_ratio_c=1", "it must be above 1"),
        ("embodied/pendulum_sac", "algorithm.expectile=1", "it must be above 0 and below 1"),
        ("embodied/pendulum_sac", "env.train.auto_reset=false", "env.train.auto_reset"),
        ("embodied/pendulum_sac", "actor.enable_offload=true", "actor.enable_offload"),
        ("base/bc", "algorithm.improved_fraction=0", "it must be above 0 and below 1"),
        ("base/bc", "runner.stop_return=1", "runner.stop_return"),
    ],
)
def test_a_key_of_another_kind_of_run_and_a_value_out_of_range_are_refused(
    config: str, override: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            CONFIGS / f"{config}.yaml", [*NAME, *(["demos.path=a.h5"] if config == "base/bc" else []), override]
        )
    assert says in str(caught.value)
