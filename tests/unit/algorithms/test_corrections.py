"""Corrections: composition with a policy loss, denominators, metrics, divisions, guards, and what a configuration may say."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlhpc.algorithms import CORRECTIONS, policy_loss
from rlhpc.algorithms.corrections import (
    Correction,
    CorrectionFactors,
    CorrectionInputs,
    make_corrections,
    with_sample_size,
)
from rlhpc.algorithms.losses import AGGREGATIONS
from rlhpc.language.config.algorithms import CorrectionConfig
from rlhpc.runtime.errors import ConfigError

from .tensors import bools, close, t


def batch_of(seed: int, spread: float = 0.4, shape: tuple[int, int] = (7, 6)) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    batch = {name: spread * torch.randn(shape, generator=draw, dtype=torch.float64) for name in names}
    for name in names[:3]:
        batch[name] = -batch[name].abs() - 0.05
    batch["loss_mask"] = torch.rand(shape, generator=draw) > 0.3
    batch["loss_mask"][2] = False
    return batch


def corrections(*names: str, **kwargs: Any) -> list[Correction]:
    return make_corrections([CorrectionConfig(name, kwargs.get(name.replace("-", "_"), {})) for name in names])


#: Lists that a run may have.
LISTS: dict[str, list[Correction]] = {
    "token_tis": corrections("token_tis", token_tis={"cap": 1.1}),
    "sequence_tis": corrections("sequence_tis", sequence_tis={"cap": 1.1}),
    "sequence_mis": corrections("sequence_mis", sequence_mis={"cap": 1.3}),
    "icepop": corrections("icepop", icepop={"low": 0.8, "high": 1.2}),
    "binary_tv": corrections("binary_tv", binary_tv={"low": 0.05, "high": 0.05, "tau": 0.3}),
    "truncated, then rejected": corrections(
        "token_tis", "geometric", "k3", "token_rejection", geometric={"low": 0.7, "high": 1.3}, k3={"threshold": 0.3},
        token_rejection={"high": 1.6},
    ),
}  # fmt: skip


def loss_of(batch: dict[str, Tensor], logprobs: Tensor, applied: list[Correction], **options: Any) -> Tensor:
    given = {name: values for name, values in batch.items() if name != "logprobs"}
    return policy_loss("ppo", logprobs=logprobs, corrections=applied, **given, **options)[0]


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("name", LISTS)
def test_micro_batches_and_ranks_add_up_to_loss_and_gradient_of_the_whole(name: str, how: str) -> None:
    batch = batch_of(5)
    whole = batch["logprobs"].clone().requires_grad_()
    total = loss_of(batch, whole, LISTS[name], loss_agg=how)
    total.backward()
    counts = {"global_tokens": batch["loss_mask"].sum(), "global_seqs": batch["loss_mask"].any(1).sum()}
    for bounds in ((0, 1, 4, 7), (0, 2, 3, 7)):  # the last has a share without a trained token
        pieces, summed = batch["logprobs"].clone().requires_grad_(), 0.0
        for first, last in itertools.pairwise(bounds):
            part = {key: values[first:last] for key, values in batch.items()}
            share = loss_of(part, pieces[first:last], LISTS[name], loss_agg=how, **counts)
            share.backward()
            summed += share.item()
        assert summed == pytest.approx(total.item(), abs=1e-12)
        assert pieces.grad is not None and whole.grad is not None and whole.grad.abs().max() > 1e-4
        close(pieces.grad, whole.grad, 1e-12)


def test_a_rejected_token_counts_in_the_mean_and_has_no_gradient() -> None:
    """Of three tokens one is rejected: the loss is the sum of the two others, divided by three."""
    logprobs = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    old, rollout = t([0.0, 0.0, 0.0, 0.0]), torch.log(t([1.0, 0.5, 0.1, 1e-9]))
    loss, metrics = policy_loss(
        "ppo", logprobs=logprobs, old_logprobs=old, rollout_logprobs=rollout, advantages=t([1.0, 2.0, 4.0, 9.0]),
        loss_mask=bools([1, 1, 1, 0]), corrections=corrections("icepop"),
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(-(1 * 1 + 2 * 2) / 3)
    assert logprobs.grad is not None
    close(logprobs.grad, [[-1 / 3, -4 / 3, 0, 0]])
    found = with_sample_size({name: value.item() for name, value in metrics.items()})
    assert found["correction_dropped"] == pytest.approx(1 / 3) and found["correction_clipped"] == 0
    assert found["correction_weight"] == pytest.approx((1 + 2) / 3)
    assert found["correction_ess"] == pytest.approx((1 + 2) ** 2 / (3 * (1 + 4)))
    assert "correction_weight_squared" not in found


def test_the_cap_of_truncated_importance_sampling_is_the_correction_of_tokens() -> None:
    batch = batch_of(3)
    by_key, by_name = (batch["logprobs"].clone().requires_grad_() for _ in range(2))
    loss_of(batch, by_key, [], tis_cap=1.1).backward()
    loss_of(batch, by_name, LISTS["token_tis"]).backward()
    assert by_key.grad is not None and by_name.grad is not None
    assert torch.equal(by_key.grad, by_name.grad)


def test_the_sample_size_of_each_policy_is_its_own() -> None:
    metrics = {"policy/a/correction_weight": 0.5, "policy/a/correction_weight_squared": 0.5, "loss": 3.0}
    assert with_sample_size(metrics) == {"policy/a/correction_weight": 0.5, "policy/a/correction_ess": 0.5, "loss": 3.0}
    assert with_sample_size({"correction_weight": 0.0, "correction_weight_squared": 0.0})["correction_ess"] == 0


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", LISTS)
def test_what_an_engine_left_at_untrained_tokens_reaches_neither_loss_nor_gradient(name: str, garbage: float) -> None:
    batch = batch_of(9)
    clean, dirty = (batch["logprobs"].clone().requires_grad_() for _ in range(2))
    expected = loss_of(batch, clean, LISTS[name])
    expected.backward()
    spoiled = {
        key: values.masked_fill(~batch["loss_mask"], garbage) if key.endswith("logprobs") else values
        for key, values in batch.items()
    }
    found = loss_of(spoiled, dirty, LISTS[name])
    found.backward()
    assert clean.grad is not None and dirty.grad is not None
    close(found, expected.detach(), 1e-12)
    close(dirty.grad, clean.grad, 1e-12)


@pytest.mark.parametrize("name", LISTS)
def test_infinite_ratios_stay_finite_and_a_nan_is_loud(name: str) -> None:
    """A run that rejects a NaN in silence would go on with an engine that is broken."""
    batch = batch_of(9)
    row, column = torch.nonzero(batch["loss_mask"])[0].tolist()
    for value in (float("-inf"), 0.0, -1e30):
        batch["rollout_logprobs"][row, column] = value
        logprobs = batch["logprobs"].clone().requires_grad_()
        loss = loss_of(batch, logprobs, LISTS[name])
        loss.backward()
        assert logprobs.grad is not None and loss.isfinite() and logprobs.grad.isfinite().all()
    batch["rollout_logprobs"][row, column] = float("nan")
    assert loss_of(batch, batch["logprobs"], LISTS[name]).isnan()


def test_a_decoupled_loss_takes_rejections_by_the_ratio_of_proximal_to_behaviour_policy() -> None:
    ones = torch.ones(1, 3, dtype=torch.bool)
    proximal, behaviour = t([-1.0, -1.0, -1.0]), t([-1.0, -3.0, -1.2])
    loss, metrics = policy_loss(
        "decoupled_ppo", logprobs=proximal.clone(), old_logprobs=behaviour, proximal_logprobs=proximal,
        rollout_logprobs=behaviour, advantages=t([1.0, 1.0, 1.0]), loss_mask=ones,
        corrections=corrections("token_rejection"),
    )  # fmt: skip
    assert loss.item() == pytest.approx(-(1 + torch.exp(t(0.2)).item()) / 3)
    assert metrics["correction_dropped"].item() == pytest.approx(1 / 3)


def test_a_batch_without_tokens_has_no_loss() -> None:
    empty = {name: values[:, :0] for name, values in batch_of(1).items()}
    for applied in LISTS.values():
        assert loss_of(empty, empty["logprobs"], applied).item() == 0
    for name in ("k2", "sequence_tis"):
        assert loss_of(empty, empty["logprobs"], corrections(name, k2={"over": "max"})).item() == 0


# -- configuration


@dataclass(frozen=True)
class OnlyLikely(Correction):
    """A user's correction."""

    recomputes: ClassVar[bool] = False
    least: float = 0.1

    def factors(self, inputs: CorrectionInputs) -> CorrectionFactors:
        return CorrectionFactors(keep=inputs.rollout_logprobs.exp() >= self.least)


