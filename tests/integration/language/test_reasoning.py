"""Runs of language models from the command line: a tiny random transformer, real engines, real processes."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from safetensors.torch import load_file

from rlhpc.language.models.tiny import VOCABULARY
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
CONFIG = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{name: run, run_dir: {folder}, max_steps: 8, logger: {{logger_backends: [jsonl]}}}}
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  eval: [{{name: held_out, source: arithmetic, size: 10, kwargs: {{digits: 1}}}}]
  max_prompt_tokens: 16
  prompts_per_step: 8
reward: {{terms: [{{name: "lm_rewards:ones"}}]}}
workflow: {{eval_suites: [held_out]}}
algorithm: {{group_size: 8}}
rollout: {{max_new_tokens: 6, max_batch_size: 64}}
actor:
  global_batch_size: 64
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 64, layers: 2, heads: 2}}}}
  optim: {{lr: 3.0e-3}}
"""
SFT = """
defaults: [{root}/configs/base/language.yaml]
runner: {{name: run, task_type: sft, run_dir: {folder}, logger: {{logger_backends: [jsonl]}}}}
cluster: {{component_placement: {{actor: 0}}}}
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  eval: [{{name: held_out, source: arithmetic, size: 10, kwargs: {{digits: 1}}}}]
  max_prompt_tokens: 16
  prompts_per_step: 8
reward: {{terms: [{{name: "lm_rewards:ones"}}]}}
workflow: {{eval_suites: [held_out]}}
rollout: {{max_new_tokens: 6, max_batch_size: 64}}
actor:
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 64, layers: 2, heads: 2}}}}
  optim: {{lr: 3.0e-3}}
"""


def json_of(path: Path) -> dict[str, Any]:
    """What a file holds; nothing while it is not there."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}


class LanguageRun:
    """A run of the configuration above, with overrides, in a folder of its own."""

    def __init__(self, folder: Path, *overrides: str, config: str = CONFIG) -> None:
        self.folder, self.root, self.overrides = folder, folder / "run", overrides
        self.config = folder / "run.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        self.config.write_text(config.format(root=ROOT, folder=folder))
        models = folder.parent / "models"  # made once a session
        self.environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), str(ROOT)]), "RLHPC_MODELS": str(models),
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def rlhpc(self, *words: str, code: int = 0, timeout: float = 280) -> str:
        done = warm.run(
            [sys.executable, "-m", "rlhpc.cli", *words], env=self.environment, cwd=self.folder, capture_output=True,
            text=True, timeout=timeout,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def train(self, *more: str, code: int = 0, timeout: float = 280) -> str:
        return self.rlhpc("train", str(self.config), *self.overrides, *more, code=code, timeout=timeout)

    def start(self) -> subprocess.Popen[str]:
        return self.begin("train", str(self.config), *self.overrides)

    def begin(self, *words: str) -> subprocess.Popen[str]:
        return warm.Popen(
            [sys.executable, "-m", "rlhpc.cli", *words], env=self.environment, cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Metric rows without the clock's."""
        lines = (self.root / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.root / "checkpoints" / f"global_step_{step}" / "model.safetensors")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    """The plain run: one actor, one rollout rank, collocated, synchronous."""
    run = LanguageRun(tmp_path_factory.mktemp("reference") / "plain")
    run.train()
    return run


def improves(rows: list[dict[str, Any]], by: float = 0.05) -> bool:
    return rows[-1]["train/reward"] > rows[0]["train/reward"] + by


def test_it_learns(reference: LanguageRun) -> None:
    rows = reference.rows()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert improves(rows)
    # The trainer's log-probs of what the engine drew are the engine's, after each of the updates.
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-5
    assert {row["rollout/staleness_max"] for row in rows} == {0.0}


def test_its_metrics_are_documented(reference: LanguageRun) -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    lines = (reference.root / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line) if not name.startswith("reward/")} - {"step"}
    names = {re.sub(r"^(train/mismatch_(?:abs|share)/)[a-z]+$", r"\1<class>", name) for name in names}
    assert {name for name in names if f"| `{name}` |" not in page} == set()


def test_a_resumed_run_is_the_same_run(reference: LanguageRun, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "resumed")
    run.train("runner.max_steps=3")
    run.train("runner.resume_dir=auto")
    assert run.rows() == reference.rows()
    mine, theirs = run.weights(8), reference.weights(8)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


