"""Sequence packing: a model reads samples as one row without padding, and each token attends only to its own sample.

No T × T mask is built. Models of transformers call a registered attention function; the function of this module gets the
boundaries of the samples through the model's arguments. On an accelerator in half precision it calls torch's kernel for
variable lengths once; otherwise it calls torch's causal attention once for each run of samples of equal length. A rectangular
batch uses ordinary causal attention.

A row may have a prefix once that several samples share, such as the prompt of a group or the first turns of an agent's
episodes (`TokenBatch.shares_prefixes`). The attention of a token is then merged from that to its own sample's further tokens
and that to each part of its prefix, by their log-sum-exps; no mask and no copies of keys for each sample are made.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.language.config.training import SHORTEST_PREFIX
from rlhpc.language.models.context_parallel import AttentionSubstitute, RowShare, to_heads, to_tokens
from rlhpc.language.models.loading import agrees, pretrained_in
from rlhpc.language.models.token_batch import Segments, TokenBatch
from rlhpc.language.models.vision import sub_attention
from rlhpc.runtime.devices import has_segment_attention
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line
from rlhpc.runtime.torch_adapter import segment_attention, segment_attention_backward

log = logging.getLogger(__name__)

#: Name under which `attend` is registered with transformers.
NAME = "rlhpc_segments"
#: Name under which attention with the engine's bits is registered (`rlhpc.language.engines.exact`).
EXACT = "rlhpc_exact"
#: Multiple to which such a model's rows are padded.
EXACT_TILE = 32
#: Name of transformers' `sdpa` attention with the masks of `mask_windows`.
_MASKED_NAME = "rlhpc_masked_windows"
#: Layer types in which tokens interact only through attention.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Rotary embedding types whose factors depend on the longest position, which in a row may belong to another sample.
_ROPES_BY_LENGTH = frozenset({"longrope", "su", "dynamic"})

#: Record of attention calls for `reads_rows`: whether each call got segments, and whether it got a window.
_calls: ContextVar[list[tuple[bool, bool]] | None] = ContextVar("calls", default=None)
#: Attention arguments of some model families that `attend` does not support.
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")


def pack(model: nn.Module) -> bool:
    """Makes a causal model, or a model derived from one, read packed rows if its architecture supports this.

    `reads_rows` must verify the result before training.

    Args:
        model: Model of transformers without adapters, possibly on the meta device; changed in place.

    Returns:
        Whether the model reads packed rows. False if the attention is not `sdpa`, if tokens interact other than through
        attention, or if the attention has features that `attend` lacks, such as soft-capped logits or sinks.
    """
    causal_model = pretrained_in(model)
    if causal_model is None or not _supports_packing(causal_model):
        return False
    sys.modules["transformers"].AttentionInterface.register(NAME, attend)
    causal_model.set_attn_implementation(sub_attention(causal_model, NAME))
    return packs(model)


def unpack(model: nn.Module) -> None:
    """Reverts `pack`: the model reads rectangles again."""
    causal_model = pretrained_in(model)
    causal_model.set_attn_implementation(sub_attention(causal_model, "sdpa"))


def mask_windows(model: nn.Module) -> None:
    """Makes layers with a sliding window get a mask for rectangles of any length.

    By default, transformers builds no mask for rectangles that are shorter than the window. A compiled layer would then need
    a graph with a mask and one without. Layers without a window still get no mask. A model whose attention is not `sdpa`, such
    as a packed one, is not changed.
    """
    causal_model = pretrained_in(model)
    if causal_model is None or causal_model.config.get_text_config()._attn_implementation != "sdpa":
        return
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def build_mask(local_size: int | None = None, allow_is_causal_skip: bool = True, **options: Any) -> Any:
        can_skip = allow_is_causal_skip and local_size is None
        return sdpa_mask(local_size=local_size, allow_is_causal_skip=can_skip, **options)

    sys.modules["transformers"].AttentionInterface.register(_MASKED_NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(_MASKED_NAME, build_mask)
    causal_model.set_attn_implementation(sub_attention(causal_model, _MASKED_NAME))


@torch.no_grad()
def reads_rows(model: nn.Module, device: torch.device, dtype: torch.dtype, share: RowShare | None = None) -> bool:
    """Returns whether a packed model computes the same outputs for a sample in a row as for the sample alone.

    The check compares two forward passes over a few tokens. Some model families fail, because they do not pass arguments to
    their attention, ignore positions, or apply their sliding window by a mask, which packing does not build.

    Args:
        model: Model that reads packed rows; all ranks of a sharded model must call this function.
        device: Device of the model.
        dtype: Dtype of the computation.
        share: This rank's part of each row in context parallelism.
    """
    first_ids, second_ids = torch.arange(2, 7), torch.arange(3, 12) % 5 + 1
    row, second_alone = (
        TokenBatch.from_sequences(samples, [torch.ones(len(sample)) for sample in samples]).read_by(True).to(device)
        for samples in ([first_ids, second_ids], [second_ids])
    )
    calls = list[tuple[bool, bool]]()
    token = _calls.set(calls)
    try:
        outputs = _row_outputs(model, row, share)
        windows = [has_window for _, has_window in calls]
        alone_outputs = _row_outputs(model, second_alone, share)
    finally:
        _calls.reset(token)
    second_outputs, expected_outputs = outputs[len(first_ids) : row.tokens], alone_outputs[: second_alone.tokens]
    passes_segments = bool(calls) and all(has_segments for has_segments, _ in calls)
    return passes_segments and _passes_windows(model, windows) and agrees(second_outputs, expected_outputs, dtype)


def _passes_windows(model: nn.Module, windows: list[bool]) -> bool:
    """Returns whether each layer whose configuration has a sliding window passes it to its attention.

    Args:
        model: The model.
        windows: Whether each attention call of one forward pass got a window, in order.
    """
    config = pretrained_in(model).config.get_text_config()
    has_window = getattr(config, "sliding_window", None) is not None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention" if has_window else "full_attention"]
    expected_windows = [layer_type == "sliding_attention" for layer_type in layer_types]
    return windows == expected_windows if len(windows) == len(expected_windows) else {*windows} == {*expected_windows}


def _row_outputs(model: nn.Module, batch: TokenBatch, share: RowShare | None) -> Tensor:
    """Runs a model on a packed row and returns its outputs, `[T, …]` float32, gathered from all ranks that share the row."""
    inputs = batch.inputs() if share is None else share.inputs(batch)
    outputs = model(**inputs, use_cache=False)
    outputs = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    return (outputs if share is None else share.gather(outputs, batch))[0].float()


@torch.no_grad()
def reads_prefixes(model: nn.Module, device: torch.device, dtype: torch.dtype, obstacles: Sequence[str] = ()) -> bool:
    """Returns whether a model that reads packed rows computes the same if a row has a shared prefix once; logs why not.

    The check compares outputs of the model, and gradients of the attention alone on the model's device.

    Args:
        model, device, dtype: See `reads_rows`, whose result must be true.
        obstacles: Names of settings with which the model cannot share prefixes.
    """
    reason = f"not with {', '.join(obstacles)}" if obstacles else _attention_deviation(device, dtype)
    flat_batch = _tree_of_samples().to(device)
    num_positions = getattr(pretrained_in(model).config.get_text_config(), "max_position_embeddings", None)
    if reason is None and num_positions is not None and num_positions < flat_batch.width:
        reason = f"the check takes {flat_batch.width} tokens, and the model at most {num_positions}"
    if reason is None:
        shared_batch = flat_batch.sharing_prefixes()
        try:
            outputs, expected_outputs = (
                batch.of_tokens(_row_outputs(model, batch, None)[None]) for batch in (shared_batch, flat_batch)
            )
        except ConfigError as error:
            reason = str(error)
        else:
            reason = None if agrees(outputs, expected_outputs, dtype) else "its outputs differ"
    if reason is not None:
        log.info("%s reads shared prefixes once for each sample: %s", type(pretrained_in(model)).__name__, reason)
    return reason is None


def _tree_of_samples() -> TokenBatch:
    """Returns a packed batch of samples of one group that share prefixes of two lengths."""
    prefix, samples = SHORTEST_PREFIX + 3, list[Tensor]()
    ids = torch.arange(4 * prefix) % 5 + 1
    for index, length in enumerate((2 * prefix, 2 * prefix, prefix)):
        samples.append(torch.cat([ids[:length], (ids[: index + 4] + index) % 5 + 1]))
    batch = TokenBatch.from_sequences(samples, [torch.ones(len(sample)) for sample in samples]).read_by(True)
    return replace(batch, group=torch.zeros_like(batch.group))


@torch.enable_grad()
def _attention_deviation(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns the reason for which attention with shared prefixes cannot be used on a device.

    Returns None if its outputs and gradients equal those of flat rows.
    """
    flat_batch, generator = _tree_of_samples(), torch.Generator().manual_seed(0)
    tokens, shared_batch = flat_batch.tokens, flat_batch.sharing_prefixes()
    heads = [torch.randn(number, tokens, 16, generator=generator) for number in (4, 2, 2, 4)]
    flat_states = [states[None].to(device, dtype).requires_grad_() for states in heads[:3]]
    row_states = [states[None, :, shared_batch.row.tokens].to(device, dtype).requires_grad_() for states in heads[:3]]
    # Tokens of a shared prefix have the same queries, keys and values in each sample.
    with torch.no_grad():
        for flat, row in zip(flat_states, row_states, strict=True):
            flat.copy_(row[:, :, shared_batch.row.places.to(device)])
    module = AttentionSubstitute(nn.Module(), *flat_states[:2])
    outputs = list[Tensor]()
    try:
        for batch, states in ((flat_batch, flat_states), (shared_batch, row_states)):
            queries, keys, values = states
            output = attend(module, queries, keys, values, segments=batch.to(device).inputs()["segments"])[0]  # type: ignore[arg-type]
            output = batch.to(device).of_tokens(output).float()
            outputs.append(output.detach())
            (output * heads[3].transpose(0, 1).to(device)).sum().backward()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"{device.type} has no attention for them in {dtype}: {first_line(error)}"
    pairs = [(outputs[1], outputs[0])]
    for flat, row in zip(flat_states, row_states, strict=True):
        assert flat.grad is not None and row.grad is not None
        expected_output = torch.zeros_like(row, dtype=torch.float32)
        expected_output.index_add_(2, shared_batch.row.places.to(device), flat.grad.float())
        pairs.append((row.grad, expected_output))
    if all(agrees(result, expected_output, dtype) for result, expected_output in pairs):
        return None
    return f"attention to them differs on {device.type} in {dtype}"


