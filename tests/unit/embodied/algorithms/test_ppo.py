"""The update is the same however the transitions are split over ranks and micro-batches."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhpc.embodied.algorithms.ppo import PolicyUpdate
from rlhpc.embodied.data.batches import TrainBatch, permutation
from tests.replicas import replicated
from tests.unit.embodied.algorithms.ppo_updates import BATCH, OPTIM, TOTAL, Tiny


def algorithm(**changes):
    values = {
        "update_epochs": 3,
        "loss_type": "ppo",
        "value_coef": 0.5,
        "entropy_coef": 0.01,
        "value_clip": 0.2,
        "target_kl": None,
        "huber_delta": None,
        "loss_agg": "token-mean",
        "count_filtered_groups": False,
        "normalize_advantages": "minibatch",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": None,
    }
    return SimpleNamespace(**{**values, **changes})


def rollout(masked):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.ones(TOTAL, dtype=torch.float64)
    if masked:
        mask[::5] = 0
    return TrainBatch(
        obs=draw(TOTAL, 3),
        actions=torch.randint(0, 2, (TOTAL,), generator=generator),
        logprobs=-draw(TOTAL).abs(),
        values=draw(TOTAL),
        advantages=draw(TOTAL) * 3 + 1,
        returns=draw(TOTAL),
        mask=mask,
    )


class Team:
    """all_reduce between threads that play the ranks."""

    def __init__(self, ranks):
        self.barrier, self.lock, self.parts = threading.Barrier(ranks), threading.Lock(), []

    def reduce(self, tensor):
        self.barrier.wait(20)
        with self.lock:
            self.parts.append(tensor.clone())
        self.barrier.wait(20)
        total = torch.stack(self.parts).sum(0)
        if self.barrier.wait(20) == 0:
            self.parts.clear()
        tensor.copy_(total)
        return tensor


def train(ranks, micro, masked=False, **changes):
    """Weights and metrics after one update by `ranks` ranks. A sequence has 8 transitions."""
    batch, team, results = rollout(masked), Team(ranks), {}

    def one(rank):
        module = Tiny()
        module.load_state_dict(initial)
        backend = replicated(module, OPTIM, team.reduce, ranks)
        size = TOTAL // ranks
        held = range(rank * size, (rank + 1) * size)
        update = PolicyUpdate(
            algorithm(**changes),
            backend,
            batch_size=BATCH,
            micro_batch=micro,
            seed=7,
            reduce=team.reduce,
            num_ranks=ranks,
            sequence_length=8,
        )
        metrics = update.run(batch.select(torch.arange(TOTAL)[held.start : held.stop]), held, TOTAL, step=4, lr=1e-2)
        results[rank] = (torch.cat([p.detach().flatten() for p in module.parameters()]), metrics)

    torch.manual_seed(0)
    initial = Tiny().state_dict()
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == ranks
    return results


@pytest.mark.parametrize("normalize", ["minibatch", "batch", "none"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, None), (3, None), (2, 3)])
def test_any_split_makes_the_same_update(ranks, micro, masked, normalize):
    weights, metrics = train(1, None, masked, normalize_advantages=normalize)[0]
    for other, found in train(ranks, micro, masked, normalize_advantages=normalize).values():
        torch.testing.assert_close(other, weights, rtol=1e-6, atol=1e-7)
        for name, value in metrics.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, None), (3, 3)])
def test_any_split_makes_the_same_update_with_episodes_of_the_same_weight(ranks, micro):
    options = {"loss_agg": "seq-mean-token-mean", "huber_delta": 0.5, "value_clip": None}
    weights, metrics = train(1, None, True, **options)[0]
    for other, found in train(ranks, micro, True, **options).values():
        torch.testing.assert_close(other, weights, rtol=1e-5, atol=1e-6)
        for name, value in metrics.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_minibatches_add_up_to_the_mean_over_episodes():
    """The mean of the minibatches' losses is that of one minibatch of all, whose losses are those of a loop by hand."""
    batch, values = rollout(True), {}
    lengths = batch.mask.view(-1, 8).sum(1)
    for size in (BATCH, TOTAL):
        module = Tiny()
        module.load_state_dict({name: torch.full_like(p, 0.1) for name, p in module.state_dict().items()})
        options = algorithm(
            loss_agg="seq-mean-token-mean", normalize_advantages="none", update_epochs=1, value_clip=None
        )
        frozen = SimpleNamespace(**vars(OPTIM) | {"lr": 1e-30})
        update = PolicyUpdate(
            options, replicated(module, frozen), batch_size=size, micro_batch=None, seed=7, sequence_length=8
        )
        values[size] = update.run(batch, range(TOTAL), TOTAL, step=1, lr=1e-30)
    errors = (module.default_forward(batch.policy_inputs(), True, True, True)["values"] - batch.returns) ** 2 / 2
    by_hand = ((errors * batch.mask).view(-1, 8).sum(1) / lengths).mean()
    assert values[TOTAL]["value_loss"] == pytest.approx(float(by_hand.detach()), rel=1e-5)
    assert values[BATCH]["value_loss"] == pytest.approx(values[TOTAL]["value_loss"], rel=1e-5)
    assert values[BATCH]["policy_loss"] == pytest.approx(values[TOTAL]["policy_loss"], rel=1e-5)


def test_a_minibatch_of_which_nothing_trains_takes_no_step():
    """Nor is it in a mean; whatever momentum the optimizer has."""
    module = Tiny()
    update = PolicyUpdate(algorithm(), replicated(module, OPTIM), batch_size=BATCH, micro_batch=None, seed=7)
    full = rollout(False)
    metrics = update.run(full, range(TOTAL), TOTAL, step=1, lr=1e-2)
    assert "empty_minibatches" not in metrics
    before = [parameter.detach().clone() for parameter in module.parameters()]
    nothing = replace(full, mask=torch.zeros_like(full.mask))
    metrics = update.run(nothing, range(TOTAL), TOTAL, step=2, lr=1e-2)
    assert metrics["epochs"] == 0 and metrics["empty_minibatches"] == algorithm().update_epochs * TOTAL / BATCH
    assert all(torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True))


