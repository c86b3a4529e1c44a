"""Updates from images, from ensembles and from sums of rewards, against plain implementations."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional as F

from rlhpc.embodied.algorithms.off_policy import TransitionBatch
from rlhpc.embodied.algorithms.sac import SacUpdate
from rlhpc.embodied.models import build_model, cnn
from rlhpc.embodied.models.off_policy import EnsembleCritic
from tests.unit.embodied.algorithms.networks import ACT, ALGORITHMS, HIGH, LOW, OPTIM, algorithm, model
from tests.unit.training.test_captured_passes import record

SPACE = spaces.Dict({"rgb": spaces.Box(0, 255, (10, 10, 3), np.uint8)})
ACTIONS = spaces.Box(LOW, HIGH)
ROWS = 16


def pixel_policy(**changes: Any) -> Any:
    return build_model(model(**changes), SPACE, ACTIONS, seed=1)


def pixel_batch(update: int, **changes: Any) -> TransitionBatch:
    random, draw = np.random.default_rng(update), torch.Generator().manual_seed(update)

    def obs() -> dict[str, torch.Tensor]:
        return {"rgb": torch.from_numpy(random.integers(0, 256, (ROWS, 10, 10, 3), np.uint8))}

    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    return TransitionBatch(
        obs=obs(), next_obs=obs(), actions=low + (high - low) * torch.rand(ROWS, 1, ACT, generator=draw),
        rewards=torch.randn(ROWS, generator=draw), terminations=torch.rand(ROWS, generator=draw) > 0.8,
        noise=torch.randn(2, ROWS, ACT, generator=draw), total=ROWS,
        shifts=torch.from_numpy(random.integers(0, 9, (2, ROWS, 2))), **changes,
    )  # fmt: skip


class PlainPixelSac:
    """SAC of images as DrQ has it (Yarats et al. 2021): one encoder, trained by the critics' loss; a target critic with an
    encoder of its own; the actor gets detached features. torch.optim, torch.distributions, F.pad and slices.
    """

    def __init__(self, ours: Any, alg: Any, heads: int) -> None:
        self.alg, self.heads = alg, heads
        self.encoder, self.actor = copy.deepcopy(ours.critics.encoder), copy.deepcopy(ours.actor)
        self.critics = nn.ModuleList(self.head(ours.critics, i) for i in range(heads))
        self.target_encoder, self.target_critics = copy.deepcopy(self.encoder), copy.deepcopy(self.critics)
        self.log_alpha = torch.tensor(np.log(alg.initial_alpha), dtype=torch.float32, requires_grad=True)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=OPTIM.lr)
        parameters = [*self.encoder.parameters(), *self.critics.parameters()]
        self.critic_opt = torch.optim.Adam(parameters, lr=OPTIM.value_lr)
        self.alpha_opt = torch.optim.Adam([self.log_alpha], lr=OPTIM.value_lr)

    @staticmethod
    def head(critics: Any, i: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        if isinstance(critics, EnsembleCritic):
            for weight, bias in zip(critics.weights, critics.biases, strict=True):
                layer = nn.Linear(*weight.shape[1:])
                layer.weight.data.copy_(weight[i].T)
                layer.bias.data.copy_(bias[i, 0])
                layers += [layer, nn.ReLU()]
            return nn.Sequential(*layers[:-1])
        width = critics.width
        first = nn.Linear(critics.first.in_features, width)
        first.weight.data.copy_(critics.first.weight[width * i : width * (i + 1)])
        first.bias.data.copy_(critics.first.bias[width * i : width * (i + 1)])
        return nn.Sequential(first, *copy.deepcopy((critics.one, critics.two)[i]))

    @staticmethod
    def crop(obs: dict[str, torch.Tensor], offsets: torch.Tensor) -> dict[str, torch.Tensor]:
        padded = F.pad(obs["rgb"].permute(0, 3, 1, 2).float(), (4, 4, 4, 4), mode="replicate")
        crops = [image[:, y : y + 10, x : x + 10] for image, (y, x) in zip(padded, offsets.tolist(), strict=True)]
        return {"rgb": torch.stack(crops).permute(0, 2, 3, 1).to(torch.uint8)}

    def act(self, features: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.actor(features).chunk(2, -1)
        log_std = -5 + 0.5 * 7 * (torch.tanh(log_std) + 1)
        scale, bias = (torch.tensor(x) for x in ((HIGH - LOW) / 2, (HIGH + LOW) / 2))
        before = mean + log_std.exp() * noise
        squashed = torch.tanh(before)
        logprob = torch.distributions.Normal(mean, log_std.exp()).log_prob(before)
        return squashed * scale + bias, (logprob - torch.log(scale * (1 - squashed.pow(2)) + 1e-6)).sum(-1)

    def step(self, data: TransitionBatch) -> None:
        obs, next_obs = (self.crop(o, s) for o, s in zip((data.obs, data.next_obs), data.shifts, strict=True))
        counted = range(self.heads) if data.critics is None else data.critics.tolist()
        with torch.no_grad():
            action, logprob = self.act(self.encoder(next_obs), data.noise[0])
            rows = torch.cat([self.target_encoder(next_obs), action], 1)
            after = torch.stack([self.target_critics[i](rows).flatten() for i in counted]).amin(0)
            after = after - self.log_alpha.exp() * logprob
            discount = self.alg.gamma ** (torch.ones(ROWS) if data.steps is None else data.steps)
            target = data.rewards + (1 - data.terminations.float()) * discount * after
        rows = torch.cat([self.encoder(obs), data.actions[:, 0]], 1)
        self.q_loss = sum(F.mse_loss(critic(rows).flatten(), target) for critic in self.critics)
        self.critic_opt.zero_grad()
        self.q_loss.backward()
        self.critic_opt.step()
        with torch.no_grad():
            features = self.encoder(obs)
        action, logprob = self.act(features, data.noise[1])
        values = torch.stack([critic(torch.cat([features, action], 1)).flatten() for critic in self.critics])
        value = values.mean(0) if self.alg.actor_agg_q == "mean" else values.amin(0)
        self.actor_loss = (self.log_alpha.exp().detach() * logprob - value).mean()
        self.actor_opt.zero_grad()
        self.actor_loss.backward()
        self.actor_opt.step()
        self.alpha_opt.zero_grad()
        (-self.log_alpha.exp() * (logprob.detach() - ACT)).mean().backward()
        self.alpha_opt.step()
        for now, then in ((self.encoder, self.target_encoder), (self.critics, self.target_critics)):
            for parameter, target in zip(now.parameters(), then.parameters(), strict=True):
                target.data.lerp_(parameter.data, self.alg.tau)


@pytest.mark.parametrize(
    ("heads", "changes", "batches", "updates"),
    [
        (2, {}, {}, 200),
        (5, {"actor_agg_q": "mean"}, {"critics": torch.tensor([3, 1])}, 40),
        (5, {}, {"steps": torch.arange(ROWS) % 3 + 1}, 40),
    ],
)
def test_updates_equal_those_of_a_plain_implementation(
    heads: int, changes: dict[str, Any], batches: dict[str, Any], updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = cnn._prepare_images
    monkeypatch.setattr(cnn, "_prepare_images", lambda *args: prepare(*args).double())
    ours, alg = pixel_policy(num_q_heads=heads).double(), algorithm(**changes)
    update, plain = SacUpdate(alg, OPTIM, ours), PlainPixelSac(ours, alg, heads)
    for module in (plain.actor, plain.encoder, plain.critics, plain.target_encoder, plain.target_critics):
        module.double()
    for number in range(1, updates + 1):
        data = double(pixel_batch(number, **batches))
        update.step(data)
        plain.step(data)
        metrics = update.metrics()
        assert metrics["q_loss"] == pytest.approx(plain.q_loss.item(), rel=1e-5), number
        assert metrics["actor_loss"] == pytest.approx(plain.actor_loss.item(), rel=1e-5, abs=1e-6), number
    pairs = [
        (ours.actor, plain.actor), (ours.critics.encoder, plain.encoder),
        (update.targets["critics"].module.encoder, plain.target_encoder),
    ]  # fmt: skip
    for mine, theirs in pairs:
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-5)


def double(data: TransitionBatch) -> TransitionBatch:
    """The batch in double precision, but for images."""

    def cast(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cast(part) for name, part in value.items()}
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return TransitionBatch(**{name: cast(value) for name, value in vars(data).items()})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_from_images(name: str) -> None:
    """The encoder moves with the critics' loss and not with the actor's, and its target follows."""
    torch.manual_seed(0)
    policy = pixel_policy(model_type=name)
    update = ALGORITHMS[name][0](algorithm(critic_actor_ratio=2), OPTIM, policy)
    states = [copy.deepcopy(policy.critics.encoder.state_dict())]
    data = pixel_batch(0)
    losses = []
    for _ in range(60):
        update.step(data)
        losses.append(update.metrics()["q_loss"])
    states.append(policy.critics.encoder.state_dict())
    assert all(not torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert losses[-1] < 0.5 * losses[0]
    if update.targets:
        target = update.targets["critics"].module.encoder.state_dict()
        assert any(not torch.equal(target[key], states[0][key]) for key in target)
    before = copy.deepcopy(policy.critics.state_dict())
    obs = policy.prepare(data.obs)
    if name == "iql":
        update.train_critics(obs, obs, data)
        before = copy.deepcopy(policy.critics.state_dict())
    update.train_actor(obs, data)
    assert all(
        torch.equal(before[key], value) for key, value in policy.critics.state_dict().items() if "batches" not in key
    )


def test_a_frozen_encoder_stays_and_resumes() -> None:
    space = spaces.Dict({"rgb": spaces.Box(0, 255, (32, 32, 3), np.uint8)})
    options = {"encoder": "resnet10", "freeze": True}
    policy = build_model(model(kwargs=options), space, ACTIONS, seed=1)
    update = SacUpdate(algorithm(), OPTIM, policy)
    data = pixel_batch(0)
    images = torch.randint(0, 256, (ROWS, 32, 32, 3), dtype=torch.uint8)
    data.obs = data.next_obs = {"rgb": images}
    before = copy.deepcopy(policy.state_dict())
    update.step(data)
    moved = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    assert not any(".backbone." in name for name in moved) and any("poolings" in name for name in moved)
    other = SacUpdate(algorithm(), OPTIM, build_model(model(kwargs=options), space, ACTIONS, seed=2))
    other.replace_weights(policy.state_dict())
    other.load_state_dict(update.state_dict())
    for learner in (update, other):
        learner.step(data)
    for a, b in zip(update.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_replayed_updates_from_images_are_the_updates() -> None:
    states = []
    for captures in (False, True):
        policy = pixel_policy(num_q_heads=4)
        update = SacUpdate(algorithm(), OPTIM, policy)
        if captures:
            update.capture_passes(record)
        for number in range(1, 5):
            update.step(pixel_batch(number, critics=torch.tensor([number % 4, 3 - number % 2])))
        states.append(copy.deepcopy(policy.state_dict()))
    assert all(torch.equal(states[1][key], value) for key, value in states[0].items())


@pytest.mark.parametrize("layer_norm", [False, True])
def test_an_ensemble_is_its_networks(layer_norm: bool) -> None:
    torch.manual_seed(2)
    ensemble = EnsembleCritic(7, [16, 12], "relu", layer_norm, 6)
    for parameter in [*ensemble.gains, *ensemble.offsets]:
        nn.init.normal_(parameter)
    features, actions = torch.randn(9, 5), torch.randn(9, 2)
    values = ensemble(features, actions)
    assert values.shape == (6, 9)
    for i in range(6):
        rows = torch.cat((features, actions), 1)
        for layer, (weight, bias) in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
            if layer:
                if layer_norm:
                    gain, offset = ensemble.gains[layer - 1][i, 0], ensemble.offsets[layer - 1][i, 0]
                    rows = F.layer_norm(rows, rows.shape[-1:], gain, offset)
                rows = rows.relu()
            rows = rows @ weight[i] + bias[i]
        torch.testing.assert_close(values[i], rows[:, 0], rtol=1e-5, atol=1e-6)
    bounds = [weight.detach().abs().amax().item() for weight in ensemble.weights]
    assert all(bound <= weight.shape[1] ** -0.5 for bound, weight in zip(bounds, ensemble.weights, strict=True))
