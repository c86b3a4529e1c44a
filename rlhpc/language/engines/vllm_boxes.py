"""Which parts of which tensors a rank of a vLLM engine wants: its own loaders say so.

A copy of the model, without memory, is given tensors without memory by the names of the model's files. Each copy out of one of
these that a loader makes shows by offset, sizes and strides what it wants of it. So there is no table of architectures: what
vLLM divides among tensor ranks, fuses, or leaves to other ranks comes out as it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.checkpoint.tensor_slice import Box, box_of, whole

#: Tensor → the parts that are copied out of it, as often as they are.
Boxes = dict[str, list[Box]]


class _Copies(TorchDispatchMode):
    """Notes what is copied out of tensors that it has made, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._kept: list[torch.Tensor] = []
        self.found: Boxes = {}

    def source(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, device="meta")
        self._kept.append(tensor)  # its storage's address is its name
        self._names[tensor.untyped_storage()._cdata] = name, shape
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type == "meta":
            target, source = args[:2]
            known = self._names.get(source.untyped_storage()._cdata)
            if known is not None:
                name, shape = known
                box = box_of(source.storage_offset(), source.shape, source.stride(), shape)
                self.found.setdefault(name, []).append(whole(shape) if box is None else box)
            if target.device.type != "meta":
                return target
        return func(*args, **(kwargs or {}))


class _WithoutMemory(TorchFunctionMode):
    """Weights are made by `torch.empty`. Maps of experts and tables of positions are computed, are small, and stay as they
    are: vLLM reads from some of them while it builds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def wanted_boxes(worker: Any, shapes: Mapping[str, tuple[int, ...]]) -> Boxes:
    """What a worker's rank wants.

    Args:
        worker: vLLM's.
        shapes: Of all tensors, by the names of the model's files.

    Returns:
        Tensors that this rank wants nothing of are missing.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    cfg, copies = worker.vllm_config, _Copies()
    compilation = cfg.compilation_config
    # Where layers enter themselves by name: the engine's own are there already.
    kept = {name: getattr(compilation, name, None) for name in ("static_forward_context", "static_all_moe_layers")}
    try:
        for name, value in kept.items():
            if value is not None:
                setattr(compilation, name, type(value)())
        with set_current_vllm_config(cfg), set_default_torch_dtype(worker.model_config.dtype), _WithoutMemory():
            model = initialize_model(vllm_config=cfg)
            with copies:
                model.load_weights((name, copies.source(name, shape)) for name, shape in shapes.items())
    finally:
        for name, value in kept.items():
            if value is not None:
                setattr(compilation, name, value)
    return copies.found
