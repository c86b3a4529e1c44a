"""Samples that a model reads as one row without padding: each token attends to its own sample, and no mask of T × T is made.

Transformers' models hand what attention has to do to a function of a name. Ours gets, through the model's own arguments, where
each sample begins and ends. On an accelerator in half precision that is one call of torch's kernel for rows of several
samples; elsewhere one call of its causal attention for each run of samples of the same length. A batch that is a rectangle is
attended to as ever.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.language.models.context_parallel import Heads, RowShare, to_heads, to_tokens
from rlhpc.language.models.loading import pretrained_in
from rlhpc.language.models.token_batch import Segments, TokenBatch
from rlhpc.language.models.vision import sub_attention
from rlhpc.runtime.devices import attends_by_segments
from rlhpc.runtime.errors import ConfigError

#: What transformers calls the function here.
NAME = "rlhpc_segments"
#: Kinds of layers, as configurations name them, in which a token sees others through attention alone.
_LAYERS = frozenset({"full_attention", "sliding_attention"})
#: Rotary positions whose factors follow from the longest position there is: in a row, that of another sample.
_ROPES_BY_LENGTH = frozenset({"longrope", "su", "dynamic"})
#: How far, of the largest number, what a row says may be from what its sample says alone: in float32, and in half precision.
_FAR, _FAR_HALF = 1e-3, 0.1
#: Where `reads_rows` notes of each call of attention whether it was given the row's samples, and whether a window.
_calls: ContextVar[list[tuple[bool, bool]] | None] = ContextVar("calls", default=None)
#: What some families ask of attention beside what is done here.
_FURTHER = ("softcap", "s_aux", "position_bias")


def pack(model: nn.Module) -> bool:
    """Has a causal model, or one that was made of it, read rows of several samples, if it seems to be one that can; before the
    first row, `reads_rows` makes sure.

    Args:
        model: From transformers, without adapters, maybe on the meta device; changed in place.

    Returns:
        Whether it does. A model does not that is to use another attention than `sdpa`, that mixes tokens in other ways than by
        attention, or whose attention does more than weigh values (a bound on logits, sinks).
    """
    causal = pretrained_in(model)
    if causal is None or not _can(causal):
        return False
    sys.modules["transformers"].AttentionInterface.register(NAME, attend)
    causal.set_attn_implementation(sub_attention(causal, NAME))
    return packs(model)


def unpack(model: nn.Module) -> None:
    """Has a model that `pack` changed read rectangles again."""
    causal = pretrained_in(model)
    causal.set_attn_implementation(sub_attention(causal, "sdpa"))


@torch.no_grad()
def reads_rows(model: nn.Module, device: torch.device, dtype: torch.dtype, share: RowShare | None = None) -> bool:
    """Returns whether a packed model says of a sample in a row what it says of it alone, by one pass each over a few tokens.

    It may not: some families do not hand on to their attention what they are given, do not heed positions, or keep their
    window in a mask, which is not made here.

    Args:
        model: Is called; all ranks of a sharded one call it.
        device: Where it is.
        dtype: What it computes in.
        share: Of rows, if several ranks share them.
    """
    first, second = torch.arange(2, 7), torch.arange(3, 12) % 5 + 1
    row, alone = (
        TokenBatch.of(samples, [torch.ones(len(one)) for one in samples]).read_by(True).to(device)
        for samples in ([first, second], [second])
    )
    calls = list[tuple[bool, bool]]()
    token = _calls.set(calls)
    try:
        outputs = _said(model, row, share)
        windows = [has_window for _, has_window in calls]
        expected = _said(model, alone, share)
    finally:
        _calls.reset(token)
    a, b = outputs[len(first) : row.tokens], expected[: alone.tokens]
    far = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-6)
    hands_on_samples = bool(calls) and all(has_segments for has_segments, _ in calls)
    return (
        hands_on_samples and _hands_on_windows(model, windows) and far < (_FAR if dtype == torch.float32 else _FAR_HALF)
    )


def _hands_on_windows(model: nn.Module, windows: list[bool]) -> bool:
    """Returns whether each layer whose configuration gives it a sliding window hands the window on to its attention.

    Args:
        model: Was called once.
        windows: Of each call of attention, in order, whether it was given a window.
    """
    config = pretrained_in(model).config.get_text_config()
    has_window = getattr(config, "sliding_window", None) is not None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if has_window else "full_attention"]
    expected = [kind == "sliding_attention" for kind in kinds]
    return windows == expected if len(windows) == len(expected) else {*windows} == {*expected}


def _said(model: nn.Module, batch: TokenBatch, share: RowShare | None) -> Tensor:
    """`[T, …]` float32."""
    inputs = batch.inputs() if share is None else share.inputs(batch)
    said = model(**inputs, use_cache=False)
    said = said if isinstance(said, Tensor) else said["logits"]
    return (said if share is None else share.whole(said, batch))[0].float()


def packs(model: nn.Module) -> bool:
    """Whether `pack` was called, and the model can."""
    causal = pretrained_in(model)
    return causal is not None and causal.config.get_text_config()._attn_implementation == NAME


def width(model: nn.Module) -> int:
    """How many numbers a causal model's hidden state of a token has; 0 if it does not say."""
    causal = pretrained_in(model)
    return 0 if causal is None else int(getattr(causal.config.get_text_config(), "hidden_size", 0))


