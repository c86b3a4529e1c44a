"""Flow policies: the stochastic way has the flow's marginals, its log-probs are torch's, and imitation finds the actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc import ConfigError
from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.flow import Flow, _encode_time

CFG = OmegaConf.create(
    {
        "model_type": "flow", "hidden_sizes": [32, 32], "activation": "silu", "ortho_init": True, "log_std_init": 0.0,
        "num_action_chunks": 3, "value_per_action": False, "kwargs": {"num_steps": 3, "noise_level": 0.4},
    }
)  # fmt: skip
STATE, ACTION = spaces.Box(-1, 1, (4,), np.float32), spaces.Box(-2, 6, (2,), np.float32)
#: Options of each network, and of learned noise.
VARIANTS = {
    "sde": {},
    "noise": {"noise_method": "flow_noise"},
    "transformer": {"network": "transformer", "width": 16, "heads": 2},
    "transformer with noise": {"network": "transformer", "width": 16, "heads": 2, "noise_method": "flow_noise"},
    "one step": {"noise_steps": "one"},
    "one step of learned noise": {"noise_steps": "one", "noise_method": "flow_noise"},
}
SEVERAL = spaces.Dict({"rgb": spaces.Box(0, 255, (9, 9, 3), np.uint8), "state": STATE})


def observations(space, count):
    if isinstance(space, spaces.Dict):
        return {key: observations(part, count) for key, part in space.spaces.items()}
    space.seed(0)
    return torch.as_tensor(np.stack([space.sample() for _ in range(count)]))


@pytest.mark.parametrize("noise_level", [0.2, 0.7])
def test_the_stochastic_way_ends_in_the_flows_distribution(noise_level):
    """Actions N(2, 0.5²): the velocity that flow matching would learn is known."""
    mean, var = 2.0, 0.25

    def velocity(x, t):
        t = t[:, None, None]
        total = (1 - t) ** 2 * var + t**2
        gap = x - (1 - t) * mean
        return t * gap / total - (mean + (1 - t) * var * gap / total)  # E[x_1 | x_t] − E[x_0 | x_t]

    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(20_000, 101, 1, 1, generator=draw)
    for steps in (noise[:, 1:], None):
        found = Flow(100, noise_level).act(velocity, steps, noise[:, 0])[0][:, -1]
        assert found.mean().item() == pytest.approx(mean, abs=0.03)
        assert found.std().item() == pytest.approx(var**0.5, abs=0.03)


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
@pytest.mark.parametrize("space", [STATE, SEVERAL], ids=["numbers", "image"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_acting_and_training_agree(variant, space, level):
    policy = build_model(OmegaConf.merge(CFG, {"kwargs": VARIANTS[variant]}), space, ACTION, seed=1)
    policy.logprob_type = level
    obs = observations(space, 5)
    noise = policy.sample_noise((5,), torch.Generator().manual_seed(0))
    actions, extras = policy.predict_action_batch(obs, "train", noise)
    assert actions.shape == (5, 3, 2)
    out = policy.default_forward({"obs": obs, "actions": actions, **extras["inputs"]}, True, True, True)
    torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"])
    torch.testing.assert_close(out["values"], extras["prev_values"])
    assert out["entropy"].shape == out["logprobs"].shape
    (out["logprobs"].sum() + 0.1 * out["entropy"].sum()).backward()
    # A query that attends to one observation gets its value whatever it asks for, so its norm has no gradient.
    unlearned = ("critic", "norm2")
    trained = [p for name, p in policy.named_parameters() if not any(part in name for part in unlearned)]
    assert all(p.grad is not None and p.grad.any() for p in trained)
    again = policy.predict_action_batch({k: v[:2] for k, v in obs.items()} if isinstance(obs, dict) else obs[:2], "train",
                                        noise[:2])[0]  # fmt: skip
    torch.testing.assert_close(again, actions[:2])


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_acting_computes_the_velocity_once_a_step(variant, mode):
    """Its log-probs are those of a training pass, which computes it again."""
    policy = build_model(OmegaConf.merge(CFG, {"kwargs": VARIANTS[variant]}), STATE, ACTION, seed=1)
    calls = []
    policy.velocity.register_forward_hook(lambda *args: calls.append(args))
    obs = observations(STATE, 5)
    noise = policy.sample_noise((5,), torch.Generator().manual_seed(0))
    actions, extras = policy.predict_action_batch(obs, mode, noise if mode == "train" else noise[:, 0])
    assert len(calls) == policy.flow.num_steps == 3
    out = policy.default_forward({"obs": obs, "actions": actions, **extras["inputs"]})
    assert len(calls) == 3 + (1 if "one step" in variant else 3)
    assert torch.equal(out["logprobs"], extras["prev_logprobs"])
    del calls[:]
    policy.plan(obs, noise=noise[:, 0])
    assert len(calls) == 3


def test_log_probs_are_those_of_torchs_normals():
    policy = build_model(CFG, STATE, ACTION, seed=1)
    policy.logprob_type, obs = "token_level", observations(STATE, 4)
    _, extras = policy.predict_action_batch(obs)
    chain, expected = extras["inputs"]["chain"], 0
    velocity, _ = policy.prepare(obs, True, False)
    for k, t in enumerate((1, 2 / 3, 1 / 3)):
        v, x, sigma2 = velocity(chain[:, k], torch.full((4,), t)), chain[:, k], 0.16 * t / max(1 - t, 1 / 3)
        mean = x - (v + sigma2 / (2 * t) * (x + (1 - t) * v)) / 3
        expected = expected + torch.distributions.Normal(mean, (sigma2 / 3) ** 0.5).log_prob(chain[:, k + 1])
    torch.testing.assert_close(extras["prev_logprobs"], expected)


def test_one_step_of_each_chunk_is_stochastic_and_its_log_prob_is_torchs():
    policy = build_model(OmegaConf.merge(CFG, {"kwargs": {"noise_steps": "one"}}), STATE, ACTION, seed=1)
    policy.logprob_type, obs = "token_level", observations(STATE, 300)
    noise = policy.sample_noise((300,), torch.Generator().manual_seed(0))
    actions, extras = policy.predict_action_batch(obs, "train", noise)
    before, after, numbers, last = extras["inputs"]["chain"].unbind(1)
    torch.testing.assert_close(policy.unscaled(last), actions)
    assert torch.bincount(numbers[:, 0, 0].long(), minlength=3).min() > 70  # of 100 expected of each
    assert torch.equal(numbers, numbers[:, :1, :1].expand_as(numbers))
    velocity, _ = policy.prepare(obs, True, False)
    x = noise[:, 0]
    for k, t in enumerate((1, 2 / 3, 1 / 3)):
        v, sigma2, drawn = velocity(x, torch.full((300,), t)), 0.16 * t / max(1 - t, 1 / 3), numbers[:, 0, 0] == k
        step = torch.distributions.Normal(x - (v + sigma2 / (2 * t) * (x + (1 - t) * v)) / 3, (sigma2 / 3) ** 0.5)
        torch.testing.assert_close(before[drawn], x[drawn])
        torch.testing.assert_close(after[drawn], (step.mean + step.stddev * noise[:, 1])[drawn])
        torch.testing.assert_close(extras["prev_logprobs"][drawn], step.log_prob(after)[drawn], rtol=1e-4, atol=1e-4)
        x = torch.where(drawn[:, None, None], after, x - v / 3)
    torch.testing.assert_close(last, x)
    # the drawn step does not depend on the noise that it adds: 3 · 300 · 6 normal numbers
    assert abs(noise[:, 1][numbers == 2].mean()) < 0.15
    evaluated, extras = policy.predict_action_batch(obs, "eval", noise[:, 0])
    assert extras["prev_logprobs"].isfinite().all()
    assert not torch.allclose(evaluated, actions)
    torch.testing.assert_close(evaluated, policy.predict_action_batch(obs, "eval", noise[:, 0])[0])


def test_log_probs_and_entropies_of_learned_noise_are_those_of_torchs_normals():
    options = {"noise_method": "flow_noise", "noise_range": [0.1, 0.4]}
    policy = build_model(OmegaConf.merge(CFG, {"kwargs": options}), STATE, ACTION, seed=1)
    policy.logprob_type, obs = "token_level", observations(STATE, 4)
    noise = policy.sample_noise((4,), torch.Generator().manual_seed(0))
    actions, extras = policy.predict_action_batch(obs, "train", noise)
    chain, encoded = extras["inputs"]["chain"], obs.float()
    torch.testing.assert_close(policy.unscaled(chain[:, -1]), actions)
    logprobs, entropies, stds = 0, 0, []
    for k, t in enumerate((1, 2 / 3, 1 / 3)):
        inputs = torch.cat([encoded, chain[:, k].flatten(1), _encode_time(torch.full((4,), t))], 1)
        v, raw = policy.velocity(inputs).reshape(4, 3, 4).chunk(2, -1)
        std = 0.1 * 4 ** ((raw.tanh() + 1) / 2)
        step = torch.distributions.Normal(chain[:, k] - v / 3, std)
        logprobs, entropies = logprobs + step.log_prob(chain[:, k + 1]), entropies + step.entropy()
        torch.testing.assert_close(chain[:, k + 1], step.mean + std * noise[:, k + 1])
        stds.append(std)
    out = policy.default_forward({"obs": obs, "chain": chain}, True, True)
    torch.testing.assert_close(out["logprobs"], logprobs)
    torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"])
    torch.testing.assert_close(out["entropy"], entropies)
    assert 0.1 < min(std.min() for std in stds) < max(std.max() for std in stds) < 0.4
    only_entropy = policy.default_forward({"obs": obs, "chain": chain}, compute_logprobs=False, compute_entropy=True)
    assert only_entropy.keys() == {"entropy"} and torch.equal(only_entropy["entropy"], out["entropy"])
    start = noise[:, 0]
    assert torch.equal(
        policy.predict_action_batch(obs, "eval", start)[0], policy.predict_action_batch(obs, "eval", start)[0]
    )


def test_reinforcement_learning_lowers_noise_that_hurts():
    """PPO's loss on one decision: the reward is the distance to a target that the observation tells."""
    options = {"noise_method": "flow_noise", "noise_range": [0.02, 0.5], "num_steps": 2}
    cfg = OmegaConf.merge(CFG, {"num_action_chunks": 1, "kwargs": options})
    policy = build_model(cfg, STATE, spaces.Box(-1, 1, (2,), np.float32), seed=0)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    draw = torch.Generator().manual_seed(0)

    def play(mode):
        obs = torch.randn(256, 4, generator=draw).clamp(-1, 1)
        noise = policy.sample_noise((256,), draw)
        actions, extras = policy.predict_action_batch(obs, mode, noise if mode == "train" else noise[:, 0])
        return obs, -(actions[:, 0] - 0.8 * obs[:, :2]).square().sum(1), extras

    before = play("eval")[1].mean()
    first, last = None, None
    for _ in range(150):
        obs, rewards, extras = play("train")
        advantages = (rewards - rewards.mean()) / rewards.std()
        for _ in range(2):
            out = policy.default_forward({"obs": obs, **extras["inputs"]}, True, True)
            ratio = (out["logprobs"] - extras["prev_logprobs"]).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        first, last = out["entropy"].mean() if first is None else first, out["entropy"].mean()
    assert play("eval")[1].mean() > 0.25 * before and before < -0.3
    assert last < first - 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_imitation_finds_two_ways_of_acting(variant):
    """The demonstrations go left or right by the sign of the first number; both are found, scaled to the space's bounds."""
    cfg = OmegaConf.merge(CFG, {"num_action_chunks": 2, "kwargs": {**VARIANTS[variant], "num_steps": 6}})
    policy = build_model(cfg, STATE, ACTION, seed=0)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    torch.manual_seed(0)
    losses = []
    for _ in range(500):
        obs = torch.randn(64, 4)
        side = obs[:, :1].sign()
        actions = (2 + 3 * side)[:, None].expand(64, 2, 2)
        loss = policy.bc_loss({"obs": obs, "actions": actions}).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-50:]) < 0.5 * np.mean(losses[:20])
    obs = torch.randn(200, 4)
    obs[:, 0] = obs[:, 0].sign() * (0.3 + obs[:, 0].abs())
    wanted = (2 + 3 * obs[:, 0].sign())[:, None, None].expand(200, 2, 2)
    assert (policy.predict_action_batch(obs, "eval")[0] - wanted).abs().mean() < 0.6  # the sides are 6 apart


