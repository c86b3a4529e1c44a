"""Policies of LeRobot's library, with tiny networks in its place: inputs, log-probabilities and actions of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal

from rlhpc.embodied.envs.observations import encode_text
from rlhpc.embodied.models.lerobot.policies import (
    ActPolicy,
    DiffusionPolicy,
    LeRobotFlowPolicy,
    SmolVlaPolicy,
    lerobot_policy,
)
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.models.lerobot import stand_in
from tests.unit.embodied.models.lerobot.stand_in import (
    ACTIONS,
    CHUNK,
    DIM,
    HORIZON,
    OBSERVATIONS,
    PADDED,
    WINDOWS,
    section,
)

CLASSES = {"act": ActPolicy, "diffusion": DiffusionPolicy, "smolvla": SmolVlaPolicy}
EXECUTED, ROWS = 3, 5


@pytest.fixture(autouse=True)
def stand_in_library(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


def build(folder: Path, family: str, **changes: Any) -> Any:
    observation_space = WINDOWS if family == "diffusion" else OBSERVATIONS
    policy = lerobot_policy(section(folder, family, **changes), observation_space, ACTIONS)
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head.out.weight)  # values begin at zero
    return policy


def observe(family: str) -> dict[str, torch.Tensor]:
    """Observations of an environment, or windows of two of them."""
    draw, steps = torch.Generator().manual_seed(0), (2,) if family == "diffusion" else ()
    obs = {
        "rgb": torch.randint(0, 256, (ROWS, *steps, 4, 4, 3), generator=draw, dtype=torch.uint8),
        "state": torch.rand(ROWS, *steps, 3, generator=draw),
    }
    if not steps:
        texts = [encode_text(f"go {row}", 16) for row in range(ROWS)]
        obs["instruction"] = torch.stack([torch.as_tensor(text) for text in texts])
    return obs


def noise(policy: Any) -> torch.Tensor:
    drawn: torch.Tensor = policy.sample_noise((ROWS,), torch.Generator().manual_seed(1))
    return drawn


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize(
    ("level", "shape"),
    [("chunk_level", (ROWS,)), ("action_level", (ROWS, EXECUTED)), ("token_level", (ROWS, EXECUTED, DIM))],
)
def test_training_computes_the_log_probabilities_of_acting(
    family: str, level: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    policy, obs = build(tmp_path, family, add_value_head=True), observe(family)
    assert type(policy) is CLASSES[family]
    policy.set_logprob_type(level)
    policy.train()  # dropout must not make the two differ
    with torch.no_grad():
        actions, extras = policy.predict_action_batch(obs, "train", noise(policy))
    assert actions.shape == (ROWS, EXECUTED, DIM) and extras["prev_logprobs"].shape == shape
    outputs = policy.default_forward({"obs": obs, "actions": actions, **extras["inputs"]}, True, True, True)
    torch.testing.assert_close(outputs["logprobs"], extras["prev_logprobs"])
    torch.testing.assert_close(outputs["values"], extras["prev_values"])
    torch.testing.assert_close(policy.value(obs), extras["prev_values"])
    assert extras["prev_values"].shape == (ROWS,) and extras["prev_values"].std() > 0
    assert outputs["entropy"].shape == shape and torch.isfinite(outputs["entropy"]).all()
    outputs["logprobs"].sum().backward()
    assert any(parameter.grad is not None for parameter in policy.inner.parameters())
    assert policy.inner.training, "as before"


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("family", ["diffusion", "smolvla"])
def test_acting_runs_the_denoising_network_once_a_step(
    family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, obs, calls = build(tmp_path, family), observe(family), list[Any]()
    network, name = (
        (policy.inner.diffusion.unet, "forward") if family == "diffusion" else (policy.inner.model, "denoise_step")
    )
    run = getattr(network, name)
    monkeypatch.setattr(network, name, lambda *args, **kwargs: (calls.append(args), run(*args, **kwargs))[1])
    with torch.no_grad():
        policy.predict_action_batch(obs, mode)
    assert len(calls) == policy.steps > 1


@pytest.mark.parametrize("family", CLASSES)
def test_evaluation_has_no_noise_of_its_own(family: str, tmp_path: Path) -> None:
    policy, obs = build(tmp_path, family), observe(family)
    with torch.no_grad():
        first, second = (policy.predict_action_batch(obs, "eval")[0] for _ in range(2))
        sampled = policy.predict_action_batch(obs, "train", noise(policy))[0]
    assert torch.equal(first, second) and not torch.allclose(first, sampled)


def test_one_step_of_a_chunk_may_be_stochastic(tmp_path: Path) -> None:
    policy, obs = build(tmp_path, "smolvla", kwargs={"noise_steps": "one"}), observe("smolvla")
    with torch.no_grad():
        actions, extras = policy.predict_action_batch(obs, "train", noise(policy))
    assert extras["inputs"]["chain"].shape == (ROWS, 4, *policy.state_shape)
    outputs = policy.default_forward({"obs": obs, "actions": actions, **extras["inputs"]}, True, True)
    torch.testing.assert_close(outputs["logprobs"], extras["prev_logprobs"])
    assert torch.isfinite(outputs["entropy"]).all()


@pytest.mark.parametrize(("family", "imitated"), [("act", range(CHUNK)), ("diffusion", range(-1, HORIZON - 1))])
def test_cloning_takes_the_actions_that_the_network_predicts(family: str, imitated: range, tmp_path: Path) -> None:
    policy, obs = build(tmp_path, family), observe(family)
    assert policy.imitated_offsets == imitated, "from the oldest observation on"
    actions = torch.rand(ROWS, len(imitated), DIM)
    is_pad = torch.zeros(ROWS, len(imitated), dtype=torch.bool)
    is_pad[0, -1] = True
    loss = policy.bc_loss({"obs": obs, "actions": actions, "is_pad": is_pad})
    batch = policy.inner.trained_on
    assert loss.shape == (ROWS,) and policy.inner.training
    assert torch.equal(batch["action"], actions) and torch.equal(batch["action_is_pad"], is_pad)
    policy.bc_loss({"obs": obs, "actions": actions})
    assert not policy.inner.trained_on["action_is_pad"].any()


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample"])
def test_a_diffusion_chain_has_the_density_of_its_steps(prediction_type: str, tmp_path: Path) -> None:
    """Each state is normal around the posterior mean of the state before it (DDPO)."""
    kwargs = {"num_steps": 2, "noise_level": 0.3}
    policy = build(tmp_path, "diffusion", kwargs=kwargs, config={"prediction_type": prediction_type})
    assert policy.steps == 2 == policy.inner.diffusion.num_inference_steps
    with torch.no_grad():
        encoded, _ = policy.encode(observe("diffusion"))
        drawn = noise(policy)
        chain, logprobs = policy.chain(encoded, drawn)
        assert chain.shape == (ROWS, 3, HORIZON, DIM) and torch.equal(chain[:, 0], drawn[:, 0])
        expected = torch.zeros(ROWS, HORIZON, DIM)
        for k, (t, std) in enumerate(zip(policy._times, policy._stds, strict=True)):
            mean = policy._compute_posterior_mean(encoded, chain[:, k], t)
            expected += Normal(mean, std).log_prob(chain[:, k + 1])
        torch.testing.assert_close(logprobs, expected)
        assert torch.equal(policy.chain_logprobs(encoded, chain), logprobs)
        means, _ = policy.chain(encoded, torch.cat([drawn[:, :1], torch.zeros_like(drawn[:, 1:])], 1))
        torch.testing.assert_close(policy.denoise(encoded, drawn[:, 0]), means[:, -1])
    assert min(policy._stds) >= 0.3
    entropy = sum(float(Normal(0.0, std).entropy()) for std in policy._stds)
    assert policy.noise_entropy() == pytest.approx(entropy)


def test_more_denoising_steps_than_the_network_was_trained_with_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_steps is 11; it must lie between 1 and 10"):
        build(tmp_path, "diffusion", kwargs={"num_steps": 11})


def test_a_plan_is_longer_than_what_is_executed_and_follows_its_guide(tmp_path: Path) -> None:
    policy, obs = build(tmp_path, "smolvla", kwargs={"num_steps": 4}), observe("smolvla")
    assert isinstance(policy, LeRobotFlowPolicy) and (policy.horizon, policy.steps) == (CHUNK, 4)
    assert policy.start_shape == (CHUNK, PADDED)
    start = policy.sample_start((ROWS,), torch.Generator().manual_seed(2))
    with torch.no_grad():
        plan = policy.plan(obs, noise=start)
        actions = policy.predict_action_batch(obs, "eval", start)[0]
        torch.testing.assert_close(policy.decode_plan(plan, slice(0, EXECUTED)), actions)
        still = policy.plan(obs, lambda velocity: lambda x, t: torch.zeros_like(x), start)
    assert torch.equal(still, start), "a velocity of zero leaves the noise"
