"""Stand-in for LeRobot, which has a Python of its own: tiny networks with the interface that rlhpc reads.

What LeRobot's own networks compute is held by `tests/integration/embodied/test_lerobot.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.lerobot import library

STATE, IMAGE = "observation.state", "observation.images.top"
WIDTH, DIM, PADDED, CHUNK, HORIZON, TRAIN_STEPS = 8, 2, 4, 6, 8, 10
ACTIONS = spaces.Box(-1, 1, (DIM,), np.float32)
OBSERVATIONS = spaces.Dict({
    "rgb": spaces.Box(0, 255, (4, 4, 3), np.uint8), "state": spaces.Box(-1, 1, (3,), np.float32),
    "instruction": spaces.Box(0, 255, (16,), np.uint8),
})  # fmt: skip
WINDOWS = spaces.Dict({
    key: spaces.Box(-1, 1, (2, *box.shape), box.dtype) if box.dtype == np.float32 else
    spaces.Box(0, 255, (2, *box.shape), box.dtype)
    for key, box in OBSERVATIONS.spaces.items() if key != "instruction"
})  # fmt: skip
_CONFIG: dict[str, Any] = {
    "input_features": {
        IMAGE: {"type": "VISUAL", "shape": [3, 4, 4]}, STATE: {"type": "STATE", "shape": [3]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [DIM]}},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "act": {**_CONFIG, "type": "act", "chunk_size": CHUNK, "n_obs_steps": 1},
    "diffusion": {**_CONFIG, "type": "diffusion", "horizon": HORIZON, "n_obs_steps": 2},
    "smolvla": {**_CONFIG, "type": "smolvla", "chunk_size": CHUNK, "n_obs_steps": 1, "max_action_dim": PADDED},
}


class Config(SimpleNamespace):
    """Configuration of a policy's folder, with the values that the networks read."""

    @classmethod
    def from_pretrained(cls, path: Path) -> Config:
        content = json.loads((path / "config.json").read_text())
        defaults = {
            "device": "cuda", "pretrained_backbone_weights": "IMAGENET", "vlm_model_name": "hub/vlm", "dim_model": WIDTH,
            "image_features": {IMAGE: None}, "num_steps": 3, "max_action_dim": PADDED,
        }  # fmt: skip
        return cls(**{**defaults, **content})


class Network(nn.Module):
    """Base of the networks: loads the folder's weights, and keeps the batch that it trained on last."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.trained_on: dict[str, Any] = {}

    @classmethod
    def from_pretrained(cls, path: Path, config: Config, strict: bool) -> Network:
        if config.type == "act" and getattr(config, "broken", False):
            raise RuntimeError("size mismatch\nfor many weights")
        torch.manual_seed(3)
        network = cls(config)
        network.loaded_with = dict(vars(config))  # type: ignore[assignment]
        return network

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        self.trained_on = batch
        return next(self.parameters()).sum(), {}

    def save_pretrained(self, target: Path) -> None:
        (target / "config.json").write_text(json.dumps(vars(self.config), default=str))


class Act(Network):
    """Chunk of actions from the state and the mean of the image."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = _ActModel()


class _ActModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(0.5)), nn.Linear(WIDTH, CHUNK * DIM)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, None]:
        brightness = torch.stack([image.mean((1, 2, 3)) for image in batch["observation.images"]], 1).mean(1, True)
        tokens = self.encoder(torch.cat([batch[STATE], brightness], 1)[None])  # [tokens, B, width]
        return self.decoder(tokens[0]).unflatten(1, (CHUNK, DIM)), None


