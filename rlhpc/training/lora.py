"""LoRA adapters (peft) on any module: attaching, disabling, and merging on the fly."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import sys
import warnings
import weakref
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlhpc.checkpoint.state import load_tensors
from rlhpc.config.sections import AdapterConfig, LoraConfig, PolicyAdapterConfig
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.plugins import require_package
from rlhpc.training.blueprint import Full
from rlhpc.training.parameter_names import PEFT_PREFIX, plain
from rlhpc.training.targets import is_all_linear, is_target

#: Start index of a slice of a weight in each dimension.
SliceStart = tuple[int, ...]

#: Number of evenly spaced elements in a sample. The sample also contains the same number of elements closest to zero, out of
#: `_NUM_CANDIDATES` evenly spaced elements, because in half precision a small update changes only elements near zero.
_SAMPLE_SIZE, _NUM_CANDIDATES = 4096, 1 << 18
#: Tolerance of the product, relative to the sum of its terms' magnitudes. Some kernels round factors to ten bits.
_TOLERANCE = 2.0**-9


class _Sample(NamedTuple):
    """Sample of a weight: positions in the flattened weight, and the original values at these positions."""

    positions: torch.Tensor
    values: torch.Tensor


#: Samples by layer and by slice of the layer's weight; an entry lives as long as the layer.
_BASES: weakref.WeakKeyDictionary[nn.Module, dict[SliceStart, _Sample]] = weakref.WeakKeyDictionary()


def merge_factors(
    layer: Any,
    name: str,
    base: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    slice_start: SliceStart = (),
) -> torch.Tensor:
    """Returns a layer's weight with its adapter merged, W + scale · B A, in the weight's dtype; the layer is not changed.

    Args:
        layer: peft's layer.
        name: Name of the weight, for messages.
        base: The base weight or a slice of it, `[out, in]`, or transposed if the layer has `fan_in_fan_out`.
        a: LoRA factor A, `[rank, in]`, of the slice.
        b: LoRA factor B, `[out, rank]`, of the slice.
        scale: Factor of the product.
        slice_start: Start of the slice; empty for a full weight.

    Raises:
        RlhpcError: The base weight has changed since the first call, or the result is not the sum of weight and product.
    """
    if not base.numel():
        return base
    sample = _sample_of(layer, slice_start, base)
    if layer.merged or not torch.equal(_bytes(base, sample.positions), _bytes(sample.values)):
        raise RlhpcError(
            f"{name} has changed, though only its adapters are trained: they would be merged twice. If code of yours calls "
            "merge_adapter(), or writes to the model's weights, let it do so to a copy"
        )
    is_transposed = getattr(layer, "fan_in_fan_out", False)  # convolutions do not have it
    merged_weight = _sum(base, a, b, scale, is_transposed)
    if not _is_sum(sample, merged_weight, a, b, scale, is_transposed):
        raise RlhpcError(
            f"{name} as it is to be sent is not the model's weight and its adapters' product, once each: nothing is sent"
        )
    return merged_weight


def _sum(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, is_transposed: bool) -> torch.Tensor:
    delta = (b.float() @ a.float()).mul_(scale)
    return (base.float() + (delta.T if is_transposed else delta)).to(base.dtype)


def _sample_of(layer: nn.Module, slice_start: SliceStart, base: torch.Tensor) -> _Sample:
    """Returns the sample of a slice of a layer's weight. The first call takes the sample."""
    samples = _BASES.setdefault(layer, {})
    if slice_start not in samples:
        flat_weight, spaced_indices, candidates = (
            base.flatten(),
            _spaced_positions(base, _SAMPLE_SIZE),
            _spaced_positions(base, _NUM_CANDIDATES),
        )
        smallest_candidates = (
            flat_weight[candidates].abs().float().topk(min(_SAMPLE_SIZE, len(candidates)), largest=False).indices.cpu()
        )
        sample_indices = torch.cat([spaced_indices, candidates[smallest_candidates]]).cpu()
        samples[slice_start] = _Sample(sample_indices, flat_weight[sample_indices].cpu())
    return samples[slice_start]


