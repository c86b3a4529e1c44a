"""What `bench.gpu` hands to TRL, held by the installed TRL."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm", "trl")

from transformers import AutoTokenizer
from trl import GRPOConfig, SFTConfig

from bench.gpu import curve, step
from bench.gpu.part import ROOT, Report
from rlhpc.language.models.tiny import make_tiny_model


def on_a_card(config_class: type[Any], options: dict[str, Any]) -> set[str]:
    """Names of options that the class of arguments lacks; it cannot be made where no card computes in bfloat16."""
    return options.keys() - {field.name for field in dataclasses.fields(config_class)}


@pytest.mark.parametrize("liger", [False, True], ids=["torch", "liger"])
def test_trl_takes_the_arguments_of_a_training_step(tmp_path: Path, liger: bool) -> None:
    assert not on_a_card(SFTConfig, step.trl_options(step.QWEN, tmp_path, is_small=False, liger=liger))
    options = step.trl_options(step.SMALL, tmp_path, is_small=True, liger=False)
    config = SFTConfig(**options)
    assert {name: getattr(config, name) for name in options if name != "report_to"} == {
        name: value for name, value in options.items() if name != "report_to"
    }
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == step.SMALL.sequences
    assert not config.packing and not config.padding_free, "rows are equally long, and none is joined with another"


def test_trl_takes_the_arguments_of_a_learning_curve(tmp_path: Path) -> None:
    assert not on_a_card(GRPOConfig, curve.trl_options(tmp_path, "cuda"))
    options = curve.trl_options(tmp_path, "cpu")
    config = GRPOConfig(**options)
    assert config.generation_batch_size == curve.prompts_on("cpu") * curve.GROUP, "the samples of a step of rlhpc"
    assert config.num_iterations == 1 and (config.epsilon, config.epsilon_high) == (0.2, 0.28)
    assert config.loss_type == "dapo" and config.scale_rewards == "group" and config.beta == 0.0


def test_trl_trains_the_steps_that_are_timed(tmp_path: Path) -> None:
    step.make_model(tmp_path / "model", step.SMALL, "cpu")
    seconds = step.train_trl(Report("step", "cpu", 0, tmp_path / "figures"), tmp_path / "model", step.SMALL, tmp_path)
    assert len(seconds) == step.REPEAT and min(seconds) > 0


@pytest.mark.long
def test_trl_trains_a_learning_curve(tmp_path: Path) -> None:
    """The process of TRL's side, from a model that has a tokenizer with a chat template, for two steps."""
    make_tiny_model(tmp_path / "model", context=192)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    output = tmp_path / "trl.json"
    command = [sys.executable, "-m", "bench.gpu.curve", str(tmp_path / "model"), str(output), "0.001", "cpu"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr[-3000:]
    rows = json.loads(output.read_text())
    assert len(rows) == 2 and all(0 <= reward <= 1 and seconds >= 0 for seconds, reward in rows)
