"""What does not fit together in a policy's configuration is refused by key, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError, UserError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CHUNK = "actor.model.num_action_chunks=4"
BY_ACTION = "algorithm.reward_type=action_level"
PIPELINE = ["runner.use_training_pipeline=true", "algorithm.rollout_parts=2"]  # a part has 128 transitions
WRONG = {
    "no chunk": (["actor.model.num_action_chunks=0"], "actor.model.num_action_chunks is 0; it must be greater than 0"),
    "misspelt": (["algorithm.logprob_type=tokenlevel"], "did you mean 'token_level'"),
    "rewards finer than log-probs": ([CHUNK, BY_ACTION], "algorithm.logprob_type is 'chunk_level'"),
    "statistics of single slots": (["env.train.wrappers=[normalize]"], "set actor.model.normalize_observations=true"),
    "the same by its class": (
        ["env.train.wrappers=['gymnasium.wrappers:NormalizeObservation']"],
        "neither saved nor used by evaluations",
    ),
    "statistics of sharded policies": (
        ["actor.model.normalize_observations=true", "actor.training_backend=fsdp"],
        "with actor.training_backend local",
    ),
    "no values of actions": ([CHUNK, BY_ACTION, "algorithm.logprob_type=token_level"], "value_per_action is False"),
    "values of actions alone": ([CHUNK, "actor.model.value_per_action=true"], "it is for algorithm.reward_type"),
    "a group of one": (["algorithm.adv_type=grpo"], "env.train.group_size is 1"),
    "filtered groups of one": (["algorithm.filter_rewards=true"], "env.train.group_size is 1"),
    "returns of parts of episodes": (
        ["algorithm.filter_rewards=true", "env.train.group_size=2"],
        "env.train.auto_reset is True; algorithm.filter_rewards asks for the returns of whole episodes",
    ),
    "weights that are old in two ways": (
        ["runner.weight_sync_interval=2", "algorithm.max_staleness=1"],
        "algorithm.max_staleness bounds how old weights may be",
    ),
    "checkpoints between weight syncs": (
        ["runner.weight_sync_interval=2", "runner.save_interval=3"],
        "it must divide by runner.weight_sync_interval (2)",
    ),
    "segments that end between weight syncs": (
        ["runner.weight_sync_interval=2", "runner.save_interval=-1", "runner.max_steps=6", "runner.segments=2"],
        "runner.segments is 2; segments must end with a weight sync",
    ),
    "bounds the wrong way": (
        ["algorithm.rewards_lower_bound=1.0", "algorithm.rewards_upper_bound=0.5"],
        "algorithm.rewards_lower_bound is 1.0; it must not be above algorithm.rewards_upper_bound (0.5)",
    ),
    "sequences of several episodes": (
        ["algorithm.loss_agg=seq-mean-token-mean"],
        "algorithm.loss_agg is 'seq-mean-token-mean'; with env.train.auto_reset",
    ),
    "groups that are not known yet": (
        [*PIPELINE, "algorithm.filter_rewards=true", "env.train.group_size=2", "env.train.auto_reset=false"],
        "algorithm.filter_rewards is True; what is left out must be known first",
    ),
    "lengths that are not known yet": (
        [*PIPELINE, "algorithm.loss_agg=seq-mean-token-mean", "env.train.auto_reset=false"],
        "algorithm.loss_agg is 'seq-mean-token-mean'; the lengths of all episodes must be known first",
    ),
    "a value head that is not there": (
        ["actor.model.model_type=vla", "actor.model.add_value_head=false", "actor.optim.value_lr=1e-3"],
        "actor.optim.value_lr is 0.001; the policy has no value head",
    ),
    "a warm-up of nothing": (
        ["actor.optim.critic_warmup_steps=3", "algorithm.value_coef=0"],
        "no value is trained: set algorithm.value_coef",
    ),
    "a warm-up that DeepSpeed cannot do": (
        ["actor.optim.critic_warmup_steps=3", "actor.training_backend=deepspeed"],
        "DeepSpeed updates all parameters",
    ),
    "a schedule that rises": (
        ["actor.optim.min_lr=1.0"],
        "actor.optim.min_lr is 1.0; it must not be above actor.optim.lr",
    ),
    "parts of episodes": (["algorithm.adv_type=grpo", "env.train.group_size=2"], "env.train.auto_reset is True"),
    "parts that are not equal": (["algorithm.rollout_parts=3"], "it must divide algorithm.rollout_steps (32)"),
    "more parts than transitions": (
        [*PIPELINE[:1], "algorithm.rollout_parts=512"],
        "it must divide algorithm.rollout_steps (32)",
    ),
    "parts without values": (["algorithm.rollout_parts=2", "algorithm.adv_type=raw"], "which only gae can cut"),
    "parts of episodes ahead": (
        ["algorithm.rollout_parts=2", "env.train.auto_reset=false", "algorithm.max_staleness=1"],
        "a step is an episode",
    ),
    "nothing to train on meanwhile": (
        PIPELINE[:1],
        "algorithm.rollout_parts is 1; runner.use_training_pipeline trains",
    ),
    "ahead and meanwhile": ([*PIPELINE, "algorithm.max_staleness=1"], "choose one of them"),
    "in turns and meanwhile": ([*PIPELINE, "actor.enable_offload=true"], "both are at work at once"),
    "what is left out is not known": ([*PIPELINE, "runner.on_nonfinite=skip"], "must be known first"),
    "weights from before": ([*PIPELINE, "algorithm.loss_type=decoupled_ppo"], "from before all updates"),
    "moments of all": ([*PIPELINE, "algorithm.normalize_advantages=batch"], "a part has 128 transitions"),
    "minibatches across parts": (
        [*PIPELINE, "env.train.num_envs=12", "actor.global_batch_size=128"],
        "it must divide that, or be a multiple",
    ),
    "moments of what is to come": ([*PIPELINE, "actor.global_batch_size=256"], "before its last advantages are known"),
    "how much is to come": (
        [*PIPELINE, "actor.global_batch_size=256", "algorithm.normalize_advantages=none", "env.train.auto_reset=false"],
        "how much of others trains is not known",
    ),
    "adapters of a small network": (["actor.lora.rank=4"], "actor.lora.rank is 4; adapters are for vla, pi0, openvla"),
    "dropout": (
        ["actor.model.model_type=vla", "actor.lora.rank=4", "actor.lora.dropout=0.1"],
        "actor.lora.dropout is for task types",
    ),
    "all weights in bfloat16": (["actor.model.model_type=vla", "actor.model.dtype=bfloat16"], "needs adapters"),
}


#: What actors that simulate and act themselves refuse.
ACTING = {
    "sharded weights": (
        "actor.training_backend=fsdp",
        "actor.training_backend is 'fsdp'; actors that act hold all weights",
    ),
    "ahead": (
        "algorithm.max_staleness=1",
        "algorithm.max_staleness is 1; actors that act do not train at the same time",
    ),
    "parts": ("algorithm.rollout_parts=2", "algorithm.rollout_parts is 2; actors that act play a step at once"),
    "stages": ("rollout.pipeline_stage_num=2", "rollout.pipeline_stage_num is 2"),
    "in turns": ("actor.enable_offload=true", "actor.enable_offload is True; actors that act use all of their memory"),
    "another's rewards": ("env.train.reward_model=runs/x", "env.train.reward_model is 'runs/x'"),
    "other simulators": ("env.train={env_type: gymnasium, env_id: CartPole-v1}", "no component 'rollout'"),
    "processes": (
        "env.train.simulators=2",
        "env.train.simulators is 2; actors that act simulate in their own process",
    ),
    "an unknown place": ("cluster.component_placement.critic=0", "no such component; components: actor, rollout, env"),
    "half of the groups": ("cluster.component_placement={actor: 0, env: 0}", "no component 'rollout'"),
}


@pytest.mark.parametrize("name", ACTING)
def test_what_actors_cannot_do_that_act_themselves_is_refused(name: str) -> None:
    override, says = ACTING[name]
    with pytest.raises(UserError) as caught:
        load_config(CONFIGS / "embodied" / "cartpole_tensors.yaml", [override])
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["ahead", "stages", "another's rewards", "processes"])
def test_off_policy_actors_that_act_themselves_refuse_it_too(name: str) -> None:
    override, says = ACTING[name]
    with pytest.raises(UserError) as caught:
        load_config(CONFIGS / "embodied" / "pendulum_sac_tensors.yaml", [override])
    assert says in str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    overrides, says = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "quickstart.yaml", overrides)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "embodied").glob("*.yaml")))
def test_the_configurations_are_sound(name: str) -> None:
    load_config(CONFIGS / "embodied" / f"{name}.yaml", [])
