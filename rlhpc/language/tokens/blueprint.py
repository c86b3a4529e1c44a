"""A language model in the form that training backends are given."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.config.typed import plain
from rlhpc.language.tokens.files import FOLDER, model_files
from rlhpc.language.tokens.model import compute_dtype, load_causal_lm
from rlhpc.runtime.durable import fsync_folder, write_durably
from rlhpc.training import lora
from rlhpc.training.contract import Blueprint, Full, Named

if TYPE_CHECKING:
    from rlhpc.language.config import LanguageConfig


class LanguageBlueprint(Blueprint):
    """The causal model of `actor.model`, with adapters where `actor.lora` asks for them.

    Args:
        cfg: The configuration.
        reference: Whether the model from before training is wanted, too.
    """

    identity_file = "backend.json"
    knobs = "lower actor.max_tokens_per_micro_batch"

    def __init__(self, cfg: LanguageConfig, *, reference: bool = False) -> None:
        self.actor, self.seed = cfg.actor, cfg.runner.seed
        self.dtype = compute_dtype(cfg.actor.model)
        self.lora_rank = cfg.actor.lora.rank
        self._reference = reference
        self._files: dict[str, bytes] | None = None

    def build(self, *, empty: bool = False) -> nn.Module:
        """See `Blueprint.build`. Trainable weights are in float32; frozen ones in the dtype of the computation."""
        actor = self.actor
        model: nn.Module = load_causal_lm(
            actor.model,
            dtype=self.dtype if self.lora_rank else torch.float32,
            checkpointing=actor.model.gradient_checkpointing,
            empty=empty,
        )
        return lora.attach_lora(model, actor.lora, seed=self.seed) if self.lora_rank else model

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference (`Blueprint.has_reference`); with adapters it is the model without them."""
        return self._reference and not self.lora_rank

    def build_reference(self, *, empty: bool = False) -> nn.Module:
        """Builds the frozen reference (`Blueprint.build_reference`)."""
        module: nn.Module = load_causal_lm(self.actor.model, dtype=self.dtype, empty=empty)
        return module.eval().requires_grad_(False)

    def identity(self) -> dict[str, Any]:
        """What must agree for a checkpoint to fit (`Blueprint.identity`)."""
        return {"actor.lora.rank": self.lora_rank}

    def about(self) -> dict[str, Any]:
        """See `Blueprint.about`: what conversion needs."""
        model = self.actor.model
        return {
            "model_path": str(model.model_path),
            "trust_remote_code": model.trust_remote_code,
            "dtype": model.dtype,
            "lora": plain(self.actor.lora),
        }

    def write_beside(self, folder: Path, module: nn.Module) -> None:
        """See `Blueprint.write_beside`: config, tokenizer and code of the model."""
        if self._files is None:
            self._files = model_files(module, self.actor.model)
        (folder / FOLDER).mkdir(exist_ok=True)
        for name, data in self._files.items():
            write_durably(folder / FOLDER / name, data)
        fsync_folder(folder / FOLDER)

    def named_weights(self, module: nn.Module, full: Full, without: Container[str] = ()) -> Named:
        """See `Blueprint.named_weights`: by their Hugging Face names, in the dtype of the computation, LoRA merged; tied ones
        once, under the name that comes first."""
        for name, tensor in lora.full_weights(module, full, without):
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        """Names of the weights that never change (`Blueprint.frozen_names`): not trained, and nothing merged into them."""
        return lora.frozen_names(module)
