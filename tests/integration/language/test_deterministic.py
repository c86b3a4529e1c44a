"""`runner.deterministic`: trainer and engine hf compute the same log-probs, bit for bit, on real ranks."""

from __future__ import annotations

import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from exact_ranks import Agreeing, agree
from lm_ranks import alone, groups_of, make_config
from test_reasoning import LanguageRun

from rlhpc.language.engines.exact import use_exactness
from rlhpc.language.models.tiny import character_tokenizer, make_tiny_model
from rlhpc.language.workers.grpo_actor import SPLIT_BOUNDS
from rlhpc.runtime.errors import ConfigError

VOCABULARY = string.printable[:60]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny Llama, one so wide that libraries add up products of few rows in another order, and a tiny mixture of experts
    with a sliding window in one of its layers."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "tiny", vocabulary=VOCABULARY, hidden=32, layers=2, context=128)
    make_tiny_model(folder / "wide", vocabulary=VOCABULARY, hidden=256, layers=1, context=128)
    tokenizer = character_tokenizer(VOCABULARY, 128)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=128, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "mixture")
    tokenizer.save_pretrained(folder / "mixture")
    return {name: folder / name for name in ("tiny", "wide", "mixture")}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Any]]:
    yield from groups_of(Agreeing, "agreeing")


def config(model: Path, is_deterministic: bool = True, **changes: Any) -> Any:
    cfg = make_config(model, **{"model.dtype": "float32", **changes})
    cfg.runner.deterministic = is_deterministic
    cfg.rollout.max_batch_size = 7  # fewer than the requests
    return cfg


def report_of(ranks: Callable[[int], Any], n: int, cfg: Any, steps: int) -> dict[str, Any]:
    """Sums of all ranks, of which each scores and trains on its share; one rank is this process."""
    threads = torch.get_num_threads()
    try:
        reports = [agree(alone(), cfg, steps)] if n == 1 else ranks(n).agree(cfg, steps).wait()
    finally:
        torch.set_num_threads(threads)
    assert min(report["moved"] for report in reports) > 1e-3
    return {
        "unequal": [sum(report["unequal"][kind] for report in reports) for kind in (0, 1)],
        "largest": max(max(report["largest"]) for report in reports),
        "mean": max(report["mean"] for report in reports),
        "tokens": sum(report["tokens"] for report in reports),
    }


@pytest.mark.parametrize("updates", [6, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize(("backend", "n"), [("local", 1), ("local", 2), ("fsdp", 2)])
def test_log_probs_have_the_same_bits_over_all_updates(ranks, models, backend: str, n: int, updates: int) -> None:
    """In scoring and in the update, at two temperatures, with rows that come and go and micro-batches of several sizes."""
    report = report_of(ranks, n, config(models["tiny"], training_backend=backend), updates)
    assert (report["unequal"], report["largest"]) == ([0, 0], 0.0)
    assert report["tokens"] > 90 * updates


def test_without_it_some_bits_differ(ranks, models) -> None:
    report = report_of(ranks, 1, config(models["tiny"], is_deterministic=False), 6)
    assert min(report["unequal"]) > report["tokens"] / 10 and 0 < report["largest"] < 1e-5


@pytest.mark.parametrize(
    ("model", "backend", "n", "changes"),
    [
        ("tiny", "local", 1, {"model.dtype": "bfloat16"}),
        ("tiny", "fsdp", 2, {"model.dtype": "bfloat16"}),
        ("tiny", "fsdp", 2, {"model.dtype": "float16", "model.gradient_checkpointing": True}),
        ("wide", "local", 1, {}),
        ("mixture", "local", 1, {}),
        ("mixture", "fsdp", 2, {}),
    ],
)
def test_other_dtypes_and_experts_agree_too(ranks, models, model: str, backend: str, n: int, changes: Any) -> None:
    report = report_of(ranks, n, config(models[model], training_backend=backend, **changes), 10)
    assert (report["unequal"], report["largest"]) == ([0, 0], 0.0)


@pytest.mark.parametrize(
    ("model", "parallel", "dtype"),
    [
        ("tiny", {"tensor": 2}, "float32"),
        ("tiny", {"tensor": 2}, "bfloat16"),
        ("tiny", {"context": 2}, "float32"),
        ("tiny", {"context": 2}, "bfloat16"),
        ("mixture", {"shard": 2, "expert": 2}, "float32"),
    ],
)
def test_where_ranks_compute_parts_of_sums_the_difference_has_a_bound(
    ranks, models, model: str, parallel: Any, dtype: str
) -> None:
    """A tenth of the bound at least, so that it does not stop runs by chance, and not 0, so that it is one."""
    changes = {f"parallel.{name}": size for name, size in parallel.items()}
    cfg = config(models[model], training_backend="fsdp", **{**changes, "model.dtype": dtype})
    report = report_of(ranks, 2, cfg, 10)
    assert min(report["unequal"]) > 0
    assert 0 < report["mean"] < SPLIT_BOUNDS[getattr(torch, dtype)] / 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ((), ""),
        (("actor.training_backend=fsdp", "cluster.component_placement={actor: '0:0-1', rollout: '0'}"), ""),
        (
            ("rollout.rollout_backend=vllm",),
            "runner.deterministic is True; not with rollout.rollout_backend=vllm: take hf",
        ),
        (("actor.lora.rank=2",), "runner.deterministic is True; not with actor.lora.rank=2"),
        (("algorithm.max_staleness=1",), "runner.deterministic is True; not with algorithm.max_staleness=1"),
        (
            ("actor.model.attn_implementation=eager",),
            "runner.deterministic is True; not with another actor.model.attn_implementation",
        ),
    ],
)
def test_a_run_agrees_or_is_refused(tmp_path: Path, settings: tuple[str, ...], text: str) -> None:
    run = LanguageRun(
        tmp_path / "run", "runner.deterministic=true", "runner.max_steps=3", "runner.val_check_interval=-1", *settings
    )
    output = run.train(code=2 if text else 0)
    assert text in " ".join(output.split())
    if not text:
        rows = run.rows()
        assert len(rows) == 3 and all(row["train/mismatch_unequal"] == row["train/mismatch_abs"] == 0.0 for row in rows)


def test_other_devices_and_models_are_one_message(models) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models["tiny"])
    with pytest.raises(ConfigError, match=r"runner\.deterministic: on cuda, a row of a product depends"):
        use_exactness(model, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM does not read rows without padding"):
        use_exactness(model, torch.device("cpu"), is_packed=False)
