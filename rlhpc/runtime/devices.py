"""Device selection: a process computes on its granted accelerators, or on the CPU if it has none.

This module asks torch for the type of the accelerator. Other modules name a type only where a library's identifier needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import mmap
import os
import platform
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound="torch.nn.Module")

#: Flag of `cudaHostRegister`: the pages are locked for all devices of the process.
_PORTABLE = 1
#: Variable that is set if the accelerators do not exist, as on the nodes of `Cluster.local` and of the tests' Slurm.
VIRTUAL = "RLHPC_VIRTUAL_ACCELERATORS"

#: Builds of torch, the newest first, each after the CUDA version that a driver must support for it.
_BUILDS = (((13, 0), "cu130"), ((12, 8), "cu128"))


def accelerator() -> str:
    """Returns the type of accelerator that torch can use here, such as `cuda`; empty if torch can use no accelerator.

    Do not call this function before a fork, because torch may initialize the driver.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device else ""


def device_name(device: torch.device) -> str:
    """Returns the accelerator's product name, or `cpu` with the machine's architecture."""
    import torch

    if device.type == "cpu":
        return f"cpu {platform.machine()}"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def pci_addresses() -> list[str]:
    """Returns the PCI addresses of this process's visible accelerators, such as `0000:1b:00.0`. Initializes the driver.

    Returns an empty list if torch sees no accelerator or is not installed.
    """
    if importlib.util.find_spec("torch") is None or accelerator() != "cuda":
        return []
    import torch

    devices: Iterable[Any] = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        for properties in devices
    ]


@functools.cache
def device_memory(device: torch.device) -> float | None:
    """Returns the bytes of an accelerator's memory; None for a CPU, or if torch does not report it."""
    import torch

    if device.type == "cpu" or not hasattr(module := torch.get_device_module(device), "mem_get_info"):
        return None
    return float(module.mem_get_info(device)[1])


#: Divisor of an accelerator's memory: messages in transit may use 1/32 of it.
_BUDGET_DIVISOR = 32


def message_budget(memory: int) -> int:
    """Returns the bytes of an accelerator's memory that a process's messages in transit may use.

    Args:
        memory: Bytes of the accelerator's memory.
    """
    return memory // _BUDGET_DIVISOR


#: Index of this process's accelerator among those that it sees; None if it is the first, or a thread's current one.
_device_index: int | None = None


def set_process_device(index: int) -> None:
    """Sets this process's accelerator, by its index among those that the process sees.

    Torch's current device belongs to a thread. Messages and weights also arrive in other threads, whose current device is
    the first that the process sees.
    """
    global _device_index
    import torch

    torch.accelerator.set_device_index(index)
    _device_index = index


def process_device_index() -> int | None:
    """Returns the index that `set_process_device` has set; None if it was not called."""
    return _device_index


def receiving_device(sender_device: str) -> str:
    """Returns the device for a received tensor that was on device `sender_device` in the sending process.

    This is the CPU for a tensor from a CPU. For a tensor from an accelerator it is this process's accelerator, or the CPU if
    this process has no accelerator.
    """
    device_type = "cpu" if sender_device == "cpu" else accelerator() or "cpu"
    return device_type if device_type == "cpu" or _device_index is None else f"{device_type}:{_device_index}"


def collective_backends(device: str) -> str:
    """Returns torch.distributed's backend string for the tensors of a device and of the host: `gloo` on the CPU."""
    import torch.distributed as dist

    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"


def computes_bfloat16(device: str) -> bool:
    """Returns whether a device computes in bfloat16 natively, rather than by emulation; always False for a CPU.

    Args:
        device: Type of the device, such as `cuda` or `cpu`.
    """
    import torch

    return device != "cpu" and bool(torch.get_device_module(device).is_bf16_supported(including_emulation=False))


def has_segment_attention(query_states: torch.Tensor, value_states: torch.Tensor) -> bool:
    """Returns whether torch has a kernel for attention within the samples of a packed sequence.

    Args:
        query_states: Queries, `[1, heads, T, d]`.
        value_states: Values, `[1, heads, T, d]`.
    """
    import torch

    is_half = query_states.dtype in (torch.float16, torch.bfloat16)
    return query_states.is_cuda and is_half and query_states.shape[-1] == value_states.shape[-1] <= 256


def move_module(module: Module, device: torch.device) -> Module:
    """Moves a module to a device, and ties its tied parameters again, such as embeddings shared with the LM head.

    `Module.to` duplicates tied parameters on accelerators that torch supports only through extensions.
    """
    names_by_parameter: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(parameter, []).append(name)
    module.to(device)
    for name_kept, *alias_names in names_by_parameter.values():
        for parent, _, attribute in (alias.rpartition(".") for alias in alias_names):
            setattr(module.get_submodule(parent), attribute, module.get_parameter(name_kept))
    return module


