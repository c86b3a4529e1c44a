"""Losses of reward models. Each function returns one loss per pair or per response, so that the losses of any split
into micro-batches and ranks add up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhpc.algorithms.registry import REWARD_LOSSES
from rlhpc.config.options import check_options
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.key_metadata import NOT_NEGATIVE

#: Forms of a loss, by the names of its first arguments.
FORMS = {"pairs": ("chosen", "rejected", "margins"), "labels": ("scores", "labels")}


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margins: Tensor, *, centering: Annotated[float, NOT_NEGATIVE] = 0.0
) -> Tensor:
    """Computes the negative log-likelihood of preferences under Bradley and Terry's model (1952): −log σ(r_c − r_r − margin).

    This loss depends on the difference of the rewards alone, so their zero is arbitrary. The term centering · (r_c + r_r)²
    pulls the mean of the two rewards to 0 (Eisenstein et al. 2023).

    Args:
        chosen, rejected: `[P]` rewards of each pair's two responses.
        margins: `[P]`, required lead of the chosen response; 0 if unknown.
        centering: Weight of the centering term.

    Returns:
        `[P]`.
    """
    losses = -logsigmoid(chosen - rejected - margins)
    return losses + centering * (chosen + rejected).square() if centering else losses


def regression(scores: Tensor, labels: Tensor) -> Tensor:
    """Computes the squared error of the rewards `[N]` against labels `[N]`."""
    return torch.square(scores - labels)


def find_reward_loss(name: str, kwargs: Mapping[str, Any] | None = None) -> tuple[Callable[..., Tensor], str]:
    """Returns the loss of `algorithm.loss_type`, with `algorithm.loss_kwargs`.

    Returns:
        The function, and its form: "pairs" (called with chosen, rejected, margins) or "labels" (scores, labels).

    Raises:
        ConfigError: The name is unknown, the function has neither form, or it does not accept these arguments.
    """
    function = REWARD_LOSSES.find(name)
    try:
        parameters = list(inspect.signature(function).parameters)
    except ValueError:  # some C functions have no signature
        parameters = ["…"]
    matching_forms = [
        form for form, required_names in FORMS.items() if parameters[: len(required_names)] == list(required_names)
    ]
    if not matching_forms:
        signatures_text = " or ".join(f"({', '.join(form_names)})" for form_names in FORMS.values())
        raise ConfigError(
            f"{REWARD_LOSSES.key} is {name!r}, a function of ({', '.join(parameters)}); a reward model's loss is one of "
            f"{signatures_text}, and options after them"
        )
    num_tensors = len(FORMS[matching_forms[0]])
    options = check_options(function, kwargs or {}, "algorithm.loss_kwargs", f"loss {name}", num_tensors)
    return partial(function, **options), matching_forms[0]


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Computes the loss of each pair from h = chosen − rejected.

    `sigmoid` (Rafailov et al. 2023): −(1 − ε) log σ(β h) − ε log σ(−β h), where ε is `label_smoothing`, the probability that
    the two completions of a pair are swapped (conservative DPO, Mitchell 2023). `ipo` (Azar et al. 2023): (h − 1 / (2 β))².

    Args:
        chosen, rejected: `[P]`: log π(y | x) − log π_ref(y | x) of the two completions of each
            pair. For `sigmoid` these are sums over the tokens of a completion, for `ipo` means.
        beta: Strength of the pull towards the reference.
        loss_type: `sigmoid` or `ipo`.
        label_smoothing: ε, from 0 to below 0.5; `ipo` ignores it.

    Returns:
        `[P]`.
    """
    log_ratio_gap = chosen - rejected
    if loss_type == "ipo":
        return (log_ratio_gap - 1 / (2 * beta)).square()
    losses = -(1 - label_smoothing) * logsigmoid(beta * log_ratio_gap)
    return losses - label_smoothing * logsigmoid(-beta * log_ratio_gap) if label_smoothing else losses
