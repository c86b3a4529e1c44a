"""DPO from start to end: trained, resumed, on several ranks and backends, measured on held-out pairs, and exported."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.extras import need_extra

need_extra("llm")

from rlhpc.checkpoint.state import load_state, load_tensors
from rlhpc.cli import main
from rlhpc.language.data import PromptSampler
from tests import warm
from tests.stderr import error_lines

pytestmark = pytest.mark.long(together=True)

TWO_RANKS = 'cluster.component_placement={actor: "0:0-1"}'
LORA = "actor.lora.rank=4"
PARTS = {"train": (10, 24), "held_out": (30, 35)}
BETA = 0.4


def rows(first: int, last: int) -> list[dict[str, Any]]:
    """Sums with the right result, and a wrong one of another length."""
    return [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1) + "0" * (a % 3)}
        for a in range(first, last)
        for b in range(1, 4)
    ]


class Folder:
    """A folder with data and a configuration, and the runs there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name, bounds in PARTS.items():
            (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(*bounds)))
        cfg = {
            "runner": {
                "task_type": "dpo", "run_dir": str(path / "runs"), "max_steps": 6, "save_interval": 3,
                "val_check_interval": 3, "logger": {"logger_backends": ["jsonl"]},
            },
            "cluster": {"accelerators_per_node": 0, "component_placement": {"actor": 0}},
            "data": {
                "train": {"path": str(path / "train.jsonl")}, "holdout": {"path": str(path / "held_out.jsonl")},
                "eval": [{"name": "sums", "source": "arithmetic", "size": 4, "kwargs": {"digits": 1}}],
                "prompts_per_step": 42, "max_prompt_tokens": 30,  # all pairs
            },
            "reward": {"terms": [{"name": "exact"}]},
            "rollout": {"max_new_tokens": 4},
            "algorithm": {"beta": BETA},
            "actor": {
                "max_tokens_per_micro_batch": 128, "optim": {"lr": 0.003, "lr_scheduler": "cosine", "clip_grad": 1.0},
                "model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 2, "heads": 2}},
            },
        }  # fmt: skip
        (path / "run.yaml").write_text(yaml.safe_dump(cfg))

    def rlhpc(self, *words: str, code: int = 0) -> str:
        environment = {**os.environ, "RLHPC_MODELS": str(self.path / "models"), "OMP_NUM_THREADS": "1"}
        done = warm.run([sys.executable, "-m", "rlhpc.cli", *words], cwd=self.path, env=environment, capture_output=True,
                        text=True, timeout=280)  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def train(self, name: str, *words: str) -> Path:
        self.rlhpc("train", "run.yaml", f"runner.name={name}", *words)
        return self.path / "runs" / name


