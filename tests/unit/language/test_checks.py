"""Rules of section `algorithm`: combinations that would train nothing are refused, with the reason and a way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhpc.algorithms.registry import ADVANTAGES, COMPARE_WITHIN_GROUPS
from rlhpc.config.typed import typed
from rlhpc.embodied.config import PpoConfig
from rlhpc.jobs.plan import build_plan
from rlhpc.language.config.run import GrpoConfig, minibatch_size
from rlhpc.language.planning.workload import rl_workload
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.plan import compute_memory_plan
from rlhpc.runtime.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "reasoning" / "demo.yaml"
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


VLLM = ("rollout.rollout_backend=vllm", "rollout.dtype=bfloat16", "rollout.quantization=fp8")
CORRECTED = ("algorithm.tis_cap=2", "algorithm.recompute_logprobs=true")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            ("rollout.quantization=fp8", "rollout.rollout_backend=hf", *CORRECTED),
            "it is for rollout.rollout_backend=vllm",
        ),
        ((*VLLM, "rollout.dtype=float32", *CORRECTED), "weights in half precision: set rollout.dtype=bfloat16"),
        (VLLM, "which the loss must correct: set algorithm.tis_cap=2"),
        ((*VLLM, "rollout.weight_sync=shards", *CORRECTED), "take rollout.weight_sync=auto"),
        ((*VLLM, "actor.lora.rank=4", "rollout.merge_adapters=false", *CORRECTED), "set rollout.merge_adapters=true"),
        ((*VLLM, "runner.deterministic=true", *CORRECTED), "not with rollout.rollout_backend=vllm"),
    ],
)
def test_an_engine_in_8_bits_needs_what_it_is_made_of_and_a_correction(given: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_config(CONFIG, given)


@pytest.mark.parametrize("correction", [CORRECTED, ("algorithm.corrections=[{name: binary_tv}]",)])
def test_an_engine_in_8_bits_with_a_correction(correction: tuple[str, ...]) -> None:
    load_config(CONFIG, [*VLLM, *correction])


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
    memory = [compute_memory_plan(cfg, build_plan(cfg, launcher="local")) for cfg in (left_open, explicit)]
    assert memory[0] == memory[1]


def test_the_default_batch_is_left_open() -> None:
    assert GrpoConfig().actor.global_batch_size is None and PpoConfig().actor.global_batch_size is None


AGENT = ("agent.kind=python", "agent.target=my_agent:solve")
SUITE = "data.eval=[{name: held_out, source: arithmetic, size: 4}]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.overlong_buffer=100000"], "algorithm.overlong_buffer is 100000; it must be below"),
        (
            ["algorithm.loss_type=decoupled_ppo", "algorithm.recompute_logprobs=false"],
            "algorithm.recompute_logprobs is False",
        ),
        (["rollout.merge_adapters=false"], "rollout.merge_adapters is False; there are no adapters"),
        (
            ["rollout.rollout_backend=hf", "rollout.parallel.expert=true"],
            "rollout.parallel.expert is True; the engine hf",
        ),
        (
            ["algorithm.corrections=[{name: geometric}]", "algorithm.recompute_logprobs=false"],
            "algorithm.recompute_logprobs is False; algorithm.corrections compares",
        ),
        (
            [
                "algorithm.corrections=[{name: k2}, {name: icepop}]",
                "algorithm.recompute_logprobs=true",
                "algorithm.tis_cap=2",
            ],
            "algorithm.tis_cap is 2.0; it is the correction token_tis, and algorithm.corrections has icepop",
        ),
        (
            [
                "algorithm.corrections=[{name: sequence_mis}]",
                "algorithm.recompute_logprobs=true",
                "algorithm.loss_type=decoupled_ppo",
            ],
            "algorithm.corrections is .*decoupled_ppo has importance weights already, and sequence_mis would",
        ),
        (["algorithm.corrections=[{name: k3, kwargs: {over: sum}}]"], "kwargs.over is 'sum'"),
        (["rollout.temperature=0"], "rollout.temperature is 0"),
        (["rollout.max_turns=3"], "rollout.max_turns is 3; rollout.agent is not set"),
        (["agent.kind=python"], "agent.target is None; agent.kind=python is about it: set it, such as my_agent:solve"),
        (["agent.target=my_agent:solve"], "agent.target is 'my_agent:solve'; agent.kind=inline has no target"),
        ([*AGENT, "agent.timeout_s=100000"], "agent.timeout_s is 100000.0; it must be below runner.step_timeout_s"),
        ([*AGENT, "agent.sandbox=bubblewrap"], "agent.sandbox is 'bubblewrap'; it is for agent.command and for shells"),
        ([*AGENT, "rollout.max_turns=2"], "rollout.max_turns is 2; agent.kind=python has agent.max_turns instead"),
        ([*AGENT, "agent.services=[{name: a b, command: [x]}]"], r"agent.services\[0\].name .* letters, digits and _"),
        ([*AGENT, "agent.policies={solver: small, judge: large}"], "agent.policies .* there are no roles"),
        (
            ["actor.compile=blocks", "actor.training_backend=fsdp", "actor.parallel.context=2"],
            "actor.compile is 'blocks'; .* actor.parallel.context above 1: set it to off",
        ),
        (
            ["actor.compile=blocks", "actor.training_backend=deepspeed", "actor.deepspeed.zero_stage=3"],
            "actor.compile is 'blocks'; actor.deepspeed.zero_stage=3 gathers weights inside the layers",
        ),
        (
            ["actor.compile=Blocks", "actor.training_backend=DeepSpeed", "actor.deepspeed.zero_stage=3"],
            "actor.compile is 'blocks'; actor.deepspeed.zero_stage=3 gathers weights inside the layers",
        ),
        (["actor.global_batch_size=7"], "actor.global_batch_size is 7; a step has data.prompts_per_step"),
        (["actor.model.model_path=null"], "actor.model.model_path is None; name a Hugging Face folder"),
        ([SUITE, "workflow.eval_suites=[other]"], "workflow.eval_suites .* data.eval has: held_out"),
        (
            ["data.eval=[]", "workflow.eval_suites=[]", "runner.val_check_interval=1"],
            "runner.val_check_interval is 1; data.eval is empty",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_key(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, changes)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.optim.value_lr=1e-4"], r"value_lr is 0\.0001; the actor has no value head: .* critic\.optim\.lr"),
        (["actor.optim.critic_warmup_steps=2"], r"critic_warmup_steps is 2; the actor has no value head"),
        (
            ["algorithm.adv_type=gae", "actor.model.value_head=true", "actor.optim.critic_warmup_steps=2",
             "algorithm.value_coef=0"],
            "no value is trained",
        ),
        (
            ["algorithm.early_stop_imp_ratio=5", "actor.training_backend=deepspeed"],
            r"early_stop_imp_ratio is 5\.0; DeepSpeed cannot take back a gradient",
        ),
        (["algorithm.early_stop_imp_ratio=1"], r"early_stop_imp_ratio is 1\.0; it must be above 1"),
        (["actor.optim.min_lr=0.5"], r"actor\.optim\.min_lr is 0\.5; it must not be above actor\.optim\.lr"),
        (["algorithm.credit=all_turns", "algorithm.adv_type=raw"], r"algorithm\.credit is 'all_turns'"),
    ],
)  # fmt: skip
def test_keys_of_the_update_are_refused_where_they_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, overrides)


def test_a_learning_rate_of_the_value_head_is_for_gae_with_that_head() -> None:
    given = ["algorithm.adv_type=gae", "actor.model.value_head=true", "actor.optim.value_lr=1e-4"]
    cfg = typed(GrpoConfig, load_config(CONFIG, [*given, "actor.optim.critic_warmup_steps=2"]))
    assert (cfg.actor.optim.value_lr, cfg.actor.optim.critic_warmup_steps) == (1e-4, 2)
