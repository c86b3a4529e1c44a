"""SAC's update beside a plain one, and on any number of ranks."""

from __future__ import annotations

import copy
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlhpc.embodied.config import SacModelConfig
from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.sac import SACPolicy
from rlhpc.embodied.update.sac import SacBatch, SacUpdate
from rlhpc.runtime.errors import CheckpointError, ConfigError

OBS, ACT, ROWS = 5, 2, 24
LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32)
SPACES = spaces.Box(-np.inf, np.inf, (OBS,), np.float32), spaces.Box(LOW, HIGH)
OPTIM = SimpleNamespace(
    name="adam",
    lr=3e-3,
    value_lr=1e-2,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_eps=1e-8,
    weight_decay=0.0,
    clip_grad=None,
)


def model(**changes):
    values = {
        "model_type": "sac", "hidden_sizes": [16, 16], "activation": "relu", "ortho_init": False, "log_std_init": 0.0,
        "critic_layer_norm": False, "kwargs": {},
    }  # fmt: skip
    return SacModelConfig(**{**values, **changes})


def algorithm(**changes):
    values = {
        "gamma": 0.9, "tau": 0.1, "auto_entropy_tuning": True, "initial_alpha": 0.3, "target_entropy": None, "alpha_lr": None,
        "backup_entropy": True, "critic_actor_ratio": 1, "target_update_freq": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def policy(**changes) -> SACPolicy:
    return build_model(model(**changes), *SPACES, seed=1).double()


def batch(update: int, rows=slice(None)) -> SacBatch:
    generator = torch.Generator().manual_seed(update)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    parts = {"obs": draw(ROWS, OBS), "actions": draw(ROWS, 1, ACT), "rewards": draw(ROWS), "next_obs": draw(ROWS, OBS)}
    parts["terminations"] = draw(ROWS) > 1
    noise = draw(2, ROWS, ACT)
    return SacBatch(**{name: part[rows] for name, part in parts.items()}, noise=noise[:, rows], total=ROWS)


class Plain:
    """SAC written down as the paper and CleanRL's file have it: torch.distributions, torch.optim, one module a network."""

    def __init__(self, of: SACPolicy, alg: SimpleNamespace) -> None:
        self.alg, self.actor = alg, copy.deepcopy(of.actor)
        self.critics = nn.ModuleList(self.critic(of.critics, i) for i in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.tensor([math.log(alg.initial_alpha)], dtype=torch.float64, requires_grad=True)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_opt = torch.optim.Adam(self.critics.parameters(), lr=1e-2)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], lr=1e-2)
        self.scale, self.bias = (torch.tensor(x, dtype=torch.float64) for x in ((HIGH - LOW) / 2, (HIGH + LOW) / 2))

    @staticmethod
    def critic(twin, i: int) -> nn.Sequential:
        first = nn.Linear(OBS + ACT, 16, dtype=torch.float64)
        with torch.no_grad():
            first.weight.copy_(twin.first.weight[16 * i : 16 * (i + 1)])
            first.bias.copy_(twin.first.bias[16 * i : 16 * (i + 1)])
        return nn.Sequential(first, *copy.deepcopy((twin.one, twin.two)[i]))

    def act(self, obs, noise):
        mean, log_std = self.actor(obs).chunk(2, -1)
        log_std = -5 + 0.5 * 7 * (torch.tanh(log_std) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        before = mean + log_std.exp() * noise
        squashed = torch.tanh(before)
        logprob = normal.log_prob(before) - torch.log(self.scale * (1 - squashed.pow(2)) + 1e-6)
        return squashed * self.scale + self.bias, logprob.sum(-1)

    def step(self, data: SacBatch, number: int) -> None:
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            action, logprob = self.act(data.next_obs, data.noise[0])
            value = torch.min(*(q(torch.cat([data.next_obs, action], 1)).flatten() for q in self.targets))
            value = value - alpha * logprob if self.alg.backup_entropy else value
            wanted = data.rewards + (1 - data.terminations.double()) * self.alg.gamma * value
        found = [q(torch.cat([data.obs, data.actions[:, 0]], 1)).flatten() for q in self.critics]
        self.q_loss = sum(nn.functional.mse_loss(q, wanted) for q in found)
        self.critic_opt.zero_grad()
        self.q_loss.backward()
        self.critic_opt.step()
        if number % self.alg.critic_actor_ratio == 0:
            action, logprob = self.act(data.obs, data.noise[1])
            value = torch.min(*(q(torch.cat([data.obs, action], 1)).flatten() for q in self.critics))
            self.actor_loss = (alpha * logprob - value).mean()
            self.actor_opt.zero_grad()
            self.actor_loss.backward()
            self.actor_opt.step()
            if self.alg.auto_entropy_tuning:
                target = -ACT if self.alg.target_entropy is None else self.alg.target_entropy
                self.alpha_opt.zero_grad()
                (-self.log_alpha.exp() * (logprob.detach() + target)).mean().backward()
                self.alpha_opt.step()
        if number % self.alg.target_update_freq == 0:
            for q, target in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
                target.data.copy_(self.alg.tau * q.data + (1 - self.alg.tau) * target.data)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"auto_entropy_tuning": False, "backup_entropy": False},
        {"critic_actor_ratio": 2, "target_update_freq": 3, "target_entropy": -0.5},
    ],
)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_updates_equal_those_of_a_plain_implementation(changes, layer_norm):
    ours, alg = policy(critic_layer_norm=layer_norm), algorithm(**changes)
    plain = Plain(ours, alg)
    update = SacUpdate(alg, OPTIM, ours)
    for number in range(1, 7):
        update.step(batch(number))
        plain.step(batch(number), number)
        metrics = update.metrics()
        assert metrics["q_loss"] == pytest.approx(plain.q_loss.item(), rel=1e-5)
        if number % alg.critic_actor_ratio == 0:
            assert metrics["actor_loss"] == pytest.approx(plain.actor_loss.item(), rel=1e-5)
        assert metrics["alpha"] == pytest.approx(plain.log_alpha.exp().item(), rel=1e-5)
    close = {"rtol": 1e-5, "atol": 1e-7}
    for mine, theirs in zip(ours.actor.parameters(), plain.actor.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **close)
    for networks, theirs in ((ours.critics, plain.critics), (update.targets, plain.targets)):
        for i, critic in enumerate(theirs):
            again = Plain.critic(networks, i)
            for mine, other in zip(again.parameters(), critic.parameters(), strict=True):
                torch.testing.assert_close(mine, other, **close)


