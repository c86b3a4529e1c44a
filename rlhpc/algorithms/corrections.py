"""Corrections for the gap between trainer and rollout engine (rollout correction).

The engine samples tokens from a policy μ, and the trainer updates a policy π from the weights π_old. The two differ where
kernels round differently, and where samples are older than the weights (`algorithm.max_staleness`). A correction computes
importance weights or rejects tokens from w_t = π_old(t) / μ(t). The corrections are in `rlhpc.algorithms.correction_types`.

Denominators: a rejected token has the weight 0 in the policy loss, but it still counts in every mean, with every
correction. So a rejection never makes the remaining tokens heavier, a micro-batch needs no count of other ones, and the loss
remains the importance-weighted mean over the tokens that were sampled. Penalties, such as that of `binary_tv`, and the KL to
the reference also apply to rejected tokens.

A sequence is one row: one sample, as in GSPO. A token's log w is limited to ±20, and so is the sum of a sequence before `exp`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlhpc.algorithms.registry import CORRECTION_OPTIONS, CORRECTIONS
from rlhpc.config.options import check_options, read_options
from rlhpc.config.typed import plain
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:  # torch is not necessary to check a configuration
    from torch import Tensor

#: Limit of |log w|, of a token and of a sequence.
LOG_RATIO_LIMIT = 20.0
#: Names of the metrics, as means over the trained tokens.
WEIGHT, WEIGHT_SQUARED, DROPPED, CLIPPED = (
    "correction_weight", "correction_weight_squared", "correction_dropped", "correction_clipped",
)  # fmt: skip
#: Name of the effective sample size, (Σ w)² / (n Σ w²) over n trained tokens.
SAMPLE_SIZE = "correction_ess"


@dataclass(frozen=True)
class CorrectionInputs:
    """Log-probs of a batch, `[B, T]`, with a sequence per row.

    Attributes:
        log_ratio: log w, within ±`LOG_RATIO_LIMIT`, 0 where `mask` is False; without a gradient.
        logprobs: Log-probs of the policy π that is updated, with gradient.
        rollout_logprobs: Log-probs of μ.
        advantages: Advantages.
        mask: Bool, the trained tokens.
    """

    log_ratio: Tensor
    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def from_logprobs(
        cls, logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> CorrectionInputs:
        """Returns the inputs for log-probs of π, of π_old and of μ."""
        log_ratio = (old_logprobs - rollout_logprobs).detach().masked_fill(~mask, 0)
        return cls(_clamp_log_ratio(log_ratio), logprobs, rollout_logprobs.detach(), advantages, mask)

    def weights(self) -> Tensor:
        """Returns w_t, `[B, T]`."""
        return self.log_ratio.exp()

    def sequence_weights(self) -> Tensor:
        """Returns ∏ w_t over the trained tokens of each sequence, `[B, 1]`."""
        return _clamp_log_ratio(self.log_ratio.sum(1, keepdim=True)).exp()

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Returns the mean of `[B, T]` over the trained tokens of each sequence, `[B, 1]`; 0 if it has none."""
        return values.masked_fill(~self.mask, 0).sum(1, keepdim=True) / self.mask.sum(1, keepdim=True).clamp(min=1)

    def sequence_max(self, values: Tensor) -> Tensor:
        """Returns the maximum of non-negative values `[B, T]` over the trained tokens of each sequence, `[B, 1]`."""
        return values.masked_fill(~self.mask, 0).amax(1, keepdim=True) if values.shape[1] else values.sum(1, True)


def _clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class CorrectionFactors:
    """Result of a correction; each tensor has the shape `[B, T]` or `[B, 1]`.

    Attributes:
        weight: Importance weight, without a gradient; None means 1.
        keep: Bool, False for rejected tokens; None keeps all.
        clipped: Bool, True where the weight was limited; None means nowhere.
        penalty: Addition to each token's loss, with gradient; None means 0.
    """

    weight: Tensor | None = None
    keep: Tensor | None = None
    clipped: Tensor | None = None
    penalty: Tensor | None = None


