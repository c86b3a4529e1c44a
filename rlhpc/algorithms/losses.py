"""Policy, value and entropy losses. Tensors are `[B, T]`, batch first. With the counts of the global batch, any split into
micro-batches and ranks gives the same gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.algorithms.registry import POLICY_LOSSES
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.algorithms.corrections import Correction

Metrics = dict[str, Any]
_LOG_RATIO_LIMIT = 20.0
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def token_weights(
    mask: Tensor,
    loss_agg: str,
    *,
    tokens: float | Tensor,
    seqs: float | Tensor,
    seq_tokens: Tensor,
    length: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes the weight of each token in an aggregated loss Σ weight · loss: the single normaliser of all losses.

    A token's weight depends on the full batch alone. So any order of the tokens, and any division into samples, micro-batches
    and ranks, adds up to the same loss and gradient.

    Args:
        mask: Bool, of any shape: trained tokens.
        loss_agg: See `aggregate`.
        tokens: Number of trained tokens of the full batch.
        seqs: Number of sequences of the full batch with a trained token.
        seq_tokens: Number of trained tokens of each token's sequence, in a shape that broadcasts to `mask`.
        length: Constant by which "seq-mean-token-sum-norm" divides: the tokens that a sequence may have (Dr. GRPO, Liu et al.
            2025).
        dtype: Dtype of the result.

    Returns:
        In the shape of `mask`, 0 where it is False.

    Raises:
        ConfigError: Unknown aggregation.
    """
    trained_mask = mask.to(dtype)
    if loss_agg == "token-sum":
        return trained_mask
    if loss_agg == "token-mean":
        return trained_mask / _at_least_one(tokens)
    if loss_agg not in AGGREGATIONS:
        raise ConfigError(f"algorithm.loss_agg is {loss_agg!r}; allowed: {', '.join(AGGREGATIONS)}")
    sequence_weights = trained_mask / _at_least_one(seqs)
    if loss_agg == "seq-mean-token-mean":
        return sequence_weights / seq_tokens.clamp(min=1)
    return sequence_weights / length if loss_agg == "seq-mean-token-sum-norm" else sequence_weights