def test_a_spec_rebuilds_it_and_wrong_options_are_explained():
    policy = build_model(CFG, SEVERAL, ACTION, seed=0)
    twin = policy_from_spec(policy.spec())
    twin.load_state_dict(policy.state_dict())
    obs = observations(SEVERAL, 2)
    assert torch.equal(twin.predict_action_batch(obs, "eval")[0], policy.predict_action_batch(obs, "eval")[0])
    with pytest.raises(ConfigError, match="continuous actions"):
        build_model(CFG, STATE, spaces.Discrete(3))
    with pytest.raises(ConfigError, match="num_steps"):
        build_model(OmegaConf.merge(CFG, {"kwargs": {"num_steps": 0}}), STATE, ACTION)
    with pytest.raises(ConfigError, match="allowed: num_steps"):
        build_model(OmegaConf.merge(CFG, {"kwargs": {"steps": 2}}), STATE, ACTION)
    for options, message in (
        ({"width": 30}, r"kwargs\.heads is 4, which does not divide width, 30"),
        ({"noise_range": [0.3, 0.1]}, r"noise_range is \[0.3, 0.1\]; allowed: \[lowest, highest\]"),
        ({"noise_range": [0.0, 0.1]}, "noise_range"),
        ({"noise_range": [0.1]}, "noise_range"),
        ({"noise_method": "ode"}, "allowed: flow_sde, flow_noise"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(OmegaConf.merge(CFG, {"kwargs": options}), STATE, ACTION)
