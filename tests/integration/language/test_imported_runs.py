"""Runs of translated configurations: what `rlhpc config import` writes for RLinf's files trains, with tiny models."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.extras import need_extra

need_extra("llm")

from tests.unit.cli.foreign.rlinf_configs import CRITIC, LANGUAGE, merged
from tests.unit.cli.foreign.test_rlinf_agents import CODE
from tests.unit.cli.foreign.test_rlinf_language_kinds import SFT

pytestmark = pytest.mark.long

CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>/.,:;?!'{}\\\"_[]()|# \n"
SMALL = (
    "runner.max_steps=2", "runner.logger.logger_backends=[jsonl]", "cluster.num_nodes=1", "cluster.accelerators_per_node=0",
    "data.prompts_per_step=4", "data.max_prompt_tokens=512", "actor.max_tokens_per_micro_batch=2048",
)  # fmt: skip
ENGINE = (
    "rollout.rollout_backend=hf", "rollout.max_new_tokens=6", "rollout.max_model_len=1024", "rollout.parallel.tensor=null",
    "algorithm.group_size=4", "actor.global_batch_size=null", "actor.parallel.tensor=1", "actor.model.model_path=builtin:tiny",
    f"actor.model.kwargs={json.dumps({'vocabulary': CHARACTERS, 'context': 1024, 'hidden': 32, 'layers': 1, 'heads': 2})}",
)  # fmt: skip


def picture() -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (56, 56), (200, 10, 10)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def train(folder: Path, tree: Any, *overrides: str) -> list[dict[str, float]]:
    """Imports a configuration, trains it with overrides, and returns the rows of its metrics."""
    (folder / "theirs.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    changes = (*SMALL, "runner.name=run", f"runner.run_dir={folder}", *overrides)
    for words in (["config", "import", "theirs.yaml", "-o", "ours.yaml"], ["train", "ours.yaml", *changes]):
        done = subprocess.run([sys.executable, "-m", "rlhpc.cli", *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def problems(folder: Path, **columns: Any) -> None:
    rows = [{"problem": f"{n}+1=", "solution": str(n + 1), **columns} for n in range(16)]
    for name in ("a.jsonl", "c.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


DATA = {"data": {"train_data_paths": ["a.jsonl"], "val_data_paths": ["c.jsonl"]}}


@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo with a critic"])
def test_a_language_model(critic: bool, tmp_path: Path) -> None:
    problems(tmp_path)
    reward = "reward.terms=[{name: format, kwargs: {pattern: '[0-4]', anywhere: true}}]"
    if not critic:
        rows = train(
            tmp_path, merged(LANGUAGE, DATA), *ENGINE, reward, "cluster.component_placement={actor: 0, rollout: 0}"
        )
    else:
        tree = merged(merged(LANGUAGE, CRITIC), DATA)
        del tree["cluster"]["component_placement"]["actor,rollout,reward"]
        places = "cluster.component_placement={actor: 0, rollout: 0, critic: 0}"
        rows = train(tmp_path, tree, *ENGINE, reward, places, "critic.max_tokens_per_micro_batch=2048")
    assert len(rows) == 2 and all(row["train/grad_norm"] > 0 for row in rows)
    assert all(any(name.startswith("critic/") for name in row) for row in rows) is critic


def test_an_agent_with_tools(tmp_path: Path) -> None:
    problems(tmp_path)
    rows = train(
        tmp_path, merged(merged(LANGUAGE, CODE), DATA), *ENGINE, "cluster.component_placement={actor: 0, rollout: 0}"
    )
    assert len(rows) == 2 and all(row["agent/samples"] >= 1 and row["agent/failed"] == 0 for row in rows)


def test_supervised_on_pictures(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    for part in ("train", "eval"):
        rows = [{"question": f"{part[0]}{n}?", "finding": str(n % 4), "scan": picture()} for n in range(8)]
        (tmp_path / f"scans/{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabulary = {"vocabulary": "abcdefghijklmnopqrstuvwxyz0123456789?", "context": 512}
    metrics = train(
        tmp_path, SFT, "cluster.component_placement={actor: 0}", "actor.model.model_path=builtin:tiny_vl",
        f"actor.model.kwargs={json.dumps(vocabulary)}", "runner.val_check_interval=1", "actor.optim.lr_warmup_steps=0",
    )  # fmt: skip
    assert len(metrics) == 2 and all(row["eval/loss"] > 0 and row["train/grad_norm"] > 0 for row in metrics)