def test_the_update_is_that_of_plain_ppo():
    module = Tiny()
    torch.manual_seed(0)
    module.load_state_dict(Tiny().state_dict())
    torch.manual_seed(0)
    weights, _ = train(1, None, update_epochs=1)[0]
    torch.manual_seed(0)
    module.load_state_dict(Tiny().state_dict())
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, eps=1e-5)
    batch = rollout(False)
    for index in permutation(TOTAL, 7, 4, 0).split(BATCH):
        b = batch.select(index)
        out = module.default_forward(b.policy_inputs(), True, True, True)
        ratio = (out["logprobs"] - b.logprobs).clamp(-20, 20).exp()
        advantages = (b.advantages - b.advantages.mean()) / (b.advantages.std() + 1e-8)
        policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        clipped = b.values + (out["values"] - b.values).clamp(-0.2, 0.2)
        value = 0.5 * torch.max((out["values"] - b.returns) ** 2, (clipped - b.returns) ** 2).mean()
        optimizer.zero_grad()
        (policy + 0.5 * value - 0.01 * out["entropy"].mean()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_what_a_person_chose_trains_the_values_and_not_the_policy():
    """The update is that of a plain loop: led rows are in the value loss alone, and advantages are normalised without them."""
    led = torch.arange(TOTAL) % 3 == 0
    torch.manual_seed(0)
    initial = Tiny().state_dict()

    def trained(batch):
        module = Tiny()
        module.load_state_dict(initial)
        options = algorithm(update_epochs=1)
        update = PolicyUpdate(options, replicated(module, OPTIM), batch_size=BATCH, micro_batch=None, seed=7)
        update.run(batch, range(TOTAL), TOTAL, step=4, lr=1e-2)
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    batch = replace(rollout(False), policy_mask=(~led).double())
    odd = replace(
        batch, actions=torch.where(led, 1 - batch.actions, batch.actions), logprobs=batch.logprobs - 5.0 * led
    )
    torch.testing.assert_close(trained(batch), trained(odd), rtol=0, atol=0)
    module = Tiny()
    module.load_state_dict(initial)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, eps=1e-5)
    for index in permutation(TOTAL, 7, 4, 0).split(BATCH):
        b, own = batch.select(index), ~led[index]
        out = module.default_forward(b.policy_inputs(), True, True, True)
        ratio = (out["logprobs"] - b.logprobs).clamp(-20, 20).exp()[own]
        advantages = b.advantages[own]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        clipped = b.values + (out["values"] - b.values).clamp(-0.2, 0.2)
        value = 0.5 * torch.max((out["values"] - b.returns) ** 2, (clipped - b.returns) ** 2).mean()
        optimizer.zero_grad()
        (policy + 0.5 * value - 0.01 * out["entropy"][own].mean()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(trained(batch), expected, rtol=1e-5, atol=1e-7)


def test_a_step_ends_before_the_update_of_the_first_minibatch_that_passes_the_kl_limit():
    torch.manual_seed(0)
    initial = torch.cat([p.detach().flatten() for p in Tiny().parameters()])
    weights, metrics = train(1, None, target_kl=1e-6)[0]  # the rollout's log-probs are not the policy's: passed at once
    assert metrics["epochs"] == 0
    torch.testing.assert_close(weights, initial)
    unlimited, _ = train(1, None)[0]
    torch.testing.assert_close(train(1, None, target_kl=1e6)[0][0], unlimited)
    for other, found in train(2, None, target_kl=1e-6).values():
        assert found["epochs"] == 0
        torch.testing.assert_close(other, initial)


def test_tokens_that_the_policy_has_left_far_behind_are_not_trained_on():
    """As RLinf's compute_decoupled_ppo_actor_loss: a mean over the tokens whose ratio is not above the threshold."""
    torch.manual_seed(0)
    module = Tiny()
    backend = replicated(module, OPTIM, lambda tensor: tensor, 1)
    options = algorithm(
        loss_type="decoupled_ppo", tis_cap=None, behave_weight_threshold=1.3, proximal_policy="recomputed",
        update_epochs=1, value_coef=0.0, entropy_coef=0.0, normalize_advantages="none",
    )  # fmt: skip
    update = PolicyUpdate(options, backend, batch_size=TOTAL, micro_batch=None, seed=7, reduce=lambda t: t, num_ranks=1)
    batch = rollout(masked=True)
    with torch.no_grad():
        outputs = module.default_forward({"obs": batch.obs, "actions": batch.actions}, True, True, False)
    proximal, entropy = outputs["logprobs"], outputs["entropy"].clone()
    ratios = (proximal - batch.logprobs).exp()
    kept = (ratios <= 1.3) & (batch.mask > 0)
    assert 0 < kept.sum() < (batch.mask > 0).sum()
    metrics = update.run(batch, range(TOTAL), TOTAL, step=1, lr=1e-2)
    # Before the update the ratio to the proximal policy is 1, so the loss is the mean of -advantage * ratio.
    assert metrics["policy_loss"] == pytest.approx(float((-batch.advantages * ratios)[kept].mean()))
    # The entropy is a mean over all tokens, as in RLinf's async_ppo_fsdp_worker.py.
    assert metrics["entropy"] == pytest.approx(float(entropy[batch.mask > 0].mean()))
    assert float(entropy[kept].mean()) != pytest.approx(metrics["entropy"])
