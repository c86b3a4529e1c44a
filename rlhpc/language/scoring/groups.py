"""Which groups a configuration has beside actor and rollout, and what each computes. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from rlhpc.config.typed import plain, select
from rlhpc.language.config.models import FrozenModelConfig
from rlhpc.language.scoring.registry import ScoringGroup

if TYPE_CHECKING:
    from rlhpc.config.sections import RunConfig
    from rlhpc.language.config.run import GrpoConfig, LanguageConfig
import re
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import OmegaConf

from rlhpc.config.typed import typed
from rlhpc.language.config.run import LanguageConfig
from rlhpc.language.config.scoring import JudgeConfig, TeacherConfig
from rlhpc.runtime.errors import ConfigError

#: Groups with a section of their own, and the scorer that runs on their ranks.
BUILT_IN: Mapping[str, str] = {"reference": "logprobs", "teacher": "logprobs", "reward": "classifier", "judge": "judge"}
CRITIC, JUDGE, REFERENCE, TEACHER = "critic", "judge", "reference", "teacher"
#: The group that runs agents, where these are not beside the engines.
AGENT = "agent"
#: The scorer of a teacher with an engine.
ENGINE = "engine_logprobs"
#: Names that no group of one's own may have.
TAKEN = ("actor", "rollout", CRITIC, AGENT, *BUILT_IN)


def placed(cfg: RunConfig) -> list[str]:
    """The components of `cluster.component_placement`."""
    return [name.strip() for names in cfg.cluster.component_placement for name in str(names).split(",")]


def scoring_groups(cfg: GrpoConfig) -> dict[str, ScoringGroup]:
    """All scoring groups that the configuration could have, by name: those with a section of their own, then `groups`."""
    found = {
        "reference": ScoringGroup(
            "reference", BUILT_IN["reference"], cfg.actor.model, cfg.reference.max_tokens_per_micro_batch
        ),
        TEACHER: _teacher(cfg),
        "reward": ScoringGroup(
            "reward", BUILT_IN["reward"], cfg.reward.model, cfg.reward.model.max_tokens_per_micro_batch
        ),
        JUDGE: ScoringGroup(JUDGE, BUILT_IN[JUDGE], cfg.judge.model, cfg.judge.max_prompt_tokens),
    }
    for own in cfg.groups:
        found[own.name] = ScoringGroup(
            own.name, own.scorer, own.model, own.max_tokens_per_micro_batch, plain(own.kwargs)
        )
    return found


def group_models(cfg: GrpoConfig) -> dict[str, FrozenModelConfig]:
    """The groups' models that may be built in, by their sections."""
    found: dict[str, FrozenModelConfig] = {
        "critic.model": cfg.critic.model, "teacher.model": cfg.teacher.model, "judge.model": cfg.judge.model,
    }  # fmt: skip
    return {**found, **{f"groups[{index}].model": group.model for index, group in enumerate(cfg.groups)}}


def _teacher(cfg: GrpoConfig) -> ScoringGroup:
    model, tokens, options = cfg.teacher.model, cfg.teacher.max_tokens_per_micro_batch, cfg.algorithm.distillation
    kwargs = {"k": options.topk} if options.mode == "topk" else {}
    scorer = "top_logprobs" if kwargs else BUILT_IN[TEACHER]
    return ScoringGroup(TEACHER, ENGINE if cfg.teacher.rollout_backend else scorer, model, tokens, kwargs)


def group_roles(cfg: GrpoConfig) -> dict[str, str]:
    """Worker classes, as `module:Class`, of the groups beside actor and rollout that a run has: those that are placed, and
    those that it cannot do without."""
    from rlhpc.language.scoring.registry import rates

    known, here = scoring_groups(cfg), placed(cfg)
    found: dict[str, str] = {}
    if CRITIC in here or needs_critic(cfg):
        found[CRITIC] = "rlhpc.language.workers.critic:CriticWorker"
    if AGENT in here:
        found[AGENT] = "rlhpc.language.workers.agent:AgentWorker"
    needed = raters(cfg)
    for name, group in known.items():
        if name in here or name in needed:
            worker = "RatingWorker" if rates(group.scorer) else "ScoringWorker"
            worker = "JudgeWorker" if group.scorer.lower() == "judge" else worker
            found[name] = f"rlhpc.language.workers.scoring:{worker}"
    if REFERENCE in found and cfg.reference.update_interval:
        found[REFERENCE] = "rlhpc.language.workers.scoring:ReferenceWorker"
    return found


def learning_groups(cfg: GrpoConfig) -> frozenset[str]:
    """Names of the groups beside actor and rollout whose weights change from step to step, and are in checkpoints."""
    follows = {REFERENCE} if cfg.reference.update_interval else set()
    return frozenset(group_roles(cfg)) & ({CRITIC} | follows)


def needs_critic(cfg: GrpoConfig) -> bool:
    """Whether a built-in algorithm is told to ask a group of that name."""
    return needs_values(cfg) and not cfg.actor.model.value_head


def needs_values(cfg: GrpoConfig) -> bool:
    """Whether a built-in algorithm is told to ask what states are worth."""
    rewarded = distils(cfg) and cfg.algorithm.distillation.task_reward_coef > 0
    return (rewarded or cfg.algorithm.name.lower() == "policy_gradient") and cfg.algorithm.adv_type.lower() == "gae"


def distils(cfg: GrpoConfig) -> bool:
    """Whether the model learns from a teacher by the built-in algorithm."""
    return cfg.algorithm.name.lower() == "distillation"


def rating_names(cfg: LanguageConfig) -> list[str]:
    """The terms of the reward that groups give, in their order; none in a kind of run that has no such groups."""
    return [] if select(cfg, "groups") is None else raters(with_groups(cfg))


def raters(cfg: GrpoConfig) -> list[str]:
    """The terms of the reward that groups give, in their order."""
    names = scoring_groups(cfg)
    return [term.name for term in cfg.reward.terms if term.name in names]


def process_groups(cfg: GrpoConfig) -> list[str]:
    """The groups that reward tokens on the way, in the order of `reward.process_terms`."""
    return [term.name for term in cfg.reward.process_terms]


def with_groups(cfg: LanguageConfig) -> GrpoConfig:
    """The configuration, of which is known that it has groups, as what it is."""
    return cast("GrpoConfig", cfg)


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
