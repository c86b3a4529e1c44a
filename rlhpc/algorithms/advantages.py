"""Advantage estimators. All tensors are batch first, `[B, T]`: sequences or environment slots by tokens or steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhpc.algorithms.registry import ADVANTAGES
from rlhpc.runtime.errors import ConfigError

_Reduce = Callable[[Tensor], Tensor]
#: Relative tolerance within which the outcomes of a group count as equal.
_ROUNDING = 1e-6


def calculate_adv_and_returns(
    adv_type: str,
    *,
    rewards: Tensor,
    values: Tensor | None = None,
    next_values: Tensor | None = None,
    terminations: Tensor | None = None,
    truncations: Tensor | None = None,
    loss_mask: Tensor | None = None,
    group_ids: Tensor | None = None,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    normalize: bool = False,
    all_reduce: _Reduce | None = None,
    members: Tensor | None = None,
    **kw: Any,
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns by a registered estimator.

    Args:
        adv_type: "gae", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw", or any registered name.
        rewards: `[B, T]` per token or step; estimators on outcomes use their sum over valid positions.
        values: `[B, T]` value estimates (gae).
        next_values: `[B, T]` value of the true next observation: the final one where an episode was truncated. By default
            the value at the next valid position, and 0 after the last.
        terminations, truncations: `[B, T]` bool.
        loss_mask: `[B, T]` bool; None means all valid.
        group_ids: `[B]`, equal for rows with the same prompt; None means one group.
        gamma, gae_lambda: Discount and trace decay.
        normalize: (x − mean) / (std + 1e-8) over the valid entries of the whole batch.
        all_reduce: Sums a tensor over data-parallel ranks, so that means and variances are over the global batch.
        members: `[B]` bool, rows that take part; None means all. The other rows are removed before the estimator runs, so they
            count in no group, mean or variance. A member row without a valid position has the outcome 0.
        **kw: Options of the estimator, such as `norm_by_std` and `kl`, `kl_coef`.

    Returns:
        (advantages, returns), both `[B, T]`, 0 where masked out and in rows that do not take part.

    Raises:
        ConfigError: The estimator is unknown, or shapes do not fit.
    """
    mask = torch.ones_like(rewards, dtype=torch.bool) if loss_mask is None else loss_mask.bool()
    for name, tensor in (("values", values), ("next_values", next_values), ("terminations", terminations),
                         ("truncations", truncations), ("loss_mask", mask)):  # fmt: skip
        if tensor is not None and tensor.shape != rewards.shape:
            raise ConfigError(f"{adv_type}: {name} has shape {tuple(tensor.shape)}, rewards {tuple(rewards.shape)}")
    if group_ids is not None and group_ids.shape != rewards.shape[:1]:
        raise ConfigError(f"{adv_type}: group_ids has shape {tuple(group_ids.shape)}, not ({rewards.shape[0]},)")
    estimator = ADVANTAGES.find(adv_type)
    columns: dict[str, Any] = {
        "rewards": rewards, "values": values, "next_values": next_values, "terminations": terminations,
        "truncations": truncations, "mask": mask, "group_ids": group_ids, **kw,
    }  # fmt: skip
    if members is not None:
        num_rows = len(rewards)
        columns = {name: _select_member_rows(column, members, num_rows) for name, column in columns.items()}
        mask = columns["mask"]
    advantages, returns = estimator(**columns, gamma=gamma, gae_lambda=gae_lambda, all_reduce=all_reduce)
    if normalize:
        advantages = masked_whiten(advantages, mask, all_reduce=all_reduce)
    advantages, returns = advantages.masked_fill(~mask, 0), returns.masked_fill(~mask, 0)
    if members is not None:
        advantages, returns = (
            column.new_zeros(rewards.shape).index_copy(0, torch.nonzero(members).flatten(), column)
            for column in (advantages, returns)
        )
    return advantages, returns


def _select_member_rows(column: Any, members: Tensor, num_rows: int) -> Any:
    """Returns the members' rows of a tensor that has one row per row of the batch; returns other values unchanged."""
    return column[members] if isinstance(column, Tensor) and column.shape[:1] == (num_rows,) else column


def _compute_masked_moments(
    x: Tensor, mask: Tensor, is_unbiased: bool, all_reduce: _Reduce | None
) -> tuple[Tensor, Tensor]:
    """Returns mean and variance over the valid entries, with `all_reduce` over those of all ranks."""
    valid_values = x.masked_fill(~mask, 0)
    sums = torch.stack([mask.sum().to(x.dtype), valid_values.sum()])
    if all_reduce:
        sums = all_reduce(sums)
    num_valid, valid_sum = sums.unbind()
    mean = valid_sum / num_valid.clamp(min=1)
    squares = ((x - mean).masked_fill(~mask, 0) ** 2).sum().reshape(1)
    if all_reduce:
        squares = all_reduce(squares)
    return mean, squares[0] / (num_valid - (1 if is_unbiased else 0)).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8, all_reduce: _Reduce | None = None) -> Tensor:
    """Computes (x − mean) / (std + eps) with mean and unbiased std over the valid entries; with `all_reduce`, over those of
    all ranks."""
    mean, variance = _compute_masked_moments(x, mask, True, all_reduce)
    return (x - mean) / (variance.sqrt() + eps)