def packs(model: nn.Module) -> bool:
    """Returns whether a model reads packed rows, after `pack`."""
    return _attention_of(model) in (NAME, EXACT)


def exact_tile(model: nn.Module) -> int:
    """Returns the multiple to which rows of tokens and of logits are padded so that a model computes with the engine's bits.

    Returns 0 for a model that does not.
    """
    return EXACT_TILE if _attention_of(model) == EXACT else 0


def _attention_of(model: nn.Module) -> str | None:
    causal_model = pretrained_in(model)
    return None if causal_model is None else causal_model.config.get_text_config()._attn_implementation


def _supports_packing(causal: Any) -> bool:
    config = causal.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    trunk = getattr(causal, causal.base_model_prefix, causal)
    return bool(
        causal._supports_attention_backend
        and causal.config._attn_implementation == "sdpa"
        and not causal._is_stateful
        and not getattr(config, "is_encoder_decoder", False)
        and layer_types <= _LAYER_TYPES
        and not _rope_types(config) & _ROPES_BY_LENGTH
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(name.endswith("sinks") for name, _ in causal.named_parameters())
        and "position_ids" in inspect.signature(type(trunk).forward).parameters
    )


def _rope_types(config: Any) -> set[str]:
    """Returns the rotary embedding types of a model, over all layer types."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameter_dicts = [parameters, *(section for section in parameters.values() if isinstance(section, dict))]
    return {str(section.get("rope_type", section.get("type"))) for section in parameter_dicts}


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
    """Computes causal attention; transformers calls it as a registered attention function.

    Args:
        module: The layer's attention module.
        query, key, value: `[B, heads, T, d]`: a packed row of several samples (B = 1), or a rectangle of one sample per row,
            padded on the right.
        attention_mask: Always None, because transformers builds no mask for functions that it does not know.
        scaling: Factor of the attention logits.
        dropout: Dropout probability of the attention weights.
        sliding_window: Number of tokens that a token attends to, including itself; None for all.
        segments: Boundaries of the row's samples; None for a rectangle.
        further: Additional arguments of a model family.

    Returns:
        Outputs `[B, T, heads, d]`, and None in place of attention weights.

    Raises:
        ConfigError: The model family needs an attention feature that this function does not support.
    """
    if unknown_names := [name for name in _UNSUPPORTED_ARGUMENTS if further.get(name) is not None]:
        raise ConfigError(
            f"{type(module).__name__} wants {unknown_names[0]} of its attention, which is not there for rows "
            "without padding; set actor.use_remove_padding=false"
        )
    record_call(module, segments, sliding_window)
    if segments is not None and segments.prefixes:
        if sliding_window is not None or dropout or segments.process_group is not None:
            raise ConfigError(
                "a layer has a sliding window or dropout, or a row is divided among ranks; set actor.share_prefixes=false"
            )
        return _attend_prefixes(query, key, value, segments, scaling), None
    if segments is None:
        return _causal(module, query, key, value, scaling=scaling, dropout=dropout, window=sliding_window), None
    if segments.process_group is not None:
        q, k, v = to_heads(query, key, value, segments.process_group)
        head_module, local_segments = AttentionSubstitute(module, q, k), replace(segments, process_group=None)
        outputs, _ = attend(head_module, q, k, v, None, scaling, dropout, sliding_window, local_segments)  # type: ignore[arg-type]
        return to_tokens(outputs, segments.process_group), None
    if not dropout and _KERNEL is not None and has_segment_attention(query, value):
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        outputs_by_row: Any = _KERNEL(
            q,
            k,
            v,
            segments.ends,
            segments.ends,
            segments.longest,
            segments.longest,
            scale=scaling,
            window_size=((sliding_window or 0) - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return outputs_by_row[None], None
    if torch.compiler.is_compiling():  # one graph for all numbers and lengths of samples
        return _in_rectangle(module, query, key, value, segments, scaling, dropout, sliding_window), None
    # `split` rather than slices, because its backward pass assembles the gradient once.
    sizes = [count * length for count, length in segments.runs]
    run_outputs = [
        _causal(
            module,
            *(_as_rows(states, *group_run) for states in run_states),
            scaling=scaling,
            dropout=dropout,
            window=sliding_window,
        )
        for group_run, *run_states in zip(
            segments.runs, *(states.split(sizes, 2) for states in (query, key, value)), strict=True
        )
    ]
    run_outputs = [run_output.flatten(0, 1) for run_output in run_outputs]
    return torch.cat(run_outputs)[None], None


def record_call(module: nn.Module, segments: Segments | None, window: int | None) -> None:
    """Records a call of an attention function for `reads_rows`."""
    calls = None if torch.compiler.is_compiling() else _calls.get()
    # `AttentionSubstitute` marks a nested call; its outer call is recorded.
    if calls is not None and not isinstance(module, AttentionSubstitute):
        calls.append((segments is not None, window is not None))


def _attend_prefixes(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Computes the attention of a packed row with shared prefixes; returns `[1, T, heads, d]`."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    num_missing = q.shape[2] - v.shape[2]  # the kernels take values of the size of keys
    if num_missing:
        scaling = q.shape[2] ** -0.5 if scaling is None else scaling
        q, k, v = (
            nn.functional.pad(states, (0, max(q.shape[2], v.shape[2]) - states.shape[2])) for states in (q, k, v)
        )
    outputs: Tensor = _PrefixAttention.apply(q, k, v, segments, scaling)
    return outputs[None, ..., : value.shape[3]]


def _own_segments(segments: Segments) -> tuple[Tensor, Tensor, tuple[int, int]]:
    return segments.ends, segments.ends, (segments.longest, segments.longest)


class _PrefixAttention(torch.autograd.Function):
    """Attention of q `[T, heads, d]` to k and v `[T, kv_heads, d]` of a packed row with shared prefixes.

    The log-sum-exps L₁ and L₂ of attention to two sets of keys merge their outputs into e^(L₁ − L) o₁ + e^(L₂ − L) o₂ with
    L = log(e^L₁ + e^L₂). The gradient of each set's keys follows from the merged output and L alone, as in FlashAttention
    (Dao et al. 2022), which computes it block by block.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
        layout = _own_segments(segments)
        outputs, log_sums = segment_attention(q, k, v, *layout, is_causal=True, scale=scale)
        merged_outputs = outputs.to(log_sums.dtype)
        for prefixes in segments.prefixes:
            queries, keys = prefixes.queries, prefixes.keys
            layout = (prefixes.query_ends, prefixes.key_ends, prefixes.longest)
            part, part_sums = segment_attention(q[queries], k[keys], v[keys], *layout, is_causal=False, scale=scale)
            previous_sums = log_sums[:, queries]
            merged_sums = torch.logaddexp(previous_sums, part_sums)
            weight, part_weight = ((sums - merged_sums).exp().T[..., None] for sums in (previous_sums, part_sums))
            merged_outputs[queries] = merged_outputs[queries] * weight + part * part_weight
            log_sums[:, queries] = merged_sums
        outputs = merged_outputs.to(q.dtype)
        ctx.save_for_backward(q, k, v, outputs, log_sums)
        ctx.segments, ctx.scale = segments, scale
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, outputs, log_sums = ctx.saved_tensors
        scale, grad = ctx.scale, grad.contiguous()
        grad_q, grad_k, grad_v = segment_attention_backward(
            grad, q, k, v, outputs, log_sums, *_own_segments(ctx.segments), is_causal=True, scale=scale
        )
        for prefixes in ctx.segments.prefixes:
            queries, keys = prefixes.queries, prefixes.keys
            layout = (prefixes.query_ends, prefixes.key_ends, prefixes.longest)
            states = (grad[queries], q[queries], k[keys], v[keys], outputs[queries], log_sums[:, queries].contiguous())
            parts = segment_attention_backward(*states, *layout, is_causal=False, scale=scale)
            grad_q[queries] += parts[0]
            grad_k[keys] += parts[1]
            grad_v[keys] += parts[2]
        return grad_q, grad_k, grad_v, None, None


