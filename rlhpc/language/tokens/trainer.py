"""Training of a language model: token batches and scores, on whatever backend holds the weights."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.blueprint import LanguageBlueprint, ScalarBlueprint
from rlhpc.language.tokens.files import export_adapter
from rlhpc.language.tokens.model import export_model
from rlhpc.language.tokens.packing import packs, reads_rows, unpack, width
from rlhpc.language.tokens.scalar import token_values
from rlhpc.language.tokens.scores import Reading, TokenScores, token_scores
from rlhpc.language.tokens.shards import shards_of
from rlhpc.runtime.device import torch_device
from rlhpc.runtime.errors import ConfigError
from rlhpc.training import lora
from rlhpc.training.contract import Metrics, Named, Ranks
from rlhpc.training.registry import make_backend
from rlhpc.weights.reshard import Shard

if TYPE_CHECKING:
    from rlhpc.language.config import LanguageActorConfig, TrainedLanguageConfig

LossFunction = Callable[[TokenScores, TokenBatch], tuple[torch.Tensor, Metrics]]
ValueLoss = Callable[[torch.Tensor, TokenBatch], tuple[torch.Tensor, Metrics]]


class ModelTrainer:
    """A backend of `rlhpc.training` that holds a language model. All ranks call the same methods in the same order.

    Args:
        blueprint: What is trained.
        section: Section `actor` of the configuration, or another of its form.
        worker: The rank.

    Attributes:
        backend: Holds the model.
        packed: Whether the model reads rows of several samples.
        hidden: The model's width.
    """

    def __init__(self, blueprint: LanguageBlueprint, section: LanguageActorConfig, worker: Ranks) -> None:
        self.blueprint = blueprint
        self.backend = make_backend(blueprint, section, worker)
        self.actor, self.worker = section, worker
        self.hidden = width(self.backend.module)
        reads = partial(reads_rows, dtype=blueprint.dtype)
        self.packed = packs(self.backend.module) and self.backend.evaluate(reads, self.device)
        if blueprint.packed and not self.packed:
            unpack(self.backend.module)
            blueprint.packed = False

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.backend.device

    @property
    def parameters_trained(self) -> int:
        """Trainable parameters, over all ranks."""
        return self.backend.parameters_trained

    def optimizer_step(self, lr: float) -> float:
        """Clips to `actor.optim.clip_grad`, updates; the global norm before clipping. Where that is not finite, nothing is
        updated on any rank."""
        return float(self.backend.optimizer_step(lr))

    # -- weights --------------------------------------------------------------------------------------------------

    def named_weights(self, without: Container[str] = ()) -> Named:
        """All weights in full, by their Hugging Face names, LoRA merged: what a rollout engine takes in. All ranks
        iterate; each tensor may be dropped before the next is asked for. Those in `without` are left out."""
        return self.backend.named_weights(without)

    def adapters(self) -> dict[str, torch.Tensor]:
        """The adapters alone, by the names of peft's files; all ranks call it."""
        found = lora.adapter_weights(self.backend.module, self.backend.full)
        return {name: tensor for name, tensor in found.items() if ".lora_" in name}

    def shards(self, dtype: torch.dtype | None) -> list[Shard]:
        """What this rank holds of the weights, as it is sent to engines part by part; all ranks call it, for adapters are
        gathered.

        Args:
            dtype: As they are sent; None is that of the computation.
        """
        return shards_of(self.backend.module, self.backend.full, dtype or self.blueprint.dtype)

    def frozen_names(self) -> frozenset[str]:
        """Names of the weights that never change."""
        return self.backend.frozen_names()

    def held_tensors(self) -> Named:
        """What this rank holds of the weights."""
        return self.backend.held_tensors()

    def awake(self) -> AbstractContextManager[None]:
        """Reloads what was offloaded, for the duration of the block (`TrainingBackend.awake`)."""
        return self.backend.awake()

    def save(self, folder: Path) -> None:
        """Writes model and optimizer below `folder`, each rank its part, durably."""
        self.backend.save(folder)

    def load(self, folder: Path) -> None:
        """Restores, on this or another world size.

        Raises:
            CheckpointError: The checkpoint is of another model or backend.
        """
        self.backend.load(folder)

    def export(self, folder: Path, *, adapter_only: bool = False) -> None:
        """Writes a Hugging Face folder (safetensors, config, tokenizer), LoRA merged unless `adapter_only`; rank 0 writes,
        all ranks call.

        Raises:
            ConfigError: `adapter_only` without LoRA.
        """
        folder, backend, model = Path(folder), self.backend, self.actor.model
        if adapter_only and not self.blueprint.lora_rank:
            raise ConfigError("only an adapter was asked for, but actor.lora.rank is 0: there is none")
        with backend.awake():
            if adapter_only:
                weights = lora.adapter_weights(backend.module, backend.full)
                if self.worker.rank == 0:
                    export_adapter(folder, weights, backend.module, model)
            elif self.worker.rank == 0:
                named = ((name, tensor.cpu()) for name, tensor in self.named_weights())
                export_model(folder, named, model, backend.dtype, self.blueprint.load)
            else:
                for _ in self.named_weights():  # takes part in the gathering
                    pass
        self.worker.barrier()

    def offload(self) -> None:
        """Moves everything to the host, to give the accelerator to another role."""
        self.backend.offload()

    def reload(self) -> None:
        """Takes back what `offload` moved away."""
        self.backend.reload()