def test_a_correction_of_the_user_has_options_and_is_applied() -> None:
    path = f"{__name__}:OnlyLikely"
    (correction,) = make_corrections([CorrectionConfig(path, {"least": 0.4})])
    _, metrics = policy_loss(
        "ppo", logprobs=t([0.0, 0.0]), old_logprobs=t([0.0, 0.0]), rollout_logprobs=torch.log(t([0.5, 0.3])),
        advantages=t([1.0, 1.0]), loss_mask=bools([1, 1]), corrections=[correction],
    )  # fmt: skip
    assert metrics["correction_dropped"].item() == 0.5
    with pytest.raises(ConfigError, match=r"corrections\[0\]\.kwargs\.lest is 1; did you mean 'least'\?"):
        make_corrections([CorrectionConfig(path, {"lest": 1})])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([("token_tiss", {})], r"algorithm\.corrections\[0\]\.name is 'token_tiss', .* did you mean 'token_tis'\?"),
        ([("k2", {}), ("icepop", {"low": 6})], r"corrections\[1\]\.kwargs\.low is 6; it must not be above high \(5\)"),
        ([("token_tis", {"cap": 0})], r"corrections\[0\]\.kwargs\.cap is 0"),
        ([("k3", {"over": "sum"})], r"corrections\[0\]\.kwargs\.over is 'sum'; .*mean, max"),
        ([("token_tis", {}), ("k2", {}), ("icepop", {})], "has token_tis and icepop, which would weigh .* twice"),
        ([("builtins:dict", {})], "is no subclass of"),
    ],
)
def test_what_cannot_be_a_correction_is_refused_by_its_key(sections: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_corrections([CorrectionConfig(*section) for section in sections])


def test_names_do_not_depend_on_case_and_those_of_verl_are_known() -> None:
    (correction,) = make_corrections([CorrectionConfig("IcePop", {"high": 3})])
    assert correction == corrections("icepop", icepop={"high": 3})[0]
    assert {"seq_mean_k1", "seq_mean_k2", "seq_mean_k3"} <= set(CORRECTIONS.built_in)
