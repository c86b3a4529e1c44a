"""Writer of a model's safetensors folder by all ranks at once: each rank writes the tensor slices that it holds.

The location of a tensor in a file follows from names, shapes and dtypes, which all ranks know. So the first rank writes the
headers, and then every rank writes its slices, with `pwrite` at their offsets. No tensor is gathered. If
several ranks hold the same slice, only one of them writes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rlhpc.checkpoint.state import safetensors_header
from rlhpc.checkpoint.tensor_slice import TensorSlice
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import fsync_folder, write_durably
from rlhpc.training.mesh import Mesh
from rlhpc.training.parameter_names import checkpoint_parts, model_in
from rlhpc.training.safetensors_reader import Slices
from rlhpc.training.shard_layout import copy_full, held_slices, iter_tensors, named_tensor

#: Maximum bytes of tensors in a file, unless a single tensor is larger; transformers uses the same limit.
MAX_FILE_BYTES = 5 * 10**9
#: Bytes copied at a time from a tensor to be written.
CHUNK = 1 << 24


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a model's folder.

    Attributes:
        file: Name of the file.
        offset: Offset of the tensor's first byte in the file.
        shape, dtype: Shape and dtype of the tensor.
    """

    file: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """Layout of a model's folder: files, headers and locations, determined by names, shapes and dtypes alone.

    Args:
        tensors: Shape and dtype of each tensor, in the order in which they are stored.
        max_file_bytes: Maximum bytes of a file's tensors; by default `MAX_FILE_BYTES`.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_file_bytes: int | None = None
    ) -> None:
        names_by_file: list[list[str]] = [[]]
        file_bytes, max_file_bytes = 0, MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
        for name, nbytes in sizes.items():
            if names_by_file[-1] and file_bytes + nbytes > max_file_bytes:
                names_by_file.append([])
                file_bytes = 0
            names_by_file[-1].append(name)
            file_bytes += nbytes
        self.total_bytes = sum(sizes.values())
        self.num_parameters = sum(math.prod(shape) for shape, _ in tensors.values())
        self.locations: dict[str, TensorLocation] = {}
        self._headers: dict[str, tuple[bytes, int]] = {}
        for file_number, names in enumerate(names_by_file, 1):
            file = (
                f"model-{file_number:05d}-of-{len(names_by_file):05d}.safetensors" if len(names_by_file) > 1 else MODEL
            )
            header = safetensors_header({name: tensors[name] for name in names})
            offset = len(header)
            for name in names:
                self.locations[name] = TensorLocation(file, offset, *tensors[name])
                offset += sizes[name]
            self._headers[file] = header, offset

    def begin(self, folder: Path) -> None:
        """Creates the files, with headers and space for the tensors, and the index. One rank calls it."""
        folder.mkdir(parents=True, exist_ok=True)
        for stale_file in (*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"):
            stale_file.unlink(missing_ok=True)
        for file, (header, size) in self._headers.items():
            with (folder / file).open("wb") as stream:
                stream.write(header)
                stream.truncate(size)
        if len(self._headers) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes, "total_parameters": self.num_parameters},
                "weight_map": {name: location.file for name, location in sorted(self.locations.items())},
            }
            write_durably(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")

    def write(self, folder: Path, tensor_slices: Iterable[tuple[str, TensorSlice, torch.Tensor]]) -> int:
        """Writes slices durably into files that `begin` created.

        Args:
            folder: Folder of the files.
            tensor_slices: Name of the tensor, the slice, and its values, in any dtype and on any device. The iterable is
                consumed one slice at a time.

        Returns:
            Number of bytes written.
        """
        files: dict[str, int] = {}
        num_written = 0
        try:
            for name, tensor_slice, values in tensor_slices:
                location = self.locations[name]
                if location.file not in files:
                    files[location.file] = os.open(folder / location.file, os.O_WRONLY)
                num_written += _write_slice(files[location.file], location, tensor_slice, values.detach())
            for file in files.values():
                os.fsync(file)
        finally:
            for file in files.values():
                os.close(file)
        return num_written

    def finish(self, folder: Path) -> None:
        """Makes the folder durable, after all ranks have written."""
        fsync_folder(folder)


def _write_slice(file: int, location: TensorLocation, tensor_slice: TensorSlice, values: torch.Tensor) -> int:
    """Writes a slice in runs of bytes that are contiguous in the file, and returns the number of bytes."""
    total_written = 0
    for start, run_values in _runs(location.shape, tensor_slice, values):
        file_offset = location.offset + start * location.dtype.itemsize
        step = max(1, CHUNK // location.dtype.itemsize)
        for chunk_start in range(0, run_values.numel(), step):
            chunk = run_values[chunk_start : chunk_start + step].to("cpu", location.dtype).contiguous()
            chunk_bytes = memoryview(chunk.view(torch.uint8).numpy())  # type: ignore[arg-type]
            num_written = 0
            while num_written < len(chunk_bytes):
                num_written += os.pwrite(
                    file, chunk_bytes[num_written:], file_offset + chunk_start * location.dtype.itemsize + num_written
                )
            total_written += len(chunk_bytes)
    return total_written


def _runs(
    shape: tuple[int, ...], tensor_slice: TensorSlice, values: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields runs of a slice's elements that are contiguous in the full tensor: start index in the tensor, and flat values."""
    if not shape:
        yield 0, values.reshape(1)
        return
    # First dimension from which on the slice is complete; each index of the dimensions before it is one run.
    first_complete = len(shape)
    while first_complete > 0 and tensor_slice.sizes[first_complete - 1] == shape[first_complete - 1]:
        first_complete -= 1
    num_outer_dims = max(0, first_complete - 1)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first_element = sum(start * stride for start, stride in zip(tensor_slice.starts, strides, strict=True))
    if num_outer_dims == 0:
        yield from _rows(first_element, values, strides[0])
        return
    for run_index in range(math.prod(tensor_slice.sizes[:num_outer_dims])):
        index, remainder = [], run_index
        for size in reversed(tensor_slice.sizes[:num_outer_dims]):
            remainder, dim_index = divmod(remainder, size)
            index.append(dim_index)
        index.reverse()
        run_start = first_element + sum(dim_index * stride for dim_index, stride in zip(index, strides, strict=False))
        yield run_start, values[tuple(index)].reshape(-1)


