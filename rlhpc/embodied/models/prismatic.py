"""OpenVLA's network (Kim et al. 2024) and what OpenVLA-OFT (Kim et al. 2025) puts beside it, by the names of released files.

`vision_backbone.featurizer` (and `fused_featurizer`, whose features stand beside the first one's), `projector`,
`language_model`: a Llama. The names of the classes are those that the released configurations name.
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
class ViTShape:
    """What tells one from another.

    Attributes:
        embed_dim, depth, num_heads, mlp_ratio, patch_size: As timm has them.
        reg_tokens: Registers; with them there is a class token, too, and neither has a position.
        scaled: Layers have a scale.
        pooled: There is an attention pool at the end, which nothing here uses, and files contain.
        mean, std: Of the pictures it was trained on.
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


_SIGLIP = ViTShape(1152, 27, 16, 3.7362, pooled=True)
#: By timm's names.
SHAPES = {
    "vit_large_patch14_reg4_dinov2.lvd142m": ViTShape(
        1024, 24, 16, reg_tokens=4, scaled=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
    "vit_so400m_patch14_siglip_224": _SIGLIP,
    "vit_so400m_patch14_siglip_384": _SIGLIP,
}


def vit_shape(name: str, changes: dict[str, Any]) -> ViTShape:
    """The shape that timm's name stands for, with changes to it.

    Raises:
        ConfigError: It is none of `SHAPES`.
    """
    if name not in SHAPES:
        raise ConfigError(f"the model's config.json has {name!r} in timm_model_ids; supported: {', '.join(SHAPES)}")
    return replace(SHAPES[name], **changes)


class LayerScale(nn.Module):
    """Multiplies each component by a weight of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((dim,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., dim]` to the same."""
        return x * self.scale_factor


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, dim]` to the same."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., dim]` to the same."""
        found: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return found


class ViTBlock(nn.Module):
    """A layer."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.norm1, self.attn = nn.LayerNorm(dim, _EPS), Attention(dim, shape.num_heads)
        self.ls1 = LayerScale(dim) if shape.scaled else nn.Identity()
        self.norm2, self.mlp = nn.LayerNorm(dim, _EPS), Mlp(dim, int(dim * shape.mlp_ratio))
        self.ls2 = LayerScale(dim) if shape.scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """`[B, L, dim]` to the same."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        found: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return found


class AttentionPool(nn.Module):
    """The weights of SigLIP's pool: files have them, and no action depends on them."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        dim = shape.embed_dim
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.norm, self.mlp = nn.LayerNorm(dim, _EPS), Mlp(dim, int(dim * shape.mlp_ratio))


class PatchEmbed(nn.Module):
    """Pictures to patches."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.embed_dim, shape.patch_size, shape.patch_size)

    def forward(self, pictures: Tensor) -> Tensor:
        """`[B, 3, size, size]` to `[B, patches, dim]`."""
        found: Tensor = self.proj(pictures).flatten(2).transpose(1, 2)
        return found


class ViT(nn.Module):
    """A vision transformer up to its last layer but one, which is where OpenVLA takes what it sees from. What comes after that
    is not trained.

    Args:
        shape: What it is like.
        size: Pixels a side.
    """

    def __init__(self, shape: ViTShape, size: int) -> None:
        super().__init__()
        dim, self.patches = shape.embed_dim, (size // shape.patch_size) ** 2
        self.embed_dim, self.registers = dim, shape.reg_tokens
        if shape.reg_tokens:
            self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
            self.reg_token = nn.Parameter(torch.randn(1, shape.reg_tokens, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.patches, dim) * 0.02)
        self.patch_embed = PatchEmbed(shape)
        self.blocks = nn.ModuleList(ViTBlock(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(dim, _EPS)
        self.attn_pool = AttentionPool(shape) if shape.pooled else None
        self.freeze_unused()

    def freeze_unused(self) -> None:
        """Trains nothing of what comes after; adapters there have no gradient either, and would only decay."""
        for part in (self.blocks[-1], self.norm, self.attn_pool):
            if part is not None:
                part.requires_grad_(False)

    def forward(self, pictures: Tensor) -> Tensor:
        """`[B, 3, size, size]` to what its patches became `[B, patches, dim]`."""
        x = self.patch_embed(pictures) + self.pos_embed
        if self.registers:
            first = torch.cat([self.cls_token, self.reg_token], 1).expand(len(x), -1, -1)
            x = torch.cat([first, x], 1)
        for block in self.blocks[:-1]:
            x = block(x)
        found: Tensor = x[:, -self.patches :]
        return found


#: Blocks of the head that regresses actions.
_BLOCKS = 2


class OpenVLAConfig(PretrainedConfig):
    """What config.json says; keys that are not used here stay in it.

    Args:
        timm_model_ids: One vision transformer, or two.
        image_sizes: Pixels a side, of each.
        timm_overrides: Changes of `ViTShape`, of each; released models have none.
        text_config: Of the Llama.
        pad_to_multiple_of: By how much its vocabulary is larger than the tokenizer's.
        n_action_bins: The last tokens of the vocabulary that stand for parts of an action.
        norm_stats: Of the actions of each dataset that it was trained on.
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
        **others: Any,
    ) -> None:
        self.timm_model_ids = list(timm_model_ids or ["vit_so400m_patch14_siglip_224"])
        self.image_sizes = list(image_sizes or [224] * len(self.timm_model_ids))
        self.timm_overrides = timm_overrides
        text = text_config or {}
        if text.get("model_type", "llama") != "llama":
            raise ConfigError(
                f"the model's config.json has text_config.model_type {text['model_type']!r}; allowed: llama"
            )
        self.text_config = LlamaConfig(**text)
        self.pad_to_multiple_of, self.n_action_bins, self.norm_stats = pad_to_multiple_of, n_action_bins, norm_stats
        super().__init__(**others)

    @property
    def shapes(self) -> list[Any]:
        """Of the vision transformers."""
        changes = self.timm_overrides or [{}] * len(self.timm_model_ids)
        return [vit_shape(name, change) for name, change in zip(self.timm_model_ids, changes, strict=True)]