def empty_cache() -> None:
    """Frees the accelerator memory that torch caches, for use by other processes; does nothing without an accelerator."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def synchronize(device: str) -> None:
    """Waits until a device has completed its enqueued operations; returns at once for the CPU."""
    import torch

    if device != "cpu":
        torch.accelerator.synchronize()


def host_memory(num_bytes: int, device: str) -> torch.Tensor:
    """Allocates host memory for copies from and to a device; returns a uint8 tensor.

    Locks the pages unless the device is the CPU. Unlike torch's allocator of pinned memory, does not round up the size to a
    power of two.
    """
    import torch

    if device == "cpu" or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return locked_tensor(mmap.mmap(-1, num_bytes))


def lock_pages(memory: torch.Tensor) -> bool:
    """Locks the pages of host memory for the lifetime of a tensor and registers them, so that the accelerator copies by DMA.

    Does nothing without an accelerator. If a limit on locked memory prevents this, copies are slower but still correct.

    Args:
        memory: Tensor that starts at a page boundary. Its mapping must exist as long as the tensor.

    Returns:
        Whether the pages are locked.
    """
    import torch

    if not locks_pages() or not memory.nbytes:
        return False
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE)):
        log.warning(
            "%d bytes of host memory cannot be locked: copies to and from the accelerator are slower", memory.nbytes
        )
        return False
    weakref.finalize(memory, _unlock, runtime, address, memory.untyped_storage()).atexit = False
    return True


def locks_pages() -> bool:
    """Returns whether this process has an accelerator for which pages of host memory can be locked."""
    return accelerator() == "cuda"


def locked_tensor(memory: mmap.mmap) -> torch.Tensor:
    """Returns mapped memory as a uint8 tensor, and locks its pages for the lifetime of the tensor (`lock_pages`)."""
    import torch

    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    lock_pages(tensor)
    return tensor


def _unlock(runtime: Any, address: int, memory_owner: Any) -> None:
    """Unregisters host memory. The argument `memory_owner` keeps the memory mapped until this call."""
    runtime.cudaHostUnregister(address)


class SideCopies:
    """Asynchronous copies from a device into host memory, which overlap with computation; synchronous on the CPU.

    Args:
        device: Type of the device.
    """

    def __init__(self, device: str) -> None:
        import torch

        self._stream = None if device == "cpu" else torch.Stream(device)

    def begin(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Starts copies that run once the device has completed the operations enqueued so far.

        Args:
            pairs: Target and source of each copy.

        Returns:
            A function that waits until all copies are complete, and holds the sources until then.
        """
        import torch

        if self._stream is None:
            for target, source_tensor in pairs:
                target.copy_(source_tensor)
            return lambda: None
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            for target, source_tensor in pairs:
                target.copy_(source_tensor, non_blocking=True)
        copy_finished, live_pairs = self._stream.record_event(), list(pairs)

        def wait() -> None:
            copy_finished.synchronize()
            live_pairs.clear()

        return wait


def torch_device(granted_indices: Sequence[int], environ: Mapping[str, str] = os.environ) -> str:
    """Returns the type of device on which a process computes: that of its accelerators, or `cpu` if it has none.

    Args:
        granted_indices: Indices of the process's accelerators on the node.
        environ: Environment of the process.

    Raises:
        ConfigError: Torch cannot use the granted accelerators. The process does not use the CPU instead, because that would
            only make the run slow, without an error.
    """
    import torch

    if not granted_indices:
        return "cpu"
    device_type = accelerator()
    num_visible = torch.accelerator.device_count() if device_type else 0
    if num_visible >= len(granted_indices):
        return device_type
    if environ.get(VIRTUAL):
        return device_type or "cpu"
    reason, remedy_text = explain_unseen(
        num_visible, torch.version.cuda, torch.version.hip, environ.get("CUDA_VISIBLE_DEVICES")
    )
    raise ConfigError(
        f"accelerators {', '.join(map(str, granted_indices))} of {node_name()} were granted, but cannot be used by torch "
        f"{torch.__version__}, which {reason}; {remedy_text}; or do without them: cluster.accelerators_per_node=0"
    )


def explain_unseen(
    num_visible: int, cuda: str | None, hip: str | None, mask: str | None, driver: str = ""
) -> tuple[str, str]:
    """Returns the reason why torch sees fewer accelerators than were granted ("torch 2.13, which …"), and a remedy.

    Args:
        num_visible: Number of accelerators that torch sees.
        cuda, hip: Versions of CUDA and ROCm for which torch is built.
        mask: Value of CUDA_VISIBLE_DEVICES.
        driver: Newest version of CUDA that the node's driver supports, if known.
    """
    if not cuda and not hip:
        torch_build = (
            next((cuda_build for min_version, cuda_build in _BUILDS if _parse_version(driver) >= min_version), "cu126")
            if driver
            else "auto"
        )
        return "is built for the CPU", f"install the other build: RLHPC_TORCH={torch_build} bash envs/setup.sh"
    return (
        f"is built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}'} and finds {num_visible} of them "
        f"(CUDA_VISIBLE_DEVICES={mask})",
        "look at that node's driver with nvidia-smi, or take a build for it: RLHPC_TORCH=cu126 bash envs/setup.sh",
    )


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(component) for component in version.split("."))
