"""Loader of LeRobot's policies and processors: which configuration, statistics and tokenizer they get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.embodied.models.lerobot import library
from rlhpc.embodied.models.lerobot.checkpoint import FolderDescription, describe
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.models.lerobot import stand_in
from tests.unit.embodied.models.lerobot.stand_in import ACTIONS, OBSERVATIONS, section

STATISTICS = {"action": {"mean": [1.0, 2.0], "std": [3.0, 4.0]}}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options with which processors are built."""
    return stand_in.install(monkeypatch)


def description(folder: Path, family: str = "act", **changes: Any) -> FolderDescription:
    return describe(section(folder, family, **changes), OBSERVATIONS, ACTIONS)


def processors(folder: Path, statistics: Any = None, vlm: str | None = None, **changes: Any) -> library.Processors:
    config = stand_in.Config(vlm_model_name="hub/vlm")
    return library.Processors(description(folder, **changes), config, statistics, vlm)


def test_nothing_is_downloaded_and_the_folders_values_are_saved(tmp_path: Path, built: list[dict[str, Any]]) -> None:
    policy = library.load(description(tmp_path, "smolvla", kwargs={"vlm": "/local/vlm"}), "/local/vlm")
    during = policy.loaded_with
    assert (during["device"], during["pretrained_backbone_weights"]) == ("cpu", None)
    assert during["vlm_model_name"] == "/local/vlm" and "load_vlm_weights" not in during
    saved = vars(policy.config)
    assert (saved["device"], saved["vlm_model_name"]) == ("cuda", "hub/vlm"), "an export names what the folder named"


def test_a_policy_that_cannot_be_loaded_is_named(tmp_path: Path, built: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"lerobot cannot load .*: RuntimeError: size mismatch$"):
        library.load(description(tmp_path, config={"broken": True}))


def test_without_lerobot_the_way_to_get_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "importable", lambda: False)
    with pytest.raises(ConfigError, match=r"needs lerobot.*make setup-lerobot"):
        library.load(description(tmp_path))


def test_processors_are_those_of_the_folder(tmp_path: Path, built: list[dict[str, Any]]) -> None:
    made = processors(tmp_path)
    [options] = built
    assert options["pretrained_path"] == str(tmp_path)
    assert options["preprocessor_overrides"]["device_processor"] == {"device": "cpu"}
    assert options["preprocessor_overrides"]["normalizer_processor"] == {}
    assert made.for_device(torch.device("cpu")) is made.for_device(torch.device("cpu"))
    made.for_device(torch.device("meta"))
    assert [each["preprocessor_overrides"]["device_processor"]["device"] for each in built] == ["cpu", "meta"]
    batch = made.preprocess({"observation.state": torch.zeros(2, 3), "task": ["a", "b"]})
    assert batch["observation.language.tokens"].shape == (2, 16)
    assert made.postprocess(torch.ones(1, 2)).tolist() == [[10.0, 10.0]]


@pytest.mark.parametrize("as_folder", [False, True])
def test_statistics_of_a_data_set_replace_those_of_the_folder(
    as_folder: bool, tmp_path: Path, built: list[dict[str, Any]]
) -> None:
    file = tmp_path / "set" / "meta" / "stats.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(STATISTICS))
    processors(tmp_path, tmp_path / "set" if as_folder else file)
    for side, name in (("preprocessor", "normalizer_processor"), ("postprocessor", "unnormalizer_processor")):
        stats = built[0][f"{side}_overrides"][name]["stats"]
        assert stats["action"]["std"].tolist() == [3, 4]


def test_a_folder_without_processors_needs_statistics(tmp_path: Path, built: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"no policy_preprocessor\.json; name the dataset"):
        processors(tmp_path, processors=False)
    (tmp_path / "stats.json").write_text(json.dumps(STATISTICS))
    processors(tmp_path, tmp_path / "stats.json", processors=False)
    assert "pretrained_path" not in built[0] and built[0]["dataset_stats"]["action"]["mean"].tolist() == [1, 2]


@pytest.mark.parametrize("content", ["{", "[]", '{"observation.state": {"mean": [0]}}', '{"action": {"mean": "x"}}'])
def test_statistics_that_cannot_be_read_are_named(content: str, tmp_path: Path, built: list[dict[str, Any]]) -> None:
    (tmp_path / "stats.json").write_text(content)
    with pytest.raises(ConfigError, match=r"kwargs\.statistics: .*stats\.json is not a LeRobot dataset's"):
        processors(tmp_path, tmp_path / "stats.json")


def test_processors_that_cannot_be_loaded_are_named(tmp_path: Path, built: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"lerobot cannot load the processors of .*: KeyError"):
        processors(tmp_path, config={"note": "damaged"})


@pytest.mark.parametrize(("vlm", "saved"), [("/local/vlm", "hub/tokenizer"), (None, "tokenizer of the run")])
def test_an_export_names_the_tokenizer_that_the_folder_named(
    vlm: str | None, saved: str, tmp_path: Path, built: list[dict[str, Any]]
) -> None:
    made = processors(tmp_path, vlm=vlm)
    overrides = built[0]["preprocessor_overrides"]
    assert overrides.get("tokenizer_processor") == (vlm and {"tokenizer_name": vlm})
    target = tmp_path / "export"
    target.mkdir()
    made.save(target)
    assert json.loads((target / "policy_preprocessor.json").read_text()) == {"tokenizers": [saved]}
    assert (target / "policy_postprocessor.json").is_file()
