"""Loading and export of language models as Hugging Face folders."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from rlhpc.checkpoint.state import save_tensors
from rlhpc.language.data.images import has_vision
from rlhpc.language.data.tokenizer import turn_end
from rlhpc.language.hugging_face import explain_loading_error, no_progress_bar, transformers
from rlhpc.language.models.vision import place_by_token_type
from rlhpc.runtime.devices import computes_bfloat16
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.scratch import temporary_folder
from rlhpc.runtime.text import first_line
from rlhpc.training.lora import ADAPTER, linear_base

if TYPE_CHECKING:
    from rlhpc.language.config.models import PretrainedConfig


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Value of `dtype` that selects the dtype by the device.
AUTO = "auto"
#: File name of a model's configuration.
CONFIG = "config.json"
_ABSENT = object()
Linear = TypeVar("Linear", bound=nn.Linear)
#: Largest relative deviations attributed to rounding, in float32 and in half precision.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1
#: Files of image processors.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def pretrained_in(module: nn.Module) -> Any:
    """Returns the transformers model inside a module, which may be the module itself; None if it contains none."""
    package = sys.modules.get("transformers")
    if package is None:  # nothing has imported transformers
        return None
    return next((submodule for submodule in module.modules() if isinstance(submodule, package.PreTrainedModel)), None)


def hidden_size(model: nn.Module) -> int:
    """Returns a causal model's hidden size; 0 if its configuration does not set one."""
    causal_model = pretrained_in(model)
    return 0 if causal_model is None else int(getattr(causal_model.config.get_text_config(), "hidden_size", 0))


def embedding_and_head(module: nn.Module) -> list[nn.Module]:
    """Returns embeddings and LM head, in this order, if they are separate matrices; otherwise an empty list."""
    causal_model = pretrained_in(module)
    embedding, head = causal_model.get_input_embeddings(), causal_model.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is getattr(linear_base(head), "weight", None):
        return []
    return [embedding, head]


