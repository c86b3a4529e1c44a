"""The account of memory: what `rlhpc plan` says, what is refused, and that what is named as fitting does."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli import main
from rlhpc.config.typed import typed
from rlhpc.jobs.plan import build_plan
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.logit_chunks import chunk_rows
from rlhpc.language.planning.memory_accounts import FREED_BY_A_STEP, largest_tokens, nearest, peak_bytes, training_of
from rlhpc.language.planning.model_size import size_of
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.account import GIB, GroupRanks
from rlhpc.runs.memory.plan import compute_memory_plan
from rlhpc.runtime.devices import message_budget
from rlhpc.weights.device_sharing import buffer_bytes, device_chunk_bytes
from tests.extras import need_extra
from tests.unit.language.planning.accounts import EIGHT, MATH, ROOT, SMALL

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
        return compute_memory_plan(cfg, build_plan(cfg, launcher="slurm")).refusals()

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
            one for one in compute_memory_plan(cfg, build_plan(cfg, launcher="slurm")).accounts if one.group == "actor"
        )
        moments = {moment.name: {term.name for term in moment.terms} for moment in account.moments}
        names |= set().union(*moments.values())
        freed |= set().union(*moments.values()) & {*FREED_BY_A_STEP}
        assert not moments["weights are sent"] & {*FREED_BY_A_STEP}
    assert freed == {*FREED_BY_A_STEP}
    assert not [name for name in names if re.search(r"\bs\b", name)], "an apostrophe does not survive in a keyword"


def update_of(*overrides: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """The terms of an actor's rank of math.yaml while it sends weights, and the remarks."""
    cfg = load_config(MATH, [*EIGHT, *overrides])
    (account,) = [a for a in compute_memory_plan(cfg, build_plan(cfg)).accounts if a.group == "actor"]
    (moment,) = [moment for moment in account.moments if moment.name == "weights are sent"]
    return {term.name: term.nbytes for term in moment.terms}, account.remarks


@pytest.mark.parametrize("gigabytes", [40, 80, 140])
def test_a_chunk_of_logits_is_as_large_as_the_trainers_on_this_memory(gigabytes: int) -> None:
    """Logits, log-probs and probabilities in float32, and logits in bfloat16: 14 bytes each."""
    cfg: Any = load_config(MATH, [*EIGHT, f"cluster.accelerator_memory={gigabytes}G"])
    (account,) = [a for a in compute_memory_plan(cfg, build_plan(cfg)).accounts if a.group == "actor"]
    (chunk,) = {term.nbytes for moment in account.moments for term in moment.terms if term.name == "loss chunk"}
    vocabulary = size_of(cfg.actor.model.model_path, {}).vocabulary
    assert chunk == 14 * chunk_rows(vocabulary, is_on_host=False, memory=gigabytes * GIB) * vocabulary


BESIDE = "engine beside it, without its cache"


def test_an_update_within_an_accelerator_counts_what_both_hold() -> None:
    """The sender's buffers as it fills them, and the engine with its graphs and the copy of a chunk, without its cache."""
    terms, remarks = update_of()
    memory = 80 * 1024**3
    assert terms["buffers of the update"] == buffer_bytes(memory) and remarks == ()
    cfg = load_config(MATH, EIGHT)
    (rollout,) = [a for a in compute_memory_plan(cfg, build_plan(cfg)).accounts if a.group == "rollout"]
    (update,) = [moment for moment in rollout.moments if moment.name == "weight update"]
    held = sum(term.nbytes for term in update.terms if term.name != "KV cache")
    assert terms[BESIDE] == held + device_chunk_bytes(message_budget(memory))
    assert {"weights", "activations and graphs", "context and collectives"} <= {term.name for term in update.terms}


@pytest.mark.parametrize(
    ("overrides", "remark"),
    [
        (("cluster.accelerator_memory=32G",), True),  # no room for both
        (("rollout.weight_sync=host",), False),
        (("actor.offload_in_rollout=false",), False),  # both are counted in full, beside each other
    ],
)
def test_an_update_without_the_engine_beside_does_not_count_it(overrides: tuple[str, ...], remark: bool) -> None:
    terms, remarks = update_of(*overrides, "cluster.memory_check=off")
    assert BESIDE not in terms and terms["buffers of the update"] > 0
    assert ("updates may go through the host" in " ".join(remarks)) is remark


def test_groups_that_take_turns_need_not_fit_together() -> None:
    def most(*words: str) -> float:
        cfg = load_config(MATH, [*EIGHT, *words])
        return compute_memory_plan(cfg, build_plan(cfg, launcher="slurm")).pools[0].nbytes

    assert most("actor.offload_in_rollout=false") > most() + 20 * GIB


# -- advice ------------------------------------------------------------------------------------------------------------


def actor(*words: str) -> Any:
    cfg = typed(GrpoConfig, load_config(MATH, [*EIGHT, *words]))
    return cfg, training_of(cfg, "actor", cfg.actor, GroupRanks(8, accelerated=True, capacity=80 * GIB))


