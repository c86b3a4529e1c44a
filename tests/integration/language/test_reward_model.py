"""A reward model from start to end: trained, resumed, on several ranks and backends, evaluated, and exported for others."""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
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
from rlhpc.language.export import CONVERSION, import_model
from tests import warm
from tests.classifiers import save_classifier
from tests.stderr import error_lines

pytestmark = pytest.mark.long(together=True)

TWO_RANKS = 'cluster.component_placement={actor: "0:0-1"}'
LORA = "actor.lora.rank=2"


def rows(first: int, last: int) -> list[dict[str, Any]]:
    """Sums, with the right result, one that is one more, and what each is worth."""
    return [
        {
            "prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1), "response": str(a + b + a % 3),
            "label": a % 3 / 2, "kind": "even" if a % 2 else "odd",
        }
        for a in range(first, last)
        for b in range(1, 4)
    ]  # fmt: skip


class Folder:
    """A folder with data and a configuration, and the runs there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name, (first, last) in {"train": (10, 24), "held_out": (30, 35)}.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows(first, last))
            (path / f"{name}.jsonl").write_text(lines)
        cfg = {
            "runner": {
                "task_type": "reward_model", "run_dir": str(path / "runs"), "max_steps": 4, "save_interval": 2,
                "val_check_interval": 2, "logger": {"logger_backends": ["jsonl"]},
            },
            "cluster": {"accelerators_per_node": 0, "component_placement": {"actor": 0}},
            "data": {
                "train": {"path": str(path / "train.jsonl")}, "prompts_per_step": 42,  # all
                "eval": [{"name": "held_out", "path": str(path / "held_out.jsonl"), "level_key": "kind"}],
            },
            "algorithm": {"loss_kwargs": {"centering": 0.01}},
            "workflow": {"eval_suites": ["held_out"]},
            "actor": {
                "max_tokens_per_micro_batch": 128, "optim": {"lr": 0.003, "lr_scheduler": "cosine"},
                "model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 2, "heads": 1}},
            },
        }  # fmt: skip
        (path / "run.yaml").write_text(yaml.safe_dump(cfg))

    def rlhpc(self, *words: str, code: int = 0, **more: str) -> str:
        environment = {**os.environ, **more, "RLHPC_MODELS": str(self.path / "models"), "OMP_NUM_THREADS": "1"}
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
    return Folder(tmp_path_factory.mktemp("reward_model"))


@pytest.fixture(scope="module")
def one(folder: Folder) -> Path:
    """A run on one rank, without interruption."""
    return folder.train("one")


def test_it_learns_and_says_how(one: Path) -> None:
    found = metrics(one)
    names = {"loss", "accuracy", "margin", "reward", "reward_chosen", "reward_rejected", "grad_norm", "lr", "tokens"}
    assert {f"train/{name}" for name in names} <= set(found[0])
    assert found[-1]["train/loss"] < found[0]["train/loss"]
    assert ["eval/accuracy" in row for row in found] == [False, True, False, True] and found[1]["eval/rows"] == 15


@pytest.fixture(scope="module")
def start(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier from before training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHPC_MODELS", str(folder.path / "models"))
        return save_classifier(tmp_path_factory.mktemp("start"), {"hidden": 32, "layers": 2, "heads": 1}, scale=1.0)


PLAIN = {
    "pairs": ["data.train.margin_key=label", "algorithm.loss_kwargs.centering=0.1"],
    "labels": ["algorithm={loss_type: regression, loss_kwargs: {}}"],
}


@pytest.mark.parametrize("form", PLAIN)
def test_its_steps_are_those_of_a_plain_loop(folder: Folder, start: Path, form: str) -> None:
    """One process, torch and transformers alone: losses, metrics, gradients and weights of all steps, and the evaluation."""
    steps, count, seed = 5, 24, 11
    run = folder.train(
        f"plain-{form}", *PLAIN[form], f"actor.model.model_path={start}", "actor.model.kwargs={}",
        "actor.optim.name=adamw", "actor.optim.adam_eps=1e-5", "actor.optim.weight_decay=0.05", "actor.optim.clip_grad=1.0",
        f"runner.seed={seed}", f"data.prompts_per_step={count}", f"runner.max_steps={steps}",
        f"runner.val_check_interval={steps}",
    )  # fmt: skip
    loop = PlainLoop(start, form)
    data = rows(10, 24)
    order = PromptSampler(len(data), count, seed)
    optimizer = torch.optim.AdamW(loop.model.parameters(), eps=1e-5, weight_decay=0.05)
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
        mine = {"loss": loss, "grad_norm": norm, "lr": torch.tensor(rate), **measured}
        for name, value in mine.items():
            assert theirs[f"train/{name}"] == pytest.approx(value.item(), rel=1e-5, abs=1e-6), (step, name)
    norms = [row["train/grad_norm"] for row in found]
    assert max(norms) > 1.0 > min(norms), "some steps are to be clipped, and some not"
    saved = load_tensors(run / "checkpoints" / f"global_step_{steps}" / "model.safetensors")
    weights = dict(loop.model.named_parameters())
    assert saved.keys() == weights.keys()
    for name, there in saved.items():
        torch.testing.assert_close(weights[name].detach(), there, atol=1e-6, rtol=0)
    with torch.no_grad():
        for name, value in loop.loss(rows(30, 35))[1].items():
            if f"eval/{name}" in found[-1]:
                assert found[-1][f"eval/{name}"] == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name


class PlainLoop:
    """A reward model's training as one would write it in an afternoon."""

    def __init__(self, folder: Path, form: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.model = AutoModelForSequenceClassification.from_pretrained(folder)
        self.tokenizer, self.form = AutoTokenizer.from_pretrained(folder, padding_side="right"), form

    def rewards(self, batch: list[dict[str, Any]], response: str) -> torch.Tensor:
        texts = [row["prompt"] + row[response] + self.tokenizer.eos_token for row in batch]
        inputs = self.tokenizer(texts, padding=True, return_tensors="pt")
        return self.model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits[:, 0]

    def loss(self, batch: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean over the batch, and metrics."""
        labels = torch.tensor([row["label"] for row in batch])
        if self.form == "labels":
            rewards = self.rewards(batch, "response")
            loss = torch.nn.functional.mse_loss(rewards, labels)
            return loss, {"mse": loss, "reward": rewards.mean()}
        chosen, rejected = self.rewards(batch, "chosen"), self.rewards(batch, "rejected")
        losses = -torch.nn.functional.logsigmoid(chosen - rejected - labels) + 0.1 * (chosen + rejected) ** 2
        return losses.mean(), {
            "accuracy": (chosen > rejected).float().mean(), "margin": (chosen - rejected).mean(),
            "reward_chosen": chosen.mean(), "reward_rejected": rejected.mean(), "reward": (chosen + rejected).mean() / 2,
        }  # fmt: skip


@pytest.mark.parametrize(("backend", "lora"), [("local", []), ("fsdp", [LORA]), ("deepspeed", [])])
def test_two_ranks_give_what_one_gives(folder: Folder, one: Path, backend: str, lora: list[str]) -> None:
    """To rounding; and a checkpoint of two ranks' parts becomes the same classifier."""
    if backend == "deepspeed":
        need_extra("deepspeed")
    reference = folder.train("one-lora", *lora) if lora else one
    words = [*lora, f"actor.training_backend={backend}", "actor.deepspeed.zero_stage=3"]
    run = folder.train(f"two-{backend}", TWO_RANKS, *words)
    for ours, theirs in zip(metrics(run), metrics(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    folder.rlhpc("eval", "--run", str(run), "--suite", "held_out", *words)
    said, last = json.loads((run / "eval" / "global_step_4" / "held_out.json").read_text()), metrics(run)[-1]
    assert said["accuracy"] == last["eval/accuracy"]
    assert said["margin"] == pytest.approx(last["eval/margin"], rel=1e-4, abs=1e-5)


def test_segments_and_a_resume_are_bit_identical(folder: Folder, one: Path) -> None:
    parts = ["runner.segments=2", "runner.name=parts"]
    for segment in ("0", "1"):
        folder.rlhpc("train", "run.yaml", *parts, "--segment", segment)
    run = folder.path / "runs" / "parts"
    assert metrics(run) == metrics(one)
    ours, theirs = (at / "checkpoints" / "global_step_4" for at in (run, one))
    weights, others = load_tensors(ours / "model.safetensors"), load_tensors(theirs / "model.safetensors")
    assert weights.keys() == others.keys() and "score.weight" in weights
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    first, second = (load_state(at / "optimizer.pt")["state"] for at in (ours, theirs))
    assert all(torch.equal(first[name]["exp_avg"], second[name]["exp_avg"]) for name in weights)


def rewards_of(result: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.with_name("held_out.rewards.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def exported(folder: Folder, one: Path) -> Path:
    """A Hugging Face folder of the run's last checkpoint, which has been evaluated."""
    folder.rlhpc("eval", "--run", str(one), "--suite", "held_out")
    folder.rlhpc("convert", "--run", str(one))
    return one / "export" / "global_step_4"


def test_transformers_gives_the_same_rewards(one: Path, exported: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported, padding_side="right")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id == 0
    found = rewards_of(one / "eval" / "global_step_4" / "held_out.json")
    texts = [row["prompt"] + text + tokenizer.eos_token for row in found for text in row["responses"]]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits[:, 0]
    assert logits.tolist() == pytest.approx([value for row in found for value in row["rewards"]], abs=1e-5)
    assert tokenizer.chat_template
    card = (exported / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "AutoModelForSequenceClassification" in card
    assert json.loads((exported / CONVERSION).read_text())["global_step"] == 4


@pytest.mark.long
def test_vllm_gives_the_same_rewards(one: Path, exported: Path) -> None:
    need_extra("vllm")
    asked = rewards_of(one / "eval" / "global_step_4" / "held_out.json")
    script = (
        "import json, sys\n"
        "from transformers import AutoTokenizer\n"
        "from vllm import LLM, PoolingParams\n"
        "if __name__ == '__main__':\n"
        "    folder, rows = sys.argv[1], json.loads(sys.argv[2])\n"
        "    llm = LLM(folder, runner='pooling', dtype='float32', enforce_eager=True, kv_cache_memory_bytes=64 << 20,\n"
        "              max_model_len=64)\n"
        "    tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "    texts = [row['prompt'] + text + tokenizer.eos_token for row in rows for text in row['responses']]\n"
        "    given = [{'prompt_token_ids': tokenizer(text)['input_ids']} for text in texts]\n"
        "    found = []\n"
        "    for options in (PoolingParams(use_activation=False), PoolingParams()):\n"
        "        found.append([o.outputs.data.item() for o in llm.encode(given, options, pooling_task='classify')])\n"
        "    print('FOUND' + json.dumps(found))\n"
    )
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    path = exported.parent / "ask_vllm.py"
    path.write_text(script)
    done = warm.run([sys.executable, str(path), str(exported), json.dumps(asked)], env=environment, capture_output=True,
                    text=True, timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    raw, default = json.loads(done.stdout.split("FOUND")[1])
    expected = [value for row in asked for value in row["rewards"]]
    assert raw == pytest.approx(expected, abs=1e-4)
    assert default == pytest.approx(expected, abs=1e-4)  # the config says that it is a regression: no sigmoid


def test_a_reward_model_is_what_another_starts_from(folder: Folder, one: Path, exported: Path, tmp_path: Path) -> None:
    copied = import_model(exported, tmp_path / "copy", dtype="float32")
    run = folder.train(
        "again",
        f"actor.model.model_path={copied}",
        "actor.model.kwargs={}",
        "actor.optim.lr=1.0e-12",
        "runner.max_steps=2",
    )
    assert metrics(run)[1]["eval/margin"] == pytest.approx(metrics(one)[-1]["eval/margin"], abs=1e-6)
    card = (copied / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card
    folder.rlhpc("eval", "--model", str(copied), "--config", "run.yaml", "runner.name=x", "--suite", "held_out",
                 "--output", str(tmp_path / "model.json"), "actor.model.kwargs={}")  # fmt: skip
    found, own = (json.loads(path.read_text()) for path in
                  (tmp_path / "model.json", one / "eval" / "global_step_4" / "held_out.json"))  # fmt: skip
    assert found["margin"] == pytest.approx(own["margin"], abs=1e-6)


def test_an_adapter_beside_its_head(folder: Folder, tmp_path: Path) -> None:
    """Exported alone for peft, imported again, and merged: three ways to the same rewards."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = folder.train("adapted", LORA, "runner.max_steps=2")
    merged, alone = tmp_path / "merged", tmp_path / "alone"
    folder.rlhpc("convert", "--run", str(run), "--output", str(merged))
    folder.rlhpc("convert", "--run", str(run), "--output", str(alone), "--adapter-only")
    folder.rlhpc("eval", "--run", str(run), "--suite", "held_out")
    imported = import_model(alone, tmp_path / "imported")
    base = json.loads((alone / "adapter_config.json").read_text())["base_model_name_or_path"]
    ids = AutoTokenizer.from_pretrained(merged)(["30+1=31<eos>"], return_tensors="pt").input_ids
    start = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    models = [
        AutoModelForSequenceClassification.from_pretrained(merged),
        AutoModelForSequenceClassification.from_pretrained(imported),
        PeftModel.from_pretrained(start, alone),
    ]
    with torch.no_grad():
        found = [model.eval()(input_ids=ids).logits.item() for model in models]
    (row,) = [row for row in rewards_of(run / "eval" / "global_step_2" / "held_out.json") if row["prompt"] == "30+1="]
    assert found == pytest.approx([row["rewards"][0]] * 3, abs=1e-5)


def test_regression_on_labels(folder: Folder) -> None:
    run = folder.train("labels", "algorithm={loss_type: regression, loss_kwargs: {}}", "runner.max_steps=2", TWO_RANKS)
    said = folder.rlhpc("eval", "--run", str(run), "--suite", "held_out", TWO_RANKS)
    result = json.loads((run / "eval" / "global_step_2" / "held_out.json").read_text())
    assert result["unit"] == "responses" and result["mse"] == pytest.approx(metrics(run)[1]["eval/mse"], rel=1e-5)
    assert "on 15 responses, R² " in said and "train/mse" in metrics(run)[0]
    folder.rlhpc("report", str(run))
    page = (run / "report" / "index.html").read_text()
    assert "Accuracy in evaluations" in page and "mean over pairs or responses" in page


WRONG = {
    "a loss that there is not": (["algorithm.loss_type=bradly_terry"], "did you mean 'bradley_terry'?"),
    "an argument that it does not take": (["algorithm.loss_kwargs={centre: 1}"], "allowed: centering"),
    "pairs where labels are": (["data.train.chosen_key=good"], "data.train.chosen_key is 'good', but"),
    "no such file": (["data.train.path=nowhere.jsonl"], "nowhere.jsonl"),
    "a pair that does not fit": (
        ["actor.max_tokens_per_micro_batch=12", "data.overlong_prompts=error"],
        "tokens with its response, more than",
    ),
    "no pair that fits": (["actor.max_tokens_per_micro_batch=12"], "all 42 rows are too long"),
    "rows that ranks cannot share": (["data.prompts_per_step=3", TWO_RANKS], "data.prompts_per_step(3)"),
    "an encoder": (["actor.model.model_path=bert", "actor.model.kwargs={}"], "no linear head 'score'"),
    "a group that it has not": (["cluster.component_placement={actor: 0, rollout: 0}"], "rollout"),
    "evaluation of nothing": (["data.eval=[]", "workflow.eval_suites=[default]"], "runner.val_check_interval"),
    "a key of others": (["rollout.max_new_tokens=3"], "is for task types that this one (reward_model) is not"),
}


@pytest.mark.parametrize("words", WRONG.values(), ids=list(WRONG))
def test_mistakes_end_with_a_message(
    folder: Folder, words: tuple[list[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.path)
    monkeypatch.setenv("RLHPC_MODELS", str(folder.path / "models"))
    if "actor.model.model_path=bert" in words[0] and not Path("bert").exists():
        from transformers import BertConfig, BertForSequenceClassification

        from rlhpc.language.models.tiny import character_tokenizer

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=1, **sizes)).save_pretrained("bert")  # type: ignore[call-arg]
        character_tokenizer().save_pretrained("bert")
    assert main(["train", "run.yaml", "runner.name=wrong", *words[0]]) == 2
    (line,) = error_lines(capsys.readouterr().err)[-1:]
    assert line.startswith("rlhpc: error: ") and words[1] in line
    assert not (folder.path / "runs" / "wrong").exists()


def test_pairs_come_from_a_models_own_answers(folder: Folder, tmp_path: Path) -> None:
    """Of an untrained model, by a reward that calls answers right at random: the same file each time."""
    (tmp_path / "coin.py").write_text(
        "import zlib\n\n\ndef coin(sample):\n    return float(zlib.crc32((sample.prompt + sample.response).encode()) % 2)\n"
    )
    cfg = {
        "runner": {"name": "model", "task_type": "sft"},
        "cluster": {"component_placement": {"actor": 0}},
        "data": {
            "train": {"source": "arithmetic", "size": 12, "kwargs": {"digits": 1}},
            "eval": [{"name": "held_out", "source": "arithmetic", "size": 6, "kwargs": {"digits": 1}}],
        },
        "rollout": {"max_new_tokens": 3},
        "reward": {"terms": [{"name": "coin:coin"}]},
        "actor": {"model": {"model_path": "builtin:tiny", "kwargs": {"hidden": 32, "layers": 1, "heads": 1}}},
    }
    (folder.path / "answers.yaml").write_text(yaml.safe_dump(cfg))
    ask = ["pairs", "--model", "", "--config", "answers.yaml", "--samples", "4"]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    said = folder.rlhpc(*ask, "--output", "a/pairs.jsonl", **path)
    folder.rlhpc(*ask, "--output", "again.jsonl", **path)
    folder.rlhpc(*ask, "--output", "other.jsonl", "--suite", "held_out", **path)
    folder.rlhpc(*ask, "--output", "lots.jsonl", "--shuffle", **path)
    folder.rlhpc(*ask, "--output", "labels.jsonl", "--labels", **path)
    read = {
        name: [json.loads(line) for line in (folder.path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("a/pairs", "again", "other", "lots", "labels")
    }
    pairs = read["a/pairs"]
    assert f"{len(pairs)} pairs, of " in said and "of 12 problems" in said and pairs == read["again"] and pairs
    for row in pairs:
        worth = [zlib.crc32((row["prompt"] + row[name]).encode()) % 2 for name in ("chosen", "rejected")]
        assert worth == [1, 0]
    assert not {row["prompt"] for row in pairs} & {row["prompt"] for row in read["other"]}
    swapped = [(row["chosen"], row["rejected"]) for row in read["lots"]]
    assert swapped != [(row["chosen"], row["rejected"]) for row in pairs]
    assert [set(both) for both in swapped] == [{row["chosen"], row["rejected"]} for row in pairs]
    assert {row["label"] for row in read["labels"]} == {0.0, 1.0}
    for words, message in (
        (["--samples", "1"], "--samples is 1"),
        (["--temperature", "0"], "--temperature is 0.0"),
        (["--suite", "nothing"], "data.eval has: held_out"),
        (["--output", str(tmp_path)], "a folder; name a file in it"),
    ):
        assert message in folder.rlhpc(*ask, "--output", "x.jsonl", *words, code=2, **path)
    assert "do not answer problems" in folder.rlhpc("pairs", "--model", "", "--config", "run.yaml", "runner.name=x",
                                                    "--output", "x.jsonl", code=2)  # fmt: skip
