"""Log-probs and entropies in chunks, against log_softmax in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.accelerators import kind_of_others, loose
from tests.rectangles import scores_of


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.device(kind_of_others()):
        yield


def plainly(logits, ids, mask, temperature):
    every = torch.log_softmax(logits.double() / temperature, -1)[:, :-1]
    logprobs = every.gather(2, ids[:, 1:, None]).squeeze(2) * mask[:, 1:]
    entropy = -(every.exp() * every).sum(-1) * mask[:, 1:]
    zero = torch.zeros(len(ids), 1, dtype=torch.float64)
    return torch.cat([zero, logprobs], 1), torch.cat([zero, entropy], 1)


@pytest.fixture
def example():
    torch.manual_seed(0)
    lengths = torch.tensor([7, 4, 2])
    ids = torch.randint(0, 11, (3, 7))
    return 3 * torch.randn(3, 7, 11), ids, torch.arange(7) < lengths[:, None]


@pytest.mark.parametrize("rows", [1 << 24, 4, 1], ids=["one chunk", "four rows", "a row"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_those_of_log_softmax(
    example, monkeypatch, rows, temperature, dtype, tolerance
) -> None:
    monkeypatch.setattr("rlhpc.language.models.logprobs.chunk_rows", lambda width, **_: rows)
    logits, ids, mask = example
    logits = logits.to(dtype).requires_grad_()
    weights, entropy_weights = torch.randn(2, 3, 7)
    found = scores_of(logits, ids, mask, temperature, entropy=True)
    ((found.logprobs * weights).sum() + (found.entropy * entropy_weights).sum()).backward()
    exact = logits.detach().double().requires_grad_()
    logprobs, entropy = plainly(exact, ids, mask, temperature)
    ((logprobs * weights).sum() + (entropy * entropy_weights).sum()).backward()

    assert found.logprobs.dtype is torch.float32 and logits.grad.dtype is dtype
    # From the same logits, the scores are exact to float32 whatever the logits' own dtype.
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=loose(2e-6, 2e-5), atol=loose(2e-6, 2e-5))
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=loose(2e-6, 2e-5), atol=loose(2e-6, 2e-5))
    torch.testing.assert_close(
        logits.grad.double(), exact.grad, rtol=loose(tolerance, 2e-5), atol=loose(tolerance, 2e-5)
    )


def test_without_entropy_the_gradient_is_that_of_the_logprobs_alone(example) -> None:
    logits, ids, mask = example
    logits.requires_grad_()
    scores = scores_of(logits, ids, mask)
    assert scores.entropy is None
    (grad,) = torch.autograd.grad(scores.logprobs.sum(), logits)
    exact = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(plainly(exact, ids, mask, 1.0)[0].sum(), exact)
    torch.testing.assert_close(grad.double(), expected, rtol=loose(2e-6, 2e-5), atol=loose(2e-6, 2e-5))


def test_column_0_and_padding_are_0_and_take_no_gradient(example) -> None:
    logits, ids, mask = example
    logits.requires_grad_()
    scores = scores_of(logits, ids, mask, entropy=True)
    assert (scores.logprobs[:, 0] == 0).all() and (scores.logprobs[~mask] == 0).all()
    assert (scores.entropy[:, 0] == 0).all() and (scores.entropy[~mask] == 0).all()
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    used = torch.zeros_like(mask)
    used[:, :-1] = mask[:, 1:]
    assert (logits.grad[~used] == 0).all() and (logits.grad[used].abs().sum(-1) > 0).all()


def test_by_hand() -> None:
    # Two tokens, logits (0, ln 3): p = (1/4, 3/4).
    logits = torch.tensor([[[0.0, math.log(3.0)], [9.0, 9.0]]])
    scores = scores_of(logits, torch.tensor([[0, 0]]), torch.ones(1, 2, dtype=torch.bool), entropy=True)
    assert scores.logprobs[0].tolist() == pytest.approx([0.0, math.log(0.25)], abs=1e-6)
    assert scores.entropy[0, 1].item() == pytest.approx(2 * math.log(2) - 0.75 * math.log(3), abs=1e-6)
    # At temperature 1/2 the odds are squared: p = (1/10, 9/10).
    cold = scores_of(logits, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool), temperature=0.5)
    assert cold.logprobs[0, 1].item() == pytest.approx(math.log(0.9), abs=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[5e4, 0.0, -5e4], [0.0, 0.0, 0.0]]], requires_grad=True)
    scores = scores_of(logits, torch.tensor([[0, 0]]), torch.ones(1, 2, dtype=torch.bool), entropy=True)
    assert scores.logprobs[0, 1].item() == 0.0 and scores.entropy[0, 1].item() == pytest.approx(0.0, abs=1e-2)
    scores.logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()
