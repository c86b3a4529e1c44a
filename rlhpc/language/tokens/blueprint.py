"""A language model in the form that training backends are given."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.config.typed import plain
from rlhpc.language.tokens.files import FOLDER, model_files
from rlhpc.language.tokens.model import compute_dtype, load_causal_lm
from rlhpc.language.tokens.packing import pack
from rlhpc.language.tokens.scalar import HEAD, VALUE_HEAD, add_value_head, load_scalar_model
from rlhpc.runtime.durable import fsync_folder, write_durably
from rlhpc.training import lora
from rlhpc.training.contract import Blueprint, Full, Named

if TYPE_CHECKING:
    from rlhpc.language.config import LanguageActorConfig, TrainedLanguageConfig

log = logging.getLogger(__name__)


class LanguageBlueprint(Blueprint):
    """The causal model of `actor.model`, with adapters where `actor.lora` asks for them.

    Args:
        cfg: The configuration.
        device: Where it will compute.
        reference: Whether the model from before training is wanted, too.
        values: Whether the model gets a head for values, which only training knows: no engine and no export gets it.

    Attributes:
        head: A layer that is trained beside adapters, if the model has one.
        packed: Whether its models read rows of several samples: those that are built are made to, if they can.
    """

    head: str | None = None

    identity_file = "backend.json"
    knobs = "lower actor.max_tokens_per_micro_batch"

    def __init__(
        self, cfg: TrainedLanguageConfig, device: str, *, reference: bool = False, values: bool = False
    ) -> None:
        self._describe(cfg.actor, cfg.runner.seed, device)
        self._reference = reference
        if values:
            self.head, self._aside = VALUE_HEAD, f"{VALUE_HEAD}."

    def _describe(self, section: LanguageActorConfig, seed: int, device: str, key: str = "actor") -> None:
        self.actor, self.seed, self.key = section, seed, key
        self.dtype = compute_dtype(section.model, device, f"{key}.model")
        self.lora_rank, self.packed = section.lora.rank, section.use_remove_padding
        self._reference = False
        self._aside = ""
        self._files: dict[str, bytes] | None = None

    def load(self, model: Any, **options: Any) -> Any:
        """A model of this kind: `load_causal_lm`."""
        return load_causal_lm(model, **options)

    def build(self, *, empty: bool = False) -> nn.Module:
        """See `Blueprint.build`. Trainable weights are in float32; frozen ones in the dtype of the computation."""
        actor = self.actor
        model: nn.Module = self.load(
            actor.model,
            dtype=self.dtype if self.lora_rank else torch.float32,
            checkpointing=actor.model.gradient_checkpointing,
            empty=empty,
        )
        if self.packed and not pack(model):
            log.info("%s reads rectangles, with padding", type(model).__name__)
            self.packed = False
        if self._aside:
            add_value_head(model, self.seed)
        if not self.lora_rank:
            return model
        return lora.attach_lora(model, actor.lora, seed=self.seed, head=self.head, beside=bool(self._aside))

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference (`Blueprint.has_reference`); with adapters it is the model without them."""
        return self._reference and not self.lora_rank

    def build_reference(self, *, empty: bool = False) -> nn.Module:
        """Builds the frozen reference (`Blueprint.build_reference`)."""
        module: nn.Module = self.load(self.actor.model, dtype=self.dtype, empty=empty)
        if self.packed:
            pack(module)
        return module.eval().requires_grad_(False)

    def identity(self) -> dict[str, Any]:
        """What must agree for a checkpoint to fit (`Blueprint.identity`)."""
        return {"actor.lora.rank": self.lora_rank, "actor.model.value_head": bool(self._aside)}

    def about(self) -> dict[str, Any]:
        """See `Blueprint.about`: what conversion needs."""
        model = self.actor.model
        return {
            "model_path": str(model.model_path),
            "trust_remote_code": model.trust_remote_code,
            "dtype": str(self.dtype).removeprefix("torch."),
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
        for name, tensor in lora.full_weights(module, full, _Without(without, self._aside)):
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        """Names of the weights that never change (`Blueprint.frozen_names`): not trained, and nothing merged into them."""
        return lora.frozen_names(module)


class _Without(Container[str]):
    """Names to leave out: some, and all that begin with a prefix, if there is one."""

    def __init__(self, names: Container[str], prefix: str) -> None:
        self._names, self._prefix = names, prefix

    def __contains__(self, name: object) -> bool:
        return name in self._names or bool(self._prefix and str(name).startswith(self._prefix))


class ScalarBlueprint(LanguageBlueprint):
    """A model that says one number about each token (`load_scalar_model`): a reward model, or a critic.

    Args:
        section: Section `actor` of the configuration, or another of its form.
        seed: Of a new head, and of adapters.
        device: Where it will compute.
        key: What messages call the section.
    """

    head = HEAD

    def __init__(self, section: LanguageActorConfig, seed: int, device: str, *, key: str = "actor") -> None:
        self._describe(section, seed, device, key)

    def load(self, model: Any, **options: Any) -> Any:
        """A model of this kind: `load_scalar_model`."""
        return load_scalar_model(model, seed=self.seed, key=f"{self.key}.model.model_path", **options)

    def identity(self) -> dict[str, Any]:
        """See `Blueprint.identity`: also that the model has a head for values."""
        return {**super().identity(), "head": self.head}
