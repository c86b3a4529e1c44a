"""Off-policy updates beside plain ones, and on any number of ranks."""

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

from rlhpc.embodied.algorithms.iql import IqlUpdate
from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate, TransitionBatch
from rlhpc.embodied.algorithms.registry import algorithm_for
from rlhpc.embodied.algorithms.sac import CrossQUpdate, SacUpdate
from rlhpc.embodied.algorithms.td3 import Td3Update
from rlhpc.embodied.config import SacModelConfig
from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.off_policy import WARM_UP, ActorCritic, BatchRenorm
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
        "model_type": "sac", "hidden_sizes": [16, 16], "activation": "relu", "ortho_init": False,
        "critic_layer_norm": False, "kwargs": {},
    }  # fmt: skip
    return SacModelConfig(**{**values, **changes})


def algorithm(**changes):
    values = {
        "gamma": 0.9, "tau": 0.1, "auto_entropy_tuning": True, "initial_alpha": 0.3, "target_entropy": None, "alpha_lr": None,
        "backup_entropy": True, "critic_actor_ratio": 1, "target_update_freq": 1, "policy_noise": 0.4, "noise_clip": 0.5,
        "expectile": 0.7, "inverse_temperature": 3.0, "max_weight": 100.0,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def policy(**changes) -> ActorCritic:
    return build_model(model(**changes), *SPACES, seed=1).double()


def batch(update: int, rows=slice(None)) -> TransitionBatch:
    generator = torch.Generator().manual_seed(update)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    parts = {"obs": draw(ROWS, OBS), "actions": draw(ROWS, 1, ACT), "rewards": draw(ROWS), "next_obs": draw(ROWS, OBS)}
    parts["terminations"] = draw(ROWS) > 1
    noise = draw(2, ROWS, ACT)
    return TransitionBatch(**{name: part[rows] for name, part in parts.items()}, noise=noise[:, rows], total=ROWS)


class Plain:
    """What the papers and CleanRL's files have in common: torch.optim, one module a network."""

    def __init__(self, of: ActorCritic, alg: SimpleNamespace) -> None:
        self.alg, self.actor = alg, copy.deepcopy(of.actor)
        self.critics = nn.ModuleList(self.critic(of.critics, i) for i in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_opt = torch.optim.Adam(self.critics.parameters(), lr=1e-2)
        self.scale, self.bias = (torch.tensor(x, dtype=torch.float64) for x in ((HIGH - LOW) / 2, (HIGH + LOW) / 2))
        self.averaged = [(self.critics, self.targets)]

    @staticmethod
    def critic(twin, i: int) -> nn.Sequential:
        first = nn.Linear(OBS + ACT, 16, dtype=torch.float64)
        with torch.no_grad():
            first.weight.copy_(twin.first.weight[16 * i : 16 * (i + 1)])
            first.bias.copy_(twin.first.bias[16 * i : 16 * (i + 1)])
        return nn.Sequential(first, *copy.deepcopy((twin.one, twin.two)[i]))

    def values(self, data):
        """Of the present, by each critic, and of what follows."""
        with torch.no_grad():
            action, cost = self.following(data)
            after = torch.min(*(q(torch.cat([data.next_obs, action], 1)).flatten() for q in self.targets)) - cost
        return [q(torch.cat([data.obs, data.actions[:, 0]], 1)).flatten() for q in self.critics], after

    def step(self, data: TransitionBatch, number: int) -> None:
        found, after = self.values(data)
        wanted = (data.rewards + (1 - data.terminations.double()) * self.alg.gamma * after).detach()
        self.q_loss = sum(nn.functional.mse_loss(q, wanted) for q in found)
        self.critic_opt.zero_grad()
        self.q_loss.backward()
        self.critic_opt.step()
        if number % self.alg.critic_actor_ratio == 0:
            self.actor_loss = self.loss(data)
            self.actor_opt.zero_grad()
            self.actor_loss.backward()
            self.actor_opt.step()
            self.after()
        if number % self.alg.target_update_freq == 0:
            for network, average in self.averaged:
                for now, target in zip(network.parameters(), average.parameters(), strict=True):
                    target.data.copy_(self.alg.tau * now.data + (1 - self.alg.tau) * target.data)

    def after(self) -> None:
        pass


class PlainSac(Plain):
    """With torch.distributions."""

    def __init__(self, of: ActorCritic, alg: SimpleNamespace) -> None:
        super().__init__(of, alg)
        self.log_alpha = torch.tensor([math.log(alg.initial_alpha)], dtype=torch.float64, requires_grad=True)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], lr=1e-2)

    def act(self, obs, noise):
        mean, log_std = self.actor(obs).chunk(2, -1)
        log_std = -5 + 0.5 * 7 * (torch.tanh(log_std) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        before = mean + log_std.exp() * noise
        squashed = torch.tanh(before)
        logprob = normal.log_prob(before) - torch.log(self.scale * (1 - squashed.pow(2)) + 1e-6)
        return squashed * self.scale + self.bias, logprob.sum(-1)

    def following(self, data):
        action, logprob = self.act(data.next_obs, data.noise[0])
        return action, self.log_alpha.exp() * logprob if self.alg.backup_entropy else 0.0

    def loss(self, data):
        action, self.logprob = self.act(data.obs, data.noise[1])
        value = torch.min(*(q(torch.cat([data.obs, action], 1)).flatten() for q in self.critics))
        return (self.log_alpha.exp().detach() * self.logprob - value).mean()

    def after(self):
        if self.alg.auto_entropy_tuning:
            target = -ACT if self.alg.target_entropy is None else self.alg.target_entropy
            self.alpha_opt.zero_grad()
            (-self.log_alpha.exp() * (self.logprob.detach() + target)).mean().backward()
            self.alpha_opt.step()


class PlainTd3(Plain):
    def __init__(self, of: ActorCritic, alg: SimpleNamespace) -> None:
        super().__init__(of, alg)
        self.target_actor = copy.deepcopy(self.actor)
        self.averaged.append((self.actor, self.target_actor))

    def following(self, data):
        noise = (data.noise[0] * self.alg.policy_noise).clamp(-self.alg.noise_clip, self.alg.noise_clip) * self.scale
        action = torch.tanh(self.target_actor(data.next_obs)) * self.scale + self.bias + noise
        low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (LOW, HIGH))
        return action.clamp(low, high), 0.0

    def loss(self, data):
        action = torch.tanh(self.actor(data.obs)) * self.scale + self.bias
        return -self.critics[0](torch.cat([data.obs, action], 1)).mean()


