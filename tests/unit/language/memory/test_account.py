"""The account of memory: what `rlhpc plan` says, what is refused, and that what is named as fitting does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli import main
from rlhpc.config.typed import typed
from rlhpc.jobs.plan import build_plan
from rlhpc.language.config import GrpoConfig
from rlhpc.language.memory.advice import held, largest_tokens, nearest
from rlhpc.language.memory.model import NotKnown, size_of
from rlhpc.language.memory.roles import training_of
from rlhpc.language.memory.tables import tables
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.account import GIB, Ranks
from rlhpc.runs.memory.plan import memory_plan

ROOT = Path(__file__).resolve().parents[4]
MATH = str(ROOT / "configs" / "reasoning" / "math.yaml")
LARGE = str(ROOT / "configs" / "reasoning" / "large.yaml")
EIGHT = ["cluster.accelerators_per_node=8", "cluster.accelerator_memory=80G"]


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("builtin:smollm2", 134_515_008),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    assert size_of(name, build=False).parameters == parameters


def test_a_hub_name_without_files_is_not_known_and_planning_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotKnown, match="give a folder"):
        size_of("somebody/her-model", build=False)
    assert main(["plan", MATH, *EIGHT, "actor.model.model_path=somebody/her-model"]) == 0
    said = capsys.readouterr().out
    assert "actor: not known: somebody/her-model" in said and "SBATCH" in said


def test_the_hubs_cache_is_read_before_what_is_known_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--somebody--her-model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, '
        '"num_attention_heads": 2, "tie_word_embeddings": true}'
    )
    assert size_of("somebody/her-model").parameters == 10 * 8 + 4 * 64 + 3 * 128 + 3 * 8


# -- what is refused ---------------------------------------------------------------------------------------------------


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(words)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", [["submit", "--executor", "local"], ["train"]])
def test_what_cannot_fit_is_refused_before_anything_is_written(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *command,
        MATH,
        "cluster.accelerators_per_node=8",
        "cluster.accelerator_memory=24G",
        f"runner.run_dir={tmp_path}",
    ]
    code, said = run(words, capsys)
    assert code == 2
    assert "actor: most at the backward pass" in said and "largest term: optimizer" in said
    assert "fits: actor." in said and "cluster.memory_check=warn" in said
    assert not list(tmp_path.iterdir())


def test_an_engine_that_its_share_does_not_hold_is_refused_and_the_term_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", MATH, *EIGHT, "rollout.gpu_memory_utilization=0.2", f"runner.run_dir={tmp_path}"]
    code, said = run(words, capsys)
    assert code == 2 and "rollout: rollout.gpu_memory_utilization (0.2)" in said
    assert "the term that does not fit: weights" in said


def test_nothing_is_refused_where_nobody_says_what_there_is_or_the_key_says_so() -> None:
    def refusals(*words: str) -> list[str]:
        cfg = load_config(MATH, ["cluster.accelerators_per_node=8", *words])
        return memory_plan(cfg, build_plan(cfg, launcher="slurm")).refusals()

    assert refusals() == []
    assert refusals("cluster.accelerator_memory=80G") == []
    assert refusals("cluster.accelerator_memory=20G")
    assert refusals("cluster.accelerator_memory=80G", "cluster.mem=64G")  # pinned copies of weights and optimizer
    assert refusals("cluster.accelerator_memory=80G", "cluster.mem=0") == []


def test_groups_that_take_turns_need_not_fit_together() -> None:
    def most(*words: str) -> float:
        cfg = load_config(MATH, [*EIGHT, *words])
        return memory_plan(cfg, build_plan(cfg, launcher="slurm")).places[0].nbytes

    assert most("actor.offload_in_rollout=false") > most() + 20 * GIB


# -- advice ------------------------------------------------------------------------------------------------------------


def actor(*words: str) -> Any:
    cfg = typed(GrpoConfig, load_config(MATH, [*EIGHT, *words]))
    return cfg, training_of(cfg, "actor", cfg.actor, Ranks(8, accelerated=True, room=80 * GIB))


@pytest.mark.parametrize(
    "words",
    [
        ["actor.model.gradient_checkpointing=false"],
        ["actor.training_backend=local"],
        ["actor.training_backend=deepspeed"],
        ["actor.model.model_path=Qwen/Qwen2.5-32B"],
    ],
)
def test_what_is_named_as_fitting_fits_when_it_is_configured(words: list[str]) -> None:
    cfg, training = actor(*words)
    room = held(training) * 0.7
    changes = nearest("actor", training, cfg.actor, room)
    assert changes
    for change in changes:
        overrides = [word for word in change.overrides if "=" in word]
        if len(overrides) < len(change.overrides):
            continue  # more ranks: another placement
        assert held(actor(*words, *overrides)[1]) == pytest.approx(change.nbytes) and change.nbytes <= room


def test_the_largest_micro_batch_fits_and_the_next_one_does_not() -> None:
    _, training = actor()
    tokens = largest_tokens(training, 60 * GIB)
    assert held(training.with_tokens(tokens)) <= 60 * GIB < held(training.with_tokens(tokens + 256))


def test_the_tables_of_the_docs_are_what_the_command_makes() -> None:
    page = (ROOT / "docs" / "explanation" / "memory.md").read_text()
    between = re.search(r"<!-- tables -->\n(.*?)\n<!-- end of tables -->", page, re.DOTALL)
    assert between is not None and between[1].strip() == tables(LARGE).strip()
