"""Which slices of a checkpoint's tensors a rank holds, with real process groups."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.extras import need_extra

sys.path.insert(0, str(Path(__file__).parent))

from mesh_models import save_models

from tests.forked import forked

need_extra("llm")


def test_slices_are_where_torch_put_them_however_a_tensor_is_cut() -> None:
    for found in forked(4, "region_ranks:placed"):
        assert [name for name, right in found if not right] == []


@pytest.mark.parametrize(
    ("model", "parallel", "experts"),
    [
        ("llama_tied", {"shard": 2, "tensor": 2}, False),
        ("qwen3", {"replicate": 2, "shard": 2}, False),
        ("qwen3", {"replicate": 2, "tensor": 2}, False),
        ("qwen3_moe", {"shard": 2, "context": 2, "expert": 2}, True),
        ("qwen3_moe", {"replicate": 2, "expert": 2}, True),
        ("mixtral", {"tensor": 2, "expert": 4}, True),
    ],
)
def test_the_ranks_together_hold_every_tensor_of_the_checkpoint(
    model: str, parallel: dict[str, Any], experts: bool, tmp_path: Path
) -> None:
    save_models(tmp_path, model)
    files = sorted((tmp_path / model).glob("*.safetensors"))
    whole = {name: tensor for file in files for name, tensor in load_file(file).items()}
    made = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    holders: dict[tuple[str, Any], list[tuple[int, int]]] = defaultdict(list)
    for rank in forked(4, "region_ranks:held", parallel, str(tmp_path / model), experts):
        for name, shape, tensor_slice, values, copy, copies in rank:
            assert shape == tuple(whole[name].shape)
            assert values.shape == tensor_slice.sizes
            made[name][tensor_slice.slices] = values
            holders[name, tensor_slice].append((copy, copies))
    assert [name for name in whole if not torch.equal(whole[name], made[name])] == []
    for copies in holders.values():  # each copy has one holder, and all know how many there are
        assert sorted(copies) == [(copy, len(copies)) for copy in range(len(copies))]


@pytest.mark.parametrize("model", ["llama_tied", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_names_are_those_that_transformers_writes(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from rlhpc.training.parameter_names import checkpoint_parts
    from rlhpc.training.shard_layout import iter_tensors

    save_models(tmp_path, model)
    files = sorted((tmp_path / model).glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    module = AutoModelForCausalLM.from_pretrained(tmp_path / model, dtype=torch.float32)
    tensors = dict(iter_tensors(module))
    parts = checkpoint_parts(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    seen = {part.name: part.view_in(tensors[name]) for name, all_ in parts.items() for part in all_}
    assert seen.keys() == written.keys()
    assert [name for name, tensor in written.items() if not torch.equal(tensor, seen[name])] == []
