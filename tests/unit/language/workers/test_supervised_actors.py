"""Actors of SFT, DPO and reward models, on one rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section, typed
from rlhpc.language.config.algorithms import DpoAlgorithmConfig
from rlhpc.language.config.run import DpoConfig, RewardRunConfig, SftConfig
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.workers.supervised_actors import (
    REF_LOGPROBS,
    DpoActor,
    EvaluationWorker,
    RewardModelActor,
    SftActor,
    pair_metrics,
)

Config = TypeVar("Config", SftConfig, DpoConfig, RewardRunConfig)
PAIRS = [(a, b) for a in range(1, 5) for b in range(1, 5)]


def rows_file(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def preferences(folder: Path) -> str:
    return rows_file(folder, [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": "no"} for a, b in PAIRS])


def config(
    config_type: type[Config], model: Path, train: dict[str, Any], max_tokens: int = 64, **sections: Any
) -> Config:
    given = {
        "runner": {"val_check_interval": 1},
        "data": {"train": train, "prompts_per_step": 8, "max_prompt_tokens": 12, **sections.pop("data", {})},
        "actor": {
            "model": {"model_path": str(model)}, "max_tokens_per_micro_batch": max_tokens,
            "optim": {"lr": 0.01, "lr_scheduler": "constant"},
        },
        **sections,
    }  # fmt: skip
    return typed(config_type, OmegaConf.merge(default_section(config_type), given))


def demonstrations(folder: Path, answer: str = "{}") -> dict[str, Any]:
    rows = [{"prompt": f"{a}+{b}=", "response": answer.format(a + b)} for a, b in PAIRS]
    return {"path": rows_file(folder, rows), "answer_key": "response", "eval_fraction": 0.3}


def test_an_sft_actor_learns_and_its_held_out_loss_does_not_depend_on_micro_batches(
    causal: Path, tmp_path: Path
) -> None:
    actors = [SftActor(config(SftConfig, causal, demonstrations(tmp_path), tokens)) for tokens in (16, 256)]
    for actor in actors:
        assert actor.init_worker(8)["dropped"] == 0
    first, other = (actor.validate() for actor in actors)
    assert first == pytest.approx(other, rel=1e-5), "one micro-batch has the numbers of several"
    assert first["rows"] == len(actors[0].held_out[1]) > 0 and first["tokens"] >= 2 * first["rows"]
    assert first["loss"] == pytest.approx(math.log(actors[0].tokenizer.vocab_size), abs=0.7), "of random weights"
    metrics = [actors[0].update(step) for step in range(1, 9)]
    assert metrics[0]["loss"] == pytest.approx(actors[1].update(1)["loss"], rel=1e-5)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5 and actors[0].trained_version() == 8
    assert metrics[0]["lr"] == 0.01 and metrics[0]["tokens"] >= 16 and metrics[0]["grad_norm"] > 0
    assert actors[0].validate()["loss"] < first["loss"] - 0.5


def test_an_sft_actor_drops_demonstrations_that_are_too_long(causal: Path, tmp_path: Path) -> None:
    mixed = [{"prompt": "1+1=", "response": "2" * (30 if row % 2 else 1)} for row in range(16)]
    data = {"path": rows_file(tmp_path, mixed), "answer_key": "response"}
    cfg = config(SftConfig, causal, data, max_tokens=16, data={"overlong_prompts": "drop"}, runner={})
    actor = SftActor(cfg)
    assert actor.init_worker(1)["dropped"] == 8 and len(actor.dataset) == 8


def test_a_dpo_actor_starts_at_its_reference_and_learns_to_prefer(causal: Path, tmp_path: Path) -> None:
    train = {"path": preferences(tmp_path), "eval_fraction": 0.3}
    actor = DpoActor(config(DpoConfig, causal, train))
    assert actor.init_worker(8)["dropped"] == 0
    held_out = actor.validate()
    assert held_out["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert held_out["margin"] == pytest.approx(0, abs=1e-6)
    assert held_out["rows"] == len(actor.held_out[1]) > 0 and len(actor.dataset) + held_out["rows"] == len(PAIRS)
    metrics = [actor.update(step) for step in range(1, 9)]
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics[0]["logps_chosen"] < 0 and metrics[0]["rewards_chosen"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["margin"] > 0.1 and metrics[-1]["accuracy"] == 1
    held_out = actor.validate()
    assert held_out["pair_accuracy"] == 1 and held_out["loss"] < math.log(2)


def test_pair_metrics_against_hand_calculation() -> None:
    """Two completions of two tokens and one, after prompts whose values must not count."""
    mask = [[False, True, True], [False, True]]
    reference = [torch.tensor([7.0, -1.0, -1.0]), torch.tensor([7.0, -1.0])]
    batch = TokenBatch.from_sequences([[1, 2, 3], [1, 2]], mask, {REF_LOGPROBS: reference})
    logprobs = torch.tensor([9.0, -0.5, -0.5, 9.0, -2.0])

    def measure(**options: Any) -> dict[str, float]:
        metrics = pair_metrics(DpoAlgorithmConfig(beta=0.1, **options), logprobs, batch)
        return {name: values.item() for name, values in metrics.items()}

    assert measure() == pytest.approx({
        "loss": math.log1p(math.exp(-0.2)), "accuracy": 1.0, "margin": 0.2, "rewards_chosen": 0.1, "rewards_rejected": -0.1,
        "logps_chosen": -1.0, "logps_rejected": -2.0,
    })  # fmt: skip
    ipo = measure(loss_type="ipo")
    assert ipo["loss"] == pytest.approx((1.5 - 1 / 0.2) ** 2), "of means over the tokens"
    assert ipo["margin"] == pytest.approx(0.2)


def test_a_micro_batch_without_tokens_has_no_pairs() -> None:
    batch = TokenBatch.from_sequences([[1, 2]], [[False, True]], {REF_LOGPROBS: [torch.zeros(2)]}).empty_sample()
    metrics = pair_metrics(DpoAlgorithmConfig(), torch.zeros(0, requires_grad=True), batch)
    assert {values.numel() for values in metrics.values()} == {0} and metrics["loss"].sum() == 0


def test_a_reward_model_learns_which_response_is_better(causal: Path, tmp_path: Path) -> None:
    path = preferences(tmp_path)
    sections = {"workflow": {"eval_suites": ["sums"]}, "data": {"eval": [{"name": "sums", "path": path}]}}
    actor = RewardModelActor(config(RewardRunConfig, causal, {"path": path}, **sections))
    assert actor.init_worker(8)["dropped"] == 0
    metrics = [actor.update(step) for step in range(1, 9)]
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[-1]["accuracy"] == 1 and metrics[-1]["margin"] > 0
    margin = metrics[0]["reward_chosen"] - metrics[0]["reward_rejected"]
    assert metrics[0]["margin"] == pytest.approx(margin, abs=1e-5)
    rows = actor.validate()["sums"]
    assert [row["place"] for row in rows] == [*range(len(PAIRS))] and rows[0]["prompt"] == "1+1="
    assert all(chosen > rejected for chosen, rejected in (row["rewards"] for row in rows))


def test_a_reward_model_learns_labels(causal: Path, tmp_path: Path) -> None:
    path = rows_file(tmp_path, [{"prompt": f"{a}+{b}=", "response": "5", "label": float(a > 2)} for a, b in PAIRS])
    cfg = config(RewardRunConfig, causal, {"path": path}, algorithm={"loss_type": "regression"}, runner={})
    actor = RewardModelActor(cfg)
    actor.init_worker(8)
    metrics = [actor.update(step) for step in range(1, 9)]
    assert metrics[-1]["mse"] < metrics[0]["mse"] and "accuracy" not in metrics[0]
    assert actor.validate() == {}, "without an interval there are no suites"


def test_engines_of_a_supervised_run_answer_as_its_suites_are_configured(causal: Path, tmp_path: Path) -> None:
    cfg = config(SftConfig, causal, demonstrations(tmp_path), rollout={"rollout_backend": "hf"})
    assert EvaluationWorker.forks(cfg) and not EvaluationWorker.preloads(cfg)
    worker = EvaluationWorker(cfg)
    assert worker.cfg.data.train.path == cfg.data.train.path
    worker.close()
