"""Shard layout of vLLM engine ranks, determined by vLLM's weight loaders; and checks of its weight updates.

vLLM's weight loaders load meta tensors, named as in the model's files, into a copy of the model on the meta device. When a
loader copies from a tensor, offset, sizes and strides of the source show the slice that the rank needs. Therefore no table of
architectures is necessary: the slices reflect vLLM's sharding over tensor-parallel ranks, fused weights, and weights that
belong to other ranks.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.checkpoint.tensor_slice import TensorSlice, full_slice, slice_of_view
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.vllm_adapter import (
    name_loaders,
    observed_reload,
    packing_layers,
    reload_packed,
    unregistered_layers,
)
from rlhpc.language.hugging_face import EXPERT_COUNTS
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names

#: Slices that loaders copy from each tensor, by name, with repetitions.
TensorSlices = dict[str, list[TensorSlice]]


class _CopyRecorder(TorchDispatchMode):
    """Dispatch mode that records copies from its source tensors and copies no data."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._sources: list[torch.Tensor] = []
        self.tensor_slices: TensorSlices = {}

    def source(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, device="meta")
        self._sources.append(tensor)  # the address of its storage identifies it
        self._names[tensor.untyped_storage()._cdata] = name, shape
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type == "meta":
            target, source_tensor = args[:2]
            name_and_shape = self._names.get(source_tensor.untyped_storage()._cdata)
            if name_and_shape is not None:
                name, shape = name_and_shape
                tensor_slice = slice_of_view(
                    source_tensor.storage_offset(), source_tensor.shape, source_tensor.stride(), shape
                )
                self.tensor_slices.setdefault(name, []).append(
                    full_slice(shape) if tensor_slice is None else tensor_slice
                )
            if target.device.type != "meta":
                return target
        return func(*args, **(kwargs or {}))


class _MetaWeights(TorchFunctionMode):
    """Function mode that creates weights on the meta device.

    vLLM creates weights by `torch.empty`. Other tensors, such as expert maps and tables of positions, stay on their device,
    because they are small and vLLM reads some of them while it builds the model.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def wanted_slices(worker: Any, shapes: Mapping[str, tuple[int, ...]]) -> TensorSlices:
    """Returns the slices that a worker's rank needs.

    Args:
        worker: Worker of vLLM.
        shapes: Shapes of all tensors, by the names of the model's files.

    Returns:
        Slices by tensor; tensors that this rank does not need are missing.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    cfg, copies = worker.vllm_config, _CopyRecorder()
    with (
        unregistered_layers(cfg.compilation_config),
        set_current_vllm_config(cfg),
        set_default_torch_dtype(worker.model_config.dtype),
        _MetaWeights(),
    ):
        model = initialize_model(vllm_config=cfg)
        with copies:
            model.load_weights((name, copies.source(name, shape)) for name, shape in shapes.items())
    return copies.tensor_slices


def is_mixture(config: Any) -> bool:
    """Returns whether a Hugging Face configuration describes a mixture of experts."""
    text_config = config.get_text_config()
    return any(getattr(text_config, name, None) for name in EXPERT_COUNTS)


class FileNames:
    """Converter of a mixture's tensors from the form of the module to the form of the model's files.

    Args:
        model: The module of transformers, on the meta device.

    Raises:
        ConfigError: The experts of this architecture cannot be split tensor by tensor.
    """

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._model = model
        self._revert = revert_weight_conversion
        class_name = type(model).__name__
        tensors = model.state_dict()
        shapes_one_by_one = {name: tuple(tensor.shape) for name, tensor in self(tensors.items())}
        shapes_at_once = {
            name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, tensors).items()
        }
        if shapes_one_by_one != shapes_at_once:
            raise ConfigError(
                f"rollout.rollout_backend is 'vllm', and the installed transformers splits the experts of {class_name} in a "
                "way that takes the whole model at once; take rollout.rollout_backend=hf"
            )

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights in the form of the files; a tensor of all experts becomes two or three tensors per expert."""
        for name, tensor in weights:
            yield from self._revert(self._model, {name: tensor}).items()


def packing_kernels(worker: Any) -> list[str]:
    """Returns the names of the kernels that keep a packed form of the experts."""
    return sorted({name for _, name in packing_layers(worker)})


def tensors_of(
    model: nn.Module,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, list[str]]]:
    """Returns the shapes of required tensors, the shapes of optional tensors, and the other names of each tied weight."""
    names_by_id = {id(tensor): name for name, tensor in model.named_parameters()}
    required_shapes: dict[str, tuple[int, ...]] = {}
    optional_shapes: dict[str, tuple[int, ...]] = {}
    aliases_by_name: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_name = names_by_id.get(id(tensor))
        (required_shapes if first_name == name else optional_shapes)[name] = tuple(tensor.shape)
        if first_name is not None and first_name != name:
            aliases_by_name.setdefault(first_name, []).append(name)
    return required_shapes, optional_shapes, aliases_by_name


def with_tied_names(
    weights: Iterable[tuple[str, Tensor]], aliases_by_name: dict[str, list[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields weights, tied ones under each name, because vLLM keeps a copy for each name if its kernels repack weights."""
    tied_names = {alias for alias_names in aliases_by_name.values() for alias in alias_names}
    for name, tensor in weights:
        if name not in tied_names:
            yield name, tensor
            for alias in aliases_by_name.get(name, ()):
                yield alias, tensor


