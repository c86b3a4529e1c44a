"""Configuration checks of scoring groups, judges and critic."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc.config.constraints import (
    Fail,
    check_choice,
    check_choices,
    check_name,
    check_ranges,
    check_rules,
    normalize_words,
)
from rlhpc.config.schema import keys_of
from rlhpc.config.typed import default_section, mapping, plain, typed
from rlhpc.language.config.scoring import JudgeConfig
from rlhpc.language.engines.registry import ENGINES
from rlhpc.language.scoring.groups import (
    AGENT,
    BUILT_IN,
    CRITIC,
    DEFAULT_TEACHER,
    ENGINE,
    JUDGE,
    RESERVED_NAMES,
    ROUTED,
    TEACHER,
    distils,
    explain_engine_errors,
    group_models,
    group_worker_classes,
    key_of,
    needs_critic,
    placed_groups,
    process_groups,
    raters,
    scoring_groups,
    teachers_of,
)
from rlhpc.language.scoring.registry import ScoringGroup, check_scorer, rates
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names

if TYPE_CHECKING:
    from rlhpc.language.config.models import PretrainedConfig
    from rlhpc.language.config.run import GrpoConfig


def is_judge(group: ScoringGroup) -> bool:
    """Returns whether a group rates answers with an LLM judge."""
    return group.scorer == "judge"


def section_of(cfg: GrpoConfig, group: ScoringGroup) -> JudgeConfig:
    """Returns a judge's section: the section `judge`, or for an entry of `groups` a section with the entry's `kwargs` and
    model.

    Raises:
        ConfigError: A key is unknown, or a value has a different type or is out of range.
    """
    if group.name == JUDGE:
        return cfg.judge
    kwargs_key, kwargs = f"groups[{group.name}].kwargs", dict(group.kwargs)
    if "model" in kwargs:
        raise ConfigError(f"{kwargs_key}: a judge's model stands in groups[{group.name}].model")
    key_names = sorted(set(JudgeConfig.__dataclass_fields__) - {"model"})
    for name in kwargs:
        check_name(
            name, name, key_names, lambda key, rule: ConfigError(f"{kwargs_key}: a judge has no key {key!r}; {rule}")
        )
    try:
        merged_section = mapping(OmegaConf.merge(default_section(JudgeConfig), kwargs, {"model": plain(group.model)}))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{kwargs_key}: {str(error).strip().splitlines()[0]}") from None
    section = typed(JudgeConfig, merged_section)
    judge_keys = keys_of(JudgeConfig)
    normalize_words(merged_section, judge_keys)

    def make_error(name: str, rule: str) -> ConfigError:
        return ConfigError(f"{kwargs_key}.{name} is {merged_section[name]!r}; {rule}")

    check_ranges(merged_section, judge_keys, make_error)
    check_choices(merged_section, judge_keys, make_error)
    return section


def judges(cfg: GrpoConfig) -> dict[str, ScoringGroup]:
    """Returns the judges in the terms of the reward, by name."""
    groups = scoring_groups(cfg)
    return {name: groups[name] for name in raters(cfg) if is_judge(groups[name])}


def check_judges(cfg: GrpoConfig, fail: Fail) -> None:
    """Refuses invalid rubrics, scales and engines of judges, and comparisons of fewer than two answers.

    Raises:
        ConfigError: The first rule that is broken.
    """
    judges_in_reward = judges(cfg)
    for group in (group for group in scoring_groups(cfg).values() if is_judge(group)):
        section = section_of(cfg, group)

        def refuse(name: str, rule: str, *, group: ScoringGroup = group, section: JudgeConfig = section) -> ConfigError:
            if group.name == JUDGE:
                return fail(f"judge.{name}", rule)
            return ConfigError(f"{key_of(group, name)} is {plain(getattr(section, name))!r}; {rule}")

        backend = section.rollout_backend
        if ":" not in backend:
            check_choice("rollout_backend", backend, ENGINES.choices(), refuse)
        if section.rubric is not None and "{response}" not in section.rubric:
            raise refuse("rubric", "it needs {response}, where the answer to be judged is put")
        scale = list(section.scale)
        if len(scale) != 2 or not all(map(math.isfinite, scale)) or scale[0] >= scale[1]:
            raise refuse("scale", "two numbers are needed, the lowest and the highest grade, such as [1, 10]")
        if group.name in judges_in_reward and section.mode == "compare":
            _check_comparisons(cfg, section, refuse)


def _check_comparisons(cfg: GrpoConfig, section: JudgeConfig, refuse: Fail) -> None:
    """Checks that a comparing judge gets at least two answers per problem."""
    rules = (
        (
            cfg.algorithm.group_size < 2,
            "mode",
            "algorithm.group_size is 1: there is nothing to compare; take grade",
        ),
        *(
            (
                suite.samples < 2,
                "mode",
                f"suite {suite.name!r} of data.eval has samples {suite.samples}: there is nothing to compare; "
                "set its samples to 2 or more (and its temperature above 0), or take grade",
            )
            for suite in cfg.data.eval
        ),
        (section.max_requests < 2, "max_requests", "a comparison takes two"),
    )
    check_rules(rules, refuse)


#: Source of values from the actor's value head, which is no group: `rlhpc.language.algorithms.base.VALUE_HEAD`.
VALUE_HEAD_SOURCE = "value_head"


def check_group_sections(cfg: GrpoConfig, fail: Fail, column_sources: frozenset[str]) -> None:
    """Checks names, reward terms and placement of the scoring groups. Imports only scorers that the configuration names.

    Args:
        cfg: Configuration of the run.
        fail: Builds the error of a key.
        column_sources: Groups whose columns the algorithm requires.

    Raises:
        ConfigError: The first rule that is broken.
    """
    group_names = [group.name for group in cfg.groups]
    for index, name in enumerate(group_names):
        if name in RESERVED_NAMES or group_names.index(name) < index:
            raise ConfigError(f"groups[{index}].name is {name!r}, which is taken: give the group another name")
    groups = scoring_groups(cfg)
    for name in group_names:
        rates(groups[name].scorer)
        check_scorer(groups[name])
        if groups[name].scorer in (ENGINE, ROUTED):
            key = "rollout_backend" if groups[name].scorer == ENGINE else "by_task"
            raise ConfigError(
                f"groups[{name}].scorer is {groups[name].scorer!r}, which is the teacher's: see teacher.{key}"
            )
    _check_task_teachers(cfg, fail)
    _check_teacher_engine(cfg, fail)
    for key, model in group_models(cfg).items():
        if model.kwargs and not str(model.model_path).startswith("builtin:"):
            raise ConfigError(
                f"{key}.kwargs: they are for builtin:tiny; what {key}.model_path={model.model_path} is, its config.json says"
            )
    check_judges(cfg, fail)
    term_names = [term.name for term in cfg.reward.terms]
    for index, term in enumerate(cfg.reward.terms):
        if term.name in groups and term.kwargs:
            raise ConfigError(
                f"reward.terms[{index}].kwargs: {term.name!r} is a group, whose options do not stand here, but in its section"
            )
    for name in raters(cfg):
        rules = (
            (
                not rates(groups[name].scorer),
                "reward.terms",
                f"the group {name!r} says something of tokens, and does not rate answers: it can be one of "
                "reward.process_terms",
            ),
            (term_names.count(name) > 1, "reward.terms", f"the group {name!r} is named twice"),
        )
        check_rules(rules, fail)
    _check_process_terms(cfg, fail)
    _check_placement(cfg, fail, column_sources)


def _check_process_terms(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks that each process term names a placed group that scores tokens, and that the algorithm uses the scores."""
    groups, term_names = scoring_groups(cfg), process_groups(cfg)
    for index, name in enumerate(term_names):
        check_name("reward.process_terms", name, groups, fail)
        rules = {
            "rates whole answers: name it in reward.terms, or give it the scorer process": rates(groups[name].scorer),
            "is named twice": name in term_names[:index],
            f"has no place: set cluster.component_placement.{name}": name not in placed_groups(cfg),
        }
        check_rules(
            [(is_broken, "reward.process_terms", f"the group {name!r} {rule}") for rule, is_broken in rules.items()],
            fail,
        )
    if term_names and distils(cfg) and not cfg.algorithm.distillation.task_reward_coef:
        raise fail("reward.process_terms", "the teacher alone is followed: set algorithm.distillation.task_reward_coef")


