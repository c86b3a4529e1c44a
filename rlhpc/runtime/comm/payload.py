"""Payload serialization: objects to message frames and back.

Objects are pickled (protocol 5) with out-of-band buffers, so that array data is never copied into a pickle. Tensors keep dtype
and shape. Tensors from an accelerator arrive on the receiver's accelerator, or on the CPU if it has none. Classes and
functions of `__main__` are pickled by value (cloudpickle).

Small payloads travel inside their message, large ones through a shared-memory segment that the reader maps. Large tensors on
an accelerator stay there if the readers compute on the same accelerator (`device_memory`).
"""

from __future__ import annotations

import copyreg
import fcntl
import io
import os
import pickle
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import cloudpickle

from rlhpc.runtime.comm.device_memory import DeviceMessage, DevicePool, current_device, dtype_name
from rlhpc.runtime.comm.shared_memory import HEADER, PATH_SEPARATOR, Mappings, SegmentPool, discard
from rlhpc.runtime.comm.zero_copy import LEND_LIMIT, PREFIX, Lender, LentBuffers
from rlhpc.runtime.devices import receiving_device
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.trace_recorder import mark_flow, new_flow, recorder

Buffer = bytes | bytearray | memoryview
_BY_REFERENCE = (type, FunctionType)
_MAIN = ("__main__", "__mp_main__")


def rebuild_tensor(
    buffer: Buffer, dtype: str, shape: tuple[int, ...], device: str, is_parameter: bool, has_grad: bool
) -> Any:
    """Rebuilds a tensor from its dtype, shape and bytes; on the CPU it shares memory with `buffer`."""
    import torch

    torch_dtype = getattr(torch, dtype)
    if len(memoryview(buffer)) == 0:
        tensor = torch.empty(shape, dtype=torch_dtype)
    else:
        writable = bytearray(buffer) if memoryview(buffer).readonly else buffer
        tensor = torch.frombuffer(writable, dtype=torch_dtype).reshape(shape)
    tensor = tensor.to(receiving_device(device))
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=has_grad)
    return tensor.requires_grad_(has_grad) if has_grad else tensor


def _reduce_tensor(tensor: Any) -> Any:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return tensor.__reduce_ex__(4)
    detached_tensor = tensor.detach()
    if detached_tensor.device.type != "cpu" and not detached_tensor.is_contiguous():
        raise ValueError(
            f"a non-contiguous tensor on {detached_tensor.device} (shape {tuple(detached_tensor.shape)}, strides "
            f"{detached_tensor.stride()}) cannot be "
            f"sent: call .contiguous() first"
        )
    flat_tensor = detached_tensor.cpu().contiguous().reshape(-1).resolve_conj().resolve_neg()
    # A tensor with one element is contiguous whatever its stride, but a view of its bytes needs a stride of one.
    flat_bytes = flat_tensor.as_strided(flat_tensor.shape, (1,)).view(torch.uint8).numpy()
    args = (pickle.PickleBuffer(flat_bytes), dtype_name(tensor.dtype), tuple(tensor.shape), str(tensor.device))
    return rebuild_tensor, (*args, isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)


class _NeedsValue(Exception):
    """Signal that a class or function of `__main__` cannot be pickled by reference."""


class _ByReferencePickler(pickle.Pickler):
    """Pickler that raises `_NeedsValue` for a class or function of `__main__`."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _BY_REFERENCE) and obj.__module__ in _MAIN:
            raise _NeedsValue
        return NotImplemented


class _Pickler(_ByReferencePickler):
    dispatch_table = copyreg.dispatch_table.copy()


class _ByValuePickler(cloudpickle.Pickler):
    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child()


def _register_torch() -> None:
    """Registers the tensor reductions once torch has been imported; never imports it."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or torch.Tensor in _Pickler.dispatch_table:
        return
    for pickler in (_Pickler, _ByValuePickler):
        pickler.dispatch_table[torch.Tensor] = _reduce_tensor
        pickler.dispatch_table[torch.nn.Parameter] = _reduce_tensor


class TensorExtractor:
    """Persistent-id function of a pickler that replaces selected tensors by their indices.

    Args:
        is_extracted: Returns whether to extract a tensor; called for contiguous tensors that need no gradient.

    Attributes:
        tensors: The extracted tensors, each once.
    """

    def __init__(self, is_extracted: Callable[[Any], bool]) -> None:
        self._is_extracted, self._tensor_class = is_extracted, sys.modules["torch"].Tensor
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}

    def clear(self) -> None:
        """Forgets the extracted tensors, before another attempt to pickle."""
        self.tensors.clear()
        self._numbers.clear()

    def __call__(self, obj: Any) -> int | None:
        """Returns the index in `tensors` of an extracted tensor; None for any other object."""
        if (
            type(obj) is not self._tensor_class
            or obj.requires_grad
            or not obj.is_contiguous()
            or not self._is_extracted(obj)
        ):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


