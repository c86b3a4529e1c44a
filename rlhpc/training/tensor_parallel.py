"""Tensor and expert parallelism of a transformers model, by the model's own plans.

A plan names a style for each kind of layer: the dimension in which its weights are cut, and the communication on its inputs
and outputs. Plans and styles are transformers' own (`transformers.distributed.tensor_parallel`, which is not public: tests
check the functions used here for the pinned version). This module applies them, because adapters, tied weights and experts
need special treatment.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.torch_adapter import replace_forward
from rlhpc.training.lora import ADAPTER, adapted_layers
from rlhpc.training.parameter_names import model_in, plain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rlhpc.training.mesh import Mesh

_SUMMED_GRADIENT_STYLE = "replicated_with_grad_allreduce"
_DISPATCH_STYLE = "ep_dispatch_experts"
#: LoRA factor that is cut with its layer, by the layer's style.
_CUT_FACTOR = {"colwise": "lora_B", "colwise_gather_output": "lora_B", "rowwise": "lora_A"}


def divide(model: Any, mesh: Mesh, key: str) -> None:
    """Converts the parameters of a model to DTensors over the mesh's `tensor` and `expert` ranks, in place.

    Args:
        model: A `PreTrainedModel`, with or without adapters, on the meta device or with weights.
        mesh: Mesh of the ranks.
        key: Name of the section `parallel` in messages.

    Raises:
        ConfigError: The model has no plan, or the plan is not valid for these sizes.
    """
    num_tensor_ranks, num_expert_ranks = mesh.sizes.tensor, mesh.sizes.expert
    check_heads(model, mesh, key)
    experts = _expert_plan(model, num_expert_ranks, key) if num_expert_ranks > 1 else {}
    styles = _tensor_plan(model, num_tensor_ranks, experts, key) if num_tensor_ranks > 1 else {}
    _Divider(model, key).apply(styles, mesh.tensor, experts, mesh.expert)


def check_heads(model: Any, mesh: Mesh, key: str) -> None:
    """Checks that the attention heads can be distributed over the ranks.

    Raises:
        ConfigError: The number of heads is not a multiple of the number of ranks.
    """
    config, sizes = model.config.get_text_config(), mesh.sizes
    num_heads = int(getattr(config, "num_attention_heads", 0) or 0)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_heads)
    is_sharded = "model.layers.*.self_attn.k_proj" in (model.tp_plan or {})
    num_head_shards = sizes.tensor if is_sharded else 1
    for name, count in (("attention heads", num_heads), ("heads of keys and values", num_kv_heads)):
        if count % num_head_shards:
            raise ConfigError(
                f"{key}.tensor({num_head_shards}) does not divide the {count} {name} of {type(model).__name__}"
            )
    if sizes.context > 1 and (not num_heads or num_heads // num_head_shards % sizes.context):
        raise ConfigError(
            f"{key}.context({sizes.context}) does not divide the {num_heads // num_head_shards} attention heads that a rank "
            f"of {type(model).__name__} has: each rank of a row attends with some of them"
        )


def _tensor_plan(model: Any, size: int, experts: Mapping[str, str], key: str) -> dict[str, str]:
    config = model.config.get_text_config()
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(f"{key}.tensor({size}): transformers has no plan to divide {type(model).__name__}")
    plan = dict(model.tp_plan)
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(submodule): name for name, submodule in model.named_modules()}
    if embedding is not None and lm_head is not None:
        plan.setdefault(_wildcard_name(names[id(embedding)]), "embedding_rowwise")
        vocabulary = lm_head.out_features
        if vocabulary % size:
            raise ConfigError(f"{key}.tensor({size}) does not divide the vocabulary of {vocabulary} tokens")
    if experts:  # the experts' plan applies to the modules it names, and their submodules
        is_expert = re.compile(rf"(?:{'|'.join(map(re.escape, experts))})(?:\..+)?").fullmatch
        plan = {name: style for name, style in plan.items() if not is_expert(name)}
    parameter_names = {_wildcard_name(name) for name, _ in model.named_parameters()}
    packed_names = sorted(
        name for name, style in plan.items() if style.startswith("packed_") and name in parameter_names
    )
    if packed_names:
        raise ConfigError(
            f"{key}.tensor({size}) would cut {packed_names[0]} of {type(model).__name__} into interleaved columns, which "
            f"checkpoints do not survive; share its experts out with {key}.expert"
        )
    return plan


def _expert_plan(model: Any, size: int, key: str) -> dict[str, str]:
    plan = dict(model.ep_plan or {})
    if _DISPATCH_STYLE not in plan.values():
        raise ConfigError(
            f"{key}.expert({size}): transformers has no plan to share out experts of {type(model).__name__}"
        )
    config = model.config.get_text_config()
    num_experts = int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0) or 0)
    if not num_experts or num_experts % size:
        raise ConfigError(f"{key}.expert({size}) does not divide the {num_experts} experts of {type(model).__name__}")
    return plan


def expert_modules(model: Any) -> list[nn.Module]:
    """Returns the modules whose parameters are sharded by experts."""
    names = [name for name, style in (model.ep_plan or {}).items() if style == _DISPATCH_STYLE]
    return [module for name, module in model.named_modules() if _wildcard_name(plain(name)) in names]


def _wildcard_name(name: str) -> str:
    """Returns a name with wildcards instead of layer numbers, as plans use it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class _Divider:
    """Application of styles to the modules of a model."""

    def __init__(self, model: Any, key: str) -> None:
        self._model, self._key = model, key
        self._sharded_parameters: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def apply(
        self, plan: dict[str, str], tensor: DeviceMesh | None, experts: dict[str, str], expert: DeviceMesh | None
    ) -> None:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        styles: dict[str, Any] = {name: ALL_PARALLEL_STYLES[name] for name in {*plan.values(), *experts.values()}}
        if _SUMMED_GRADIENT_STYLE in styles:
            styles[_SUMMED_GRADIENT_STYLE] = summed_gradient()
        for name, module in list(self._model.named_modules()):
            if hasattr(module, "base_layer"):  # the wrapped layer is visited separately
                continue
            wildcard_name = _wildcard_name(plain(f"{name}.").removesuffix("."))
            for rules, mesh in ((plan, tensor), (experts, expert)):
                if mesh is None:
                    continue
                for parameter in list(module._parameters):
                    full_name = f"{wildcard_name}.{parameter}" if wildcard_name else parameter
                    style = rules.get(full_name) or rules.get(wildcard_name)
                    if style is not None and module._parameters[parameter] is not None:
                        self._shard(styles[style], module, parameter, mesh, full_name)
                if (style := rules.get(wildcard_name)) is None:
                    continue
                if style == "mla_kv_a_proj":
                    module.config = self._model.config.get_text_config()
                if style == _DISPATCH_STYLE:
                    styles[style].install_forward(module, ep_mesh=mesh, tp_mesh=tensor)
                else:
                    styles[style].install_forward(module, mesh)
        if tensor is not None:
            self._shard_adapters(plan, styles, tensor)

    def _shard_adapters(self, plan: dict[str, str], styles: dict[str, Any], mesh: DeviceMesh) -> None:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

        for name, layer in adapted_layers(self._model):
            style = plan.get(_wildcard_name(plain(name)))
            if style is None:
                continue
            if style not in _CUT_FACTOR:
                raise ConfigError(
                    f"{self._key}.tensor: {name} is cut by {style}, and cannot have an adapter; leave it out of "
                    "actor.lora.target_modules"
                )
            factor = getattr(layer, _CUT_FACTOR[style])[ADAPTER]
            factor_style = ALL_PARALLEL_STYLES["colwise" if style.startswith("colwise") else style]
            self._shard(factor_style, factor, "weight", mesh, f"{name}.{_CUT_FACTOR[style]}")
            if style != "colwise_gather_output":  # the head, whose factors are used directly
                factor_style.install_forward(factor, mesh)

    def _shard(self, style: Any, module: nn.Module, name: str, mesh: DeviceMesh, full_name: str) -> None:
        original = module._parameters[name]
        assert original is not None
        if id(original) in self._sharded_parameters:  # tied
            module._parameters[name] = self._sharded_parameters[id(original)][1]
            return
        style.validate_param(module, name, mesh, parameter_name=full_name)
        style.shard_param(module, name, mesh)
        sharded_parameter: Any = module._parameters[name]
        if sharded_parameter is original:
            return
        for placement in sharded_parameter.placements:
            dim = getattr(placement, "dim", None)
            if dim is not None and original.shape[dim] % mesh.size():
                raise ConfigError(
                    f"{self._key}: {mesh.size()} ranks cannot share dimension {dim} of {full_name} {list(original.shape)} "
                    "evenly"
                )
        self._sharded_parameters[id(original)] = (
            original,
            sharded_parameter,
        )  # the original, so that its id is not reused


