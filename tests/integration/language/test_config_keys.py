"""A model's config.json in checkpoints and exports: all that the original says, beside what training changes; and engines that
read it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from engine_models import CHARACTERS, TOLERANCE, error_of, requests_of, save_model, save_tokenizer
from engine_ranks import engine_of
from lm_ranks import make_config, train
from safetensors.torch import load_file

from rlhpc import Worker
from rlhpc.checkpoint import CheckpointWriter
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.data.images import FAMILIES as LOOKING
from rlhpc.language.export import export_language_model, import_model
from rlhpc.language.models.loading import model_files
from rlhpc.language.models.tiny_vision import make_tiny_vision_model
from rlhpc.language.planning.model_size import FAMILIES as SIZED
from rlhpc.language.training.trainer import ScalarBlueprint

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 32}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
#: By family: its configuration's name, its sizes, and keys that its published models have and transformers leaves out, renames
#: or gives another value.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {"pretraining_tp": 1}),
    "mistral": ("Mistral", {}, {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {"use_mrope": False, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32}, {"rope_theta": 1e6, "rope_scaling": None}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}, {"qkv_bias": True}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS, {"max_window_layers": 2, "router_aux_loss_coef": 0.001}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, {}),
    "glm4_moe": ("Glm4Moe", ROUTED, {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "deepseek_v3": (
        "DeepseekV3",
        {**ROUTED, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
         "head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1, "num_nextn_predict_layers": 0},
    ),
    "minimax_m2": ("MiniMaxM2", {**EXPERTS, "num_local_experts": 4},
                   {"scoring_func": "sigmoid", "use_routing_bias": True, "use_mtp": False}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
                     {"moe_use_aux_free": True, "moe_gate": "topk"}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
             {"conv_dim": 64, "block_dim": 64, "block_ff_dim": 128, "conv_use_xavier_init": True}),
}  # fmt: skip
#: Those that rlhpc starts vLLM with in other tests on a CPU.
IN_VLLM = ("qwen2", "qwen3_moe")
#: Those that no engine of rlhpc on a CPU makes right tokens with.
NO_ENGINE = ("lfm2",)
#: What training changes, and what only a wrapper of the weights says.
CHANGED = {"dtype", "torch_dtype", "use_cache"}


def made(folder: Path, family: str) -> dict[str, Any]:
    """Writes a tiny model of a family as its publisher would; gives its config.json."""
    folder.mkdir()
    if family in LOOKING:
        make_tiny_vision_model(folder, family=family, vocabulary="".join(CHARACTERS), hidden=64)
        more: dict[str, Any] = {"vision_token_id": 3}
    else:
        kind, sizes, more = MODELS[family]
        save_model(folder, kind, **sizes)
        save_tokenizer(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **more, "torch_dtype": "float32", "published_by": {"name": "somebody"}}
    if "block_ff_dim" in more:
        del config["intermediate_size"]
    path.write_text(json.dumps(config))
    return config


def said(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def unlike(original: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Keys of the original that are lost or have another value; changes that training makes aside."""
    found = []
    for key, value in original.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            found += [f"{key}.{inner}" for inner in unlike(value, config[key])]
        elif key not in CHANGED and config.get(key, ...) != value:
            found.append(key)
    return found


def test_all_families_that_are_admitted_are_here() -> None:
    assert {*SIZED} <= MODELS.keys() and {*IN_VLLM} <= MODELS.keys()


@pytest.mark.parametrize("family", [*MODELS, *LOOKING])
def test_no_key_is_lost_from_training_to_an_engine(tmp_path: Path, family: str) -> None:
    """Trains a step, goes on from the checkpoint, exports, converts the export, and asks an engine for log-probs."""
    original = made(tmp_path / "model", family)
    frozen = {"model.freeze_vision": True} if family in LOOKING else {}
    cfg, steps = make_config(tmp_path / "model", use_remove_padding=False, **frozen), list[Path]()
    for step in (1, 2):
        with CheckpointWriter(RunPaths(tmp_path / "run"), step) as writer:
            load = steps[-1] if steps else None
            report = train(
                Worker(), cfg, range(step - 1, step), load, save=writer.staging, export=tmp_path / f"own{step}"
            )
            writer.commit({})
        steps.append(writer.final)
    export = export_language_model(steps[-1], dtype="bfloat16")
    assert said(export)["dtype"] == said(export)["torch_dtype"] == "bfloat16"
    export = export_language_model(steps[-1])
    copy = import_model(export, tmp_path / "copy")
    for folder in (steps[0] / "model", steps[1] / "model", tmp_path / "own2", export, copy):
        assert unlike(original, said(folder)) == [], folder
        assert said(folder)["use_cache"] is True and said(folder)["torch_dtype"] == "float32", folder
    assert all(torch.equal(value, load_file(copy / "model.safetensors")[name])
               for name, value in load_file(export / "model.safetensors").items())  # fmt: skip
    again = train(Worker(), make_config(export, use_remove_padding=False, **frozen), range(0))
    torch.testing.assert_close(again["before"], report["after"], rtol=1e-4, atol=1e-4)
    if family not in NO_ENGINE:
        asked_about(export, "hf")


@pytest.mark.long
@pytest.mark.parametrize("family", IN_VLLM)
def test_vllm_reads_an_export(tmp_path: Path, family: str) -> None:
    made(tmp_path / "model", family)
    cfg = make_config(tmp_path / "model", use_remove_padding=False)
    with CheckpointWriter(RunPaths(tmp_path / "run"), 1) as writer:
        train(Worker(), cfg, range(1), save=writer.staging)
        writer.commit({})
    asked_about(export_language_model(writer.final), "vllm")


def asked_about(folder: Path, backend: str) -> None:
    """An engine says of its own tokens what a plain forward pass does."""
    auto = (
        transformers.AutoModelForImageTextToText
        if "vision_config" in said(folder)
        else transformers.AutoModelForCausalLM
    )
    reference = auto.from_pretrained(folder).eval()
    engine = engine_of(backend, folder, seed=0, max_batch_size=4)
    requests = requests_of(4, seed=3, max_new_tokens=6)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        assert completion.token_ids and error_of(reference, request, completion) < 5 * TOLERANCE
    engine.close()


def test_a_scalar_models_changes_are_among_the_original_keys(tmp_path: Path) -> None:
    """A reward model's config.json has its number of labels, whether or not the original says how many it has."""
    original = made(tmp_path / "model", "qwen2")
    for labels in ({}, {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}):
        (tmp_path / "model" / "config.json").write_text(json.dumps({**original, **labels}))
        section = make_config(tmp_path / "model").actor
        blueprint = ScalarBlueprint(section, 0, "cpu")
        config = json.loads(model_files(blueprint.build(empty=True), section.model)["config.json"])
        assert set(unlike(original, config)) <= {"architectures", "pad_token_id"}
        assert config["architectures"] == ["Qwen2ForSequenceClassification"] and len(config["id2label"]) == 1
        assert config["problem_type"] == "regression"
