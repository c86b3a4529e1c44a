"""Objects to bytes and back: pickle protocol 5 with out-of-band buffers, so that array data is never copied into a pickle.

Tensors keep dtype and shape. Those of an accelerator go to the receiver's own, or to the CPU if it has none.
Classes that live in `__main__` travel by value (cloudpickle).
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import cloudpickle

from rlhpc.runtime.devices import landing_device

Buffer = bytes | bytearray | memoryview
_BY_REFERENCE = (type, FunctionType)
_MAIN = ("__main__", "__mp_main__")


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def rebuild_tensor(buffer: Buffer, dtype: str, shape: tuple[int, ...], device: str, parameter: bool, grad: bool) -> Any:
    """Rebuilds a tensor from its dtype, shape and bytes; on the CPU it shares memory with `buffer`."""
    import torch

    kind = getattr(torch, dtype)
    if len(memoryview(buffer)) == 0:
        tensor = torch.empty(shape, dtype=kind)
    else:
        if memoryview(buffer).readonly:
            buffer = bytearray(buffer)
        tensor = torch.frombuffer(buffer, dtype=kind).reshape(shape)
    tensor = tensor.to(landing_device(device))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_(grad) if grad else tensor


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return tensor.__reduce_ex__(4)
    data = tensor.detach()
    if data.device.type != "cpu" and not data.is_contiguous():
        raise ValueError(
            f"a non-contiguous tensor on {data.device} (shape {tuple(data.shape)}, strides {data.stride()}) cannot be sent: "
            f"call .contiguous() first"
        )
    flat = data.cpu().contiguous().reshape(-1)
    flat = flat.resolve_conj().resolve_neg()
    # One element counts as contiguous whatever its stride; a view of its bytes needs a stride of one.
    raw = flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy()
    parameter = isinstance(tensor, torch.nn.Parameter)
    args = (pickle.PickleBuffer(raw), _dtype_name(tensor.dtype), tuple(tensor.shape), str(tensor.device))
    return rebuild_tensor, (*args, parameter, tensor.requires_grad)


class _NeedsValue(Exception):
    """A class or function of `__main__` cannot travel by reference."""


class _ByReferencePickler(pickle.Pickler):
    """Raises `_NeedsValue` at a class or function of `__main__`."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _BY_REFERENCE) and obj.__module__ in _MAIN:
            raise _NeedsValue
        return NotImplemented


class _Pickler(_ByReferencePickler):
    dispatch_table = copyreg.dispatch_table.copy()


class _ByValuePickler(cloudpickle.Pickler):
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({}) if hasattr(
        cloudpickle.Pickler.dispatch_table, "new_child"
    ) else dict(cloudpickle.Pickler.dispatch_table)  # fmt: skip


def _know_torch() -> None:
    """Registers the tensor reductions once torch has been imported; never imports it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or torch.Tensor in _Pickler.dispatch_table:
        return
    for pickler in (_Pickler, _ByValuePickler):
        pickler.dispatch_table[torch.Tensor] = _reduce_tensor
        pickler.dispatch_table[torch.nn.Parameter] = _reduce_tensor


class Apart:
    """Tensors that stay in place while the object that contains them is pickled.

    Args:
        stays: Selects the tensors that stay, among those that need no gradient.

    Attributes:
        tensors: The selected tensors, each once.
    """

    def __init__(self, stays: Callable[[Any], bool]) -> None:
        self._stays, self._kind = stays, sys.modules["torch"].Tensor
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}

    def clear(self) -> None:
        """Forgets the tensors that were met, for another attempt."""
        self.tensors.clear()
        self._numbers.clear()

    def __call__(self, obj: Any) -> int | None:
        """Returns the number of a tensor that stays; None for any other object."""
        if type(obj) is not self._kind or obj.requires_grad or not obj.is_contiguous() or not self._stays(obj):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _ApartPickler(_Pickler):
    apart: Apart

    def persistent_id(self, obj: Any) -> int | None:
        return self.apart(obj)


class _ByValueApartPickler(_ByValuePickler):
    apart: Apart

    def persistent_id(self, obj: Any) -> int | None:
        return self.apart(obj)


class _ApartUnpickler(pickle.Unpickler):
    tensors: Sequence[Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.tensors[pid]


def dumps(obj: Any, apart: Apart | None = None) -> tuple[bytes, list[memoryview]]:
    """Pickles `obj`; returns the stream and its out-of-band buffers (flat, contiguous views of the original memory).

    Args:
        obj: Anything that can be pickled.
        apart: Takes tensors out of it, which `loads` wants back.
    """
    _know_torch()
    try:
        data, buffers = _dump(_Pickler if apart is None else _ApartPickler, obj, apart)
    except (_NeedsValue, pickle.PicklingError, AttributeError, TypeError):
        if apart is not None:
            apart.clear()
        data, buffers = _dump(_ByValuePickler if apart is None else _ByValueApartPickler, obj, apart)
    return data, [b.raw() for b in buffers]


def pickled(obj: Any) -> bytes:
    """Pickles `obj` into one stream: by reference where the reader can import what it needs, otherwise by value."""
    stream = io.BytesIO()
    try:
        _ByReferencePickler(stream).dump(obj)
    except (_NeedsValue, pickle.PicklingError, AttributeError, TypeError):
        value: bytes = cloudpickle.dumps(obj)
        return value
    return stream.getvalue()


def _dump(kind: Any, obj: Any, apart: Apart | None) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = kind(stream, protocol=5, buffer_callback=buffers.append)
    if apart is not None:
        pickler.apart = apart
    pickler.dump(obj)
    return stream.getvalue(), buffers


def owned(buffers: Iterable[Any]) -> list[Any]:
    """Returns buffers that do not change when their owners write: all but `bytes` are copied.

    A call has copied its arguments when it returns. Data that is sent before that needs no copy; data that is sent or handed
    over later (a queue, a full socket, another thread) goes through here. A read-only view is no exception: its owner may
    write to the memory behind it.
    """
    return [buffer if _is_immutable(buffer) else bytes(buffer) for buffer in buffers]


def _is_immutable(buffer: Any) -> bool:
    return type(buffer.obj if isinstance(buffer, memoryview) else buffer) is bytes


def loads(data: Buffer, buffers: Sequence[Buffer] = (), tensors: Sequence[Any] = ()) -> Any:
    """Rebuilds an object from its pickle stream, its buffers, and the tensors that were taken out of it. Only ever called on
    bytes from an authenticated socket."""
    if not tensors:
        return pickle.loads(data, buffers=buffers)
    unpickler = _ApartUnpickler(io.BytesIO(data), buffers=buffers)
    unpickler.tensors = tensors
    return unpickler.load()
