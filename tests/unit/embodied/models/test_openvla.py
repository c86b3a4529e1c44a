"""OpenVLA and OFT: the names, shapes and numbers of what is released, the folders, and the statistics that scale actions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import load_file

from rlhpc.embodied.envs.observations import encode_text
from rlhpc.embodied.models import Policy, build_model
from rlhpc.embodied.models.normalization import Scaling, read_statistics
from rlhpc.embodied.training import PolicyBlueprint
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

need_extra("llm")

from tests.unit.embodied.models.released import BOUNDS, PROPRIO
from tests.unit.embodied.models.test_action_tokens import ACTION, LORA, SPACE, observations, section

#: The actions by openvla/openvla (tokens) and moojink/openvla-oft with its attention, which goes both ways (parallel, l1), on
#: timm, from the folder that `release` writes of `known_policy`; logits of other tokens than the bins left out.
ANSWERS = json.loads(Path(__file__).with_name("released_actions.json").read_text())


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


def test_the_end_of_the_text_is_left_out_as_in_rlinfs_variant():
    def logits(**options):
        policy = build_model(section("openvla", kwargs={"head": "parallel", **options}), SPACE, ACTION, seed=1)
        with torch.no_grad():
            return policy, policy._hidden_states(observations(2), None)

    (policy, with_stop), (_, without) = logits(), logits(stop_token=False)
    assert with_stop.shape == without.shape and not torch.allclose(with_stop, without)
    # Without the end of the text, attention sees what it sees if that position is masked.
    embed = policy.vlm.get_input_embeddings()
    inputs, mask = policy._embed_inputs(observations(2))
    count = policy.chunk * policy.dim
    inputs = torch.cat([inputs, inputs.new_zeros(2, count, inputs.shape[-1]), embed(mask.new_full((2, 1), 2))], 1)
    mask = torch.cat([mask, mask.new_ones(2, count), mask.new_zeros(2, 1)], 1)
    bias = (torch.finfo(inputs.dtype).min * (1 - mask)[:, None, None, :].to(inputs.dtype)).expand(
        -1, -1, mask.shape[1], -1
    )
    with torch.no_grad():
        outputs = policy._run_body(
            inputs_embeds=inputs, attention_mask=bias, position_ids=mask.cumsum(1) - 1, use_cache=False
        )
    torch.testing.assert_close(without, outputs.last_hidden_state[:, -count - 2 : -2], rtol=1e-4, atol=1e-5)


def test_the_value_head_may_have_several_layers():
    cfg = section("openvla", kwargs={"head": "parallel", "value_hidden": [12, 5]})
    policy = build_model(cfg, SPACE, ACTION, seed=1)
    head = policy.value_head
    assert [layer.out_features for layer in head.hidden] == [12, 5] and head.out.in_features == 5
    hidden = torch.randn(3, head.hidden[0].in_features)
    x = torch.nn.functional.gelu(head.hidden[1](torch.nn.functional.gelu(head.hidden[0](hidden))))
    torch.testing.assert_close(head(hidden), head.out(x).squeeze(-1))
    assert policy.value(observations(2)).shape == (2,)


#: Layers that RLinf adapts: also the head and, by `proj`, the convolution in front of the vision transformers.
RLINF_LAYERS = {
    "rank": 4, "alpha": 4, "init": "gaussian",
    "target_modules": ["proj", "qkv", "fc1", "fc2", "fc3", "q_proj", "v_proj", "down_proj", "lm_head"],
}  # fmt: skip


def adapted_policy(**lora) -> Policy:
    """A policy with RLinf's adapters, whose base is the same for all adapters."""
    need_extra("llm")
    options = {"head": "parallel", "proprio": True, "proprio_adapters": True, "lora": {**RLINF_LAYERS, **lora}}
    return build_model(section("openvla", kwargs=options), SPACE, ACTION, seed=1)