def _at_least_one(divisor: float | Tensor) -> float | Tensor:
    return divisor.clamp(min=1) if isinstance(divisor, Tensor) else max(divisor, 1.0)


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    loss_agg: str,
    *,
    global_tokens: float | Tensor | None = None,
    global_seqs: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Reduces a per-token loss to a scalar.

    Args:
        per_token: `[B, T]`.
        mask: `[B, T]` bool.
        loss_agg: "token-mean" (over all valid tokens), "token-sum", "seq-mean-token-mean" (rows without a valid token do not
            count), "seq-mean-token-sum", "seq-mean-token-sum-norm" (÷ T width too).
        global_tokens: Number of valid tokens of the global batch; by default of this batch.
        global_seqs: Number of rows with a valid token in the global batch; by default of this batch.
        weights: `[B, T]`, `token_weights` of the global batch, which replace `loss_agg`, `global_tokens` and `global_seqs`.
            Required if rows are parts of sequences, or batches have different widths.

    Returns:
        Scalar; the losses of the parts of a split batch add up to the loss of the complete batch.
    """
    if weights is None:
        row_token_counts = mask.sum(1, keepdim=True)
        weights = token_weights(
            mask,
            loss_agg,
            tokens=row_token_counts.sum() if global_tokens is None else global_tokens,
            seqs=(row_token_counts > 0).sum() if global_seqs is None else global_seqs,
            seq_tokens=row_token_counts,
            length=per_token.shape[1],
            dtype=per_token.dtype,
        )
    return (per_token.masked_fill(~mask, 0) * weights).sum()


def policy_loss(
    loss_type: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
    loss_agg: str = "token-mean",
    rollout_logprobs: Tensor | None = None,
    tis_cap: float | None = None,
    corrections: Sequence[Correction] = (),
    global_tokens: float | Tensor | None = None,
    global_seqs: float | Tensor | None = None,
    weights: Tensor | None = None,
    **kw: Any,
) -> tuple[Tensor, Metrics]:
    """Computes a registered policy loss, aggregated.

    Args:
        loss_type: "ppo" (alias "actor", "actor_critic"), "gspo", "cispo", "decoupled_ppo", or any registered name.
        logprobs, old_logprobs, advantages: `[B, T]`; `old_logprobs` is the behaviour policy's.
        loss_mask: `[B, T]` bool.
        clip_ratio_low, clip_ratio_high: ε below and above 1 (clip-higher, DAPO).
        clip_ratio_c: Dual clip's c > 1 (Ye et al. 2020); None is off.
        loss_agg: See `aggregate`.
        rollout_logprobs: `[B, T]` of the rollout engine; None has no correction.
        tis_cap: Cap of the correction `token_tis`; None is off.
        corrections: Further corrections (`rlhpc.algorithms.corrections`). Rejected tokens count in all denominators.
        global_tokens, global_seqs, weights: See `aggregate`.

    Returns:
        (scalar loss, metrics as detached scalars).
    """
    mask = loss_mask.bool()
    # A rollout engine's NaN or -inf at masked-out positions must not reach the gradient: 0 * NaN is NaN.
    old_logprobs = torch.where(mask, old_logprobs, logprobs.detach())
    if rollout_logprobs is not None:
        rollout_logprobs = torch.where(mask, rollout_logprobs, old_logprobs)
    if kw.get("proximal_logprobs") is not None:
        kw["proximal_logprobs"] = torch.where(mask, kw["proximal_logprobs"], old_logprobs)
    per_token, metrics = POLICY_LOSSES.find(loss_type)(
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c, **kw,
    )  # fmt: skip
    if rollout_logprobs is not None and (tis_cap is not None or corrections):
        from rlhpc.algorithms.correction_types import TokenTruncation
        from rlhpc.algorithms.corrections import WEIGHT, CorrectionInputs, apply_corrections

        proximal_logprobs = kw.get("proximal_logprobs")
        trainer_logprobs = old_logprobs if proximal_logprobs is None else proximal_logprobs
        truncation = () if tis_cap is None else (TokenTruncation(tis_cap),)
        per_token, correction_metrics = apply_corrections(
            per_token, (*truncation, *corrections),
            CorrectionInputs.from_logprobs(logprobs, trainer_logprobs, rollout_logprobs, advantages, mask),
        )  # fmt: skip
        metrics |= correction_metrics
        if truncation:
            metrics["tis_weight"] = correction_metrics[WEIGHT]
    token_counts: dict[str, Any] = {"global_tokens": global_tokens, "global_seqs": global_seqs, "weights": weights}
    return aggregate(per_token, mask, loss_agg, **token_counts), metrics


def _compute_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def _masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x.detach() * mask).sum() / mask.sum().clamp(min=1)


def _compute_ratio_metrics(log_ratio: Tensor, ratio: Tensor, is_clipped: Tensor, mask: Tensor) -> Metrics:
    """Returns the k3 estimate of KL(old ‖ new), the fraction of clipped positions and the mean ratio."""
    with torch.no_grad():
        columns = torch.stack([(ratio - 1) - log_ratio, is_clipped.to(ratio.dtype), ratio]).masked_fill(~mask, 0)
        means = columns.flatten(1).sum(1) / mask.sum().clamp(min=1)
        return {"approx_kl": means[0], "clip_fraction": means[1], "ratio": means[2]}


def _compute_clipped_loss(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, low_ratio: float, high_ratio: float, c: float | None
) -> tuple[Tensor, Metrics]:
    log_ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped_loss, clipped_loss = -advantages * ratio, -advantages * ratio.clamp(1 - low_ratio, 1 + high_ratio)
    loss = torch.max(unclipped_loss, clipped_loss)
    is_clipped = clipped_loss > unclipped_loss
    if c is not None:
        if c <= 1:
            raise ConfigError(f"algorithm.clip_ratio_c is {c}; dual clip needs a value above 1, such as 3")
        dual_clip_bound = -advantages * c
        negative = advantages < 0
        is_clipped = is_clipped | (negative & (dual_clip_bound < loss))
        loss = torch.where(negative, torch.min(loss, dual_clip_bound), loss)
    return loss, _compute_ratio_metrics(log_ratio, ratio, is_clipped, mask)


def ppo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    **_: Any,
) -> tuple[Tensor, Metrics]:
    """Computes max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high)) (Schulman et al. 2017); where A < 0, at most −A·c (dual clip, Ye et
    al. 2020)."""
    return _compute_clipped_loss(
        logprobs - old_logprobs, advantages, mask, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )


def gspo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    **_: Any,
) -> tuple[Tensor, Metrics]:
    """Computes the clipped loss of the sequence ratio, exp(mean of valid log-ratios). The gradient flows through the token
    log-probs (GSPO-token, Zheng et al. 2025)."""
    token = (logprobs - old_logprobs).masked_fill(~mask, 0)
    sequence = token.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = sequence.detach() + logprobs - logprobs.detach()
    return _compute_clipped_loss(log_ratio, advantages, mask, clip_ratio_low, clip_ratio_high, clip_ratio_c)


def cispo(
    *, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_ratio_high: float, **_: Any
) -> tuple[Tensor, Metrics]:
    """Computes −sg(min(r, 1+ε_high))·A·logp (MiniMax-M1 2025): every token keeps a gradient with a bounded weight."""
    log_ratio = (logprobs - old_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    ratio = log_ratio.exp().detach()
    loss = -ratio.clamp(max=1 + clip_ratio_high) * advantages * logprobs
    return loss, _compute_ratio_metrics(log_ratio, ratio, ratio > 1 + clip_ratio_high, mask)


def decoupled_ppo(
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
    proximal_logprobs: Tensor | None = None,
    behave_weight_cap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Metrics]:
    """Computes the PPO loss clipped around the proximal policy, times the ratio of proximal to behaviour policy, which is
    detached and capped (Hilton et al. 2022; AReaL 2025).

    Raises:
        ConfigError: `proximal_logprobs` is None.
    """
    if proximal_logprobs is None:
        raise ConfigError(
            "loss_type 'decoupled_ppo' needs proximal_logprobs beside old_logprobs (the behaviour policy's)"
        )
    log_ratio = logprobs - proximal_logprobs
    loss, metrics = _compute_clipped_loss(log_ratio, advantages, mask, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    weight = _compute_ratio(proximal_logprobs - old_logprobs).detach()
    if behave_weight_cap is not None:
        weight = weight.clamp(max=behave_weight_cap)
    metrics["behave_weight"] = _masked_mean(weight, mask)
    return loss * weight, metrics


def _compute_doubled_huber(error: Tensor, delta: float | None) -> Tensor:
    """Returns twice the Huber loss of each error; without `delta`, the squared error."""
    squared_error = error**2
    if delta is None:
        return squared_error
    magnitude = error.abs()
    return torch.where(magnitude < delta, squared_error, delta * (2 * magnitude - delta))


def value_loss(
    *,
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    old_values: Tensor | None = None,
    value_clip: float | None = None,
    huber_delta: float | None = None,
    loss_agg: str = "token-mean",
    global_tokens: float | Tensor | None = None,
    global_seqs: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Computes max(l(v−R), l(clip(v, v_old±c)−R)), masked (PPO's implementation by Dhariwal et al.; CleanRL).

    Args:
        values, returns, old_values: `[B, T]`.
        loss_mask: `[B, T]` bool.
        value_clip: c; None does not clip.
        huber_delta: δ of the Huber loss, l(e) = ½·e² up to |e| = δ, and δ·(|e| − ½·δ) beyond; None is l(e) = ½·e².

    Raises:
        ConfigError: `value_clip` is set without `old_values`.
    """
    mask = loss_mask.bool()
    error = _compute_doubled_huber(values - returns, huber_delta)
    metrics: Metrics = {}
    if value_clip is not None:
        if old_values is None:
            raise ConfigError("value_clip needs old_values")
        clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
        clipped_error = _compute_doubled_huber(clipped_values - returns, huber_delta)
        # Within the range, old + (v - old) differs from v by rounding alone.
        is_outside = (values - old_values).abs() > value_clip
        metrics["value_clip_fraction"] = _masked_mean((is_outside & (clipped_error > error)).to(error.dtype), mask)
        error = torch.max(error, clipped_error)
    token_counts: dict[str, Any] = {"global_tokens": global_tokens, "global_seqs": global_seqs, "weights": weights}
    return aggregate(0.5 * error, mask, loss_agg, **token_counts), metrics


