"""Corrections of `algorithm.corrections`: truncation, masking and rejection by importance ratios.

Notation: w_t = π_old(t) / μ(t) of a token, ∏ w_t of a sequence y with |y| trained tokens, 1[…] is 1 if the condition holds and
otherwise 0. `rlhpc.algorithms.corrections` has the rule for denominators, and the limits of log w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from rlhpc.algorithms.corrections import Correction, CorrectionFactors, CorrectionInputs
from rlhpc.runtime.key_metadata import FRACTION, NOT_NEGATIVE, POSITIVE, Choices, Range

if TYPE_CHECKING:
    from torch import Tensor


def _check_bounds(lower_bound: float | None, upper_bound: float | None) -> None:
    """Raises a ValueError if an interval is empty."""
    if lower_bound is not None and upper_bound is not None and lower_bound > upper_bound:
        raise ValueError(f"low is {lower_bound:g}; it must not be above high ({upper_bound:g})")


@dataclass(frozen=True)
class TokenTruncation(Correction):
    """Truncated importance sampling of tokens: weight min(w_t, cap) (Ionides 2008; for rollout engines Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", fengyao.notion.site/off-policy-rl).

    verl: `rollout_is: token`. `algorithm.tis_cap` is this correction.
    """

    weighs: ClassVar[bool] = True
    cap: Annotated[float, POSITIVE] = 2.0
    """Largest weight of a token."""

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Returns min(w_t, cap)."""
        return _truncate_weights(inputs.weights(), self.cap)


@dataclass(frozen=True)
class SequenceTruncation(Correction):
    """Truncated importance sampling of sequences: weight min(∏ w_t, cap) for each token of the sequence (Liu, Li et al. 2025,
    "When Speed Kills Stability", richardli.xyz/rl-collapse).

    verl: `rollout_is: sequence`.
    """

    weighs: ClassVar[bool] = True
    cap: Annotated[float, POSITIVE] = 2.0
    """Largest weight of a sequence."""

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Returns min(∏ w_t, cap)."""
        return _truncate_weights(inputs.sequence_weights(), self.cap)


def _truncate_weights(weight: Tensor, cap: float) -> CorrectionFactors:
    return CorrectionFactors(weight=weight.clamp(max=cap), clipped=weight > cap)


@dataclass(frozen=True)
class SequenceMasking(Correction):
    """Masked importance sampling of sequences: weight ∏ w_t · 1[∏ w_t ≤ cap] (Liu, Li et al. 2025, "When Speed Kills
    Stability", richardli.xyz/rl-collapse-3).

    verl: `rollout_is: sequence` with `rollout_rs: seq_sum_k1`.
    """

    weighs: ClassVar[bool] = True
    cap: Annotated[float, POSITIVE] = 2.0
    """Weight above which a sequence is rejected."""

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Returns ∏ w_t, and rejects sequences above the cap."""
        weight = inputs.sequence_weights()
        return CorrectionFactors(weight=weight, keep=~(weight > self.cap))


@dataclass(frozen=True)
class IcePop(Correction):
    """IcePop: weight w_t · 1[low ≤ w_t ≤ high] (Ling team 2025, "Every Step Evolves", arXiv:2510.18855, which has 0.5 and 5).

    verl: `rollout_is: token` with two thresholds.
    """

    weighs: ClassVar[bool] = True
    low: Annotated[float, NOT_NEGATIVE] = 0.5
    """Smallest weight of a token that is kept."""
    high: Annotated[float, POSITIVE] = 5.0
    """Largest weight of a token that is kept."""

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Returns w_t, and rejects tokens outside the bounds."""
        weight = inputs.weights()
        return CorrectionFactors(weight=weight, keep=_is_between(weight, self.low, self.high))


def _is_between(ratios: Tensor, lower_bound: float | None, upper_bound: float | None) -> Tensor:
    """Returns whether values are within the bounds; None is no bound, and NaN is within."""
    lowest_ratio, highest = (
        (-math.inf if lower_bound is None else lower_bound),
        (math.inf if upper_bound is None else upper_bound),
    )
    return ~(ratios < lowest_ratio) & ~(ratios > highest)


@dataclass(frozen=True)
class TokenRejection(Correction):
    """Rejection of tokens: 1[low ≤ w_t ≤ high], without a weight (the mask of AReaL's decoupled loss, arXiv:2505.24298, and of
    RLinf's `behave_weight_threshold`).

    verl: `rollout_rs: token_k1`, whose bounds are of 1 / w_t. `algorithm.behave_weight_threshold` of embodied runs is `high`.
    """

    low: Annotated[float | None, NOT_NEGATIVE] = None
    """Smallest ratio of a token that is kept; null has no bound."""
    high: Annotated[float | None, POSITIVE] = 2.0
    """Largest ratio of a token that is kept; null has no bound."""

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Rejects tokens outside the bounds."""
        return CorrectionFactors(keep=self.keeps(inputs.weights()))

    def keeps(self, ratios: Tensor) -> Tensor:
        """Returns whether tokens with these ratios are kept."""
        return _is_between(ratios, self.low, self.high)


@dataclass(frozen=True)
class GeometricRejection(Correction):
    """Geometric rejection of sequences: 1[low ≤ (∏ w_t)^(1/|y|) ≤ high] (Liu, Li et al. 2025, "When Speed Kills
    Stability", richardli.xyz/rl-collapse-3; Li et al. 2025, "Trust Region Masking", arXiv:2512.23075).

    The mean over the tokens does not depend on the length, unlike ∏ w_t. verl: `rollout_rs: seq_mean_k1`, whose bounds are of
    the inverse.
    """

    low: Annotated[float, NOT_NEGATIVE] = 0.999
    """Smallest geometric mean of a sequence that is kept."""
    high: Annotated[float, POSITIVE] = 1.001
    """Largest geometric mean of a sequence that is kept."""

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Rejects sequences outside the bounds."""
        return CorrectionFactors(keep=_is_between(inputs.sequence_mean(inputs.log_ratio).exp(), self.low, self.high))


@dataclass(frozen=True)
class DivergenceRejection(Correction):
    """Rejection of sequences by an estimate of their divergence: 1[mean_t d_t ≤ threshold], or max_t.

    d_t estimates KL(μ ‖ π_old) from the sampled token (Schulman 2020, "Approximating KL Divergence"): k2 is ½ (log w_t)²,
    and k3 is w_t − 1 − log w_t, which has no bias (Li et al. 2025, "Trust Region Masking", arXiv:2512.23075). verl:
    `rollout_rs: seq_mean_k2`, `seq_mean_k3`, `seq_max_k2`, `seq_max_k3`.
    """

    threshold: Annotated[float, POSITIVE] = 0.01
    """Largest divergence of a sequence that is kept, in nats per token."""
    over: Annotated[str, Choices("mean", "max")] = "mean"
    """Reduction over a sequence's tokens: mean or max."""

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Rejects sequences above the threshold."""
        reduce = inputs.sequence_mean if self.over == "mean" else inputs.sequence_max
        return CorrectionFactors(keep=~(reduce(self.divergence(inputs.log_ratio)) > self.threshold))

    def divergence(self, log_ratio: Tensor) -> Tensor:
        """Returns the divergence d_t of each token, `[B, T]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class K2Rejection(DivergenceRejection):
    """Rejection of sequences by k2 = ½ (log w_t)² (`DivergenceRejection`)."""

    def divergence(self, log_ratio: Tensor) -> Tensor:
        """Returns ½ (log w_t)²."""
        return log_ratio.square() / 2


@dataclass(frozen=True)
class K3Rejection(DivergenceRejection):
    """Rejection of sequences by k3 = w_t − 1 − log w_t (`DivergenceRejection`)."""

    def divergence(self, log_ratio: Tensor) -> Tensor:
        """Returns w_t − 1 − log w_t."""
        return log_ratio.expm1() - log_ratio


@dataclass(frozen=True)
class BinaryTV(Correction):
    """Binary total variation of DPPO: rejects tokens that the policy π has already moved too far in the advantage's direction.

    Rejects a token if A > 0 and π − μ > high, or if A < 0 and π − μ < −low, where π and μ are the token's probabilities: the
    total variation of the two distributions over "this token" and "any other" (Qi et al. 2026, "Rethinking the Trust Region in
    LLM Reinforcement Learning", arXiv:2602.04879). The penalty tau · (log π − log μ)² is that of Kimi K2.5 (arXiv:2602.02276),
    and prime-rl adds it to the same mask; it applies to all trained tokens.

    The paper's loss has no clip: raise `algorithm.clip_ratio_low` and `algorithm.clip_ratio_high`.
    """

    recomputes: ClassVar[bool] = False
    low: Annotated[float, FRACTION] = 0.2
    """Largest decrease of a token's probability."""
    high: Annotated[float, FRACTION] = 0.2
    """Largest increase of a token's probability."""
    tau: Annotated[float, Range(0)] = 0.0
    """Weight of the squared log-ratio of π to μ; 0 is off, and prime-rl has 0.001."""

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Rejects tokens, and returns the penalty."""
        log_ratio = (inputs.logprobs - inputs.rollout_logprobs).masked_fill(~inputs.mask, 0)
        probability_change = (inputs.logprobs.detach().exp() - inputs.rollout_logprobs.exp()).masked_fill(
            ~inputs.mask, 0
        )
        is_rejected = ((inputs.advantages > 0) & (probability_change > self.high)) | (
            (inputs.advantages < 0) & (probability_change < -self.low)
        )
        penalty = self.tau * log_ratio.clamp(-20.0, 20.0).square() if self.tau else None
        return CorrectionFactors(keep=~is_rejected, penalty=penalty)
