"""Vision-language models from transformers as policy encoders: loading, tiny random models for tests, and inputs."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.envs.observations import boxes_of, decode_text
from rlhpc.runs.preflight import is_hub_name
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_json
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.text import first_line

TINY = "builtin:tiny"
PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
#: Vocabulary of the tiny models: bytes, then these tokens; the last 256 tokens are action bins.
_TINY_IMAGE, _TINY_BOS, _TINY_WORDS = 256, 257, 640
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def hugging_face() -> Any:
    """Returns the transformers package.

    Raises:
        ConfigError: The package is not installed.
    """
    return require_package("transformers", "vision-language policies need transformers")


def tiny_config(vlm_kind: str, chunk: int, dim: int, state_dim: int) -> Any:
    """Returns the configuration of a model small enough for tests: Llava (SigLIP and Llama) for "vla", π0 for "pi0", or
    OpenVLA.
    """
    package = hugging_face()
    body = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    if vlm_kind == "openvla":
        from rlhpc.embodied.models.prismatic import OpenVLAConfig

        vit_overrides = {"embed_dim": 32, "depth": 3, "num_heads": 2}
        return OpenVLAConfig(
            timm_model_ids=["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
            image_sizes=[28, 28], timm_overrides=[vit_overrides, vit_overrides], image_resize_strategy="resize-naive",
            vision_backbone_id="dinosiglip-vit-so-224px", llm_backbone_id="llama2-7b-pure", use_fused_vision_backbone=True,
            text_config={**body, "vocab_size": _TINY_WORDS + 64, "max_position_embeddings": 1024, "pad_token_id": 0},
        )  # fmt: skip
    vision_config = {
        "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "vision_use_head": False,
    }  # fmt: skip
    if vlm_kind == "vla":
        vocabulary_options = {
            "vocab_size": _TINY_WORDS,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "pad_token_id": 0,
        }
        return package.LlavaConfig(
            vision_config=vision_config, text_config={"model_type": "llama", **body, **vocabulary_options},
            image_token_index=_TINY_IMAGE, vision_feature_select_strategy="full", vision_feature_layer=-1,
        )  # fmt: skip
    gemma_options = {"model_type": "gemma", **body, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": _TINY_WORDS}
    vlm = package.PaliGemmaConfig(
        vision_config=vision_config,
        text_config=gemma_options,
        image_token_index=_TINY_IMAGE,
        projection_dim=body["hidden_size"],
    )
    return package.PI0Config(
        vlm_config=vlm.to_dict(),
        dit_config=gemma_options,
        chunk_size=chunk,
        max_state_dim=max(state_dim, 1),
        max_action_dim=dim,
    )


class ByteTokenizer:
    """Tokenizer of the tiny models: one token per byte."""

    bos_token_id, pad_token_id, unk_token_id = _TINY_BOS, 0, None
    vocab_size = _TINY_WORDS

    def convert_tokens_to_ids(self, token_text: str) -> int | None:
        """Returns None, because the vocabulary contains no words."""
        del token_text
        return None

    def save_pretrained(self, folder: Path) -> None:
        """Writes an equivalent tokenizer for AutoTokenizer."""
        from tokenizers import Tokenizer, models

        vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {f"<{i}>": i for i in range(256, _TINY_WORDS)}
        bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
        tokenizer_class = hugging_face().PreTrainedTokenizerFast
        tokenizer_class(tokenizer_object=bpe, bos_token=f"<{_TINY_BOS}>", pad_token="<0x00>").save_pretrained(folder)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of a text."""
        del add_special_tokens
        return list(text.encode())


