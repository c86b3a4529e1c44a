"""Export of language model checkpoints from any training backend to Hugging Face folders, offline and in one process.

    export/global_step_<N>/model.safetensors   config.json   tokenizer.json …   README.md
    export/global_step_<N>/conversion.json     {"format", "from", "global_step", "backend", "lora", "dtype", "files": …}

A checkpoint may come from any number of ranks. The backend's package is not needed: DeepSpeed's files are read without
DeepSpeed. In the other direction, `import_model` writes a Hugging Face folder from which a run can start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.checkpoint.export_folder import (
    checkpoint_results,
    default_output,
    filled_folder,
    format_accuracy_table,
    format_card_header,
    require_free,
)
from rlhpc.checkpoint.manifest import MANIFEST, digest, read_manifest
from rlhpc.checkpoint.state import load_tensors
from rlhpc.checkpoint.store import require_valid
from rlhpc.config.sections import LoraConfig
from rlhpc.jobs.paths import MODEL, model_name
from rlhpc.language.config.models import PretrainedConfig
from rlhpc.language.scoring.groups import CRITIC
from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, read_json, write_durably
from rlhpc.runtime.trust import Trust

if TYPE_CHECKING:
    from rlhpc.checkpoint.tensor_slice import TensorSlice
    from rlhpc.training.safetensors_writer import Layout


_PREFIX = "model."
SliceStream = Iterator[tuple[str, "TensorSlice", torch.Tensor]]


def stream_shards(
    folder: Path,
    shards: Path,
    model: PretrainedConfig,
    dtype: torch.dtype,
    load_module: Callable[..., Any],
    base_name: str,
    frozen_names: Container[str] = (),
) -> int:
    """Writes the Hugging Face folder of a sharded checkpoint, slice by slice.

    Args:
        folder: Target folder; created if missing.
        shards: Folder with the checkpoint's shards, which contain all trained weights.
        model: Section whose `model_path` is a folder with config and tokenizer of the model.
        dtype: Dtype of the written weights.
        load_module: Function that builds the model: `load_causal_lm` or `load_scalar_model`.
        base_name, frozen_names: See `untrained_weights`.

    Returns:
        Number of parameters.

    Raises:
        CheckpointError: A file is damaged or belongs to a different model.
    """
    from rlhpc.checkpoint.tensor_slice import full_slice
    from rlhpc.training.distributed_checkpoint import iter_saved_slices
    from rlhpc.training.parameter_names import checkpoint_parts
    from rlhpc.training.shard_layout import intersect

    skeleton = load_module(model, dtype=dtype, empty=True)
    layout, shapes = _layout(skeleton, dtype)
    parts_by_name, saved_slices = checkpoint_parts(skeleton, shapes), dict[str, list[Any]]()
    for name, path, tensor_slice in iter_saved_slices(shards):
        if name.startswith(_PREFIX):
            saved_slices.setdefault(name.removeprefix(_PREFIX), []).append((path, tensor_slice))
    if unknown_names := sorted(saved_slices.keys() - shapes.keys()):
        raise CheckpointError(f"{shards}: {unknown_names[0]} is not of the model that the checkpoint describes")

    def iter_slices() -> SliceStream:
        for name, tensor_slices in saved_slices.items():
            for slice_reader, tensor_slice in tensor_slices:
                weight = slice_reader()
                for weight_part in parts_by_name[name]:
                    if (
                        overlap_ranges := intersect(weight_part.index, tensor_slice, full_slice(tensor_slice.sizes))
                    ) is not None:
                        yield weight_part.name, overlap_ranges[0], weight[overlap_ranges[1]]
        for name, weight in untrained_weights(
            skeleton, saved_slices, frozen_names, model, base_name, load_module, shards
        ):
            for weight_part in parts_by_name[name]:
                yield weight_part.name, full_slice(weight_part.shape), weight_part.view_in(weight)

    _write_folder(folder, skeleton, model, layout, iter_slices())
    return layout.num_parameters


def stream_folder(
    folder: Path, model: PretrainedConfig, dtype: torch.dtype, load_module: Callable[..., Any]
) -> tuple[bool, int]:
    """Copies a model's Hugging Face folder in a different dtype, one tensor at a time.

    Returns:
        Whether the folder was written, and the number of parameters. The folder is written only if the source has safetensors
        files with the names that transformers writes.
    """
    from rlhpc.checkpoint.tensor_slice import full_slice
    from rlhpc.language.models.loading import model_file
    from rlhpc.training.safetensors_reader import Slices
    from rlhpc.training.safetensors_writer import find_missing

    slices = Slices.from_model(partial(model_file, str(model.model_path)))
    skeleton = load_module(model, dtype=dtype, empty=True)
    if slices is None or find_missing(skeleton, slices, iter(())):
        return False, 0
    layout, _ = _layout(skeleton, dtype)

    def iter_slices() -> SliceStream:
        with slices:
            for name, file_slice in layout.locations.items():
                yield name, full_slice(file_slice.shape), slices.read(name)

    _write_folder(folder, skeleton, model, layout, iter_slices())
    return True, layout.num_parameters


def _layout(skeleton: Any, dtype: torch.dtype) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    """Returns the layout of the tensors in safetensors files, and the tensors' shapes by name in the module."""
    from rlhpc.training.safetensors_writer import Layout
    from rlhpc.training.shard_layout import iter_tensors, names_and_shapes

    tensors = names_and_shapes(skeleton).items()
    layout = Layout(
        {
            name: (shape, dtype if dtype_or_type.is_floating_point else dtype_or_type)
            for name, (shape, dtype_or_type) in tensors
        }
    )
    return layout, {name: tuple(tensor.shape) for name, tensor in iter_tensors(skeleton)}


