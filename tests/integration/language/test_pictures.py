"""Prompts with pictures: what transformers' own processor and model make of them, and whole runs of SFT and GRPO."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra llm")

from test_reasoning import TWO_ACTORS, LanguageRun
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rlhpc.language.data import PromptTokenizer
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.tiny_vision import FAMILIES, make_tiny_vision_model
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.packing import pack
from rlhpc.language.tokens.pictures import Pictures, tell_places

pytestmark = pytest.mark.long(together=True)

CONFIG = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{name: run, run_dir: {folder}, max_steps: 4, save_interval: 2, logger: {{logger_backends: [jsonl]}}}}
data:
  train: {{source: drawn, size: 64, kwargs: {{tasks: [side, area], points: 56}}}}
  eval: [{{name: held_out, source: drawn, size: 8, kwargs: {{tasks: side, points: 56}}}}]
  max_prompt_tokens: 32
  prompts_per_step: 4
reward: {{terms: [{{name: "lm_rewards:ones"}}]}}
workflow: {{eval_suites: [held_out]}}
algorithm: {{group_size: 4}}
rollout: {{max_new_tokens: 4, max_batch_size: 16}}
actor:
  global_batch_size: 16
  model: {{model_path: "builtin:tiny_vl", kwargs: {{hidden: 32, heads: 2, layers: 2}}}}
  optim: {{lr: 1.0e-3}}
"""

OWN = CONFIG.replace("source: drawn, size: 64, kwargs: {{tasks: [side, area], points: 56}}", "path: rows.jsonl")


