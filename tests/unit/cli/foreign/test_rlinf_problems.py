"""Import of the data and rewards of RLinf's runs with language models."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.language.rewards.base import Sample
from rlhpc.language.rewards.text_rewards import FormatReward
from tests.unit.cli.foreign.rlinf_configs import CRITIC, LANGUAGE, _kinds, imported, merged, put
from tests.unit.cli.foreign.test_rlinf_language import changed, translated

_kinds()


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = {
        "data": {
            "type": "vlm", "image_keys": ["scans"], "use_chat_template": True, "apply_chat_template": False,
            "choice_key": "options", "lazy_loading": True, "train_data_paths": "scans",
        },
        "reward": {
            "reward_type": "vqa", "reward_weights": {"qa_accuracy": 1.0, "think_format": 0.0, "answer_format": 0.5},
        },
        "actor": {"model": {"tensor_model_parallel_size": 1}},
    }  # fmt: skip
    source = put(tmp_path, "scans.yaml", merged(LANGUAGE, pictures))
    cfg, _, report = imported(source, capsys)
    assert cfg is not None, report
    train = cfg.data.train
    assert (train.images_key, train.chat_template, train.source) == ("scans", True, "parquet")
    assert "{options}" in train.prompt_template and cfg.data["eval"][0].images_key == "scans"
    assert [(term.name, term.weight) for term in cfg.reward.terms] == [("exact", 1.0), ("format", 0.5)]


def test_a_critic_learns_what_a_wrong_answer_is_worth() -> None:
    """Estimators with a baseline do not depend on it; a critic starts at 0, and GAE passes its error on."""
    bounds = {"reward": {"reward_min_val": -1.0, "reward_max_val": 1.0}}
    made = translated(merged(CRITIC, bounds))
    right, every = made.ours["reward.terms"]
    assert (right["name"], right["weight"]) == ("math", 10.0) and every["weight"] == made.ours["reward.failed"] == -5.0
    constant = FormatReward(**every["kwargs"])
    assert constant(Sample("1 + 1", "", "")) == constant(Sample("1 + 1", "two\nlines", "")) == 1.0
    without = translated(bounds)
    assert without.ours["reward.terms"] == [{"name": "math", "weight": 10.0}] and "reward.failed" not in without.ours
    unscaled = translated(merged(CRITIC, {"reward": {"reward_min_val": 0.0}}))
    assert unscaled.ours["reward.terms"] == [{"name": "math", "weight": 5.0}]


def test_two_columns_of_pictures_are_named() -> None:
    made = translated({"data": {"type": "vlm", "image_keys": ["left", "right"], "use_chat_template": True}})
    assert made.ours["data.train.images_key"] == "left" and "data.image_keys" in changed(made)


def test_each_validation_file_is_a_suite() -> None:
    made = translated({"data": {"val_data_paths": ["a.jsonl", "b.parquet"]}})
    suites = made.ours["data.eval"]
    assert [(suite["name"], suite["source"]) for suite in suites] == [
        ("validation_0", "jsonl"),
        ("validation_1", "parquet"),
    ]
    assert made.ours["workflow.eval_suites"] == ["validation_0", "validation_1"]