def untrained_weights(
    skeleton: Any,
    trained_names: Container[str],
    frozen_names: Container[str],
    model: PretrainedConfig,
    base_name: str,
    load_module: Callable[..., Any],
    base_folder: Path,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads the frozen parameters and buffers that a checkpoint lacks from the model that training started from.

    Args:
        skeleton: The model on the meta device.
        trained_names: Names in the module of the tensors in the checkpoint.
        frozen_names: Names in the module of the parameters that were frozen in training. Any other missing parameter is
            an error.
        model: Section from which `skeleton` was built.
        base_name: Path or hub name of the model that training started from.
        load_module: Function that builds the model: `load_causal_lm` or `load_scalar_model`.
        base_folder: Path of the checkpoint, for messages.

    Yields:
        Names in the module with full tensors, one at a time. Tied tensors come once.

    Raises:
        CheckpointError: A trained parameter is missing, or the base model's tensor has a different shape.
        ConfigError: The base model was not found.
    """
    from rlhpc.language.models.loading import model_file
    from rlhpc.training.parameter_names import checkpoint_parts
    from rlhpc.training.safetensors_reader import Slices
    from rlhpc.training.shard_layout import iter_tensors

    parameters = {name for name, _ in skeleton.named_parameters()}
    missing_shapes = {name: tuple(tensor.shape) for name, tensor in iter_tensors(skeleton) if name not in trained_names}
    for name, shape in missing_shapes.items():
        if name in parameters and name not in frozen_names:
            raise CheckpointError(f"{base_folder}: {name} {list(shape)} is missing")
    if not missing_shapes:
        return
    parts_by_name, slices = (
        checkpoint_parts(skeleton, missing_shapes),
        Slices.from_model(partial(model_file, base_name)),
    )
    if slices is not None and all(
        weight_part.name in slices.files for name in missing_shapes for weight_part in parts_by_name[name]
    ):
        with slices:
            for name, shape in missing_shapes.items():
                part_tensors = {weight_part: slices.read(weight_part.name) for weight_part in parts_by_name[name]}
                weight = torch.empty(shape, dtype=next(iter(part_tensors.values())).dtype)
                for weight_part, part_tensor in part_tensors.items():
                    _require_shape(base_name, weight_part.name, part_tensor, weight_part.shape)
                    weight_part.view_in(weight).copy_(part_tensor)
                yield name, weight
        return
    base_weights: dict[str, torch.Tensor] = load_module(
        dataclasses.replace(model, model_path=base_name), dtype=torch.float32
    ).state_dict()
    for name, shape in missing_shapes.items():
        if name not in base_weights:
            raise CheckpointError(f"{base_folder}: {name} {list(shape)} is missing, also in {base_name}")
        _require_shape(base_name, name, base_weights[name], shape)
        yield name, base_weights[name]


def _require_shape(base_name: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{base_name}: {name} is {list(tensor.shape)} there, and {list(shape)} in the model that was trained; "
            "name the model that training began from with --base"
        )


def _write_folder(
    folder: Path, skeleton: Any, model: PretrainedConfig, layout: Layout, tensor_slices: SliceStream
) -> None:
    from rlhpc.language.models.loading import model_files
    from rlhpc.runtime.files import write_durably

    layout.begin(folder)
    layout.write(folder, tensor_slices)
    for name, file_content in model_files(skeleton, model).items():
        write_durably(folder / name, file_content)
    layout.finish(folder)


FORMAT = 1
CONVERSION = "conversion.json"
#: Tasks of an exported model: text generation, and scoring of responses by a reward model.
_GENERATION, _REWARD_SCORING = "writes", "rewards"
#: Usage text in the model card, by task.
_USAGE_TEXTS = {
    _REWARD_SCORING: (
        "Its logit is the reward of a response: of the prompt as the chat template puts it, with the generation prompt; the\n"
        "response; and the end token.\n\n"
    ),
    CRITIC: (
        "Its logit is the value of the state after the tokens that it has read: the reward to be expected of the\n"
        "policy that it was trained with.\n\n"
    ),
}


def export_language_model(
    checkpoint: Path,
    output: Path | None = None,
    *,
    adapter_only: bool = False,
    base: str | Path | None = None,
    dtype: str | None = None,
    critic: bool = False,
    licence: str | None = None,
    trust_code: bool = False,
) -> Path:
    """Writes the Hugging Face folder of a language model's checkpoint, atomically; replaces an existing one.

    Args:
        checkpoint: A `global_step_<N>` folder of any run.
        output: Target folder; by default `export/global_step_<N>` in the folder of the checkpoint's run.
        adapter_only: Whether to write a LoRA adapter for peft instead of the model with the adapter merged.
        base: The model that training started from. Its weights are needed for adapters and frozen parameters. By default
            the path that training used.
        dtype: `float32`, `bfloat16` or `float16`; by default the dtype of the training's computation.
        critic: Whether to export the critic, as a sequence classifier, instead of the policy; by default to
            `global_step_<N>-critic`.
        licence: SPDX identifier for the model card.
        trust_code: Whether to run code that comes with the model, if the training did (`actor.model.trust_remote_code`).

    Returns:
        The folder; with several policies (`agent.policies`) it has a subfolder for each policy, with the policy's name.

    Raises:
        CheckpointError: The checkpoint is invalid, or the target cannot be written.
        ConfigError: The model that training started from was not found, or the checkpoint has no adapter or critic.
    """
    from rlhpc.language.models.loading import DTYPES, FOLDER, export_model, load_causal_lm
    from rlhpc.language.models.value_head import HEAD, load_scalar_model

    checkpoint = expand_home(checkpoint).absolute()
    require_valid(checkpoint, hint="or convert another checkpoint with: rlhpc convert --checkpoint <folder>")
    step = int(read_manifest(checkpoint)["global_step"])
    is_separate_critic = critic and (checkpoint / CRITIC).is_dir()
    weights_folder = checkpoint / CRITIC if is_separate_critic else checkpoint
    backend_identity = _read_identity(weights_folder)
    has_value_head = bool(backend_identity.get("actor.model.value_head"))  # in addition to the LM head
    if critic and not is_separate_critic and not has_value_head:
        raise ConfigError(f"{checkpoint} has no critic: algorithm.adv_type was not gae")
    Trust(trust_code).check({"about": {"trust_remote_code": bool(backend_identity["about"].get("trust_remote_code"))}},
                            str(weights_folder / "backend.json"))  # fmt: skip
    model_facts, backend = backend_identity["about"], str(backend_identity["actor.training_backend"])
    policies = [str(name) for name in backend_identity.get("agent.policies", ())] if not critic else []
    target = default_output(checkpoint, step) if output is None else expand_home(output).absolute()
    if critic and output is None:
        target = target.with_name(f"{target.name}-{CRITIC}")
    require_free(target)
    if (dtype or model_facts["dtype"]) not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose from {', '.join(DTYPES)}")
    target_dtype = DTYPES[dtype or model_facts["dtype"]]
    lora_rank = int(model_facts["lora"]["rank"])
    format_card_header = HEAD if has_value_head and critic else backend_identity.get("head")
    load_model: Callable[..., Any] = load_scalar_model if format_card_header else load_causal_lm
    if adapter_only and not lora_rank:
        raise ConfigError(f"{checkpoint}: only an adapter was asked for, but actor.lora.rank was 0: there is none")
    streams_tensors = backend == "fsdp" and not lora_rank and not has_value_head  # needs the memory of one tensor
    # FSDP merges adapters in float32 before it sends weights; other backends merge them in the dtype of the computation.
    keeps_float32 = backend == "fsdp" and bool(lora_rank)
    weights = dict[str, torch.Tensor]()
    if not streams_tensors:
        weights = {
            name: tensor if keeps_float32 else tensor.to(target_dtype)
            for name, tensor in trained_weights(weights_folder, backend)
        }
    model = PretrainedConfig(
        model_path=str(weights_folder / FOLDER),
        attn_implementation="eager",
        trust_remote_code=model_facts.get("trust_remote_code", False),
    )
    if has_value_head:
        weights = _select_head(weights, critic, set() if lora_rank else {*load_model(model, empty=True).state_dict()})
    base_path, frozen_names = str(base or model_facts["model_path"]), frozenset(map(str, model_facts.get("frozen", ())))
    if not (streams_tensors or lora_rank):
        untrained_tensors = untrained_weights(
            load_model(model, empty=True), weights, frozen_names, model, base_path, load_model, weights_folder
        )
        weights |= {
            name: tensor.to(target_dtype) if tensor.is_floating_point() else tensor
            for name, tensor in untrained_tensors
        }
    try:
        with filled_folder(target) as staging:
            for policy in policies or [""]:
                folder = staging / policy
                folder.mkdir(exist_ok=True)
                policy_weights = _select_policy_adapter(weights, policy) if policy else weights
                num_parameters = sum(tensor.numel() for tensor in policy_weights.values())
                if streams_tensors:
                    num_parameters = stream_shards(
                        folder, weights_folder / "shards", model, target_dtype, load_model, base_path, frozen_names
                    )
                elif lora_rank:
                    _export_adapted(
                        folder,
                        policy_weights,
                        model_facts,
                        model,
                        base,
                        target_dtype,
                        adapter_only,
                        load_model,
                        format_card_header,
                    )
                else:
                    export_model(folder, policy_weights.items(), model, target_dtype, load_model)
                _write_model_card(folder, {
                "from": str(checkpoint),
                **({"policy": policy} if policy else {}),
                "global_step": step,
                "backend": backend,
                "dtype": str(target_dtype).removeprefix("torch."),
                "lora": {**model_facts["lora"], "merged": not adapter_only} if lora_rank else None,
                "base": base_path,
                "manifest_sha256": digest(checkpoint / MANIFEST)[1],
                "parameters": num_parameters,
            }, licence, task=CRITIC if critic else _REWARD_SCORING if format_card_header else _GENERATION)  # fmt: skip
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} could not be exported: {error.filename or target}: {error.strerror or error}. "
            f"{advice(error, target)}, or give another output folder"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: the weights do not fit the model that it describes: {error}") from error
    return target


def _select_policy_adapter(weights: dict[str, torch.Tensor], policy: str) -> dict[str, torch.Tensor]:
    """Returns the weights of one policy's adapter under the names that a run with one policy uses."""
    from rlhpc.training.lora import ADAPTER, belongs_to_adapter

    return {
        name.removesuffix(f".{policy}.weight") + f".{ADAPTER}.weight": tensor
        for name, tensor in weights.items()
        if belongs_to_adapter(name, policy)
    }


def _select_head(weights: dict[str, torch.Tensor], is_critic: bool, model_names: set[str]) -> dict[str, torch.Tensor]:
    """Converts the weights of a model with LM head and value head to weights of a model with one of the two heads.

    Args:
        weights: Weights of the model with both heads.
        is_critic: Whether to keep the value head.
        model_names: Names of the weights of the model with one head; empty for the weights of an adapter.
    """
    from rlhpc.language.models.value_head import HEAD, VALUE_HEAD

    value_prefix = f"{VALUE_HEAD}."
    if not is_critic:
        return {name: tensor for name, tensor in weights.items() if value_prefix not in name}
    renamed_weights = {name.replace(value_prefix, f"{HEAD}."): tensor for name, tensor in weights.items()}
    return {name: tensor for name, tensor in renamed_weights.items() if not model_names or name in model_names}


def trained_weights(checkpoint: Path, backend: str) -> Iterable[tuple[str, torch.Tensor]]:
    """Returns the names in the module and full values of the trained parameters, in the precision of training.

    Raises:
        CheckpointError: Files are missing or damaged, or the backend is not built in.
    """
    if backend == "local":
        return load_tensors(checkpoint / MODEL).items()
    if backend == "fsdp":
        return _load_shards(checkpoint / "shards")
    if backend == "deepspeed":
        from rlhpc.training.deepspeed_checkpoint import full_parameters

        return full_parameters(checkpoint / "deepspeed" / "state")
    raise CheckpointError(
        f"{checkpoint} is of actor.training_backend={backend}, whose files only that backend can read; converted are "
        "local, fsdp and deepspeed"
    )


def import_model(source: str | Path, output: Path, *, base: str | Path | None = None, dtype: str = "float32") -> Path:
    """Writes a Hugging Face folder from which a run can start (`actor.model.model_path`); returns its path.

    Args:
        source: A Hugging Face folder or name of a causal language model, or of a sequence classifier with one
            label (a reward model); or a folder with a peft adapter, which is merged.
        output: Target folder.
        base: The model that the adapter belongs to; by default the base model in the adapter's config.
        dtype: Dtype of the written weights: `float32`, `bfloat16` or `float16`.

    Raises:
        ConfigError: The model cannot be loaded.
        CheckpointError: The target cannot be written.
    """
    from rlhpc.language.models.loading import DTYPES, export_model, load_causal_lm
    from rlhpc.language.models.value_head import is_classifier, load_scalar_model

    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose from {', '.join(DTYPES)}")
    target, adapter = expand_home(output).absolute(), Path(source) / "adapter_config.json"
    require_free(target)
    path, is_classification_model = str(source), False
    if adapter.is_file():
        adapter_config = json.loads(adapter.read_text())
        path = str(base or adapter_config.get("base_model_name_or_path"))
        is_classification_model = adapter_config.get("task_type") == "SEQ_CLS"
    model = PretrainedConfig(model_path=path, attn_implementation="eager")
    is_classification_model = is_classification_model or is_classifier(model)
    load_model: Callable[..., Any] = load_scalar_model if is_classification_model else load_causal_lm
    target_dtype = DTYPES[dtype]
    with filled_folder(target) as staging:
        if adapter.is_file() or not stream_folder(staging, model, target_dtype, load_model)[0]:
            module = load_model(model, dtype=target_dtype)
            if adapter.is_file():
                module = _merge_adapter(module, source, path)
            export_model(staging, module.state_dict().items(), model, DTYPES[dtype], load_model)
        source_facts = {
            "from": str(source),
            "base": path,
            "dtype": dtype,
            "backend": "peft" if adapter.is_file() else None,
        }
        _write_model_card(staging, source_facts, task=_REWARD_SCORING if is_classification_model else _GENERATION)
    return target


def _merge_adapter(module: Any, adapter_folder: str | Path, path: str) -> Any:
    """Returns the model with the adapter of folder `adapter_folder` merged; `path` names the model in messages."""
    from rlhpc.training.lora import peft

    try:
        return peft().PeftModel.from_pretrained(module, str(adapter_folder)).merge_and_unload()
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"{adapter_folder}: the adapter does not fit {path}: {str(error).splitlines()[0]}") from error


