"""The held-out loss of a run on demonstrations, its best checkpoint, and its early end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.extras import need_extra

need_extra("llm")

from tests import warm

pytestmark = pytest.mark.long(together=True)

TWO_RANKS = 'cluster.component_placement={actor: "0:0-1"}'


class Folder:
    """A folder with demonstrations and a configuration, and the runs there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = [
            {"prompt": f"{a}+{b}=", "response": str(a + b), "part": "test" if b == 5 else "train"}
            for a in range(10, 40)
            for b in range(1, 6)
        ]
        for name in ("all", "test"):
            kept = [row for row in rows if name in ("all", row["part"])]
            (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        cfg = {
            "runner": {
                "task_type": "sft", "run_dir": str(path / "runs"), "max_steps": 5, "val_check_interval": 2,
                "logger": {"logger_backends": ["jsonl"]},
            },
            "cluster": {"accelerators_per_node": 0, "component_placement": {"actor": 0}},
            "data": {
                "train": {"path": str(path / "all.jsonl"), "split": "part=train", "answer_key": None},
                "prompts_per_step": 16, "max_prompt_tokens": 30, "holdout": {"split": "part=test"},
            },
            "reward": {"terms": [{"name": "format", "kwargs": {"pattern": ".*"}}]},
            "actor": {
                "max_tokens_per_micro_batch": 256, "optim": {"lr": 0.003},
                "model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 2, "heads": 1}},
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("held_out"))


@pytest.fixture(scope="module")
def whole(folder: Folder) -> Path:
    return folder.train("whole")


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["eval/loss"] for row in rows_of(run) if "eval/loss" in row}


def test_the_loss_is_measured_at_its_interval_and_at_the_end(whole: Path) -> None:
    assert [*losses(whole)] == [2, 4, 5]
    last = rows_of(whole)[-1]
    assert (last["eval/rows"], last["eval/tokens"]) == (30, 90)  # two digits and the end token
    assert last["eval/loss"] < losses(whole)[2]


@pytest.mark.parametrize(
    "words",
    [
        ["actor.max_tokens_per_micro_batch=48"],
        ["actor.use_remove_padding=false"],
        [TWO_RANKS],
        [TWO_RANKS, "actor.training_backend=fsdp", "actor.max_tokens_per_micro_batch=64"],
    ],
    ids=["micro-batches", "rectangles", "ranks", "fsdp"],
)
def test_the_loss_does_not_depend_on_the_division(
    folder: Folder, whole: Path, words: list[str], request: pytest.FixtureRequest
) -> None:
    run = folder.train(f"divided-{request.node.callspec.id}", *words)
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)


def test_a_file_of_its_own_gives_the_same_loss_as_its_rows(folder: Folder, whole: Path) -> None:
    run = folder.train("file", "data.holdout={path: test.jsonl, split: part=test}")
    assert losses(run) == losses(whole)


def test_the_loss_is_the_mean_of_all_trained_tokens(folder: Folder, whole: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = folder.path / "exported"
    folder.rlhpc("convert", "--run", str(whole), "--output", str(exported))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported).double(), AutoTokenizer.from_pretrained(exported)
    total, count = 0.0, 0
    for line in (folder.path / "test.jsonl").read_text().splitlines():
        row = json.loads(line)
        question = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer = [*tokenizer.encode(row["response"], add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids + answer])).logits.log_softmax(-1)[0, len(ids) - 1 : -1]
        total -= float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    assert losses(whole)[5] == pytest.approx(total / count, rel=1e-5)


def test_the_loss_does_not_touch_training(folder: Folder, whole: Path) -> None:
    without = folder.train("without", "runner.val_check_interval=-1")
    trained = [[row["train/loss"] for row in rows_of(run)] for run in (whole, without)]
    assert trained[0] == trained[1] and not losses(without)


def test_a_run_that_gets_no_better_ends_and_its_best_checkpoint_stays(folder: Folder) -> None:
    words = [
        "runner.max_steps=40", "runner.val_check_interval=1", "runner.keep_best=eval/loss", "runner.patience=3",
        "runner.keep_checkpoints=1", "actor.optim.lr=0.05", "runner.save_interval=1",
    ]  # fmt: skip
    told = folder.rlhpc("train", "run.yaml", "runner.name=early", *words)
    run = folder.path / "runs" / "early"
    found = losses(run)
    best, last = min(found, key=lambda step: found[step]), max(found)
    assert last == best + 3 < 40 and f"ends at step {last}: 3 evaluations in a row did not improve eval/loss" in told
    kept = {path.name for path in (run / "checkpoints").glob("global_step_*")}
    assert kept == {f"global_step_{best}", f"global_step_{last}"}
    assert (run / "checkpoints" / "best").resolve().name == f"global_step_{best}"
    assert f"best         step {best}, by eval/loss" in folder.rlhpc("status", str(run))
    folder.rlhpc("report", str(run))
    assert f"Best: step {best}, by eval/loss" in (run / "report" / "index.html").read_text()
    exported = folder.rlhpc("convert", "--run", str(run), "--checkpoint", "best")
    assert f"global_step_{best}" in exported

    again = folder.rlhpc("train", "run.yaml", "runner.name=early", *words, "runner.resume_dir=auto")
    assert max(losses(run)) == last and "Traceback" not in again  # it stays ended
    folder.rlhpc("train", "run.yaml", "runner.name=early", *words, "runner.resume_dir=auto", "runner.patience=4")
    assert max(losses(run)) == last + 1 or losses(run)[last + 1] < found[best]  # it has counted on


def test_resumed_in_the_middle_it_ends_where_it_would_have(folder: Folder) -> None:
    words = [
        "runner.max_steps=40", "runner.val_check_interval=1", "runner.keep_best=eval/loss", "runner.patience=3",
        "runner.keep_checkpoints=0", "actor.optim.lr=0.05", "runner.save_interval=1",
    ]  # fmt: skip
    first = folder.train("parts", *words)
    found = losses(first)
    middle = max(found) - 2  # one evaluation after the best
    folder.rlhpc("train", "run.yaml", "runner.name=parts", *words, f"runner.resume_dir=global_step_{middle}")
    assert losses(first) == found
    state = json.loads((first / "checkpoints" / f"global_step_{max(found)}" / "runner.json").read_text())
    assert state["best"]["waited"] == 3 and state["stop_reason"] == "patience"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["data.holdout.split=null"], "data.train.eval_fraction, such as 0.05, or data.holdout.path"),
        (["data.holdout.split=part=train"], "data.train.split is the same"),
        (["data.holdout.split=part=tets"], "none fits"),
        (["data.holdout.path=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_held_out_rows_that_are_not_there_are_refused(folder: Folder, words: list[str], complaint: str) -> None:
    said = folder.rlhpc("train", "run.yaml", "runner.name=refused", *words, code=2)
    assert complaint in said and "Traceback" not in said
