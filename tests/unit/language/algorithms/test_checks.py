"""Rules of section `algorithm`: combinations that would train nothing are refused, with the reason and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.algorithms.registry import ADVANTAGES, COMPARE_WITHIN_GROUPS
from rlhpc.config.typed import typed
from rlhpc.embodied.config import PpoConfig
from rlhpc.jobs.plan import build_plan
from rlhpc.language.config.run import GrpoConfig, minibatch_size
from rlhpc.language.planning.workload import rl_workload
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.plan import memory_plan
from rlhpc.runtime.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[4] / "configs" / "reasoning" / "demo.yaml"
ONE = ("algorithm.group_size=1", "actor.global_batch_size=8")
KL = ("algorithm.kl_coef=0.1",)
DISTILS = ("algorithm.name=distillation", "teacher.model.model_path=builtin:tiny")


@pytest.mark.parametrize("kind", ["k1", "kl", "K1"])
def test_k1_is_no_loss(kind: str) -> None:
    """Its expected gradient is 0; as a reward it is the estimator that most take."""
    with pytest.raises(ConfigError, match=r"algorithm\.kl_type is '(k1|kl|K1)'; in the loss k1 has no effect: .* k2"):
        load_config(CONFIG, [*KL, f"algorithm.kl_type={kind}"])
    load_config(CONFIG, [*KL, f"algorithm.kl_type={kind.lower()}", "algorithm.kl_in=reward"])
    load_config(CONFIG, ["algorithm.kl_type=k1"])  # of which nothing comes without a coefficient


@pytest.mark.parametrize("adv_type", [name for name in sorted(ADVANTAGES.built_in) if name != "gae"])
def test_a_group_of_one_is_not_compared(adv_type: str) -> None:
    given = [*ONE, f"algorithm.adv_type={adv_type}"]
    if adv_type in COMPARE_WITHIN_GROUPS:
        with pytest.raises(ConfigError, match=r"algorithm\.group_size is 1; algorithm\.adv_type=.* at least 2"):
            load_config(CONFIG, given)
        with pytest.raises(ConfigError, match=r"algorithm\.group_size is 1; algorithm\.adv_type=.* at least 2"):
            load_config(CONFIG, [*given, *DISTILS, "algorithm.distillation.task_reward_coef=1.0"])
    else:
        load_config(CONFIG, given)
    load_config(CONFIG, [*given, *DISTILS])  # the reward is not asked for


def test_defaults_are_those_of_language_models() -> None:
    """TRL and verl: no discount from token to token, and one pass over each rollout."""
    cfg = GrpoConfig()
    assert (cfg.algorithm.gamma, cfg.algorithm.gae_lambda, cfg.algorithm.update_epochs) == (1.0, 1.0, 1)


@pytest.mark.parametrize(("prompts", "group"), [(1, 2), (7, 3), (32, 8)])
def test_a_batch_that_is_left_open_is_the_whole_step(prompts: int, group: int) -> None:
    """In every part that reads it: the trainers, the account of memory, and the shorter runs of `rlhpc tune`."""
    shape = [f"data.prompts_per_step={prompts}", f"algorithm.group_size={group}", "algorithm.adv_type=gae"]
    critic = ["cluster.component_placement={'actor,rollout,critic': 0}", "critic.model.model_path=builtin:tiny"]
    left_open, explicit = (
        typed(GrpoConfig, load_config(CONFIG, [*shape, *critic, f"actor.global_batch_size={size}"]))
        for size in ("null", prompts * group)
    )
    for section in (left_open.actor, left_open.critic):
        assert section.global_batch_size is None and minibatch_size(left_open, section) == prompts * group
    assert rl_workload(left_open, 0).smaller == rl_workload(explicit, 0).smaller
    memory = [memory_plan(cfg, build_plan(cfg, launcher="local")) for cfg in (left_open, explicit)]
    assert memory[0] == memory[1]


def test_the_default_batch_is_left_open() -> None:
    assert GrpoConfig().actor.global_batch_size is None and PpoConfig().actor.global_batch_size is None
