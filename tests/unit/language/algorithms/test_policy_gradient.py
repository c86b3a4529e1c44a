"""The algorithm object: any split of an episode into samples, and of a minibatch into micro-batches, is the same training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.algorithms import calculate_adv_and_returns, kl_penalty
from rlhpc.config.typed import default_section, typed
from rlhpc.language.algorithms.base import MinibatchCounts
from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.algorithms.registry import make_algorithm
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.config.scoring import ProcessTermConfig
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.micro_batching import micro_batches
from rlhpc.language.models.token_batch import TokenBatch, cumulate
from rlhpc.runtime.errors import ConfigError

GROUPS, SIZE = 3, 4


def config(**algorithm: Any) -> GrpoConfig:
    cfg = default_section(GrpoConfig)
    for key, value in algorithm.items():
        OmegaConf.update(cfg, f"algorithm.{key}", value)
    return typed(GrpoConfig, cfg)


@pytest.fixture
def batch() -> TokenBatch:
    """Three prompts with four episodes each, of 4 to 11 tokens, two of them prompt; one was cut off and trains nothing."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 12, (GROUPS * SIZE,), generator=generator).tolist()
    tokens = sum(lengths)
    masks = [torch.arange(n) >= 2 for n in lengths]
    masks[5][:] = False
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
    made = TokenBatch.from_sequences([torch.randint(3, 64, (n,), generator=generator) for n in lengths], masks)
    made.group = torch.arange(GROUPS).repeat_interleave(SIZE)
    made.reward = torch.rand(GROUPS * SIZE, generator=generator)
    made.columns = {name: -torch.rand(tokens, generator=generator) for name in names}
    return made


def in_pieces(batch: TokenBatch) -> TokenBatch:
    """The same tokens, each episode cut into samples of at most three."""
    lengths, owner = [], []
    for sample, n in enumerate(batch.lengths.tolist()):
        parts = [min(3, n - start) for start in range(0, n, 3)]
        lengths += parts
        owner += [sample] * len(parts)
    facts = {name: getattr(batch, name)[owner] for name in ("episode", "role", "group", "reward")}
    return TokenBatch(cumulate(lengths), batch.ids, batch.mask, batch.turn, columns=batch.columns, **facts)


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo, penalty in the reward": {"adv_type": "rloo", "kl_coef": 0.1, "kl_in": "reward"},
    "reinforce++, penalty in the reward": {
        "adv_type": "reinforce++", "kl_coef": 0.1, "kl_in": "reward", "gamma": 0.9, "recompute_logprobs": True,
    },
    "raw, whitened": {"adv_type": "raw", "gamma": 0.9, "normalize_advantages": "batch"},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_an_episode_in_several_samples_gets_the_same_advantages(batch: TokenBatch, name: str) -> None:
    algorithm = make_algorithm(config(**VARIANTS[name]))
    whole, pieces = (algorithm.advantages(given, None) for given in (batch, in_pieces(batch)))
    assert torch.equal(whole, pieces)
    assert whole.shape == (batch.tokens,) and (whole[~batch.mask] == 0).all() and whole[batch.mask].abs().max() > 0.1


