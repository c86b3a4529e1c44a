"""Which parts of which tensors a rank of a vLLM engine wants: its own loaders say so.

A copy of the model, without memory, is given tensors without memory by the names of the model's files. Each copy out of one of
these that a loader makes shows by offset, sizes and strides what it wants of it. So there is no table of architectures: what
vLLM divides among tensor ranks, fuses, or leaves to other ranks comes out as it is loaded.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.checkpoint.tensor_slice import Box, box_of, whole
from rlhpc.language.engines.common import UpdateFailed
from rlhpc.language.hugging_face import EXPERT_COUNTS
from rlhpc.runtime.errors import ConfigError

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


#: Mixtures whose log-probs after updates were compared with those of transformers (vLLM 0.32, transformers 5.19). Of the
#: others some break off, and some go on with wrong weights (Ernie 4.5).
PROVEN = ("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


def is_mixture(config: Any) -> bool:
    """Whether a Hugging Face configuration is that of a mixture of experts."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in EXPERT_COUNTS)


def require_proven(config: Any, architecture: str = "") -> None:
    """Refuses mixtures whose updates in vLLM are not known to be right.

    Args:
        config: Of Hugging Face.
        architecture: Name of the module's class, where it is known; otherwise the first that the configuration names.

    Raises:
        ConfigError: Names the architecture and those that may be.
    """
    name = architecture or next(iter(getattr(config, "architectures", None) or ()), "")
    if name and is_mixture(config) and name not in PROVEN:
        raise ConfigError(
            f"rollout.rollout_backend is 'vllm', and actor.model is a mixture of experts, {name}, whose weight updates in "
            f"vLLM are not known to be right; those of {', '.join(PROVEN)} are. Take rollout.rollout_backend=hf"
        )


class FileNames:
    """Turns tensors of a mixture, as the module has them, into those of its files.

    Args:
        model: The module of transformers, on the meta device.

    Raises:
        ConfigError: Updates of this architecture are not known to be right.
    """

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        architecture = type(model).__name__
        require_proven(model.config, architecture)
        tensors = model.state_dict()
        one_by_one = {name: tuple(tensor.shape) for name, tensor in self(tensors.items())}
        whole = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, tensors).items()}
        if one_by_one != whole:
            raise ConfigError(
                f"rollout.rollout_backend is 'vllm', and the installed transformers splits the experts of {architecture} in a "
                "way that takes the whole model at once; take rollout.rollout_backend=hf"
            )

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights; each tensor of experts becomes two or three per expert."""
        for name, tensor in weights:
            yield from self._revert(self._model, {name: tensor}).items()


def _packing(worker: Any) -> Iterator[tuple[Any, str]]:
    """Layers of experts whose kernel has work to do after loading, with the kernel's name."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    for layer in worker.model_runner.get_model().modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None:
            continue
        cls = type(kernel.fused_experts)
        if cls.process_weights_after_loading is not FusedMoEExperts.process_weights_after_loading:
            yield layer, cls.__name__


def packing_kernels(worker: Any) -> list[str]:
    """Names of the kernels that keep their own packed form of the experts."""
    return sorted({name for _, name in _packing(worker)})


def reload_packed(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """vLLM's reload, for kernels that pack: it packs only when it makes a kernel, so they are made anew.

    Not where CUDA graphs may have recorded the kernel's tensors.
    """
    for layer, _ in list(_packing(worker)):
        layer.quant_method.moe_kernel = None
    worker.reload_weights(weights_iterator=weights)


def tensors_of(
    model: nn.Module,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, list[str]]]:
    """Names and shapes of a complete update, those of what else it may contain, and the other names of tied weights."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    needed: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.get(id(tensor))
        (needed if first == name else optional)[name] = tuple(tensor.shape)
        if first is not None and first != name:
            aliases.setdefault(first, []).append(name)
    return needed, optional, aliases


def under_all_names(
    weights: Iterable[tuple[str, Tensor]], aliases: dict[str, list[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Tied weights under each of their names: if vLLM's kernels repack them, it keeps a copy for each."""
    others = {alias for names in aliases.values() for alias in names}
    for name, tensor in weights:
        if name not in others:
            yield name, tensor
            for alias in aliases.get(name, ()):
                yield alias, tensor


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
