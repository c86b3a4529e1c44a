"""Language models divided over 2 and 4 ranks in all ways that make sense, against one process that has all of it: losses,
every gradient, norms, and the weights after three clipped steps over several micro-batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from mesh_models import save_models

from tests.drawn import drawn
from tests.forked import forked

CLOSE = 1e-5
DENSE = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_tied")
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3")
#: Those with two heads for keys and values, which four ranks cannot share as they are.
GROUPED = ("qwen2", "mixtral")
#: Sizes by ranks; mixtures are divided by these, too, where a tensor size needs an expert size.
SIZES: dict[int, list[dict[str, int]]] = {
    2: [{"shard": 2}, {"replicate": 2}, {"tensor": 2}, {"context": 2}],
    4: [
        {"shard": 4}, {"replicate": 2, "shard": 2}, {"replicate": 2, "tensor": 2}, {"shard": 2, "tensor": 2}, {"tensor": 4},
        {"context": 4}, {"shard": 2, "context": 2}, {"context": 2, "tensor": 2}, {"replicate": 2, "context": 2},
    ],
}  # fmt: skip
EXPERTS: dict[int, list[dict[str, int]]] = {
    2: [{"expert": 2}, {"tensor": 2, "expert": 2}, {"context": 2, "expert": 2}],
    4: [
        {"expert": 4}, {"shard": 4, "expert": 2}, {"replicate": 2, "expert": 2}, {"shard": 2, "tensor": 2, "expert": 4},
        {"shard": 2, "tensor": 2, "expert": 2}, {"tensor": 4, "expert": 4}, {"context": 2, "expert": 4},
        {"replicate": 2, "tensor": 2, "expert": 2}, {"context": 2, "tensor": 2, "expert": 2},
    ],
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows, checkpointing, adapters": {
        "lora__rank": 4,
        "model__gradient_checkpointing": True,
        "lora__target_modules": ["q_proj", "v_proj", "o_proj", "kv_b_proj"],
    },
    "rows, checkpointing": {"model__gradient_checkpointing": True},
    "rectangles": {"use_remove_padding": False},
    "rows, even routers": {"model__router_aux_loss_coef": 0.5},
}


def _data(sizes: dict[str, int], ranks: int) -> int:
    """How many ranks have other samples."""
    return ranks // sizes.get("tensor", 1) // sizes.get("context", 1)


def _cases(ranks: int) -> dict[str, tuple[str, str, dict[str, int]]]:
    found = {}
    for model in (*DENSE, *MIXTURES):
        sizes = [*SIZES[ranks]]
        if model in MIXTURES:
            sizes = [one for one in sizes if "tensor" not in one] + EXPERTS[ranks]
        if model in GROUPED:
            sizes = [one for one in sizes if one.get("tensor") != 4]
        for one in sizes:
            for variant in VARIANTS:
                if variant == "rectangles" and "context" in one:
                    continue
                if variant == "rows, even routers" and (model not in MIXTURES or _data(one, ranks) > 1):
                    continue  # what is even is said of each micro-batch
                called = " ".join(f"{name}{size}" for name, size in one.items())
                found[f"{model}, {called}, {variant}"] = (model, variant, one)
    return found


#: Of each number of ranks, what every run takes: everything at once.
ALWAYS = {
    2: ("qwen3, tensor2, rows", "llama_tied, tensor2, rows, checkpointing, adapters", "mixtral, tensor2 expert2, rows",
        "qwen3_moe, context2 expert2, rows, even routers"),
    4: (
        "qwen3, shard2 tensor2, rows, checkpointing, adapters", "qwen2, context2 tensor2, rows",
        "qwen3_moe, replicate2 expert2, rectangles", "deepseek_v3, context2 expert4, rows",
        "qwen3_moe, shard2 tensor2 expert4, rows, checkpointing",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mesh")
    save_models(root)
    return root


def _far(found: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    return float((found - expected).norm() / max(float(expected.norm()), 1e-3 * scale))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_model_learns_what_a_whole_one_does(ranks: int, models: Path) -> None:
    cases = _cases(ranks)
    chosen = drawn(f"mesh of {ranks}", cases, always=ALWAYS[ranks])
    whole: dict[tuple[str, str], Any] = {}
    for name in chosen:
        model, variant, _ = cases[name]
        whole[model, variant] = None
    given = [(str(models / model), {"training_backend": "local", **VARIANTS[variant]}) for model, variant in whole]
    for key, found in zip(whole, forked(1, "mesh_ranks:several", given, timeout=1200)[0], strict=True):
        whole[key] = found
    divided = []
    for name in chosen:
        model, variant, sizes = cases[name]
        sections = {f"parallel__{size}": number for size, number in sizes.items()}
        divided.append((str(models / model), {**VARIANTS[variant], **sections}))
    first, *others = forked(ranks, "mesh_ranks:several", divided, timeout=1800)
    wrong = []
    for number, name in enumerate(chosen):
        model, variant, sizes = cases[name]
        expected, found = whole[model, variant], first[number]
        scale = expected["norms"][0]
        far = {f"gradient of {n}": _far(found["gradients"][n], g, scale) for n, g in expected["gradients"].items()}
        far |= {f"weight {n}": float((found["weights"][n] - w).abs().max()) for n, w in expected["weights"].items()}
        for what in ("losses", "norms"):
            pairs = zip(found[what], expected[what], strict=True)
            far |= {f"{what} of step {i}": abs(a - b) / max(abs(b), 0.1) for i, (a, b) in enumerate(pairs)}
        far["scores"] = float((found["scores"] - expected["scores"]).abs().max())
        assert found["packed"] == (variant != "rectangles")
        assert found["gradients"].keys() == expected["gradients"].keys()
        wrong += [f"{name}: {what} {value:.1e}" for what, value in far.items() if not value < CLOSE]
        kept = sizes.get("replicate", 1)
        if "tensor" not in sizes and "lora__rank" not in VARIANTS[variant]:
            assert found["held"] <= found["all"] * kept / ranks * 1.02, f"{name}: a rank holds more than its part"
        for rank in others:  # ranks with the same samples say the same of them
            assert torch.equal(rank[number]["scores"], others[0][number]["scores"]) or "expert" in sizes
            assert rank[number]["losses"] == found["losses"]
    assert not wrong, "\n".join(wrong[:40])


#: Model, what is asked for, and what is said.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"parallel__tensor": 2}, "interleaved columns, which checkpoints do not survive; share its experts out"),
    ("llama", {"parallel__expert": 2}, "transformers has no plan to share out experts of LlamaForCausalLM"),
    ("llama", {"parallel__context": 2, "use_remove_padding": False}, "it needs actor.use_remove_padding=true"),
    ("llama", {"parallel__tensor": 2, "training_backend": "local"}, "only actor.training_backend=fsdp divides a model so"),
    ("odd_experts", {"parallel__expert": 2}, "actor.parallel.expert(2) does not divide the 3 experts"),
    ("odd_heads", {"parallel__tensor": 2}, "actor.parallel.tensor(2) does not divide the 3 attention heads"),
    ("odd_heads", {"parallel__context": 2}, "actor.parallel.context(2) does not divide the 3 attention heads"),
    ("odd_words", {"parallel__tensor": 2}, "actor.parallel.tensor(2) does not divide the vocabulary of 63 tokens"),
    ("gpt2", {"parallel__tensor": 2}, "actor.parallel.tensor(2): transformers has no plan to divide GPT2LMHeadModel"),
    ("llama", {"parallel__replicate": 2, "training_backend": "deepspeed"}, "deepspeed takes 1"),
    ("llama", {"parallel__shard": 4}, "but the group has 2 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "changes", "told"), REFUSED)
def test_what_would_not_be_right_is_refused_with_the_reason(
    model: str, changes: dict[str, Any], told: str, refused: dict[tuple[str, str], str]
) -> None:
    assert told in refused[model, str(changes)]


@pytest.fixture(scope="module")
def refused(models: Path) -> dict[tuple[str, str], str]:
    """What is said of all of these, by one start of ranks."""
    found = forked(2, "mesh_ranks:refusals", [(str(models / model), changes) for model, changes, _ in REFUSED])
    assert found[0] == found[1]
    return {(model, str(changes)): told for (model, changes, _), told in zip(REFUSED, found[0], strict=True)}


def test_readers_of_whole_rows_get_them_from_all_ranks_of_a_vocabulary(models: Path) -> None:
    path = str(models / "qwen3")
    ((said, gradient),) = forked(1, "mesh_ranks:read", path, [{"training_backend": "local"}])[0]
    divided = [{"parallel__tensor": 2}, {"parallel__context": 2}]
    for found, slope in forked(2, "mesh_ranks:read", path, divided)[0]:
        assert torch.allclose(found, said, atol=1e-5)
        # on one set of samples, context ranks have a part of the gradient each, which FSDP sums
        assert _far(slope, gradient, 1.0) < CLOSE


def test_embeddings_and_head_are_gathered_for_themselves(models: Path) -> None:
    changes = {"parallel__tensor": 2}
    apart, asked = forked(2, "mesh_ranks:units", str(models / "qwen3"), changes)[0]
    assert {"", "model.embed_tokens", "lm_head", "model.layers.0", "model.layers.1"} == {*apart}
    tied, asked_tied = forked(2, "mesh_ranks:units", str(models / "llama_tied"), {})[0]
    assert {"", "model.layers.0", "model.layers.1"} == {*tied}, "what is both is in the root"
    assert asked and asked_tied, "whole logits are made"


def test_gradients_of_whole_weights_accumulate_without_fsdp(models: Path) -> None:
    assert max(forked(2, "mesh_ranks:accumulated", str(models / "qwen3"), True)) < CLOSE
    # transformers' own style: where it has become right, ours can go
    assert min(forked(2, "mesh_ranks:accumulated", str(models / "qwen3"), False)) > 0.1
