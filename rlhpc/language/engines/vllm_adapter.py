"""Adapter module for vLLM's private code: all replacements of it, and all uses of its private names.

`VERIFIED` has the minor versions with the sources that this module was written for. The tests in
`tests/unit/language/engines/test_vllm_adapter.py` check the same assumptions on the installed vLLM, including its second model
runner, which is the default on GPUs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.runtime.errors import ConfigError

VERIFIED = {"vllm": "0.32", "transformers": "5.19"}

#: Variables that vLLM sets for its subprocesses; programs that the rank starts later do not need them.
_LEAKED_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
#: Packages hidden from vLLM while it builds an engine. vLLM reads every attribute of all modules of the process, and trimesh's
#: placeholders for missing packages raise on access. ManiSkill imports trimesh.
_HIDDEN_PACKAGES = ("trimesh",)
#: Module of transformers that vLLM's models import and that needs torchvision, and its replacement, which needs only PIL.
_IMAGE_PROCESSOR = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_IMAGE_PROCESSOR_OF_PIL = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"


@contextmanager
def _replace_attributes(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of a class or a module for the duration of the block."""
    previous_attributes = {name: vars(owner)[name] for name in attributes}
    for name, attribute in attributes.items():
        setattr(owner, name, attribute)
    try:
        yield
    finally:
        for name, attribute in previous_attributes.items():
            setattr(owner, name, attribute)


def cache_block_usage(engine: Any) -> float:
    """Returns the used part of the KV cache of an `LLMEngine` that runs in this process, 0 to 1."""
    return float(engine.engine_core.engine_core.scheduler.kv_cache_manager.usage)


# --- layers


def decoder_layers(worker: Any) -> list[nn.Module]:
    """Returns the decoder layers of a worker's model: its longest list of modules named `layers`."""
    lists = [
        module
        for name, module in worker.model_runner.get_model().named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "layers"
    ]
    return [*max(lists, key=len, default=())]


def sum_with_residual(output: Any) -> Tensor:
    """Returns the hidden states of a layer's output: vLLM's layers leave the addition of the residual to the next norm."""
    if not isinstance(output, tuple):
        hidden_states: Tensor = output
        return hidden_states
    hidden_states, residual = output[:2]
    return hidden_states if residual is None else hidden_states + residual


# --- batch invariance

#: Variable that turns on vLLM's batch-invariant mode (`vllm.model_executor.determinism`), and the constant that some modules
#: take from it when they are imported.
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
_BATCH_INVARIANT_CONSTANT = "is_batch_invariant"
#: Lowest compute capability for which vLLM has kernels of the mode.
_MIN_CAPABILITY = (8, 0)


def use_batch_invariant_mode() -> None:
    """Enables vLLM's batch-invariant mode for the engine that this process builds next.

    vLLM then replaces products, softmax and means by kernels whose result for a row does not depend on the batch, takes an
    attention that declares the same, and pins NCCL. Modules that a node has imported for its ranks (`preload_engine_modules`)
    took the variable's value before the rank set it.

    Raises:
        ConfigError: vLLM has no such mode for the device.
    """
    from vllm.platforms import current_platform

    reason = None
    if current_platform.is_cpu():
        reason = (
            "vLLM's CPU build has no such mode: it neither replaces its kernels nor has an attention that declares it"
        )
    elif current_platform.is_cuda() and not current_platform.has_device_capability(_MIN_CAPABILITY):
        reason = "vLLM has its kernels for NVIDIA GPUs of compute capability 8.0 or higher, which this one is not"
    if reason is not None:
        raise ConfigError(f"rollout.batch_invariant: {reason}; leave it false")
    os.environ[BATCH_INVARIANT] = "1"
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(module, _BATCH_INVARIANT_CONSTANT, None) is False:
            setattr(module, _BATCH_INVARIANT_CONSTANT, True)


# --- build of an engine


#: Modules that vLLM 0.32 imports while it builds an engine, if their importers have not. `{platform}` is "cpu" or "gpu".
ENGINE_MODULES = (
    "vllm.v1.worker.{platform}_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.core.sched.scheduler",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.renderers.hf",
)