def _can(causal: Any) -> bool:
    config = causal.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    trunk = getattr(causal, causal.base_model_prefix, causal)
    return bool(
        causal._supports_attention_backend
        and causal.config._attn_implementation == "sdpa"
        and not causal._is_stateful
        and not getattr(config, "is_encoder_decoder", False)
        and kinds <= _LAYERS
        and not _rope_types(config) & _ROPES_BY_LENGTH
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(name.endswith("sinks") for name, _ in causal.named_parameters())
        and "position_ids" in inspect.signature(type(trunk).forward).parameters
    )


def _rope_types(config: Any) -> set[str]:
    """Returns the kinds of rotary positions that a model has, of all its kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sections = [parameters, *(section for section in parameters.values() if isinstance(section, dict))]
    return {str(section.get("rope_type", section.get("type"))) for section in sections}


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
    """Causal attention in the form that transformers calls: `[B, heads, T, d]` each, to `[B, T, heads, d]`.

    Args:
        module: The layer's attention.
        query, key, value: A row of several samples (B = 1), or a rectangle of one sample a row, padded on the right.
        attention_mask: None: transformers makes none for a function that it does not know.
        scaling: Of the logits.
        dropout: Of the weights.
        sliding_window: How many tokens, itself included, a token sees; None for all.
        segments: The row's samples; None for a rectangle.
        further: What a family adds.

    Raises:
        ConfigError: The family wants more of attention than this does.
    """
    if unknown := [name for name in _FURTHER if further.get(name) is not None]:
        raise ConfigError(
            f"{type(module).__name__} wants {unknown[0]} of its attention, which is not there for rows without padding; set "
            "actor.use_remove_padding=false"
        )
    calls = _calls.get()
    if calls is not None and not isinstance(module, Heads):  # those are a part of a call that is noted already
        calls.append((segments is not None, sliding_window is not None))
    if segments is None:
        return _causal(module, query, key, value, scaling=scaling, dropout=dropout, window=sliding_window), None
    if segments.group is not None:
        q, k, v = to_heads(query, key, value, segments.group)
        heads, alone = Heads(module, q, k), replace(segments, group=None)
        found, _ = attend(heads, q, k, v, None, scaling, dropout, sliding_window, alone)  # type: ignore[arg-type]
        return to_tokens(found, segments.group), None
    if not dropout and attends_by_segments(query, value) and (kernel := _kernel()):
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        rows: Any = kernel(
            q, k, v, segments.ends, segments.ends, segments.longest, segments.longest, scale=scaling,
            window_size=((sliding_window or 0) - 1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        return rows[None], None
    # Split, and not cut out one by one: the gradient of a split is one tensor, put together once.
    sizes = [count * length for count, length in segments.runs]
    parts = [
        _causal(
            module, *(_as_rows(each, *run) for each in cut), scaling=scaling, dropout=dropout, window=sliding_window
        )
        for run, *cut in zip(segments.runs, *(each.split(sizes, 2) for each in (query, key, value)), strict=True)
    ]
    parts = [part.flatten(0, 1) for part in parts]
    return torch.cat(parts)[None], None


def _kernel() -> Callable[..., Any] | None:
    """Torch's attention within the samples of a row, called as in torch 2.13; None if this torch's has no windows (before
    2.11)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return _as_in_213(varlen_attn)


@functools.cache
def _as_in_213(kernel: Callable[..., Any]) -> Callable[..., Any] | None:
    takes = inspect.signature(kernel).parameters
    if not {"scale", "window_size"} <= takes.keys():
        return None
    if "enable_gqa" in takes:
        return kernel
    # Before 2.13 heads shared keys without being told to.
    return lambda *rows, enable_gqa, **how: kernel(*rows, **how)


def _as_rows(row: Tensor, count: int, length: int) -> Tensor:
    """`[1, heads, count × length, d]` as `[count, heads, length, d]`."""
    return row[0].unflatten(1, (count, length)).transpose(0, 1)


def _causal(module: nn.Module, *weighed: Tensor, scaling: float | None, dropout: float, window: int | None) -> Tensor:
    """Of query, key and value `[B, heads, T, d]`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value = weighed
    mask, length = None, query.shape[2]
    if window is not None and window < length:
        behind = torch.arange(length, device=query.device)
        behind = behind[:, None] - behind
        mask = ((behind >= 0) & (behind < window))[None, None]
    found: Tensor = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)[0]
    return found
