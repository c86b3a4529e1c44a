"""What does not fit together in a policy's configuration is refused by key, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

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


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    overrides, says = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "quickstart.yaml", overrides)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "embodied").glob("*.yaml")))
def test_the_configurations_are_sound(name: str) -> None:
    load_config(CONFIGS / "embodied" / f"{name}.yaml", [])
