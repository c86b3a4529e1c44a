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
