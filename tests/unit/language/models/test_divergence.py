"""The divergence from a teacher: against numbers of TRL's, and against autograd on the formulas as they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhpc.language.models import logprobs
from rlhpc.language.models.divergence import FLOOR
from rlhpc.language.models.token_batch import TokenBatch
from tests.rectangles import full_divergence, top_divergence, top_told

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "divergence_cases.json").read_text())
JSD = [case for case in CASES if case["kind"] == "generalized_jsd"]
(TAIL,) = [case for case in CASES if case["kind"] == "forward_kl_topk"]
(EXPECTED,) = [case for case in CASES if case["kind"] == "expected_gradient_of_direct_estimators"]


def row(logits: list[list[list[float]]], labels: list[int]) -> tuple[Tensor, TokenBatch]:
    """One sample whose token t + 1 the logits at t predict; those with a label are trained on."""
    width = len(labels)
    batch = TokenBatch.from_sequences([[0] * (width + 1)], [[False, *(label != -100 for label in labels)]])
    return torch.cat([torch.tensor(logits), torch.zeros(1, 1, 3)], 1), batch


@pytest.mark.parametrize("case", JSD, ids=[f"beta {case['beta']}, T {case['temperature']}" for case in JSD])
def test_over_the_vocabulary_it_is_trls(case: dict[str, Any]) -> None:
    student, batch = row(case["student_logits"], case["labels"][0])
    teacher, _ = row(case["teacher_logits"], case["labels"][0])
    student.requires_grad_()
    loss = full_divergence(student, batch, teacher, case["temperature"], case["beta"]).sum() / batch.mask.sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    assert student.grad is not None
    torch.testing.assert_close(student.grad[:, :-1], torch.tensor(case["grad_student_logits"]), rtol=0, atol=1e-6)


def test_over_the_top_and_the_rest_it_is_trls() -> None:
    student, batch = row(TAIL["student_logits"], [0, 0, 0])
    teacher, _ = row(TAIL["teacher_logits"], [0, 0, 0])
    found = top_divergence(student, batch, top_told(teacher, batch, TAIL["k"]), 1.0, 0.0)
    torch.testing.assert_close(found[1:], torch.tensor(TAIL["per_token"][0]), rtol=0, atol=1e-6)


def formula(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """As it is written, of probabilities `[…, B]`."""
    kl = lambda p, q: (p * (p.log() - q.log())).sum(-1)  # noqa: E731
    if beta in (0.0, 1.0):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@pytest.fixture
def batch() -> TokenBatch:
    """Three samples; prompts are not trained on, nor is one answer."""
    lengths, prompt = (5, 3, 6), 2
    masks = [[t >= prompt for t in range(n)] for n in lengths]
    masks[1] = [False] * 3
    return TokenBatch.from_sequences([torch.randint(0, 11, (n,)) for n in lengths], masks)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_by_autograd_on_the_formula(
    beta: float, temperature: float, batch: TokenBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradient in small chunks of rows, over the vocabulary, and over the top and the rest."""
    monkeypatch.setattr(logprobs, "chunk_rows", lambda width, **_: 2)
    generator = torch.Generator().manual_seed(1)
    size = (len(batch), batch.width, 11)
    student = (3 * torch.randn(size, generator=generator)).requires_grad_()
    teacher = 3 * torch.randn(size, generator=generator)
    weight = torch.rand(batch.tokens, generator=generator)

    def expected(merge: Any) -> tuple[Tensor, Tensor]:
        mine, theirs = ((one / temperature).softmax(-1).double() for one in (student, teacher))
        by_place = formula(*merge(mine, theirs), beta)  # type: ignore[call-arg]
        flat = batch.flat(torch.nn.functional.pad(by_place[:, :-1], (1, 0))) * batch.mask
        (gradient,) = torch.autograd.grad((flat * weight).sum(), student)
        return flat, gradient

    def top(mine: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        ids = theirs.topk(4, -1).indices
        picked = [one.gather(-1, ids) for one in (mine, theirs)]
        return tuple(torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in picked)  # type: ignore[return-value]

    told = top_told(teacher, batch, 4, temperature)
    for found, merge in (
        (full_divergence(student, batch, teacher, temperature, beta), lambda *both: both),
        (top_divergence(student, batch, told, temperature, beta), top),
    ):
        values, gradient = expected(merge)
        torch.testing.assert_close(found, values.float(), rtol=1e-4, atol=1e-5)
        (mine,) = torch.autograd.grad((found * weight).sum(), student)
        torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_top_of_all_is_all_and_less_is_less(beta: float, batch: TokenBatch) -> None:
    size = (len(batch), batch.width, 11)
    student, teacher = torch.randn(size), torch.randn(size)
    full = full_divergence(student, batch, teacher, beta=beta)
    found = [top_divergence(student, batch, top_told(teacher, batch, k), beta=beta) for k in (1, 4, 11, 64)]
    assert (found[0] <= found[1] + 1e-6).all() and (found[1] <= full + 1e-6).all()
    torch.testing.assert_close(found[2], full)
    assert torch.equal(found[3], found[2])  # k is cut to the vocabulary


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_what_one_of_them_rules_out_is_finite(beta: float, batch: TokenBatch) -> None:
    size = (len(batch), batch.width, 11)
    student, teacher = torch.randn(size), torch.randn(size)
    student[..., 3], teacher[..., 5] = -torch.inf, -torch.inf
    student[..., 7] = 200.0  # all of its probability
    student.requires_grad_()
    for found in (
        full_divergence(student, batch, teacher, beta=beta),
        top_divergence(student, batch, top_told(teacher, batch, 2), beta=beta),
        top_divergence(student, batch, top_told(teacher, batch, 11), beta=beta),
    ):
        (gradient,) = torch.autograd.grad(found.sum(), student)
        assert found.isfinite().all() and gradient.isfinite().all()
        assert found.max() <= -FLOOR


def test_vocabularies_of_different_width(batch: TokenBatch) -> None:
    """What only the teacher has is left out; what only the student has is ruled out by the teacher."""
    size = (len(batch), batch.width, 11)
    student, teacher = torch.randn(size), torch.randn(size)
    wide = torch.cat([teacher, torch.full((*size[:2], 2), 9.0)], -1)
    torch.testing.assert_close(
        full_divergence(student, batch, wide), full_divergence(student, batch, teacher), rtol=0, atol=1e-6
    )
    assert torch.equal(top_told(wide, batch, 4, 1.0, 11), top_told(teacher, batch, 4))
    more = full_divergence(torch.cat([student, torch.zeros(*size[:2], 1)], -1), batch, teacher)
    assert (more[batch.mask] > full_divergence(student, batch, teacher)[batch.mask]).all()


def test_a_batch_that_trains_nothing(batch: TokenBatch) -> None:
    """Its backward pass works, and gives nothing."""
    for nothing in (batch.empty_sample(), batch.select(torch.tensor([1]))):
        student = torch.randn(1, nothing.width, 11, requires_grad=True)
        found = full_divergence(student, nothing, torch.randn(1, nothing.width, 11))
        found.sum().backward()
        assert student.grad is not None and not student.grad.any()
        told = torch.zeros(nothing.tokens, 5, 2)
        assert top_divergence(student, nothing, told).tolist() == [0.0] * nothing.tokens
        assert top_told(student, nothing, 4).shape == (nothing.tokens, 5, 2)


def test_estimators_over_all_tokens_that_may_be_drawn() -> None:
    """Exact expectations over a small vocabulary: the log-ratio as an advantage has the gradient of the reverse KL; the
    estimator k1 itself has none, and k3 that of the forward KL."""
    student = torch.tensor(EXPECTED["student_logits"], requires_grad=True)
    theirs = torch.tensor(EXPECTED["teacher_logits"]).log_softmax(-1)
    p = student.log_softmax(-1)
    drawn = p.detach().exp()
    gap = theirs - p
    for loss, name in (
        (-(drawn * gap.detach() * p).sum(), "grad_reverse_kl"),
        (-(drawn * gap).sum(), "E_grad_k1"),
        ((drawn * (gap.exp() - 1 - gap)).sum(), "grad_forward_kl"),
    ):
        (gradient,) = torch.autograd.grad(loss, student, retain_graph=True)
        torch.testing.assert_close(gradient, torch.tensor(EXPECTED[name]), rtol=0, atol=1e-6)
    one = TokenBatch.from_sequences([[0, 0]], [[False, True]])
    logits = torch.stack([student.detach(), torch.zeros(3)])[None].requires_grad_()
    teacher = torch.stack([torch.tensor(EXPECTED["teacher_logits"]), torch.zeros(3)])[None]
    for beta, name in ((1.0, "grad_reverse_kl"), (0.0, "grad_forward_kl")):
        (gradient,) = torch.autograd.grad(full_divergence(logits, one, teacher, beta=beta).sum(), logits)
        torch.testing.assert_close(gradient[0, 0], torch.tensor(EXPECTED[name]), rtol=0, atol=1e-6)
