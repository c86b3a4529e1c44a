"""Encoder of images for off-policy learning, and random shifts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.nn import functional as F

from rlhpc.embodied.models import build_model, policy_from_spec
from rlhpc.embodied.models.cnn import shift_images
from tests.unit.embodied.algorithms.networks import SPACES, model

IMAGES = {
    "last": spaces.Box(0, 255, (12, 14, 3), np.uint8),
    "first": spaces.Box(0, 255, (3, 12, 14), np.uint8),
}


def draw(space: spaces.Box, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (rows, *space.shape), np.uint8))


@pytest.mark.parametrize("layout", IMAGES)
def test_a_shift_is_a_crop_of_the_padded_image(layout: str) -> None:
    """As in DrQ: edges are continued by 4 pixels, and a crop of the old size begins at the drawn offset."""
    space = IMAGES[layout]
    images, offsets = draw(space, 9), torch.randint(0, 9, (9, 2), generator=torch.Generator().manual_seed(1))
    shifted = shift_images(images, space, offsets, 4)
    assert isinstance(shifted, torch.Tensor) and shifted.dtype == torch.uint8
    for image, ours, (top, left) in zip(images, shifted, offsets.tolist(), strict=True):
        channels = image.permute(2, 0, 1) if layout == "last" else image
        padded = F.pad(channels[None].float(), (4, 4, 4, 4), mode="replicate")[0]
        crop = padded[:, top : top + 12, left : left + 14]
        assert torch.equal(ours.float(), crop.permute(1, 2, 0) if layout == "last" else crop)
    assert torch.equal(shift_images(images, space, torch.full((9, 2), 4), 4), images)


def test_only_images_are_shifted_and_all_of_a_row_alike() -> None:
    space = spaces.Dict({"a": IMAGES["last"], "b": IMAGES["first"], "state": SPACES[0]})
    a = draw(space["a"], 5)
    obs = {"a": a, "b": a.permute(0, 3, 1, 2).contiguous(), "state": torch.rand(5, 5)}
    shifted = shift_images(obs, space, torch.tensor([[0, 8], [8, 0], [3, 4], [4, 4], [1, 6]]), 4)
    assert torch.equal(shifted["a"].permute(0, 3, 1, 2), shifted["b"]) and shifted["state"] is obs["state"]
    assert not torch.equal(shifted["a"], a)


@pytest.mark.parametrize("model_type", ["sac", "crossq", "td3", "iql"])
@pytest.mark.parametrize("encoder", ["cnn", "resnet"])
def test_policies_of_images_act_and_are_described(model_type: str, encoder: str) -> None:
    space = spaces.Dict({"rgb": IMAGES["last"], "state": SPACES[0]})
    policy = build_model(model(model_type=model_type, kwargs={"encoder": encoder}), space, SPACES[1], seed=1)
    obs = {"rgb": draw(IMAGES["last"], 4), "state": torch.rand(4, 5)}
    policy.eval()
    actions, _ = policy.predict_action_batch(obs, "eval")
    assert actions.shape == (4, 1, 2)
    values = policy.default_forward({"obs": obs, "actions": actions}, compute_values=True)["values"]
    assert values.shape == (4,)
    acting = dict(policy.acting_weights())
    assert {name.split(".")[0] for name in acting} == {"actor", "critics"}
    assert all(name.startswith(("actor.", "critics.encoder.")) for name in acting)
    other = policy_from_spec(policy.spec()).eval()
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.predict_action_batch(obs, "eval")[0], actions)
    changed = {**obs, "rgb": draw(IMAGES["last"], 4, seed=1)}
    assert not torch.equal(policy.predict_action_batch(changed, "eval")[0], actions)
