"""Captured passes: forward and backward passes with fixed sizes, recorded once as a graph of the device and then replayed.

A pass of a small network is hundreds of kernels that take microseconds each, and starting them from Python takes longer than
running them. A replay starts all of them at once. It reads the inputs from the memory in which they were when the pass was
recorded, adds gradients to the same buffers, and runs no Python: a pass must not depend on values that the host reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line

log = logging.getLogger(__name__)

Inputs = TypeVar("Inputs")
Outputs = dict[str, torch.Tensor]
#: Runs a function several times to warm up, then records it; returns a function that replays it, and its outputs.
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
#: Maximum number of recordings, each of which keeps its memory. Other sizes of passes run without one.
_MAX_RECORDINGS = 32
#: Runs of a pass before it is recorded, in which libraries choose their kernels.
_WARM_UPS = 3


@functools.cache
def _graph_memory() -> Any:
    """Returns the memory of all graphs of this process. A graph leaves nothing in it but its outputs, which stay allocated,
    so that graphs may use the rest one after the other.
    """
    return torch.cuda.graph_pool_handle()


def record_cuda_graph(compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Records a function as a CUDA graph (`Record`)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads of the process, which send and receive messages, may query events and allocate memory in the meantime.
    with torch.cuda.graph(graph, pool=_graph_memory(), capture_error_mode="thread_local"):
        outputs = compute()
    return graph.replay, outputs


def captures_graphs(device: torch.device) -> bool:
    """Returns whether passes on a device can be recorded."""
    return device.type == "cuda"


class CapturedPasses:
    """Passes that are recorded at their first call, one for each function and layout of the inputs.

    Args:
        find_preserved: Returns the tensors that a pass changes, such as gradients and buffers; recording leaves them
            unchanged.
        record: Records a pass.
        key: Name of the configuration key in messages.
    """

    def __init__(
        self,
        find_preserved: Callable[[], Iterable[torch.Tensor]],
        record: Record = record_cuda_graph,
        key: str = "actor.capture_graphs",
    ) -> None:
        self._find_preserved, self._record, self._key = find_preserved, record, key
        self._passes: dict[Hashable, tuple[list[torch.Tensor], Callable[[], None], Outputs]] = {}
        self._is_full = False

    def run(self, name: Hashable, inputs: Inputs, compute: Callable[[Inputs], Outputs]) -> Outputs:
        """Runs `compute(inputs)` by a replay, or directly if the memory for recordings is full.

        Args:
            name: Identifies the function.
            inputs: Nested tuples, dicts and dataclasses of tensors and constants.
            compute: Function of the inputs, whose tensors it must not retain.

        Returns:
            Copies of the function's outputs.

        Raises:
            ConfigError: The function cannot be recorded.
        """
        tensors, layout = _layout(inputs)
        key = name, layout
        if key not in self._passes and len(self._passes) >= _MAX_RECORDINGS:
            if not self._is_full:
                self._is_full = True
                log.warning(
                    "%s: passes have more than %d sizes; the others are not recorded", self._key, _MAX_RECORDINGS
                )
            return compute(inputs)
        if key not in self._passes:
            static_inputs = _map_tensors(inputs, lambda tensor: tensor.detach().clone())
            with self._preserve():
                replay, outputs = self._record_pass(lambda: compute(static_inputs))
            self._passes[key] = _layout(static_inputs)[0], replay, outputs
        static_tensors, replay, outputs = self._passes[key]
        for static_tensor, tensor in zip(static_tensors, tensors, strict=True):
            static_tensor.copy_(tensor)
        replay()
        return {output_name: output.clone() for output_name, output in outputs.items()}

    def clear(self) -> None:
        """Forgets all passes, because memory that they use is about to move."""
        self._passes.clear()

    def _record_pass(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        try:
            return self._record(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"{self._key}: a pass of this policy cannot be captured ({first_line(error)}): set it to false"
            ) from error

    @contextlib.contextmanager
    def _preserve(self) -> Iterator[None]:
        tensors = list(self._find_preserved())
        copies = [tensor.clone() for tensor in tensors]
        devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
        with torch.random.fork_rng(devices):
            yield
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)


def _layout(inputs: Any) -> tuple[list[torch.Tensor], Hashable]:
    """Returns the tensors of nested inputs, and their layout: structure, shapes, dtypes and constants."""
    tensors: list[torch.Tensor] = []

    def describe(value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return value.shape, value.dtype, value.device
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value), tuple(describe(getattr(value, field.name)) for field in dataclasses.fields(value))
        if isinstance(value, Mapping):
            return tuple((key, describe(member)) for key, member in value.items())
        if isinstance(value, (tuple, list)):
            return type(value), tuple(describe(member) for member in value)
        return value

    return tensors, describe(inputs)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns nested inputs with `change` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _map_tensors(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        return {key: _map_tensors(member, change) for key, member in value.items()}
    if isinstance(value, tuple):
        members = [_map_tensors(member, change) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    return [_map_tensors(member, change) for member in value] if isinstance(value, list) else value