class Renorm(nn.BatchNorm1d):
    """As long as it warms up: torch's batch norm, but for the running variance, which is that of the batch as it is."""

    def forward(self, rows):
        if not self.training:
            return super().forward(rows)
        self.running_mean.lerp_(rows.mean(0).detach(), self.momentum)
        self.running_var.lerp_(rows.var(0, correction=0).detach(), self.momentum)
        return nn.functional.batch_norm(rows, None, None, self.weight, self.bias, True, 0.0, self.eps)


class PlainCrossQ(PlainSac):
    def __init__(self, of: ActorCritic, alg: SimpleNamespace) -> None:
        super().__init__(of, alg)
        self.actor, self.averaged = self.plain(of.actor), []
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-3)

    @staticmethod
    def plain(network) -> nn.Sequential:
        def norm(of: BatchRenorm) -> Renorm:
            made = Renorm(len(of.weight), 1e-3, 0.01, dtype=torch.float64)
            with torch.no_grad():
                made.weight.copy_(of.weight)
                made.bias.copy_(of.bias)
            return made

        made = [norm(layer) if isinstance(layer, BatchRenorm) else copy.deepcopy(layer) for layer in network]
        return nn.Sequential(*made).eval()

    @classmethod
    def critic(cls, twin, i: int) -> nn.Sequential:
        return cls.plain((twin.one, twin.two)[i])

    def values(self, data):
        action, cost = self.following(data)
        both = [torch.cat(part) for part in ((data.obs, data.next_obs), (data.actions[:, 0], action.detach()))]
        self.critics.train()
        found, after = zip(*(q(torch.cat(both, 1)).flatten().chunk(2) for q in self.critics), strict=True)
        self.critics.eval()
        return found, torch.min(*after).detach() - cost

    def loss(self, data):
        self.actor.train()
        made = super().loss(data)
        self.actor.eval()
        return made