def preload_engine_modules() -> None:
    """Imports `ENGINE_MODULES` and loads vLLM's plugins, as the build of an engine does; leaves out missing modules."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    platform_name = "cpu" if current_platform.is_cpu() else "gpu"
    with restored_process():
        for module in ENGINE_MODULES:
            with suppress(ImportError):
                importlib.import_module(module.format(platform=platform_name))


@contextmanager
def restored_process() -> Iterator[None]:
    """Restores the process after the block builds an engine; hides `_HIDDEN_PACKAGES` from vLLM within the block."""
    variables = {name: os.environ.get(name) for name in _LEAKED_VARIABLES}
    set_num_threads = torch.set_num_threads
    hidden_modules = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _HIDDEN_PACKAGES
    }
    try:
        yield
    finally:
        sys.modules.update(hidden_modules)
        torch.set_num_threads = set_num_threads  # the CPU build replaces it by a function that warns
        restore_variables(variables)


def restore_variables(variables: Mapping[str, str | None]) -> None:
    """Sets environment variables to former values; None removes one."""
    for name, previous_value in variables.items():
        if previous_value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = previous_value


@contextmanager
def external_launcher(group: str, rank: int, device_index: int = 0) -> Iterator[None]:
    """Makes vLLM's executor for external launchers build rank `rank` of an engine, for the duration of the block.

    - The name of the process group becomes that of the shared memory in which ranks on one host reduce tensors: vLLM takes
      the text after the last colon.
    - vLLM creates no message queue between ranks. rlhpc does not use the queue, which would open a port without
      authentication.

    Args:
        group: Name of the process group, without colons and slashes.
        rank: Rank of this process in the engine.
        device_index: Index of its accelerator among those that the process sees.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    def find_distributed_args(self: Any) -> tuple[str, int, int]:
        return f"rlhpc:{group}", rank, device_index

    def no_queue(*args: Any, **kwargs: Any) -> None:
        return None

    with ExitStack() as stack:
        stack.enter_context(_replace_attributes(MessageQueue, create_from_process_group=staticmethod(no_queue)))
        stack.enter_context(_replace_attributes(ExecutorWithExternalLauncher, _distributed_args=find_distributed_args))
        yield


def use_plain_lookup() -> None:
    """Replaces the compiled lookup of a sharded embedding by the plain function on CPUs.

    Torch compiles the lookup with a C++ compiler, which takes 15 seconds at the first step of each process. The lookup has
    only two comparisons and a sum.
    """
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.platforms import current_platform

    compiled_lookup = vocab_parallel_embedding.get_masked_input_and_mask
    if current_platform.is_cpu():
        lookup = getattr(compiled_lookup, "_torchdynamo_orig_callable", compiled_lookup)
        setattr(vocab_parallel_embedding, "get_masked_input_and_mask", lookup)  # noqa: B010 (mypy knows its signature)


# --- weights


@contextmanager
def unregistered_layers(compilation: Any) -> Iterator[None]:
    """Empties the tables in which layers register themselves by name, for the duration of the block.

    Args:
        compilation: vLLM's `CompilationConfig`; the engine's layers are registered in it already.
    """
    tables = {name: getattr(compilation, name, None) for name in ("static_forward_context", "static_all_moe_layers")}
    layer_tables = {name: table for name, table in tables.items() if table is not None}
    for name, table in layer_tables.items():
        setattr(compilation, name, type(table)())
    try:
        yield
    finally:
        for name, table in layer_tables.items():
            setattr(compilation, name, table)


@contextmanager
def observed_reload(on_copy: Callable[[int], None], on_idle: Callable[[Any], None]) -> Iterator[None]:
    """Observes vLLM's reload of weights by layers for the duration of the block.

    Args:
        on_copy: Called with the number of elements that a loader copied, after each call of a loader.
        on_idle: Called with each layer that has weights and received none. Buffers, such as the tables of rotary embeddings,
            are not weights, and vLLM places their layers after all weights.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    count_loaded, place_tensor = layerwise.get_numel_loaded, layerwise._place_kernel_tensors

    def count_copied(loader: Any, arguments: Any) -> tuple[int, object]:
        num_elements, load_output = count_loaded(loader, arguments)
        on_copy(num_elements)
        return num_elements, load_output

    def place_and_report(layer: Any, reload_info: Any) -> None:
        if reload_info.load_numel <= 0 and reload_info.kernel_tensors[0]:
            on_idle(layer)
        place_tensor(layer, reload_info)

    with _replace_attributes(layerwise, get_numel_loaded=count_copied, _place_kernel_tensors=place_and_report):
        yield


def name_loaders(worker: Any) -> None:
    """Names loaders of weights that are partial functions: vLLM's reload compares loaders by name, which these lack."""
    for parameter in worker.model_runner.get_model().parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            setattr(loader, "__name__", getattr(loader.func, "__name__", "partial"))  # noqa: B010 (mypy knows no such attribute)


def packing_layers(worker: Any) -> Iterator[tuple[Any, str]]:
    """Yields expert layers whose kernel must process weights after loading, with the kernel's name."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    for layer in worker.model_runner.get_model().modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is None:
            continue
        cls = type(kernel.fused_experts)
        if cls.process_weights_after_loading is not FusedMoEExperts.process_weights_after_loading:
            yield layer, cls.__name__


def reload_packed(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Runs vLLM's reload of weights and rebuilds the kernels that pack experts, because kernels pack only when they are built.

    Not applicable if CUDA graphs may have recorded the kernel's tensors.
    """
    for layer, _ in list(packing_layers(worker)):
        layer.quant_method.moe_kernel = None
    worker.reload_weights(weights_iterator=weights)