def _spaced_positions(base: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the positions of at most `count` evenly spaced elements."""
    return torch.arange(0, base.numel(), max(1, -(-base.numel() // count)))


def _bytes(tensor: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the elements (at `positions`) as bytes on the host. A comparison of bytes treats NaN as equal to itself."""
    return (tensor if positions is None else tensor.flatten()[positions]).cpu().contiguous().view(torch.uint8)


def _is_sum(
    sample: _Sample, result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, is_transposed: bool
) -> bool:
    """Returns whether each sampled element of `result` is the original element plus the product, rounded once.

    The product is computed element by element, because a matrix kernel as in `_sum` may round its factors to ten bits.
    """
    row_indices, column_indices = sample.positions // result.shape[1], sample.positions % result.shape[1]
    output_indices, input_indices = (column_indices, row_indices) if is_transposed else (row_indices, column_indices)
    terms = b[output_indices].float() * a.T[input_indices].float() * scale
    delta, magnitude = terms.sum(1).cpu().double(), terms.abs().sum(1).cpu().double()
    expected_values, float32 = sample.values.double() + delta, torch.finfo(torch.float32)
    tolerance = expected_values.abs() * float32.eps + magnitude * _TOLERANCE + float32.tiny
    lower_bound, upper_bound = (
        (expected_values - tolerance).to(result.dtype),
        (expected_values + tolerance).to(result.dtype),
    )
    actual = result.flatten()[sample.positions].cpu()
    # Non-finite values are reported elsewhere, in more detail.
    return bool(((lower_bound <= actual) & (actual <= upper_bound) | ~expected_values.isfinite()).all())


#: Number of rows with which a layer is tried; a prime, so that no layer can divide the rows into groups.
_NUM_ROWS = 11
#: Name of a single adapter. peft's tensor names contain this name; peft's files omit it.
ADAPTER = "default"
_ADAPTER_INFIX = re.compile(rf"(?<=\.lora_[AB])\.{ADAPTER}(?=\.weight$)")
#: Files of an adapter in peft's folders.
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def peft() -> Any:
    """Returns the peft package.

    Raises:
        ConfigError: peft is not installed.
    """
    return require_package("peft", "actor.lora needs peft")


def attach_lora(
    model: nn.Module,
    lora: LoraConfig,
    *,
    seed: int,
    head: str | None = None,
    has_lm_head: bool = False,
    names: Sequence[str] = (),
) -> nn.Module:
    """Freezes a model, adds float32 adapters and returns peft's model. The adapters' initial values depend only on the seed.

    Args:
        model: Model from `load_causal_lm`. If the model is on the meta device, the adapters are, too.
        lora: `actor.lora`: rank, alpha, dropout, target_modules.
        seed: Seed of the adapters' initial values.
        head: Name of a layer that is fully trained, without adapters, such as a classification head.
        has_lm_head: Whether the model also has its causal LM head; peft's files then do not list `head`.
        names: Names of several adapters per layer. One adapter is active at a time (`choose`), initially the first.

    Raises:
        ConfigError: `target_modules` matches no layer of this model, a layer that is not linear, or a layer whose weight is
            shared with another module.
    """
    # Without a task type peft passes arguments on unchanged and returns the model's outputs.
    exclusions = {"exclude_modules": [head]} if head else {}
    task = {} if head and not has_lm_head else {"task_type": "CAUSAL_LM"}
    allowed_layers = linear_layers(model, head)
    config = _config(model, lora, lora.dropout, allowed_layers, **exclusions, **task)
    is_on_meta = next(model.parameters()).is_meta
    try:
        with (
            torch.random.fork_rng(),
            torch.device("meta") if is_on_meta else contextlib.nullcontext(),
            warnings.catch_warnings(),
        ):
            # peft detects that GPT-2's weights are transposed, and warns about it.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            torch.manual_seed(seed)
            first_adapter, *other_adapters = names or (ADAPTER,)
            adapted_model: Any = peft().get_peft_model(model, config, adapter_name=first_adapter)
            for name in other_adapters:
                adapted_model.add_adapter(name, copy.copy(config))
    except ValueError as error:
        raise _no_targets(lora, allowed_layers, error) from error
    if other_adapters:
        for name, parameter in adapted_model.named_parameters():
            parameter.requires_grad = ".lora_" in name
        choose(adapted_model, first_adapter)
    if head:
        for parameter in model.get_submodule(head).parameters():
            parameter.requires_grad = True
        config.exclude_modules = None
    if head and not has_lm_head:  # stored in peft's files, so that peft loads the head from them
        config.task_type, config.modules_to_save = "SEQ_CLS", [head]
    _finish_adapters(adapted_model, lora, allowed_layers)
    module: nn.Module = adapted_model
    return module


def inject_lora(model: nn.Module, lora: PolicyAdapterConfig) -> None:
    """Freezes a module of a policy and adds float32 adapters in place, new ones or those of `lora.path`. The module's weights
    keep their names. Adapters also go on convolutions that `target_modules` names, such as a patch embedding.

    The adapters have no dropout, because it would make the log-probs of rollout and update differ.

    Args:
        model: Any module.
        lora: rank, alpha, target_modules, init, path.

    Raises:
        ConfigError: See `attach_lora` and `read_adapter`; or the folder's adapters are those of another model.
    """
    if lora.path is not None:
        lora = read_adapter(lora)
    allowed_modules = linear_layers(model)
    config = _config(
        model, lora, 0.0, allowed_modules, init_lora_weights="gaussian" if lora.init == "gaussian" else True
    )
    model.requires_grad_(False)
    try:
        peft().inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise _no_targets(lora, allowed_modules, error) from error
    _finish_adapters(model, lora, allowed_modules, is_conv_allowed=True)
    if lora.path is not None:
        _load_adapter(model, expand_home(lora.path))


#: Keys of peft's adapter_config.json, with the values that stand for an adapter of one rank, without other weights.
_PLAIN_ADAPTER: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False, None), "use_rslora": (False, None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": ([], None),
    "layers_to_transform": ([], None), "lora_bias": (False, None),
}  # fmt: skip


