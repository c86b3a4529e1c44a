"""The update is the same however the transitions are split over ranks and micro-batches."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhpc.embodied.algorithms.ppo import PolicyUpdate
from rlhpc.embodied.data.minibatches import local_minibatches, permutation, permutation_by_part
from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.flat_parameters import AdamOptions, FlatModule
from tests.replicas import replicated

TOTAL, BATCH = 48, 16
OPTIM = SimpleNamespace(
    name="adam", lr=1e-2, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-5, weight_decay=0.0, clip_grad=0.5
)


class Tiny(nn.Module):
    """A policy over two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.critic = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, work):
        return work(self)

    def default_forward(self, inputs, compute_logprobs, compute_entropy, compute_values):
        logp = torch.log_softmax(self.body(inputs["obs"]), -1)
        return {
            "logprobs": logp.gather(-1, inputs["actions"][:, None])[:, 0],
            "entropy": -(logp.exp() * logp).sum(-1),
            "values": self.critic(inputs["obs"])[:, 0],
        }


def algorithm(**changes):
    values = {
        "update_epochs": 3,
        "loss_type": "ppo",
        "value_coef": 0.5,
        "entropy_coef": 0.01,
        "value_clip": 0.2,
        "target_kl": None,
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
    return {
        "obs": draw(TOTAL, 3),
        "actions": torch.randint(0, 2, (TOTAL,), generator=generator),
        "logprobs": -draw(TOTAL).abs(),
        "values": draw(TOTAL),
        "advantages": draw(TOTAL) * 3 + 1,
        "returns": draw(TOTAL),
        "mask": mask,
    }


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
    """Weights and metrics after one update by `ranks` ranks."""
    batch, team, results = rollout(masked), Team(ranks), {}

    def one(rank):
        module = Tiny()
        module.load_state_dict(initial)
        backend = replicated(module, OPTIM, team.reduce, ranks)
        size = TOTAL // ranks
        held = range(rank * size, (rank + 1) * size)
        update = PolicyUpdate(
            algorithm(**changes), backend, batch_size=BATCH, micro_batch=micro, seed=7, reduce=team.reduce, ranks=ranks
        )
        mine = {name: column[held.start : held.stop] for name, column in batch.items()}
        metrics = update.run(mine, held, TOTAL, step=4, lr=1e-2)
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


def test_a_minibatch_of_which_nothing_trains_takes_no_step():
    """Nor is it in a mean; whatever momentum the optimizer has."""
    module = Tiny()
    update = PolicyUpdate(algorithm(), replicated(module, OPTIM), batch_size=BATCH, micro_batch=None, seed=7)
    full = rollout(False)
    metrics = update.run(full, range(TOTAL), TOTAL, step=1, lr=1e-2)
    assert "empty_minibatches" not in metrics
    before = [parameter.detach().clone() for parameter in module.parameters()]
    nothing = {**full, "mask": torch.zeros_like(full["mask"])}
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
        b = {name: column[index] for name, column in batch.items()}
        out = module.default_forward(b, True, True, True)
        ratio = (out["logprobs"] - b["logprobs"]).clamp(-20, 20).exp()
        advantages = (b["advantages"] - b["advantages"].mean()) / (b["advantages"].std() + 1e-8)
        policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        clipped = b["values"] + (out["values"] - b["values"]).clamp(-0.2, 0.2)
        value = 0.5 * torch.max((out["values"] - b["returns"]) ** 2, (clipped - b["returns"]) ** 2).mean()
        optimizer.zero_grad()
        (policy + 0.5 * value - 0.01 * out["entropy"].mean()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_minibatches_partition_the_transitions():
    order = permutation(TOTAL, 1, 2, 3)
    assert sorted(order.tolist()) == list(range(TOTAL))
    assert order.tolist() == permutation(TOTAL, 1, 2, 3).tolist() != permutation(TOTAL, 1, 2, 4).tolist()
    halves = [local_minibatches(order, BATCH, held) for held in (range(24), range(24, 48))]
    for m, (low, high) in enumerate(zip(*halves, strict=True)):
        assert sorted([*low.tolist(), *(high + 24).tolist()]) == sorted(order[m * BATCH : (m + 1) * BATCH].tolist())


def loss_of(module):
    inputs = {"obs": torch.ones(2, 3, dtype=torch.float64), "actions": torch.tensor([0, 1])}
    return (
        module.default_forward(inputs, True, True, True)["logprobs"].sum() + module.critic(inputs["obs"]).square().sum()
    )


@pytest.mark.parametrize(("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_optimizer_is_torchs(name, kind, decay):
    module, other = Tiny(), Tiny()
    other.load_state_dict(module.state_dict())
    options = SimpleNamespace(**{**vars(OPTIM), "name": name, "weight_decay": decay, "clip_grad": None})
    backend = FlatModule(module, AdamOptions.of(options))
    reference = kind(other.parameters(), lr=1e-2, eps=1e-5, weight_decay=decay)
    for _ in range(5):
        backend.zero_grad()
        loss_of(module).backward()
        backend.optimizer_step(1e-2)
        reference.zero_grad()
        loss_of(other).backward()
        reference.step()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_optimizer_state_survives_a_round_trip():
    backend, other = FlatModule(Tiny(), AdamOptions.of(OPTIM)), FlatModule(Tiny(), AdamOptions.of(OPTIM))
    for b in (backend, other):
        if b is other:
            other.module.load_state_dict(backend.module.state_dict())
            other.load_state_dict(backend.state_dict())
        for _ in range(2 if b is backend else 0):
            b.zero_grad()
            loss_of(b.module).backward()
            b.optimizer_step(1e-2)
    for b in (backend, other):
        b.zero_grad()
        loss_of(b.module).backward()
        b.optimizer_step(1e-2)
    for a, b in zip(backend.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_optimizer_of_another_model_is_refused():
    state = FlatModule(nn.Linear(2, 2), AdamOptions.of(OPTIM)).state_dict()
    with pytest.raises(CheckpointError, match="other parameters"):
        FlatModule(nn.Linear(3, 2), AdamOptions.of(OPTIM)).load_state_dict(state)


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


def test_parts_come_one_after_the_other() -> None:
    slots, steps, parts = 3, 8, 2
    order = permutation_by_part(slots, steps, parts, 7, 1)
    first, second = ((order[:12] % steps).tolist(), (order[12:] % steps).tolist())
    assert sorted(order.tolist()) == list(range(slots * steps))
    assert max(first) == 3 and min(second) == 4
    assert (order[:12] - order[12:] + 4).any(), "each in an order of its own"
