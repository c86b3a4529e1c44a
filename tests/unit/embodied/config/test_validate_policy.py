"""What does not fit together in a policy's configuration is refused by key, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
CHUNK = "actor.model.num_action_chunks=4"
BY_ACTION = "algorithm.reward_type=action_level"
WRONG = {
    "no chunk": (["actor.model.num_action_chunks=0"], "actor.model.num_action_chunks is 0; it must be greater than 0"),
    "misspelt": (["algorithm.logprob_type=tokenlevel"], "did you mean 'token_level'"),
    "rewards finer than log-probs": ([CHUNK, BY_ACTION], "algorithm.logprob_type is 'chunk_level'"),
    "no values of actions": ([CHUNK, BY_ACTION, "algorithm.logprob_type=token_level"], "value_per_action is False"),
    "values of actions alone": ([CHUNK, "actor.model.value_per_action=true"], "it is for algorithm.reward_type"),
    "a group of one": (["algorithm.adv_type=grpo"], "env.train.group_size is 1"),
    "parts of episodes": (["algorithm.adv_type=grpo", "env.train.group_size=2"], "env.train.auto_reset is True"),
    "adapters of a small network": (["actor.lora.rank=4"], "actor.lora.rank is 4; adapters are for vla, pi0, openvla"),
    "dropout": (
        ["actor.model.model_type=vla", "actor.lora.rank=4", "actor.lora.dropout=0.1"],
        "actor.lora.dropout is for kinds of run",
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
