"""Sections of the configuration: values are what was typed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config import config_to_yaml
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import select
from rlhpc.runs.configuration import load_config
from rlhpc.runs.sweep import load_sweep
from rlhpc.runtime.errors import ConfigError
from tests.drawn import seed
from tests.unit.config.written import QUICKSTART, _by_file, _by_override, _file

WORDS = (
    "1_2344", "1e5", "1.10", "12e03", "0x10", "yes", "on", "off", "No", "TRUE", "y", "2026-01-02", "12:30:00", "007", "0b11",
    "1_e5", "1__0e5", ".5", "-.inf", ".NaN", "+12", "0o17", "1e400", "nan", "None", "é", "x y", "v1.10", "1:0", "10_000",
)  # fmt: skip
TEXTS = (
    "cluster.account", "cluster.partition", "cluster.qos", "cluster.mem", "cluster.time", "env.train.env_id", "runner.name",
    "workflow.eval_job.constraint", "actor.model.activation",
)  # fmt: skip
NUMBERS = ("runner.seed", "actor.optim.lr", "runner.stop_return", "algorithm.gamma", "runner.max_steps")
CASES = 60


def _word(draw: random.Random) -> str:
    if draw.random() < 0.6:
        return draw.choice(WORDS)
    digits = [str(draw.randrange(10 ** draw.randint(1, 4))) for _ in range(3)]
    return (
        draw.choice(["", "-", "+"])
        + digits[0]
        + draw.choice("._eE:x-")
        + digits[1]
        + draw.choice(["", "e" + digits[2]])
    )


def _quoted(text: str, draw: random.Random) -> str:
    return draw.choice([json.dumps(text, ensure_ascii=False), f"'{text}'"])


def _number(draw: random.Random) -> tuple[str, float]:
    value = draw.choice([draw.randrange(1, 10_000), 10.0 ** -draw.randint(1, 6), draw.random()])
    longer = f"{value!r}0" if isinstance(value, float) and "e" not in repr(value) else repr(value)
    text = draw.choice([repr(value), f"{value:e}", f"'{value!r}'", longer])
    return text, float(text.strip("'"))


def _by_merge_key(folder: Path, key: str, written: str) -> RunConfig:
    section, _, last = key.rpartition(".")
    path = _file(folder, section, f"{{<<: [{{{last}: {written}}}, {{{last}: null}}]}}")
    return load_config(path, check=False)


def _by_sweep(folder: Path, key: str, written: str, text: str = "") -> RunConfig:
    text = text or f"sweep.grid.{key}=[{written}]"
    sweep = load_sweep(QUICKSTART, [f"runner.run_dir={folder}", text])
    assert sweep is not None
    return sweep.runs[0].cfg


def _by_sweep_list(folder: Path, key: str, written: str) -> RunConfig:
    return _by_sweep(folder, key, written, f"sweep.list=[{{{key}: {written}, name: x}}]")


WAYS: tuple[Callable[[Path, str, str], RunConfig], ...] = (
    _by_file, _by_override, _by_merge_key, _by_sweep, _by_sweep_list,
)  # fmt: skip


def _again(folder: Path, cfg: RunConfig) -> RunConfig:
    saved = folder / "saved.yaml"
    saved.write_text(config_to_yaml(cfg))
    return load_config(saved, check=False)


@pytest.mark.parametrize("number", range(CASES))
def test_a_value_is_what_was_typed(number: int, tmp_path: Path) -> None:
    draw = random.Random(f"{seed()} written values {number}")
    is_text = draw.random() < 0.75
    key = draw.choice(TEXTS if is_text else NUMBERS)
    expected: Any
    if is_text:
        expected = _word(draw)
        written = _quoted(expected, draw) if draw.random() < 0.3 else expected
    else:
        written, expected = _number(draw)
    way = draw.choice([way for way in WAYS if "sweep" not in way.__name__ or key == "cluster.account" or not is_text])
    if key == "runner.name" and "sweep" in way.__name__:
        way = _by_override
    where = f"{key}={written} ({way.__name__})"
    try:
        cfg = way(tmp_path, key, written)
    except ConfigError as error:
        # A sweep checks what it loads, and an account goes into a job's directives.
        is_refused = not is_text or ("sweep" in way.__name__ and " " in expected)
        assert is_refused, f"{where}: {error}"
        assert key.rpartition(".")[2] in str(error) and "\n" not in str(error), where
        return
    for value in (select(cfg, key), select(_again(tmp_path, cfg), key)):
        assert value == expected, where
        assert isinstance(value, str) == is_text, where


@pytest.mark.parametrize("word", WORDS)
def test_texts_in_lists_and_mappings_and_their_names(word: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    name = word if word.isascii() and " " not in word else "plain"
    path.write_text(
        f"defaults: [{QUICKSTART}]\n"
        f"cluster:\n  setup: [{word}]\n  node_groups:\n"
        f"    - {{label: {name}, node_ranks: 0, env_vars: {{{name.replace(':', '_')}: {word}}}}}\n"
        f"workflow: {{eval_suites: [{word}], suites: {{{word}: ['env.eval.max_episode_steps=5']}}}}\n"
    )
    cfg = load_config(path, check=False)
    for each in (cfg, _again(tmp_path, cfg)):
        group = each.cluster.node_groups[0]
        assert (list(each.cluster.setup), list(each.workflow.eval_suites)) == ([word], [word])
        assert {k: list(v) for k, v in each.workflow.suites.items()} == {word: ["env.eval.max_episode_steps=5"]}
        assert (group.label, dict(group.env_vars)) == (name, {name.replace(":", "_"): word})


def test_a_value_of_any_type_is_what_yaml_says_and_stays_it(tmp_path: Path) -> None:
    values = "{a: 1e5, b: yes, c: '1e5', d: '1__0e5', e: [0x10, 'on'], f: {1.0: x}}"
    cfg = load_config(QUICKSTART, [f"env.train.kwargs={values}"], check=False)
    expected = {"a": 1e5, "b": True, "c": "1e5", "d": "1__0e5", "e": [16, "on"], "f": {1.0: "x"}}
    assert dict(cfg.env.train.kwargs) == expected  # type: ignore[attr-defined]
    assert dict(_again(tmp_path, cfg).env.train.kwargs) == expected  # type: ignore[attr-defined]
