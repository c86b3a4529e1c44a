"""What is typed is what is used: values in files, overrides and sweeps have the type of their key.

The cases are drawn by the commit; `RLHPC_TESTS_SEED=…` draws others.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhpc.config import config_to_yaml
from rlhpc.config.merge import ConfigLayers
from rlhpc.config.schema import PATHS, Schema
from rlhpc.config.typed import select
from rlhpc.runs.configuration import load_config
from rlhpc.runs.sweep import load_sweep
from rlhpc.runs.task_type import all_task_types, find_task_type
from rlhpc.runtime.errors import ConfigError
from tests.unit.config.written import QUICKSTART, _by_file, _by_override, _file


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
        for kind in all_task_types():
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
        schema: Schema = find_task_type(task).schema
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