SAMPLED = (
    "runner.val_check_interval=4", "data.eval=[{name: held_out, source: arithmetic, size: 9, kwargs: {digits: 1}, samples: 2, "
    "temperature: 0.7}]",
)  # fmt: skip


def assert_evaluated(run: LanguageRun, step: int) -> None:
    """What the rollout ranks measured at a step is what `rlhpc eval` says of that step's checkpoint."""
    row = next(row for row in run.rows() if row["step"] == step)
    words = ("--run", str(run.root), "--step", str(step), "--suite", "held_out", "--trust-checkpoint-code")
    run.rlhpc("eval", *words)
    result = json.loads((run.root / "eval" / f"global_step_{step}" / "held_out.json").read_text())
    assert row["eval/problems"] == result["n"] == 9 and row["eval/reward"] > 0
    for name, value in (
        ("accuracy", result["accuracy"]), ("reward", result["reward_mean"]), ("pass_at_2", result["pass_at_k"]["2"]),
        ("response_tokens", result["response_tokens"]["mean"]), ("truncated", result["truncated"]),
    ):  # fmt: skip
        assert row[f"eval/{name}"] == pytest.approx(value, abs=1e-12), name


def test_evaluation_during_training_changes_nothing_of_it(reference: LanguageRun, tmp_path: Path) -> None:
    """The same metrics and weights, bit for bit; and what is measured is what a later evaluation measures."""
    run = LanguageRun(tmp_path / "evaluated", *SAMPLED)
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [4, 8]
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    names = {re.sub(r"pass_at_\d+", "pass_at_<k>", name) for row in rows for name in row if name.startswith("eval/")}
    assert {name for name in names if f"| `{name}` |" not in page} == set()
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows] == reference.rows()
    mine, theirs = run.weights(8), reference.weights(8)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert_evaluated(run, 8)


@pytest.mark.long
def test_evaluation_is_shared_by_the_rollout_ranks(tmp_path: Path) -> None:
    """Nine problems on two ranks, which take turns with the actor at the accelerator."""
    placed = "cluster.component_placement={actor: '0', rollout: '0:0-1'}"
    run = LanguageRun(
        tmp_path / "shared",
        *SAMPLED,
        placed,
        "actor.offload_in_rollout=true",
        "runner.max_steps=5",
        "runner.save_interval=4",
    )
    run.train()
    assert [row["step"] for row in run.rows() if "eval/accuracy" in row] == [4]
    assert_evaluated(run, 4)