def linear_of(linear_class: type[Linear], layer: nn.Linear) -> Linear:
    """Creates a layer of class `linear_class` that shares the parameters of a linear layer."""
    new_layer = linear_class(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    new_layer.weight, new_layer.bias = layer.weight, layer.bias
    return new_layer.train(layer.training)


def compute_dtype(model: PretrainedConfig, device: str | torch.device, section: str = "actor.model") -> torch.dtype:
    """Returns the torch dtype for a model's `dtype`.

    Args:
        model: Configuration section of the model.
        device: Device of the computation; `auto` means bfloat16 if the device computes in it, otherwise float32.
        section: Name of the section in messages.

    Raises:
        ConfigError: The name is unknown.
    """
    if model.dtype == AUTO:
        return torch.bfloat16 if computes_bfloat16(torch.device(device).type) else torch.float32
    if model.dtype not in DTYPES:
        raise ConfigError(f"{section}.dtype is {model.dtype!r}; choose from {', '.join((AUTO, *DTYPES))}")
    return DTYPES[model.dtype]


def load_causal_lm(
    model: PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    recompute_activations: bool = False,
    empty: bool = False,
    key: str = "actor.model.model_path",
) -> Any:
    """Loads the causal language model of a section such as `actor.model` on the host.

    Args:
        model: The section; uses model_path, attn_implementation and trust_remote_code.
        dtype: Dtype of the weights.
        recompute_activations: Whether to turn on activation checkpointing.
        empty: Whether to create the model on the meta device without reading weights.
        key: Name of model_path in messages.

    Raises:
        ConfigError: The model does not exist, or the installed transformers cannot build it.
    """
    module = load_with_auto_class("", model, dtype=dtype, is_empty=empty, key=key)
    place_by_token_type(module)
    if empty:
        module.generation_config = _generation_config(transformers(), str(model.model_path), module.config)
    return prepare_for_training(module, recompute_activations)


def load_with_auto_class(
    auto_class_name: str,
    model: PretrainedConfig,
    *,
    dtype: torch.dtype,
    is_empty: bool,
    key: str = "actor.model.model_path",
    options: Mapping[str, Any] | None = None,
    **config_changes: Any,
) -> Any:
    """Loads a model with one of transformers' auto classes.

    Args:
        auto_class_name: Name of the class; "" selects the class for generation (`auto_class`).
        model: Section with the path.
        dtype, is_empty: See `load_causal_lm`.
        key: Name of `model_path` in messages.
        options: Further arguments of `from_pretrained`; some of them make it return more than the model.
        config_changes: Values that replace values of the model's configuration.

    Raises:
        ConfigError: The model does not exist, or the installed transformers cannot build it.
    """
    package = transformers()
    if not model.model_path:
        raise ConfigError(f"{key} is not set; give a Hugging Face folder or hub name")
    path = model.model_path
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{key}={path}: the folder has no config.json, so it is no model's folder")
    load_options = {
        "dtype": dtype,
        "attn_implementation": model.attn_implementation,
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        with no_progress_bar():
            if is_empty or not auto_class_name:
                config = package.AutoConfig.from_pretrained(
                    path, trust_remote_code=model.trust_remote_code, **(config_changes if is_empty else {})
                )
            model_class = getattr(package, auto_class_name or auto_class(config))
            if not is_empty:
                return model_class.from_pretrained(path, **load_options, **(options or {}), **config_changes)
            with torch.device("meta"):
                return model_class.from_config(config, **load_options)
    except (OSError, ValueError, ImportError) as error:
        reason = explain_loading_error(error, key)
        raise ConfigError(f"{key}={path}: the model cannot be loaded: {reason}") from error


def agrees(outputs: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a model's outputs equal the expected ones up to rounding, relative to the largest expected value.

    Args:
        outputs, expected: Tensors of the same shape.
        dtype: Dtype of the computation.
    """
    deviation = float((outputs.float() - expected.float()).abs().max()) / max(float(expected.float().abs().max()), 1e-6)
    return deviation < (_TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE)


def auto_class(config: Any) -> str:
    """Returns the name of transformers' auto class for text generation, which differs for vision-language models."""
    return "AutoModelForImageTextToText" if has_vision(config) else "AutoModelForCausalLM"


def model_file(path: str, name: str) -> Path | None:
    """Returns the path of a model's file in its folder or in the hub's cache; downloads it to the cache if necessary.

    Returns None if the model has no such file.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return file if file.is_file() else None
    with contextlib.suppress(OSError, ValueError):
        cached_path = transformers().utils.cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return None if cached_path is None else Path(cached_path)
    return None


def prepare_for_training(module: Any, recompute_activations: bool) -> Any:
    """Turns off a model's KV cache and, if requested, turns on activation checkpointing; returns the model."""
    module.config.use_cache = False
    if recompute_activations:
        # The reentrant variant needs inputs that require gradients; frozen embeddings (LoRA) give none.
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return module


def use_liger_kernels(model: Any, device: str, key: str) -> None:
    """Replaces norms, rotary embeddings and MLPs of a model by the Triton kernels of liger-kernel, in place.

    Liger also changes the classes and functions of transformers' module for the architecture. The loss stays unchanged,
    because `token_scores` computes it from hidden states.

    Args:
        model: Model of transformers, without adapters.
        device: Device of the computation.
        key: Name of the configuration key in messages.

    Raises:
        ConfigError: The device has no Triton, the package is not installed, or it has no kernels for the architecture.
    """
    if torch.device(device).type == "cpu":
        raise ConfigError(f"{key}=liger needs a GPU, and this rank computes on the CPU: set it to torch")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            f"{key}=liger needs the package liger-kernel ({first_line(error)}): pip install 'rlhpc[liger]', or set torch"
        ) from error
    model_type = model.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"{key}=liger: liger-kernel has no kernels for models of type {model_type}: set it to torch")
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def export_model(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    model: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    load: Callable[..., Any] = load_causal_lm,
) -> None:
    """Writes a Hugging Face folder: safetensors (several files if large), config, generation config and tokenizer.

    Args:
        folder: Target folder, created if missing.
        tensors: All weights with their names in the model; tied weights once.
        model: `actor.model`, for config and tokenizer.
        dtype: Dtype of the written weights.
        load: Function that builds a model of this architecture: `load_causal_lm` or `load_scalar_model`.

    Raises:
        ValueError: A weight of the model is missing.
    """
    skeleton = load(model, dtype=dtype, empty=True)
    state_dict = {name: tensor.to("cpu", dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors}
    for name, tensor in skeleton.state_dict().items():
        if name not in state_dict and name in getattr(skeleton, "all_tied_weights_keys", {}):
            state_dict[name] = state_dict[skeleton.all_tied_weights_keys[name]]
        elif name not in state_dict:
            raise ValueError(f"{name} {tuple(tensor.shape)} is missing")
    skeleton.config.use_cache = True
    folder.mkdir(parents=True, exist_ok=True)
    with no_progress_bar():
        skeleton.save_pretrained(folder, state_dict=state_dict)
    (folder / CONFIG).write_bytes(config_file(skeleton.config, model))
    export_tokenizer(folder, model, has_padding=not skeleton.can_generate())


def config_file(config: Any, model: PretrainedConfig) -> bytes:
    """Returns the contents of the trained model's `config.json`: the original file with the changes made by training.

    Engines may read keys that transformers drops or renames. Therefore the result changes only the values in which the trained
    model's configuration differs from the original configuration as transformers writes it.

    Args:
        config: Configuration of the trained model.
        model: Section with the path of the original model.
    """
    config_values = json.loads(config.to_json_string())
    source = model_file(str(model.model_path), CONFIG)
    if source is not None:
        reloaded_config = transformers().AutoConfig.from_pretrained(
            str(model.model_path), trust_remote_code=model.trust_remote_code
        )
        config_values = _apply_changes(
            json.loads(source.read_text()), json.loads(reloaded_config.to_json_string()), config_values
        )
    return json.dumps(config_values, indent=2, sort_keys=True).encode() + b"\n"


def _apply_changes(original: dict[str, Any], old_config: dict[str, Any], new_config: dict[str, Any]) -> dict[str, Any]:
    """Returns `original` with the changes from `old_config` to `new_config` applied to it."""
    config_values = dict(original)
    for key in old_config.keys() | new_config.keys():
        previous_value, current_value = old_config.get(key, _ABSENT), new_config.get(key, _ABSENT)
        if previous_value == current_value:
            continue
        if current_value is _ABSENT:
            config_values.pop(key, None)
        elif (
            isinstance(previous_value, dict) and isinstance(current_value, dict) and isinstance(original.get(key), dict)
        ):
            config_values[key] = _apply_changes(original[key], previous_value, current_value)
        else:
            config_values[key] = current_value
    if (
        "dtype" in config_values and "torch_dtype" in config_values
    ):  # the key's former name, which some programs read first
        config_values["torch_dtype"] = config_values["dtype"]
    return config_values


def export_tokenizer(folder: Path, model: PretrainedConfig, *, has_padding: bool = False) -> None:
    """Writes the tokenizer and the image processor of `actor.model`, if the model has them.

    Args:
        folder: Target folder.
        model: `actor.model`.
        has_padding: Whether the tokenizer must pad batches; without a padding token, its end token becomes it.
    """
    package = transformers()
    with contextlib.suppress(OSError, ValueError):
        tokenizer = package.AutoTokenizer.from_pretrained(
            str(model.model_path), trust_remote_code=model.trust_remote_code
        )
        if has_padding and tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder)
        _add_end_token(folder / "generation_config.json", turn_end(tokenizer))
    for name in _PROCESSOR_FILES:
        if (processor := model_file(str(model.model_path), name)) is not None:
            shutil.copyfile(processor, folder / name)


def _add_end_token(config: Path, end: int | None) -> None:
    """Adds the end-of-turn token, with which SFT's demonstrations end, to the end tokens of a generation configuration."""
    if end is None or not config.is_file():
        return
    config_values = json.loads(config.read_text())
    end_ids = config_values.get("eos_token_id")
    end_ids = end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids]
    if end not in end_ids:
        config_values["eos_token_id"] = [*end_ids, end] if end_ids else end
        config.write_text(json.dumps(config_values, indent=2) + "\n")


