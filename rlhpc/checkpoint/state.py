"""Serialization of state without pickled code: only tensors, arrays and plain containers are stored.

Loading uses `torch.load(weights_only=True)`, so a checkpoint from elsewhere cannot run code.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as _safetensors_load
from safetensors.torch import save as _safetensors_save

from rlhpc.checkpoint.async_writer import ChecksummedFile, map_tensors, write_file
from rlhpc.runtime.errors import CheckpointError

_ARRAY = "__ndarray__"
#: Dtype → its name in safetensors. A file has tensors of later dtypes first.
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32",
    torch.uint32: "U32", torch.float32: "F32", torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64",
    torch.uint64: "U64",
}  # fmt: skip
_ORDER = list(_DTYPES)


def dump_state(state: Any) -> bytes:
    """Serializes nested dicts, lists and tuples of numbers, strings, bytes, tensors and NumPy arrays.

    Raises:
        CheckpointError: The state contains an object of a different type; the message gives its location.
    """
    buffer = io.BytesIO()
    torch.save(_copy_views(_encode(state, "state")), buffer)
    return buffer.getvalue()


def parse_state(state_bytes: bytes, *, map_location: str = "cpu", name: str = "state") -> Any:
    """Parses the output of `dump_state`.

    Raises:
        CheckpointError: The data cannot be parsed; the message begins with `name`.
    """
    try:
        return _decode(torch.load(io.BytesIO(state_bytes), map_location=map_location, weights_only=True))
    except Exception as error:  # torch raises UnpicklingError, RuntimeError, EOFError, KeyError, ... for damaged input
        raise CheckpointError(f"{name}: cannot be read as a state file ({type(error).__name__}: {error})") from error


def save_state(path: Path, state: Any) -> None:
    """Writes a state file durably, or queues it in the active save (`async_writer.write_file`).

    Raises:
        CheckpointError: The state contains a type that `dump_state` refuses, or the file could not be written.
    """
    write_file(path, _encode(state, "state"), lambda file, copies: stream_state(file, _copy_views(copies)))


def stream_state(file: ChecksummedFile, state: Any) -> None:
    """Writes an encoded state with `torch.save`."""
    torch.save(state, file)  # type: ignore[arg-type]  # `torch.save` only calls `write`


def load_state(path: Path, *, map_location: str = "cpu") -> Any:
    """Reads a state file.

    Raises:
        CheckpointError: The file is missing or unreadable; the message names it.
    """
    return parse_state(_read(path), map_location=map_location, name=str(path))


def dump_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serializes named tensors as safetensors. Tied tensors are stored once per name."""
    return _safetensors_save(_copy_to_separate_storage(tensors), metadata={"format": "pt", **(metadata or {})})


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a `.safetensors` file durably, or queues it in the active save (`async_writer.write_file`).

    Tied tensors are written once per name.

    Raises:
        CheckpointError: The file could not be written.
    """
    detached_tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    write_file(path, detached_tensors, lambda file, copies: stream_tensors(file, on_host(copies)))


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns contiguous tensors on the CPU, which may share memory with the given tensors."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def stream_tensors(
    file: ChecksummedFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the same bytes as the safetensors library, but tensor by tensor.

    This needs no additional copy of the data in memory, and does not hold Python's lock.

    Args:
        file: Target file.
        tensors: Contiguous tensors on the CPU.
        metadata: Metadata of the file, in addition to torch's format entry.
    """
    ordered_tensors = sorted(tensors.items(), key=lambda named: (-_ORDER.index(named[1].dtype), named[0]))
    file.write(safetensors_header({name: (tensor.shape, tensor.dtype) for name, tensor in ordered_tensors}, metadata))
    for _, tensor in ordered_tensors:
        if tensor.numel():
            # By its address: offload cannot free memory that NumPy has exported.
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def safetensors_header(
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns the header of a safetensors file, which precedes the tensors.

    Args:
        tensors: Shape and dtype of each tensor, in the order in which they are stored.
        metadata: Metadata of the file, in addition to torch's format entry.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end_byte = 0
    for name, (shape, dtype) in tensors.items():
        start_byte, end_byte = end_byte, end_byte + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start_byte, end_byte]}
    header_json = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_json += b" " * (-len(header_json) % 8)
    return struct.pack("<Q", len(header_json)) + header_json


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads a `.safetensors` file. The tensors map the file's memory until they are modified.

    Raises:
        CheckpointError: The file is missing or unreadable; the message names it.
    """
    try:
        return _safetensors_load(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or 'no such file'}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error


def _copy_to_separate_storage(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors on the CPU, each with separate memory: copies tied tensors and views of other tensors."""
    copies: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().to("cpu").contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        copies[name] = tensor
    return copies


def rng_state() -> dict[str, Any]:
    """Returns the state of the process's global generators: Python, NumPy, torch CPU and every CUDA device in use."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": [],
    }
    # A query of CUDA's state before its initialization would create a context.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores a state of `rng_state`. CUDA states of devices that are no longer visible are ignored."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        for device, device_state in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(device_state.cpu(), device)


def _read(path: Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def _encode(state: Any, location: str) -> Any:
    if state is None or isinstance(state, (bool, str, bytes)) or type(state) in (int, float):
        return state
    if isinstance(state, torch.Tensor):
        return state.detach()
    if isinstance(state, (np.ndarray, np.generic)):
        array = np.asarray(state)
        if array.dtype.hasobject or array.dtype.names:
            raise CheckpointError(f"{location}: an array of dtype {array.dtype} cannot be put into a checkpoint")
        array_bytes = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else torch.empty(0)
        return {
            _ARRAY: array_bytes,
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "scalar": isinstance(state, np.generic),
        }
    if isinstance(state, Mapping):
        return {key: _encode(child, f"{location}[{key!r}]") for key, child in state.items()}
    if isinstance(state, tuple):
        return tuple(_encode(child, f"{location}[{i}]") for i, child in enumerate(state))
    if isinstance(state, list):
        return [_encode(child, f"{location}[{i}]") for i, child in enumerate(state)]
    if isinstance(state, (int, float)):  # subclasses: IntEnum and the like
        return int(state) if isinstance(state, int) else float(state)
    raise CheckpointError(
        f"{location}: {type(state).__module__}.{type(state).__qualname__} cannot be put into a "
        f"checkpoint; use tensors, "
        "NumPy arrays, numbers, strings, bytes, lists, tuples and dicts"
    )


def _copy_views(value: Any) -> Any:
    """Copies views of larger tensors, because `torch.save` writes the complete storage of a view."""
    return map_tensors(value, lambda t: t if t.untyped_storage().nbytes() == t.nbytes else t.clone())


def _decode(encoded_state: Any) -> Any:
    if isinstance(encoded_state, dict):
        if _ARRAY in encoded_state:
            array_bytes = encoded_state[_ARRAY].cpu().numpy().tobytes()
            array = (
                np.frombuffer(array_bytes, dtype=np.dtype(encoded_state["dtype"]))
                .reshape(encoded_state["shape"])
                .copy()
            )
            return array[()] if encoded_state["scalar"] else array
        return {key: _decode(child) for key, child in encoded_state.items()}
    if isinstance(encoded_state, tuple):
        return tuple(_decode(child) for child in encoded_state)
    if isinstance(encoded_state, list):
        return [_decode(child) for child in encoded_state]
    return encoded_state