def test_ranks_make_the_update_of_one():
    """Three ranks with unequal parts of each batch, one of them with none."""
    whole = SacUpdate(algorithm(), OPTIM, policy())
    for number in range(1, 4):
        whole.step(batch(number))
    expected = whole.metrics()
    barrier, held = threading.Barrier(3, timeout=30), {}

    def reduce(rank):
        def add(tensor):
            held[rank] = tensor.clone()
            barrier.wait()
            total = held[0] + held[1] + held[2]
            barrier.wait()
            return tensor.copy_(total)

        return add

    parts, results = (slice(0, 17), slice(17, 17), slice(17, ROWS)), {}
    policies = [policy() for _ in parts]  # here: threads would share the generator that draws their weights

    def work(rank):
        update = SacUpdate(algorithm(), OPTIM, policies[rank], reduce(rank), 3)
        for number in range(1, 4):
            update.step(batch(number, parts[rank]))
        results[rank] = update.metrics(), update

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert len(results) == 3
    for metrics, update in results.values():
        assert metrics == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(update.critic.weights, whole.critic.weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(update.actor.weights, whole.actor.weights, rtol=1e-5, atol=1e-6)


def test_state_goes_on_bit_for_bit_and_another_model_is_refused():
    first = SacUpdate(algorithm(), OPTIM, policy())
    for number in range(1, 4):
        first.step(batch(number))
    first.metrics()
    state, weights = first.state_dict(), copy.deepcopy(first.policy.state_dict())
    second = SacUpdate(algorithm(), OPTIM, policy())
    second.policy.load_state_dict(weights)
    second.load_state_dict(state)
    for update in (first, second):
        for number in range(4, 7):
            update.step(batch(number))
    assert torch.equal(first.critic.weights, second.critic.weights)
    assert torch.equal(first.actor.weights, second.actor.weights) and first.metrics() == second.metrics()
    with pytest.raises(CheckpointError):
        SacUpdate(algorithm(), OPTIM, policy(hidden_sizes=[8])).load_state_dict(state)
    with pytest.raises(CheckpointError):
        SacUpdate(algorithm(), OPTIM, policy()).load_state_dict({"optimizer": "adam"})


def test_actions_fill_the_bounds_and_log_probs_integrate_to_one():
    ours = build_model(model(), spaces.Box(-1, 1, (1,), np.float32), spaces.Box(-3, 1, (1,), np.float32), seed=2)
    obs = torch.zeros(20_001, 1)
    actions, extras = ours.predict_action_batch(obs[:1000], mode="train", noise=torch.randn(1000, 1) * 30)
    assert actions.min() < -2.99 and actions.max() > 0.99 and actions.min() >= -3 and actions.max() <= 1
    grid = torch.linspace(-3 + 1e-4, 1 - 1e-4, len(obs))
    logprobs = ours.default_forward({"obs": obs, "actions": grid[:, None, None]})["logprobs"]
    assert torch.trapezoid(logprobs.exp(), grid).item() == pytest.approx(1, abs=2e-3)
    noise = torch.randn(64, 1)
    actions, extras = ours.predict_action_batch(obs[:64], noise=noise)
    again = ours.default_forward({"obs": obs[:64], "actions": actions}, compute_values=True)
    torch.testing.assert_close(again["logprobs"], extras["prev_logprobs"], rtol=1e-3, atol=1e-3)
    assert again["values"].shape == (64,)
    best, _ = ours.predict_action_batch(obs[:2], mode="eval")
    assert torch.equal(best, ours.predict_action_batch(obs[:2], mode="eval")[0])
    even = ours.head.uniform(torch.randn(20_000, 1))
    assert even.mean().item() == pytest.approx(-1, abs=0.05) and even.std().item() == pytest.approx(
        4 / 12**0.5, abs=0.05
    )


def test_several_observations_and_the_spec():
    parts = {"state": spaces.Box(-1, 1, (3,), np.float32), "extra": spaces.Box(-1, 1, (2, 2), np.float32)}
    ours = build_model(model(), spaces.Dict(parts), SPACES[1], seed=1)
    obs = {"state": torch.rand(4, 3), "extra": torch.rand(4, 2, 2)}
    assert ours.predict_action_batch(obs)[0].shape == (4, 1, 2)
    plain = build_model(model(), *SPACES, seed=1)
    copied = policy_from_spec(plain.spec())
    copied.load_state_dict(plain.state_dict())
    rows = torch.rand(3, OBS)
    assert torch.equal(copied.predict_action_batch(rows, "eval")[0], plain.predict_action_batch(rows, "eval")[0])


@pytest.mark.parametrize(
    ("obs", "action", "words"),
    [
        (SPACES[0], spaces.Discrete(3), "bounded continuous actions"),
        (SPACES[0], spaces.Box(-np.inf, np.inf, (2,)), "bounded continuous actions"),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), SPACES[1], "observations of numbers"),
    ],
)
def test_spaces_that_it_cannot_take(obs, action, words):
    with pytest.raises(ConfigError, match=words):
        build_model(model(), obs, action)