def gae(
    *,
    rewards: Tensor,
    values: Tensor | None,
    next_values: Tensor | None,
    terminations: Tensor | None,
    truncations: Tensor | None,
    mask: Tensor,
    gamma: float,
    gae_lambda: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Computes generalized advantage estimates (Schulman et al. 2015, eq. 16; as in CleanRL).

    δ_t = r_t + γ·next_v_t·(1 − terminated_t) − v_t;  A_t = δ_t + γλ·(1 − done_t)·A_{t+1};  returns = A + v, where done is
    terminated or truncated: a truncated step still bootstraps. Masked-out positions are skipped: A and the next
    value carry over them (verl).

    Raises:
        ConfigError: There are no values.
    """
    if values is None:
        raise ConfigError(
            "adv_type 'gae' needs values: give the model a value head, or choose grpo, rloo or reinforce++"
        )
    terminated = torch.zeros_like(mask) if terminations is None else terminations.bool()
    dones = terminated if truncations is None else terminated | truncations.bool()
    if next_values is None:
        following_values = torch.zeros_like(values)
        next_value = torch.zeros_like(values[:, 0])
        for t in range(rewards.shape[1] - 1, -1, -1):
            following_values[:, t] = next_value
            next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_values = following_values
    delta = (rewards + gamma * next_values * (~terminated) - values).masked_fill(~mask, 0)
    decay = torch.where(mask, gamma * gae_lambda * (~dones).to(rewards.dtype), torch.ones_like(rewards))
    # One contiguous tensor per step keeps the two operations of each iteration cheap.
    deltas, decays = delta.t().contiguous().unbind(0), decay.t().contiguous().unbind(0)
    next_advantage = torch.zeros_like(deltas[0])
    columns: list[Tensor] = [next_advantage] * len(deltas)
    for t in range(len(deltas) - 1, -1, -1):
        next_advantage = torch.addcmul(deltas[t], decays[t], next_advantage)
        columns[t] = next_advantage
    advantages = torch.stack(columns, dim=1)
    return advantages, advantages + values


def _outcomes(rewards: Tensor, mask: Tensor) -> Tensor:
    return rewards.masked_fill(~mask, 0).sum(1)


def _groups(group_ids: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a dense group index for each row, and the size of each group."""
    if group_ids is None:
        index = torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device)
    else:
        index = torch.unique(group_ids, return_inverse=True)[1]
    return index, torch.bincount(index).to(rows.dtype)


def _compute_group_mean(scores: Tensor, index: Tensor, group_sizes: Tensor) -> Tensor:
    return torch.zeros_like(group_sizes).index_add_(0, index, scores) / group_sizes


def differs_in_group(scores: Tensor, index: Tensor, count: int, magnitudes: Tensor | None = None) -> Tensor:
    """Returns which rows belong to a group whose scores differ by more than rounding.

    Args:
        scores: `[B]`.
        index: `[B]`, group of each row.
        count: Number of groups.
        magnitudes: `[B]`, sum of the absolute terms of each score, to which its rounding error is proportional; None takes
            the absolute score.

    Returns:
        `[B]` bool.
    """
    sizes = scores.abs() if magnitudes is None else magnitudes
    group_max = scores.new_full((count,), -torch.inf).scatter_reduce(0, index, scores, "amax")
    group_min = scores.new_full((count,), torch.inf).scatter_reduce(0, index, scores, "amin")
    return (group_max - group_min > _ROUNDING * torch.zeros_like(group_max).scatter_reduce(0, index, sizes, "amax"))[
        index
    ]


def grpo(
    *, rewards: Tensor, mask: Tensor, group_ids: Tensor | None, norm_by_std: bool = True, eps: float = 1e-6, **_: Any
) -> tuple[Tensor, Tensor]:
    """Computes group-relative advantages (DeepSeekMath, Shao et al. 2024): (R − mean_g) / (std_g + 1e-6), std unbiased,
    at each valid token of the response. A group of one row or with equal rewards gets 0, because the division would amplify
    the rounding error of the mean. `norm_by_std=False` is Dr. GRPO (Liu et al. 2025)."""
    scores = _outcomes(rewards, mask)
    index, group_sizes = _groups(group_ids, scores)
    centered_scores = scores - _compute_group_mean(scores, index, group_sizes)[index]
    if norm_by_std:
        squared_deviations = torch.zeros_like(group_sizes).index_add_(0, index, centered_scores**2)
        std = (squared_deviations / (group_sizes - 1).clamp(min=1)).sqrt()
        centered_scores = centered_scores / (std[index] + eps)
    has_spread = differs_in_group(scores, index, len(group_sizes), _outcomes(rewards.abs(), mask))
    advantages = centered_scores.masked_fill(~has_spread, 0)[:, None] * mask
    return advantages, advantages.clone()