def test_a_penalty_in_the_reward_is_where_the_estimator_looks_for_it(batch: TokenBatch) -> None:
    """By hand: one that knows a penalty gets it token by token, another the difference."""
    mask = batch.padded(batch.mask)
    outcomes = torch.zeros(mask.shape)
    for line in range(len(batch)):
        places = torch.nonzero(mask[line]).flatten()
        if len(places):
            outcomes[line, places[-1]] = batch.reward[line]
    kl = batch.padded(kl_penalty(batch.columns["rollout_logprobs"], batch.columns["ref_logprobs"], "k1"))
    given: dict[str, Any] = {"loss_mask": mask, "group_ids": batch.group, "gamma": 1.0}
    for adv_type, rewards, extra in (
        ("grpo", outcomes - 0.2 * kl * mask, {}),
        ("reinforce++", outcomes, {"kl": kl, "kl_coef": 0.2}),
    ):
        expected, _ = calculate_adv_and_returns(adv_type, rewards=rewards, **given, **extra)
        options = {"adv_type": adv_type, "kl_coef": 0.2, "kl_in": "reward", "kl_type": "k1", "gamma": 1.0}
        found = PolicyGradient(config(**options)).advantages(batch, None)
        torch.testing.assert_close(batch.padded(found), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("adv_type", ["raw", "grpo"])
def test_what_is_paid_on_the_way_counts_where_the_estimator_looks(batch: TokenBatch, adv_type: str) -> None:
    """By hand: `raw` credits it to the tokens up to it, `grpo` compares sums. A prompt's tokens are paid nothing."""
    cfg = config(adv_type=adv_type, gamma=1.0)
    cfg.reward.process_terms = [ProcessTermConfig("steps", 0.5), ProcessTermConfig("other", -1.0)]
    algorithm = PolicyGradient(cfg)
    assert [(c.name, c.by) for c in algorithm.columns] == [("process/steps", "steps"), ("process/other", "other")]
    steps, other = torch.rand(batch.tokens), torch.rand(batch.tokens)
    batch.columns |= {"process/steps": steps, "process/other": other}
    found, pieces = (algorithm.advantages(given, None) for given in (batch, in_pieces(batch)))
    assert torch.equal(found, pieces)
    paid = batch.padded((0.5 * steps - other) * batch.mask)
    totals = [(row.sum() + reward) if used else torch.zeros(()) for row, reward, used in zip(
        paid, batch.reward, batch.padded(batch.mask).any(1), strict=True)]  # fmt: skip
    for line, mask in enumerate(batch.padded(batch.mask)):
        group = torch.stack(totals[line // SIZE * SIZE : (line // SIZE + 1) * SIZE])
        if adv_type == "raw":
            expected = (paid[line].flip(0).cumsum(0).flip(0) + batch.reward[line])[mask]
        else:
            expected = ((totals[line] - group.mean()) / (group.std() + 1e-6)).expand(int(mask.sum()))
        torch.testing.assert_close(batch.padded(found)[line][mask], expected)
    batch.columns["advantages"] = found
    whole = MinibatchCounts(float(batch.mask.sum()), float(len(batch) - 1), batch.width)
    _, metrics = algorithm.loss(TokenScores(-torch.rand(batch.tokens), None), batch, whole)
    assert metrics["process/steps"].item() == pytest.approx(steps[batch.mask].sum().item() / (len(batch) - 1), rel=1e-5)


def test_roles_of_an_episode_are_compared_with_their_own_kind(batch: TokenBatch) -> None:
    """Each episode is two samples: one of a planner, one of a worker, who has drawn nothing in the first group."""
    two = in_pieces(batch)
    first = torch.cat([torch.tensor([True]), two.episode[1:] != two.episode[:-1]])
    two.role = (~first).long()
    found = make_algorithm(config()).advantages(two, None)
    for role in (0, 1):
        owner = torch.repeat_interleave(two.role == role, two.lengths) & two.mask
        alone = batch.select(torch.arange(len(batch)))
        alone.mask = owner  # the other's tokens do not count
        expected = make_algorithm(config()).advantages(alone, None)
        torch.testing.assert_close(found[owner], expected[owner])


@pytest.mark.parametrize(
    "options",
    [
        {"kl_coef": 0.1, "entropy_coef": 0.01},
        {"loss_type": "gspo", "loss_agg": "seq-mean-token-mean"},
        {
            "loss_type": "decoupled_ppo",
            "recompute_logprobs": True,
            "tis_cap": 2.0,
            "loss_agg": "seq-mean-token-sum-norm",
        },
    ],
    ids=["ppo", "gspo", "decoupled"],
)
def test_micro_batches_add_up_to_the_whole(batch: TokenBatch, options: dict[str, Any]) -> None:
    algorithm = make_algorithm(config(**options))
    batch.columns["advantages"] = algorithm.advantages(batch, None)
    logprobs = (-torch.rand(batch.tokens)).requires_grad_()
    entropy = torch.rand(batch.tokens) if algorithm.entropy else None
    whole = MinibatchCounts(float(batch.mask.sum()), float(len(batch) - 1), batch.width)
    loss, metrics = algorithm.loss(TokenScores(logprobs, entropy), batch, whole)
    (expected,) = torch.autograd.grad(loss, logprobs)
    sums: dict[str, torch.Tensor] = dict.fromkeys(metrics, torch.zeros(()))
    parts = [(samples, batch.select(samples)) for samples in micro_batches(batch.lengths, 24)]
    for samples, part in [*parts, (torch.zeros(0, dtype=torch.long), batch.empty_sample())]:
        where = batch.tokens_of(samples)
        scores = TokenScores(logprobs[where], None if entropy is None else entropy[where])
        value, found = algorithm.loss(scores, part, whole)
        value.backward()
        sums = {name: sums[name] + found[name] for name in metrics}
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, expected)
    for name in metrics:
        torch.testing.assert_close(sums[name], torch.as_tensor(metrics[name]), msg=name)


def gradients_of(given: TokenBatch, said: torch.Tensor, entropy: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Of log-probs and entropies, with samples of an episode in several micro-batches."""
    algorithm = make_algorithm(config(kl_coef=0.1, entropy_coef=0.01, tis_cap=2.0, **options))
    given.columns["advantages"] = algorithm.advantages(given, None)
    whole = MinibatchCounts.from_batch(given, length=11.0)
    logprobs, uncertain = said.clone().requires_grad_(), entropy.clone().requires_grad_()
    for samples in torch.arange(len(given)).split(5):
        where = given.tokens_of(samples)
        loss, _ = algorithm.loss(TokenScores(logprobs[where], uncertain[where]), given.select(samples), whole)
        loss.backward()
    assert logprobs.grad is not None and uncertain.grad is not None
    return [logprobs.grad, uncertain.grad]


@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "decoupled_ppo", "gspo"])
@pytest.mark.parametrize(
    "loss_agg", ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_an_episode_in_several_samples_has_the_gradient_of_one(
    batch: TokenBatch, loss_agg: str, loss_type: str
) -> None:
    """Over tokens and over sequences, with a penalty and a bonus. GSPO's ratio is a sample's: there it holds as long as the
    samples of an episode have the same, as they do before the first update."""
    options = {"loss_agg": loss_agg, "loss_type": loss_type, "recompute_logprobs": True}
    said, entropy = -torch.rand(batch.tokens), torch.rand(batch.tokens)
    if loss_type == "gspo":
        said = batch.columns["old_logprobs"] + 0.1
    one, other = (gradients_of(given, said, entropy, **options) for given in (batch, in_pieces(batch)))
    for whole, pieces in zip(one, other, strict=True):
        assert whole.abs().max() > 1e-5
        torch.testing.assert_close(whole, pieces, atol=1e-6, rtol=0)


def test_the_ratio_of_gspo_is_a_samples(batch: TokenBatch) -> None:
    """By hand: in pieces, each token is weighed by the ratio of its own piece, and has the advantage of its episode."""
    two = in_pieces(batch)
    algorithm = make_algorithm(config(loss_type="gspo", clip_ratio_low=0.9, clip_ratio_high=9.0))
    two.columns["advantages"] = algorithm.advantages(two, None)
    logprobs = (-torch.rand(batch.tokens)).requires_grad_()
    whole = MinibatchCounts.from_batch(two)
    algorithm.loss(TokenScores(logprobs, None), two, whole)[0].backward()
    expected = torch.zeros(batch.tokens)
    for begin, end in zip(two.cu_seqlens[:-1].tolist(), two.cu_seqlens[1:].tolist(), strict=True):
        own = torch.arange(begin, end)[two.mask[begin:end]]
        ratio = (logprobs.detach() - two.columns["rollout_logprobs"])[own].mean().exp()
        expected[own] = -two.columns["advantages"][own] * ratio / whole.tokens
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "policy_gradiant"}, r"algorithm\.name is 'policy_gradiant', .* did you mean 'policy_gradient'"),
        ({"kwargs": {"beta": 1}}, r"algorithm\.kwargs\.beta is 1; .* no such option; allowed: none"),
        ({"name": "no_such_module:Mine"}, r"algorithm\.name is 'no_such_module:Mine', which cannot be imported"),
        ({"name": "types:SimpleNamespace"}, r"which is no subclass of rlhpc\.LanguageAlgorithm"),
    ],
    ids=["unknown", "arguments", "no module", "no algorithm"],
)  # fmt: skip
def test_what_is_no_algorithm_is_one_message(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_algorithm(config(**changes))


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_gap_of_each_class_of_tokens_is_a_mean_over_its_tokens(batch: TokenBatch, pieces: int) -> None:
    """However the minibatch is cut; and a class without tokens reports none."""
    algorithm = make_algorithm(config())
    engine = batch.columns["rollout_logprobs"] = batch.columns["rollout_logprobs"] * 4
    batch.columns["advantages"] = torch.ones(batch.tokens)
    batch.columns["special"] = torch.arange(batch.tokens) % 3 == 0
    logprobs = engine + 0.1 * torch.randn(batch.tokens, generator=torch.Generator().manual_seed(1))
    counts, sums = MinibatchCounts.from_batch(batch), dict[str, float]()
    for samples in torch.arange(len(batch)).chunk(pieces):
        part = batch.select(samples)
        scores = TokenScores(logprobs[batch.tokens_of(samples)], None)
        for name, value in algorithm.loss(scores, part, counts)[1].items():
            sums[name] = sums.get(name, 0.0) + float(value)
    found = algorithm.summarize(sums)
    gaps: dict[str, list[float]] = {"likely": [], "uncertain": [], "unlikely": [], "first": [], "special": []}
    for token in torch.nonzero(batch.mask).flatten().tolist():
        gap, probability = abs(float(logprobs[token] - engine[token])), math.exp(float(engine[token]))
        gaps["likely" if probability >= 0.9 else "unlikely" if probability < 0.1 else "uncertain"].append(gap)
        if not batch.mask[token - 1]:
            gaps["first"].append(gap)
        if not token % 3:
            gaps["special"].append(gap)
    for name, values in gaps.items():
        assert found[f"mismatch_share/{name}"] == pytest.approx(len(values) / int(batch.mask.sum()), abs=1e-6)
        assert len(values) > 2 and found[f"mismatch_abs/{name}"] == pytest.approx(sum(values) / len(values), rel=1e-4)
    alone = algorithm.summarize({"mismatch_abs/likely": 0.0, "mismatch_share/likely": 0.0, "policy/a/mismatch_abs/first": 0.2,
                                 "policy/a/mismatch_share/first": 0.5})  # fmt: skip
    assert "mismatch_abs/likely" not in alone and alone["policy/a/mismatch_abs/first"] == pytest.approx(0.4)