class PlainIql(Plain):
    """CORL's order: value network, critics, target networks, policy; with an optimizer for each."""

    def __init__(self, of: ActorCritic, alg: SimpleNamespace) -> None:
        super().__init__(of, alg)
        self.value = copy.deepcopy(of.critics.value)
        self.value_opt = torch.optim.Adam(self.value.parameters(), lr=1e-2)

    def values(self, data):
        pairs = torch.cat([data.obs, data.actions[:, 0]], 1)
        with torch.no_grad():
            after = self.value(data.next_obs).flatten()
            wanted = torch.min(*(q(pairs).flatten() for q in self.targets))
        apart = wanted - self.value(data.obs).flatten()
        self.value_loss = (torch.abs(self.alg.expectile - (apart < 0).double()) * apart**2).mean()
        self.advantage = apart.detach()
        self.value_opt.zero_grad()
        self.value_loss.backward()
        self.value_opt.step()
        return [q(pairs).flatten() for q in self.critics], after

    def loss(self, data):
        mean = torch.tanh(self.actor.mean(data.obs)) * self.scale + self.bias
        normal = torch.distributions.Normal(mean, self.actor.log_std.clamp(-20, 2).exp() * self.scale)
        weight = torch.exp(self.alg.inverse_temperature * self.advantage).clamp(max=self.alg.max_weight)
        return (weight * -normal.log_prob(data.actions[:, 0]).sum(-1)).mean()


ALGORITHMS: dict[str, tuple[type[OffPolicyUpdate], type[Plain]]] = {
    "sac": (SacUpdate, PlainSac),
    "crossq": (CrossQUpdate, PlainCrossQ),
    "td3": (Td3Update, PlainTd3),
    "iql": (IqlUpdate, PlainIql),
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sac", {}),
        ("sac", {"auto_entropy_tuning": False, "backup_entropy": False}),
        ("sac", {"critic_actor_ratio": 2, "target_update_freq": 3, "target_entropy": -0.5}),
        ("crossq", {"critic_actor_ratio": 3}),
        ("td3", {}),
        ("td3", {"critic_actor_ratio": 2, "target_update_freq": 2, "policy_noise": 0.9}),
        ("iql", {}),
        ("iql", {"critic_actor_ratio": 2, "expectile": 0.9, "inverse_temperature": 10.0, "max_weight": 1.5}),
    ],
)
@pytest.mark.parametrize("layer_norm", [False, True])
def test_updates_equal_those_of_a_plain_implementation(name, changes, layer_norm):
    ours, alg = policy(model_type=name, critic_layer_norm=layer_norm), algorithm(**changes)
    learns, kind = ALGORITHMS[name]
    assert algorithm_for(name, ours, name) is learns
    plain, update = kind(ours, alg), learns(alg, OPTIM, ours)
    for number in range(1, 7):
        update.step(batch(number))
        plain.step(batch(number), number)
        metrics = update.metrics()
        assert metrics["q_loss"] == pytest.approx(plain.q_loss.item(), rel=1e-5)
        if number % alg.critic_actor_ratio == 0:
            assert metrics["actor_loss"] == pytest.approx(plain.actor_loss.item(), rel=1e-5)
        if isinstance(plain, PlainSac):
            assert metrics["alpha"] == pytest.approx(plain.log_alpha.exp().item(), rel=1e-5)
        if isinstance(plain, PlainIql):
            assert metrics["value_loss"] == pytest.approx(plain.value_loss.item(), rel=1e-5)
            assert metrics["advantage"] == pytest.approx(plain.advantage.mean().item(), rel=1e-5)
    close = {"rtol": 1e-5, "atol": 1e-7}
    actors = [(ours.actor, plain.actor)]
    if isinstance(plain, PlainTd3):
        actors.append((update.targets["actor"].module, plain.target_actor))
    for ours_of, theirs_of in actors:
        for mine, theirs in zip(ours_of.parameters(), theirs_of.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **close)
    if isinstance(plain, PlainIql):
        for mine, theirs in zip(ours.critics.value.parameters(), plain.value.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **close)
    pairs = [(ours.critics, plain.critics)]
    if "critics" in update.targets:
        pairs.append((update.targets["critics"].module, plain.targets))
    for networks, theirs in pairs:
        for i, critic in enumerate(theirs):
            again = plain.critic(networks, i)
            for mine, other in zip(again.parameters(), critic.parameters(), strict=True):
                torch.testing.assert_close(mine, other, **close)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_make_the_update_of_one(name):
    """Three ranks with unequal parts of each batch, one of them with none."""
    learns = ALGORITHMS[name][0]
    whole = learns(algorithm(), OPTIM, policy(model_type=name))
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
    policies = [
        policy(model_type=name) for _ in parts
    ]  # here: threads would share the generator that draws their weights

    def work(rank):
        update = learns(algorithm(), OPTIM, policies[rank], reduce(rank), 3)
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