def read_adapter(lora: PolicyAdapterConfig) -> PolicyAdapterConfig:
    """Returns `actor.lora` with alpha and layers of the trained adapters in `path`.

    Raises:
        ConfigError: The folder is not a peft folder, its adapters have a rank other than `rank`, or they are of a kind that is
            not supported.
    """
    folder = expand_home(str(lora.path))
    for name in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"actor.lora.path is {str(folder)!r}, which has no {name}: name a folder of peft's")
    try:
        content = json.loads((folder / _ADAPTER_CONFIG).read_text())
        rank, alpha, targets = int(content["r"]), content["lora_alpha"], content["target_modules"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / _ADAPTER_CONFIG} is not the configuration of a LoRA adapter: {error}") from error
    for key, plain_values in _PLAIN_ADAPTER.items():
        if (value := content.get(key, plain_values[0])) not in plain_values:
            raise ConfigError(f"{folder / _ADAPTER_CONFIG}: {key} is {value!r}; adapters with it are not supported")
    if rank != lora.rank:
        raise ConfigError(f"actor.lora.rank is {lora.rank}, and the adapters in {folder} have rank {rank}: set it so")
    return PolicyAdapterConfig(rank, alpha, targets, init=lora.init, path=str(folder))


def _load_adapter(model: nn.Module, folder: Path) -> None:
    """Loads the adapters of a peft folder into a model that has adapters on the same layers.

    Raises:
        ConfigError: Names or shapes differ.
    """
    parameters = {name: tensor for name, tensor in model.named_parameters() if belongs_to_adapter(name, ADAPTER)}
    if any(tensor.is_meta for tensor in parameters.values()):
        return  # this rank receives the weights from another rank
    names = {_ADAPTER_INFIX.sub("", name): name for name in parameters}
    weights = {
        name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_tensors(folder / _ADAPTER_WEIGHTS).items()
    }
    for unmatched_names, problem in ((set(names) - set(weights), "lacks"), (set(weights) - set(names), "has also")):
        if unmatched_names:
            raise ConfigError(
                f"actor.lora.path: {folder / _ADAPTER_WEIGHTS} is of another model: it {problem} {min(unmatched_names)}"
                f"{f' and {len(unmatched_names) - 1} more' if len(unmatched_names) > 1 else ''}"
            )
    for name, tensor in weights.items():
        parameter = parameters[names[name]]
        if parameter.shape != tensor.shape:
            raise ConfigError(
                f"actor.lora.path: {folder / _ADAPTER_WEIGHTS} is of another model: {name} has shape {list(tensor.shape)}, "
                f"here {list(parameter.shape)}"
            )
        parameter.data.copy_(tensor)