def dr_grpo(**kw: Any) -> tuple[Tensor, Tensor]:
    """Computes GRPO advantages without the division by the standard deviation (Liu et al. 2025)."""
    return grpo(**{**kw, "norm_by_std": False})


def rloo(*, rewards: Tensor, mask: Tensor, group_ids: Tensor | None, **_: Any) -> tuple[Tensor, Tensor]:
    """Computes advantages with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024): R_i − mean of the other
    rewards. A group of one row or with equal rewards gets 0."""
    scores = _outcomes(rewards, mask)
    index, group_sizes = _groups(group_ids, scores)
    group_size_of_row = group_sizes[index]
    group_total = _compute_group_mean(scores, index, group_sizes)[index] * group_size_of_row
    baseline = (group_total - scores) / (group_size_of_row - 1).clamp(min=1)
    has_spread = differs_in_group(scores, index, len(group_sizes), _outcomes(rewards.abs(), mask))
    advantages = (scores - baseline).masked_fill(~has_spread, 0)[:, None] * mask
    return advantages, advantages.clone()


def _mark_last_valid(mask: Tensor) -> Tensor:
    """Returns a `[B, T]` mask that is True at each row's last valid position; a row without valid positions is all False."""
    token_positions = torch.arange(mask.shape[1], device=mask.device)
    last_positions = torch.where(mask, token_positions, token_positions.new_full((), -1)).amax(1, keepdim=True)
    return (token_positions == last_positions) & mask


def _discount(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Computes the reverse cumulative sum, discounted by γ, over valid positions; skips masked-out positions."""
    returns = torch.zeros_like(rewards)
    discounted_sum = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        discounted_sum = torch.where(mask[:, t], rewards[:, t] + gamma * discounted_sum, discounted_sum)
        returns[:, t] = discounted_sum
    return returns * mask


def reinforce_plus_plus(
    *,
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor | None,
    gamma: float,
    all_reduce: _Reduce | None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    baseline: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Computes REINFORCE++ advantages (Hu 2025, as in OpenRLHF): the reward of each token is −β·KL, plus the outcome R at the
    last valid token. Its reverse cumulative sum with γ is whitened over valid tokens, with the population variance clamped
    at 1e-8."""
    scores = _outcomes(rewards, mask)
    if baseline:
        index, group_sizes = _groups(group_ids, scores)
        scores = scores - _compute_group_mean(scores, index, group_sizes)[index]
    per_token = scores[:, None] * _mark_last_valid(mask)
    if kl is not None:
        per_token = per_token - kl_coef * kl * mask
    returns = _discount(per_token, mask, gamma)
    mean, variance = _compute_masked_moments(returns, mask, False, all_reduce)
    return (returns - mean) * variance.clamp(min=1e-8).rsqrt(), returns


def reinforce_plus_plus_baseline(*, kl: Tensor | None = None, **kw: Any) -> tuple[Tensor, Tensor]:
    """Computes REINFORCE++ advantages with the group mean subtracted from the outcomes."""
    return reinforce_plus_plus(**{**kw, "kl": kl, "baseline": True})


def raw(*, rewards: Tensor, mask: Tensor, gamma: float, **_: Any) -> tuple[Tensor, Tensor]:
    """Computes the discounted return to go, without a baseline (Williams 1992)."""
    returns = _discount(rewards, mask, gamma)
    return returns.clone(), returns


def overlong_penalty(*, lengths: Tensor, max_length: int, buffer: int, **_: Any) -> Tensor:
    """Returns DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), `[B]`.

    The penalty is 0 up to `max_length − buffer`, decreases linearly to −1 at `max_length`, and stays −1 beyond.

    Raises:
        ConfigError: The buffer is below 1.
    """
    if buffer < 1:
        raise ConfigError(f"overlong: buffer is {buffer}; it must be at least 1")
    excess = lengths.to(torch.get_default_dtype()) - (max_length - buffer)
    return -(excess / buffer).clamp(0, 1)


def varied_groups(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Returns `[B]` bool, False for rows of a group with equal rewards, which DAPO drops and refills (Yu et al. 2025)."""
    groups, index = torch.unique(group_ids, return_inverse=True)
    return differs_in_group(scores, index, len(groups))
