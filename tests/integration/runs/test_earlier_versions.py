"""Runs of an earlier version, whose config.yaml has the keys of all kinds of run, are still read, evaluated and continued."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from rlhpc import load_config
from rlhpc.config.load import config_to_yaml
from rlhpc.runtime.errors import ConfigError
from tests import warm
from tests.extras import need_extra

FLAT = Path(__file__).resolve().parents[2] / "data" / "flat_runs"
SUITES = {"embodied": "default", "language": "held_out"}
EXTRAS = {"embodied": (), "language": ("llm",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs, in a folder of their own."""
    folder = tmp_path_factory.mktemp("earlier") / "runs"
    shutil.copytree(FLAT, folder)
    return folder


def rlhpc(folder: Path, *words: str) -> str:
    done = warm.run(
        [sys.executable, "-P", "-m", "rlhpc.cli", *words], cwd=folder.parent, text=True, capture_output=True, timeout=200,
        env={**os.environ, "RLHPC_MODELS": str(folder.parent / "models")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SUITES)
def test_it_is_evaluated_converted_and_reported(name: str, folder: Path) -> None:
    need_extra(*EXTRAS[name])
    run, suite = folder / name, SUITES[name]
    result = run / "eval" / "global_step_2" / f"{suite}.json"
    before = json.loads(result.read_text())
    result.unlink()
    rlhpc(folder, "eval", "--run", str(run), "--suite", suite, *(["env.eval.num_episodes=4", "env.eval.num_envs=2"] if
          name == "embodied" else []))  # fmt: skip
    after = json.loads(result.read_text())
    key = "return_mean" if name == "embodied" else "accuracy"
    assert after[key] == before[key] and after["global_step"] == 2
    rlhpc(folder, "convert", "--run", str(run))
    assert (run / "export" / "global_step_2" / "model.safetensors").is_file()
    rlhpc(folder, "report", str(run))
    page = (run / "report" / "index.html").read_text()
    assert ("CartPole-v1" if name == "embodied" else "arithmetic") in page


@pytest.mark.parametrize("name", SUITES)
def test_it_is_continued(name: str, folder: Path) -> None:
    need_extra(*EXTRAS[name])
    config = folder / f"{name}.yaml"
    shutil.copy(FLAT / name / "config.yaml", config)
    words = [f"runner.run_dir={folder}", "runner.resume_dir=auto", "runner.max_steps=3", "runner.save_interval=-1"]
    rlhpc(folder, "train", str(config), *words)
    assert (folder / name / "checkpoints" / "global_step_3" / "COMPLETE").is_file()
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_what_is_not_such_a_file_is_strict(tmp_path: Path) -> None:
    """Leniency is for files with all sections, which nobody writes by hand."""
    flat = FLAT / "embodied" / "config.yaml"
    assert load_config(flat, training=False).runner.name == "embodied"
    content = yaml.safe_load(flat.read_text())
    del content["workflow"]
    part = tmp_path / "part.yaml"
    part.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="is for"):
        load_config(part, training=False)
    with pytest.raises(ConfigError, match=r"algorithm\.kl_coef is for a task type that this one"):
        load_config(flat, ["algorithm.kl_coef=0.1"], training=False)


def test_what_a_kind_of_run_no_longer_has_is_left_out_of_what_it_once_saved(tmp_path: Path) -> None:
    """Of what a person wrote it is refused, as any key that is not this kind's."""
    written = {
        "cluster": {"component_placement": {"actor": 0}}, "runner": {"name": "old", "task_type": "bc"},
        "env": {"train": {"env_id": "Pendulum-v1"}}, "demos": {"path": "demos.h5"},
    }  # fmt: skip
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(written))
    saved = yaml.safe_load(config_to_yaml(load_config(own, training=False)))
    saved["env"]["train"]["num_envs"] = written["env"]["train"]["num_envs"] = 4
    saved["env"]["eval"]["auto_reset"], saved["actor"]["lora"]["dropout"] = True, 0.0
    old = tmp_path / "config.yaml"
    old.write_text(yaml.safe_dump(saved))
    assert "num_envs" not in load_config(old, training=False).env.train  # type: ignore[attr-defined]
    saved["actor"]["lora"]["dropuot"] = 0.0
    old.write_text(yaml.safe_dump(saved))
    with pytest.raises(ConfigError, match=r"unknown key actor\.lora\.dropuot"):
        load_config(old, training=False)
    own.write_text(yaml.safe_dump(written))
    with pytest.raises(ConfigError, match=r"env\.train\.num_envs is for"):
        load_config(own, training=False)
