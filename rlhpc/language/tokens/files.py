"""What a checkpoint has beside its weights, so that it can be made a Hugging Face folder of where nothing else is left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.checkpoint.state import save_tensors
from rlhpc.language.tokens.model import CONFIG, config_file, export_tokenizer
from rlhpc.runtime.scratch import temporary_folder
from rlhpc.training.lora import ADAPTER

if TYPE_CHECKING:
    from rlhpc.language.model_config import PretrainedConfig

#: Below a checkpoint's folder.
FOLDER = "model"


def model_files(module: nn.Module, model: PretrainedConfig, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """Config, generation config, tokenizer, and the code that came with the model, by file name.

    Args:
        module: The Hugging Face model, or what peft made of it.
        model: `actor.model`, for the tokenizer.
        dtype: Of the weights beside them, if they are others than the module's.
    """
    inner: Any = module
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    config = copy.deepcopy(inner.config)
    config.use_cache = True  # training does without
    if dtype is not None:
        config.dtype = dtype
    with temporary_folder("model") as folder:
        (folder / CONFIG).write_bytes(config_file(config, model))
        if getattr(inner, "generation_config", None) is not None:
            inner.generation_config.save_pretrained(folder)
        export_tokenizer(folder, model, pads=not inner.can_generate())
        source = Path(str(model.model_path))
        code = sorted(source.glob("*.py")) if model.trust_remote_code and source.is_dir() else []
        return {path.name: path.read_bytes() for path in [*folder.iterdir(), *code] if path.is_file()}


def export_adapter(folder: Path, weights: dict[str, torch.Tensor], module: nn.Module, model: PretrainedConfig) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads, with the tokenizer."""
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