def _export_adapted(
    folder: Path,
    weights: dict[str, torch.Tensor],
    export_facts: dict[str, Any],
    model: PretrainedConfig,
    base_folder: str | Path | None,
    dtype: torch.dtype,
    adapter_only: bool,
    load_module: Callable[..., Any],
    head: str | None,
) -> None:
    """Writes the adapter, or the model with the adapter merged, by the same functions as the training backends."""
    from rlhpc.language.models.loading import export_adapter, export_model
    from rlhpc.training import lora

    base_model = dataclasses.replace(model, model_path=str(base_folder or export_facts["model_path"]))
    options = LoraConfig(**export_facts["lora"])
    # The adapter alone needs only the model's shape, which the config in the checkpoint defines.
    module = load_module(model if adapter_only else base_model, dtype=dtype, empty=adapter_only)
    adapted_model = lora.attach_lora(module, options, seed=0, head=head)
    trained_names = {name for name, parameter in adapted_model.named_parameters() if parameter.requires_grad}
    if trained_names != set(weights):
        raise ValueError(f"the adapter's weights are others, such as {sorted(trained_names ^ set(weights))[0]}")
    if adapter_only:
        weights_by_name = {name.replace(f".{lora.ADAPTER}.", "."): tensor for name, tensor in weights.items()}
        export_adapter(folder, weights_by_name, adapted_model, model)
        config = folder / "adapter_config.json"  # `export_adapter` names the checkpoint as the base model
        adapter_config = {**json.loads(config.read_text()), "base_model_name_or_path": base_model.model_path}
        write_durably(config, json.dumps(adapter_config, indent=2).encode() + b"\n")
        return
    adapted_model.load_state_dict(weights, strict=False)
    export_model(folder, lora.full_weights(adapted_model, lambda tensor: tensor), model, dtype, load_module)


