"""The engine that a group has for itself: what it is built from, and its messages in the group's words. Nothing here imports
torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import OmegaConf

from rlhpc.config.typed import plain, typed
from rlhpc.language.config import LanguageConfig
from rlhpc.language.group_config import JudgeConfig, TeacherConfig
from rlhpc.language.scoring.group import ScoringGroup
from rlhpc.language.scoring.groups import BUILT_IN
from rlhpc.runtime.errors import ConfigError


def key_of(group: ScoringGroup, name: str) -> str:
    """What a message calls a key of a group with an engine."""
    if group.name in BUILT_IN:
        return f"{group.name}.{name}"
    return f"groups[{group.name}].{name}" if name.startswith("model") else f"groups[{group.name}].kwargs.{name}"


def engine_config(
    section: JudgeConfig | TeacherConfig,
    *,
    max_new_tokens: int = 1,
    temperature: float = 0.0,
    takes_turns: bool = False,
) -> LanguageConfig:
    """What a group's engine is built from. Engines read `rollout` and `actor.model`; these are the group's here, which gets no
    new weights.

    Args:
        section: The group's.
        max_new_tokens: Most tokens of a reply.
        temperature: Of the replies.
        takes_turns: Whether it gives its accelerator to other roles now and then.
    """
    model = section.model
    rollout = {
        "rollout_backend": section.rollout_backend, "max_new_tokens": max_new_tokens,
        "max_batch_size": section.max_batch_size, "max_model_len": section.max_model_len, "dtype": section.dtype,
        "gpu_memory_utilization": section.gpu_memory_utilization, "engine_kwargs": plain(section.engine_kwargs),
        "temperature": temperature, "top_p": 1.0, "top_k": -1, "max_turns": 1, "agent": None,
    }  # fmt: skip
    actor = {
        "model": {
            "model_path": model.model_path, "kwargs": {}, "dtype": model.dtype,
            "attn_implementation": model.attn_implementation, "trust_remote_code": model.trust_remote_code,
        },
        "offload_in_rollout": takes_turns,
    }  # fmt: skip
    return typed(LanguageConfig, OmegaConf.create({"rollout": rollout, "actor": actor}))


@contextmanager
def explained(group: ScoringGroup) -> Iterator[None]:
    """Has messages of an engine name the group's keys.

    Raises:
        ConfigError: That of the engine, in these words.
    """
    try:
        yield
    except ConfigError as error:
        own = re.sub(r"\bactor\.model\.(\w+)", lambda found: key_of(group, f"model.{found[1]}"), str(error))
        raise ConfigError(re.sub(r"\brollout\.(\w+)", lambda found: key_of(group, found[1]), own)) from error