class Correction(abc.ABC):
    """Correction of `algorithm.corrections`. Its fields are the correction's options (`algorithm.corrections[].kwargs`).

    Attributes:
        weighs: Whether it returns importance weights. A list may have one such correction, because a product of two would
            weigh the same ratio twice.
        recomputes: Whether it compares π_old with μ, so that it requires `algorithm.recompute_logprobs`.
    """

    weighs: ClassVar[bool] = False
    recomputes: ClassVar[bool] = True

    @abc.abstractmethod
    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        """Returns the importance weights, the tokens to keep and the penalties of a batch."""


def apply_corrections(
    per_token: Tensor, corrections: Sequence[Correction], inputs: CorrectionInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Multiplies a loss per token by the weights of the corrections, sets it to 0 where one rejects, and adds penalties.

    A NaN among the log-ratios of trained tokens gives a NaN loss, even if the correction would only reject tokens.

    Args:
        per_token: `[B, T]`, the policy loss.
        corrections: The corrections; their order does not matter.
        inputs: Log-probs of the same tokens.

    Returns:
        `[B, T]`, and metrics as means over the trained tokens: weight (0 where rejected), its square, and the shares of
        rejected and of clipped tokens.
    """
    mask = inputs.mask
    weight, keep, is_clipped = per_token.new_ones(per_token.shape), mask, ~mask & mask
    penalties: list[Tensor] = []
    for correction in corrections:
        correction_factors = correction.factors(inputs)
        weight = weight if correction_factors.weight is None else weight * correction_factors.weight
        keep = keep if correction_factors.keep is None else keep & correction_factors.keep
        is_clipped = (
            is_clipped if correction_factors.clipped is None else is_clipped | (correction_factors.clipped & mask)
        )
        if correction_factors.penalty is not None:
            penalties.append(correction_factors.penalty)
    weight = weight.masked_fill(~keep, 0) + inputs.log_ratio * 0  # adds nothing but NaN
    corrected_weight = per_token * weight
    for penalty in penalties:
        corrected_weight = corrected_weight + penalty
    columns = {WEIGHT: weight, WEIGHT_SQUARED: weight.square(), DROPPED: ~keep & mask, CLIPPED: is_clipped}
    return corrected_weight, {
        name: _compute_masked_mean(column.to(weight.dtype), mask) for name, column in columns.items()
    }


def _compute_masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.detach().masked_fill(~mask, 0).sum() / mask.sum().clamp(min=1)


def with_sample_size(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replaces each mean of squared weights by the effective sample size, as a share of the trained tokens.

    Args:
        metrics: Means over the trained tokens of all micro-batches and ranks, whose names may have a prefix.
    """
    summary = dict(metrics)
    for name in metrics:
        if name.endswith(WEIGHT_SQUARED):
            prefix, squared_mean = name.removesuffix(WEIGHT_SQUARED), summary.pop(name)
            summary[prefix + SAMPLE_SIZE] = metrics[prefix + WEIGHT] ** 2 / squared_mean if squared_mean else 0.0
    return summary


def make_corrections(sections: Sequence[Any], key: str = "algorithm.corrections") -> list[Correction]:
    """Builds the corrections of `algorithm.corrections`.

    Raises:
        ConfigError: A name or an option is wrong, or two corrections weigh the same ratio.
    """
    corrections: list[Correction] = []
    for index, section in enumerate(sections):
        correction_class: Any = CORRECTIONS.find(section.name, f"{key}[{index}].name")
        options_key, component = f"{key}[{index}].kwargs", f"the correction {section.name}"
        if str(section.name).lower() in CORRECTION_OPTIONS:
            correction: Any = read_options(correction_class, section.kwargs, options_key, component)
        else:
            correction = correction_class(
                **check_options(correction_class, plain(section.kwargs), options_key, component)
            )
        if not isinstance(correction, Correction):
            raise ConfigError(
                f"{key}[{index}].name is {section.name!r}, which is no subclass of rlhpc.algorithms.corrections.Correction"
            )
        corrections.append(correction)
    weighing_names = [
        section.name for section, correction in zip(sections, corrections, strict=True) if correction.weighs
    ]
    if len(weighing_names) > 1:
        raise ConfigError(
            f"{key} has {' and '.join(weighing_names)}, which would weigh the same importance ratio twice; take only one of "
            "them, together with corrections that only reject, such as geometric"
        )
    return corrections