def _rows(first_element: int, values: torch.Tensor, stride: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the rows of one run, some rows at a time, so that copies stay small."""
    if values.is_contiguous():
        yield first_element, values.reshape(-1)
        return
    step = max(1, CHUNK // max(1, values[:1].numel() * values.element_size())) if len(values) else 1
    for start in range(0, len(values), step):
        yield first_element + start * stride, values[start : start + step].reshape(-1)


@torch.no_grad()
def load_shards(
    module: nn.Module, mesh: Mesh, slices: Slices, created_tensors: Iterable[tuple[str, torch.Tensor]], source: str
) -> None:
    """Loads the weights of a sharded module. Each rank reads its slices of each tensor.

    Args:
        module: Module with uninitialized memory.
        mesh: Mesh that the module is sharded over.
        slices: Reader of the files.
        created_tensors: Names in the module and full tensors that are not in the files, the same on every rank.
        source: Name of the files in messages.

    Raises:
        ConfigError: A tensor has another shape in the files.
    """
    created_names = set[str]()
    for name, tensor in created_tensors:
        created_names.add(name)
        copy_full(named_tensor(module, name), tensor)
    checked_names = set[str]()
    with slices:
        for held_slice in held_slices(module, mesh, with_adapters=True):
            if held_slice.parameter in created_names:
                continue
            if held_slice.name not in checked_names:
                checked_names.add(held_slice.name)
                if (file_shape := slices.shape(held_slice.name)) != held_slice.shape:
                    raise ConfigError(
                        f"{source}: {held_slice.name} is {list(file_shape)} there, and {list(held_slice.shape)} in the model"
                    )
            held_slice.view_in(module).copy_(slices.read(held_slice.name, held_slice.tensor_slice))


def find_missing(module: nn.Module, slices: Slices, created: Iterator[str]) -> list[str]:
    """Returns the names of a module's tensors that are neither in the files nor created."""
    created_names = set(created)
    if getattr(getattr(model_in(module), "config", None), "quantization_config", None) is not None:
        return ["weight that is not quantized"]
    shapes = {name: tuple(tensor.shape) for name, tensor in iter_tensors(module) if name not in created_names}
    views_by_tensor = checkpoint_parts(module, shapes)
    return [view.name for name in shapes for view in views_by_tensor[name] if view.name not in slices.files]
