"""Suites that engines answer while a model learns from demonstrations or preferences."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.extras import need_extra

need_extra("llm")

from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError
from tests import warm

ENGINE = "cluster.component_placement={actor: 0, rollout: 0}"
MEASURED = ("accuracy", "reward", "response_tokens", "truncated")


class Folder:
    """A folder with demonstrations, preferences, problems and two configurations, and the runs there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        sums = [(a, b) for a in range(10, 30) for b in range(1, 6)]
        rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)} for a, b in sums]
        pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a)} for a, b in sums]
        for name, content in (("rows", rows), ("problems", rows[:7]), ("pairs", pairs)):
            (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        self._write("sft", "rows")
        self._write("dpo", "pairs")

    def _write(self, task_type: str, data: str) -> None:
        cfg = {
            "runner": {
                "name": "run", "task_type": task_type, "run_dir": str(self.path / "runs"), "max_steps": 3,
                "val_check_interval": 2,
                "logger": {"logger_backends": ["jsonl"]},
            },
            "cluster": {"accelerators_per_node": 0, "component_placement": {"actor": 0}},
            "data": {
                "train": {"path": str(self.path / f"{data}.jsonl"), "eval_fraction": 0.1}, "prompts_per_step": 16,
                "eval": [{"name": "sums", "path": str(self.path / "problems.jsonl"), "samples": 2, "temperature": 1.0}],
                "max_prompt_tokens": 30,
            },
            "reward": {"terms": [{"name": "format", "kwargs": {"pattern": "[0-9].*"}}]},
            "rollout": {"max_new_tokens": 6},
            "workflow": {"eval_suites": ["sums"]},
            "actor": {
                "max_tokens_per_micro_batch": 256, "optim": {"lr": 0.003},
                "model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 2, "heads": 1}},
            },
        }  # fmt: skip
        (self.path / f"{task_type}.yaml").write_text(yaml.safe_dump(cfg))

    def rlhpc(self, *words: str) -> None:
        environment = {**os.environ, "RLHPC_MODELS": str(self.path / "models"), "OMP_NUM_THREADS": "1"}
        done = warm.run([sys.executable, "-m", "rlhpc.cli", *words], cwd=self.path, env=environment, capture_output=True,
                        text=True, timeout=280)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def train(self, task_type: str, name: str, *words: str) -> list[dict[str, Any]]:
        """Trains a run; returns its rows."""
        self.rlhpc("train", f"{task_type}.yaml", f"runner.name={name}", *words)
        text = (self.path / "runs" / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("suites"))


def suites_of(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Returns the metrics of the suite, by step."""
    return {
        row["step"]: {name: row[f"eval/{name}"] for name in MEASURED} for row in rows if "eval/response_tokens" in row
    }


@pytest.mark.parametrize("task_type", ["sft", "dpo"])
def test_suites_are_answered_as_a_checkpoint_is_evaluated(task_type: str, folder: Folder) -> None:
    """At the interval and after the last step, beside the held-out loss; training is the same as without."""
    rows = folder.train(task_type, f"{task_type}-answered", ENGINE)
    measured = suites_of(rows)
    assert [*measured] == [2, 3] and all("eval/loss" in row for row in rows if row["step"] in measured)
    run, result = folder.path / "runs" / f"{task_type}-answered", folder.path / f"{task_type}.json"
    folder.rlhpc("eval", "--run", str(run), "--suite", "sums", "--output", str(result))
    evaluated = json.loads(result.read_text())
    assert measured[3] == pytest.approx(
        {
            "accuracy": evaluated["accuracy"],
            "reward": evaluated["reward_mean"],
            "response_tokens": evaluated["response_tokens"]["mean"],
            "truncated": evaluated["truncated"],
        }
    )
    if task_type == "sft":
        alone = folder.train("sft", "alone")
        assert [row["train/loss"] for row in alone] == [row["train/loss"] for row in rows] and not suites_of(alone)
        divided = folder.train("sft", "divided", 'cluster.component_placement={actor: "0:0-1", rollout: "0:0-1"}')
        assert suites_of(divided)[3]["response_tokens"] == pytest.approx(measured[3]["response_tokens"], abs=0.5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runner.keep_best=eval/accuracy"], "set cluster.component_placement.rollout, such as 0"),
        ([ENGINE, "runner.val_check_interval=-1"], "the group 'rollout' of cluster.component_placement"),
        ([ENGINE, "reward.terms=[]"], "reward.terms is []; say how the answers to the suites are judged"),
        ([ENGINE, "data.eval=[]", "workflow.eval_suites=[]"], "data.eval is empty"),
        (["cluster.component_placement={actor: 0, critic: 0}"], "components: actor, rollout"),
    ],
)
@pytest.mark.parametrize("task_type", ["sft", "dpo"])
def test_engines_without_suites_and_suites_without_engines_are_refused(
    task_type: str, words: list[str], says: str, folder: Folder
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(folder.path / f"{task_type}.yaml", words)
    assert says in str(refused.value)


def test_the_best_checkpoint_may_be_that_of_a_suite(folder: Folder) -> None:
    load_config(folder.path / "sft.yaml", [ENGINE, "runner.keep_best=eval/accuracy"])
    load_config(folder.path / "dpo.yaml", [ENGINE, "runner.keep_best=eval/pass_at_2"])
