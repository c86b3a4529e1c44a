"""What RLinf calls things, in all kinds of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.cli.foreign.rules import NOTHING, Reading, Rows, Rule

LOSSES = {"actor_critic": "ppo", "actor": "ppo", "decoupled_actor_critic": "decoupled_ppo"}
ADVANTAGES = {"gae": "gae", "grpo": "grpo", "raw": "raw", "reinpp": "reinforce++"}
DTYPES = {"32": "float32", "fp32": "float32", "bf16": "bfloat16", "16": "float16", "fp16": "float16"}


def optimizer_rows(group: str) -> Rows:
    """Settings of a group's optimizer that have the same name in both."""
    names = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    return [(key, key) for key in (f"{group}.optim.{name}" for name in names)]


def adapter_rows() -> Rows:
    """Adapters: RLinf's `lora_alpha` is their rank (models/__init__.py), so that they are not scaled."""

    def rank(read: Reading) -> Any:
        return int(read("actor.model.lora_rank", 32)) if read("actor.model.is_lora", False) else NOTHING

    return [("actor.lora.rank", rank), ("actor.lora.alpha", rank)]


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
