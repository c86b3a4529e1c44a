"""Bases of the policies of LeRobot's library: inputs, and exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.embodied.models.lerobot import stand_in
from tests.unit.embodied.models.lerobot.stand_in import IMAGE, STATE
from tests.unit.embodied.models.lerobot.test_policies import CLASSES, ROWS, build, observe


@pytest.fixture(autouse=True)
def stand_in_library(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


def test_inputs_have_the_names_and_scales_of_the_network(tmp_path: Path) -> None:
    obs = observe("smolvla")
    batch = build(tmp_path, "smolvla").batch(obs)
    assert batch["task"] == [f"go {row}" for row in range(ROWS)]
    assert torch.equal(batch[STATE], obs["state"])
    torch.testing.assert_close(batch[IMAGE], obs["rgb"].permute(0, 3, 1, 2) / 255)
    del obs["instruction"]
    assert build(tmp_path, "smolvla", kwargs={"task": "stack"}).batch(obs)["task"] == ["stack"] * ROWS


@pytest.mark.parametrize("family", CLASSES)
def test_an_export_has_the_network_and_its_processors(family: str, tmp_path: Path) -> None:
    target = tmp_path / "export"
    target.mkdir()
    build(tmp_path, family).release(target, 7)
    assert json.loads((target / "config.json").read_text())["type"] == family
    assert {path.name for path in target.iterdir()} == {
        "config.json", "policy_preprocessor.json", "policy_postprocessor.json",
    }  # fmt: skip
