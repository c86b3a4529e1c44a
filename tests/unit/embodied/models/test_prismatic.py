"""Prismatic networks: names, shapes and pictures of the released models."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhpc import ConfigError
from rlhpc.embodied.models import build_model
from tests.extras import need_extra

need_extra("llm")

from rlhpc.embodied.models.prismatic import (
    ActionHead,
    OpenVLAConfig,
    OpenVLAForActionPrediction,
    ProprioProjector,
    ViT,
    vit_shape,
)
from tests.unit.embodied.models.released import STATISTICS
from tests.unit.embodied.models.test_action_tokens import ACTION, SPACE, section

#: What timm says of the two vision transformers: names and shapes of the weights with 224 pixels a side (of one block, and
#: how many there are), and what the last layer but one gives of tiny ones, every other patch and every fourth feature.
TIMM = json.loads(Path(__file__).with_name("timm_vits.json").read_text())["models"]
DINO, SIGLIP = TIMM


def released_vision(name: str) -> dict[str, list[int]]:
    """Names and shapes in OpenVLA's files: timm's, but for the scale of a layer."""
    about = TIMM[name]
    blocks = {f"blocks.{i}.{part}": shape for i in range(about["depth"]) for part, shape in about["block"].items()}
    return {part.replace("gamma", "scale_factor"): shape for part, shape in {**about["names"], **blocks}.items()}


def shapes_of(module: torch.nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in module.state_dict().items()}


@pytest.mark.parametrize("eyes", [[DINO, SIGLIP], [SIGLIP]], ids=["openvla-7b", "openvla-v01-7b"])
def test_names_and_shapes_of_the_released_models(eyes):
    """config.json as the 7B models have it, from which all else follows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    text = {"model_type": "llama", "pad_token_id": 32000, "torch_dtype": "bfloat16", "vocab_size": 32064}
    config = OpenVLAConfig(
        timm_model_ids=eyes, image_sizes=[224] * len(eyes), text_config=text, pad_to_multiple_of=64, n_action_bins=256,
        arch_specifier="no-align+gelu-mlp", timm_override_act_layers=[None] * len(eyes), pad_token_id=32000,
    )  # fmt: skip
    with torch.device("meta"):
        found = shapes_of(OpenVLAForActionPrediction._from_config(config))
        llama = shapes_of(LlamaForCausalLM(LlamaConfig(vocab_size=32064)))
        head, felt = shapes_of(ActionHead(4096, 7)), shapes_of(ProprioProjector(8, 4096))
    names = ("featurizer", "fused_featurizer")
    expected = {f"language_model.{name}": shape for name, shape in llama.items()}
    for prefix, eye in zip(names, eyes, strict=False):
        expected |= {f"vision_backbone.{prefix}.{name}": shape for name, shape in released_vision(eye).items()}
    widths = [1024 + 1152, 4 * (1024 + 1152), 4096, 4096] if len(eyes) == 2 else [1152, 4096, 4096]
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths), 1):
        expected |= {f"projector.fc{i}.weight": [outputs, inputs], f"projector.fc{i}.bias": [outputs]}
    assert found == expected and found["language_model.lm_head.weight"] == [32064, 4096]
    norms = {"model.layer_norm1": 28672, "model.layer_norm2": 4096}
    linears = {"model.fc1": [4096, 28672], "model.fc2": [7, 4096]}
    for i in range(2):
        norms[f"model.mlp_resnet_blocks.{i}.ffn.0"] = 4096
        linears[f"model.mlp_resnet_blocks.{i}.ffn.1"] = [4096, 4096]
    weights = {f"{name}.weight": shape for name, shape in {**{n: [w] for n, w in norms.items()}, **linears}.items()}
    assert head == {**weights, **{name.replace("weight", "bias"): shape[:1] for name, shape in weights.items()}}
    assert felt == {
        "fc1.weight": [4096, 8], "fc1.bias": [4096], "fc2.weight": [4096, 4096], "fc2.bias": [4096],
    }  # fmt: skip


@pytest.mark.parametrize("name", [DINO, SIGLIP])
def test_what_is_seen_is_what_timm_sees(name):
    """Weights and pictures are sines of their position, in timm's order."""
    eye = ViT(vit_shape(name, {"embed_dim": 16, "depth": 3, "num_heads": 2}), 28)
    with torch.no_grad():
        for i, (_, weights) in enumerate(sorted(eye.state_dict().items())):
            line = (torch.arange(weights.numel(), dtype=torch.float64) * 0.37 + i).sin() * 0.3
            weights.copy_(line.reshape(weights.shape))
        pictures = (torch.arange(2 * 3 * 28 * 28, dtype=torch.float64) * 0.11).sin().float().reshape(2, 3, 28, 28)
        seen = eye(pictures)[:, ::2, ::4].flatten()
    torch.testing.assert_close(seen, torch.tensor(TIMM[name]["features"]), rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_explained(statistics, tmp_path):
    def build(**changes):
        return build_model(section("openvla", **changes), SPACE, ACTION, 1)

    with pytest.raises(ConfigError, match="allowed: tokens, parallel, l1"):
        build(kwargs={"head": "l2"})
    with pytest.raises(ConfigError, match=r"unnorm_key is 'yours'; .* has statistics of: mine"):
        build(kwargs={"statistics": statistics, "unnorm_key": "yours"})
    with pytest.raises(ConfigError, match="allowed: q99, bounds"):
        build(kwargs={"statistics": statistics, "normalisation": "q9"})
    with pytest.raises(ConfigError, match="allowed: rlds"):
        build(kwargs={"gripper": "open"})
    with pytest.raises(ConfigError, match="cannot be read"):
        build(kwargs={"statistics": str(tmp_path / "none.json")})
    with pytest.raises(ConfigError, match="attn_implementation"):
        build(kwargs={"head": "l1"}, attn_implementation="flash_attention_2")
    several = tmp_path / "several.json"
    several.write_text(json.dumps({**STATISTICS, "yours": STATISTICS["mine"]}))
    with pytest.raises(ConfigError, match=r"unnorm_key is missing; .* has statistics of: mine, yours"):
        build(kwargs={"statistics": str(several)})
    with pytest.raises(ConfigError, match="timm_model_ids"):
        vit_shape("vit_large_patch14_clip_224.openai", {})
    policy = build(kwargs={"head": "l1", "statistics": statistics})
    folder = tmp_path / "released"
    folder.mkdir()
    policy.release(folder, 7)
    shutil.copy(folder / "action_head--7_checkpoint.pt", folder / "action_head--8_checkpoint.pt")
    with pytest.raises(ConfigError, match="2 files action_head--"):
        build(model_path=str(folder))
    (folder / "action_head--7_checkpoint.pt").unlink()
    torch.save({"fc1.weight": torch.zeros(2)}, folder / "action_head--8_checkpoint.pt")
    with pytest.raises(ConfigError, match="does not fit this environment's actions"):
        build(model_path=str(folder))
