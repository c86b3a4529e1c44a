"""What a judge's keys say: those of section `judge`, or of `groups[].kwargs`. Nothing here imports torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhpc.config.constraints import Fail, check_choice, check_name
from rlhpc.config.typed import mapping, plain, typed, untouched
from rlhpc.language.engines.registry import ENGINES
from rlhpc.language.group_config import JUDGE_RANGES, JudgeConfig
from rlhpc.language.scoring.group import ScoringGroup
from rlhpc.language.scoring.groups import JUDGE, raters, scoring_groups
from rlhpc.language.scoring.own_engine import key_of
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config import GrpoConfig

MODES = ("grade", "compare")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def is_judge(group: ScoringGroup) -> bool:
    """Whether a language model judges there."""
    return group.scorer.lower() == "judge"


def section_of(cfg: GrpoConfig, group: ScoringGroup) -> JudgeConfig:
    """A judge's section; of a group of one's own, what stands in its `kwargs`, and its model.

    Raises:
        ConfigError: There is no such key, or its value is of another kind or out of range.
    """
    if group.name == JUDGE:
        return cfg.judge
    where, given = f"groups[{group.name}].kwargs", dict(group.kwargs)
    if "model" in given:
        raise ConfigError(f"{where}: a judge's model stands in groups[{group.name}].model")
    names = sorted(set(JudgeConfig.__dataclass_fields__) - {"model"})
    for name in given:
        check_name(name, name, names, lambda key, rule: ConfigError(f"{where}: a judge has no key {key!r}; {rule}"))
    try:
        merged = mapping(OmegaConf.merge(untouched(JudgeConfig), given, {"model": plain(group.model)}))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).strip().splitlines()[0]}") from None
    section = typed(JudgeConfig, merged)
    for name, allowed in JUDGE_RANGES.items():
        value = merged[name]
        if isinstance(value, (int, float)) and (not math.isfinite(value) or value not in allowed):
            raise ConfigError(f"{where}.{name} is {value!r}; {allowed.rule()}")
    for name, words in (("mode", MODES), ("dtype", _DTYPES)):
        check_choice(f"{where}.{name}", str(merged[name]), words, lambda key, rule: ConfigError(f"{key}: {rule}"))
    return section


def judges(cfg: GrpoConfig) -> dict[str, ScoringGroup]:
    """The judges that the reward asks, by name."""
    known = scoring_groups(cfg)
    return {name: known[name] for name in raters(cfg) if is_judge(known[name])}


def check_judges(cfg: GrpoConfig, fail: Fail) -> None:
    """Refuses questions, scales and engines that cannot be; and comparisons where there is nothing to compare.

    Raises:
        ConfigError: The first rule that is broken.
    """
    asked = judges(cfg)
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
        if group.name in asked and section.mode.lower() == "compare":
            _check_comparisons(cfg, section, refuse)


def _check_comparisons(cfg: GrpoConfig, section: JudgeConfig, refuse: Any) -> None:
    if cfg.algorithm.group_size < 2:
        raise refuse("mode", "algorithm.group_size is 1: there is nothing to compare; take grade")
    for suite in cfg.data.eval:
        if suite.samples < 2:
            raise refuse(
                "mode",
                f"suite {suite.name!r} of data.eval has samples {suite.samples}: there is nothing to compare; "
                "set its samples to 2 or more (and its temperature above 0), or take grade",
            )
    if section.max_requests < 2:
        raise refuse("max_requests", "a comparison takes two")