@dataclass(frozen=True)
class Loaded:
    """Counts of the elements that a weight update copied.

    Attributes:
        copied_elements: Number of elements that the loader copied from each tensor.
        idle_names: Names in vLLM's model of the layers with separate weights that received no elements.
    """

    copied_elements: Mapping[str, int]
    idle_names: tuple[str, ...]


def reload_counted(
    worker: Any, weights: Iterable[tuple[str, Tensor]], is_packed: bool, untrained_parts: Collection[str] = ()
) -> Loaded:
    """Runs vLLM's reload of weights on its worker, and counts the copied elements.

    Args:
        worker: The worker.
        weights: Tensors by the names that the loader knows.
        is_packed: Whether to rebuild kernels that keep packed experts (`reload_packed`).
        untrained_parts: Last parts of the names of the trainer's buffers, which an update omits.
    """
    num_copied = collections.Counter[str]()
    idle_layers: list[Any] = []
    tensor_name = ""

    def iter_tracked_weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal tensor_name
        for name, tensor in weights:
            tensor_name = name
            yield name, tensor

    def on_copy(num_elements: int) -> None:
        num_copied[tensor_name] += num_elements

    name_loaders(worker)
    with observed_reload(on_copy, idle_layers.append):
        if is_packed:
            reload_packed(worker, iter_tracked_weights())
        else:
            worker.reload_weights(weights_iterator=iter_tracked_weights())
    idle_layers = [
        layer
        for layer in idle_layers
        if not {name for name, _ in layer.named_parameters(recurse=False)} <= {*untrained_parts}
    ]
    return Loaded(dict(num_copied), tuple(_iter_idle_layer_names(worker.model_runner.get_model(), idle_layers)))


def _iter_idle_layer_names(model: Any, idle_layers: list[Any]) -> Iterator[str]:
    """Yields the names of idle layers that share no weights with an active layer.

    On a CPU, all idle layers are included, because kernels pack their weights there.
    """
    idle_ids = {id(layer) for layer in idle_layers}
    active_pointers = {
        p.data_ptr() for layer in model.modules() if id(layer) not in idle_ids for p in layer.parameters(recurse=False)
    }
    for name, layer in model.named_modules():
        if id(layer) in idle_ids and any(
            p.device.type == "cpu" or p.data_ptr() not in active_pointers for p in layer.parameters(recurse=False)
        ):
            yield name


def require_all_loaded(loaded_counts: Loaded, expected_counts: Mapping[str, int], version: int) -> None:
    """Checks that vLLM loaded each tensor of an update exactly once and left no layer unchanged.

    Args:
        loaded_counts: Result of `reload_counted`.
        expected_counts: Number of elements of each tensor that the rank needs.
        version: Version of the weights.

    Raises:
        WeightUpdateError: A tensor was not loaded exactly once, or a layer got no weights; the message names it.
    """
    incomplete_names = [
        f"{name} ({loaded_counts.copied_elements.get(name, 0)} of {expected_count} elements)"
        for name, expected_count in expected_counts.items()
        if loaded_counts.copied_elements.get(name, 0) != expected_count
    ]
    _refuse(f"did not load all of version {version} once", incomplete_names)
    _refuse(f"kept the old weights of layers that version {version} does not reach", loaded_counts.idle_names)


def _refuse(problem: str, tensor_names: Sequence[str]) -> None:
    if tensor_names:
        raise WeightUpdateError(f"vLLM {problem}: {format_names(tensor_names)}; nobody acts with these weights")
