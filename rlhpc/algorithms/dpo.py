"""Loss of Direct Preference Optimization, one value a pair, so that any split into micro-batches and ranks adds up."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float, loss_type: str = "sigmoid", label_smoothing: float = 0.0
) -> Tensor:
    """Computes the loss of each pair from h = chosen − rejected.

    `sigmoid` (Rafailov et al. 2023): −(1 − ε) log σ(β h) − ε log σ(−β h), where ε is `label_smoothing`, the probability that
    a pair is the wrong way round (conservative DPO, Mitchell 2023). `ipo` (Azar et al. 2023): (h − 1 / (2 β))².

    Args:
        chosen, rejected: `[P]`: log π(y | x) − log π_ref(y | x) of the two completions of each pair. For `sigmoid` these are
            sums over the tokens of a completion, for `ipo` means.
        beta: How strongly the policy is held to the reference.
        loss_type: `sigmoid` or `ipo`.
        label_smoothing: ε, from 0 to below 0.5; `ipo` does not read it.

    Returns:
        `[P]`.
    """
    difference = chosen - rejected
    if loss_type == "ipo":
        return (difference - 1 / (2 * beta)).square()
    losses = -(1 - label_smoothing) * logsigmoid(beta * difference)
    return losses - label_smoothing * logsigmoid(-beta * difference) if label_smoothing else losses
