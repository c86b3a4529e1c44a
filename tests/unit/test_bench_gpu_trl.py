"""What `bench.gpu` hands to TRL, held by the installed TRL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extras import RANK_VARIABLES, need_extra

need_extra("llm", "trl")

from transformers import AutoTokenizer

from bench.gpu import curve, step
from bench.gpu.part import ROOT
from rlhpc.language.models.tiny import make_tiny_model

#: TRL's classes of arguments join a process's group, and other tests here may be ranks: a process of its own makes them.
PROGRAM = """
import dataclasses, json, sys
from pathlib import Path

from trl import GRPOConfig, SFTConfig

from bench.gpu import curve, step
from bench.gpu.part import Report

folder = Path(sys.argv[1])
card = [step.trl_options(step.QWEN, folder, is_small=False, liger=liger) for liger in (False, True)]
curve_options = curve.trl_options(folder, "cuda")
small, learning = step.trl_options(step.SMALL, folder, is_small=True, liger=False), curve.trl_options(folder, "cpu")
known = [{field.name for field in dataclasses.fields(kind)} for kind in (SFTConfig, GRPOConfig)]
step.make_model(folder / "model", step.SMALL, "cpu")
print(json.dumps({
    "unknown": [*(sorted({*options} - known[0]) for options in card), sorted({*curve_options} - known[1])],
    "small": small, "sft": SFTConfig(**small).to_dict(), "grpo": GRPOConfig(**learning).to_dict(),
    "seconds": step.train_trl(Report("step", "cpu", 0, folder / "figures"), folder / "model", step.SMALL, folder),
}, default=str))
"""


def environment() -> dict[str, str]:
    """This process's environment, of which no rank's variables are left."""
    return {name: setting for name, setting in os.environ.items() if name not in RANK_VARIABLES}


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TRL makes of the options of a training step and a learning curve on a CPU, and the times of its training steps."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("trl"))]
    completed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return dict(json.loads(completed.stdout.splitlines()[-1]))


def test_trl_knows_all_options(trl: dict[str, Any]) -> None:
    """Those of a card too, which cannot be made where none computes in bfloat16."""
    assert trl["unknown"] == [[], [], []]


def test_trl_takes_the_arguments_of_a_training_step(trl: dict[str, Any]) -> None:
    config, names = trl["sft"], trl["small"].keys() - {"report_to", "pad_token"}  # `to_dict` hides tokens
    assert {name: config[name] for name in names} == {name: trl["small"][name] for name in names}
    assert config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] == step.SMALL.sequences
    assert not config["packing"] and not config["padding_free"], (
        "rows are equally long, and none is joined with another"
    )


def test_trl_takes_the_arguments_of_a_learning_curve(trl: dict[str, Any]) -> None:
    config = trl["grpo"]
    assert config["generation_batch_size"] == curve.prompts_on("cpu") * curve.GROUP, "the samples of a step of rlhpc"
    assert config["num_iterations"] == 1 and (config["epsilon"], config["epsilon_high"]) == (0.2, 0.28)
    assert config["loss_type"] == "dapo" and config["scale_rewards"] == "group" and config["beta"] == 0.0


def test_trl_trains_the_steps_that_are_timed(trl: dict[str, Any]) -> None:
    assert len(trl["seconds"]) == step.REPEAT and min(trl["seconds"]) > 0


@pytest.mark.long
def test_trl_trains_a_learning_curve(tmp_path: Path) -> None:
    """The process of TRL's side, from a model that has a tokenizer with a chat template, for two steps."""
    make_tiny_model(tmp_path / "model", context=192)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template
    output = tmp_path / "trl.json"
    command = [sys.executable, "-m", "bench.gpu.curve", str(tmp_path / "model"), str(output), "0.001", "cpu"]
    completed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr[-3000:]
    rows = json.loads(output.read_text())
    assert len(rows) == 2 and all(0 <= reward <= 1 and seconds >= 0 for seconds, reward in rows)