def _config(model: nn.Module, lora: AdapterConfig, dropout: float, linear: list[str], **options: Any) -> Any:
    """Returns peft's configuration. A pattern in `target_modules` is replaced by the full names of the layers that it
    matches, because for some mixture-of-experts models peft would use only the last part of each name. A pattern without a
    match is passed to peft, which reports it.
    """
    targets = lora.target_modules
    target_names = [str(name) for name in targets] if not isinstance(targets, str) else linear
    if isinstance(targets, str) and not is_all_linear(targets):
        target_names = [name for name, _ in model.named_modules() if is_target(name, targets)]
    return peft().LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=dropout, target_modules=target_names or targets, **options
    )


def linear_layers(model: nn.Module, head: str | None = None) -> list[str]:
    """Returns the names of the layers that get adapters with `all-linear`.

    These are all linear layers except the LM head and `head`. Experts stored as one tensor are not layers. In such
    mixture-of-experts models peft maps the names of the experts' former matrices, such as `gate_proj`, to these tensors, even
    if a dense layer has the same name. Such layers are therefore omitted, too, as are layers that peft refuses because a
    recurrent layer reads their weights itself.
    """
    get_output: Any = getattr(model, "get_output_embeddings", None)  # only models of transformers have this method
    lm_head = None if get_output is None else get_output()
    names = [
        name
        for name, module in model.named_modules()
        if _is_linear(module) and module is not lm_head and not (head and is_target(name, [head]))
    ]
    is_allowed = {last_name: _adapts(model, last_name) for last_name in {name.rpartition(".")[2] for name in names}}
    return [name for name in names if is_allowed[name.rpartition(".")[2]]]


def _is_linear(module: nn.Module) -> bool:
    """Returns whether a layer multiplies rows by its weight. Routers of mixtures and products by groups are subclasses of
    `nn.Linear`, too, and an adapter beside them would compute something else.
    """
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    if type(module).forward is nn.Linear.forward:
        return True
    with torch.no_grad():
        try:
            rows = module(module.weight.new_zeros(_NUM_ROWS, module.in_features))
        except (RuntimeError, TypeError, ValueError):
            return False
    return isinstance(rows, torch.Tensor) and rows.shape == (_NUM_ROWS, module.out_features)


def _adapts(model: nn.Module, name: str) -> bool:
    """Returns whether peft interprets a name in `target_modules` as the name of modules that may have adapters."""
    if not hasattr(getattr(model, "config", None), "model_type"):
        return True
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = peft().LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model=model, conversions=None)
        peft().LoraModel._check_target_module_compatiblity(None, config, model, name)
    except ValueError:  # a matrix that is now part of a fused tensor, or is read by a kernel
        return False
    return name in config.target_modules


def _no_targets(lora: AdapterConfig, allowed_modules: Collection[str], reason: object) -> ConfigError:
    layer_names = ", ".join(sorted({name.rpartition(".")[2] for name in allowed_modules}))
    return ConfigError(f"actor.lora.target_modules is {lora.target_modules!r}: {reason}; allowed: {layer_names}")


