"""openpi's folders: what is read of them without LeRobot, what is refused. `tests/data/openpi/record.py` ran openpi's code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from safetensors.torch import load_file, save_file

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.lerobot import checkpoint, openpi_folder
from rlhpc.embodied.models.pi0 import Pi0Policy
from rlhpc.runtime.errors import ConfigError

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[4] / "data/openpi/openpi.json").read_text())
CONFIG = {
    "action_dim": 32, "action_horizon": 10, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m",
    "precision": "bfloat16",
}  # fmt: skip
ACTIONS = Box(-1, 1, (7,), np.float32)
TIMES = {"pi0": "action_time_mlp_in.weight", "pi05": "time_mlp_in.weight"}


def write(path: Path, family: str, **changes: Any) -> Path:
    """A folder with one weight, which says the family."""
    (path / "assets/libero").mkdir(parents=True)
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file({TIMES[family]: torch.ones(2).bfloat16(), "norm.weight": torch.ones(3)}, path / "model.safetensors")
    (path / "assets/libero/norm_stats.json").write_text(json.dumps({"norm_stats": RECORDED["statistics"]}))
    return path


def space(cameras: int = 2, state: int = 8) -> Dict:
    parts = {"rgb": Box(0, 255, (16, 16, 3 * cameras), np.uint8), "state": Box(-1, 1, (state,), np.float32)}
    return Dict({name: box for name, box in parts.items() if box.shape[-1]})


def describe(path: Path, observations: Any = None, actions: Any = ACTIONS, **kwargs: Any) -> Any:
    cfg = ModelConfig(model_type="lerobot", model_path=str(path), num_action_chunks=5, kwargs=kwargs)
    return checkpoint.describe(cfg, space() if observations is None else observations, actions)


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_folder_is_described_as_lerobots(tmp_path: Path, family: str) -> None:
    description = describe(write(tmp_path / "policy", family))
    assert description.is_openpi and description.family == family and description.config["chunk_size"] == 10
    assert description.cameras == {
        "observation.images.base_0_rgb": ("rgb", 0), "observation.images.left_wrist_0_rgb": ("rgb", 1)
    }  # fmt: skip
    assert description.sources["observation.state"] == "state"
    files = openpi_folder.processor_files(description.config)
    steps = {step["registry_name"]: step["config"] for step in files["policy_preprocessor.json"]["steps"]}
    if family == "pi05":
        assert steps["pi05_prepare_state_tokenizer_processor_step"] == {"max_state_dim": 8}
    assert steps["tokenizer_processor"]["max_length"] == (200 if family == "pi05" else 48)
    checkpoint.check_folder(ModelConfig(model_type="lerobot", model_path=str(tmp_path / "policy")))


def test_cameras_keep_openpis_order(tmp_path: Path) -> None:
    path = write(tmp_path / "policy", "pi05")
    description = describe(path, cameras={"right_wrist_0_rgb": "rgb_0", "base_0_rgb": "rgb_1"})
    assert list(description.cameras.items()) == [
        ("observation.images.base_0_rgb", ("rgb", 1)), ("observation.images.right_wrist_0_rgb", ("rgb", 0))
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_lerobots_normalisers_compute_what_openpis_do(tmp_path: Path, family: str) -> None:
    path = write(tmp_path / "policy", family)
    statistics = openpi_folder.lerobot_statistics(None, path, describe(path).config)
    for name, column in (("observation.state", "state"), ("action", "actions")):
        values = np.array(RECORDED["values"][column])
        first, last = (np.array(row) for row in statistics[name].values())
        if family == "pi0":  # LeRobot's formulas
            normalised, unnormalised = (values - first) / (last + 1e-8), values * (last + 1e-8) + first
        else:
            normalised, unnormalised = (
                2 * (values - first) / (last - first) - 1,
                (values + 1) * (last - first) / 2 + first,
            )
        np.testing.assert_allclose(normalised, RECORDED[family]["normalised"][column], rtol=1e-6)
        np.testing.assert_allclose(unnormalised, RECORDED[family]["unnormalised"][column], rtol=1e-6, atol=1e-9)


def test_names_and_prompts_are_openpis() -> None:
    sizes = {family: sum(int(np.prod(shape)) for shape in RECORDED[family]["weights"].values()) for family in TIMES}
    assert (len(RECORDED["pi0"]["weights"]), len(RECORDED["pi05"]["weights"])) == (777, 812)
    assert sizes["pi0"] == pytest.approx(3.501e9, rel=1e-3) and sizes["pi05"] == pytest.approx(3.617e9, rel=1e-3)
    for family, name in TIMES.items():
        assert [other for other in TIMES.values() if other in RECORDED[family]["weights"]] == [name]
    for text, prompt in zip(RECORDED["pi0"]["texts"], RECORDED["pi0"]["prompts"], strict=True):
        assert f"<bos>{openpi_folder.clean_instruction(text)}\n" == prompt
    assert all(prompt.count(" ") > 12 and "State: " in prompt for prompt in RECORDED["pi05"]["prompts"])


def test_training_times_have_openpis_distribution() -> None:
    torch.manual_seed(0)
    times = Pi0Policy.draw_times(SimpleNamespace(), 200_000).sort().values  # type: ignore[arg-type]
    np.testing.assert_allclose(times[:: len(times) // 20], RECORDED["time_quantiles"], atol=0.01)


def test_what_is_written_has_the_names_and_dtypes_that_were_read(tmp_path: Path) -> None:
    source, target = write(tmp_path / "policy", "pi05"), tmp_path / "out"
    target.mkdir()
    trained = {
        "model.time_mlp_in.weight": torch.full((2,), 2.0),
        "model.norm.weight": torch.zeros(3),
        "model.tied": torch.ones(1),
    }
    policy = SimpleNamespace(state_dict=lambda: trained, config=SimpleNamespace(chunk_size=CONFIG["action_horizon"]))
    openpi_folder.write_openpi(policy, source, target)
    weights = load_file(target / "model.safetensors")
    assert {name: weight.dtype for name, weight in weights.items()} == {
        "time_mlp_in.weight": torch.bfloat16, "norm.weight": torch.float32
    }  # fmt: skip
    assert weights["time_mlp_in.weight"].tolist() == [2.0, 2.0]
    assert (target / "assets/libero/norm_stats.json").is_file() and json.loads(
        (target / "config.json").read_text()
    ) == CONFIG
    del trained["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"weights that the policy lacks: norm\.weight"):
        openpi_folder.write_openpi(policy, source, target)


@pytest.mark.parametrize(
    ("changes", "observations", "kwargs", "message"),
    [
        ({"paligemma_variant": "gemma_2b_lora"}, None, {}, "paligemma_variant 'gemma_2b_lora'; here are: gemma_2b"),
        ({"action_horizon": 0}, None, {}, "action_horizon 0; allowed: a positive number"),
        ({"action_dim": 6}, None, {}, "the environment's state has 8 numbers; .* takes 1 to 6"),
        ({}, space(cameras=4), {}, "whose cameras are base_0_rgb, .*; the environment shows 4"),
        ({}, space(state=0), {}, "the environment's state has 0 numbers"),
        ({}, None, {"cameras": {"head": "rgb_0"}}, "kwargs.cameras names head"),
        ({}, None, {"action_horizon": 1}, "num_action_chunks is 5; actor.model.kwargs.action_horizon is 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], observations: Any, kwargs: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "policy", "pi05", **changes)
    with pytest.raises(ConfigError, match=message):
        describe(path, observations, **kwargs)


def test_weights_and_statistics_that_are_missing_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "policy", "pi05")
    config = describe(path).config
    statistics = {"norm_stats": {"state": {"q01": [0.0] * 3, "q99": [1.0] * 8}, "actions": {}}}
    (path / "assets/libero/norm_stats.json").write_text(json.dumps(statistics))
    with pytest.raises(ConfigError, match=r"for state q01: 3, q99: 8; pi05 needs q01 and q99 of 8 numbers"):
        openpi_folder.lerobot_statistics(None, path, config)
    save_file({"other": torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"has 1 weights, and neither π0's action_time_mlp_in nor π0\.5's time_mlp_in"
    ):
        describe(path)
    (path / "model.safetensors").write_bytes(b"\xff" * 12)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        describe(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        describe(path)