class TokenTrainer(ModelTrainer):
    """Trains the causal model of section `actor`, and is asked what it says of tokens.

    Args:
        cfg: The configuration.
        worker: The rank.
        reference: Whether `reference` will be asked.
        values: Whether the model has a head for values, too.
    """

    def __init__(
        self, cfg: TrainedLanguageConfig, worker: Ranks, *, reference: bool = False, values: bool = False
    ) -> None:
        blueprint = LanguageBlueprint(cfg, torch_device(worker.accelerators), reference=reference, values=values)
        super().__init__(blueprint, cfg.actor, worker)

    def forward(self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False) -> TokenScores:
        """Scores without gradients, in evaluation mode."""
        return self.backend.evaluate(self._scores(temperature, entropy), batch.to(self.backend.device))

    def reference(self, batch: TokenBatch, *, temperature: float = 1.0) -> TokenScores:
        """Scores of the reference policy: the weights from before training; with LoRA the model without its
        adapters."""
        if self.blueprint.lora_rank:
            with lora.adapters_off(self.backend.module):
                return self.forward(batch, temperature=temperature)
        return self.backend.evaluate_reference(self._scores(temperature), batch.to(self.backend.device))

    def forward_backward(
        self,
        micro_batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        reading: Reading | None = None,
    ) -> list[Metrics]:
        """Accumulates gradients over the rank's micro-batches; their metrics, detached. The ranks give equally many (pad with
        batches whose mask is empty). See `TrainingBackend.forward_backward`."""
        scores_of = self._scores(temperature, entropy, reading)

        def run(called: nn.Module, given: TokenBatch) -> tuple[torch.Tensor, Metrics]:
            batch = given.to(self.backend.device)
            scores = scores_of(called, batch)
            value, measured = loss(scores, batch)
            if not value.requires_grad:  # an empty batch: its backward pass still has to meet the other ranks'
                value = value + 0.0 * scores.logprobs.sum()
            return value, measured

        return self.backend.forward_backward(micro_batches, run)

    def _scores(
        self, temperature: float, entropy: bool = False, reading: Reading | None = None
    ) -> Callable[[nn.Module, TokenBatch], TokenScores]:
        def scores(called: nn.Module, batch: TokenBatch) -> TokenScores:
            return token_scores(called, batch, temperature, entropy, reading)

        return scores


class ScalarTrainer(ModelTrainer):
    """Trains a model that says one number about each token: a reward model, or a critic.

    Args:
        section: Section `actor` of the configuration, or another of its form.
        worker: The rank.
        seed: Of a new head, and of adapters.
        key: What messages call the section.
        before: Each token's value is the one before it was read (`token_values`), as a critic wants it.
    """

    def __init__(
        self, section: LanguageActorConfig, worker: Ranks, *, seed: int, key: str = "actor", before: bool = False
    ) -> None:
        super().__init__(ScalarBlueprint(section, seed, torch_device(worker.accelerators), key=key), section, worker)
        self.before = before

    def _values(self, called: nn.Module, batch: TokenBatch) -> torch.Tensor:
        return token_values(called, batch, before=self.before)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """`[T]` values without gradients, in evaluation mode."""
        return self.backend.evaluate(self._values, batch.to(self.backend.device))

    def forward_backward(self, micro_batches: Sequence[TokenBatch], loss: ValueLoss) -> list[Metrics]:
        """Accumulates gradients over the rank's micro-batches; their metrics, detached.

        Args:
            micro_batches: Equally many on all ranks; pad with `TokenBatch.nothing`.
            loss: `[T]` values and the micro-batch → the rank's part of the loss, and metrics.
        """

        def run(called: nn.Module, given: TokenBatch) -> tuple[torch.Tensor, Metrics]:
            batch = given.to(self.backend.device)
            values = self._values(called, batch)
            value, measured = loss(values, batch)
            # An empty batch's backward pass still has to meet the other ranks'.
            return value if value.requires_grad else value + 0.0 * values.sum(), measured

        return self.backend.forward_backward(micro_batches, run)
