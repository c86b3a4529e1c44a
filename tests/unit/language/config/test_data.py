"""Sections `data` of language runs: defaults, refused values, and evaluation suites by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.schema import keys_of
from rlhpc.config.typed import typed
from rlhpc.language.config.data import (
    DataConfig,
    DataSourceConfig,
    DpoDataConfig,
    EvalDataConfig,
    PairSourceConfig,
    PreferenceDataConfig,
    PreferenceSuiteConfig,
    SftDataConfig,
    suite_named,
)
from rlhpc.language.config.run import GrpoConfig
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[4] / "configs" / "reasoning" / "demo.yaml"


def suites(*names: str) -> list[EvalDataConfig]:
    return [EvalDataConfig(name=name) for name in names]


@pytest.mark.parametrize(
    ("names", "name", "found"),
    [
        (("math", "code"), "code", "code"),
        (("math", "code"), "default", "math"),
        (("math", "default"), "default", "default"),
    ],
)
def test_a_suite_is_found_by_name_and_default_is_the_first_without_such_a_name(
    names: tuple[str, ...], name: str, found: str
) -> None:
    assert suite_named(suites(*names), name).name == found


def test_suites_of_reward_models_are_found_alike() -> None:
    sections = [PreferenceSuiteConfig(name="helpful"), PreferenceSuiteConfig(name="harmless")]
    assert suite_named(sections, "harmless") is sections[1]


def test_an_unknown_suite_is_refused_with_the_similar_name_and_all_names() -> None:
    with pytest.raises(ConfigError, match=r"--suite is 'maht'; .*math.*data\.eval has: math, code"):
        suite_named(suites("math", "code"), "maht")


def test_a_run_without_suites_is_told_to_add_one() -> None:
    with pytest.raises(ConfigError, match=r"data\.eval is empty; an evaluation needs a suite"):
        suite_named([], "default")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.train.source=jsnol", "data.train.source"),
        ("data.train.size=0", "data.train.size"),
        ("data.train.seed=-1", "data.train.seed"),
        ("data.train.eval_fraction=1.5", "data.train.eval_fraction"),
        ("data.overlong_prompts=cut", "data.overlong_prompts"),
        ("data.prompts_per_step=0", "data.prompts_per_step"),
        ("data.max_prompt_tokens=0", "data.max_prompt_tokens"),
        ("data.eval=[{name: a, source: arithmetic, samples: 0}]", r"data\.eval.*samples"),
        ("data.eval=[{name: a, source: arithmetic, temperature: -1}]", r"data\.eval.*temperature"),
        ("data.train.prompt=x", "prompt_key"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_its_key(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, [setting])


def test_a_suite_of_a_file_has_the_defaults_of_its_section() -> None:
    suite = "{name: hard, source: arithmetic, size: 4, samples: 8, kwargs: {digits: 3}}"
    settings = [f"data.eval=[{suite}]", "workflow.eval_suites=[hard]", "data.train.split=level=3"]
    cfg = typed(GrpoConfig, load_config(CONFIG, settings))
    (section,) = cfg.data.eval
    assert (section.name, section.samples, section.temperature) == ("hard", 8, 0.0), "greedy unless it is asked for"
    assert (section.prompt_key, section.answer_key, section.chat_template) == ("prompt", "answer", True)
    assert suite_named(cfg.data.eval, "default") is section
    assert cfg.data.train.split == "level=3"


def test_only_evaluations_may_change_when_a_run_is_resumed() -> None:
    """Other problems, prompts or batches would be another training."""
    for section in (DataConfig, SftDataConfig, PreferenceDataConfig):
        changeable = {path for path, key in keys_of(section).items() if key.on_resume.value != "fixed"}
        assert changeable and {path.partition(".")[0].partition("[")[0] for path in changeable} <= {"eval", "holdout"}


def test_pairs_have_a_preferred_and_a_rejected_response_in_place_of_an_answer() -> None:
    pairs, problems = keys_of(PairSourceConfig), keys_of(DataSourceConfig)
    assert {"chosen_key", "rejected_key"} == pairs.keys() - problems.keys()
    assert {"answer_key", "response_key", "images_key"} == problems.keys() - pairs.keys()
    assert "train.chosen_key" in keys_of(DpoDataConfig) and "train.answer_key" not in keys_of(DpoDataConfig)
    assert "eval[].answer_key" in keys_of(DpoDataConfig), "its suites are problems"
