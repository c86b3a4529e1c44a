"""Names of metrics that choose a checkpoint are those that evaluations during training give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from rlhpc.algorithms.preference_losses import find_reward_loss
from rlhpc.language.evaluation.reward_model import preference_validation_metrics as preference_metrics
from rlhpc.language.rollout.validation import validation_metrics as answer_metrics
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import task_type_of

CONFIGS = Path(__file__).resolve().parents[4] / "configs/reasoning"
EVERY = "runner.val_check_interval=5"


def names_of(config: str, *words: str) -> set[str]:
    cfg: Any = load_config(CONFIGS / config, [EVERY, "runner.name=x", *words])
    return set(task_type_of(cfg).checks.evaluation_metrics(cfg))


@pytest.mark.parametrize("samples", [1, 2])
def test_of_answers(samples: int) -> None:
    rows = [
        {
            "place": place, "sample": sample, "id": place, "reward": 1.0, "right": True, "failed": False, "finished": True,
            "tokens": 3, "level": "", "vote": "1", "terms": {"exact": 1.0},
        }
        for place in range(2)
        for sample in range(samples)
    ]  # fmt: skip
    given = answer_metrics([{"held_out": rows, "other": rows}])
    suite = "{{name: {0}, source: arithmetic, samples: {1}, temperature: 1.0}}"
    words = [
        f"data.eval=[{suite.format('held_out', samples)}, {suite.format('other', samples)}]",
        "workflow.eval_suites=[held_out, other]",
    ]
    names = names_of("demo.yaml", *words)
    assert names <= {*given} and {"eval/accuracy", "eval/other/accuracy"} <= names


@pytest.mark.parametrize(("loss_type", "responses"), [("bradley_terry", 2), ("regression", 1)])
def test_of_preferences_and_the_held_out_loss_is_that_of_training(loss_type: str, responses: int) -> None:
    loss, form = find_reward_loss(loss_type)
    rewards = torch.randn(7, responses, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = [
        {"place": place, "rewards": own, "target": place / 7, "level": "", "prompt": str(place)}
        for place, own in enumerate(rewards.tolist())
    ]
    parts = [{"held_out": rows[rank::3]} for rank in range(3)]
    given = preference_metrics(parts, form, loss)
    chosen = f"algorithm={{loss_type: {loss_type}, loss_kwargs: {{}}}}"
    assert names_of("reward_model.yaml", chosen) <= {*given}
    each = loss(*rewards.unbind(1), torch.arange(7, dtype=torch.float64) / 7)
    assert given["eval/loss"] == pytest.approx(float(each.mean()), abs=1e-12)