TWO_ACTORS = "cluster.component_placement={actor: '0:0-1', rollout: '0'}"
PLACEMENTS = {
    "two actors": (TWO_ACTORS,),
    "two rollout ranks": ("cluster.component_placement={actor: '0', rollout: '0:0-1'}",),
    "turns": ("actor.offload_in_rollout=true",),
    "small micro-batches": ("actor.max_tokens_per_micro_batch=64",),
    "fsdp": ("actor.training_backend=fsdp", TWO_ACTORS),
    "deepspeed": ("actor.training_backend=deepspeed", TWO_ACTORS),
    "deepspeed stage 3": ("actor.training_backend=deepspeed", "actor.deepspeed.zero_stage=3", TWO_ACTORS),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_layout_is_the_same_run(name: str, reference: LanguageRun, tmp_path: Path) -> None:
    """The same numbers, up to rounding, as long as no token is drawn otherwise for it."""
    if "deepspeed" in name:
        need_extra("deepspeed")
    run = LanguageRun(tmp_path / "other", *PLACEMENTS[name])
    run.train()
    rows, expected = run.rows(), reference.rows()
    first, same = rows[0], expected[0]
    for key in ("train/reward", "train/tokens", "train/entropy", "train/grad_norm", "train/response_tokens"):
        assert first[key] == pytest.approx(same[key], rel=1e-4), key
    assert rows[1]["train/entropy"] == pytest.approx(expected[1]["train/entropy"], rel=2e-2)
    assert improves(rows)


#: Actors of which four share a model, and critics of which two do; one token more makes a vocabulary that divides.
WORDS = f"actor.model.kwargs={{hidden: 64, layers: 2, heads: 4, vocabulary: {json.dumps(VOCABULARY + '@')}}}"
ACTORS = ("actor.training_backend=fsdp", "cluster.component_placement={actor: '0:0-3', rollout: '0'}")
MESHES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "shards and tensors": (("actor.parallel={shard: 2, tensor: 2}", *ACTORS), ()),
    "copies and shared rows": (("actor.parallel={replicate: 2, context: 2}", *ACTORS), ()),
    "a divided critic": (
        (
            "critic.training_backend=fsdp", "critic.parallel={tensor: 2}",
            "cluster.component_placement={actor: '0', rollout: '0', critic: '0:0-1'}",
        ),
        ("algorithm.adv_type=gae",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LanguageRun]:
    """Makes runs of one rank each, every one of them once."""

    @functools.cache
    def of(*settings: str) -> LanguageRun:
        run = LanguageRun(tmp_path_factory.mktemp("undivided") / "whole", *settings)
        run.train()
        return run

    return of


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_ranks_of_a_block_train_on_the_same_samples(
    name: str, undivided: Callable[..., LanguageRun], tmp_path: Path
) -> None:
    """The same numbers as from one rank, and a checkpoint that another mesh goes on from."""
    own, both = MESHES[name]
    placed = "cluster.component_placement={actor: '0', rollout: '0', critic: '0'}" if both else "runner.seed=1"
    whole = undivided(WORDS, *both, placed, "runner.max_steps=3")
    divided = LanguageRun(tmp_path / "divided", WORDS, *both, *own, "runner.max_steps=2")
    divided.train()
    if not both:
        divided.train(
            "runner.resume_dir=auto",
            "runner.max_steps=3",
            "actor.parallel={replicate: 1, shard: null, tensor: 2, context: 2}",
        )
    expected, found = whole.rows(), divided.rows()
    keys = ["train/reward", "train/tokens", "train/entropy", "train/grad_norm", "train/mismatch_abs"]
    keys += ["critic/loss", "critic/grad_norm"] if both else []
    for key in keys:
        assert found[0][key] == pytest.approx(expected[0][key], rel=1e-4, abs=1e-6), key
    assert found[1]["train/entropy"] == pytest.approx(expected[1]["train/entropy"], rel=2e-2)
    assert [row["step"] for row in found] == ([1, 2] if both else [1, 2, 3])
    assert found[-1]["train/mismatch_abs"] < 1e-4, "the engine's weights are not the trainer's"


def test_lora(tmp_path: Path) -> None:
    """Adapters on random weights learn slowly; that the engine has them merged shows in the log-probs."""
    run = LanguageRun(tmp_path / "lora", "actor.lora.rank=8", "actor.optim.lr=2e-2", "runner.max_steps=20")
    run.train()
    rows = run.rows()
    rewards = [row["train/reward"] for row in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.01
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-4
    adapter = tmp_path / "adapter"
    run.rlhpc("convert", "--run", str(run.root), "--adapter-only", "--dtype", "bfloat16", "--output", str(adapter))
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8
    assert {tensor.dtype for tensor in load_file(adapter / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_vllm(reference: LanguageRun, tmp_path: Path) -> None:
    need_extra("vllm")
    run = LanguageRun(tmp_path / "vllm", "rollout.rollout_backend=vllm")
    run.train()
    rows = run.rows()
    assert improves(rows)
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-4


def test_async_generation_stays_within_its_bound(tmp_path: Path) -> None:
    run = LanguageRun(
        tmp_path / "async", "algorithm.max_staleness=2", "algorithm.recompute_logprobs=true",
        "algorithm.loss_type=decoupled_ppo", "algorithm.tis_cap=2.0", "runner.max_steps=12", "runner.val_check_interval=6",
    )  # fmt: skip
    run.train()
    rows = run.rows()
    stale = [row["rollout/staleness_max"] for row in rows]
    assert max(stale) <= 2
    assert max(stale) > 0, "nothing was generated ahead"
    assert stale[6] == 0, "nothing is ahead of an evaluation"
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [6, 12]
    assert improves(rows, 0.03)


def test_scores_of_the_reference_policy_and_recomputed_ones(tmp_path: Path) -> None:
    run = LanguageRun(
        tmp_path / "kl", "algorithm.kl_coef=0.1", "algorithm.recompute_logprobs=true", "algorithm.tis_cap=2.0",
        "runner.max_steps=4", "algorithm.entropy_coef=0.001",
    )  # fmt: skip
    run.train()
    kl = [row["train/ref_kl"] for row in run.rows()]
    assert kl[0] == pytest.approx(0, abs=1e-6) and 0 < kl[1] < kl[3]
    assert run.rows()[0]["train/tis_weight"] == pytest.approx(1, abs=1e-4)


def test_groups_that_say_nothing_are_refilled(tmp_path: Path) -> None:
    run = LanguageRun(
        tmp_path / "dapo", "algorithm.filter_groups=true", "reward.terms=[{name: 'lm_rewards:picky'}]",
        "runner.max_steps=2", "algorithm.max_refills=8",
    )  # fmt: skip
    run.train()
    rows = run.rows()
    assert rows[0]["rollout/refills"] > 0
    assert rows[0]["train/varied_groups"] > 0.5


def test_sft_then_evaluation_and_export(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "sft", config=SFT)
    run.train("runner.max_steps=12")
    losses = [row["train/loss"] for row in run.rows()]
    assert losses[-1] < losses[0] - 0.5
    run.rlhpc("eval", "--run", str(run.root), "--suite", "held_out", "--trust-checkpoint-code")
    result = json.loads((run.root / "eval" / "global_step_12" / "held_out.json").read_text())
    assert (result["suite"], result["global_step"], result["n"]) == ("held_out", 12, 10)
    run.rlhpc("convert", "--run", str(run.root))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run.root / "export" / "global_step_12"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    mine = run.weights(12)
    for name, tensor in model.state_dict().items():
        if name in mine:
            assert torch.equal(tensor.float(), mine[name].float()), name


BAD = {
    "no such model": ("actor.model.model_path=/nowhere/model", "model_path"),
    "no such built-in model": ("actor.model.model_path=builtin:big", "builtin:tiny, builtin:tiny_vl, builtin:smollm2"),
    "no rewards": ("reward.terms=[]", "reward.terms"),
    "unknown reward": ("reward.terms=[{name: maths}]", "math"),
    "unknown source": ("data.train.source=jsonll", "jsonl"),
    "no such file": ("data.train={source: jsonl, path: /nowhere.jsonl, kwargs: {}}", "/nowhere.jsonl"),
    "a prompt too long": ("data.max_prompt_tokens=2", "data.max_prompt_tokens"),
    "groups that do not divide": ("actor.global_batch_size=60", "must divide by it"),
    "prompts that do not divide": ("cluster.component_placement={actor: '0:0-2', rollout: '0'}", "prompts_per_step"),
    "no critic": ("algorithm.adv_type=gae", "gae needs a critic: give it a place"),
    "an unknown engine": ("rollout.rollout_backend=vlm", "did you mean 'vllm'?"),
    "an unknown suite": ("workflow.eval_suites=[heldout]", "held_out"),
    "a component too many": ("cluster.component_placement={actor: '0', rollout: '0', env: '0'}", "no such component"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message(name: str, tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "bad")
    override, expected = BAD[name]
    said = run.train(override, code=2)
    [line] = [line for line in said.splitlines() if line.startswith("rlhpc: error")]
    assert expected in line
    assert "Traceback" not in said
    assert not run.root.exists()


def test_a_reward_that_is_not_finite_stops_the_run_and_names_the_prompt_or_its_group_is_left_out(
    tmp_path: Path,
) -> None:
    """Where the judge says nan it has failed, and the sample gets `reward.failed`; this one is too large for the trainer."""
    broken = ("reward.terms=[{name: 'lm_rewards:too_large_for_some'}]", "runner.max_steps=2", TWO_ACTORS)
    run = LanguageRun(tmp_path / "broken", *broken)
    said = run.train(code=1)
    assert "rlhpc: error: step 1, prompt " in said and "the reward of response " in said
    assert " is inf (lm_rewards:too_large_for_some 1e+39)" in said and "rollout-0" in said
    assert "Traceback" not in said and not (run.root / "checkpoints").exists()
    run.train("runner.on_nonfinite=skip")
    rows = run.rows()
    assert all(0 < row["rollout/nonfinite"] < 64 and row["rollout/nonfinite"] % 8 == 0 for row in rows)
    assert rows[-1]["rollout/samples"] == 128 - sum(row["rollout/nonfinite"] for row in rows)
    assert all(value is not None for row in rows for value in row.values())
    assert all(bool(tensor.isfinite().all()) for tensor in run.weights(2).values())
