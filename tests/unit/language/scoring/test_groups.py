"""What messages about a group's model name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section, typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.scoring.groups import scoring_groups
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.runtime.errors import ConfigError

SECTIONS = {
    "reference": "actor.model",
    "teacher": "teacher.model",
    "reward": "reward.model",
    "own": "groups[own].model",
}


@pytest.mark.parametrize(("name", "section"), SECTIONS.items())
def test_a_groups_model_is_named_by_its_section(name: str, section: str, tmp_path: Path) -> None:
    def cfg(**model: Any) -> GrpoConfig:
        given = {part: {"model": model} for part in ("actor", "teacher", "reward")}
        given["groups"] = [{"name": "own", "scorer": "logprobs", "model": model}]
        return typed(GrpoConfig, OmegaConf.merge(default_section(GrpoConfig), given))

    def make(cfg: GrpoConfig) -> None:
        group = scoring_groups(cfg)[name]
        assert group.model_section == section
        make_scorer(cfg, torch.device("cpu"), group)

    with pytest.raises(ConfigError) as caught:
        make(cfg(model_path=str(tmp_path)))
    assert str(caught.value).startswith(f"{section}.model_path={tmp_path}: ")
    if name != "reward":
        with pytest.raises(ConfigError) as caught:
            make(cfg(model_path=str(tmp_path), dtype="float8"))
        assert str(caught.value).startswith(f"{section}.dtype is 'float8'; choose from")
