"""Checkpoints of language models, of any training backend, as Hugging Face folders: offline, in one process.

    export/global_step_<N>/model.safetensors   config.json   tokenizer.json …   README.md
    export/global_step_<N>/conversion.json     {"format", "from", "global_step", "backend", "lora", "dtype", "files": …}

The number of ranks that wrote the checkpoint does not matter, nor whether their packages are installed: DeepSpeed's files are
read without DeepSpeed. The other way round, a Hugging Face folder is what `actor.model.model_path` starts from; an
adapter's folder becomes one by `import_model`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from rlhpc.checkpoint.export_folder import (
    accuracy_table,
    default_output,
    filled_folder,
    head,
    require_free,
    results_beside,
)
from rlhpc.checkpoint.manifest import MANIFEST, digest, read_manifest
from rlhpc.checkpoint.state import load_tensors
from rlhpc.checkpoint.store import require_valid
from rlhpc.config.sections import LoraConfig
from rlhpc.jobs.paths import MODEL, model_name
from rlhpc.language.model_config import PretrainedConfig
from rlhpc.language.scoring.groups import CRITIC
from rlhpc.language.streamed import stream_folder, stream_shards, untrained_weights
from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import expand_home, read_json, write_durably
from rlhpc.runtime.trust import Trust

FORMAT = 1
CONVERSION = "conversion.json"
#: What an exported model does.
_WRITES, _REWARDS = "writes", "rewards"
#: How to use it, for its card.
_USES = {
    _REWARDS: (
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
    """Write the Hugging Face folder of a language model's checkpoint, atomically; an existing one is replaced.

    Args:
        checkpoint: A `global_step_<N>` folder of any run, on any machine.
        output: Target folder; by default `export/global_step_<N>` of the run the checkpoint lies in.
        adapter_only: With LoRA, writes the adapter for peft, rather than the model with the adapter merged.
        base: The model that training began from, of which adapters and frozen parts need the weights; by default where it
            was in training.
        dtype: `float32` or `bfloat16`; by default that of the training's computation.
        critic: The critic, as a sequence classifier, rather than the policy; by default to `global_step_<N>-critic`.
        licence: SPDX identifier for the model card.
        trust_code: Run code that comes with the model, where the training did (`actor.model.trust_remote_code`).

    Returns:
        The folder; of several policies (`agent.policies`) it has one for each, of its name.

    Raises:
        CheckpointError: The checkpoint has faults, or the target cannot be written.
        ConfigError: The model that training began from is needed and not there, or there is no adapter.
    """
    from rlhpc.language.tokens.files import FOLDER
    from rlhpc.language.tokens.model import DTYPES, export_model, load_causal_lm
    from rlhpc.language.tokens.scalar import HEAD, load_scalar_model

    checkpoint = expand_home(checkpoint).absolute()
    require_valid(checkpoint, hint="or convert another checkpoint with: rlhpc convert --checkpoint <folder>")
    step = int(read_manifest(checkpoint)["global_step"])
    apart = critic and (checkpoint / CRITIC).is_dir()
    source = checkpoint / CRITIC if apart else checkpoint
    identity = _identity(source)
    values = bool(identity.get("actor.model.value_head"))  # a head beside that for tokens
    if critic and not apart and not values:
        raise ConfigError(f"{checkpoint} has no critic: algorithm.adv_type was not gae")
    Trust(trust_code).check({"about": {"trust_remote_code": bool(identity["about"].get("trust_remote_code"))}},
                            str(source / "backend.json"))  # fmt: skip
    about, backend = identity["about"], str(identity["actor.training_backend"])
    policies = [str(name) for name in identity.get("agent.policies", ())] if not critic else []
    target = default_output(checkpoint, step) if output is None else expand_home(output).absolute()
    if critic and output is None:
        target = target.with_name(f"{target.name}-{CRITIC}")
    require_free(target)
    if (dtype or about["dtype"]) not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose from {', '.join(DTYPES)}")
    kind = DTYPES[dtype or about["dtype"]]
    lora_rank = int(about["lora"]["rank"])
    head = HEAD if values and critic else identity.get("head")
    load: Callable[..., Any] = load_scalar_model if head else load_causal_lm
    if adapter_only and not lora_rank:
        raise ConfigError(f"{checkpoint}: only an adapter was asked for, but actor.lora.rank was 0: there is none")
    streams = backend == "fsdp" and not lora_rank and not values  # with the memory of one tensor
    # FSDP merges float32 adapters into what it sends; the other backends those that they compute with.
    exact = backend == "fsdp" and bool(lora_rank)
    weights = dict[str, torch.Tensor]()
    if not streams:
        weights = {name: tensor if exact else tensor.to(kind) for name, tensor in trained_weights(source, backend)}
    model = PretrainedConfig(
        model_path=str(source / FOLDER),
        attn_implementation="eager",
        trust_remote_code=about.get("trust_remote_code", False),
    )
    if values:
        weights = _one_head(weights, critic, set() if lora_rank else {*load(model, empty=True).state_dict()})
    started, frozen = str(base or about["model_path"]), frozenset(map(str, about.get("frozen", ())))
    if not (streams or lora_rank):
        lacking = untrained_weights(load(model, empty=True), weights, frozen, model, started, load, source)
        weights |= {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in lacking}
    try:
        with filled_folder(target) as staging:
            for policy in policies or [""]:
                folder = staging / policy
                folder.mkdir(exist_ok=True)
                mine = _of_policy(weights, policy) if policy else weights
                parameters = sum(tensor.numel() for tensor in mine.values())
                if streams:
                    parameters = stream_shards(folder, source / "shards", model, kind, load, started, frozen)
                elif lora_rank:
                    _export_adapted(folder, mine, about, model, base, kind, adapter_only, load, head)
                else:
                    export_model(folder, mine.items(), model, kind, load)
                _describe(folder, {
                "from": str(checkpoint),
                **({"policy": policy} if policy else {}),
                "global_step": step,
                "backend": backend,
                "dtype": str(kind).removeprefix("torch."),
                "lora": {**about["lora"], "merged": not adapter_only} if lora_rank else None,
                "base": started,
                "manifest_sha256": digest(checkpoint / MANIFEST)[1],
                "parameters": parameters,
            }, licence, task=CRITIC if critic else _REWARDS if head else _WRITES)  # fmt: skip
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} could not be exported: {error.filename or target}: {error.strerror or error}. "
            f"{advice(error, target)}, or give another output folder"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: the weights do not fit the model that it describes: {error}") from error
    return target


def _of_policy(weights: dict[str, torch.Tensor], policy: str) -> dict[str, torch.Tensor]:
    """The weights of one policy's adapter, by the names that they have where there is one."""
    from rlhpc.training.lora import ADAPTER, is_of

    return {
        name.removesuffix(f".{policy}.weight") + f".{ADAPTER}.weight": tensor
        for name, tensor in weights.items()
        if is_of(name, policy)
    }


