"""The account of memory: what `rlhpc plan` says, what is refused, and that what is named as fitting does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli import main
from rlhpc.config.typed import typed
from rlhpc.jobs.plan import build_plan
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.planning.memory_accounts import FREED_BY_A_STEP, held, largest_tokens, nearest, training_of
from rlhpc.language.planning.memory_model import Serving
from rlhpc.language.planning.memory_tables import tables
from rlhpc.language.planning.model_size import NotKnown, size_of
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.account import GIB, GroupRanks
from rlhpc.runs.memory.plan import memory_plan
from tests.extras import need_extra

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
    assert main(["plan", MATH, *EIGHT, "actor.model.model_path=somebody/her-model"]) == 2
    said, refused = capsys.readouterr()
    assert "actor: not known: somebody/her-model" in said and "SBATCH" in said
    assert "data/math/test.parquet'; there is no such file" in refused  # its data are not here, either


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
    if command == ["train"]:
        need_extra("llm")
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


def test_weights_are_sent_without_what_an_optimizer_step_has_freed() -> None:
    freed, names = set[str](), set[str]()
    for words in (
        ["actor.training_backend=local"],
        ["actor.training_backend=fsdp"],
        ["actor.training_backend=deepspeed"],
    ):
        cfg: Any = load_config(MATH, [*EIGHT, *words], training=False)
        account = next(
            one for one in memory_plan(cfg, build_plan(cfg, launcher="slurm")).accounts if one.group == "actor"
        )
        moments = {moment.name: {term.name for term in moment.terms} for moment in account.moments}
        names |= set().union(*moments.values())
        freed |= set().union(*moments.values()) & {*FREED_BY_A_STEP}
        assert not moments["weights are sent"] & {*FREED_BY_A_STEP}
    assert freed == {*FREED_BY_A_STEP}
    assert not [name for name in names if re.search(r"\bs\b", name)], "an apostrophe does not survive in a keyword"


def test_groups_that_take_turns_need_not_fit_together() -> None:
    def most(*words: str) -> float:
        cfg = load_config(MATH, [*EIGHT, *words])
        return memory_plan(cfg, build_plan(cfg, launcher="slurm")).places[0].nbytes

    assert most("actor.offload_in_rollout=false") > most() + 20 * GIB


# -- advice ------------------------------------------------------------------------------------------------------------


def actor(*words: str) -> Any:
    cfg = typed(GrpoConfig, load_config(MATH, [*EIGHT, *words]))
    return cfg, training_of(cfg, "actor", cfg.actor, GroupRanks(8, accelerated=True, room=80 * GIB))


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


def test_the_reference_of_dpo_is_counted() -> None:
    """A frozen copy of the model, divided over the ranks like the model; with adapters there is none."""

    def trained(kind: str, *words: str) -> float:
        words = ("runner.name=x", "actor.model.model_path=Qwen/Qwen2.5-7B", "actor.training_backend=fsdp", *words)
        cfg = typed(GrpoConfig, load_config(ROOT / f"configs/base/{kind}.yaml", words, check=False))
        return held(training_of(cfg, "actor", cfg.actor, GroupRanks(8, accelerated=True, room=80 * GIB)))

    share = 2 * size_of("Qwen/Qwen2.5-7B").parameters / 8
    assert trained("dpo") - trained("sft") == pytest.approx(share)
    assert trained("dpo", "actor.lora.rank=8") == trained("sft", "actor.lora.rank=8")


def test_the_tables_of_the_docs_are_what_the_command_makes() -> None:
    page = (ROOT / "docs" / "explanation" / "memory.md").read_text()
    between = re.search(r"<!-- tables -->\n(.*?)\n<!-- end of tables -->", page, re.DOTALL)
    assert between is not None and between[1].strip() == tables(LARGE).strip()


# -- keys and values ---------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_key_value_heads": 4,
}  # fmt: skip
QWEN2: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 100, "max_window_layers": 3}
FULL, PER_TOKEN = "full_attention", 2 * 2 * 16


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"model_type": "llama"}, [1000] * 4),
        ({"model_type": "mistral", "sliding_window": 100}, [100] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [1000] * 4),
        ({**QWEN2, "use_sliding_window": False}, [1000] * 4),
        ({**QWEN2, "use_sliding_window": True}, [1000, 1000, 1000, 100]),
        ({"model_type": "gemma3_text", "sliding_window": 100, "num_hidden_layers": 6}, [100] * 5 + [1000]),
        ({"model_type": "gpt_oss", "sliding_window": 100}, [100, 1000, 100, 1000]),
        ({"model_type": "qwen3_next"}, [1000]),
        ({"model_type": "lfm2", "layer_types": ["conv", FULL, "conv", FULL]}, [1000, 1000]),
    ],
)  # fmt: skip
def test_a_cache_keeps_of_each_layer_what_it_looks_back_at(config: dict[str, Any], kept: list[int]) -> None:
    """In vLLM; engine `hf` keeps all tokens of each layer that keeps any."""
    need_extra("llm")
    size = size_of("somebody/model", config={**SMALL, **config})
    assert size.key_value_bytes(2, 1000, compact=True) == 2 * PER_TOKEN * sum(kept)
    assert size.key_value_bytes(2, 1000) == 2 * PER_TOKEN * 1000 * len(kept)
    assert size.key_value_bytes(2, 1000, 2) == PER_TOKEN * 1000 * len(kept)


def test_a_cache_of_latent_attention_keeps_the_latent_vectors() -> None:
    """1152 bytes a token and layer in vLLM, on each rank of an engine; keys and values of all heads in engine `hf`."""
    need_extra("llm")
    size = size_of("somebody/model", config={**SMALL, **LATENT, "model_type": "deepseek_v3"})
    assert size.key_value_bytes(2, 10, compact=True) == size.key_value_bytes(2, 10, 4, compact=True) == 4 * 10 * 1152
    assert size.key_value_bytes(2, 10) == 4 * 10 * 2 * 4 * (64 + 128 + 128)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_longest_sequence_is_the_last_that_the_cache_holds(engine: str, window: int | None) -> None:
    size = size_of("somebody/model", config={**SMALL, "model_type": "qwen2", "sliding_window": window,
                                             "use_sliding_window": window is not None, "max_window_layers": 3})  # fmt: skip
    serving = Serving(size, engine, 2, True, 1e9, 8, 8, 4)
    for nbytes in (0.0, 1e3, 1e5, 1e7):
        tokens = serving.longest_in(nbytes)
        assert serving.sequence(tokens) <= nbytes < serving.sequence(tokens + 1)
