"""What vLLM's loader made of an update: how many elements of each tensor it put somewhere, and which layers got none.

vLLM leaves out what it has no place for, and keeps the old weights of a layer that got nothing, with a line in the log at
most.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhpc.language.engines.engine import UpdateFailed
from rlhpc.language.engines.vllm_experts import reload_packed

#: Names in a message.
_SHOWN = 3


@dataclass(frozen=True)
class Loaded:
    """What became of an update.

    Attributes:
        copied: How many elements of each tensor the loader copied.
        idle: Layers with weights of their own that got none, by their names in vLLM's model.
    """

    copied: Mapping[str, int]
    idle: tuple[str, ...]


def reload_counted(worker: Any, weights: Iterable[tuple[str, Tensor]], packed: bool) -> Loaded:
    """vLLM's reload, on its worker.

    Args:
        worker: The worker.
        weights: By the names that the loader knows.
        packed: Kernels that keep packed experts are made anew (`reload_packed`).
    """
    from vllm.model_executor.model_loader.reload import layerwise

    copied = collections.Counter[str]()
    idle: list[Any] = []
    now = ""
    count, place = layerwise.get_numel_loaded, layerwise._place_kernel_tensors

    def passing() -> Iterator[tuple[str, Tensor]]:
        nonlocal now
        for name, tensor in weights:
            now = name
            yield name, tensor

    def counting(loader: Any, arguments: Any) -> tuple[int, object]:
        found, result = count(loader, arguments)
        copied[now] += found
        return found, result

    def placing(layer: Any, info: Any) -> None:
        # Buffers, such as the tables of rotary embeddings, are nobody's weights. (vLLM places these when all is loaded.)
        if info.load_numel <= 0 and info.kernel_tensors[0]:
            idle.append(layer)
        place(layer, info)

    setattr(layerwise, "get_numel_loaded", counting)  # noqa: B010 (mypy knows its signature)
    setattr(layerwise, "_place_kernel_tensors", placing)  # noqa: B010 (as above)
    try:
        if packed:
            reload_packed(worker, passing())
        else:
            worker.reload_weights(weights_iterator=passing())
    finally:
        setattr(layerwise, "get_numel_loaded", count)  # noqa: B010 (as above)
        setattr(layerwise, "_place_kernel_tensors", place)  # noqa: B010 (as above)
    return Loaded(dict(copied), tuple(_names(worker.model_runner.get_model(), idle)))


def _names(model: Any, idle: list[Any]) -> Iterator[str]:
    """Of the layers, those that use no other layer's weights as they are. On a CPU none does: kernels there pack their own."""
    others = {id(layer) for layer in idle}
    fresh = {
        p.data_ptr() for layer in model.modules() if id(layer) not in others for p in layer.parameters(recurse=False)
    }
    for name, layer in model.named_modules():
        if id(layer) in others and any(
            p.device.type == "cpu" or p.data_ptr() not in fresh for p in layer.parameters(recurse=False)
        ):
            yield name


def require_all_loaded(loaded: Loaded, expected: Mapping[str, int], version: int) -> None:
    """Refuses an update of which vLLM left something out, or loaded something twice, or that left a layer as it was.

    Args:
        loaded: From `reload_counted`.
        expected: Elements of each tensor that it has a place for.
        version: Version of the weights.

    Raises:
        UpdateFailed: Names the tensors, or the layers.
    """
    short = [
        f"{name} ({loaded.copied.get(name, 0)} of {size} elements)"
        for name, size in expected.items()
        if loaded.copied.get(name, 0) != size
    ]
    _refuse(f"did not load all of version {version} once", short)
    _refuse(f"kept the old weights of layers that version {version} does not reach", loaded.idle)


def _refuse(what: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UpdateFailed(f"vLLM {what}: {', '.join(names[:_SHOWN])}{more}; nobody acts with these weights")
