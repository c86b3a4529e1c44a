"""What RLinf calls things, in all kinds of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.cli.foreign.rules import NOTHING, Reading, Rows, Rule

LOSSES = {"actor_critic": "ppo", "actor": "ppo", "decoupled_actor_critic": "decoupled_ppo"}
ADVANTAGES = {"gae": "gae", "grpo": "grpo", "raw": "raw", "reinpp": "reinforce++"}
#: What the optimizer's settings are called in both.
OPTIM: Rows = [(key, key) for key in (
    "actor.optim.lr", "actor.optim.adam_beta1", "actor.optim.adam_beta2", "actor.optim.adam_eps", "actor.optim.clip_grad",
)]  # fmt: skip
DTYPES = {"32": "float32", "fp32": "float32", "bf16": "bfloat16", "16": "float16", "fp16": "float16"}


def choice(key: str, known: Mapping[str, Any], why: str = "") -> Rule:
    """A value by its name; another one stays as it is, for a part that is registered under it."""

    def rule(read: Reading) -> Any:
        value = read(key)
        if value is None:
            return NOTHING
        if str(value).lower() not in known:
            read.leave(key, why or f"rlhpc has no {value}; register one of that name, or choose another")
            return value
        return known[str(value).lower()]

    return rule