def _finish_adapters(
    adapted_model: nn.Module, lora: AdapterConfig, allowed_modules: Collection[str], *, is_conv_allowed: bool = False
) -> None:
    """Checks that the adapters can be merged into the weights, and converts the adapters to float32.

    Args:
        adapted_model: Model with adapters.
        lora: Configuration of the adapters.
        allowed_modules: Names of the layers that can have adapters, for messages.
        is_conv_allowed: Whether convolutions of one group may have adapters.

    Raises:
        ConfigError: A layer is not linear, or its weight is shared with another module.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in adapted_model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain(name).rpartition(".")[0])
    for layer_name, layer in _layers(adapted_model):
        name, base = plain(layer_name), layer.base_layer
        is_conv = isinstance(base, nn.Conv2d) and base.groups == 1
        if not _is_linear(base) and not (is_conv and is_conv_allowed):
            raise _no_targets(lora, allowed_modules, f"{name} is a {type(base).__name__}; adapters go on linear layers")
        if sharing_names := [other_name for other_name in names[id(base.weight)] if other_name != name]:
            raise _no_targets(
                lora,
                allowed_modules,
                f"{name} and {sharing_names[0]} have one weight (tie_word_embeddings: true), which would be merged for both",
            )
    for parameter in adapted_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def is_lora(module: nn.Module) -> bool:
    """Returns whether the module was created by `attach_lora`."""
    return hasattr(module, "peft_config")


def choose(module: nn.Module, name: str) -> None:
    """Activates one of several adapters for forward passes, merging and weight sync. All adapters stay trainable, whereas
    peft's function would freeze the inactive adapters.
    """
    for _, layer in _layers(module):
        layer._active_adapter = name


def belongs_to_adapter(name: str, adapter: str) -> bool:
    """Returns whether the parameter `name` belongs to the adapter `adapter`."""
    return ".lora_" in name and name.rpartition(".lora_")[2].split(".")[1:2] == [adapter]


def selected_adapter(layer: Any) -> str:
    """Returns the name of a layer's active adapter."""
    name: str = layer.active_adapters[0]
    return name


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Disables the adapters while the block runs, so that the module computes the reference policy.

    peft's own context manager also changes `requires_grad`, which FSDP and ZeRO read only once, at their first gather.
    """
    layers = [layer for _, layer in _layers(module)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def linear_base(layer: nn.Module) -> nn.Linear | None:
    """Returns the layer if it is linear, or the linear layer that an adapter wraps; None for any other layer."""
    base: Any = layer.base_layer if _is_adapted(layer) else layer
    layer_class: type = type(base)
    if isinstance(base, FSDPModule):  # the class of a separately gathered layer derives from FSDPModule and nn.Linear
        layer_class = layer_class.__mro__[2]
    return base if layer_class is nn.Linear else None


def products(layer: nn.Module, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the pairs (y, W) of a layer with a `linear_base`. The layer's output is the sum of y Wᵀ over the pairs, plus
    the bias.
    """
    base = linear_base(layer)
    assert base is not None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [(x, base.weight)]
    adapted_layer: Any = layer
    if _is_adapted(layer) and not adapted_layer.disable_adapters:
        name = selected_adapter(layer)
        a, b = adapted_layer.lora_A[name], adapted_layer.lora_B[name]
        low_rank = a(adapted_layer.lora_dropout[name](x.to(a.weight.dtype)))
        pairs.append((low_rank * adapted_layer.scaling[name], b.weight))
    return pairs


