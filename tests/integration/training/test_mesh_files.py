"""What leaves a divided model, and what it starts from: checkpoints from one mesh to another, and Hugging Face folders that
all ranks write at once."""

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

from mesh_models import save_models

from rlhpc.checkpoint.tensor_slice import cut, slice_between
from rlhpc.training.safetensors_writer import Layout
from tests.forked import forked

pytestmark = pytest.mark.long(together=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mesh")
    save_models(root, "qwen3", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3")
    return root


def _parallel(**sizes: int) -> dict[str, int]:
    return {f"parallel__{name}": size for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("model", "first", "then", "fewer"),
    [
        (
            "qwen3",
            _parallel(shard=2, tensor=2),
            [_parallel(shard=4), _parallel(replicate=2, tensor=2), _parallel(tensor=4), _parallel(context=4)],
            [_parallel(tensor=2), _parallel(replicate=2)],
        ),
        (
            "qwen3_moe",
            _parallel(shard=2, tensor=2, expert=2),
            [_parallel(expert=4), _parallel(replicate=2, expert=2), _parallel(shard=4)],
            [_parallel(tensor=2, expert=2), _parallel(expert=2)],
        ),
        (
            "llama_tied",
            {**_parallel(tensor=2), "lora__rank": 4},
            [{**_parallel(shard=2, context=2), "lora__rank": 4}],
            [{**_parallel(shard=2), "lora__rank": 4}],
        ),
    ],
)
def test_a_checkpoint_of_one_mesh_is_that_of_every_other_bit_for_bit(
    model: str,
    first: dict[str, Any],
    then: list[dict[str, Any]],
    fewer: list[dict[str, Any]],
    models: Path,
    tmp_path: Path,
) -> None:
    path, folder = str(models / model), str(tmp_path / "checkpoint")
    expected = forked(4, "mesh_ranks:saved", path, folder, first)[0]
    losses = []
    for ranks, meshes in ((4, [first, *then]), (2, fewer)):
        for found in forked(ranks, "mesh_ranks:resumed", path, folder, meshes)[0]:
            losses.append(float(found.pop("loss")))
            assert found.keys() == expected.keys()
            assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []
    assert max(losses) - min(losses) < 1e-5


@pytest.mark.parametrize(
    ("model", "cases"),
    [
        ("qwen3", [_parallel(shard=2, tensor=2), {**_parallel(shard=2, tensor=2), "lora__rank": 4}]),
        ("llama_tied", [_parallel(replicate=2, tensor=2)]),
        (
            "qwen3_moe",
            [_parallel(shard=2, tensor=2, expert=4), {**_parallel(replicate=2, expert=2), "model__dtype": "bfloat16"}],
        ),
        ("mixtral", [_parallel(context=2, expert=2)]),
        ("deepseek_v3", [_parallel(tensor=2, expert=4)]),
    ],
)
def test_ranks_write_a_folder_together_that_transformers_reads(
    model: str, cases: list[dict[str, Any]], models: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    gathered = forked(4, "mesh_ranks:exported", str(models / model), str(tmp_path), cases)[0]
    for number, expected in enumerate(gathered):
        folder = tmp_path / str(number)
        dtype = next(iter(expected.values())).dtype
        module, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        state = module.state_dict()
        assert [name for name, tensor in expected.items() if not torch.equal(state[name].cpu(), tensor)] == []
        assert module.config.use_cache


def test_a_checkpoint_of_experts_is_converted_box_by_slice(models: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from rlhpc.language.config.models import PretrainedConfig
    from rlhpc.language.export import stream_shards
    from rlhpc.language.models.loading import load_causal_lm

    path = str(models / "deepseek_v3")  # has a buffer that nothing trains, too
    expected = forked(4, "mesh_ranks:saved", path, str(tmp_path / "saved"), _parallel(tensor=2, expert=4))[0]
    config = PretrainedConfig(model_path=path)
    parameters = stream_shards(
        tmp_path / "made", tmp_path / "saved/shards", config, torch.float32, load_causal_lm, path
    )
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    state = module.state_dict()
    own = {name.removeprefix("model."): tensor for name, tensor in expected.items() if name.startswith("model.")}
    assert [name for name, tensor in own.items() if not torch.equal(state[name], tensor)] == []
    assert parameters == sum(tensor.numel() for tensor in state.values())


def test_files_are_laid_out_as_safetensors_says(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "a": torch.arange(24, dtype=torch.float32).view(4, 6),
        "b": torch.tensor(7, dtype=torch.int64),
        "c": torch.arange(60).view(3, 4, 5).to(torch.bfloat16),
        "d": torch.zeros(0, 3),
    }
    layout = Layout({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}, max_file_bytes=100)
    layout.begin(tmp_path)
    parts = {
        "a": [slice_between((0, 0), (4, 2)), slice_between((0, 2), (3, 6)), slice_between((3, 2), (4, 6))],
        "b": [slice_between((), ())],
        "c": [
            slice_between((0, 0, 0), (3, 2, 5)),
            slice_between((0, 2, 0), (3, 4, 3)),
            slice_between((0, 2, 3), (3, 4, 5)),
        ],
    }
    for name, tensor_slices in parts.items():
        layout.write(
            tmp_path, [(name, tensor_slice, cut(tensors[name], tensor_slice)) for tensor_slice in tensor_slices]
        )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    read = {name: load_file(tmp_path / index[name])[name] for name in tensors}
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, read[name])] == []
    assert len(set(index.values())) == 4
