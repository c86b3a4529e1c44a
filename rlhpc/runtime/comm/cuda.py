"""CUDA's part of the lane (and ROCm's, which has the same names in torch): memory and events that other processes open.

Torch exports the whole block of its allocator that a storage lies in, and an offset. With each export comes a counter, 1, in
a file: the importer lowers it when it closes the storage, and unless it is 0 the exporter's allocator does not use the memory
again. Here the lane's leases say when memory is free, also where several import it, or one is killed and lowers nothing.
So the exporter lowers the counter itself, at once, and importers are told of a file that does not exist, which torch
allows: an exporter may have ended. Nor do they wait for the event that torch exports beside it: the lane has its own.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch

#: Of the device's memory, for messages on their way.
_SHARE = 32
#: In place of the file with the counter; see above.
_NO_FILE, _NO_EVENT = b"/rlhpc-leases", b""


class CudaEvent:
    """An event of this process, or one of another's."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def handle(self) -> bytes:
        """See `DeviceEvent.handle`."""
        handle: bytes = self._event.ipc_handle()
        return handle

    def record(self) -> None:
        """See `DeviceEvent.record`: on the thread's current stream."""
        self._event.record()

    def wait(self) -> None:
        """See `DeviceEvent.wait`: the thread's current stream waits."""
        torch.cuda.current_stream().wait_event(self._event)

    def done(self) -> bool:
        """See `DeviceEvent.done`."""
        return bool(self._event.query())


def _address(number: int) -> str:
    """Of the device of a number in this process."""
    about: Any = torch.cuda.get_device_properties(number)
    where = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}"
    # Parts of one card differ in the second. Leases tell processes by their ids, which differ between namespaces.
    return f"{where} {about.uuid} {os.readlink('/proc/self/ns/pid')}"


class CudaDevice:
    """The device that is current when this is made; see `devices.Device`."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self.budget = int(torch.cuda.get_device_properties(self._device).total_memory) // _SHARE
        own = self._device.index
        self.address = _address(own)
        # Torch opens memory in the address space of this device, and has the driver make the other its peer. It is asked of
        # those alone that this process sees.
        peers = [one for one in range(torch.cuda.device_count()) if one != own]
        self.reads = (self.address, *(_address(o) for o in peers if torch.cuda.can_device_access_peer(own, o)))

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `Device.holds`."""
        return tensor.device == self._device

    def allocate(self, size: int) -> torch.Tensor:
        """See `Device.allocate`."""
        return self.empty(size)

    def export(self, memory: torch.Tensor) -> bytes:
        """See `Device.export`."""
        found: Any = memory.untyped_storage()._share_cuda_()
        _, handle, size, offset, counter, number, *_ = found
        torch.UntypedStorage._release_ipc_counter_cuda(counter, number)
        return pickle.dumps((handle, size, offset))

    def open(self, handle: bytes) -> torch.Tensor:
        """See `Device.open`. The number of the device is this process's own."""
        storage: Any = torch.UntypedStorage._new_shared_cuda(
            self._device.index, *pickle.loads(handle), _NO_FILE, 0, _NO_EVENT, False
        )
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def empty(self, size: int) -> torch.Tensor:
        """See `Device.empty`: of a kind that may be written in and outside inference mode."""
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device.copy`: on the thread's current stream."""
        into.copy_(source, non_blocking=True)

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        """See `Device.to_host`."""
        return memory.cpu()

    def event(self) -> CudaEvent:
        """See `Device.event`."""
        return CudaEvent(torch.cuda.Event(enable_timing=False, interprocess=True))

    def open_event(self, handle: bytes) -> CudaEvent:
        """See `Device.open_event`."""
        return CudaEvent(torch.cuda.Event.from_ipc_handle(self._device, handle))