def _one_head(weights: dict[str, torch.Tensor], critic: bool, known: set[str]) -> dict[str, torch.Tensor]:
    """The weights of a model with two heads, for tokens and for values, as those of a model with one of them.

    Args:
        weights: Of both.
        critic: The one for values is wanted.
        known: The weights that the model with one has; empty if these are an adapter's.
    """
    from rlhpc.language.tokens.scalar import HEAD, VALUE_HEAD

    mine = f"{VALUE_HEAD}."
    if not critic:
        return {name: tensor for name, tensor in weights.items() if mine not in name}
    renamed = {name.replace(mine, f"{HEAD}."): tensor for name, tensor in weights.items()}
    return {name: tensor for name, tensor in renamed.items() if not known or name in known}


def trained_weights(checkpoint: Path, backend: str) -> Iterable[tuple[str, torch.Tensor]]:
    """The trained parameters in full, in the precision of training, by their names in the module.

    Raises:
        CheckpointError: Files are missing or damaged, or the backend is not one of rlhpc's.
    """
    if backend == "local":
        return load_tensors(checkpoint / MODEL).items()
    if backend == "fsdp":
        return _sharded(checkpoint / "shards")
    if backend == "deepspeed":
        from rlhpc.training.deepspeed_checkpoint import full_parameters

        return full_parameters(checkpoint / "deepspeed" / "state")
    raise CheckpointError(
        f"{checkpoint} is of actor.training_backend={backend}, whose files only that backend can read; converted are "
        "local, fsdp and deepspeed"
    )


def import_model(source: str | Path, output: Path, *, base: str | Path | None = None, dtype: str = "float32") -> Path:
    """Write a Hugging Face folder that a run starts from (`actor.model.model_path`).

    Args:
        source: A Hugging Face folder or name of a causal language model, or of a sequence classifier with one label (a reward
            model); or a folder with a peft adapter, which is merged.
        output: Target folder.
        base: The model that the adapter belongs to; by default what the adapter's config names.
        dtype: Of the weights written: `float32` or `bfloat16`.

    Raises:
        ConfigError: The model cannot be loaded.
        CheckpointError: The target cannot be written.
    """
    from rlhpc.language.tokens.model import DTYPES, export_model, load_causal_lm
    from rlhpc.language.tokens.scalar import is_classifier, load_scalar_model

    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose from {', '.join(DTYPES)}")
    target, adapter = expand_home(output).absolute(), Path(source) / "adapter_config.json"
    require_free(target)
    path, classifies = str(source), False
    if adapter.is_file():
        said = json.loads(adapter.read_text())
        path, classifies = str(base or said.get("base_model_name_or_path")), said.get("task_type") == "SEQ_CLS"
    model = PretrainedConfig(model_path=path, attn_implementation="eager")
    classifies = classifies or is_classifier(model)
    load: Callable[..., Any] = load_scalar_model if classifies else load_causal_lm
    kind = DTYPES[dtype]
    with filled_folder(target) as staging:
        if adapter.is_file() or not stream_folder(staging, model, kind, load)[0]:
            module = load(model, dtype=kind)
            if adapter.is_file():
                module = _merged(module, source, path)
            export_model(staging, module.state_dict().items(), model, DTYPES[dtype], load)
        facts = {"from": str(source), "base": path, "dtype": dtype, "backend": "peft" if adapter.is_file() else None}
        _describe(staging, facts, task=_REWARDS if classifies else _WRITES)
    return target


