"""What a training backend does for a language model's actor rank."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch


@dataclass
class TokenBatch:
    """Sequences, padded on the right. B sequences, T tokens of the longest.

    Attributes:
        input_ids: `[B, T]` int64: prompt and response.
        attention_mask: `[B, T]` bool.
        fields: Tensors `[B, T]` or `[B]` that the loss wants beside it. Those of `[B, T]` are aligned with `input_ids`:
            column t is about token t, and column 0, which nothing predicts, is masked out.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    fields: dict[str, torch.Tensor]


@dataclass
class TokenScores:
    """What one forward pass says of the tokens, `[B, T]`, aligned with `input_ids`; column 0 is 0.

    Attributes:
        logprobs: log p(token t | tokens before t) at the temperature asked for.
        entropy: Of that distribution, where asked for.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None


LossFunction = Callable[[TokenScores, TokenBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class TrainingBackend(Protocol):
    """Owns model and optimizer of one actor rank. All ranks call the same methods in the same order.

    Loss functions return the rank's *part* of the global loss: a sum divided by the global count. So gradients are
    summed over ranks and micro-batches, never averaged, and any split gives the gradient of the whole batch.
    """

    @property
    def parameters_trained(self) -> int:
        """Trainable parameters, over all ranks."""

    def forward(self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False) -> TokenScores:
        """Scores without gradients, in evaluation mode."""

    def reference(self, batch: TokenBatch, *, temperature: float = 1.0) -> TokenScores:
        """Scores of the reference policy: the weights of before training (with LoRA, the base model)."""

    def forward_backward(
        self,
        micro_batches: Sequence[TokenBatch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> list[dict[str, torch.Tensor]]:
        """Accumulates gradients over the rank's micro-batches; their metrics. The ranks give equally many (pad with
        batches whose mask is empty)."""

    def optimizer_step(self, lr: float) -> float:
        """Clips to `actor.optim.clip_grad`, updates, clears the gradients; the global norm before clipping. Where that is not
        finite, nothing is updated on any rank; the gradients are cleared."""

    def named_weights(self, without: Container[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights in full, by their Hugging Face names, LoRA merged: what a rollout engine takes in. All ranks
        iterate; each tensor may be dropped before the next is asked for. Those in `without` are left out."""

    def frozen_names(self) -> frozenset[str]:
        """Which of them never change. A backend that cannot say has no such method: all its weights travel each time, and
        `named_weights` is called without arguments."""

    def save(self, folder: Path) -> None:
        """Writes model and optimizer below `folder`, each rank its part, durably."""

    def load(self, folder: Path) -> None:
        """Restores, on this or another world size.

        Raises:
            CheckpointError: The checkpoint is of another model or backend.
        """

    def export(self, folder: Path, *, adapter_only: bool = False) -> None:
        """Writes a Hugging Face folder (safetensors, config, tokenizer), LoRA merged unless `adapter_only`; rank 0
        writes, all ranks call."""

    def offload(self) -> None:
        """Moves everything to the host, to give the accelerator to another role."""

    def reload(self) -> None:
        """Inverse of `offload`."""
