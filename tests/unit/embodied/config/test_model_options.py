"""Options of the built-in policies (`actor.model.kwargs`) are checked when a configuration is loaded."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.config.options import check_components
from rlhpc.config.schema import keys_of
from rlhpc.embodied.config import ModelConfig, PpoConfig
from rlhpc.embodied.config.model_options import MODEL_OPTIONS, FlowOptions, model_options
from rlhpc.embodied.models.registry import MODELS
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

#: Policies whose options depend on a folder, or on another policy.
LATE = {"lerobot", "conditioned"}
OPTIONS = [(name, option.name) for name, cls in MODEL_OPTIONS.items() for option in dataclasses.fields(cls)]


def check(name: str, **kwargs: Any) -> None:
    words = [f"actor.model.model_type={name}", f"actor.model.kwargs={json.dumps(kwargs)}"]
    cfg = load_config("configs/quickstart.yaml", words, check=False)
    check_components(cfg, keys_of(PpoConfig), lambda key, rule: ConfigError(f"run.yaml: {key}: {rule}"))


def model(name: str, **kwargs: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(ModelConfig), {"model_type": name, "kwargs": kwargs})


def test_every_built_in_policy_declares_its_options() -> None:
    assert {*MODELS.built_in} == {*MODEL_OPTIONS} | LATE
    assert len(OPTIONS) > 25


@pytest.mark.parametrize("name", MODEL_OPTIONS)
def test_defaults_are_accepted_and_other_names_are_not(name: str) -> None:
    check(name)
    check(name, **dataclasses.asdict(MODEL_OPTIONS[name]()))
    with pytest.raises(
        ConfigError, match=rf"^run\.yaml: actor\.model\.kwargs\.colour: model_type {name} has no such option; "
    ):
        check(name, colour=1)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_each_option_has_a_type(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.yaml: actor\.model\.kwargs\.{option}: it must be ") as raised:
        check(name, **{option: [{}]})
    assert "\n" not in str(raised.value)


def test_a_policy_of_ones_own_takes_anything() -> None:
    check("mine:Policy", colour=1)


def test_a_policy_gets_the_dataclass() -> None:
    options = model_options(FlowOptions, model("flow", num_steps=2, channels=[8]))
    assert (options.num_steps, options.noise_level, options.encoder, options.channels) == (2, 0.5, "cnn", [8])
    with pytest.raises(ConfigError, match=r"^actor\.model\.kwargs\.channels is \[0\]; it must be greater than 0$"):
        model_options(FlowOptions, model("flow", channels=[0]))