def dumps(obj: Any, extractor: TensorExtractor | None = None) -> tuple[bytes, list[memoryview]]:
    """Pickles `obj`; returns the stream and its out-of-band buffers (flat, contiguous views of the original memory).

    Args:
        obj: Picklable object.
        extractor: Extracts tensors from the stream; pass the extracted tensors to `loads`.
    """
    _register_torch()
    try:
        stream, buffers = _dump(_Pickler, obj, extractor)
    except (_NeedsValue, pickle.PicklingError, AttributeError, TypeError):
        if extractor is not None:
            extractor.clear()
        stream, buffers = _dump(_ByValuePickler, obj, extractor)
    return stream, [buffer.raw() for buffer in buffers]


def pickle_object(obj: Any) -> bytes:
    """Pickles `obj` into one stream: by value if it needs classes or functions of `__main__`, otherwise by reference."""
    stream = io.BytesIO()
    try:
        _ByReferencePickler(stream).dump(obj)
    except (_NeedsValue, pickle.PicklingError, AttributeError, TypeError):
        by_value: bytes = cloudpickle.dumps(obj)
        return by_value
    return stream.getvalue()


def _dump(pickler_class: Any, obj: Any, extractor: TensorExtractor | None) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = pickler_class(stream, protocol=5, buffer_callback=buffers.append)
    if extractor is not None:  # a method of the class would be called for each object of every message
        pickler.persistent_id = extractor
    pickler.dump(obj)
    return stream.getvalue(), buffers


def copy_shared(buffers: Iterable[Any]) -> list[Any]:
    """Returns buffers that do not change if the caller changes the original data: copies all buffers except `bytes`.

    The caller of `send` or `put` may change the object once the call has returned. Data that is sent before the return needs
    no copy; data that is sent or stored later (a queue, a full socket, another thread) does. A read-only view is copied too,
    because its owner may write to the underlying memory.
    """
    return [
        buffer if type(buffer.obj if isinstance(buffer, memoryview) else buffer) is bytes else bytes(buffer)
        for buffer in buffers
    ]


def loads(data: Buffer, buffers: Sequence[Buffer] = (), tensors: Sequence[Any] = ()) -> Any:
    """Rebuilds an object from its pickle stream, its buffers and its extracted tensors.

    Call this function only with bytes from an authenticated socket.
    """
    if not tensors:
        return pickle.loads(data, buffers=buffers)
    unpickler: Any = pickle.Unpickler(io.BytesIO(data), buffers=buffers)
    unpickler.persistent_load = tensors.__getitem__
    return unpickler.load()


#: Seconds that the other receivers of a host wait for receiver 0 to fetch, which still has the last message's memory mapped.
_FIRST_READER_S = 0.05
_PAUSE_S = 0.001


class HostReader(NamedTuple):
    """Index of a receiver among the receivers on its host that share one fetched copy of a message.

    Attributes:
        name: Unique name of the message on this host.
        number, num_receivers: Index of this receiver, and number of receivers.
        holders: Processes of the receivers (`host.process_key`), if known.
    """

    name: str
    number: int
    num_receivers: int
    holders: tuple[str, ...] = ()


