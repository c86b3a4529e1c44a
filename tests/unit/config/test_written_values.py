"""What is typed is what is used: values in files, overrides and sweeps have the type of their key.

The cases are drawn by the commit; `RLHPC_TESTS_SEED=…` draws others.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.config import config_to_yaml
from rlhpc.config.merge import ConfigLayers
from rlhpc.config.schema import PATHS, Schema
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import select
from rlhpc.runs.configuration import load_config
from rlhpc.runs.sweep import load_sweep
from rlhpc.runs.task_type import all_kinds, find_kind
from rlhpc.runtime.errors import ConfigError
from tests.drawn import seed

QUICKSTART = Path(__file__).resolve().parents[3] / "configs/quickstart.yaml"
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


def _file(folder: Path, key: str, written: str, name: str = "c.yaml") -> Path:
    *sections, last = key.split(".")
    lines = [f"defaults: [{QUICKSTART}]"]
    lines += [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    path = folder / name
    path.write_text("\n".join([*lines, f"{'  ' * len(sections)}{last}: {written}"]) + "\n")
    return path


def _by_file(folder: Path, key: str, written: str) -> RunConfig:
    return load_config(_file(folder, key, written), check=False)


def _by_override(folder: Path, key: str, written: str) -> RunConfig:
    return load_config(QUICKSTART, [f"{key}={written}"], check=False)


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
        assert not is_text, f"{where}: {error}"
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


@pytest.mark.parametrize("text", ["a #b", "#b", "---", "--- a", "two\nlines"])
def test_an_override_has_no_comment_and_is_no_document(text: str) -> None:
    assert load_config(QUICKSTART, [f"cluster.account={text}"], check=False).cluster.account == text


@pytest.mark.parametrize("text", ["null", "~", "", "NULL"])
def test_null_stays_null(text: str) -> None:
    assert load_config(QUICKSTART, [f"cluster.account={text}"], check=False).cluster.account is None


def test_runs_of_a_sweep_are_called_what_was_typed(tmp_path: Path) -> None:
    sweep = load_sweep(
        QUICKSTART,
        [f"runner.run_dir={tmp_path}", "sweep={grid: {cluster.account: [1.10, 1.1, 1e5, yes], runner.seed: [1]}}"],
    )
    assert sweep is not None
    assert [run.point.name.partition("-")[0] for run in sweep.runs] == [
        "account_1.10", "account_1.1", "account_1e5", "account_yes",
    ]  # fmt: skip
    assert [run.cfg.cluster.account for run in sweep.runs] == ["1.10", "1.1", "1e5", "yes"]


def test_a_key_twice_is_an_error_however_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        load_config(_file(tmp_path, "env.train.kwargs.x", "{1: a, 0x1: b}"), check=False)


class TestMergeKeys:
    """`<<`, as in YAML 1.1."""

    @pytest.mark.parametrize(
        ("section", "expected"),
        [
            ("{<<: *side}", (8, 100)),
            ("{<<: *side, num_envs: 2}", (2, 100)),
            ("{num_envs: 2, <<: *side}", (2, 100)),
            ("{<<: [{num_envs: 3}, *side]}", (3, 100)),
            ("{<<: [*side, {num_envs: 3}]}", (8, 100)),
            ("{<<: {<<: *side, num_envs: 4}}", (4, 100)),
        ],
    )
    def test_precedence(self, section: str, expected: tuple[int, int], tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        side = "&side {num_envs: 8, max_episode_steps: 100}"
        path.write_text(f"defaults: [{QUICKSTART}]\nenv:\n  train: {side}\n  eval: {section}\n")
        played = load_config(path).env.eval  # type: ignore[attr-defined]
        assert (played.num_envs, played.max_episode_steps) == expected

    @pytest.mark.parametrize(
        ("section", "message"),
        [
            ("{<<: {nom_envs: 1}}", "unknown key env.eval.nom_envs"),
            ("{<<: {num_envs: 1}, <<: {num_envs: 1}}", "'<<' is given twice"),
            ("{<<: {num_envs: 1, num_envs: 2}}", "'num_envs' is given twice"),
            ("{<<: 5}", "'<<' merges a mapping"),
            ("{<<: [5]}", "'<<' merges a mapping"),
            ("&own {<<: *own}", "recursive"),
        ],
    )
    def test_mistakes(self, section: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            load_config(_file(tmp_path, "env.eval", section))
        assert "\n" not in str(error.value)


class TestPaths:
    """Environment variables and home folders in paths."""

    def test_every_key_for_a_path_is_one(self) -> None:
        words = ("folder", "python", "path", "file", "checkpoint", "weights")
        for kind in all_kinds():
            for key in kind.schema.keys:
                name = key.rpartition(".")[2]
                if name.endswith(("_dir", "_path", "python", "folder", "scratch")) or name in words:
                    assert name in PATHS, key

    @pytest.mark.parametrize("written", ["$MY_DISK/runs", "${MY_DISK}/runs", "${oc.env:MY_DISK}/runs"])
    def test_a_variable(self, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_DISK", str(tmp_path))
        for cfg in (_by_override(tmp_path, "runner.run_dir", written), _by_file(tmp_path, "runner.run_dir", written)):
            assert cfg.runner.run_dir == f"{tmp_path}/runs"
            assert yaml.safe_load(config_to_yaml(cfg))["runner"]["run_dir"] == "${oc.env:MY_DISK}/runs"

    @pytest.mark.parametrize("task", ["embodied", "bc", "reasoning"])
    def test_a_variable_in_every_path(self, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_DISK", "/disk")
        schema: Schema = find_kind(task).schema
        keys = [key for key in schema.keys if key.rpartition(".")[2] in PATHS and not key.startswith("teacher")]
        assert len(keys) > 4
        for key in keys:
            layers = ConfigLayers(schema)
            layers.override(f"{key}=$MY_DISK/x")
            assert select(layers.cfg, key) == "/disk/x", key

    def test_of_node_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MY_DISK", "/disk")
        text = "cluster.node_groups=[{label: a, node_ranks: 0, python_interpreter: $MY_DISK/bin/python}]"
        group = load_config(QUICKSTART, [text], check=False).cluster.node_groups[0]
        assert group.python_interpreter == "/disk/bin/python"

    def test_an_unset_variable_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MY_DISK", raising=False)
        with pytest.raises(
            ConfigError, match=r"runner\.run_dir: .*MY_DISK is not set; .*\$\{oc\.env:MY_DISK,DEFAULT\}"
        ):
            load_config(QUICKSTART, ["runner.run_dir=$MY_DISK/runs"])

    def test_another_key_names_the_form(self) -> None:
        with pytest.raises(ConfigError, match=r"runner\.name: .*\$\{oc\.env:HOME\}"):
            load_config(QUICKSTART, ["runner.name=${HOME}"])

    def test_no_such_user(self) -> None:
        with pytest.raises(ConfigError, match="no home folder for ~no-such-user"):
            load_config(QUICKSTART, ["runner.run_dir=~no-such-user/runs"])

    def test_a_locale_without_the_letters_is_named(self, tmp_path: Path) -> None:
        env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        command = [
            str(Path(sys.executable).with_name("rlhpc")),
            "plan",
            str(QUICKSTART),
            f"runner.run_dir={tmp_path}/lé",
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, encoding="utf-8")
        assert done.returncode == 2 and "PYTHONUTF8=1" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_numbers_are_numbers() -> None:
    cfg = load_config(QUICKSTART, ["runner.seed=0x10", "actor.optim.lr=1e-4", "runner.stop_return='475'"], check=False)
    assert (cfg.runner.seed, cfg.actor.optim.lr, cfg.runner.stop_return) == (16, 1e-4, 475.0)  # type: ignore[attr-defined]
    assert math.isinf(load_config(QUICKSTART, ["runner.stop_return=.inf"], check=False).runner.stop_return)  # type: ignore[attr-defined]