class Scheduler:
    """Noise schedule of a diffusion policy."""

    def __init__(self, prediction_type: str) -> None:
        self.config = SimpleNamespace(
            num_train_timesteps=TRAIN_STEPS, prediction_type=prediction_type, clip_sample=True, clip_sample_range=1.0
        )
        self.alphas_cumprod = torch.linspace(0.98, 0.1, TRAIN_STEPS)

    def set_timesteps(self, steps: int) -> None:
        self.timesteps = torch.arange(steps).flip(0) * (TRAIN_STEPS // steps)


class Diffusion(Network):
    """Denoising network that is linear in the state and the conditioning."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.diffusion = _DiffusionModel(getattr(config, "prediction_type", "epsilon"))


class _DiffusionModel(nn.Module):
    def __init__(self, prediction_type: str) -> None:
        super().__init__()
        self.num_inference_steps, self.noise_scheduler = 5, Scheduler(prediction_type)
        self.config = SimpleNamespace(diffusion_step_embed_dim=3)
        self.unet = _Unet()

    def _prepare_global_conditioning(self, batch: dict[str, Any]) -> Tensor:
        images = batch["observation.images"]  # [B, steps, cameras, 3, H, W]
        return torch.cat([batch[STATE].flatten(1), images.mean((2, 3, 4, 5))], 1)


class _Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_modules = nn.ModuleList([nn.ModuleList([nn.Module()])])
        self.down_modules[0][0].cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(2 * 4 + 3, WIDTH))  # type: ignore[index]
        self.mix, self.time = nn.Linear(2 * 4, HORIZON * DIM), nn.Linear(1, 1)

    def forward(self, x: Tensor, t: Tensor, global_cond: Tensor) -> Tensor:
        shift = self.mix(global_cond).unflatten(1, (HORIZON, DIM))
        return 0.5 * x + shift + self.time(t.float()[:, None] / TRAIN_STEPS)[:, None]


class SmolVla(Network):
    """Velocity from the state, the task's text and the noise."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model = _SmolVlaModel()

    def prepare_images(self, batch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        return [batch[IMAGE]], [torch.ones(len(batch[IMAGE]), dtype=torch.bool)]

    def prepare_state(self, batch: dict[str, Any]) -> Tensor:
        state: Tensor = batch[STATE]
        return state


class _SmolVlaModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.push = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CHUNK * PADDED)
        self.vlm_with_expert = _Vlm()

    def embed_prefix(
        self, images: list[Tensor], image_mask: list[Tensor], tokens: Tensor, mask: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the text, and one of the state; the text's padding is masked."""
        text = tokens[..., None].float().expand(-1, -1, WIDTH) / 256
        embeddings = torch.cat([text, self.embed(state)[:, None]], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return embeddings, mask, torch.zeros_like(mask)

    def denoise_step(self, mask: Tensor, cache: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return self.push(cache).unflatten(1, (CHUNK, PADDED)) + x * t[:, None, None]


class _Vlm(nn.Module):
    config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=WIDTH))

    def forward(self, inputs_embeds: list[Tensor], **options: Any) -> tuple[tuple[Tensor, None], Tensor]:
        return (inputs_embeds[0], None), inputs_embeds[0].mean(1)


class Processor:
    """Pre- or postprocessor: scales states and actions, and turns a task's text into tokens."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.kind, self.options = kind, options
        self.steps = [SimpleNamespace(tokenizer_name="tokenizer of the run")] if kind == "preprocessor" else []

    def __call__(self, rows: Any) -> Any:
        if self.kind == "postprocessor":
            return 10 * rows
        batch = dict(rows)
        texts = [text.encode()[:16].ljust(16, b"\0") for text in batch["task"]]
        tokens = torch.from_numpy(np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), 16).copy())
        batch["observation.language.tokens"], batch["observation.language.attention_mask"] = tokens, tokens > 0
        return batch

    def save_pretrained(self, folder: Path) -> None:
        names = [step.tokenizer_name for step in self.steps]
        (folder / f"policy_{self.kind}.json").write_text(json.dumps({"tokenizers": names}))


def install(patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Installs the stand-in as `lerobot`; returns the list of the options with which processors are built."""
    built: list[dict[str, Any]] = []

    def make_processors(config: Any, **options: Any) -> tuple[Processor, Processor]:
        if options.get("pretrained_path") and "damaged" in Path(options["pretrained_path"], "config.json").read_text():
            raise KeyError("no such step")
        built.append(options)
        return Processor("preprocessor", options), Processor("postprocessor", options)

    def att_2d_masks(mask: Tensor, causal: Tensor) -> Tensor:
        return mask[:, None] & mask[:, :, None]

    networks = {"act": Act, "diffusion": Diffusion, "smolvla": SmolVla}
    contents: dict[str, dict[str, Any]] = {
        "lerobot": {}, "lerobot.configs": {}, "lerobot.policies": {}, "lerobot.policies.smolvla": {},
        "lerobot.configs.policies": {"PreTrainedConfig": Config},
        "lerobot.policies.factory": {
            "get_policy_class": networks.__getitem__, "make_pre_post_processors": make_processors,
        },
        "lerobot.policies.smolvla.modeling_smolvla": {"make_att_2d_masks": att_2d_masks},
    }  # fmt: skip
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        patch.setitem(sys.modules, name, module)
    patch.setattr(library, "importable", lambda: True)
    patch.setattr(library, "import_torchvision", lambda: None)
    return built


def section(folder: Path, family: str, processors: bool = True, **changes: Any) -> ModelConfig:
    """Writes a policy's folder; returns the section `actor.model` that names it."""
    config = {**CONFIGS[family], **changes.pop("config", {})}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    if processors:
        steps = [{"config": {}}, {"config": {"tokenizer_name": "hub/tokenizer"}}]
        (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    return ModelConfig(**{"model_type": "lerobot", "model_path": str(folder), "num_action_chunks": 3, **changes})
