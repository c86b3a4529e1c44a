"""OpenVLA's network (Kim et al. 2024) and what OpenVLA-OFT (Kim et al. 2025) puts beside it, by the names of released files.

`vision_backbone.featurizer` (and `fused_featurizer`, whose features stand beside the first one's), `projector`,
`language_model`: a Llama. The names of the classes are those that the released configurations name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel

from rlhpc.embodied.models.vit import ViT, vit_shape
from rlhpc.runtime.errors import ConfigError

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
