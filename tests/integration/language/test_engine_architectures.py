"""Updates of engines of several ranks, by architecture: what each rank holds, its loaders cut out of whole tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra llm")

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import EXPERTS, TOLERANCE, change, error_of, requests_of, save_model
from engine_ranks import engine_of


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
    for version in (1, 2):
        change(reference, version)
        engine.update_weights(version, reference.named_parameters())
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            assert error_of(reference, request, completion) < 5 * TOLERANCE
    engine.close()