#: Setting with which the built-in algorithms use each group.
_USER_HINTS = {
    "reference": "set algorithm.kl_coef",
    CRITIC: "set algorithm.adv_type=gae",
    "teacher": "set algorithm.name=distillation",
}


def _check_placement(cfg: GrpoConfig, fail: Fail, column_sources: frozenset[str]) -> None:
    """Checks that each required group is placed, and that each placed group is required."""
    placed_names, groups, rater_names = placed_groups(cfg), scoring_groups(cfg), raters(cfg)
    value_head = cfg.actor.model.value_head
    rules = (
        *(
            (
                name not in placed_names,
                "reward.terms",
                f"the group {name!r} has no place: set cluster.component_placement.{name}",
            )
            for name in rater_names
        ),
        (
            needs_critic(cfg) and CRITIC not in placed_names,
            "algorithm.adv_type",
            "gae needs a critic: give it a place with cluster.component_placement.critic, set actor.model.value_head, or "
            "choose grpo, rloo, …",
        ),
        (
            value_head and CRITIC in placed_names,
            "actor.model.value_head",
            "there is a group critic already: set it to false, or leave that out",
        ),
        (
            value_head and VALUE_HEAD_SOURCE not in column_sources,
            "actor.model.value_head",
            "nothing asks for values: set algorithm.adv_type=gae, or false",
        ),
    )
    check_rules(rules, fail)
    if distils(cfg):
        _check_distillation(cfg, fail)
    if cfg.reference.update_interval and "reference" not in placed_names:
        raise fail(
            "reference.update_interval",
            "the actor keeps the policy from before training: give the reference a place with "
            "cluster.component_placement.reference, or set 0",
        )
    required_groups = column_sources - {"rollout", "actor", VALUE_HEAD_SOURCE}
    for name in placed_names:
        is_rater = name in groups and rates(groups[name].scorer)
        if is_rater and name not in rater_names:
            raise fail("cluster.component_placement", f"no term of reward.terms is {name!r}: add one, or leave it out")
        if not is_rater and (name in groups or name == CRITIC) and name not in required_groups:
            hint = _USER_HINTS.get(name, "choose an algorithm.name with such a column")
            raise fail("cluster.component_placement", f"nothing asks the group {name!r}: {hint}, or leave it out")
    for name in required_groups - {"reference"} - {*placed_names}:
        raise fail(
            "cluster.component_placement",
            f"algorithm.name={cfg.algorithm.name} asks a group {name!r}: give it a place",
        )
    for name in {*placed_names} & {*BUILT_IN} - {"reference"}:
        if not groups[name].model.model_path:
            raise ConfigError(
                f"{groups[name].model_section}.model_path is not set, but the group {name!r} has a place: name its model"
            )