AutoConfig.register("openvla", OpenVLAConfig, exist_ok=True)  # else AutoTokenizer does not know what its folder is


class VisionBackbone(nn.Module):
    """One vision transformer, or two that see the same."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        first, *second = (ViT(shape, size) for shape, size in zip(config.shapes, config.image_sizes, strict=True))
        self.featurizer, self.patches, self.width = first, first.patches, first.embed_dim
        if second:
            (self.fused_featurizer,) = second
            self.width += self.fused_featurizer.embed_dim

    def forward(self, pictures: Tensor) -> Tensor:
        """`[B, 3 or 6, size, size]`, of 6 three for each, to `[B, patches, width]`."""
        seen = self.featurizer(pictures[:, :3])
        if pictures.shape[1] > 3:
            seen = torch.cat([seen, self.fused_featurizer(pictures[:, 3:])], -1)
        found: Tensor = seen
        return found


class Projector(nn.Module):
    """What is seen, as embeddings of the language model: three layers behind two vision transformers, else two."""

    def __init__(self, width: int, hidden: int, fused: bool) -> None:
        super().__init__()
        inner = 4 * width if fused else hidden
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, hidden)
        self.fc3 = nn.Linear(hidden, hidden) if fused else None

    def forward(self, seen: Tensor) -> Tensor:
        """`[..., width]` to `[..., hidden]`."""
        found: Tensor = self.fc2(F.gelu(self.fc1(seen)))
        if self.fc3 is not None:
            found = self.fc3(F.gelu(found))
        return found


class OpenVLAForActionPrediction(PreTrainedModel):
    """The network, up to the language model's hidden states."""

    config_class = OpenVLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = ["ViTBlock", "LlamaDecoderLayer"]  # noqa: RUF012 (as transformers has it)

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__(config)
        config.text_config._attn_implementation = config._attn_implementation
        self.vision_backbone = VisionBackbone(config)
        hidden = config.text_config.hidden_size
        self.projector = Projector(self.vision_backbone.width, hidden, len(config.timm_model_ids) > 1)
        self.language_model = LlamaForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """See transformers."""
        found: nn.Module = self.language_model.get_input_embeddings()
        return found

    def get_output_embeddings(self) -> nn.Module:
        """See transformers; adapters on all linear layers leave it out."""
        found: nn.Module = self.language_model.get_output_embeddings()
        return found

    def see(self, pictures: Tensor) -> Tensor:
        """`[B, cameras, 3 or 6, size, size]` to embeddings `[B, cameras · patches, hidden]`."""
        seen = self.projector(self.vision_backbone(pictures.flatten(0, 1).to(self.dtype)))
        found: Tensor = seen.reshape(len(pictures), -1, seen.shape[-1])
        return found

    def embed(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Embeddings of tokens `[B, L]`, with `seen [B, n, hidden]` where they are negative."""
        words = self.get_input_embeddings()(ids.clamp(min=0))
        found: Tensor = words.masked_scatter((ids < 0)[..., None], seen.to(words.dtype))
        return found


class ResidualBlock(nn.Module):
    """A layer of the head that regresses actions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        found: Tensor = x + self.ffn(x)
        return found


class ResidualMlp(nn.Module):
    """The head that regresses actions, without its outermost name."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1, self.fc1 = nn.LayerNorm(inputs), nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(_BLOCKS))
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., inputs]` to `[..., outputs]`."""
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        found: Tensor = self.fc2(self.layer_norm2(x))
        return found


class ActionHead(nn.Module):
    """OpenVLA-OFT's: an action from the hidden states of its components' places; computes in its weights' precision."""

    def __init__(self, width: int, dim: int) -> None:
        super().__init__()
        self.dim, self.model = dim, ResidualMlp(width * dim, width, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, chunk · dim, width]` to `[B, chunk, dim]`."""
        places = hidden.to(self.model.fc1.weight.dtype).unflatten(1, (-1, self.dim)).flatten(2)
        found: Tensor = self.model(places).float()
        return found


class ProprioProjector(nn.Module):
    """OpenVLA-OFT's: a robot's state as one embedding of the language model; computes in its weights' precision."""

    def __init__(self, state: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(state, hidden), nn.Linear(hidden, hidden)

    def forward(self, state: Tensor) -> Tensor:
        """`[B, state]` to `[B, hidden]`."""
        found: Tensor = self.fc2(F.gelu(self.fc1(state.to(self.fc1.weight.dtype))))
        return found