def test_adapters_go_on_rlinfs_layers_and_are_released_as_one_weight(tmp_path):
    policy = adapted_policy()
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    adapted = {name.partition(".lora_")[0] for name in trained if ".lora_" in name}
    vision = "vlm.vision_backbone.featurizer"
    assert {f"{vision}.patch_embed.proj", f"{vision}.blocks.0.attn.proj", "vlm.language_model.lm_head"} <= adapted
    assert {"proprio_projector.fc1", "proprio_projector.fc2"} <= adapted
    assert all(".lora_" in name or name.startswith("value_head.") for name in trained)
    for name, parameter in trained.items():  # as peft's gaussian: N(0, 1 / rank), and 0
        if ".lora_A" in name and parameter.numel() > 500:
            assert float(parameter.std()) == pytest.approx(0.25, rel=0.2), name
    obs = observations(3)
    with torch.no_grad():
        start = policy.predict_action_batch(obs, "eval")[1]["prev_logprobs"]
        for name, parameter in trained.items():
            parameter += 0.3 * torch.randn_like(parameter) if ".lora_B" in name else 0
        actions, extras = policy.predict_action_batch(obs, "eval")
    assert not torch.allclose(extras["prev_logprobs"], start, atol=1e-2)
    policy.release(tmp_path, 1)
    kwargs = {"head": "parallel", "statistics": "bounds"}
    merged = build_model(section("openvla", kwargs=kwargs, model_path=str(tmp_path)), SPACE, ACTION, 2)
    with torch.no_grad():
        again, again_extras = merged.predict_action_batch(obs, "eval")
    torch.testing.assert_close(again, actions, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(again_extras["prev_logprobs"], extras["prev_logprobs"], rtol=1e-3, atol=1e-3)


def test_training_continues_the_adapters_of_a_folder(tmp_path):
    policy = adapted_policy()
    with torch.no_grad():
        for name, parameter in policy.vlm.named_parameters():
            parameter += 0.1 if ".lora_B" in name else 0
    policy.release(tmp_path, 1)
    folder = tmp_path / "lora_adapter"
    again = adapted_policy(path=str(folder), alpha=99, target_modules=["fc1"])  # the folder says both
    expected, found = policy.vlm.state_dict(), again.vlm.state_dict()
    assert expected.keys() == found.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=0)
    layers = [policy.vlm.language_model.lm_head, again.vlm.language_model.lm_head]
    assert layers[0].scaling == layers[1].scaling and layers[1].weight.requires_grad is False
    with pytest.raises(ConfigError, match=r"actor\.lora\.rank is 8, and the adapters in .* have rank 4"):
        adapted_policy(path=str(folder), rank=8)
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        adapted_policy(path=str(tmp_path / "absent"))
    content = json.loads((folder / "adapter_config.json").read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora is True; adapters with it are not supported"),
        ({"target_modules": ["fc1"]}, "is of another model: it has also"),
        ({"target_modules": [*content["target_modules"], "k_proj"]}, "is of another model: it lacks"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(ConfigError, match=message):
            adapted_policy(path=str(folder))


def test_adapters_of_the_projector_need_adapters_and_a_projector():
    for options, missing in (({"proprio": True}, "actor.lora.rank"), ({"lora": LORA}, "kwargs.proprio: true")):
        kwargs = {"head": "parallel", "proprio_adapters": True, **options}
        with pytest.raises(ConfigError, match=missing):
            build_model(section("openvla", kwargs=kwargs), SPACE, ACTION, seed=1)


def test_layers_that_no_pass_runs_are_no_units_of_fsdp():
    """FSDP2 would accumulate gradients in weights that it never gathered."""
    policy = build_model(section("openvla", kwargs={"head": "parallel"}), SPACE, ACTION, seed=1)
    layers = PolicyBlueprint.layers(object.__new__(PolicyBlueprint), policy)
    blocks = policy.vlm.vision_backbone.featurizer.blocks
    assert any(blocks[0] is layer for layer in layers) and not any(blocks[-1] is layer for layer in layers)
