"""Policy, value and KL losses against figures computed by hand, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from rlhpc import ConfigError
from rlhpc.algorithms import aggregate, kl_penalty, policy_loss, value_loss
from tests.unit.algorithms.tensors import bools, close, t

torch.set_default_dtype(torch.float32)


def ppo(ratio: float, advantage: float, **options: object) -> tuple[float, float]:
    logprobs = torch.log(t([ratio])).requires_grad_()
    loss, _ = policy_loss(
        "ppo", logprobs=logprobs, old_logprobs=t([0.0]), advantages=t([advantage]), loss_mask=bools([1]),
        clip_ratio_low=0.2, clip_ratio_high=0.2, **options,
    )  # fmt: skip
    loss.backward()
    return loss.item(), logprobs.grad.item()


def test_ppo_clip_and_dual_clip():
    assert ppo(1.5, 1.0) == pytest.approx((-1.2, 0.0))
    assert ppo(5.0, -1.0, clip_ratio_c=3.0) == pytest.approx((3.0, 0.0))
    assert ppo(5.0, -1.0)[0] == pytest.approx(5.0)
    loss, gradient = ppo(1.1, 2.0)
    assert (loss, gradient) == pytest.approx((-2.2, -2.2))
    assert math.isfinite(ppo(1e30, -1.0)[0]), "the log-ratio is clamped"


def test_gspo_uses_the_sequence_ratio_and_cispo_bounds_the_weight():
    logprobs = t([0.3, 0.1, 9.0]).requires_grad_()
    mask, zeros = bools([1, 1, 0]), t([0.0, 0.0, 0.0])
    loss, _ = policy_loss("gspo", logprobs=logprobs, old_logprobs=zeros, advantages=t([1.0, 1.0, 1.0]), loss_mask=mask,
                          clip_ratio_low=9, clip_ratio_high=9)  # fmt: skip
    assert loss.item() == pytest.approx(-math.exp(0.2))
    loss.backward()
    close(logprobs.grad, [[-math.exp(0.2) / 2, -math.exp(0.2) / 2, 0.0]])
    logprobs = torch.log(t([4.0])).requires_grad_()
    loss, _ = policy_loss("cispo", logprobs=logprobs, old_logprobs=t([0.0]), advantages=t([2.0]), loss_mask=bools([1]),
                          clip_ratio_low=0.2, clip_ratio_high=0.5)  # fmt: skip
    loss.backward()
    close(logprobs.grad, [[-1.5 * 2.0]])


def test_decoupled_ppo_clips_around_the_proximal_policy_and_weighs_by_it():
    loss, _ = policy_loss(
        "decoupled_ppo", logprobs=torch.log(t([1.5])), old_logprobs=torch.log(t([0.5])), advantages=t([1.0]),
        loss_mask=bools([1]), proximal_logprobs=torch.log(t([1.0])), clip_ratio_low=0.2, clip_ratio_high=0.2,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-1.2 * 2.0)
    with pytest.raises(ConfigError, match="proximal_logprobs"):
        policy_loss(
            "decoupled_ppo", logprobs=t([0.0]), old_logprobs=t([0.0]), advantages=t([1.0]), loss_mask=bools([1])
        )


@pytest.mark.parametrize(
    "how", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_any_split_adds_up_to_the_whole_batch(how):
    x, mask = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 4) > 0.4
    mask[2] = False
    whole = aggregate(x, mask, how)
    counts = {"global_tokens": mask.sum(), "global_seqs": mask.any(1).sum()}
    for parts in ((2, 4), (1, 2, 3), (6,)):
        split = sum(aggregate(a, m, how, **counts) for a, m in zip(x.split(parts), mask.split(parts), strict=True))
        close(split, whole)


def test_sequences_without_tokens_do_not_count():
    x, mask = t([1.0, 3.0], [5.0, 5.0]), bools([1, 1], [0, 0])
    assert aggregate(x, mask, "seq-mean-token-mean").item() == 2.0


def test_kl_and_its_direction():
    p, q = t([-1.0]), t([-1.5])
    for kind, figure in (("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307), ("abs", 0.5)):
        close(kl_penalty(p, q, kind), [[figure]])
    close(kl_penalty(q, p, "k1"), [[-0.5]])
    with pytest.raises(ConfigError, match="allowed: k1"):
        kl_penalty(p, q, "k9")


def test_value_loss_takes_the_worse_of_clipped_and_plain():
    loss, _ = value_loss(values=t([2.0]), returns=t([0.0]), loss_mask=bools([1]), old_values=t([3.0]), value_clip=0.5)
    assert loss.item() == pytest.approx(0.5 * 2.5**2)
    assert value_loss(values=t([2.0]), returns=t([0.0]), loss_mask=bools([1]))[0].item() == pytest.approx(2.0)
