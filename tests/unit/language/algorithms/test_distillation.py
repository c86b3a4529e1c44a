"""Distillation: by enumeration of what may be drawn, beside a reward, and however a minibatch is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from rlhpc.config.typed import default_section, typed
from rlhpc.language.algorithms.base import MinibatchCounts
from rlhpc.language.algorithms.distillation import Distillation
from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.models.logprobs import TokenScores, read_rows
from rlhpc.language.models.micro_batching import micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from tests.rectangles import scores_of, top_divergence, top_told

V = 5


def config(distillation: dict[str, Any], **algorithm: Any) -> GrpoConfig:
    cfg = default_section(GrpoConfig)
    given = {"name": "distillation", "distillation": distillation, "update_epochs": 1, **algorithm}
    return typed(GrpoConfig, OmegaConf.merge(cfg, {"algorithm": given, "teacher": {"model": {"model_path": "x"}}}))


def drawn(tokens: int = V) -> TokenBatch:
    """Each token of a vocabulary, drawn once after a prompt of one token."""
    return TokenBatch.from_sequences([[0, token] for token in range(tokens)], [[False, True]] * tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_expected_gradient_of_sampled_is_that_of_the_reverse_kl(temperature: float) -> None:
    """Every token that may be drawn, each counted as often as it is."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(V, generator=generator).requires_grad_()
    theirs = (torch.randn(V, generator=generator) / temperature).log_softmax(-1)
    p = (logits / temperature).log_softmax(-1)
    (expected,) = torch.autograd.grad((p.exp() * (p - theirs)).sum(), logits, retain_graph=True)
    algorithm = Distillation(config({"mode": "sampled"}))
    found = torch.zeros(V)
    for token in range(V):
        batch = drawn().select(torch.tensor([token]))
        batch.columns = {
            "rollout_logprobs": torch.stack([torch.zeros(()), p[token].detach()]),
            "teacher_logprobs": torch.stack([torch.zeros(()), theirs[token]]),
        }
        batch.columns["advantages"] = algorithm.advantages(batch, None)
        assert batch.columns["advantages"].tolist() == pytest.approx([0, (theirs[token] - p[token]).item()])
        scores = TokenScores(torch.stack([torch.zeros(()), p[token]]))
        loss, metrics = algorithm.loss(scores, batch, MinibatchCounts(1.0, 1.0, 2))
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += p[token].detach().exp() * gradient
        assert metrics["teacher_divergence"].item() == pytest.approx((p[token] - theirs[token]).item())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


BY_TASK = [{"name": "sums", "tasks": ["a", "b"], "model": {"model_path": "y"}}, {"name": "none", "tasks": ["c"]}]


@pytest.mark.parametrize("mode", ["sampled", "topk"])
def test_each_teacher_has_its_divergence(mode: str, batch: TokenBatch) -> None:
    """However a minibatch is cut; a teacher without tokens has none."""
    cfg = config({"mode": mode})
    cfg.teacher.by_task = OmegaConf.merge(cfg, {"teacher": {"by_task": BY_TASK}}).teacher.by_task
    algorithm = Distillation(cfg)
    levels = {"": 0.0, "a": 1.0, "b": 1.0, "c": 2.0, "other": 0.0}
    assert {level: algorithm.prompt_columns(Prompt(0, (), level=level))["teacher_index"] for level in levels} == levels
    assert [column.name for column in algorithm.columns if column.by == "rollout"] == ["teacher_index"]
    assert Distillation(config({"mode": mode})).prompt_columns(Prompt(0, (), level="a")) == {}
    batch.columns["teacher_index"] = (batch.group.repeat_interleave(batch.lengths) * 1.0) * batch.mask
    batch.columns["advantages"] = torch.zeros(batch.tokens)
    values, logprobs = torch.rand(batch.tokens), -torch.rand(batch.tokens)
    batch.columns["values"], batch.columns["logprobs"] = values, logprobs
    expected = values if mode == "topk" else logprobs - batch.columns["teacher_logprobs"].clamp_min(-100.0)
    is_sums = batch.columns["teacher_index"] == 1
    counts, sums = MinibatchCounts.from_batch(batch, 1.0), dict[str, float]()
    for part in batch.split([1, 2, 3]):
        scores = TokenScores(part.columns["logprobs"], read=None if mode == "sampled" else part.columns["values"])
        for name, share in algorithm.loss(scores, part, counts)[1].items():
            sums[name] = sums.get(name, 0.0) + float(share)
    metrics = algorithm.summarize(sums)
    for name, is_taught in (("sums", is_sums), ("default", ~is_sums)):
        is_taught = is_taught & batch.mask
        assert metrics[f"teacher_divergence/{name}"] == pytest.approx(expected[is_taught].mean().item(), rel=1e-5)
        assert metrics[f"teacher_share/{name}"] == pytest.approx((is_taught.sum() / batch.mask.sum()).item())
    assert metrics["teacher_share/none"] == 0 and "teacher_divergence/none" not in metrics
    assert ("teacher_divergence/sums" in algorithm.at_first) == (mode == "sampled")


