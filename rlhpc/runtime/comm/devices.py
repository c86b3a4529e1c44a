"""What the lane for tensors on an accelerator asks of one: memory and events that another process of the host can open.

`cuda` has the implementation. Nothing here wakes a driver: until something else in this process has, it has no device.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class DeviceEvent(Protocol):
    """A point in the order of what a device was asked to do."""

    @property
    def handle(self) -> bytes:
        """What another process opens it by."""

    def record(self) -> None:
        """Makes this the point after all that this process has asked of the device so far."""

    def wait(self) -> None:
        """What this process asks of the device from now on comes after that point, whoever recorded it. The host goes on."""

    def done(self) -> bool:
        """Whether the device has come to that point."""


class Device(Protocol):
    """An accelerator as this process sees it. What it is asked to do it does in that order, and later.

    Attributes:
        address: Which one of the host's it is, whatever its number is in this process.
        budget: Bytes that messages on their way may take of it, for each process that sends.
        reads: Addresses of those whose memory can be opened here: its own, and its peers'.
    """

    address: str
    budget: int
    reads: tuple[str, ...]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in its memory."""

    def allocate(self, size: int) -> torch.Tensor:
        """Memory that can be exported, uint8."""

    def export(self, memory: torch.Tensor) -> bytes:
        """What another process opens such memory by.

        Raises:
            RuntimeError: The device cannot share it.
        """

    def open(self, handle: bytes) -> torch.Tensor:
        """Another process's memory, uint8; it is closed when nothing refers to it.

        Raises:
            RuntimeError: It cannot be opened here.
        """

    def empty(self, size: int) -> torch.Tensor:
        """Memory for this process alone, uint8."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Asks for a copy between two pieces of its memory."""

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        """A copy on the host, which is made when this returns."""

    def event(self) -> DeviceEvent:
        """A new event."""

    def open_event(self, handle: bytes) -> DeviceEvent:
        """Another process's event.

        Raises:
            RuntimeError: It cannot be opened here.
        """


_own: Device | None = None


def use(device: Device | None) -> None:
    """Makes a device this process's own; for kinds that torch does not call `cuda`."""
    global _own
    _own = device


def own() -> Device | None:
    """The device that this process computes on; None until it has begun to."""
    global _own
    if _own is None:
        module: Any = sys.modules.get("torch.cuda")
        if module is not None and module.is_initialized():
            from rlhpc.runtime.comm.cuda import CudaDevice

            _own = CudaDevice()
    return _own


def address() -> str:
    """Which accelerator of this host the process computes on; empty for none."""
    device = own()
    return "" if device is None else device.address
