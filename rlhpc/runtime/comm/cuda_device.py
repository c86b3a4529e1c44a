"""CUDA implementation of the device channel (`device_memory`): memory and events shared by torch's IPC handles.

This module imports torch; it is imported only after this process has initialized a CUDA device.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch

from rlhpc.runtime.devices import message_budget, process_device_index

#: Placeholders for torch's reference-counter file and event, which are not used: leases count the readers.
_NO_FILE, _NO_EVENT = b"/rlhpc-leases", b""


class CudaEvent:
    """CUDA event of this process or of another one.

    Args:
        event: Event of torch.
        device: Device of this process. The thread's current device may be another one.
    """

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    @property
    def handle(self) -> bytes:
        """Handle of the event (`DeviceEvent.handle`)."""
        handle: bytes = self._event.ipc_handle()
        return handle

    def record(self) -> None:
        """Implements `DeviceEvent.record` on the thread's current stream of the device."""
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Implements `DeviceEvent.wait`: the thread's current stream of the device waits."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        """Implements `DeviceEvent.done`."""
        return bool(self._event.query())


def _find_device_address(device_index: int) -> str:
    """Returns the address (`_Device.address`) of the device with index `device_index` in this process."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    pci_address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    # MIG instances of one GPU differ only in the UUID. Leases identify processes by pids, which depend on the PID namespace.
    return f"{pci_address} {properties.uuid} {os.readlink('/proc/self/ns/pid')}"


class CudaDevice:
    """CUDA device of this process (`devices.process_device_index`), or the thread's current one; implements `_Device`."""

    def __init__(self) -> None:
        process_index = process_device_index()
        self._device = torch.device("cuda", torch.cuda.current_device() if process_index is None else process_index)
        self.budget = message_budget(int(torch.cuda.get_device_properties(self._device).total_memory))
        index = self._device.index
        self.address = _find_device_address(index)
        # Torch opens memory of a peer in this device's address space. Only devices visible to this process can be queried.
        peers = [peer for peer in range(torch.cuda.device_count()) if peer != index]
        self.reads = (
            self.address,
            *(_find_device_address(o) for o in peers if torch.cuda.can_device_access_peer(index, o)),
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Implements `Device.holds`."""
        return tensor.device == self._device

    def allocate(self, size: int) -> torch.Tensor:
        """Implements `Device.allocate`."""
        return self.empty(size)

    def export(self, memory: torch.Tensor) -> bytes:
        """Implements `Device.export`."""
        ipc_fields: Any = memory.untyped_storage()._share_cuda_()
        _, memory_handle, num_bytes, offset, counter, counter_offset, *_ = ipc_fields
        torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
        return pickle.dumps((memory_handle, num_bytes, offset))

    def open(self, handle: bytes) -> torch.Tensor:
        """Implements `Device.open`, with the device's index in this process."""
        storage: Any = torch.UntypedStorage._new_shared_cuda(
            self._device.index, *pickle.loads(handle), _NO_FILE, 0, _NO_EVENT, False
        )
        with torch.inference_mode(False):
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def empty(self, size: int) -> torch.Tensor:
        """Implements `Device.empty`; the memory may be written inside and outside inference mode."""
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Implements `Device.copy` on the thread's current stream."""
        target.copy_(source, non_blocking=True)

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        """Implements `Device.to_host`."""
        return memory.cpu()

    def event(self) -> CudaEvent:
        """Implements `Device.event`."""
        return CudaEvent(torch.cuda.Event(enable_timing=False, interprocess=True), self._device)

    def open_event(self, handle: bytes) -> CudaEvent:
        """Implements `Device.open_event`."""
        return CudaEvent(torch.cuda.Event.from_ipc_handle(self._device, handle), self._device)
