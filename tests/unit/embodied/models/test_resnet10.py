"""ResNet-10 policies: the network is torchvision's, pretrained weights are loaded and may stay as they are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlhpc.checkpoint.state import save_tensors
from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.resnet10 import ResNet10, load_backbone
from rlhpc.runtime.errors import CheckpointError, ConfigError
from tests.extras import find_python, needs_python
from tests.unit.embodied.models.sections import section, seeded

ACTION = spaces.Box(-1, 1, (2,), np.float32)
CAMERAS = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (32, 32, 6), np.uint8),
        "state": spaces.Box(-1, 1, (3,), np.float32),
        "instruction": spaces.Box(0, 255, (8,), np.uint8),
    }
)
#: torchvision's own network with RLinf's normalisation: its weights, images and features.
REFERENCE = """
import sys
from functools import partial
from rlhpc.runtime.torch_adapter import import_torchvision
import_torchvision()
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet
torch.manual_seed(0)
model = ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=lambda channels: nn.GroupNorm(4, channels))
for parameter in model.parameters():
    parameter.data += 0.05 * torch.randn_like(parameter)
images = torch.rand(2, 3, 40, 56)
features = nn.Sequential(*list(model.children())[:-2])(images)
torch.save(model.state_dict(), sys.argv[1])
torch.save({"images": images, "features": features.detach()}, sys.argv[2])
"""


def observations(count: int, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
    draw = seeded(0) if generator is None else generator
    return {
        "rgb": torch.randint(0, 256, (count, 32, 32, 6), generator=draw, dtype=torch.uint8),
        "state": torch.rand(count, 3, generator=draw),
        "instruction": torch.zeros(count, 8, dtype=torch.uint8),
    }


def build(space: Any = CAMERAS, **kwargs: Any) -> Policy:
    return build_model(section(model_type="resnet10", num_action_chunks=2, kwargs=kwargs), space, ACTION, seed=1)


@needs_python("lerobot")
def test_it_is_torchvisions_network(tmp_path: Path) -> None:
    weights, shown = tmp_path / "resnet10_pretrained.pt", tmp_path / "shown.pt"
    root = str(Path(__file__).resolve().parents[4])
    command = [find_python("lerobot"), "-c", REFERENCE, str(weights), str(shown)]
    subprocess.run(command, check=True, timeout=200, env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"})
    network, reference = ResNet10(), torch.load(shown)
    load_backbone(network, weights)
    torch.testing.assert_close(network(reference["images"]), reference["features"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", ["token_level", "action_level", "chunk_level"])
def test_acting_agrees_with_training(level: str) -> None:
    policy = build()
    policy.set_logprob_type(level)
    policy.train()
    obs = observations(5)
    actions, extras = policy.predict_action_batch(obs)
    out = policy.default_forward({"obs": obs, "actions": actions}, True, True, True)
    torch.testing.assert_close(out["logprobs"], extras["prev_logprobs"], rtol=0, atol=1e-5)
    torch.testing.assert_close(out["values"], extras["prev_values"])
    alone = policy.predict_action_batch({key: part[:1] for key, part in obs.items()}, "eval")[0]
    torch.testing.assert_close(alone, policy.predict_action_batch(obs, "eval")[0][:1])


def test_each_camera_and_the_numbers_count() -> None:
    policy, obs = build(), observations(1)
    values = [policy.value(obs)]
    for key, part in (("rgb", slice(0, 3)), ("rgb", slice(3, 6)), ("state", slice(0, 1))):
        changed = {name: array.clone() for name, array in obs.items()}
        changed[key][..., part] = 0
        values.append(policy.value(changed))
    assert len({round(value.item(), 6) for value in values}) == 4


@pytest.mark.parametrize("model_type", ["resnet10", "flow", "conditioned", "success"])
def test_pretrained_weights_are_loaded_and_stay(model_type: str, tmp_path: Path) -> None:
    """The file is needed once: a checkpoint has the weights, and its description builds the policy without the file."""
    torch.manual_seed(5)
    pretrained = {name: torch.rand_like(tensor) for name, tensor in ResNet10().state_dict().items()}
    file = tmp_path / "weights.pt"
    torch.save({**pretrained, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}, file)
    kwargs: dict[str, Any] = {"weights": str(file), "freeze": True}
    if model_type != "resnet10":
        kwargs |= {"of": "resnet10"} if model_type == "conditioned" else {"encoder": "resnet10"}
    space = spaces.Dict({"rgb": CAMERAS["rgb"]}) if model_type == "success" else CAMERAS
    policy = build_model(section(model_type=model_type, kwargs=kwargs), space, ACTION, seed=1)
    obs = {key: part for key, part in observations(4).items() if key in space.spaces}
    inputs = {"obs": obs, "actions": torch.zeros(4, 1, 2), "success": torch.ones(4), "improvement": torch.ones(4, 1)}
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], 0.1)
    policy.bc_loss(inputs).sum().backward()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    optimizer.step()
    changed = {name for name, tensor in policy.state_dict().items() if not torch.equal(tensor, before[name])}
    backbone = {name for name in before if ".backbone." in name}
    assert changed and not changed & backbone and any("poolings" in name for name in changed)
    loaded = {name.partition(".backbone.")[2]: before[name] for name in backbone}
    assert loaded.keys() == pretrained.keys() and all(torch.equal(loaded[name], pretrained[name]) for name in loaded)
    file.unlink()
    twin = policy_from_spec(json.loads(json.dumps(policy.spec())))
    twin.load_state_dict(policy.state_dict())
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in policy.parameters()]
    if model_type != "success":
        torch.testing.assert_close(
            twin.predict_action_batch(obs, "eval")[0], policy.predict_action_batch(obs, "eval")[0], rtol=0, atol=0
        )


def test_weights_of_something_else_are_refused(tmp_path: Path) -> None:
    tensors = ResNet10().state_dict()
    cases: list[tuple[str, Any, str]] = [
        (
            "less.pt",
            {name: tensor for name, tensor in tensors.items() if name != "bn1.bias"},
            "'bn1.bias', which it lacks",
        ),
        (
            "more.pt",
            {**tensors, "layer5.0.conv1.weight": torch.zeros(1)},
            "'layer5.0.conv1.weight', which a ResNet-10 does not",
        ),
        (
            "other.pt",
            {**tensors, "conv1.weight": torch.zeros(64, 3, 3, 3)},
            r"'conv1.weight', whose shape is \(64, 3, 3, 3\)",
        ),
    ]
    for name, content, message in cases:
        torch.save(content, tmp_path / name)
        with pytest.raises(ConfigError, match=message):
            build(weights=str(tmp_path / name))
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(ConfigError, match=r"text.pt', which is no file of torch's weights"):
        build(weights=str(tmp_path / "text.pt"))
    with pytest.raises(ConfigError, match=r"missing.pt', which cannot be read: No such file"):
        build(weights=str(tmp_path / "missing.pt"))
    with pytest.raises(CheckpointError, match=r"missing.safetensors"):
        build(weights=str(tmp_path / "missing.safetensors"))
    with pytest.raises(ConfigError, match=r"needs RGB images; these have 4 channels"):
        build(spaces.Box(0, 255, (32, 32, 4), np.uint8))
    save_tensors(tmp_path / "good.safetensors", tensors)
    state = build(weights=str(tmp_path / "good.safetensors")).state_dict()
    assert torch.equal(state["eyes.rgb.0.0.backbone.conv1.weight"], tensors["conv1.weight"])


def test_it_learns_from_pictures_and_numbers() -> None:
    """PPO's loss on one decision: where the bright square is, and the sign that a number gives, tell the action."""
    space = spaces.Dict(
        {"rgb": spaces.Box(0, 255, (32, 32, 3), np.uint8), "state": spaces.Box(-1, 1, (1,), np.float32)}
    )
    cfg = section(model_type="resnet10", log_std_init=-0.7, hidden_sizes=[32], kwargs={"freeze": True})
    policy = build_model(cfg, space, spaces.Box(-1, 1, (1,), np.float32), seed=0)
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], 3e-3)
    draw = seeded(0)

    def play(mode: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, dict[str, Any]]:
        side = torch.randint(0, 2, (32,), generator=draw)
        sign = torch.randint(0, 2, (32, 1), generator=draw) * 2.0 - 1
        rgb = torch.zeros(32, 32, 32, 3, dtype=torch.uint8)
        for row, right in enumerate(side.tolist()):
            rgb[row, 12:20, 20 * right : 20 * right + 12] = 255
        obs = {"rgb": rgb, "state": sign}
        actions, extras = policy.predict_action_batch(obs, mode, policy.sample_noise((32,), draw))
        target = 0.8 * (2 * side[:, None] - 1) * sign
        return obs, actions, -(actions[:, 0] - target).square().sum(1), extras

    assert play("eval")[2].mean() < -0.5
    for _ in range(40):
        obs, actions, rewards, extras = play("train")
        advantages = (rewards - rewards.mean()) / rewards.std()
        for _ in range(3):
            ratio = (
                policy.default_forward({"obs": obs, "actions": actions})["logprobs"] - extras["prev_logprobs"]
            ).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert play("eval")[2].mean() > -0.15