@pytest.mark.parametrize(
    "words",
    [
        ["actor.model.gradient_checkpointing=false"],
        ["actor.training_backend=local"],
        ["actor.training_backend=deepspeed"],
        ["actor.training_backend=deepspeed", "actor.deepspeed.cpu_offload=true"],
        ["actor.model.model_path=Qwen/Qwen2.5-32B"],
    ],
)
def test_what_is_named_as_fitting_fits_when_it_is_configured(words: list[str]) -> None:
    cfg, training = actor(*words)
    capacity = peak_bytes(training) * 0.7
    changes = nearest("actor", training, cfg.actor, capacity)
    assert changes
    for change in changes:
        overrides = [word for word in change.overrides if "=" in word]
        if len(overrides) < len(change.overrides):
            continue  # more ranks: another placement
        assert peak_bytes(actor(*words, *overrides)[1]) == pytest.approx(change.nbytes) and change.nbytes <= capacity


def test_the_largest_micro_batch_fits_and_the_next_one_does_not() -> None:
    _, training = actor()
    tokens = largest_tokens(training, 60 * GIB)
    largest, larger = (dataclasses.replace(training, tokens=count) for count in (tokens, tokens + 256))
    assert peak_bytes(largest) <= 60 * GIB < peak_bytes(larger)


def test_the_reference_of_dpo_is_counted() -> None:
    """A frozen copy of the model, divided over the ranks like the model; with adapters there is none."""

    def trained(kind: str, *words: str) -> float:
        words = ("runner.name=x", "actor.model.model_path=Qwen/Qwen2.5-7B", "actor.training_backend=fsdp", *words)
        cfg = typed(GrpoConfig, load_config(ROOT / f"configs/base/{kind}.yaml", words, check=False))
        return peak_bytes(training_of(cfg, "actor", cfg.actor, GroupRanks(8, accelerated=True, capacity=80 * GIB)))

    share = 2 * size_of("Qwen/Qwen2.5-7B").parameters / 8
    assert trained("dpo") - trained("sft") == pytest.approx(share)
    assert trained("dpo", "actor.lora.rank=8") == trained("sft", "actor.lora.rank=8")


def test_each_teacher_is_counted() -> None:
    """On the actor's ranks, and on ranks of their own, where one after the other computes."""
    teacher = ("algorithm.name=distillation", "teacher.model.model_path=Qwen/Qwen2.5-1.5B")
    other = "teacher.by_task=[{name: other, tasks: [x], model: {model_path: Qwen/Qwen2.5-3B}}]"
    placed = "cluster.component_placement={actor: 0-3, rollout: 4-5, teacher: 6-7}"

    def weights(group: str, *words: str) -> tuple[float, float]:
        """Weights and activations of a group's ranks."""
        cfg = load_config(MATH, [*EIGHT, *teacher, *words], check=False)
        if group == "actor":
            typed_cfg = typed(GrpoConfig, cfg)
            ranks = GroupRanks(8, accelerated=True, capacity=80 * GIB)
            return training_of(typed_cfg, "actor", typed_cfg.actor, ranks).other_models_bytes, 0.0
        (account,) = [a for a in compute_memory_plan(cfg, build_plan(cfg)).accounts if a.group == group]
        terms = {term.name: term.nbytes for term in account.moments[0].terms}
        return terms["weights"], terms["activations"]

    small, large = (2.0 * size_of(f"Qwen/Qwen2.5-{size}").parameters for size in ("1.5B", "3B"))
    assert weights("actor") == (small, 0.0) and weights("actor", other) == (small + large, 0.0)
    alone, both = weights("teacher", placed), weights("teacher", placed, other)
    assert alone[0] == small and both[0] == small + large and alone[1] < both[1]
    large_alone = weights("teacher", placed, "teacher.model.model_path=Qwen/Qwen2.5-3B")
    assert both[1] == large_alone[1]


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ([], 2 * 1000 + 16 * 100),
        (["actor.share_prefixes=false"], 16 * 1100),
        (["actor.use_remove_padding=false"], 16 * 1100),
        (["actor.compile=blocks"], 16 * 1100),
        (["actor.model.model_path=google/gemma-3-1b-it"], 16 * 1100),
        (["actor.global_batch_size=64"], 8 * 1100),
        (["actor.max_tokens_per_micro_batch=3000"], 3000),
        (["data.max_prompt_tokens=20"], 16 * 120),
        (["data.max_prompt_tokens=40"], 16 * 31 + 16 * 100),
    ],
)
def test_a_prompt_that_answers_share_is_counted_once(words: list[str], tokens: int, tmp_path: Path) -> None:
    """Eight ranks, each with two prompts of eight answers; what is too short to be shared is in each."""
    sizes = [
        "data.prompts_per_step=16",
        "algorithm.group_size=8",
        "data.max_prompt_tokens=1000",
        "rollout.max_new_tokens=100",
    ]
    limits = ["actor.max_tokens_per_micro_batch=100000", "actor.global_batch_size=128", "actor.training_backend=fsdp"]
    if "google" in str(words):
        need_extra("llm")
        config = {**SMALL, "model_type": "gemma3_text", "sliding_window": 16, "layer_types": ["sliding_attention"] * 4}
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = [f"actor.model.model_path={tmp_path}"]
    assert actor(*sizes, *limits, *words)[1].tokens == tokens