_omits_weights = contextvars.ContextVar("_empty", default=False)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Makes `load_vlm` build models on the meta device, for ranks that receive the weights from another rank."""
    reset_token = _omits_weights.set(True)
    try:
        yield
    finally:
        _omits_weights.reset(reset_token)


def load_vlm(cfg: ModelConfig, vlm_kind: str, chunk: int, dim: int, state_dim: int) -> tuple[nn.Module, Any, Any]:
    """Loads a model. Returns the model, its tokenizer, and the settings of its image processor (a dict).

    Args:
        cfg: `actor.model`: model_path (a Hugging Face folder or hub name, or `builtin:tiny`), dtype,
            attn_implementation.
        vlm_kind: "vla", "pi0" or "openvla".
        chunk, dim, state_dim: Chunk size, width of an action and width of the state, used for a tiny model.

    Raises:
        ConfigError: The model does not exist, cannot be loaded, or is not a model of `vlm_kind`.
    """
    package = hugging_face()
    path = cfg.model_path or TINY
    model_class, config_class = package.AutoModelForImageTextToText, package.AutoConfig
    if vlm_kind == "pi0":
        model_class = package.PI0ForConditionalGeneration
    elif vlm_kind == "openvla":
        from rlhpc.embodied.models import prismatic

        model_class, config_class = prismatic.OpenVLAForActionPrediction, prismatic.OpenVLAConfig
    build_model = model_class.from_config if vlm_kind == "vla" else model_class._from_config
    if path == TINY:
        config = tiny_config(vlm_kind, chunk, dim, state_dim)
        with torch.device("meta") if _omits_weights.get() else contextlib.nullcontext():
            return build_model(config), ByteTokenizer(), {}
    if path.startswith("builtin:"):
        raise ConfigError(f"actor.model.model_path is {path!r}; the only built-in vision-language model is {TINY}")
    options = {"dtype": _DTYPES.get(cfg.dtype, torch.float32), "attn_implementation": cfg.attn_implementation}
    trusts_code = cfg.trust_remote_code
    try:
        if _omits_weights.get():
            config = config_class.from_pretrained(path, trust_remote_code=trusts_code)
            with torch.device("meta"):
                model = build_model(config, **options)
        else:
            model = model_class.from_pretrained(path, **options, trust_remote_code=trusts_code)
        tokenizer = package.AutoTokenizer.from_pretrained(path, trust_remote_code=trusts_code)
    except ImportError as error:
        raise ConfigError(
            f"actor.model.attn_implementation is {cfg.attn_implementation!r}, which transformers cannot compute here: "
            f"{first_line(error)}"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"actor.model.model_path is {path!r}, which transformers cannot load: {error}") from error
    required_type = "llava" if vlm_kind == "vla" else vlm_kind
    if model.config.model_type != required_type:
        raise ConfigError(
            f"actor.model.model_path is {path!r}, a {model.config.model_type}; model_type {vlm_kind} takes "
            f"{required_type} models"
        )
    try:
        settings = package.image_processing_base.ImageProcessingMixin.get_image_processor_dict(path)[0]
    except OSError:  # the folder has weights and tokenizer only
        settings = {}
    return model, tokenizer, settings


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a model's folder.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        config_content = read_json((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor.model.model_path: {folder}/config.json cannot be read: {error}") from error
    return config_content if isinstance(config_content, dict) else {}


def require_weights(path: str | None) -> None:
    """Checks that a model's folder exists and has weights; does not check hub names and built-in models.

    Raises:
        ConfigError: The folder or its files are missing; the message names them.
    """
    if not path or path.startswith("builtin:") or is_hub_name(path):
        return
    folder = expand_home(path)
    if not folder.is_dir():
        raise ConfigError(f"actor.model.model_path is {path!r}; there is no such folder")
    read_config(folder)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"actor.model.model_path is {path!r}, a folder without weights (*.safetensors)")


def check_folder(cfg: ModelConfig) -> None:
    """Checks that the folder of a `vla` model has weights (`require_weights`)."""
    require_weights(cfg.model_path)


@dataclass(frozen=True)
class ImagePreprocessing:
    """Image preprocessing of a vision-language model.

    Attributes:
        size: Height and width of the output, in pixels.
        means, stds: Sets of channel statistics; an image is normalised once with each set.
        bicubic: True resizes bicubically and rounds as Pillow does; False resizes bilinearly.
        crop_fraction: Fraction of the area that a central crop keeps. The crop follows the resizing, and is resized
            again.
    """

    size: int
    means: Sequence[Sequence[float]] = ((0.5,) * 3,)
    stds: Sequence[Sequence[float]] = ((0.5,) * 3,)
    bicubic: bool = False
    crop_fraction: float = 1.0

    @classmethod
    def from_settings(cls, config: Any, settings: dict[str, Any]) -> ImagePreprocessing:
        """Builds the preprocessing of a transformers model with the settings of its image processor."""
        means, stds = (settings.get(name, (0.5,) * 3) for name in ("image_mean", "image_std"))
        return cls(int(config.vision_config.image_size), (means,), (stds,))

    def __call__(self, images: Tensor) -> Tensor:
        """Converts images `[B, H, W, 3·cameras]` to normalised images `[B, cameras, 3·len(means), size, size]`."""
        rows, height, width, channels = images.shape
        flat_images = (
            images.reshape(rows, height, width, channels // 3, 3).permute(0, 3, 4, 1, 2).flatten(0, 1).float() / 255
        )
        if (height, width) != (self.size, self.size):
            resize_mode = "bicubic" if self.bicubic else "bilinear"
            flat_images = F.interpolate(
                flat_images, (self.size, self.size), mode=resize_mode, antialias=True, align_corners=False
            )
            if self.bicubic:
                flat_images = (flat_images.clamp(0, 1) * 255).round() / 255
        if self.crop_fraction < 1:
            affine = math.sqrt(self.crop_fraction) * torch.eye(2, 3, device=flat_images.device).expand(
                len(flat_images), -1, -1
            )
            grid = F.affine_grid(affine, list(flat_images.shape), align_corners=True)
            flat_images = F.grid_sample(flat_images, grid, mode="bilinear", align_corners=True)
        normalised_images = [
            (flat_images - flat_images.new_tensor(mean).reshape(3, 1, 1)) / flat_images.new_tensor(std).reshape(3, 1, 1)
            for mean, std in zip(self.means, self.stds, strict=True)
        ]
        return torch.cat(normalised_images, 1).unflatten(0, (rows, channels // 3))


class VlmInputs:
    """Input builder of a vision-language model: converts observations to preprocessed images and prompt tokens.

    Args:
        observation_space: Observation space of a slot: images uint8 `[H, W, 3·cameras]`, and optionally `instruction`.
        tokenizer: Tokenizer of the model.
        preprocessing: Image preprocessing of the model.
        image: Id of the placeholder token that image features replace.
        num_image_tokens: Number of placeholder tokens per image.
        prompt: Prompt template with `{instruction}`.
        image_first: True places images before the BOS token (PaliGemma); False places images after the token.
        num_state_tokens: Number of further placeholder tokens after all images, for the state.
        suffix_ids: Token ids after the prompt.
        lowercase: True converts the instruction to lower case.

    Raises:
        ConfigError: The observations have no images, or images that are not uint8 `[H, W, 3·cameras]`.
    """

    def __init__(
        self,
        observation_space: Any,
        tokenizer: Any,
        preprocessing: ImagePreprocessing,
        image: int,
        num_image_tokens: int,
        prompt: str,
        *,
        image_first: bool = False,
        num_state_tokens: int = 0,
        suffix_ids: Sequence[int] = (),
        lowercase: bool = False,
    ) -> None:
        boxes = boxes_of(observation_space)
        self.image_keys = [key for key, box in boxes.items() if len(box.shape) == 3]
        for key in self.image_keys:
            box = boxes[key]
            if np.dtype(box.dtype) != np.uint8 or box.shape[2] % 3:
                raise ConfigError(
                    f"vision-language policies take pictures uint8 [H, W, 3·cameras]; {key or box} is {box}"
                )
        if not self.image_keys:
            raise ConfigError(f"vision-language policies need pictures; the observations are {observation_space}")
        self.has_text = "instruction" in boxes
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._image_first = image_first
        self._preprocessing = preprocessing
        self._suffix_ids = list(suffix_ids)
        self._lowercase = lowercase
        num_cameras = sum(boxes[key].shape[2] // 3 for key in self.image_keys)
        self._image_ids = [image] * (num_image_tokens * num_cameras + num_state_tokens)
        self._pad_id = int(tokenizer.pad_token_id or 0)
        self._token_cache: dict[bytes, list[int]] = {}

    def __call__(self, obs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token ids and mask `[B, L]`, padded on the left, and the preprocessed images of all cameras."""
        obs_arrays = obs if isinstance(obs, dict) else {"": obs}
        pixels = torch.cat([self._preprocessing(obs_arrays[key]) for key in self.image_keys], 1)
        if self.has_text:
            rows = [self._tokens(bytes(row)) for row in obs_arrays["instruction"].cpu().numpy()]
        else:
            rows = [self._tokens(b"")] * len(pixels)
        width = max(map(len, rows))
        ids = torch.tensor([[self._pad_id] * (width - len(row)) + row for row in rows], device=pixels.device)
        return (
            ids,
            torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=pixels.device),
            pixels,
        )

    def _tokens(self, instruction: bytes) -> list[int]:
        if instruction not in self._token_cache:
            task_text = decode_text(instruction) or "do the task"
            prompt_text = self._prompt.format(instruction=task_text.lower() if self._lowercase else task_text)
            bos = [] if self._tokenizer.bos_token_id is None else [int(self._tokenizer.bos_token_id)]
            text_ids = self._tokenizer.encode(prompt_text, add_special_tokens=False)
            prefix_ids = [*self._image_ids, *bos] if self._image_first else [*bos, *self._image_ids]
            self._token_cache[instruction] = [*prefix_ids, *text_ids, *self._suffix_ids]
        return self._token_cache[instruction]