def entropy_loss(entropy: Tensor, loss_mask: Tensor, loss_agg: str = "token-mean", **counts: Any) -> Tensor:
    """Aggregates the entropy `[B, T]` like the policy loss; the caller subtracts it, times its coefficient, from the loss."""
    return aggregate(entropy, loss_mask.bool(), loss_agg, **counts)


def _compute_k3(log_ratio: Tensor) -> Tensor:
    reverse_log_ratio = (-log_ratio).clamp(-20, 20)
    return reverse_log_ratio.exp() - reverse_log_ratio - 1


_KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio, "k2": lambda log_ratio: log_ratio.square() / 2, "k3": _compute_k3, "abs": torch.abs
}  # fmt: skip
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Estimates KL(policy ‖ reference) from samples of the policy.

    Args:
        logprobs: `[B, T]` of the policy.
        ref_logprobs: `[B, T]` of the reference. The order matters: k1 and k3 are not symmetric.
        kind: "k1" = logp − ref (alias kl); "k2" = k1²/2 (mse); "k3" = exp(−k1) + k1 − 1 (low_var_kl); "abs" = |k1|.

    Returns:
        `[B, T]`.

    Raises:
        ConfigError: Unknown kind.
    """
    name = _ALIASES.get(kind.lower(), kind.lower())
    if name not in _KL_ESTIMATORS:
        raise ConfigError(f"kl_penalty is {kind!r}; allowed: k1 (kl), k2 (mse), k3 (low_var_kl), abs")
    return _KL_ESTIMATORS[name](logprobs - ref_logprobs)
