"""Blueprints of language models for the training backends."""

from __future__ import annotations

import logging
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.config.typed import plain
from rlhpc.language.models.loading import FOLDER, compute_dtype, load_causal_lm, model_file, model_files, pretrained_in
from rlhpc.language.models.packing import pack
from rlhpc.language.models.value_head import (
    HEAD,
    VALUE_HEAD,
    add_value_head,
    is_classifier,
    load_scalar_model,
    new_head,
)
from rlhpc.language.models.vision import always_run_vision, freeze_vision, tower_of
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import fsync_folder, write_durably
from rlhpc.training import lora
from rlhpc.training.backend import Blueprint, Full, Named
from rlhpc.training.lora import linear_base
from rlhpc.training.safetensors_reader import Slices
from rlhpc.training.tensor_parallel import divide, expert_modules

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageActorConfig, TrainedLanguageConfig
    from rlhpc.training.mesh import Mesh

log = logging.getLogger(__name__)


def disable_dropout(model: nn.Module) -> bool:
    """Sets all dropout of a model to 0: that of layers, and attributes that attention reads.

    Returns:
        Whether the model had any dropout.
    """
    had_dropout = False
    for module in model.modules():
        rates = [
            name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float) and value
        ]
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            rates.append("p")
        for name in rates:
            setattr(module, name, 0.0)
        had_dropout |= bool(rates)
    return had_dropout