def _load_shards(folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    """Returns the names and full values of the parameters in a sharded checkpoint."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    from rlhpc.training.distributed_checkpoint import load_sharded

    prefix = "model."
    try:
        metadata_by_name: dict[str, Any] = dict(
            HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        )
    except Exception as error:  # safetensors raises its own error types
        raise CheckpointError(f"{folder}: cannot be read ({type(error).__name__}: {error})") from error
    state_dict = {
        name: torch.empty(metadata.size, dtype=metadata.properties.dtype)
        for name, metadata in metadata_by_name.items()
        if name.startswith(prefix)
    }
    load_sharded(folder, state_dict)
    return [(name.removeprefix(prefix), tensor) for name, tensor in state_dict.items()]


def _read_identity(checkpoint: Path) -> dict[str, Any]:
    """Returns the contents of a checkpoint's backend.json."""
    path = checkpoint / "backend.json"
    try:
        identity: dict[str, Any] = read_json(path.read_bytes())
        identity["about"]["lora"]["rank"], identity["actor.training_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: this is not a language model's checkpoint ({error})") from error
    return identity


def _read_config(folder: Path) -> bytes:
    path = folder / "config.json"
    return path.read_bytes() if path.is_file() else b""


def _write_model_card(
    folder: Path, export_facts: dict[str, Any], licence: str | None = None, *, task: str = _GENERATION
) -> None:
    """Writes the model card `README.md` and the conversion record `conversion.json`."""
    from rlhpc import __version__

    step = f", global step {export_facts['global_step']}" if "global_step" in export_facts else ""
    source_folder = Path(export_facts["from"])
    name = model_name(source_folder)
    results = (
        checkpoint_results(source_folder, export_facts["global_step"], "accuracy")
        if "global_step" in export_facts and task != CRITIC
        else []
    )
    tags = {_REWARD_SCORING: ["reward-model"], CRITIC: ["value-model"]}.get(task, [])
    model_card = format_card_header(
        library="transformers",
        task="text-generation" if task == _GENERATION else "text-classification",
        licence=licence,
        name=name,
        tags=["reinforcement-learning", "rlhpc", *tags],
        results=results,
    )
    generation_class = (
        "AutoModelForImageTextToText" if b'"vision_config"' in _read_config(folder) else "AutoModelForCausalLM"
    )
    auto_class = generation_class if task == _GENERATION else "AutoModelForSequenceClassification"
    usage_text = _USAGE_TEXTS.get(task, "")
    model_card += (
        f"# {name}\n\nWritten by rlhpc {__version__}{step}; starting point `{export_facts['base']}`. "
        f"`{CONVERSION}` tells what was converted, with checksums.\n\n"
        f"{format_accuracy_table(results)}{usage_text}```python\nfrom transformers import {auto_class}, AutoTokenizer\n\n"
        f'model, tokenizer = {auto_class}.from_pretrained("."), AutoTokenizer.from_pretrained(".")\n```\n'
    )
    write_durably(folder / "README.md", model_card.encode())
    file_mode = (folder / "README.md").stat().st_mode
    for path in folder.iterdir():  # safetensors creates files that only their owner can read
        path.chmod(file_mode)
    files = {
        str(path.relative_to(folder)): dict(zip(("size", "sha256"), digest(path), strict=True))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    conversion = {"format": FORMAT, "rlhpc_version": __version__, **export_facts, "files": files}
    write_durably(folder / CONVERSION, json.dumps(conversion, indent=2).encode() + b"\n")
