"""Each correction against its formula, written token by token for single numbers: random masks, lengths and extreme ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from rlhpc.algorithms import policy_loss
from rlhpc.algorithms.correction_types import (
    BinaryTV,
    GeometricRejection,
    IcePop,
    K2Rejection,
    K3Rejection,
    SequenceMasking,
    SequenceTruncation,
    TokenRejection,
    TokenTruncation,
)
from rlhpc.algorithms.corrections import Correction, CorrectionInputs, apply_corrections
from rlhpc.algorithms.registry import CORRECTIONS
from rlhpc.runtime.plugins import import_attribute

#: A sequence: (log π, log π_old, log μ, A) of each trained token.
Tokens = Sequence[tuple[float, float, float, float]]
#: Returns weight and whether it is kept, of each token.
Reference = Callable[[Tokens], list[tuple[float, bool]]]


def ratio(old: float, rollout: float) -> float:
    return math.exp(min(max(old - rollout, -20), 20))


def product(sequence: Tokens) -> float:
    total = sum(min(max(old - rollout, -20.0), 20.0) for _, old, rollout, _ in sequence)
    return math.exp(min(max(total, -20), 20))


def token_tis(sequence: Tokens) -> list[tuple[float, bool]]:
    return [(min(ratio(old, rollout), 1.5), True) for _, old, rollout, _ in sequence]


def sequence_tis(sequence: Tokens) -> list[tuple[float, bool]]:
    return [(min(product(sequence), 1.5), True)] * len(sequence)


def sequence_mis(sequence: Tokens) -> list[tuple[float, bool]]:
    return [(product(sequence), product(sequence) <= 1.5)] * len(sequence)


def icepop(sequence: Tokens) -> list[tuple[float, bool]]:
    weights = [ratio(old, rollout) for _, old, rollout, _ in sequence]
    return [(weight, 0.6 <= weight <= 1.8) for weight in weights]


def token_rejection(sequence: Tokens) -> list[tuple[float, bool]]:
    return [(1.0, 0.6 <= ratio(old, rollout) <= 1.8) for _, old, rollout, _ in sequence]


def geometric(sequence: Tokens) -> list[tuple[float, bool]]:
    root = math.prod(ratio(old, rollout) ** (1 / len(sequence)) for _, old, rollout, _ in sequence)
    return [(1.0, 0.8 <= root <= 1.25)] * len(sequence)


def k2(sequence: Tokens) -> list[tuple[float, bool]]:
    mean = sum(math.log(ratio(old, rollout)) ** 2 / 2 for _, old, rollout, _ in sequence) / len(sequence)
    return [(1.0, mean <= 0.1)] * len(sequence)


def k2_max(sequence: Tokens) -> list[tuple[float, bool]]:
    most = max(math.log(ratio(old, rollout)) ** 2 / 2 for _, old, rollout, _ in sequence)
    return [(1.0, most <= 0.3)] * len(sequence)


def k3_of(w: float) -> float:
    return w - 1 - math.log(w)


def k3(sequence: Tokens) -> list[tuple[float, bool]]:
    mean = sum(k3_of(ratio(old, rollout)) for _, old, rollout, _ in sequence) / len(sequence)
    return [(1.0, mean <= 0.1)] * len(sequence)


def k3_max(sequence: Tokens) -> list[tuple[float, bool]]:
    return [(1.0, max(k3_of(ratio(old, rollout)) for _, old, rollout, _ in sequence) <= 0.3)] * len(sequence)


def binary_tv(sequence: Tokens) -> list[tuple[float, bool]]:
    kept = []
    for new, _, rollout, advantage in sequence:
        change = math.exp(new) - math.exp(rollout)
        kept.append((1.0, not ((advantage > 0 and change > 0.1) or (advantage < 0 and change < -0.2))))
    return kept


CASES: dict[str, tuple[Correction, Reference]] = {
    "token_tis": (TokenTruncation(1.5), token_tis),
    "sequence_tis": (SequenceTruncation(1.5), sequence_tis),
    "sequence_mis": (SequenceMasking(1.5), sequence_mis),
    "icepop": (IcePop(0.6, 1.8), icepop),
    "token_rejection": (TokenRejection(0.6, 1.8), token_rejection),
    "geometric": (GeometricRejection(0.8, 1.25), geometric),
    "k2": (K2Rejection(0.1), k2),
    "k2, max": (K2Rejection(0.3, "max"), k2_max),
    "k3": (K3Rejection(0.1), k3),
    "k3, max": (K3Rejection(0.3, "max"), k3_max),
    "binary_tv": (BinaryTV(0.2, 0.1), binary_tv),
}


def drawn(seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns log π, log π_old, log μ and A; and the mask: lengths from 0 on, holes, and one extreme ratio in some rows."""
    draw = torch.Generator().manual_seed(seed)
    shape = (int(torch.randint(1, 9, (), generator=draw)), int(torch.randint(1, 12, (), generator=draw)))
    spread = (0.02, 0.3, 2.0)[seed % 3]
    rollout = -2 * torch.rand(shape, generator=draw, dtype=torch.float64)
    old, new = (rollout + spread * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    if seed % 4 == 0:
        old[:, 0] += (50.0, -50.0)[seed % 8 // 4]
    lengths = torch.randint(0, shape[1] + 1, (shape[0], 1), generator=draw)
    mask = (torch.arange(shape[1]) < lengths) & (torch.rand(shape, generator=draw) > 0.2)
    return [new, old, rollout, torch.randn(shape, generator=draw, dtype=torch.float64)], mask


@pytest.mark.parametrize("name", CASES)
def test_weights_loss_and_gradient_are_those_of_the_formula(name: str) -> None:
    correction, reference = CASES[name]
    num_kept = num_rejected = 0
    for seed in range(90):
        (new, old, rollout, advantages), mask = drawn(seed)
        new.requires_grad_()
        per_token = -advantages * new
        inputs = CorrectionInputs.from_logprobs(new, old, rollout, advantages, mask)
        corrected, metrics = apply_corrections(per_token, [correction], inputs)
        corrected.masked_fill(~mask, 0).sum().backward()
        weights = torch.zeros_like(new)
        for row in range(len(new)):
            columns = torch.nonzero(mask[row]).flatten().tolist()
            tokens = [tuple(float(x[row, c]) for x in (new.detach(), old, rollout, advantages)) for c in columns]
            for column, (weight, kept) in zip(columns, reference(tokens) if tokens else [], strict=True):  # type: ignore[arg-type]
                weights[row, column] = weight if kept else 0.0
                num_kept, num_rejected = num_kept + kept, num_rejected + (not kept)
        expected = (per_token.detach() * weights)[mask]
        torch.testing.assert_close(corrected.detach()[mask], expected, rtol=1e-9, atol=1e-12)
        assert new.grad is not None
        torch.testing.assert_close(new.grad, -advantages * weights, rtol=1e-9, atol=1e-12)
        count = max(int(mask.sum()), 1)
        assert metrics["correction_weight"].item() == pytest.approx(weights.sum().item() / count)
        assert metrics["correction_weight_squared"].item() == pytest.approx(weights.square().sum().item() / count)
    assert num_kept > 100 and (num_rejected > 100) == ("tis" not in name)


def test_every_correction_of_the_registry_is_compared() -> None:
    compared = {type(correction) for correction, _ in CASES.values()}
    assert {import_attribute(path, name) for name, path in CORRECTIONS.built_in.items()} == compared


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis"])
def test_the_share_of_limited_weights_is_counted(name: str) -> None:
    (new, old, rollout, advantages), mask = drawn(1)
    inputs = CorrectionInputs.from_logprobs(new, old, rollout, advantages, mask)
    _, metrics = apply_corrections(-advantages, [CASES[name][0]], inputs)
    raw = [
        ratio(float(old[row, column]), float(rollout[row, column]))
        if name == "token_tis"
        else product(
            [(0.0, float(old[row, c]), float(rollout[row, c]), 0.0) for c in torch.nonzero(mask[row]).flatten()]
        )
        for row, column in torch.nonzero(mask).tolist()
    ]
    assert metrics["correction_clipped"].item() == pytest.approx(sum(weight > 1.5 for weight in raw) / len(raw))


def test_the_penalty_of_binary_total_variation_also_reaches_rejected_tokens() -> None:
    """Two tokens with A > 0: the probability of the first has grown by 0.4, that of the second by 0.05."""
    rollout = torch.log(torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    logprobs = torch.log(torch.tensor([[0.9, 0.55]], dtype=torch.float64)).requires_grad_()
    loss, metrics = policy_loss(
        "ppo", logprobs=logprobs, old_logprobs=rollout, rollout_logprobs=rollout, advantages=torch.ones(1, 2).double(),
        loss_mask=torch.ones(1, 2), clip_ratio_high=9.0, corrections=[BinaryTV(0.2, 0.2, tau=0.5)], loss_agg="token-sum",
    )  # fmt: skip
    loss.backward()
    logs = [math.log(0.9 / 0.5), math.log(0.55 / 0.5)]
    assert loss.item() == pytest.approx(-1.1 + 0.5 * (logs[0] ** 2 + logs[1] ** 2))
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([logs[0], -1.1 + logs[1]])
    assert metrics["correction_dropped"].item() == 0.5