def set_adapter(worker: Any, adapter_number: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    """Replaces a LoRA adapter of vLLM's worker by tensors in memory, because vLLM reads adapters only from folders.

    Args:
        worker: The worker.
        adapter_number: Number of the adapter, from 1.
        tensors: Tensors by the names of peft's files.
        config: peft's configuration.

    Returns:
        Number of layers with an adapter.
    """
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    adapter_manager, peft_helper = manager._adapter_manager, PEFTHelper.from_dict(dict(config))
    peft_helper.validate_legal(manager.lora_config)
    mapper = getattr(adapter_manager.model, "hf_to_vllm_mapper", None)
    adapter = manager._lora_model_cls.from_lora_tensors(
        adapter_number,
        dict(tensors),
        peft_helper,
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    num_layers = len(adapter.loras)
    if "lm_head" not in config["target_modules"]:
        for wrapper in adapter_manager.punica_wrapper_mapping.values():
            wrapper.add_lora_logits = _return_logits
    adapter_manager.remove_adapter(adapter_number)
    adapter_manager.add_adapter(adapter)
    adapter_manager.activate_adapter(adapter_number)
    return num_layers


def renamed_tensors(worker: Any, names: Iterable[str]) -> dict[str, str]:
    """Returns the tensors that vLLM's model keeps under another name than the files: its name → the files' name."""
    mappers = [
        module.hf_to_vllm_mapper
        for module in worker.model_runner.get_model().modules()
        if getattr(module, "hf_to_vllm_mapper", None) is not None
    ]
    mapped_names = ((mapper.map_name(name), name) for name in names for mapper in mappers)
    return {mapped_name: name for mapped_name, name in mapped_names if mapped_name not in (None, name)}


def _return_logits(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns logits unchanged, in place of vLLM's addition of an adapter to the output layer.

    vLLM adds an adapter even if the output layer has none, and assumes that the rows are the tokens sampled in this step. The
    log-probs of a prompt have other rows. With concurrent requests, the addition raises an error on CPUs and applies another
    request's adapter on GPUs.
    """
    del args, kwargs
    return logits


# --- sampling


def replace_sampling(worker: Any, make_stage: Callable[[nn.Module], nn.Module], gather: Callable[..., Any]) -> bool:
    """Replaces the stage of vLLM's sampler that filters and samples, so that vLLM returns log-probs from before the filters.

    Args:
        worker: vLLM's worker.
        make_stage: Function from vLLM's stage to its replacement (first model runner).
        gather: Function that selects the log-probs of the sampled tokens (first model runner).

    Returns:
        Whether the sampler of this model runner is known.
    """
    sampler = worker.model_runner.sampler
    inner_stage = getattr(sampler, "topk_topp_sampler", None)
    if isinstance(inner_stage, nn.Module):
        sampler.topk_topp_sampler = make_stage(inner_stage)
        sampler.gather_logprobs = gather
        return True
    sample_random = getattr(sampler, "_sample_random", None)  # the second model runner
    if sample_random is None:
        return False

    def sample(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        tokens, _ = sample_random(logits.clone(), *args, **kwargs)
        return tokens, logits

    sampler._sample_random = sample
    return True


# --- images


def processor_info(model: Any) -> Any:
    """Returns vLLM's processing-info class of a model, which declares the limits of the model's images."""
    return model._processor_factory.info


def _lacks_torchvision(module_name: str) -> bool:
    """Returns whether a module cannot be imported because torchvision is not installed."""
    try:
        importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        return (error.name or "").partition(".")[0] == "torchvision"
    return False


def import_model_module(name: str) -> Any:
    """Imports vLLM's module of a model that reads images, also if torchvision is not installed."""
    if not _lacks_torchvision(name):
        return importlib.import_module(name)
    sys.modules[_IMAGE_PROCESSOR] = importlib.import_module(_IMAGE_PROCESSOR_OF_PIL)
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[_IMAGE_PROCESSOR]


def register_without_torchvision(architectures: Iterable[str]) -> None:
    """Registers vLLM's classes of text models that share a module with a model that reads images, if torchvision is missing.

    vLLM inspects a class in another process, which could not import the module.

    Args:
        architectures: Names of the model's classes (config.json).
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in architectures:
        module_name = getattr(ModelRegistry.models.get(architecture), "module_name", None)
        if module_name is not None and _lacks_torchvision(module_name):
            ModelRegistry.register_model(architecture, getattr(import_model_module(module_name), architecture))