@pytest.fixture
def batch() -> TokenBatch:
    """Two prompts with three answers each; one is cut off and trains nothing."""
    generator = torch.Generator().manual_seed(5)
    lengths = [4, 6, 5, 3, 7, 4]
    masks = [torch.arange(n) >= 2 for n in lengths]
    masks[3][:] = False
    made = TokenBatch.from_sequences([torch.randint(0, V, (n,), generator=generator) for n in lengths], masks)
    made.group = torch.tensor([0, 0, 0, 1, 1, 1])
    made.reward = torch.rand(6, generator=generator)
    for name in ("rollout_logprobs", "teacher_logprobs", "ref_logprobs"):
        made.columns[name] = -3 * torch.rand(made.tokens, generator=generator)
    made.columns["teacher_logprobs"][3] = -torch.inf
    logits = torch.randn(6, made.width, V, generator=generator)
    made.columns["teacher_top_logprobs"] = top_told(logits, made, 3)
    return made


def test_beside_a_reward_the_advantages_add_up(batch: TokenBatch) -> None:
    both = Distillation(config({"coef": 0.5, "task_reward_coef": 2.0})).advantages(batch, None)
    alone = Distillation(config({})).advantages(batch, None)
    reward = PolicyGradient(config({})).advantages(batch, None)
    assert reward[batch.mask].any() and alone.isfinite().all() and not alone[~batch.mask].any()
    torch.testing.assert_close(both, 0.5 * alone + 2.0 * reward)
    assert alone[3].item() == pytest.approx(-100.0 - batch.columns["rollout_logprobs"][3].item())
    assert not Distillation(config({"mode": "topk"})).advantages(batch, None).any()


def test_a_critic_is_asked_only_if_the_reward_counts() -> None:
    names = [
        {column.name for column in Distillation(config({"task_reward_coef": coef}, adv_type="gae")).columns}
        for coef in (0.0, 1.0)
    ]
    assert names == [{"teacher_logprobs"}, {"teacher_logprobs", "values"}]


VARIANTS: dict[str, dict[str, Any]] = {
    "sampled": {"distillation": {}},
    "topk alone": {"distillation": {"mode": "topk", "coef": 2.0}},
    "topk, reward, reference": {"distillation": {"mode": "topk", "task_reward_coef": 1.0, "beta": 0.5}, "kl_coef": 0.1},
    "by sequences": {"distillation": {"mode": "topk"}, "loss_agg": "seq-mean-token-sum-norm"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_add_up_to_the_whole(batch: TokenBatch, name: str) -> None:
    algorithm = Distillation(config(**VARIANTS[name]))
    batch.columns["advantages"] = algorithm.advantages(batch, None)
    logits = torch.randn(batch.tokens, V, requires_grad=True)

    def scored(part: TokenBatch, rows: Tensor) -> TokenScores:
        rectangle = part.padded(logits[rows])
        read = None
        if algorithm.reader is not None:
            reader = algorithm.reader(algorithm.cfg, torch.device("cpu")).rows(part)
            assert reader is not None
            where, places = part.predictors()
            read = torch.zeros(part.tokens).index_copy(0, where, read_rows(rectangle, places, reader)[:, 0])
        found = scores_of(rectangle, part.padded(part.ids), part.attended())
        return TokenScores(part.flat(found.logprobs), None, read)

    whole = MinibatchCounts(float(batch.mask.sum()), float(len(batch) - 1), batch.width)
    loss, metrics = algorithm.loss(scored(batch, torch.arange(batch.tokens)), batch, whole)
    (expected,) = torch.autograd.grad(loss, logits)
    assert expected.abs().max() > 1e-3
    sums: dict[str, Tensor] = dict.fromkeys(metrics, torch.zeros(()))
    parts = [(samples, batch.select(samples)) for samples in micro_batches(batch.lengths, 14)]
    assert len(parts) > 2
    for samples, part in [*parts, (torch.zeros(0, dtype=torch.long), batch.empty_sample())]:
        value, found = algorithm.loss(scored(part, batch.tokens_of(samples)), part, whole)
        if value.requires_grad:
            value.backward()
        sums = {key: sums[key] + found[key] for key in metrics}
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected)
    for key in metrics:
        torch.testing.assert_close(sums[key], torch.as_tensor(metrics[key]), msg=key)


def test_the_gradient_is_of_the_divergence_alone_unless_more_is_asked(batch: TokenBatch) -> None:
    logits = torch.randn(6, batch.width, V, requires_grad=True)
    algorithm = Distillation(config({"mode": "topk", "coef": 3.0}))
    batch.columns["advantages"] = algorithm.advantages(batch, None)
    read = top_divergence(logits, batch, batch.columns["teacher_top_logprobs"])
    logprobs = torch.full((batch.tokens,), math.log(0.2), requires_grad=True)
    count = float(batch.mask.sum())
    loss, metrics = algorithm.loss(TokenScores(logprobs, None, read), batch, MinibatchCounts(count, 5.0, batch.width))
    assert torch.autograd.grad(loss, logprobs, allow_unused=True, retain_graph=True) == (None,)
    assert loss.item() == pytest.approx(3.0 * read.sum().item() / count)
    assert metrics["loss"].item() == pytest.approx(loss.item())