@torch.no_grad()
def full_weights(
    module: nn.Module, gather_full: Full, excluded_names: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all weights and persistent buffers under their Hugging Face names, with adapters merged; tied weights are
    yielded once. The module is not changed.

    Args:
        module: A Hugging Face model, or such a model after `attach_lora`.
        gather_full: Gathers the full tensor from a shard; all ranks call it in the same order.
        excluded_names: Names of weights to omit.

    Raises:
        RlhpcError: A base weight has changed, or a merged weight is wrong (`merge_factors`).
    """
    layers = {id(layer.base_layer.weight): layer for _, layer in _layers(module)}
    ids: set[int] = set()
    for state_name, tensor in module.state_dict(keep_vars=True).items():
        name = plain(state_name)
        if id(tensor) in ids or ".lora_" in state_name or name in excluded_names:
            continue
        ids.add(id(tensor))
        full_tensor = gather_full(tensor).detach()
        layer = layers.get(id(tensor))
        if layer is not None:
            factors = factors_of(layer, gather_full)
            merged_weight = merge_factors(layer, name, full_tensor.flatten(1), factors.a, factors.b, factors.scale)
            full_tensor = merged_weight.reshape(full_tensor.shape)
        yield name, full_tensor


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Returns the names, as in `full_weights`, of the parameters that are not trained and have no adapter."""
    adapted_ids = {id(layer.base_layer.weight) for _, layer in _layers(module)}
    return frozenset(
        plain(name)
        for name, tensor in module.named_parameters()
        if not tensor.requires_grad and id(tensor) not in adapted_ids and ".lora_" not in name
    )


@torch.no_grad()
def adapter_weights(module: nn.Module, gather_full: Full) -> dict[str, torch.Tensor]:
    """Returns the weights of the active adapter, and of heads listed in `modules_to_save`, on the CPU, under their names in
    peft's files.
    """
    named_tensors = module.state_dict(keep_vars=True).items()
    adapter = selected_adapter(_layers(module)[0][1])
    config: Any = module.peft_config[adapter]  # type: ignore[index]
    heads = tuple(f"{PEFT_PREFIX}{head_name}." for head_name in config.modules_to_save or ())
    adapter_tensors = [
        (name, tensor) for name, tensor in named_tensors if belongs_to_adapter(name, adapter) or name.startswith(heads)
    ]
    infix = re.compile(rf"(?<=\.lora_[AB])\.{re.escape(adapter)}(?=\.weight$)")
    return {infix.sub("", name): gather_full(tensor).detach().cpu() for name, tensor in adapter_tensors}


def _is_adapted(layer: nn.Module) -> bool:
    package = sys.modules.get("peft")
    return package is not None and isinstance(layer, package.tuners.lora.LoraLayer)


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    return adapted_layers(module) if is_lora(module) else []


def adapted_layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Returns names and layers of a module's layers with adapters."""
    return [(name, layer) for name, layer in module.named_modules() if _is_adapted(layer)]


def initial_adapters(module: nn.Module, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameter names and initial values of the adapters, one tensor at a time. The values equal those that
    `attach_lora` sets in a model that is not on the meta device.

    Args:
        module: Module from `attach_lora`, on any device, including the meta device.
        seed: Seed given to `attach_lora`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rng_state = torch.random.get_rng_state()
        for name, layer in _layers(module):
            torch.random.set_rng_state(rng_state)
            rank, dtype = layer.r[ADAPTER], layer.base_layer.weight.dtype
            lora_a, lora_b = (
                nn.Linear(layer.in_features, rank, bias=False),
                nn.Linear(rank, layer.out_features, bias=False),
            )
            nn.init.kaiming_uniform_(lora_a.weight, a=math.sqrt(5))
            nn.init.zeros_(lora_b.weight)
            rng_state = torch.random.get_rng_state()  # the consumer may use the generator, too
            for factor_name, linear in (("lora_A", lora_a), ("lora_B", lora_b)):
                yield f"{name}.{factor_name}.{ADAPTER}.weight", linear.weight.detach().to(dtype).float()


class Factors(NamedTuple):
    """Active adapter of a layer.

    Attributes:
        layer: peft's layer.
        a: LoRA factor A, `[rank, in]`.
        b: LoRA factor B, `[out, rank]`.
        scale: Factor of the product B A.
    """

    layer: Any
    a: torch.Tensor
    b: torch.Tensor
    scale: float


def factors_of(layer: Any, gather_full: Full) -> Factors:
    """Returns the full factors of a layer's active adapter, as matrices also for a convolution."""
    name = selected_adapter(layer)
    a, b = (gather_full(adapters[name].weight).detach().flatten(1) for adapters in (layer.lora_A, layer.lora_B))
    return Factors(layer, a, b, float(layer.scaling[name]))


def layers_by_weight(module: nn.Module) -> dict[int, Any]:
    """Returns the layers with adapters, keyed by the `id` of their base weight."""
    return {id(layer.base_layer.weight): layer for _, layer in _layers(module)}
