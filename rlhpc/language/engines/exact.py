"""Exact agreement of engine hf and trainer (`runner.deterministic`): both compute a token's log-prob with the same bits.

Batch invariance makes an engine's results independent of other rows. The trainer still differs, because it reads a sequence in
one pass: its attention computes many queries at a time, and its log-probs are rounded in another order. With the functions of
this module, both models compute

- the attention of each token as decoding does, over the columns up to the end of the token's block (`attend`);
- log-probs as log Σ e^z subtracted from z, where temperature is a factor (`token_logprobs`);
- the products of each expert in tiles.

Matrix products and all other operations give the same bits in each row if the number of rows is a multiple of `EXACT_TILE` and
one thread computes them, so rows are padded to that. Gradients are computed as usual.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.language.engines.batch_invariance import attend_as_decoding, use_invariant_experts
from rlhpc.language.models.logprobs import logprobs_and_entropy
from rlhpc.language.models.packing import EXACT, EXACT_TILE, record_call
from rlhpc.language.models.token_batch import Segments
from rlhpc.language.models.vision import sub_attention, tower_of
from rlhpc.runtime.errors import ConfigError


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **further: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention as decoding does; transformers calls it as a registered attention function.

    Args:
        module: The layer's attention module.
        query, key, value: See `attend_as_decoding`.
        attention_mask: Always None, because transformers builds no mask for functions that it does not know.
        scaling: Factor of the attention logits; None means 1/√d.
        dropout: Unused: models are trained without.
        sliding_window: Number of tokens that a token attends to, including itself; None for all.
        segments: Boundaries of the sequences in training; in a prefill they are those of the pass.
        further: Additional arguments of a model family.

    Returns:
        Outputs `[B, T, heads, width]`, 0 for tokens after the last sequence, and None in place of attention weights.

    Raises:
        ValueError: The model reads a rectangle.
    """
    record_call(module, segments, sliding_window)
    lengths = None if segments is None else [length for count, length in segments.runs for _ in range(count)]
    return attend_as_decoding(query, key, value, lengths, sliding_window, scaling), None


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """Computes log-probs of tokens as the trainer does (`logprobs_and_entropy`), over a multiple of `EXACT_TILE` rows.

    Args:
        logits: `[N, V]`.
        tokens: Token ids, `[N]`.
        temperature: Divisors of the logits, `[N, 1]`.

    Returns:
        Log-probs `[N]`, float32.
    """
    padding, scale = -len(logits) % EXACT_TILE, temperature.double().reciprocal().float()
    scaled_logits, targets = F.pad(logits.float() * scale, (0, 0, 0, padding)), F.pad(tokens, (0, padding))
    return logprobs_and_entropy(scaled_logits, targets, False)[0][: len(logits)]


def use_exactness(model: Any, device: torch.device, *, is_packed: bool = True) -> None:
    """Makes a trained causal model, or a model after `use_batch_invariance`, compute in the way of this module.

    Limits the process to one thread, because threads would share out the elements of a tensor at places that depend on its
    size.

    Args:
        model: Model of transformers without adapters, possibly on the meta device; changed in place.
        device: Device of the computation.
        is_packed: Whether the model reads packed rows, or is an engine's.

    Raises:
        ConfigError: The device, or a part of the model, is not covered.
    """
    obstacle = None
    if device.type != "cpu":
        obstacle = f"on {device.type}, a row of a product depends on the number of rows (vLLM: rollout.batch_invariant)"
    elif tower_of(model) is not None:
        obstacle = f"{type(model).__name__} has a vision tower"
    elif not is_packed:
        obstacle = f"{type(model).__name__} does not read rows without padding"
    if obstacle is not None:
        raise ConfigError(
            f"runner.deterministic: {obstacle}, so trainer and engine do not agree to the bit; set it to false"
        )
    sys.modules["transformers"].AttentionInterface.register(EXACT, attend)
    model.set_attn_implementation(sub_attention(model, EXACT))
    use_invariant_experts(model)
    torch.set_num_threads(1)
