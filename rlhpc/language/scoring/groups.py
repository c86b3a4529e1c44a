"""Which groups a configuration has beside actor and rollout, and what each computes. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from rlhpc.config.typed import plain, select
from rlhpc.language.model_config import FrozenModelConfig
from rlhpc.language.scoring.group import ScoringGroup

if TYPE_CHECKING:
    from rlhpc.config.sections import RunConfig
    from rlhpc.language.config import GrpoConfig, LanguageConfig

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
        found[CRITIC] = "rlhpc.language.roles.critic:CriticWorker"
    if AGENT in here:
        found[AGENT] = "rlhpc.language.roles.agent:AgentWorker"
    needed = raters(cfg)
    for name, group in known.items():
        if name in here or name in needed:
            worker = "RatingWorker" if rates(group.scorer) else "ScoringWorker"
            worker = "JudgeWorker" if group.scorer.lower() == "judge" else worker
            found[name] = f"rlhpc.language.roles.scoring:{worker}"
    if REFERENCE in found and cfg.reference.update_interval:
        found[REFERENCE] = "rlhpc.language.roles.reference:ReferenceWorker"
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