def count_image_tokens(vlm: Any, config: Any) -> int:
    """Returns the number of tokens that encode one image."""
    image_size = int(config.vision_config.image_size)
    dtype, device = next((parameter.dtype, parameter.device) for parameter in vlm.parameters())
    with torch.no_grad():
        features = vlm.get_image_features(
            torch.zeros(1, 3, image_size, image_size, dtype=dtype, device=device)
        ).pooler_output
    return int(features[0].shape[-2])


def position_ids(mask: Tensor) -> Tensor:
    """Returns the position of each token; positions of padding are undefined."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


class ValueHead(nn.Module):
    """Value head on a hidden state, computed in the precision of its weights. Its values are 0 initially."""

    def __init__(self, width: int, num_outputs: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(width, width), nn.Linear(width, num_outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the values of hidden states `[B, width]`: `[B, outputs]`, or `[B]` for a single output."""
        return self.out(F.gelu(self.hidden(hidden_states.to(self.hidden.weight.dtype)))).float().squeeze(-1)


class DeepValueHead(nn.Module):
    """Value head of several hidden layers, initialised as π_RL's (Chen et al. 2025).

    Args:
        width: Width of the hidden state.
        num_outputs: Number of values.
        hidden_sizes: Widths of the hidden layers.
        activation: Function after each hidden layer.
    """

    def __init__(
        self, width: int, num_outputs: int, hidden_sizes: Sequence[int], activation: Callable[[Tensor], Tensor] = F.relu
    ) -> None:
        super().__init__()
        widths = [width, *hidden_sizes]
        self.activation = activation
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
        self.out = nn.Linear(widths[-1], num_outputs)
        for layer in self.hidden:
            assert isinstance(layer, nn.Linear)
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.out.weight, std=0.02)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the values of hidden states `[..., width]`: `[..., outputs]`, or `[...]` for a single output."""
        x = hidden_states.to(self.out.weight.dtype)
        for layer in self.hidden:
            x = self.activation(layer(x))
        predicted_values: Tensor = self.out(x).float().squeeze(-1)
        return predicted_values


def state_width(space: Any) -> int:
    """Returns the number of components of `state` in an observation; 0 if there is no state."""
    box = boxes_of(space).get("state")
    return 0 if box is None else math.prod(box.shape)