def picture(seed: int, width: int, height: int) -> bytes:
    """Noise, as a PNG."""
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Samples with no picture, one, and two between words, as one row and as a rectangle, beside transformers' own way from a
    conversation to logits, sample by sample; and a batch cut into two and joined again."""
    make_tiny_vision_model(tmp_path, family=family, hidden=64, heads=2, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    encoder = PromptTokenizer(tokenizer, 128, "error", True, key="data.train")
    unit = 28 if family == "qwen2_5_vl" else 32
    two = picture(1, unit, unit), picture(2, 2 * unit, 4 * unit)
    prompts = [
        Prompt(0, ({"role": "user", "content": "1+1="},)),
        Prompt(1, ({"role": "user", "content": "how many="},), images=(picture(0, 3 * unit, 2 * unit),)),
        Prompt(2, ({"role": "user", "content": "a<image>b<image>c="},), images=two),
    ]  # fmt: skip
    ids = [encoder.encode(prompt) for prompt in prompts]
    assert all(ids)
    seen = [encoder.seen(prompt, own) for prompt, own in zip(prompts, ids, strict=True)]
    own = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    theirs = []
    with torch.no_grad():
        for tokens, looked in zip(ids, seen, strict=True):
            row = torch.tensor([tokens])
            looks: dict[str, Any] = {"mm_token_type_ids": torch.zeros_like(row)}
            if looked is not None:
                looks = looked.inputs(len(tokens), "cpu")
            theirs.append(own(input_ids=row, attention_mask=torch.ones_like(row), **looks).logits[0])

    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    tell_places(model)
    batch = TokenBatch.of(ids, [[True] * len(one) for one in ids], pictures=Pictures.of(seen))
    batch = TokenBatch.joined(batch.split([1, 2]))
    with torch.no_grad():
        rectangle = batch.of_tokens(model(**batch.inputs()).logits)
        assert pack(model)
        row = batch.read_by(packed=True)
        packed = row.of_tokens(model(**row.inputs()).logits)
    for found in (rectangle, packed):
        torch.testing.assert_close(found, torch.cat(theirs), atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    """GRPO on drawn pictures: one actor, one rollout rank."""
    run = LanguageRun(tmp_path_factory.mktemp("pictures") / "plain", config=CONFIG)
    run.train()
    return run


def test_the_engine_sees_what_the_trainer_sees(reference: LanguageRun) -> None:
    """After each of the updates, of the part that looks, too; which would be noticed if the engine had old ones."""
    rows, start = reference.rows(), reference.weights(2)
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    moved = [name for name, value in reference.weights(4).items() if not torch.equal(value, start[name])]
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)


def test_it_resumes_and_is_evaluated_and_exported(reference: LanguageRun, tmp_path: Path) -> None:
    """To the last bit; and transformers loads what was exported, with what cuts pictures."""
    run = LanguageRun(tmp_path / "again", config=CONFIG)
    run.train("runner.max_steps=2")
    run.train("runner.resume_dir=auto")
    assert run.rows() == reference.rows()
    run.rlhpc("eval", "--run", str(run.root), "--output", "held_out.json", "--trust-checkpoint-code")
    assert json.loads((tmp_path / "again" / "held_out.json").read_text())["n"] == 8
    run.rlhpc("convert", "--run", str(run.root))
    export = run.root / "export" / "global_step_4"
    loaded = AutoModelForImageTextToText.from_pretrained(export).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in run.weights(4).items())
    assert (export / "preprocessor_config.json").is_file()


@pytest.mark.parametrize(
    "words",
    [
        [TWO_ACTORS, "actor.max_tokens_per_micro_batch=64"],
        ["actor.lora.rank=2"],
        ["actor.model.freeze_vision=true"],
    ],
    ids=["two actors", "adapters", "frozen"],
)
def test_other_ways_to_train(reference: LanguageRun, tmp_path: Path, words: list[str]) -> None:
    run = LanguageRun(tmp_path / "other", *words, config=CONFIG)
    run.train("runner.max_steps=2")
    rows, first = run.rows(), reference.rows()[0]
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    if TWO_ACTORS in words:
        for name in ("train/loss", "train/grad_norm", "train/reward"):
            assert rows[0][name] == pytest.approx(first[name], abs=1e-5)
    if "actor.model.freeze_vision=true" in words:
        start = AutoModelForImageTextToText.from_pretrained(next((tmp_path / "models").glob("tiny_vl*"))).state_dict()
        for name, value in run.weights(2).items():
            assert torch.equal(value, start[name]) == ("visual" in name), name


def test_pictures_of_ones_own(tmp_path: Path) -> None:
    """SFT from JSON lines: files beside them, and a data URL; two in one prompt; and the loss falls."""
    (tmp_path / "sft").mkdir()
    data, lines = tmp_path / "data", list[str]()
    data.mkdir()
    for number in range(8):
        (data / f"{number}.png").write_bytes(picture(number, 28, 28))
        url = "data:image/png;base64," + base64.b64encode(picture(number + 8, 56, 28)).decode()
        shown: Any = [f"{number}.png", url] if number % 2 else f"{number}.png"
        lines.append(json.dumps({"prompt": "=", "response": str(number), "answer": "", "shown": shown}))
    (data / "rows.jsonl").write_text("\n".join(lines))
    words = (
        "runner.task_type=sft", "cluster.component_placement={actor: 0}", "data.train.images_key=shown",
        f"data.train.path={data}/rows.jsonl",
        "runner.max_steps=12", "actor.optim.lr=1e-2", "data.eval=[]", "workflow.eval_suites=[]",
    )  # fmt: skip
    config = OWN.replace("grpo.yaml", "language.yaml").replace("algorithm: {{group_size: 4}}\n", "")
    run = LanguageRun(tmp_path / "sft", *words, config=config.replace("  global_batch_size: 16\n", ""))
    run.train()
    rows = run.rows()
    assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.model.model_path=builtin:tiny", "actor.model.kwargs={}"], "reads text alone: take a model that looks"),
        (["rollout.rollout_backend=vllm"], "rollout.rollout_backend is 'vllm', and the model in"),
        (["rollout.weight_sync=shards"], "rollout.weight_sync is 'shards', and the model in"),
        (["actor.training_backend=fsdp"], "actor.training_backend is 'fsdp', and the model in"),
        (["data.train.chat_template=false"], "data.train.chat_template is false: only a chat"),
        (["data.train.kwargs={tasks: colour}"], "data.train.kwargs.tasks is 'colour'; allowed: count, area, side"),
        (["actor.model.freeze_vision=true", "actor.lora.rank=2"], "actor.model.freeze_vision is true and actor.lora"),
        (["data.train.images_key=shown"], "rows.jsonl:1: column 'shown': there is no file"),
        (["data.train.images_key=other"], "data.train.images_key is 'other', but"),
        (["agent.kind=python", "agent.target=lm_agents:asks"], "prompts of data.train show pictures"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_mistake(tmp_path: Path, words: list[str], said: str) -> None:
    """Before anything starts, and nothing is written."""
    config = OWN if words[0].startswith("data.train.images_key") else CONFIG
    run = LanguageRun(tmp_path / "wrong", *words, config=config)
    (tmp_path / "wrong" / "rows.jsonl").write_text(json.dumps({"prompt": "=", "answer": "1", "shown": "none.png"}))
    found = run.train(code=2)
    assert said in found and "Traceback" not in found and not run.root.exists()