def _merged(module: Any, source: str | Path, path: str) -> Any:
    """The model with an adapter's folder merged into it."""
    from rlhpc.training.lora import peft

    try:
        return peft().PeftModel.from_pretrained(module, str(source)).merge_and_unload()
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"{source}: the adapter does not fit {path}: {str(error).splitlines()[0]}") from error


def _export_adapted(
    folder: Path,
    weights: dict[str, torch.Tensor],
    about: dict[str, Any],
    model: PretrainedConfig,
    base: str | Path | None,
    dtype: torch.dtype,
    adapter_only: bool,
    load: Callable[..., Any],
    head: str | None,
) -> None:
    """Writes the adapter, or the model with it merged, by the same functions as the backends use."""
    from rlhpc.language.tokens.files import export_adapter
    from rlhpc.language.tokens.model import export_model
    from rlhpc.training import lora

    source = dataclasses.replace(model, model_path=str(base or about["model_path"]))
    options = LoraConfig(**about["lora"])
    # The adapter alone needs the model's shape, which the checkpoint has itself.
    module = load(model if adapter_only else source, dtype=dtype, empty=adapter_only)
    adapted = lora.attach_lora(module, options, seed=0, head=head)
    own = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    if own != set(weights):
        raise ValueError(f"the adapter's weights are others, such as {sorted(own ^ set(weights))[0]}")
    if adapter_only:
        named = {name.replace(f".{lora.ADAPTER}.", "."): tensor for name, tensor in weights.items()}
        export_adapter(folder, named, adapted, model)
        config = folder / "adapter_config.json"  # names the checkpoint, where the tokenizer came from
        found = {**json.loads(config.read_text()), "base_model_name_or_path": source.model_path}
        write_durably(config, json.dumps(found, indent=2).encode() + b"\n")
        return
    adapted.load_state_dict(weights, strict=False)
    export_model(folder, lora.full_weights(adapted, lambda tensor: tensor), model, dtype, load)


def _sharded(folder: Path) -> Iterable[tuple[str, torch.Tensor]]:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    from rlhpc.training.distributed_checkpoint import load_sharded

    prefix = "model."
    try:
        known: dict[str, Any] = dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    except Exception as error:  # safetensors has errors of its own
        raise CheckpointError(f"{folder}: cannot be read ({type(error).__name__}: {error})") from error
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in known.items()
        if name.startswith(prefix)
    }
    load_sharded(folder, state)
    return [(name.removeprefix(prefix), tensor) for name, tensor in state.items()]


def _identity(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "backend.json"
    try:
        found: dict[str, Any] = read_json(path.read_bytes())
        found["about"]["lora"]["rank"], found["actor.training_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: this is not a language model's checkpoint ({error})") from error
    return found


def _config(folder: Path) -> bytes:
    path = folder / "config.json"
    return path.read_bytes() if path.is_file() else b""


def _describe(folder: Path, facts: dict[str, Any], licence: str | None = None, *, task: str = _WRITES) -> None:
    """Writes README.md, and what was converted from what."""
    from rlhpc import __version__

    step = f", global step {facts['global_step']}" if "global_step" in facts else ""
    source = Path(facts["from"])
    name = model_name(source)
    results = (
        results_beside(source, facts["global_step"], "accuracy") if "global_step" in facts and task != CRITIC else []
    )
    tags = {_REWARDS: ["reward-model"], CRITIC: ["value-model"]}.get(task, [])
    card = head(
        library="transformers",
        task="text-generation" if task == _WRITES else "text-classification",
        licence=licence,
        name=name,
        tags=["reinforcement-learning", "rlhpc", *tags],
        results=results,
    )
    writes = "AutoModelForImageTextToText" if b'"vision_config"' in _config(folder) else "AutoModelForCausalLM"
    auto = writes if task == _WRITES else "AutoModelForSequenceClassification"
    use = _USES.get(task, "")
    card += (
        f"# {name}\n\nWritten by rlhpc {__version__}{step}; starting point `{facts['base']}`. "
        f"`{CONVERSION}` tells what was converted, with checksums.\n\n"
        f"{accuracy_table(results)}{use}```python\nfrom transformers import {auto}, AutoTokenizer\n\n"
        f'model, tokenizer = {auto}.from_pretrained("."), AutoTokenizer.from_pretrained(".")\n```\n'
    )
    write_durably(folder / "README.md", card.encode())
    mode = (folder / "README.md").stat().st_mode
    for path in folder.iterdir():  # safetensors makes files that only their owner reads
        path.chmod(mode)
    files = {
        str(path.relative_to(folder)): dict(zip(("size", "sha256"), digest(path), strict=True))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    record = {"format": FORMAT, "rlhpc_version": __version__, **facts, "files": files}
    write_durably(folder / CONVERSION, json.dumps(record, indent=2).encode() + b"\n")
