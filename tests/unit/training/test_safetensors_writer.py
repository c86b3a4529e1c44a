"""Writer of safetensors folders: layout of the files, and slices that several ranks write."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhpc.checkpoint.tensor_slice import TensorSlice, cut, full_slice
from rlhpc.training import safetensors_writer
from rlhpc.training.safetensors_writer import Layout

SHAPES = {"a": (5, 7), "b": (), "c": (3, 4, 2), "d": (0, 3), "e": (9,)}
DTYPES = {"a": torch.float32, "b": torch.int64, "c": torch.bfloat16, "d": torch.uint8, "e": torch.bool}


def tensors() -> dict[str, torch.Tensor]:
    """Returns a tensor of each name."""
    return {
        name: torch.arange(math.prod(shape)).add(1).reshape(shape).to(DTYPES[name]) for name, shape in SHAPES.items()
    }


def layout(max_file_bytes: int | None = None) -> Layout:
    """Returns the files of these tensors."""
    return Layout({name: (shape, DTYPES[name]) for name, shape in SHAPES.items()}, max_file_bytes)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_equal(folder: Path) -> None:
    """Checks that a folder has the tensors."""
    content, expected = stored(folder), tensors()
    assert set(content) == set(expected)
    for name, tensor in expected.items():
        assert content[name].dtype == tensor.dtype and torch.equal(content[name], tensor), name


def test_one_file_has_all_tensors(tmp_path: Path) -> None:
    files = layout()
    files.begin(tmp_path)
    written = files.write(tmp_path, [(name, full_slice(SHAPES[name]), values) for name, values in tensors().items()])
    files.finish(tmp_path)
    assert_equal(tmp_path)
    assert written == files.total_bytes == sum(values.nbytes for values in tensors().values())
    assert files.num_parameters == 35 + 1 + 24 + 0 + 9
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_large_models_are_several_files_with_an_index(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00009.safetensors").touch()  # of another save
    files = layout(max_file_bytes=150)
    files.begin(tmp_path)
    files.write(tmp_path, [(name, full_slice(SHAPES[name]), values) for name, values in tensors().items()])
    assert_equal(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": files.total_bytes, "total_parameters": files.num_parameters}
    assert set(index["weight_map"]) == set(SHAPES)
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) == 2
    layout().begin(tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("chunk", [1, 8, 1 << 20])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_ranks_write_the_slices_that_they_hold(
    tmp_path: Path, axis: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_writer, "CHUNK", chunk)
    files = layout()
    files.begin(tmp_path)
    for rank in range(2):
        tensor_slices = []
        for name, values in tensors().items():
            shape = SHAPES[name]
            if len(shape) <= axis or not values.numel():
                if rank == 0:
                    tensor_slices.append((name, full_slice(shape), values))
                continue
            half = shape[axis] // 2
            starts = tuple(half * rank if dim == axis else 0 for dim in range(len(shape)))
            sizes = tuple((shape[axis] - half if rank else half) if dim == axis else n for dim, n in enumerate(shape))
            tensor_slice = TensorSlice(starts, sizes)
            tensor_slices.append((name, tensor_slice, cut(values, tensor_slice)))
        files.write(tmp_path, tensor_slices)
    assert_equal(tmp_path)


def test_values_are_converted_to_the_files_dtype(tmp_path: Path) -> None:
    files = Layout({"x": ((2, 3), torch.bfloat16)})
    files.begin(tmp_path)
    values = torch.tensor([[1.0, 2.5, -3.0], [0.1, 0.2, 0.3]], requires_grad=True)
    files.write(tmp_path, [("x", full_slice((2, 3)), values.t().contiguous().t())])  # not contiguous
    assert torch.equal(stored(tmp_path)["x"], values.detach().bfloat16())


def test_tensors_begin_at_a_multiple_of_eight_bytes() -> None:
    for name in SHAPES:
        place = layout().locations[name]
        assert (place.file, place.shape, place.dtype) == ("model.safetensors", SHAPES[name], DTYPES[name])
    assert layout().locations["a"].offset % 8 == 0