def _check_distillation(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks the teacher and the mode of distillation."""
    options = cfg.algorithm.distillation
    if not cfg.teacher.model.model_path:
        raise ConfigError(
            "teacher.model.model_path is not set, but algorithm.name=distillation learns from it: name a model with the "
            "vocabulary of actor.model"
        )
    rules = (
        (
            options.mode == "full" and "teacher" in placed_groups(cfg),
            "algorithm.distillation.mode",
            "whole distributions are too much to send: leave the teacher out of cluster.component_placement, which puts it on "
            "the actor's ranks, or choose topk",
        ),
        (
            options.mode == "sampled" and options.beta != 1,
            "algorithm.distillation.beta",
            "mode sampled follows the gradient of the reverse KL: set it to 1, or choose mode topk or full",
        ),
    )
    check_rules(rules, fail)


def _check_task_teachers(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks names, tasks and models of several teachers."""
    names, owners = [DEFAULT_TEACHER], dict[str, str]()
    for index, teacher in enumerate(cfg.teacher.by_task):
        key = f"teacher.by_task[{index}]"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", teacher.name):
            raise ConfigError(
                f"{key}.name is {teacher.name!r}; it is part of metrics' names: use letters, digits, '.', '_' and '-'"
            )
        if teacher.name in names:
            raise ConfigError(f"{key}.name is {teacher.name!r}, which is taken: give the teacher another name")
        if not teacher.tasks:
            raise ConfigError(f"{key}.tasks is empty: name the tasks that are learnt from this teacher")
        if not teacher.model.model_path:
            raise ConfigError(f"{key}.model.model_path is not set: name a model with the vocabulary of actor.model")
        for task in teacher.tasks:
            if task in owners:
                raise ConfigError(f"{key}.tasks has {task!r}, which is learnt from {owners[task]!r}: name it once")
            owners[task] = teacher.name
        names.append(teacher.name)
    rules = (
        (
            bool(cfg.teacher.by_task) and not distils(cfg),
            "teacher.by_task",
            "only algorithm.name=distillation gives each response its teacher: choose that, or leave it empty",
        ),
        (
            bool(cfg.teacher.by_task) and cfg.teacher.rollout_backend is not None,
            "teacher.rollout_backend",
            "an engine has one model, and teacher.by_task has others: set null",
        ),
    )
    check_rules(rules, fail)


def check_task_levels(cfg: GrpoConfig, levels: Collection[str]) -> None:
    """Checks that the training prompts have each task of `teacher.by_task`.

    Args:
        cfg: The configuration.
        levels: Levels of all training prompts.

    Raises:
        ConfigError: No prompt has a task; the message lists the tasks of the prompts.
    """
    for index, teacher in enumerate(cfg.teacher.by_task):
        for task in teacher.tasks:
            if task not in levels:
                level_names = format_names((repr(level) for level in sorted(levels) if level), limit=10)
                observed_text = level_names or "none: set data.train.level_key"
                raise ConfigError(
                    f"teacher.by_task[{index}].tasks has {task!r}, which no prompt of data.train has; their tasks: "
                    f"{observed_text}"
                )


def _check_teacher_engine(cfg: GrpoConfig, fail: Fail) -> None:
    """Checks that the teacher's engine is placed and supports the mode of distillation and the longest sequence."""
    backend, max_length = cfg.teacher.rollout_backend, cfg.teacher.max_model_len
    if backend is None:
        return
    num_tokens, reason = _find_max_sequence_tokens(cfg)
    rules = (
        (
            distils(cfg) and cfg.algorithm.distillation.mode == "full",
            "algorithm.distillation.mode",
            f"an engine (teacher.rollout_backend={backend}) does not tell whole distributions: choose topk or sampled, or set "
            "teacher.rollout_backend=null and give the teacher no place of its own",
        ),
        (
            TEACHER not in placed_groups(cfg),
            "teacher.rollout_backend",
            "an engine needs ranks of its own: set cluster.component_placement.teacher, or null for one beside the model",
        ),
        (
            max_length is not None and max_length < num_tokens,
            "teacher.max_model_len",
            f"a sequence may have {reason} tokens: raise it, or set null",
        ),
    )
    check_rules(rules, fail)


def _find_max_sequence_tokens(cfg: GrpoConfig) -> tuple[int, str]:
    """Returns the largest number of tokens of a sequence, and the formula of that number for messages."""
    prompt, response, engine = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens, cfg.rollout.max_model_len
    if engine is not None and engine < prompt + response:
        return engine, f"rollout.max_model_len({engine})"
    return (
        prompt + response,
        f"data.max_prompt_tokens({prompt}) + rollout.max_new_tokens({response}) = {prompt + response}",
    )


def check_groups(cfg: GrpoConfig, ranks: Mapping[str, int]) -> None:
    """Checks the models of the groups without loading weights.

    Raises:
        ConfigError: A model is unusable; the message names its key.
    """
    from rlhpc.language.data import load_tokenizer
    from rlhpc.language.engines.registry import ENGINES

    worker_classes, groups = group_worker_classes(cfg), scoring_groups(cfg)
    for name in (n for n in worker_classes if n in ranks and n != AGENT):
        if name != CRITIC and groups[name].scorer in ("classifier", "process"):
            from rlhpc.language.scoring.reward_models import require_classifier

            require_classifier(groups[name])
        model = cfg.critic.model if name == CRITIC else groups[name].model
        if model.model_path:
            section = "critic.model" if name == CRITIC else groups[name].model_section
            load_tokenizer(model.model_path, model.trust_remote_code, key=f"{section}.model_path")
        if name != CRITIC and groups[name].scorer == "process":
            require_same_vocabulary(cfg, groups[name].model, groups[name].model_section)
    if CRITIC in ranks and cfg.critic.training_backend == "deepspeed":
        from rlhpc.language.models.loading import compute_dtype
        from rlhpc.training.deepspeed_config import deepspeed_config

        deepspeed_config(cfg.critic, compute_dtype(cfg.critic.model, "cpu", "critic.model"))
    if TEACHER in ranks or distils(cfg):
        require_same_vocabulary(cfg, cfg.teacher.model, "teacher.model")
        for index, teacher in enumerate(cfg.teacher.by_task):
            require_same_vocabulary(cfg, teacher.model, f"teacher.by_task[{index}].model")
    if TEACHER in ranks and cfg.teacher.rollout_backend:
        _check_context(cfg, groups[TEACHER])
    _check_vision(cfg, ranks)
    for group in judges(cfg).values():
        with explain_engine_errors(group):
            ENGINES.find(section_of(cfg, group).rollout_backend)


def _check_vision(cfg: GrpoConfig, ranks: Mapping[str, int]) -> None:
    """Refuses text-only models in groups that read the conversations of a policy with image input."""
    from rlhpc.language.data.images import has_vision
    from rlhpc.language.hugging_face import load_model_config

    def reads_images(model: PretrainedConfig) -> bool:
        return has_vision(load_model_config(str(model.model_path), model.trust_remote_code))

    if not reads_images(cfg.actor.model):
        return
    path, groups = cfg.actor.model.model_path, scoring_groups(cfg)
    if CRITIC in ranks:
        raise ConfigError(
            f"cluster.component_placement.critic: the model in {path} looks at pictures, and critics read text alone; set "
            "actor.model.value_head=true in its place"
        )
    reader_groups = [name for name in groups if name in ranks and groups[name].scorer == "process"]
    are_teachers_blind = distils(cfg) and not all(map(reads_images, teachers_of(cfg).values()))
    for name in reader_groups + [TEACHER] * are_teachers_blind:
        raise ConfigError(
            f"{groups[name].model_section}.model_path={groups[name].model.model_path}: it reads text alone, and is to read "
            f"what the model in {path} has read, which looks at pictures; take one that does, too, or leave the "
            f"group {name!r} out"
        )


def _check_context(cfg: GrpoConfig, teacher: ScoringGroup) -> None:
    """Refuses a teacher with a context that is too short for the longest sequence and the additional token that the teacher's
    engine samples.
    """
    from rlhpc.language.hugging_face import load_model_config

    model = cfg.teacher.model
    with explain_engine_errors(teacher):
        model_config = load_model_config(str(model.model_path), model.trust_remote_code)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    num_tokens, reason = _find_max_sequence_tokens(cfg)
    if context is not None and num_tokens + 1 > context:
        raise ConfigError(
            f"teacher.model.model_path={model.model_path} has a context of {context} tokens; a sequence may have {reason}, "
            "and teacher.rollout_backend=vllm needs room for one more: take a teacher with a longer context, lower "
            "data.max_prompt_tokens or rollout.max_new_tokens, or set teacher.rollout_backend=null"
        )


def require_same_vocabulary(cfg: GrpoConfig, model: PretrainedConfig, section: str) -> None:
    """Refuses a model that scores the actor's tokens but has a different vocabulary than the actor.

    Raises:
        ConfigError: The vocabularies differ; the message names the first difference.
    """
    from rlhpc.language.data import load_tokenizer

    actor_tokenizer = load_tokenizer(cfg.actor.model.model_path, cfg.actor.model.trust_remote_code)
    group_tokenizer = load_tokenizer(model.model_path, model.trust_remote_code, key=f"{section}.model_path")
    actor_vocab, group_vocab = actor_tokenizer.get_vocab(), group_tokenizer.get_vocab()
    if actor_vocab == group_vocab and actor_tokenizer.eos_token_id == group_tokenizer.eos_token_id:
        return
    differing_token = next(
        (token for token in {**actor_vocab, **group_vocab} if actor_vocab.get(token) != group_vocab.get(token)), None
    )
    reason = (
        f"{differing_token!r} is {actor_vocab.get(differing_token)} there and {group_vocab.get(differing_token)} here"
        if differing_token is not None
        else "their end tokens differ"
    )
    raise ConfigError(
        f"{section}.model_path={model.model_path}: its vocabulary ({len(group_vocab)} tokens) is not that of actor.model "
        f"({len(actor_vocab)}): token {reason}; it scores tokens that the actor's model wrote, so it must have the same"
    )