class LanguageBlueprint(Blueprint):
    """Causal model of `actor.model`, with the adapters of `actor.lora`.

    Args:
        cfg: The configuration.
        device: Device of the computation.
        reference: Whether to build the model from before training, too.
        values: Whether the model gets a value head, which only training uses: no engine and no export gets it.
        policies: Names of several policies, each an adapter of this model.
        dropout: Whether it is trained with the dropout of its configuration, and of `actor.lora`. In reinforcement learning
            it is not: with dropout in the update alone, the importance ratio of an unchanged policy would not be 1.

    Attributes:
        head: Name of a layer that is trained in addition to adapters, if the model has one.
        packed: Whether its models read rows of several samples; a built model is converted to that if possible.
    """

    head: str | None = None
    dropout = False

    identity_file = "backend.json"
    knobs = "lower actor.max_tokens_per_micro_batch"

    def __init__(
        self,
        cfg: TrainedLanguageConfig,
        device: str,
        *,
        reference: bool = False,
        values: bool = False,
        policies: tuple[str, ...] = (),
        dropout: bool = False,
    ) -> None:
        self.policies = policies
        self._describe(cfg.actor, cfg.runner.seed, device)
        self.dropout = dropout
        self._reference = reference
        if values:
            self.head = VALUE_HEAD
            self._aside = f"{VALUE_HEAD}."

    def _describe(self, section: LanguageActorConfig, seed: int, device: str, key: str = "actor") -> None:
        self.actor = section
        self.seed = seed
        self.key = key
        self.dtype = compute_dtype(section.model, device, f"{key}.model")
        self.lora_rank = section.lora.rank
        self.packed = section.use_remove_padding
        self._reference = False
        self._aside = ""
        self._files: dict[str, bytes] | None = None

    def load(self, model: Any, **options: Any) -> Any:
        """Loads a model of this kind (`load_causal_lm`)."""
        return load_causal_lm(model, **options)

    def build(self, *, empty: bool = False) -> nn.Module:
        """Builds the model (`Blueprint.build`). Trainable weights are in float32; frozen ones in the dtype of the
        computation."""
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
        if actor.model.freeze_vision:
            freeze_vision(model, self.key)
        if self._aside:
            add_value_head(model, self.seed)
        if self.lora_rank:
            model = lora.attach_lora(
                model, actor.lora, seed=self.seed, head=self.head, has_lm_head=bool(self._aside), names=self.policies
            )
        if not self.dropout and disable_dropout(model):
            log.info("%s: dropout is off, so that log-probs of rollout and update are those of one model", self.key)
        return model

    def divide(self, module: nn.Module, mesh: Mesh) -> None:
        """Divides the model by the plans of transformers, and rows as in `models.context_parallel` (`Blueprint.divide`).
        All ranks run the vision tower, also without pictures."""
        model = pretrained_in(module)
        if tower_of(model) is not None:
            always_run_vision(model)
        if mesh.sizes.context > 1 and not self.packed:
            raise ConfigError(
                f"{self.key}.parallel.context({mesh.sizes.context}) shares out rows without padding, which "
                f"{type(model).__name__} does not read here: it needs {self.key}.use_remove_padding=true, "
                f"{self.key}.model.attn_implementation=sdpa, and a model whose tokens meet in causal attention alone"
            )
        if not mesh.sizes.plain:
            divide(model, mesh, f"{self.key}.parallel")

    def layers(self, module: nn.Module) -> list[nn.Module]:
        """Returns the layers (`Blueprint.layers`); embeddings and head are separate units, unless they are tied."""
        return [*super().layers(module), *_edges(module)]

    def last(self, module: nn.Module) -> nn.Module | None:
        """Returns the head (`Blueprint.last`)."""
        edges = _edges(module)
        return edges[-1] if edges else None

    def uncast(self, module: nn.Module) -> list[nn.Module]:
        """Returns the vision layers, which get the angles of their positions in float32 (`Blueprint.uncast`)."""
        tower = tower_of(pretrained_in(module))
        return [] if tower is None else [*tower.blocks]

    def apart(self, module: nn.Module) -> list[nn.Module]:
        """Returns the expert modules (`Blueprint.apart`)."""
        return expert_modules(pretrained_in(module))

    def slices(self) -> Slices | None:
        """Returns the slices of the safetensors of `model_path` (`Blueprint.slices`)."""
        return Slices.of(partial(model_file, str(self.actor.model.model_path)))

    def exported(self, name: str) -> bool:
        """Returns whether a weight is exported (`Blueprint.exported`): those of a second head are not."""
        return not (self._aside and name.startswith(self._aside))

    def created_tensors(self, module: nn.Module) -> Named:
        """Yields the initial adapters, and a new head (`Blueprint.created_tensors`)."""
        if self.lora_rank:
            yield from lora.initial_adapters(module, self.seed)
        if self._aside:
            yield from new_head(module, VALUE_HEAD, self.seed)

    @property
    def has_reference(self) -> bool:
        """True if there is a reference model (`Blueprint.has_reference`); with adapters the reference is the model without
        them."""
        return self._reference and not self.lora_rank

    def build_reference(self, *, empty: bool = False) -> nn.Module:
        """Builds the frozen reference (`Blueprint.build_reference`)."""
        module: nn.Module = self.load(self.actor.model, dtype=self.dtype, empty=empty)
        if self.packed:
            pack(module)
        return module.eval().requires_grad_(False)

    def identity(self) -> dict[str, Any]:
        """Returns the facts that must agree for a checkpoint to fit (`Blueprint.identity`)."""
        facts: dict[str, Any] = {"actor.lora.rank": self.lora_rank, "actor.model.value_head": bool(self._aside)}
        if self.lora_rank:  # the adapters' product is multiplied by it
            facts["actor.lora.alpha"] = self.actor.lora.alpha
        if self.policies:
            facts["agent.policies"] = list(self.policies)
        return facts

    def about(self, module: nn.Module) -> dict[str, Any]:
        """Returns the facts that conversion needs (`Blueprint.about`). `frozen` names the untrained parameters, which a
        checkpoint lacks; with adapters all other parameters are frozen, and none is named."""
        model = self.actor.model
        return {
            "model_path": str(model.model_path),
            "trust_remote_code": model.trust_remote_code,
            "dtype": str(self.dtype).removeprefix("torch."),
            "lora": plain(self.actor.lora),
            "frozen": [] if self.lora_rank else sorted(lora.frozen_names(module)),
        }

    def write_beside(self, folder: Path, module: nn.Module) -> None:
        """Writes config, tokenizer and code of the model (`Blueprint.write_beside`)."""
        if self._files is None:
            self._files = model_files(module, self.actor.model)
        (folder / FOLDER).mkdir(exist_ok=True)
        for name, data in self._files.items():
            write_durably(folder / FOLDER / name, data)
        fsync_folder(folder / FOLDER)

    def named_weights(self, module: nn.Module, full: Full, without: Container[str] = ()) -> Named:
        """Yields the weights by their Hugging Face names, in the dtype of the computation, LoRA merged; tied ones once,
        under the first name (`Blueprint.named_weights`)."""
        for name, tensor in lora.full_weights(module, full, _Without(without, self._aside)):
            yield name, tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of the weights that never change (`Blueprint.frozen_names`): neither trained nor merged with
        adapters."""
        return lora.frozen_names(module)


def _edges(module: nn.Module) -> list[nn.Module]:
    """Returns embeddings and head, in this order, if they are separate matrices; otherwise an empty list."""
    causal = pretrained_in(module)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if embedding is None or head is None or embedding.weight is getattr(linear_base(head), "weight", None):
        return []
    return [embedding, head]


class _Without(Container[str]):
    """Container of names to leave out: some names, and all with a prefix, if there is one."""

    def __init__(self, names: Container[str], prefix: str) -> None:
        self._names = names
        self._prefix = prefix

    def __contains__(self, name: object) -> bool:
        return name in self._names or bool(self._prefix and str(name).startswith(self._prefix))


class ScalarBlueprint(LanguageBlueprint):
    """Model with one number for each token (`load_scalar_model`): a reward model, or a critic.

    Args:
        section: Section `actor` of the configuration, or another of its form.
        seed: Seed of a new head, and of adapters.
        device: Device of the computation.
        key: Name of the section in messages.
        dropout: See `LanguageBlueprint`.
    """

    head = HEAD

    def __init__(
        self, section: LanguageActorConfig, seed: int, device: str, *, key: str = "actor", dropout: bool = False
    ) -> None:
        self._describe(section, seed, device, key)
        self.dropout = dropout

    def load(self, model: Any, **options: Any) -> Any:
        """Loads a model of this kind (`load_scalar_model`)."""
        return load_scalar_model(model, seed=self.seed, key=f"{self.key}.model.model_path", **options)

    def created_tensors(self, module: nn.Module) -> Named:
        """Yields the initial adapters, and a new head for a causal model's trunk (`Blueprint.created_tensors`)."""
        yield from super().created_tensors(module)
        if not is_classifier(self.actor.model, f"{self.key}.model.model_path"):
            yield from new_head(module, HEAD, self.seed)

    def identity(self) -> dict[str, Any]:
        """Returns the facts that must agree (`Blueprint.identity`), also that the model has a value head."""
        return {**super().identity(), "head": self.head}
