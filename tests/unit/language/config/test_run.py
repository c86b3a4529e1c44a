"""Configurations of language runs: responses of a step, and the engines of runs on demonstrations."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.config.typed import typed
from rlhpc.language.config.run import (
    GrpoConfig,
    SftConfig,
    answering_config,
    answers,
    minibatch_size,
    responses_per_step,
)
from rlhpc.runs.configuration import load_config

FOLDER = Path(__file__).resolve().parents[4] / "configs" / "reasoning"


def test_a_minibatch_is_a_whole_step_unless_it_has_a_size() -> None:
    words = ["data.prompts_per_step=6", "algorithm.group_size=4", "actor.global_batch_size=null"]
    cfg = typed(GrpoConfig, load_config(FOLDER / "demo.yaml", words, check=False))
    assert responses_per_step(cfg) == 24 == minibatch_size(cfg, cfg.actor)
    cfg = typed(GrpoConfig, load_config(FOLDER / "demo.yaml", [*words[:2], "actor.global_batch_size=8"], check=False))
    assert minibatch_size(cfg, cfg.actor) == 8


@pytest.mark.parametrize(
    ("file", "answering"), [("demo.yaml", True), ("demo_sft.yaml", True), ("reward_model.yaml", False)]
)
def test_models_answer_where_there_are_engines_and_rewards(file: str, answering: bool) -> None:
    assert answers(load_config(FOLDER / file, check=False)) is answering


def test_the_engines_of_a_run_on_demonstrations_have_its_sections_and_defaults_of_the_rest() -> None:
    words = [
        "runner.val_check_interval=5",
        "rollout.max_new_tokens=7",
        "cluster.num_nodes=2",
        "data.max_prompt_tokens=33",
    ]
    cfg = typed(SftConfig, load_config(FOLDER / "demo_sft.yaml", words, check=False))
    engines, defaults = answering_config(cfg), typed(GrpoConfig, load_config(FOLDER / "demo.yaml", check=False))
    assert isinstance(engines.rollout, type(defaults.rollout)), "the sections are those of GRPO"
    assert (engines.rollout.max_new_tokens, engines.cluster.num_nodes) == (7, 2)
    assert engines.data.max_prompt_tokens == 33 and engines.runner.val_check_interval == 5
    assert engines.actor.model.model_path == cfg.actor.model.model_path
    assert [term.name for term in engines.reward.terms] == [term.name for term in cfg.reward.terms]
    assert "max_staleness" in engines.algorithm and engines.algorithm.max_staleness == 0, "which the run has not"
    assert "holdout" in cfg.data and "holdout" not in engines.data, "which engines do not know"


def test_free_mappings_keep_all_their_keys() -> None:
    cfg = typed(SftConfig, load_config(FOLDER / "demo_sft.yaml", ["actor.model.kwargs={hidden: 32}"], check=False))
    assert answering_config(cfg).actor.model.kwargs == {"hidden": 32}
