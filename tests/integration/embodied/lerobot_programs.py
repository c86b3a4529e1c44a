"""What the tests of LeRobot's policies run in LeRobot's Python: `make FOLDER` and `hold RELEASED CHECKPOINT`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.embodied.models.lerobot.library import mend_torchvision

mend_torchvision()

import square  # noqa: E402
from lerobot.configs.policies import PreTrainedConfig  # noqa: E402
from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig  # noqa: E402
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig  # noqa: E402
from lerobot.policies.factory import get_policy_class, make_pre_post_processors  # noqa: E402

from rlhpc.embodied.export import load_exported  # noqa: E402

STATE, PICTURE = "observation.state", "observation.image"
INPUTS = {
    "input_features": {
        STATE: PolicyFeature(FeatureType.STATE, (2,)),
        PICTURE: PolicyFeature(FeatureType.VISUAL, (3, 16, 16)),
    },
    "output_features": {"action": PolicyFeature(FeatureType.ACTION, (2,))},
    "device": "cpu",
}
TINY: dict[str, Any] = {
    "act": lambda: ACTConfig(
        **INPUTS, chunk_size=4, n_action_steps=2, pretrained_backbone_weights=None, dim_model=32, n_heads=2,
        dim_feedforward=64, n_encoder_layers=1, n_vae_encoder_layers=1, latent_dim=8,
    ),
    "diffusion": lambda: DiffusionConfig(
        **INPUTS, n_obs_steps=1, horizon=4, n_action_steps=2, down_dims=(32, 64), n_groups=4, crop_shape=None,
        spatial_softmax_num_keypoints=4, diffusion_step_embed_dim=16, num_train_timesteps=10,
        noise_scheduler_type="DDIM", num_inference_steps=5,
    ),
}  # fmt: skip


def make(folder: Path) -> None:
    """A dataset of an expert's episodes, and a tiny, random policy of each family, written by LeRobot."""
    shapes = {STATE: ("float32", (2,)), PICTURE: ("image", (16, 16, 3)), "action": ("float32", (2,))}
    features = {
        name: {"dtype": dtype, "shape": shape, "names": [str(i) for i in range(len(shape) if dtype == "image" else 2)]}
        for name, (dtype, shape) in shapes.items()
    }
    data = LeRobotDataset.create("tiny/square", 10, features, root=folder / "data", use_videos=False)
    world = square.Square()
    for episode in range(6):
        seen, over, steps = world.reset(seed=episode)[0], False, 0
        while not over and steps < 12:
            action = square.expert({key: np.asarray(seen[key])[None] for key in ("rgb", "state")})[0]
            data.add_frame({STATE: seen["state"], PICTURE: seen["rgb"], "action": action, "task": seen["instruction"]})
            seen, _, over, _, _ = world.step(action)
            steps += 1
        data.save_episode()
    data.finalize()
    for family, config in TINY.items():
        torch.manual_seed(0)
        get_policy_class(family)(config()).save_pretrained(folder / family)
        for processor in make_pre_post_processors(config(), dataset_stats=data.meta.stats):
            processor.save_pretrained(folder / family)


def observations() -> dict[str, torch.Tensor]:
    """Four of them, as the environment shows them."""
    random = np.random.default_rng(0)
    pictures = torch.from_numpy(random.integers(0, 256, (4, 16, 16, 3), np.uint8))
    return {"rgb": pictures, "state": torch.from_numpy(random.uniform(-1, 1, (4, 2)).astype(np.float32))}


def hold(released: Path, checkpoint: Path) -> None:
    """Holds what was released, as LeRobot loads and plays it, against the checkpoint: actions and loss."""
    mine, obs = load_exported(checkpoint), observations()
    config = PreTrainedConfig.from_pretrained(released)
    theirs = get_policy_class(config.type).from_pretrained(released, config=config, strict=True)
    before, after = make_pre_post_processors(config, pretrained_path=str(released))
    seen = {STATE: obs["state"], PICTURE: (obs["rgb"].permute(0, 3, 1, 2).float() / 255).contiguous()}
    if config.type == "act":
        played = after(theirs.predict_action_chunk(before(seen)))[:, :2]
    else:
        theirs.reset()
        noise = torch.zeros(4, 4, 2)
        played = torch.stack([after(theirs.select_action(before(seen), noise=noise)) for _ in range(2)], 1)
    with torch.no_grad():
        actions, _ = mine.predict_action_batch(obs, mode="eval")
    assert played.shape == (4, 2, 2) and played.std() > 0
    torch.testing.assert_close(actions, played, rtol=0, atol=0)

    shown = torch.rand(4, 4, 2, generator=torch.Generator().manual_seed(1))
    beyond = torch.tensor([[False] * 3 + [True]] * 4)
    losses = []
    for compute in ("mine", "theirs"):
        torch.manual_seed(2)
        if compute == "mine":
            losses.append(mine.bc_loss({"obs": obs, "actions": shown, "is_pad": beyond}).mean())
            continue
        batch = before({**seen, "action": shown, "action_is_pad": beyond})
        if config.type == "diffusion":
            batch[STATE] = batch[STATE][:, None]  # the axis of time
        losses.append(theirs.train()(batch)[0])
    assert losses[0] > 0
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    print("equal")


if __name__ == "__main__":
    {"make": make, "hold": hold}[sys.argv[1]](*map(Path, sys.argv[2:]))
