"""Output of a translated configuration: the file's comments, and the report of every key."""

from __future__ import annotations

from pathlib import Path

import yaml

from rlhpc.cli.foreign.output import format_config, format_report
from rlhpc.cli.foreign.rules import Translation

TRANSLATION = Translation(
    "PPO",
    ours={"runner.max_steps": 10, "actor.optim.lr": 1e-3, "actor.optim.name": "adam", "runner.name": "on"},
    origin={
        "runner.max_steps": ["a", "b", "c", "d", "e"],
        "actor.optim.lr": ["optim.lr"],
        "actor.optim.name": [],
        "runner.name": ["runner.name"],
    },
    defaults={"actor.optim.name": ["optim.name"]},
    omitted={"kl": ("there is no KL term", True), "log": ("rlhpc logs in its own way", False)},
    foreign={"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "optim.lr": 1e-3, "runner.name": "on", "kl": 0.1, "log": None},
)


def test_the_file_reads_back_as_the_translation() -> None:
    text = format_config(TRANSLATION, "/x/ppo.yaml", "RLinf")
    assert yaml.safe_load(text) == {
        "runner": {"max_steps": 10, "name": "on"}, "actor": {"optim": {"lr": 1e-3, "name": "adam"}},
    }  # fmt: skip


def test_comments_name_what_a_value_comes_from_and_what_was_left_out() -> None:
    lines = format_config(TRANSLATION, "/x/ppo.yaml", "RLinf").splitlines()
    assert lines[0] == "# From RLinf's ppo.yaml, by `rlhpc config import`: 7 of 9 keys are used."
    assert lines[1:3] == ["# Left out; training will differ:", "#   kl: 0.1 (there is no KL term)"]
    assert "  max_steps: 10  # a, b, c and 2 more" in lines
    assert "    name: adam  # RLinf's default of optim.name" in lines
    assert "  name: 'on'" in lines  # the same key needs no comment; a word of YAML needs quotes
    assert not any("log" in line for line in lines)


def test_the_report_has_every_key() -> None:
    text = format_report(
        TRANSLATION, "/x/ppo.yaml", "RLinf", [Path("/x/base.yaml"), Path("/x/ppo.yaml")], "It would start."
    )
    lines = text.splitlines()
    assert lines[:2] == ["RLinf: /x/ppo.yaml with base.yaml", "task type: PPO"]
    assert "translated: 7 of 9 keys" in lines
    assert any(line.split() == ["runner.max_steps", "10", "from", "a,", "b,", "c,", "d,", "e"] for line in lines)
    assert any("adam" in line and "RLinf's default of optim.name" in line for line in lines)
    at = lines.index("left out; training will differ: 1 keys")
    assert lines[at + 1 : at + 3] == ["  there is no KL term", "    kl: 0.1"]
    at = lines.index("left out; training is the same: 1 keys")
    assert lines[at + 1 : at + 3] == ["  rlhpc logs in its own way", "    log: null"]
    assert lines[-1] == "It would start."


def test_nothing_was_left_out() -> None:
    empty = Translation("SAC")
    assert format_config(empty, "sac.yaml", "RLinf").splitlines() == [
        "# From RLinf's sac.yaml, by `rlhpc config import`: 0 of 0 keys are used."
    ]
    assert "left out; training will differ: 0 keys" in format_report(empty, "sac.yaml", "RLinf", [], "")