def _in_rectangle(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Computes the attention of a packed row on a batch with one sample per row, padded on the right.

    A compiled graph of this function serves all numbers and lengths of samples.
    """
    # One row and one column are not used. With them, a single sample and samples of one token are no special cases.
    ends, num_tokens, width = segments.ends.long(), query.shape[2], segments.longest + 1
    places = (ends[:, None] + torch.arange(width, device=ends.device)).clamp(max=num_tokens - 1)
    rectangles = (states[0].transpose(0, 1)[places].transpose(1, 2) for states in (query, key, value))
    outputs = _causal(module, *rectangles, scaling=scaling, dropout=dropout, window=window)
    token = torch.arange(num_tokens, device=ends.device)
    sample = torch.searchsorted(ends, token, right=True) - 1
    return outputs.flatten(0, 1)[sample * width + token - ends[sample]][None]


def _with_current_signature(kernel: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns torch's variable-length attention with the signature of torch 2.13; None if it lacks windows (before 2.11)."""
    parameters = inspect.signature(kernel).parameters
    if not {"scale", "window_size"} <= parameters.keys():
        return None
    if "enable_gqa" in parameters:
        return kernel
    # Before 2.13 grouped-query attention needed no argument.
    return lambda *states, enable_gqa, **options: kernel(*states, **options)


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    _KERNEL = None
else:
    _KERNEL = _with_current_signature(varlen_attn)


def _as_rows(row: Tensor, count: int, length: int) -> Tensor:
    """Reshapes `[1, heads, count × length, d]` to `[count, heads, length, d]`."""
    return row[0].unflatten(1, (count, length)).transpose(0, 1)


def _causal(module: nn.Module, *states: Tensor, scaling: float | None, dropout: float, window: int | None) -> Tensor:
    """Computes causal attention of query, key and value, `[B, heads, T, d]` each; returns `[B, T, heads, d]`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value = states
    mask, length = None, query.shape[2]
    # A compiled graph serves lengths below and above the window, so that it always has the mask.
    if window is not None and (torch.compiler.is_compiling() or window < length):
        distance = torch.arange(length, device=query.device)
        distance = distance[:, None] - distance
        mask = ((distance >= 0) & (distance < window))[None, None]
    outputs: Tensor = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling)[0]
    return outputs
