"""OpenVLA and OFT: the names, shapes and numbers of what is released, the folders, and the statistics that scale actions."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

from rlhpc import ConfigError
from rlhpc.embodied.envs.observations import encode_text
from rlhpc.embodied.models import Policy, build_model
from rlhpc.embodied.models.normalization import Scaling, read_statistics
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
from rlhpc.embodied.models.vlm import Eye
from tests.unit.embodied.models.test_action_tokens import ACTION, LORA, SPACE, observations, section

#: What timm says of the two vision transformers: names and shapes of the weights with 224 pixels a side (of one block, and
#: how many there are), and what the last layer but one gives of tiny ones, every other patch and every fourth feature.
HERE = Path(__file__).parent
TIMM = json.loads((HERE / "timm_vits.json").read_text())["models"]
#: The actions by openvla/openvla (tokens) and moojink/openvla-oft with its attention, which goes both ways (parallel, l1), on
#: timm, from the folder that `release` writes of `known_policy`; logits of other tokens than the bins left out.
ANSWERS = json.loads((HERE / "released_actions.json").read_text())
DINO, SIGLIP = TIMM
BOUNDS = {"q01": [-0.9, 0.1, 0], "q99": [0.9, 0.9, 1], "min": [-1, 0, 0], "max": [1, 1, 1], "mask": [True, True, False]}
PROPRIO = {"q01": [-2.0] * 5, "q99": [0.5] * 5, "min": [-3.0] * 5, "max": [2.0] * 5}
STATISTICS = {"mine": {"action": BOUNDS, "proprio": PROPRIO, "num_transitions": 10, "num_trajectories": 2}}


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


def test_pictures_are_resized_as_pillow_does():
    from PIL import Image

    waves = np.sin(np.arange(40)[:, None, None] * 0.9 + np.arange(30)[:, None] * 0.7 + np.arange(3))
    image = (waves * 127.5 + 127.5).astype(np.uint8)
    theirs = np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BICUBIC), np.float32) / 255
    mine = Eye(28, [[0.0] * 3, [0.5] * 3], [[1.0] * 3, [0.5] * 3], bicubic=True)(torch.from_numpy(image)[None])
    assert mine.shape == (1, 1, 6, 28, 28)
    off = np.abs(mine[0, 0, :3].permute(1, 2, 0).numpy() - theirs)
    assert off.max() < 1.5 / 255 and (off > 0.5 / 255).mean() < 0.3  # Pillow also rounds between its two passes
    torch.testing.assert_close(mine[0, 0, 3:], mine[0, 0, :3] * 2 - 1)
    ramp = torch.arange(28, dtype=torch.uint8).expand(28, 28)[None, ..., None].repeat(1, 1, 1, 3)
    middle = Eye(28, [[0.0] * 3], [[1.0] * 3], middle=0.25)(ramp)[0, 0, 0] * 255  # half of each side
    torch.testing.assert_close(middle[5], torch.linspace(13.5 - 6.75, 13.5 + 6.75, 28))


def test_actions_are_scaled_as_the_datasets_say():
    scaling = Scaling([-0.5, 2, 0, 7], [0.5, 4, 1, 7], [True, True, False, True])
    actions = torch.tensor([[0.0, 4.0, 0.3, 7.0], [2.0, 2.5, 1.0, 7.0]])
    scaled = scaling.scaled(actions)
    torch.testing.assert_close(scaled, torch.tensor([[0, 1, 0.3, 0], [1, -0.5, 1.0, 0]]))
    torch.testing.assert_close(scaling.unscaled(scaled), torch.tensor([[0.0, 4, 0.3, 7], [0.5, 2.5, 1, 7]]))
    hand = Scaling([-0.5, 0], [0.5, 1], [True, False])
    hand.gripper = True  # closed, then open
    torch.testing.assert_close(hand.scaled(torch.tensor([[0.0, 1], [0, -1]])), torch.tensor([[0.0, 0], [0, 1]]))
    torch.testing.assert_close(hand.unscaled(torch.tensor([[0.0, 0.1], [1, 0.9]])), torch.tensor([[0.0, 1], [0.5, -1]]))


def test_statistics_of_a_lerobot_dataset(tmp_path):
    file = tmp_path / "push" / "meta" / "stats.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"action": BOUNDS, "observation.state": PROPRIO, "timestamp": {"min": [0]}}))
    assert read_statistics(tmp_path / "push") == {"push": {"action": BOUNDS, "proprio": PROPRIO}}
    assert read_statistics(file) == read_statistics(tmp_path / "push")


def scatter(module: torch.nn.Module, size: float) -> None:
    """Weights that look random and are the same everywhere, in the order of their names; norms stay about 1."""
    with torch.no_grad():
        for i, (name, weights) in enumerate(sorted(module.state_dict().items())):
            line = (torch.arange(weights.numel(), dtype=torch.float64) * 12.9898 + i).sin() * 43758.5453
            noise = ((line - line.floor()) * 2 - 1) * size
            weights.copy_(noise.reshape(weights.shape) + (1 if "norm" in name and name.endswith("weight") else 0))


def known_policy(head: str, statistics: str) -> tuple[Policy, dict[str, torch.Tensor]]:
    """A policy whose answers the released code gave, too, and what it sees: one camera and action at a time for OpenVLA."""
    cameras = 1 if head == "tokens" else 2
    space = spaces.Dict({**SPACE.spaces, "rgb": spaces.Box(0, 255, (28, 28, 3 * cameras), np.uint8)})
    options = {"head": head, "proprio": head != "tokens", "statistics": statistics}
    policy = build_model(section("openvla", kwargs=options, num_action_chunks=cameras), space, ACTION, 1)
    for module, size in ((policy.vlm, 0.1), (policy.action_head, 0.1), (policy.proprio_projector, 1.0)):
        if module is not None:
            scatter(module, size)
    pictures = torch.arange(2 * 28 * 28 * 3 * cameras).reshape(2, 28, 28, 3 * cameras) * 7 % 256
    texts = [encode_text(text, 40) for text in ("Push the cube", "pick up the Peg and insert it")]
    return policy, {
        "rgb": pictures.to(torch.uint8), "instruction": torch.from_numpy(np.stack(texts)),
        "state": torch.linspace(-1.2, 1.2, 10).reshape(2, 5),
    }  # fmt: skip


@pytest.mark.parametrize("head", ANSWERS)
def test_actions_are_those_of_the_released_code(head, statistics):
    policy, obs = known_policy(head, statistics)
    with torch.no_grad():
        found = policy.predict_action_batch(obs, "eval")[0]
    torch.testing.assert_close(found, torch.tensor(ANSWERS[head]), rtol=1e-4, atol=1e-4)


@pytest.fixture
def statistics(tmp_path):
    file = tmp_path / "dataset_statistics.json"
    file.write_text(json.dumps(STATISTICS))
    return str(file)


@pytest.mark.parametrize("options", [
    {"head": "tokens"}, {"head": "parallel", "proprio": True}, {"head": "l1", "proprio": True},
    {"head": "l1", "proprio": True, "lora": LORA},
], ids=["tokens", "parallel", "l1", "l1 with adapters"])  # fmt: skip
def test_a_released_folder_loads_with_equal_actions(options, statistics, tmp_path):
    if "lora" in options:
        need_extra("llm")
    policy = build_model(
        section("openvla", kwargs={**options, "statistics": statistics}, log_std_init=-1.5), SPACE, ACTION, 1
    )
    torch.manual_seed(0)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    folder = tmp_path / "released"
    folder.mkdir()
    policy.release(folder, 7)
    for file in folder.glob("*_checkpoint.pt"):  # as they are when several ranks trained
        torch.save({f"module.{name}": value for name, value in torch.load(file).items()}, file)
    if "lora" in options:
        adapter = load_file(folder / "lora_adapter" / "adapter_model.safetensors")
        assert "base_model.model.projector.fc3.lora_A.weight" in adapter
        assert not any("lora" in name for name in load_file(folder / "model.safetensors"))
    said = {} if options["head"] == "l1" else options  # what is in the folder need not be said
    again = build_model(section("openvla", kwargs=said, model_path=str(folder)), SPACE, ACTION, 2)
    obs = observations(3)
    with torch.no_grad():
        mine, theirs = policy.predict_action_batch(obs, "eval"), again.predict_action_batch(obs, "eval")
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if "lora" in options else {"rtol": 0, "atol": 0}  # merged, not added
    torch.testing.assert_close(theirs[0], mine[0], **tolerance)
    for key in ("prev_logprobs", "prev_values"):
        torch.testing.assert_close(theirs[1][key], mine[1][key], **tolerance)
    torch.testing.assert_close(again.scaling.low, torch.tensor(BOUNDS["q01"]))
    wide = build_model(
        section("openvla", kwargs={**said, "normalisation": "bounds"}, model_path=str(folder)), SPACE, ACTION, 2
    )
    torch.testing.assert_close(wide.scaling.low, torch.tensor([-1.0, 0, 0]))
    # A second release carries on what the first one was made of.
    (tmp_path / "second").mkdir()
    again.release(tmp_path / "second", 8)
    assert {p.name.replace("--7_", "--8_") for p in folder.iterdir()} - {"lora_adapter"} == {
        p.name for p in (tmp_path / "second").iterdir()
    }


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
