"""Vision transformers under the names that timm gives their weights, for the two that OpenVLA sees with.

timm itself needs a torchvision that fits the build of torch, which is not to be had everywhere; what is used of it is this.
One name differs, as in OpenVLA's files: the scale of a layer is `scale_factor`, since transformers renames any `gamma`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
