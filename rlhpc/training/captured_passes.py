"""Captured passes: forward and backward passes with fixed sizes, recorded once as a graph of the device and then replayed.

A pass of a small network is hundreds of kernels that take microseconds each, and starting them from Python takes longer than
running them. A replay starts all of them at once. It reads the inputs from the memory in which they were when the pass was
recorded, adds gradients to the same buffers, and runs no Python: a pass must not depend on values that the host reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line

Inputs = TypeVar("Inputs")
Outputs = dict[str, torch.Tensor]
#: Runs a function several times to warm up, then records it; returns a function that replays it, and its outputs.
Record = Callable[[Callable[[], Outputs]], tuple[Callable[[], None], Outputs]]
#: Runs of a pass before it is recorded, in which libraries choose their kernels.
_WARM_UPS = 3


def record_cuda_graph(compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    """Records a function as a CUDA graph (`Record`)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    return graph.replay, outputs


def captures_graphs(device: torch.device) -> bool:
    """Returns whether passes on a device can be recorded."""
    return device.type == "cuda"


class CapturedPasses:
    """Passes that are recorded at their first call, one for each function and layout of the inputs.

    Args:
        preserved: Returns the tensors that a pass changes, such as gradients and buffers; recording leaves them unchanged.
        record: Records a pass.
        key: Name of the configuration key in messages.
    """

    def __init__(
        self,
        preserved: Callable[[], Iterable[torch.Tensor]],
        record: Record = record_cuda_graph,
        key: str = "actor.capture_graphs",
    ) -> None:
        self._preserved, self._record, self._key = preserved, record, key
        self._passes: dict[Hashable, tuple[list[torch.Tensor], Callable[[], None], Outputs]] = {}

    def run(self, name: Hashable, inputs: Inputs, compute: Callable[[Inputs], Outputs]) -> Outputs:
        """Runs `compute(inputs)` by a replay.

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
        if key not in self._passes:
            static_inputs = _mapped(inputs, lambda tensor: tensor.detach().clone())
            with self._preserving():
                replay, outputs = self._recorded(lambda: compute(static_inputs))
            self._passes[key] = _layout(static_inputs)[0], replay, outputs
        static_tensors, replay, outputs = self._passes[key]
        for static_tensor, tensor in zip(static_tensors, tensors, strict=True):
            static_tensor.copy_(tensor)
        replay()
        return {output_name: output.clone() for output_name, output in outputs.items()}

    def clear(self) -> None:
        """Forgets all passes, because memory that they use is about to move."""
        self._passes.clear()

    def _recorded(self, compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        try:
            return self._record(compute)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"{self._key}: a pass of this policy cannot be captured ({first_line(error)}): set it to false"
            ) from error

    @contextlib.contextmanager
    def _preserving(self) -> Iterator[None]:
        tensors = list(self._preserved())
        copies = [tensor.clone() for tensor in tensors]
        devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
        with torch.random.fork_rng(devices):
            yield
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)


def _layout(inputs: Any) -> tuple[list[torch.Tensor], Hashable]:
    """Returns the tensors of nested inputs, and all else about them: structure, shapes, dtypes and constants."""
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


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns nested inputs with `change` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _mapped(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        return {key: _mapped(member, change) for key, member in value.items()}
    if isinstance(value, tuple):
        members = [_mapped(member, change) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    return [_mapped(member, change) for member in value] if isinstance(value, list) else value