def summed_gradient() -> Any:
    """Returns a style for replicated weights of which each rank computes a part of the gradient. The style sums the gradient
    during the backward pass.

    The style in transformers sums `.grad` after a backward pass. With gradient accumulation without FSDP, it would sum the
    gradients of earlier micro-batches again.
    """
    from transformers.distributed.tensor_parallel import TensorParallelLayer, _AllReduceBackward

    class SummedGradient(TensorParallelLayer):
        def install_forward(self, module: Any, mesh: Any) -> Any:
            original_forward = module.forward

            def forward(*args: Any, **kwargs: Any) -> Any:
                parameters = dict(module._parameters)
                summed_inputs = {
                    n: _AllReduceBackward.apply(p, mesh.get_group()) for n, p in parameters.items() if p is not None
                }
                module._parameters.update(summed_inputs)
                try:
                    return original_forward(*args, **kwargs)
                finally:
                    module._parameters.update(parameters)

            replace_forward(module, forward)
            return module

    return SummedGradient()


def computed_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and tensors of the buffers that no checkpoint contains, such as position tables. Building a model computes
    them.
    """
    for name, submodule in module.named_modules():
        for buffer in submodule._non_persistent_buffers_set:
            if submodule._buffers.get(buffer) is not None:
                yield f"{name}.{buffer}" if name else buffer, submodule._buffers[buffer]


@torch.no_grad()
def make_buffers(module: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Computes the buffers that no checkpoint contains (`computed_buffers`), for a model on the meta device.

    transformers does the same after it has read the weights. Its functions also initialize weights, which here have no memory,
    and some fill buffers of a module's children.

    Returns:
        The buffers by name, on the CPU; and the names of those that transformers does not compute.
    """
    model = model_in(module)
    empty_buffers = list(computed_buffers(module))
    buffers_by_fill: list[dict[str, torch.Tensor]] = []
    for fill in (0, 1):  # buffers without a value differ between the two passes
        buffers = {name: torch.full_like(buffer, fill, device="cpu") for name, buffer in empty_buffers}
        for name, buffer in buffers.items():
            _set_buffer(module, name, buffer)
        for submodule in model.modules():
            with contextlib.suppress(RuntimeError):  # it reads a weight, so it computes no buffer from numbers alone
                model._init_weights(submodule)
        buffers_by_fill.append(dict(computed_buffers(module)))
    for name, buffer in empty_buffers:
        _set_buffer(module, name, buffer)
    first_buffers, second_buffers = buffers_by_fill
    return first_buffers, [
        name for name, buffer in first_buffers.items() if not torch.equal(buffer, second_buffers[name])
    ]


def _set_buffer(module: nn.Module, name: str, buffer: torch.Tensor) -> None:
    module_name, _, attribute = name.rpartition(".")
    module.get_submodule(module_name)._buffers[attribute] = buffer
