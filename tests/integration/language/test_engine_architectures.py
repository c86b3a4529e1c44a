"""Updates of engines of several ranks, by architecture: what each rank holds, its loaders cut out of whole tensors; and of
what it says that it wants, nothing is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra llm")

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import EXPERTS, TOLERANCE, change, error_of, requests_of, save_model
from engine_ranks import Several, engine_of
from transformers.core_model_loading import revert_weight_conversion

from rlhpc.language.engines.vllm_boxes import wanted_boxes


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32}),
    ],
)
def test_each_update_arrives(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Tied weights, heads for keys and values on each rank; experts that kernels pack anew."""
    reference = save_model(tmp_path, kind, **changes)
    engine = engine_of("vllm x 2", tmp_path, seed=0, max_batch_size=5)
    requests = requests_of(10, seed=10)
    assert isinstance(engine, Several)
    whole, mine = sum(p.numel() for p in reference.parameters()), engine.own.wants()
    assert sum(box.numel for boxes in mine.values() for box in boxes) < 0.6 * whole
    for version in (1, 2, 3):
        change(reference, version)
        if version == 2:
            engine.update_shards(version, in_files(reference))
        else:
            engine.update_weights(version, reference.named_parameters())
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            assert error_of(reference, request, completion) < 5 * TOLERANCE
    engine.close()


def in_files(model: Any) -> list[tuple[str, Any]]:
    """A model's tensors as its files have them, tied ones once."""
    names = {name for name, _ in model.named_parameters()}
    return list(revert_weight_conversion(model, {n: t for n, t in model.state_dict().items() if n in names}).items())


def test_experts_divided_among_ranks_are_wanted_whole(tmp_path: Path) -> None:
    """vLLM's kernels for that do not run on CPUs: what its loaders want is what there is to see."""
    reference = save_model(
        tmp_path, "Qwen3Moe", **EXPERTS, num_experts=4, moe_intermediate_size=64, head_dim=32, num_key_value_heads=2
    )
    kwargs = {"enable_expert_parallel": True, "load_format": "dummy"}
    engine: Any = engine_of("vllm x 2", tmp_path, seed=0, max_batch_size=5, engine_kwargs=kwargs)
    shapes = {name: tuple(tensor.shape) for name, tensor in in_files(reference)}
    found = engine.own._engine.collective_rpc(wanted_boxes, args=(shapes,))[0]
    experts = {name: boxes for name, boxes in found.items() if ".experts." in name}
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in experts} == {0, 1}
    assert all(len(boxes) == 1 and boxes[0].sizes == shapes[name] for name, boxes in experts.items())
    halves = [name for name in found if "q_proj" in name]
    assert halves and all(found[name][0].sizes == (shapes[name][0] // 2, shapes[name][1]) for name in halves)
    engine.close()