def _generation_config(package: Any, path: str, config: Any) -> Any:
    try:
        return package.GenerationConfig.from_pretrained(path)
    except OSError:  # the model has no generation_config.json
        return package.GenerationConfig.from_model_config(config)


#: Subfolder of a checkpoint for the model's files.
FOLDER = "model"


def model_files(module: nn.Module, model: PretrainedConfig, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """Returns the contents of a model's non-weight files by name: config, generation config, tokenizer and custom code.

    Args:
        module: The Hugging Face model, or peft's wrapper of it.
        model: `actor.model`, for the tokenizer.
        dtype: Dtype of the weights written with these files, if it differs from the module's.
    """
    base_model: Any = module
    if hasattr(base_model, "get_base_model"):
        base_model = base_model.get_base_model()
    config = copy.deepcopy(base_model.config)
    config.use_cache = True  # training turns it off
    if dtype is not None:
        config.dtype = dtype
    with temporary_folder("model") as folder:
        (folder / CONFIG).write_bytes(config_file(config, model))
        if getattr(base_model, "generation_config", None) is not None:
            base_model.generation_config.save_pretrained(folder)
        export_tokenizer(folder, model, has_padding=not base_model.can_generate())
        source = Path(str(model.model_path))
        code_files = sorted(source.glob("*.py")) if model.trust_remote_code and source.is_dir() else []
        return {path.name: path.read_bytes() for path in [*folder.iterdir(), *code_files] if path.is_file()}


def export_adapter(folder: Path, weights: dict[str, torch.Tensor], module: nn.Module, model: PretrainedConfig) -> None:
    """Writes a LoRA adapter and the tokenizer as a folder that `peft.PeftModel.from_pretrained` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = module.peft_config[ADAPTER]  # type: ignore[index]
    config.base_model_name_or_path = str(model.model_path)
    config.inference_mode = True
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode = False
    save_tensors(folder / "adapter_model.safetensors", weights)
    export_tokenizer(folder, model)