def fetch_once_per_host(
    folder: Path,
    host_reader: HostReader,
    fetch: Callable[[], str],
    check_alive: Callable[[], None],
    timeout_s: float = 600.0,
) -> str:
    """Fetches a message, or waits for the receiver on this host that fetches it; returns the path of its segment.

    Args:
        folder: The session's folder on this host.
        host_reader: This receiver.
        fetch: Fetches the message into a segment for all receivers and returns its path; only one receiver calls it.
        check_alive: Called while waiting; raises when the run has failed.
        timeout_s: Seconds to wait for another receiver.

    Raises:
        DeadlineExceeded: Another receiver on this host was still fetching after `timeout_s` seconds.
    """
    meeting_file = folder / f"share-{host_reader.name}"
    start_time = time.monotonic()
    while host_reader.number and not meeting_file.exists() and time.monotonic() - start_time < _FIRST_READER_S:
        time.sleep(_PAUSE_S)
    fd = os.open(meeting_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(fd):
            check_alive()
            if time.monotonic() - start_time > timeout_s:
                raise DeadlineExceeded(
                    f"waited {timeout_s:.0f} s for another rank of this host to fetch {host_reader.name}"
                )
            time.sleep(_PAUSE_S)
        num_before, _, path = os.pread(fd, 4096, 0).decode().partition(" ")
        path = path or fetch()
        num_arrived = int(num_before or 0) + 1
        if num_arrived == host_reader.num_receivers:
            meeting_file.unlink(missing_ok=True)
        else:
            os.pwrite(fd, f"{num_arrived} {path}".encode(), 0)
        return path
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


INLINE_LIMIT = 32 * 1024
#: What follows the pickle stream of a traced message, which `pickle.loads` ignores: a mark and the message's id.
_FLOW, _FLOW_MARK = struct.Struct(">8sQ"), b"\0rlflow\0"


class Origin(NamedTuple):
    """Process that owns a segment.

    Attributes:
        host: Host id of the process.
        endpoint: TCP endpoint of the process's service; its UNIX socket if the run has one host.
        bulk: Endpoint of the process's `BulkServer`, which serves its segments to other hosts.
    """

    host: str
    endpoint: str
    bulk: str = ""


class ForwardingProcess:
    """Process on another host that receives data and forwards it to further hosts.

    Args:
        bulk: Endpoint of the process's `BulkServer`.

    Attributes:
        is_lost: Whether the process has ended or has not received the data in time. The data is then fetched from its owner.
    """

    def __init__(self, bulk: str) -> None:
        self.bulk = bulk
        self.is_lost = False


class Packed:
    """Serialized object, ready to be sent.

    Attributes:
        nbytes: Size of the object's data, for back pressure.
        segment: Path of the shared-memory file, or name of the zero-copy buffers. If the message uses an accelerator buffer,
            the path of the buffer's lease follows, separated by `PATH_SEPARATOR`. None if all data is inline.
        num_readers: Number of readers.
    """

    __slots__ = (
        "_data",
        "_device_message",
        "_inline",
        "_lender",
        "_lent",
        "_origin",
        "_path",
        "_pool",
        "_spans",
        "nbytes",
        "readers",
        "segment",
    )  # fmt: skip

    def __init__(
        self,
        obj: Any,
        pool: SegmentPool,
        origin: Origin,
        num_readers: int = 1,
        lender: Lender | None = None,
        device_pool: DevicePool | None = None,
        inline: bool = False,
        holders: Sequence[str] = (),
    ) -> None:
        """Serializes `obj`.

        Args:
            obj: Picklable object.
            pool: Segment pool of this process.
            origin: This process, for readers on other hosts.
            num_readers: Number of processes that will read the object; processes that share a fetched copy count once.
            lender: Lender of this process, if all readers are on other hosts. They then read large data directly from the
                object's memory, which must not change until `finish_reads`.
            device_pool: Device pool, if all readers compute on this process's accelerator. Large tensors then stay on the
                accelerator, if the pool has room for them.
            inline: Put all data into the message, so that readers need nothing else from this process.
            holders: For each reader, the reader's process or the process that stores its message. When this process ends, the
                data is free for the reader; see `shared_memory.ShmSegment`.
        """
        self._device_message: DeviceMessage | None = None
        buffers = None if device_pool is None else self._write_to_device(obj, device_pool, num_readers, holders)
        if buffers is None:
            self._data, buffers = dumps(obj)
        self._origin, self.readers = origin, num_readers
        num_bytes = sum(len(buffer) for buffer in buffers)
        self.nbytes = len(self._data) + num_bytes + (self._device_message.size if self._device_message else 0)
        self._path = ""
        self._inline: list[Any] = []
        self._spans: list[tuple[int, int]] = []
        self._pool, self._lender = pool, lender
        self._lent: LentBuffers | None = None
        if inline or num_bytes < INLINE_LIMIT:
            self._inline = buffers
        elif lender is not None and num_bytes >= LEND_LIMIT:
            self._lent = lender.lend(buffers, num_readers, holders)
            self._path, self._spans = self._lent.name, self._lent.spans
        else:
            self._path, self._spans = pool.write(buffers, num_readers, holders=holders)
        self.segment: str | None = self._path or None
        if self._device_message is not None:
            self.segment = PATH_SEPARATOR.join(filter(None, (self._path, self._device_message.path)))

    def _write_to_device(
        self, obj: Any, device_pool: DevicePool, num_readers: int, holders: Sequence[str]
    ) -> list[Any] | None:
        """Copies the object's tensors on the accelerator into a buffer of the pool, and pickles the rest of the object.

        Returns:
            The pickle's buffers; None if the tensors are too small or the pool is full, so that they must be pickled too.
        """
        device = current_device()
        if device is None:
            return None
        device_tensors = TensorExtractor(device.holds)
        self._data, buffers = dumps(obj, device_tensors)
        if sum(tensor.nbytes for tensor in device_tensors.tensors) < INLINE_LIMIT:
            return None if device_tensors.tensors else buffers
        self._device_message = device_pool.write(device_tensors.tensors, num_readers, holders)
        return None if self._device_message is None else buffers

    def frames(self, reader: int = 0, share: HostReader | None = None) -> list[Any]:
        """Returns message frames for one reader: the pickle stream, a descriptor, and the buffers that travel inline.

        Args:
            reader: Number of the reader.
            share: Index of the receiving process, if several processes of another host share a copy and are one reader.
        """
        if self.segment is None:
            return [self._data, b"", *self._inline]
        host_fields = (share and tuple(share), self._device_message and tuple(self._device_message))
        descriptor = (tuple(self._origin), self._path, self._spans, reader, self.readers, *host_fields)
        return [self._data, pickle.dumps(descriptor), *self._inline]

    def trace(self, name: str) -> None:
        """Adds the message's departure to the trace, and its id to the data, so that the receiver can add the arrival."""
        self._data += _FLOW.pack(_FLOW_MARK, new_flow(name))

    def copy_inline(self) -> None:
        """Copies inline data that refers to the caller's memory, so that the caller may change the object at once."""
        self._inline = copy_shared(self._inline)

    def finish_reads(self, is_delivered: bool, check: Callable[[], None]) -> None:
        """Ends all reads of the object's memory by other hosts, after the message has been sent. The caller may then change
        the object.

        Args:
            is_delivered: Whether all readers were already waiting for the message.
            check: Called while waiting; raises when the run has failed.
        """
        if self._lent is not None:
            self._lent.finish_reads(is_delivered, self._pool, check)

    def discard(self, first: int = 0, end: int | None = None) -> None:
        """Frees the data for the readers `first` to `end - 1`, by default all readers. They do not read the data any more."""
        for reader in range(first, (self.readers if end is None else end) if self.segment else 0):
            if self._lent is not None and self._lender is not None:
                self._lender.release(self._lent.name, reader)
            discard(str(self.segment), reader)


#: Function (origin, path, size, reader, share) that returns the contents of another host's segment, with its layout.
FetchSegment = Callable[[Origin, str, int, int, HostReader | None], memoryview]
#: Function (device_message, origin, reader) that returns the tensors in a sender's accelerator buffer.
ReceiveTensors = Callable[[DeviceMessage, Origin, int], list[Any]]


def refuse_device_message(device_message: DeviceMessage, origin: Origin, reader: int) -> list[Any]:
    """Refuses tensors in accelerator memory: the default of `unpack`, for processes without an accelerator.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"a message from {device_message.address}, to a process that computes on no accelerator")


def unpack(
    frames: Sequence[Buffer],
    host: str,
    mappings: Mappings,
    fetch: FetchSegment,
    land: ReceiveTensors = refuse_device_message,
    *,
    borrow: bool = False,
) -> Any:
    """Rebuilds the object of `frames`.

    Args:
        frames: The frames from `Packed.frames`, after transport.
        host: This process's host id; a segment of another host is fetched.
        mappings: Mappings of this process.
        fetch: Fetches a segment from another host.
        land: Returns the tensors in a buffer on an accelerator.
        borrow: The caller only reads the result, so no copy on write is needed if the segment has other readers.

    Returns:
        The object. Its segment stays in use by this reader until the last view of the data is deleted.
    """
    stream, descriptor, *inline = frames
    if recorder.is_on and len(stream) > _FLOW.size:
        flow_mark, flow_id = _FLOW.unpack_from(stream, len(stream) - _FLOW.size)
        if flow_mark == _FLOW_MARK:
            mark_flow("message", flow_id, is_target=True)
    if not len(descriptor):
        return loads(stream, [bytearray(buffer) for buffer in inline])
    origin, path, spans, reader, readers, share_fields, device_message = pickle.loads(descriptor)
    tensors = land(DeviceMessage(*device_message), Origin(*origin), reader) if device_message else ()
    if not path:
        return loads(stream, [bytearray(buffer) for buffer in inline], tensors)
    if origin[0] != host or path.startswith(PREFIX):
        host_reader = HostReader(*share_fields) if share_fields else None
        segment_data = fetch(Origin(*origin), path, spans[-1][0] + spans[-1][1] - HEADER, reader, host_reader)
    else:
        segment_data = mappings.lease(path, reader, in_place=borrow or readers == 1)
    return loads(
        stream, [segment_data[span_start : span_start + span_size] for span_start, span_size in spans], tensors
    )


def release_unread(frames: Sequence[Buffer]) -> None:
    """Frees a message's accelerator buffer for its reader, without reading the message."""
    if len(frames[1]):
        _, _, _, reader, _, _, device_message = pickle.loads(frames[1])
        if device_message:
            discard(DeviceMessage(*device_message).path, reader)
