"""Network of OpenVLA (Kim et al. 2024) with the additions of OpenVLA-OFT (Kim et al. 2025).

Parameters have the names in released weights: `vision_backbone.featurizer`, `projector`, and `language_model`, a Llama.
A second vision transformer is `vision_backbone.fused_featurizer`; the features of both are concatenated. Classes have
the names in released configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from rlhpc.runtime.errors import ConfigError

_EPS = 1e-6


@dataclass(frozen=True)
class _ViTShape:
    """Architecture parameters of a vision transformer.

    Attributes:
        embed_dim, depth, num_heads, mlp_ratio, patch_size: Parameters of timm's model.
        reg_tokens: Number of register tokens. With registers, the model also has a class token; registers and class
            token have no position embeddings.
        scaled: True if blocks have a layer scale.
        pooled: True if the weights contain an attention pool, which this module does not use.
        mean, std: Channel statistics of the training images.
    """

    embed_dim: int
    depth: int
    num_heads: int
    mlp_ratio: float = 4.0
    patch_size: int = 14
    reg_tokens: int = 0
    scaled: bool = False
    pooled: bool = False
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


_SIGLIP = _ViTShape(1152, 27, 16, 3.7362, pooled=True)
#: Shapes by timm model name.
_SHAPES = {
    "vit_large_patch14_reg4_dinov2.lvd142m": _ViTShape(
        1024, 24, 16, reg_tokens=4, scaled=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
    "vit_so400m_patch14_siglip_224": _SIGLIP,
    "vit_so400m_patch14_siglip_384": _SIGLIP,
}


def vit_shape(name: str, shape_changes: dict[str, Any]) -> _ViTShape:
    """Returns the shape of a timm model, with `shape_changes` applied.

    Raises:
        ConfigError: The name is not in `_SHAPES`.
    """
    if name not in _SHAPES:
        raise ConfigError(f"the model's config.json has {name!r} in timm_model_ids; supported: {', '.join(_SHAPES)}")
    return replace(_SHAPES[name], **shape_changes)


class _LayerScale(nn.Module):
    """Layer scale: multiplies each component by a learned factor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((dim,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scaled components `[..., dim]`."""
        return x * self.scale_factor


class _Attention(nn.Module):
    """Self-attention layer."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns attention outputs `[B, L, dim]` for `[B, L, dim]`."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    """Two-layer perceptron with GELU."""

    def __init__(self, dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden_size), nn.Linear(hidden_size, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns outputs `[..., dim]` for `[..., dim]`."""
        return self.fc2(F.gelu(self.fc1(x)))


class ViTBlock(nn.Module):
    """Layer of a vision transformer."""

    def __init__(self, shape: _ViTShape) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.norm1 = nn.LayerNorm(dim, _EPS)
        self.attn = _Attention(dim, shape.num_heads)
        self.ls1 = _LayerScale(dim) if shape.scaled else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, _EPS)
        self.mlp = _Mlp(dim, int(dim * shape.mlp_ratio))
        self.ls2 = _LayerScale(dim) if shape.scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns outputs `[B, L, dim]` for `[B, L, dim]`."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _AttentionPool(nn.Module):
    """Attention pool of SigLIP. Checkpoints contain its weights, but actions do not depend on it."""

    def __init__(self, shape: _ViTShape) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, _EPS)
        self.mlp = _Mlp(dim, int(dim * shape.mlp_ratio))


class _PatchEmbed(nn.Module):
    """Patch embedding of images."""

    def __init__(self, shape: _ViTShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.embed_dim, shape.patch_size, shape.patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """Embeds images `[B, 3, size, size]` as patches `[B, patches, dim]`."""
        return self.proj(images).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    """Vision transformer up to its second-to-last block, whose outputs are OpenVLA's features. The layers behind it are
    not trained.

    Args:
        shape: Architecture parameters.
        size: Height and width of images, in pixels.
    """

    def __init__(self, shape: _ViTShape, size: int) -> None:
        super().__init__()
        dim, self.patches = shape.embed_dim, (size // shape.patch_size) ** 2
        self.embed_dim = dim
        self.registers = shape.reg_tokens
        if shape.reg_tokens:
            self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
            self.reg_token = nn.Parameter(torch.randn(1, shape.reg_tokens, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.patches, dim) * 0.02)
        self.patch_embed = _PatchEmbed(shape)
        self.blocks = nn.ModuleList(ViTBlock(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(dim, _EPS)
        self.attn_pool = _AttentionPool(shape) if shape.pooled else None
        self.freeze_unused()

    def freeze_unused(self) -> None:
        """Freezes the layers behind the features, and the adapters in these layers. They get no gradient, so that
        weight decay alone would change them.
        """
        for layer in self.unused_layers:
            layer.requires_grad_(False)

    @property
    def unused_layers(self) -> list[nn.Module]:
        """Layers behind the features, which no pass runs."""
        layers: list[nn.Module | None] = [self.blocks[-1], self.norm, self.attn_pool]
        return [layer for layer in layers if layer is not None]

    def forward(self, images: Tensor) -> Tensor:
        """Converts images `[B, 3, size, size]` to patch features `[B, patches, dim]`."""
        x = self.patch_embed(images) + self.pos_embed
        if self.registers:
            x = torch.cat([torch.cat([self.cls_token, self.reg_token], 1).expand(len(x), -1, -1), x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, -self.patches :]


#: Number of residual blocks in the action head.
_BLOCKS = 2


class OpenVLAConfig(PretrainedConfig):
    """Configuration of OpenVLA from config.json; unused keys are kept.

    Args:
        timm_model_ids: Names of one or two vision transformers.
        image_sizes: Image size in pixels for each transformer.
        timm_overrides: Changes to the `_ViTShape` of each transformer; released models have none.
        text_config: Configuration of the Llama.
        pad_to_multiple_of: Number of padding tokens at the end of the Llama's vocabulary.
        n_action_bins: Number of tokens that encode bins of an action component; they are the last tokens before the
            padding.
        norm_stats: Action statistics of each training dataset.

    Raises:
        ConfigError: The text model is not a Llama model.
    """

    model_type = "openvla"

    def __init__(
        self,
        timm_model_ids: list[str] | None = None,
        image_sizes: list[int] | None = None,
        timm_overrides: list[dict[str, Any]] | None = None,
        text_config: dict[str, Any] | None = None,
        pad_to_multiple_of: int = 64,
        n_action_bins: int = 256,
        norm_stats: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.timm_model_ids = list(timm_model_ids or ["vit_so400m_patch14_siglip_224"])
        self.image_sizes = list(image_sizes or [224] * len(self.timm_model_ids))
        self.timm_overrides = timm_overrides
        text_options = text_config or {}
        if text_options.get("model_type", "llama") != "llama":
            raise ConfigError(
                f"the model's config.json has text_config.model_type {text_options['model_type']!r}; allowed: llama"
            )
        self.text_config = LlamaConfig(**text_options)
        self.pad_to_multiple_of = pad_to_multiple_of
        self.n_action_bins = n_action_bins
        self.norm_stats = norm_stats
        super().__init__(**kwargs)

    @property
    def shapes(self) -> list[Any]:
        """Shapes of the vision transformers."""
        overrides = self.timm_overrides or [{}] * len(self.timm_model_ids)
        return [vit_shape(name, override) for name, override in zip(self.timm_model_ids, overrides, strict=True)]


AutoConfig.register("openvla", OpenVLAConfig, exist_ok=True)  # AutoTokenizer recognises only registered model types


class _VisionBackbone(nn.Module):
    """Vision backbone: one vision transformer, or two on the same images."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        first_vit, *fused_vits = (
            ViT(shape, image_size) for shape, image_size in zip(config.shapes, config.image_sizes, strict=True)
        )
        self.featurizer = first_vit
        self.patches = first_vit.patches
        self.width = first_vit.embed_dim
        if fused_vits:
            (self.fused_featurizer,) = fused_vits
            self.width += self.fused_featurizer.embed_dim

    def forward(self, images: Tensor) -> Tensor:
        """Converts images to features `[B, patches, width]`; images are `[B, 3, size, size]`, or `[B, 6, size, size]`
        with three channels for each of the two transformers.
        """
        features = self.featurizer(images[:, :3])
        if images.shape[1] > 3:
            features = torch.cat([features, self.fused_featurizer(images[:, 3:])], -1)
        return features


class _Projector(nn.Module):
    """Projector of visual features to embeddings of the language model: three layers for two vision transformers, two layers
    for one.
    """

    def __init__(self, width: int, hidden_size: int, is_fused: bool) -> None:
        super().__init__()
        inner_width = 4 * width if is_fused else hidden_size
        self.fc1, self.fc2 = nn.Linear(width, inner_width), nn.Linear(inner_width, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size) if is_fused else None

    def forward(self, features: Tensor) -> Tensor:
        """Projects features `[..., width]` to `[..., hidden]`."""
        embeddings: Tensor = self.fc2(F.gelu(self.fc1(features)))
        if self.fc3 is not None:
            embeddings = self.fc3(F.gelu(embeddings))
        return embeddings


class OpenVLAForActionPrediction(PreTrainedModel):
    """OpenVLA network up to the language model's hidden states."""

    config_class = OpenVLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = ["ViTBlock", "LlamaDecoderLayer"]  # noqa: RUF012 (as transformers has it)

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        config.text_config._attn_implementation = config._attn_implementation
        self.vision_backbone = _VisionBackbone(config)
        self.projector = _Projector(
            self.vision_backbone.width, config.text_config.hidden_size, len(config.timm_model_ids) > 1
        )
        self.language_model = LlamaForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Returns the language model's input embeddings."""
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Returns the language model's output embeddings, which adapters on all linear layers exclude."""
        return self.language_model.get_output_embeddings()

    def encode_images(self, images: Tensor) -> Tensor:
        """Converts images `[B, cameras, 3 or 6, size, size]` to embeddings `[B, cameras · patches, hidden]`."""
        features = self.projector(self.vision_backbone(images.flatten(0, 1).to(self.dtype)))
        return features.reshape(len(images), -1, features.shape[-1])

    def embed(self, ids: Tensor, features: Tensor) -> Tensor:
        """Returns embeddings `[B, L, hidden]` of token ids `[B, L]`; `features [B, n, hidden]` replace negative ids."""
        token_embeddings = self.get_input_embeddings()(ids.clamp(min=0))
        return token_embeddings.masked_scatter((ids < 0)[..., None], features.to(token_embeddings.dtype))


class _ResidualBlock(nn.Module):
    """Residual block of the action head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Returns outputs `[..., width]` for `[..., width]`."""
        return x + self.ffn(x)


class _ResidualMlp(nn.Module):
    """Residual perceptron of the action head."""

    def __init__(self, num_inputs: int, width: int, num_outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(num_inputs)
        self.fc1 = nn.Linear(num_inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(width) for _ in range(_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns outputs `[..., outputs]` for `[..., inputs]`."""
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class ActionHead(nn.Module):
    """Action head of OpenVLA-OFT: regresses an action from the hidden states at its components' positions, in the precision
    of its weights.
    """

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.model = _ResidualMlp(width * dim, width, dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Converts hidden states `[B, chunk · dim, width]` to actions `[B, chunk, dim]`."""
        return self.model(hidden_states.to(self.model.fc1.weight.dtype).unflatten(1, (-1, self.dim)).flatten(2)).float()


class ProprioProjector(nn.Module):
    """Proprioception projector of OpenVLA-OFT: maps a robot's state to one embedding of the language model, in the precision
    of its weights.
    """

    def __init__(self, state_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(state_dim, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, state: Tensor) -> Tensor:
        """Projects states `[B, state]` to embeddings `[B, hidden]`."""
        return self.fc2(F.gelu(self.fc1(state.to(self.fc1.weight.dtype))))
