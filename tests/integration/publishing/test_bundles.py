"""Bundles of runs: accepted by the community's validator, and repeated bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extras import find_python, need_extra, needs_python
from tests.integration.tiny_run import TinyRun

ROOT = Path(__file__).resolve().parents[3]
PROFILES = ("workflow-run-crate-0.5", "ro-crate-1.1")
TINY_LANGUAGE = (
    "runner.name=tiny", "runner.max_steps=2", "runner.segments=1", "runner.save_interval=2", "workflow.sft=null",
    "workflow.sft_overrides=[]", "workflow.eval_start=false", "actor.model.model_path=builtin:tiny", "data.prompts_per_step=4",
    "actor.global_batch_size=32",
    "data.eval=[{name: held_out, source: arithmetic, size: 8, eval_fraction: 0.2, kwargs: {digits: 2, operators: +}}]",
)  # fmt: skip


def rlhpc(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", *words], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a short run of the quickstart."""
    folder = tmp_path_factory.mktemp("quickstart")
    run = TinyRun(folder / "runs")
    trained = rlhpc(*run.command()[3:], folder=ROOT)
    assert trained.returncode == 0, trained.stderr
    bundled = rlhpc("bundle", str(run.root), "-o", str(folder / "quickstart.zip"), folder=ROOT)
    assert bundled.returncode == 0, bundled.stderr
    return folder / "quickstart.zip"


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a short run of the language demo, from the model that its SFT begins with."""
    need_extra("llm")
    folder = tmp_path_factory.mktemp("language")
    config = str(ROOT / "configs" / "reasoning" / "demo.yaml")
    trained = rlhpc("train", config, *TINY_LANGUAGE, f"runner.run_dir={folder}/runs", folder=folder)
    assert trained.returncode == 0, trained.stderr
    bundled = rlhpc("bundle", "runs/tiny", "-o", "tiny.zip", folder=folder)
    assert bundled.returncode == 0, bundled.stderr
    return folder / "tiny.zip"


@pytest.mark.timeout(2000)
@needs_python("crate")
@pytest.mark.parametrize("name", ["quickstart", pytest.param("language", marks=pytest.mark.long(together=True))])
def test_the_communitys_validator_accepts_it(name: str, request: pytest.FixtureRequest) -> None:
    bundle = request.getfixturevalue(name)
    command = [find_python("crate"), str(ROOT / "tests" / "crate_validator.py"), str(bundle), *PROFILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {profile: [] for profile in PROFILES}


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", ["quickstart", pytest.param("language", marks=pytest.mark.long(together=True))])
def test_repeated_it_is_the_same_bit_for_bit(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    bundle = request.getfixturevalue(name)
    shown = rlhpc("reproduce", str(bundle), folder=tmp_path)
    assert "expected: the same bit for bit" in shown.stdout, shown.stdout + shown.stderr
    done = rlhpc("reproduce", str(bundle), "--trust", "--into", "again", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "again" / "reproduction.json").read_text())
    assert facts["equal"] and facts["compared"]["weights"] and facts["compared"]["rows"]
    assert "the same bit for bit: " in done.stdout
    [checkpoints] = (tmp_path / "again" / "runs").glob("*/checkpoints")
    record = json.loads((tmp_path / "again" / "bundle.json").read_text())
    manifest = json.loads((checkpoints / f"global_step_{record['global_step']}" / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"] == record["checkpoints"][-1]["files"]["model.safetensors"]
