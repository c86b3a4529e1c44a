"""Sweeps as a user meets them: one command for all runs and a page, values that come and go, a run that fails, a cancel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.integration.tiny_run import wait_until
from tests.warm.commands import Commands

pytestmark = pytest.mark.long(together=True)

ROOT = Path(__file__).resolve().parents[2]
RULES: dict[str, str] = {}
CONFIG = f"""
defaults: [{ROOT}/configs/quickstart.yaml]
runner: {{name: lr, segments: 1, max_steps: 2, save_interval: -1, logger: {{logger_backends: [jsonl]}}}}
algorithm: {{rollout_steps: 16, update_epochs: 1}}
actor: {{global_batch_size: 32}}
env: {{train: {{num_envs: 4}}, eval: {{num_envs: 2, num_episodes: 4}}}}
sweep:
  grid: {{actor.optim.lr: [1e-3, 1e-2]}}
  seeds: [1, 2]
  max_queued: 1
"""


@pytest.fixture(scope="module", autouse=True)
def rules() -> Iterator[None]:
    """What the rules' shells call rlhpc."""
    with Commands() as commands:
        RULES.update(commands.environment)
        yield
    RULES.clear()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rlhpc.cli", *words]


def rlhpc(folder: Path, *words: str, code: int = 0) -> str:
    """Runs a command to its end; returns everything it said."""
    done = warm.run(
        command(*words), cwd=folder, env={**os.environ, **RULES}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return str(done.stdout)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a sweep of two values at two seeds that went through."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "lr.yaml").write_text(CONFIG)
    (folder / "said.txt").write_text(rlhpc(folder, "run", "lr.yaml"))
    return folder


NAMES = ["lr_0.001-s1", "lr_0.001-s2", "lr_0.01-s1", "lr_0.01-s2"]


def test_every_run_is_trained_evaluated_exported_and_reported(swept: Path) -> None:
    said = (swept / "said.txt").read_text()
    assert "lr: 4 of 4 runs finished" in said and "page    runs/lr/compare.html" in said
    for name in NAMES:
        run = swept / "runs/lr" / name
        assert json.loads((run / "eval/global_step_2/default.json").read_text())["episodes"] == 4
        assert (run / "export/global_step_2/model.safetensors").is_file() and (run / "report/index.html").is_file()
        assert f"{name}: training" in said and f"{name}: done" in said
    assert [run["name"] for run in json.loads((swept / "runs/lr/sweep.json").read_text())["runs"]] == NAMES


def test_no_more_are_trained_at_once_than_allowed(swept: Path) -> None:
    log = (swept / "runs/lr/logs/workflow/snakemake.log").read_text()
    events = re.findall(r"^(?:localrule|Finished jobid: \d+ \(Rule:) (\w+_train_segment)", log, re.MULTILINE)
    assert len(events) == 8 and events[::2] == events[1::2]


def test_the_page_compares_them(swept: Path) -> None:
    page = (swept / "runs/lr/compare.html").read_text()
    assert "Sweep lr" in page and "4 of 4" in page and "P(best &gt; this)" in page
    scores = [
        json.loads((swept / f"runs/lr/{name}/eval/global_step_2/default.json").read_text())["return_mean"]
        for name in NAMES
    ]
    best = max("lr=0.001", "lr=0.01", key=lambda label: sum(scores[:2] if label == "lr=0.001" else scores[2:]))
    assert f"<b>{best}</b>" in page
    assert all(f'<a href="{name}/report/index.html">{name}</a>' in page for name in NAMES)
    elsewhere = swept / "elsewhere.html"
    rlhpc(swept, "compare", "runs/lr", "--output", str(elsewhere), "--metric", "train/none")
    assert "do not have train/none at a step in common; there are: eval/" in elsewhere.read_text()


def jobs_of(said: str) -> set[str]:
    return set(re.findall(r"^(?:local)?(?:rule|checkpoint) (\w+):", said, re.MULTILINE)) - {"all"}


def test_only_what_is_new_runs(swept: Path) -> None:
    assert jobs_of(rlhpc(swept, "run", "lr.yaml", "-n")) == set()
    added = jobs_of(rlhpc(swept, "run", "lr.yaml", "-n", "sweep.grid.actor.optim.lr=[1e-3, 1e-2, 0.1]"))
    assert {job for job in added if "_s1_" in job} == {
        f"run_lr_0_1_s1_{rule}" for rule in ("prepare", "train_segment", "eval", "convert", "report")
    }
    assert {job.split("_s")[0] for job in added} == {"run_lr_0_1", "compare"}
    assert jobs_of(rlhpc(swept, "run", "lr.yaml", "-n", "sweep.seeds=[2]")) == {"compare"}


def test_a_run_that_fails_stops_no_other_and_is_named(swept: Path) -> None:
    broken = "{name: broken, env.train.kwargs: {no_such: 1}}"
    sweep = f"sweep={{list: [{broken}, {{actor.optim.lr: 1e-3}}, {{actor.optim.lr: 2e-3}}], seeds: [1]}}"
    said = rlhpc(swept, "run", "lr.yaml", sweep, "--", "--config", "retries=0", code=1)
    assert "lr: 2 of 3 runs finished" in said and "broken-s1: failed: prepare" in said
    assert "broken-s1: failed, refused before its start: env_id 'CartPole-v1' refuses kwargs" in said
    assert "no_such" in said.rpartition("runs finished")[2] and "rlhpc run lr.yaml" in said
    page = (swept / "runs/lr/compare.html").read_text()
    assert '<td class="t bad">' in page and "2 of 3" in page and "lr_0.002-s1" in page
    assert "lr_0.01-s1" not in page  # the sweep does not name it now
    status = rlhpc(swept, "status", "runs/lr")
    assert re.search(r"lr_0\.01-s1 .*not in the sweep any more", status)


@pytest.mark.chaos
def test_cancel_ends_all_and_the_workflow_starts_no_other(tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text(CONFIG)
    words = ("run", "lr.yaml", "runner.max_steps=100000", "runner.save_interval=1")
    started: Any = subprocess.Popen(
        command(*words), cwd=tmp_path, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    sweep = tmp_path / "runs/lr"
    wait_until(lambda: any(path.stat().st_size for path in sweep.glob("*/metrics.jsonl")))
    assert "was cancelled" in rlhpc(tmp_path, "cancel", "runs/lr")
    said, _ = started.communicate(timeout=240)
    assert started.returncode != 0 and "0 of 4 runs finished" in said
    assert len([*sweep.glob("*/submit/segment_0.json")]) == 1  # the others were never submitted
    assert "cancelled, rlhpc run goes on with it" in rlhpc(tmp_path, "status", "runs/lr")
    rlhpc(tmp_path, "run", "lr.yaml", "runner.max_steps=2", "-n")


def test_a_preparation_is_in_the_graph_once(tmp_path: Path) -> None:
    sweep = "sweep={grid: {actor.optim.lr: [1e-4, 2e-4]}, seeds: [1, 2]}"
    said = rlhpc(tmp_path, "run", str(ROOT / "configs/reasoning/demo.yaml"), sweep, "runner.segments=1", "-n")
    jobs = jobs_of(said)
    made = {f"run_lr_0_0001_s{seed}_{rule}" for seed in (1, 2) for rule in ("sft", "convert_sft")}
    assert {job for job in jobs if job.endswith("sft")} == made
    assert len([job for job in jobs if job.endswith("_train_segment")]) == 4