@pytest.mark.parametrize("name", ALGORITHMS)
def test_state_goes_on_bit_for_bit_and_another_model_is_refused(name):
    learns = ALGORITHMS[name][0]
    first = learns(algorithm(), OPTIM, policy(model_type=name))
    for number in range(1, 4):
        first.step(batch(number))
    first.metrics()
    state, weights = first.state_dict(), copy.deepcopy(first.policy.state_dict())
    second = learns(algorithm(), OPTIM, policy(model_type=name))
    second.policy.load_state_dict(weights)
    second.load_state_dict(state)
    for update in (first, second):
        for number in range(4, 7):
            update.step(batch(number))
    assert torch.equal(first.critic.weights, second.critic.weights)
    assert torch.equal(first.actor.weights, second.actor.weights) and first.metrics() == second.metrics()
    with pytest.raises(CheckpointError):
        learns(algorithm(), OPTIM, policy(model_type=name, hidden_sizes=[8])).load_state_dict(state)
    with pytest.raises(CheckpointError):
        learns(algorithm(), OPTIM, policy(model_type=name)).load_state_dict({"optimizer": "adam"})


def test_renormalised_rows_are_those_of_the_running_statistics():
    """Once it has warmed up, and where the batch is not far off them; far off, the correction is bounded."""
    norm, random = BatchRenorm(3).double(), torch.Generator().manual_seed(1)
    norm.mean.copy_(torch.tensor([1.0, -2.0, 0.0]))
    norm.variance.copy_(torch.tensor([4.0, 0.5, 1.0]))
    norm.batches.fill_(WARM_UP)
    rows = torch.randn(64, 3, generator=random, dtype=torch.float64) + norm.mean
    expected = norm.eval()(rows)
    torch.testing.assert_close(norm.train()(rows), expected)
    norm.mean.copy_(torch.tensor([1.0, -2.0, 100.0]))  # for the third column, 100 deviations off: 5 count
    rows[:, 2] = torch.randn(64, generator=random, dtype=torch.float64)
    assert norm(rows)[:, 2].mean().item() == pytest.approx(-5, abs=1e-6)
    fresh = BatchRenorm(3).double()
    torch.testing.assert_close(fresh(rows), nn.BatchNorm1d(3, eps=1e-3, dtype=torch.float64)(rows))


def test_one_algorithm_does_not_take_anothers_networks_or_checkpoint():
    with pytest.raises(ConfigError, match="model_type 'td3'"):
        algorithm_for("td3", policy(), "sac")
    with pytest.raises(ConfigError, match="no subclass"):
        algorithm_for("rlhpc.embodied.models:Policy", policy(), "sac")
    state = SacUpdate(algorithm(), OPTIM, policy()).state_dict()
    with pytest.raises(CheckpointError):
        Td3Update(algorithm(), OPTIM, policy(model_type="td3")).load_state_dict(state)


def test_noise_of_a_deterministic_actor():
    """Without noise its own action; with noise one beside it, within the bounds, with the noise's density."""
    ours = build_model(model(model_type="td3", exploration_noise=0.25), *SPACES, seed=1)
    draw = torch.Generator().manual_seed(0)
    obs, noise = torch.rand(2000, OBS, generator=draw), torch.randn(2000, ACT, generator=draw)
    best, _ = ours.predict_action_batch(obs, mode="eval")
    actions, extras = ours.predict_action_batch(obs, noise=noise)
    wanted = (best[:, 0] + 0.25 * noise * torch.tensor((HIGH - LOW) / 2)).clamp(torch.tensor(LOW), torch.tensor(HIGH))
    torch.testing.assert_close(actions[:, 0], wanted)
    assert (actions[:, 0, 1] == 1).any()  # some were clipped
    spread = torch.distributions.Normal(best[:, 0], 0.25 * torch.tensor((HIGH - LOW) / 2))
    before = best[:, 0] + 0.25 * noise * torch.tensor((HIGH - LOW) / 2)
    torch.testing.assert_close(extras["prev_logprobs"], spread.log_prob(before).sum(-1), rtol=1e-4, atol=1e-4)
    again = ours.default_forward({"obs": obs, "actions": before[:, None]}, compute_entropy=True)
    torch.testing.assert_close(again["logprobs"], extras["prev_logprobs"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again["entropy"], spread.entropy().sum(-1), rtol=1e-4, atol=1e-4)


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
