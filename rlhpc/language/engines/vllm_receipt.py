"""What vLLM's loader made of an update: how many elements of each tensor it put somewhere.

vLLM leaves out what it has no place for, and keeps the old weights of a layer that got nothing, with a line in the log at
most.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from rlhpc.language.engines.engine import UpdateFailed
from rlhpc.language.engines.vllm_experts import reload_packed


def reload_counted(worker: Any, weights: Iterable[tuple[str, Tensor]], packed: bool) -> dict[str, int]:
    """vLLM's reload, on its worker.

    Args:
        worker: The worker.
        weights: By the names that the loader knows.
        packed: Kernels that keep packed experts are made anew (`reload_packed`).

    Returns:
        How many elements of each tensor the loader copied.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    copied = collections.Counter[str]()
    now, count = "", layerwise.get_numel_loaded

    def passing() -> Iterator[tuple[str, Tensor]]:
        nonlocal now
        for name, tensor in weights:
            now = name
            yield name, tensor

    def counting(loader: Any, arguments: Any) -> tuple[int, object]:
        found, result = count(loader, arguments)
        copied[now] += found
        return found, result

    setattr(layerwise, "get_numel_loaded", counting)  # noqa: B010 (mypy knows its signature)
    try:
        if packed:
            reload_packed(worker, passing())
        else:
            worker.reload_weights(weights_iterator=passing())
    finally:
        setattr(layerwise, "get_numel_loaded", count)  # noqa: B010 (as above)
    return dict(copied)


def require_all_loaded(copied: Mapping[str, int], expected: Mapping[str, int], version: int) -> None:
    """Refuses an update of which vLLM left something out, or loaded something twice.

    Args:
        copied: From `reload_counted`.
        expected: Elements of each tensor that it has a place for.
        version: Version of the weights.

    Raises:
        UpdateFailed: Names the tensors.
    """
    short = [
        f"{name} ({copied.get(name, 0)} of {size} elements)"
        for name, size in expected.items()
        if copied.get(name, 0) != size
    ]
    if short:
        more = f" and {len(short) - 3} more" if len(short) > 3 else ""
        raise UpdateFailed(
            f"vLLM did not load all of version {version} once: {', '.join(short[:3])}{more}; nobody acts with these weights"
        )
