"""Scoring groups of a configuration, their worker classes, and the configuration of their engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from omegaconf import OmegaConf

from rlhpc.config.typed import plain, select, typed
from rlhpc.language.config.models import FrozenModelConfig
from rlhpc.language.config.run import LanguageConfig
from rlhpc.language.config.scoring import JudgeConfig, TeacherConfig
from rlhpc.language.scoring.registry import ScoringGroup
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.config.sections import RunConfig
    from rlhpc.language.config.run import GrpoConfig

#: Scorers of the groups that have a configuration section.
BUILT_IN: Mapping[str, str] = {"reference": "logprobs", "teacher": "logprobs", "reward": "classifier", "judge": "judge"}
CRITIC, JUDGE, REFERENCE, TEACHER = "critic", "judge", "reference", "teacher"
#: Group that runs agents if agents do not run in the rollout ranks.
AGENT = "agent"
#: Scorer of a teacher with an engine.
ENGINE = "engine_logprobs"
#: Scorer of several teachers (`teacher.by_task`), and the column with the index of each response's teacher.
ROUTED, TEACHER_INDEX = "routed_logprobs", "teacher_index"
#: Name of `teacher.model` among several teachers.
DEFAULT_TEACHER = "default"
#: Names that entries of `groups` may not have.
RESERVED_NAMES = ("actor", "rollout", CRITIC, AGENT, *BUILT_IN)


def placed_groups(cfg: RunConfig) -> list[str]:
    """Returns the components of `cluster.component_placement`."""
    return [
        name.strip() for component_names in cfg.cluster.component_placement for name in str(component_names).split(",")
    ]


def scoring_groups(cfg: GrpoConfig) -> dict[str, ScoringGroup]:
    """Returns all scoring groups of a configuration by name: groups with a configuration section, then the entries of
    `groups`.
    """
    groups = {
        "reference": ScoringGroup(
            "reference", BUILT_IN["reference"], cfg.actor.model, cfg.reference.max_tokens_per_micro_batch
        ),
        TEACHER: _teacher(cfg),
        "reward": ScoringGroup(
            "reward", BUILT_IN["reward"], cfg.reward.model, cfg.reward.model.max_tokens_per_micro_batch
        ),
        JUDGE: ScoringGroup(JUDGE, BUILT_IN[JUDGE], cfg.judge.model, cfg.judge.max_prompt_tokens),
    }
    for section in cfg.groups:
        groups[section.name] = ScoringGroup(
            section.name, section.scorer, section.model, section.max_tokens_per_micro_batch, plain(section.kwargs)
        )
    return groups


def group_models(cfg: GrpoConfig) -> dict[str, FrozenModelConfig]:
    """Returns the models of the groups that accept built-in models, by configuration section."""
    models: dict[str, FrozenModelConfig] = {
        "critic.model": cfg.critic.model,
        "teacher.model": cfg.teacher.model,
        "judge.model": cfg.judge.model,
    }
    models |= {f"teacher.by_task[{index}].model": teacher.model for index, teacher in enumerate(cfg.teacher.by_task)}
    return {**models, **{f"groups[{index}].model": group.model for index, group in enumerate(cfg.groups)}}


def _teacher(cfg: GrpoConfig) -> ScoringGroup:
    model, tokens, options = cfg.teacher.model, cfg.teacher.max_tokens_per_micro_batch, cfg.algorithm.distillation
    kwargs = {"k": options.topk} if options.mode == "topk" else {}
    if cfg.teacher.by_task:
        return ScoringGroup(TEACHER, ROUTED, model, tokens, kwargs)
    scorer = "top_logprobs" if kwargs else BUILT_IN[TEACHER]
    return ScoringGroup(TEACHER, ENGINE if cfg.teacher.rollout_backend else scorer, model, tokens, kwargs)


def teachers_of(cfg: GrpoConfig) -> dict[str, FrozenModelConfig]:
    """Returns the models of all teachers by name, in the order of their indices: `teacher.model`, then `teacher.by_task`."""
    return {DEFAULT_TEACHER: cfg.teacher.model, **{teacher.name: teacher.model for teacher in cfg.teacher.by_task}}


def teacher_index(cfg: GrpoConfig, task: str) -> int:
    """Returns the index of the teacher from which responses to prompts of a task learn (`teachers_of`)."""
    return next((index for index, teacher in enumerate(cfg.teacher.by_task, 1) if task in teacher.tasks), 0)


def group_worker_classes(cfg: GrpoConfig) -> dict[str, str]:
    """Returns the worker classes, as `module:Class`, of the groups that are placed or that the run requires, except actor and
    rollout.
    """
    from rlhpc.language.scoring.registry import rates

    groups, placed_names = scoring_groups(cfg), placed_groups(cfg)
    worker_classes: dict[str, str] = {}
    if CRITIC in placed_names or needs_critic(cfg):
        worker_classes[CRITIC] = "rlhpc.language.workers.critic:CriticWorker"
    if AGENT in placed_names:
        worker_classes[AGENT] = "rlhpc.language.workers.agent:AgentWorker"
    rater_names = raters(cfg)
    for name, group in groups.items():
        if name in placed_names or name in rater_names:
            worker_class = "RatingWorker" if rates(group.scorer) else "ScoringWorker"
            worker_class = "JudgeWorker" if group.scorer == "judge" else worker_class
            worker_classes[name] = f"rlhpc.language.workers.scoring:{worker_class}"
    if REFERENCE in worker_classes and cfg.reference.update_interval:
        worker_classes[REFERENCE] = "rlhpc.language.workers.scoring:ReferenceWorker"
    return worker_classes


def learning_groups(cfg: GrpoConfig) -> frozenset[str]:
    """Returns the groups with weights that change during training and are saved in checkpoints, except actor and rollout."""
    following_groups = {REFERENCE} if cfg.reference.update_interval else set()
    return frozenset(group_worker_classes(cfg)) & ({CRITIC} | following_groups)


def needs_critic(cfg: GrpoConfig) -> bool:
    """Returns whether the configured algorithm is built in and requires the group `critic`."""
    return needs_values(cfg) and not cfg.actor.model.value_head


def needs_values(cfg: GrpoConfig) -> bool:
    """Returns whether the configured algorithm is built in and requires values of states."""
    has_reward = distils(cfg) and cfg.algorithm.distillation.task_reward_coef > 0
    return (has_reward or cfg.algorithm.name == "policy_gradient") and cfg.algorithm.adv_type == "gae"


def distils(cfg: GrpoConfig) -> bool:
    """Returns whether the built-in distillation algorithm is configured."""
    return cfg.algorithm.name == "distillation"


def rating_names(cfg: LanguageConfig) -> list[str]:
    """Returns the names of the reward terms that groups compute, in order; [] for a task type without scoring groups."""
    return [] if select(cfg, "groups") is None else raters(with_groups(cfg))


def raters(cfg: GrpoConfig) -> list[str]:
    """Returns the names of the reward terms that groups compute, in order."""
    group_names = scoring_groups(cfg)
    return [term.name for term in cfg.reward.terms if term.name in group_names]


def process_groups(cfg: GrpoConfig) -> list[str]:
    """Returns the groups that reward tokens within an answer, in the order of `reward.process_terms`."""
    return [term.name for term in cfg.reward.process_terms]


def with_groups(cfg: LanguageConfig) -> GrpoConfig:
    """Casts a configuration to the type of configurations with groups."""
    return cast("GrpoConfig", cfg)


def key_of(group: ScoringGroup, name: str) -> str:
    """Returns the configuration key of an option of a group with an engine, for messages."""
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
    """Builds the configuration of a group's engine. Engines read the sections `rollout` and `actor.model`, which here hold the
    settings of the group.

    Args:
        section: Section of the group.
        max_new_tokens: Maximum number of tokens of a reply.
        temperature: Sampling temperature of the replies.
        takes_turns: Whether the engine is colocated with other groups and offloaded while these compute.
    """
    model = section.model
    rollout_section = {
        "rollout_backend": section.rollout_backend,
        "max_new_tokens": max_new_tokens,
        "max_batch_size": section.max_batch_size,
        "max_model_len": section.max_model_len,
        "dtype": section.dtype,
        "gpu_memory_utilization": section.gpu_memory_utilization,
        "engine_kwargs": plain(section.engine_kwargs),
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_turns": 1,
        "agent": None,
    }
    actor = {
        "model": {
            "model_path": model.model_path,
            "kwargs": {},
            "dtype": model.dtype,
            "attn_implementation": model.attn_implementation,
            "trust_remote_code": model.trust_remote_code,
        },
        "offload_in_rollout": takes_turns,
    }
    return typed(LanguageConfig, OmegaConf.create({"rollout": rollout_section, "actor": actor}))


@contextmanager
def explain_engine_errors(group: ScoringGroup) -> Iterator[None]:
    """Replaces the configuration keys in an engine's error messages by the keys of the group.

    Raises:
        ConfigError: The engine's error, with the group's keys.
    """
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"\bactor\.model\.(\w+)", lambda key_match: key_of(group, f"model.{key_match[1]}"), str(error))
        raise ConfigError(
            re.sub(r"\brollout\.(\w+)", lambda key_match: key_of(group, key_match[1]), message)
        ) from error
