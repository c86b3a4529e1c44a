"""Checks of scoring groups: judges, reward and process terms, places, distillation, and vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.scoring.checks import (
    check_group_sections,
    check_groups,
    check_task_levels,
    judges,
    require_same_vocabulary,
)
from rlhpc.language.scoring.groups import scoring_groups
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.scoring.judges import judge_model, second  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (
            {"rubic": "{response}"},
            "groups[second].kwargs: a judge has no key 'rubic'; did you mean 'rubric'? allowed: cache_size, ",
        ),
        ({"model": {}}, "a judge's model stands in groups[second].model"),
        ({"max_requests": 0}, "groups[second].kwargs.max_requests is 0; it must be greater than 0"),
        ({"mode": "garde"}, "groups[second].kwargs.mode is 'garde'; did you mean 'grade'? allowed: grade, compare"),
    ],
)
def test_a_second_judges_mistakes(kwargs: dict[str, Any], said: str, model: Path) -> None:
    from rlhpc.language.scoring.checks import section_of

    cfg = second(model, **kwargs)
    with pytest.raises(ConfigError) as refused:
        section_of(cfg, scoring_groups(cfg)["second"])
    assert said in str(refused.value)


def configured(changes: dict[str, Any]) -> Any:
    """Returns the defaults with changed keys; a placement has nothing but what it names."""
    cfg: Any = default_section(GrpoConfig)
    cfg.cluster.component_placement = {}
    changed = OmegaConf.create({})
    for key, value in changes.items():
        OmegaConf.update(changed, key, value)
    return OmegaConf.merge(cfg, changed)


def fail(key: str, rule: str) -> ConfigError:
    return ConfigError(f"{key}: {rule}")


def own(scorer: str, **keys: Any) -> list[dict[str, Any]]:
    return [{"name": "own", "scorer": scorer, **keys}]


def terms(*names: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


PLACED = "cluster.component_placement"
REFUSED: dict[str, tuple[dict[str, Any], frozenset[str], str]] = {
    "a reserved name": (
        {"groups": [{"name": "reference", "scorer": "logprobs"}]}, frozenset(), "groups[0].name is 'reference'",
    ),
    "a name twice": ({"groups": own("logprobs") * 2}, frozenset(), "groups[1].name is 'own', which is taken"),
    "a teacher's scorer": ({"groups": own("engine_logprobs")}, frozenset(), "groups[own].scorer is 'engine_logprobs'"),
    "sizes of a folder": (
        {"teacher.model.model_path": "x", "teacher.model.kwargs": {"hidden": 3}}, frozenset(), "they are for builtin:tiny",
    ),
    "a rubric without an answer": ({"judge.rubric": "good?"}, frozenset(), "judge.rubric: it needs {response}"),
    "a scale that runs down": ({"judge.scale": [10, 1]}, frozenset(), "judge.scale: two numbers are needed"),
    "an unknown engine": ({"judge.rollout_backend": "vlm"}, frozenset(), "judge.rollout_backend: "),
    "comparison of one answer": (
        {"reward.terms": terms("judge"), "judge.mode": "compare", "algorithm.group_size": 1}, frozenset(),
        "judge.mode: algorithm.group_size is 1",
    ),
    "comparison with one request": (
        {"reward.terms": terms("judge"), "judge.mode": "compare", "algorithm.group_size": 4, "judge.max_requests": 1},
        frozenset(), "judge.max_requests: a comparison takes two",
    ),
    "options at a term": (
        {"reward.terms": [{"name": "judge", "kwargs": {"a": 1}}]}, frozenset(), "reward.terms[0].kwargs: 'judge' is a group",
    ),
    "a term of tokens": (
        {"groups": own("logprobs"), "reward.terms": terms("own")}, frozenset(), "reward.terms: the group 'own' says something",
    ),
    "a term twice": ({"reward.terms": terms("judge", "judge")}, frozenset(), "the group 'judge' is named twice"),
    "a term without a place": ({"reward.terms": terms("judge")}, frozenset(), "the group 'judge' has no place"),
    "an unknown process term": ({"reward.process_terms": terms("none")}, frozenset(), "reward.process_terms: "),
    "a process term of answers": ({"reward.process_terms": terms("judge")}, frozenset(), "'judge' rates whole answers"),
    "a process term without a place": (
        {"groups": own("process"), "reward.process_terms": terms("own")}, frozenset(), "the group 'own' has no place",
    ),
    "gae without a critic": ({"algorithm.adv_type": "gae"}, frozenset(), "gae needs a critic"),
    "two sources of values": (
        {"algorithm.adv_type": "gae", "actor.model.value_head": True, PLACED: {"critic": "0"}}, frozenset({"value_head"}),
        "there is a group critic already",
    ),
    "a value head for nothing": ({"actor.model.value_head": True}, frozenset(), "nothing asks for values"),
    "a reference that is nowhere": (
        {"reference.update_interval": 3}, frozenset(), "reference.update_interval: the actor keeps the policy",
    ),
    "a rater that no term names": ({PLACED: {"judge": "0"}}, frozenset(), "no term of reward.terms is 'judge'"),
    "a group for nothing": (
        {PLACED: {"reference": "0"}}, frozenset(), "nothing asks the group 'reference': set algorithm.kl_coef",
    ),
    "a group without a place": ({"groups": own("logprobs")}, frozenset({"own"}), "asks a group 'own': give it a place"),
    "a teacher without a model": (
        {PLACED: {"teacher": "0"}}, frozenset({"teacher"}), "teacher.model.model_path is not set, but the group 'teacher'",
    ),
    "distillation without a teacher": ({"algorithm.name": "distillation"}, frozenset(), "learns from it: name a model"),
    "whole distributions on the way": (
        {"algorithm.name": "distillation", "teacher.model.model_path": "x", "algorithm.distillation.mode": "full",
         PLACED: {"teacher": "0"}}, frozenset({"teacher"}), "whole distributions are too much to send",
    ),
    "samples of another divergence": (
        {"algorithm.name": "distillation", "teacher.model.model_path": "x", "algorithm.distillation.mode": "sampled",
         "algorithm.distillation.beta": 0.5}, frozenset(), "mode sampled follows the gradient of the reverse KL",
    ),
    "a teacher's engine without ranks": (
        {"teacher.rollout_backend": "vllm", "teacher.model.model_path": "x"}, frozenset(), "an engine needs ranks of its own",
    ),
    "a teacher's short context": (
        {"teacher.rollout_backend": "vllm", "teacher.model.model_path": "x", "teacher.max_model_len": 8,
         PLACED: {"teacher": "0"}}, frozenset({"teacher"}), "teacher.max_model_len: a sequence may have",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_sections_that_do_not_fit_are_refused(case: str) -> None:
    changes, column_sources, said = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        check_group_sections(configured(changes), fail, column_sources)
    assert said in str(refused.value)


def test_sections_that_fit_are_not_refused() -> None:
    changes = {
        "judge.model.model_path": "x", "reward.terms": terms("judge"), "judge.mode": "compare", "algorithm.group_size": 4,
        PLACED: {"judge": "0", "reference": "0"},
    }  # fmt: skip
    cfg = configured({**changes, "actor.model.model_path": "x"})
    check_group_sections(cfg, fail, frozenset({"reference"}))
    assert [*judges(cfg)] == ["judge"] and judges(configured({})) == {}


def test_a_model_that_scores_the_actors_tokens_has_its_vocabulary(causal: Path, model: Path) -> None:
    cfg = configured({"actor.model.model_path": str(causal), "teacher.model.model_path": str(causal)})
    require_same_vocabulary(cfg, cfg.teacher.model, "teacher.model")
    check_groups(cfg, {"teacher": 1, "reference": 1})
    cfg.teacher.model.model_path = str(model)
    with pytest.raises(ConfigError, match=r"teacher.model.model_path=.*: its vocabulary \(\d+ tokens\) is not that of"):
        check_groups(cfg, {"teacher": 1})


def teacher(name: str = "a", tasks: tuple[str, ...] = ("x",), path: str | None = "m") -> dict[str, Any]:
    return {"name": name, "tasks": list(tasks), "model": {"model_path": path}}


@pytest.mark.parametrize(
    ("teachers", "changes", "said"),
    [
        ([teacher("a/b")], {}, r"teacher\.by_task\[0\]\.name is 'a/b'; it is part of metrics' names"),
        ([teacher("default")], {}, r"teacher\.by_task\[0\]\.name is 'default', which is taken"),
        ([teacher(), teacher(tasks=("y",))], {}, r"teacher\.by_task\[1\]\.name is 'a', which is taken"),
        ([teacher(tasks=())], {}, r"teacher\.by_task\[0\]\.tasks is empty"),
        ([teacher(path=None)], {}, r"teacher\.by_task\[0\]\.model\.model_path is not set"),
        ([teacher(), teacher("b")], {}, r"teacher\.by_task\[1\]\.tasks has 'x', which is learnt from 'a'"),
        ([teacher()], {"algorithm.name": "policy_gradient"}, r"teacher\.by_task: only algorithm\.name=distillation"),
        ([teacher()], {"teacher.rollout_backend": "vllm"}, r"teacher\.rollout_backend: an engine has one model"),
        ([], {"groups": own("routed_logprobs")}, r"'routed_logprobs', which is the teacher's: see teacher\.by_task"),
    ],
)
def test_teachers_by_task_that_do_not_fit_are_refused(
    teachers: list[dict[str, Any]], changes: dict[str, Any], said: str
) -> None:
    cfg = configured(
        {"algorithm.name": "distillation", "teacher.model.model_path": "t", "teacher.by_task": teachers, **changes}
    )
    with pytest.raises(ConfigError, match=said):
        check_group_sections(cfg, fail, frozenset())


def test_teachers_by_task_that_fit_are_admitted() -> None:
    teachers = [teacher(), teacher("b", ("y", "z"))]
    cfg = configured({"algorithm.name": "distillation", "teacher.model.model_path": "t", "teacher.by_task": teachers})
    check_group_sections(cfg, fail, frozenset())
    check_task_levels(cfg, {"x", "y", "z", ""})
    with pytest.raises(ConfigError, match=r"by_task\[1\]\.tasks has 'z', which no prompt of .*; their tasks: 'x', 'y'"):
        check_task_levels(cfg, {"x", "y", ""})
    with pytest.raises(ConfigError, match=r"by_task\[0\]\.tasks has 'x', .* none: set data\.train\.level_key"):
        check_task_levels(cfg, {""})