def metrics(run: Path) -> list[dict[str, float]]:
    """Rows without the clock's."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in lines]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("dpo"))


@pytest.fixture(scope="module")
def one(folder: Folder) -> Path:
    """A run on one rank, without interruption."""
    return folder.train("one")


@pytest.fixture(scope="module")
def start(folder: Folder, one: Path) -> Path:
    """The weights from before training, as a Hugging Face folder."""
    run = folder.train("start", "actor.optim.lr=1.0e-30", "runner.max_steps=1", "runner.val_check_interval=-1")
    folder.rlhpc("convert", "--run", str(run), "--dtype", "float32")
    return run / "export" / "global_step_1"


def test_it_learns_to_prefer_and_begins_at_the_reference(one: Path) -> None:
    found = metrics(one)
    assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-7)
    for name in ("margin", "rewards_chosen", "rewards_rejected", "accuracy"):
        assert found[0][f"train/{name}"] == 0.0, name
    assert found[-1]["train/loss"] < 0.6 and found[-1]["train/accuracy"] > 0.7
    assert ["eval/pair_accuracy" in row for row in found] == [False, False, True, False, False, True]
    held_out = found[-1]
    assert held_out["eval/rows"] == 15 and held_out["eval/pair_accuracy"] > 0.7 and held_out["eval/loss"] < math.log(2)
    for name in ("train", "eval"):
        difference = held_out[f"{name}/rewards_chosen"] - held_out[f"{name}/rewards_rejected"]
        assert held_out[f"{name}/margin"] == pytest.approx(difference, abs=1e-5) and difference > 0


class PlainLoop:
    """DPO as one would write it in an afternoon: one process, torch and transformers alone, a pair at a time."""

    def __init__(self, folder: Path, loss_type: str, smoothing: float) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.frozen = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
        self.tokenizer, self.loss_type, self.smoothing = AutoTokenizer.from_pretrained(folder), loss_type, smoothing

    def logprobs(self, model: Any, prompt: str, completion: str) -> torch.Tensor:
        """Those of a completion's tokens and of the end token."""
        question = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        answer = [*self.tokenizer.encode(completion, add_special_tokens=False), self.tokenizer.eos_token_id]
        logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]

    def loss(self, batch: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean over the batch, and metrics."""
        losses, measured = list[torch.Tensor](), list[dict[str, torch.Tensor]]()
        for row in batch:
            pi, ref = (
                [self.logprobs(model, row["prompt"], row[name]) for name in ("chosen", "rejected")]
                for model in (self.model, self.frozen)
            )
            if self.loss_type == "ipo":
                h = (pi[0].mean() - ref[0].mean()) - (pi[1].mean() - ref[1].mean())
                losses.append((h - 1 / (2 * BETA)) ** 2)
            else:
                h = BETA * ((pi[0].sum() - pi[1].sum()) - (ref[0].sum() - ref[1].sum()))
                log = torch.nn.functional.logsigmoid
                losses.append(-(1 - self.smoothing) * log(h) - self.smoothing * log(-h))
            rewards = [BETA * (mine.sum() - theirs.sum()) for mine, theirs in zip(pi, ref, strict=True)]
            measured.append(
                {
                    "rewards_chosen": rewards[0], "rewards_rejected": rewards[1], "margin": rewards[0] - rewards[1],
                    "accuracy": (rewards[0] > rewards[1] + 1e-7).float(), "logps_chosen": pi[0].sum(),
                    "logps_rejected": pi[1].sum(),
                }
            )  # fmt: skip
        means = {name: torch.stack([each[name] for each in measured]).mean() for name in measured[0]}
        return torch.stack(losses).mean(), means


PLAIN = {
    "sigmoid": ([], 0.0),
    "smoothed": (["algorithm.label_smoothing=0.2"], 0.2),
    "ipo": (["algorithm.loss_type=ipo"], 0.0),
}


@pytest.mark.parametrize("name", PLAIN)
def test_its_steps_are_those_of_a_plain_loop(folder: Folder, start: Path, name: str) -> None:
    """Losses, metrics, gradients and weights of all steps, and the held-out pairs."""
    steps, count, seed = 3, 12, 11
    words, smoothing = PLAIN[name]
    run = folder.train(
        f"plain-{name}", *words, f"actor.model.model_path={start}", "actor.model.kwargs={}", "actor.optim.adam_eps=1e-5",
        f"runner.seed={seed}", f"data.prompts_per_step={count}", f"runner.max_steps={steps}",
        f"runner.val_check_interval={steps}", "actor.max_tokens_per_micro_batch=64",
    )  # fmt: skip
    loop = PlainLoop(start, "ipo" if name == "ipo" else "sigmoid", smoothing)
    data = rows(*PARTS["train"])
    order = PromptSampler(len(data), count, seed)
    optimizer = torch.optim.AdamW(loop.model.parameters(), eps=1e-5, weight_decay=0.0)
    found = metrics(run)
    for step, theirs in enumerate(found):
        rate = 0.003 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, measured = loop.loss([data[place] for place in order.of_step(step + 1)])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        optimizer.step()
        mine = {"loss": loss, "grad_norm": norm, **measured}
        for key, value in mine.items():
            assert theirs[f"train/{key}"] == pytest.approx(value.item(), rel=1e-4, abs=1e-5), (step, key)
    saved = load_tensors(run / "checkpoints" / f"global_step_{steps}" / "model.safetensors")
    weights = dict(loop.model.named_parameters())
    for key, there in saved.items():
        torch.testing.assert_close(weights[key].detach(), there, atol=1e-5, rtol=0)
    with torch.no_grad():
        loss, measured = loop.loss(rows(*PARTS["held_out"]))
    measured["pair_accuracy"] = measured.pop("accuracy")
    for key, value in {"loss": loss, **measured}.items():
        assert found[-1][f"eval/{key}"] == pytest.approx(value.item(), rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize(
    "words",
    [
        ["actor.max_tokens_per_micro_batch=40"],
        ["actor.use_remove_padding=false"],
        [TWO_RANKS],
        [TWO_RANKS, "actor.training_backend=fsdp", "actor.max_tokens_per_micro_batch=64"],
        [TWO_RANKS, "actor.training_backend=fsdp", "actor.parallel.context=2"],
        [TWO_RANKS, "actor.training_backend=deepspeed", "actor.deepspeed.zero_stage=3"],
    ],
    ids=["micro-batches", "rectangles", "ranks", "fsdp", "context", "zero3"],
)
def test_it_does_not_depend_on_the_division(
    folder: Folder, one: Path, words: list[str], request: pytest.FixtureRequest
) -> None:
    if "actor.training_backend=deepspeed" in words:
        need_extra("deepspeed")
    run = folder.train(f"divided-{request.node.callspec.id}", *words)
    for ours, theirs in zip(metrics(run), metrics(one), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-4)


def test_with_adapters_the_reference_is_the_model_without_them(folder: Folder) -> None:
    words = [LORA, "actor.optim.lr=0.03"]
    alone, two = (
        folder.train("lora", *words),
        folder.train("lora-two", *words, TWO_RANKS, "actor.training_backend=fsdp"),
    )
    found = metrics(alone)
    assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-7) and found[0]["train/margin"] == 0.0
    assert found[-1]["train/loss"] < 0.65 and found[-1]["train/margin"] > 0
    for ours, theirs in zip(metrics(two), found, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=2e-4)


def test_segments_and_a_resume_are_bit_identical(folder: Folder, one: Path) -> None:
    """The reference of a resumed run is the model from before the whole run's training."""
    parts = ["runner.segments=2", "runner.name=parts"]
    for segment in ("0", "1"):
        folder.rlhpc("train", "run.yaml", *parts, "--segment", segment)
    run = folder.path / "runs" / "parts"
    assert metrics(run) == metrics(one)
    ours, theirs = (at / "checkpoints" / "global_step_6" for at in (run, one))
    weights, others = load_tensors(ours / "model.safetensors"), load_tensors(theirs / "model.safetensors")
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    first, second = (load_state(at / "optimizer.pt")["state"] for at in (ours, theirs))
    assert all(torch.equal(first[name]["exp_avg"], second[name]["exp_avg"]) for name in weights)


def test_what_it_trained_is_exported_evaluated_and_reported(folder: Folder, one: Path, start: Path) -> None:
    folder.rlhpc("convert", "--run", str(one), "--dtype", "float32")
    loop = PlainLoop(start, "sigmoid", 0.0)
    loop.model = type(loop.model).from_pretrained(one / "export" / "global_step_6")
    with torch.no_grad():
        loss, _ = loop.loss(rows(*PARTS["held_out"]))
    assert metrics(one)[-1]["eval/loss"] == pytest.approx(loss.item(), rel=1e-4)
    folder.rlhpc("eval", "--run", str(one), "--suite", "sums")
    assert json.loads((one / "eval" / "global_step_6" / "sums.json").read_text())["n"] == 4
    ask = ["pairs", "--run", str(one), "--samples", "2"]
    assert "--suite" in folder.rlhpc(*ask, "--output", "own.jsonl", code=2)
    folder.rlhpc("report", str(one))
    page = (one / "report" / "index.html").read_text()
    assert "Pairs decided rightly" in page and "held out" in page


WRONG = {
    "a loss that there is not": (["algorithm.loss_type=hinge"], "allowed: sigmoid, ipo"),
    "no strength": (["algorithm.beta=0"], "algorithm.beta is 0"),
    "a probability above one half": (["algorithm.label_smoothing=0.5"], "algorithm.label_smoothing is 0.5"),
    "no such column": (["data.train.chosen_key=good"], "data.train.chosen_key is 'good', but"),
    "no such file": (["data.train.path=nowhere.jsonl"], "nowhere.jsonl"),
    "problems in place of pairs": (["data.train={source: arithmetic, path: null}"], "data.train.chosen_key"),
    "a pair that does not fit": (
        ["actor.max_tokens_per_micro_batch=12", "data.overlong_prompts=error"],
        "tokens with its response, more than",
    ),
    "no pair that fits": (["actor.max_tokens_per_micro_batch=12"], "all 42 rows are too long"),
    "held-out rows that are trained on": (
        ["data.holdout.path=${data.train.path}"],
        "data.train.path is the same",
    ),
    "no held-out rows": (["data.holdout.path=null"], "the loss needs held-out rows"),
    "rows that ranks cannot share": (["data.prompts_per_step=3", TWO_RANKS], "data.prompts_per_step(3)"),
    "a group that it has not": (["cluster.component_placement={actor: 0, env: 0}"], "env"),
    "labels": (["data.train.label_key=label"], "is for a task type that this one (dpo) is not: reward_model"),
}


@pytest.mark.parametrize("words", WRONG.values(), ids=list(WRONG))
def test_mistakes_end_with_a_message(
    folder: Folder, words: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.path)
    monkeypatch.setenv("RLHPC_MODELS", str(folder.path / "models"))
    assert main(["train", "run.yaml", "runner.name=wrong", *words[0]]) == 2
    (line,) = error_lines(capsys.readouterr().err)[-1:]
    assert line.startswith("rlhpc: error: ") and words[1] in line
    assert not (folder.path / "runs" / "wrong").exists()


def test_pairs_that_are_too_long_are_counted(folder: Folder) -> None:
    """Both completions with their prompt fit into half of a micro-batch, or the pair is left out."""
    run = folder.train(
        "short", "actor.max_tokens_per_micro_batch=21", "runner.max_steps=1", "runner.val_check_interval=-1"
    )
    longest = [row for row in rows(*PARTS["train"]) if len(row["rejected"]) == 4]
    assert metrics(run)[0]["train/dropped_problems"] == len(longest) == 15
