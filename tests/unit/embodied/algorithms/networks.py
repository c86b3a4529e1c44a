"""Small networks of off-policy algorithms, and batches for them."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch
from gymnasium import spaces
from omegaconf import OmegaConf
from torch import nn

from rlhpc.embodied.algorithms.iql import IqlUpdate
from rlhpc.embodied.algorithms.off_policy import OffPolicyUpdate, TransitionBatch
from rlhpc.embodied.algorithms.sac import CrossQUpdate, SacUpdate
from rlhpc.embodied.algorithms.td3 import Td3Update
from rlhpc.embodied.config import SacModelConfig
from rlhpc.embodied.models import build_model
from rlhpc.embodied.models.off_policy import ActorCritic, BatchRenorm

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
    return OmegaConf.structured(SacModelConfig(**{**values, **changes}))


def algorithm(**changes):
    values = {
        "gamma": 0.9, "tau": 0.1, "auto_entropy_tuning": True, "initial_alpha": 0.3, "target_entropy": None, "alpha_lr": None,
        "backup_entropy": True, "critic_actor_ratio": 1, "target_update_freq": 1, "policy_noise": 0.4, "noise_clip": 0.5,
        "expectile": 0.7, "inverse_temperature": 3.0, "max_weight": 100.0, "bootstrap_type": "standard",
        "random_shift": 4, "actor_agg_q": "min", "alpha_type": "exp", "alpha_clip_grad": None,
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
        is_exp = alg.alpha_type == "exp"
        start = math.log(alg.initial_alpha) if is_exp else math.log(math.exp(alg.initial_alpha) - 1)
        self.form = torch.exp if is_exp else lambda x: torch.log(1 + x.exp())
        self.raw_alpha = torch.tensor([start], dtype=torch.float64, requires_grad=True)
        self.alpha_opt = torch.optim.Adam([self.raw_alpha], lr=1e-2)

    @property
    def alpha(self):
        return self.form(self.raw_alpha)

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
        return action, self.alpha * logprob if self.alg.backup_entropy else 0.0

    def loss(self, data):
        action, self.logprob = self.act(data.obs, data.noise[1])
        value = torch.min(*(q(torch.cat([data.obs, action], 1)).flatten() for q in self.critics))
        return (self.alpha.detach() * self.logprob - value).mean()

    def after(self):
        if self.alg.auto_entropy_tuning:
            target = -ACT if self.alg.target_entropy is None else self.alg.target_entropy
            self.alpha_opt.zero_grad()
            (-self.alpha * (self.logprob.detach() + target)).mean().backward()
            if self.alg.alpha_clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(self.raw_alpha, self.alg.alpha_clip_grad)
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
