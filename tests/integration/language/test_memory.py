"""The account of memory against ranks that train, and against models on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.planning.memory_model import Training
from rlhpc.language.planning.model_size import FAMILIES, size_of
from tests.forked import forked

#: Small, and yet so large that what libraries hold is little beside it.
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    **QWEN3, "model_type": "qwen3_moe", "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
    "num_hidden_layers": 3, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}
    for config in (QWEN3, MIXTURE):
        folder = str(tmp_path_factory.mktemp(str(config["model_type"])))
        known = {key: value for key, value in config.items() if key != "model_type"}
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **known)).save_pretrained(folder)
        made[str(config["model_type"])] = folder
    return made


def training(folder: str, ranks: int, tokens: int, changes: dict[str, Any]) -> Training:
    backend = changes.get("training_backend", "local")
    given = {key.removeprefix("parallel."): size for key, size in changes.items() if key.startswith("parallel.")}
    sizes = MeshSizes(**given) if given else MeshSizes(shard=ranks) if backend == "fsdp" else MeshSizes(replicate=ranks)
    return Training(
        size_of(folder), backend, sizes, tokens, 2 if changes.get("model.dtype") == "bfloat16" else 4, accelerated=False,
        separate_embeddings=bool(given), lora=changes.get("lora.rank", 0),
        checkpointing=changes.get("model.gradient_checkpointing", False),
        stage=changes.get("deepspeed.zero_stage", 2),
    )  # fmt: skip


FSDP = {"training_backend": "fsdp"}
ZERO2 = {"training_backend": "deepspeed", "deepspeed.zero_stage": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "samples", "changes"),
    [
        pytest.param("qwen3", 2, 1024, 4, {}, id="replicated"),
        pytest.param("qwen3", 2, 1024, 4, FSDP, id="fsdp2"),
        pytest.param("qwen3", 4, 1024, 4, {**FSDP, "model.dtype": "bfloat16"}, id="fsdp4-bf16"),
        pytest.param("qwen3", 2, 2048, 4, ZERO2, id="zero2"),
        pytest.param("qwen3", 1, 1536, 4, {"model.dtype": "bfloat16", "lora.rank": 8}, id="lora"),
        pytest.param("qwen3", 1, 3072, 1, {"model.gradient_checkpointing": True}, id="checkpointing-long"),
        pytest.param("qwen3_moe", 1, 1024, 4, {}, id="mixture"),
        pytest.param(
            "qwen3",
            2,
            2048,
            4,
            {**FSDP, "parallel.shard": 1, "parallel.tensor": 2, "model.gradient_checkpointing": True},
            id="tensor2-checkpointing",
        ),
        pytest.param("qwen3", 2, 2048, 4, {**FSDP, "parallel.shard": 1, "parallel.context": 2}, id="context2"),
        pytest.param("qwen3_moe", 2, 1024, 4, {**FSDP, "parallel.shard": 2, "parallel.expert": 2}, id="expert2"),
    ],
)
def test_the_account_is_within_a_tenth_of_what_ranks_hold(
    models: dict[str, str], model: str, ranks: int, tokens: int, samples: int, changes: dict[str, Any]
) -> None:
    if "deepspeed.zero_stage" in changes:
        need_extra("deepspeed")
    found = forked(ranks, "memory_steps:steps", {**changes, "model.model_path": models[model]}, tokens, samples)
    account = training(models[model], ranks, tokens, changes)
    assert found[0]["trained"] == account.num_trained
    peak = max(rank["peak"] for rank in found)
    accounted = max(moment.nbytes for moment in account.moments())
    print(f"measured {peak / 2**20:.0f} MiB, accounted {accounted / 2**20:.0f}")
    # A tenth, and what processors differ in: of adapters 8 % too much on one kind, 11.5 % on another.
    assert accounted == pytest.approx(peak, rel=0.12)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_from_a_configuration_are_those_of_the_model(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**(MIXTURE if family in ("qwen3_moe", "mixtral") else QWEN3), "model_type": family}
    if family == "mixtral":
        sizes["num_local_experts"] = 8
    for tied in (False, True):
        known = {key: value for key, value in sizes.items() if key != "model_type"} | {"tie_word_embeddings": tied}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **known))
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert dict(size_of(None, config={**sizes, "tie_word_embeddings": tied}).shapes) == shapes


def test_a_family_that_is_not_known_is_built_to_be_looked_at(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    size = size_of(str(tmp_path))
    assert size.parameters == parameters and size.layers == 2
