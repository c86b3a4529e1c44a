"""`auto` as a precision, and no batch size: what suits the device, said in each place where it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import untouched
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.common import EngineOptions, engine_dtype
from rlhpc.language.models import loading as models
from rlhpc.language.models.loading import compute_dtype
from rlhpc.runs.config_changes import training_changes
from rlhpc.runtime import devices as devices
from tests.accelerators import ON_CPU


def configured(**changes: Any) -> Any:
    cfg = untouched(GrpoConfig)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator that computes in bfloat16."""
    monkeypatch.setattr(models, "computes_bfloat16", lambda device: device == "cuda")


def test_an_accelerator_is_asked_whether_it_computes_in_it_without_emulating(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(native: bool) -> Any:
        return SimpleNamespace(is_bf16_supported=lambda including_emulation=True: native or including_emulation)

    for native in (True, False):  # a V100 emulates it, slowly
        monkeypatch.setattr(torch, "get_device_module", lambda device, native=native: card(native))
        assert devices.computes_bfloat16("cuda") is native
        assert not devices.computes_bfloat16("cpu")


def test_auto_is_bfloat16_there_and_float32_here(able: None) -> None:
    cfg = configured()
    model = cfg.actor.model
    assert model.dtype == cfg.teacher.model.dtype == cfg.critic.model.dtype == cfg.reward.model.dtype == "auto"
    assert compute_dtype(model, "cuda:0") == compute_dtype(model, torch.device("cuda")) == torch.bfloat16
    assert compute_dtype(model, "cpu") == torch.float32
    explicit = configured(actor__model__dtype="float32").actor.model
    assert compute_dtype(explicit, "cuda") == torch.float32


@pytest.mark.parametrize(
    ("changes", "there", "here"),
    [
        ({}, "bfloat16", "float32"),
        ({"actor__model__dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"rollout__dtype": "float16"}, "float16", "float16"),
        ({"actor__model__dtype": "bfloat16", "rollout__dtype": "float32"}, "float32", "float32"),
    ],
)
def test_an_engine_has_the_models_dtype_on_its_own_device(
    able: None, changes: dict[str, Any], there: str, here: str
) -> None:
    cfg = configured(**changes)
    assert (engine_dtype(cfg, "cuda"), engine_dtype(cfg, "cpu")) == (there, here)
    assert EngineOptions.from_config(cfg, "model", "cuda").dtype == there


def test_a_batch_size_that_is_not_given_is_left_to_an_engine_that_has_one(able: None) -> None:
    options = EngineOptions.from_config(configured(), "model", "cuda")
    assert options.max_batch_size is None and options.batch == 64
    given = EngineOptions.from_config(configured(rollout__max_batch_size=7), "model", "cuda")
    assert given.max_batch_size == given.batch == 7


def test_a_run_may_go_on_with_auto_and_not_with_another_precision() -> None:
    def changes(before: str, after: str) -> list[str]:
        saved, now = (
            {"runner": {"task_type": "reasoning"}, "actor": {"model": {"dtype": dtype}}} for dtype in (before, after)
        )
        return [change.key for change in training_changes(saved, now)]

    assert changes("float32", "auto") == changes("auto", "bfloat16") == []
    assert changes("float32", "bfloat16") == ["actor.model.dtype"]


def test_so_may_the_models_of_a_runs_own_groups() -> None:
    """They are a list, of which all else must be as it was."""

    def changes(*after: dict[str, object]) -> list[str]:
        both = [
            {"runner": {"task_type": "reasoning"}, "groups": [{"name": "a", "model": one} for one in models]}
            for models in (({"dtype": "float32", "model_path": "m"},), after)
        ]
        return [change.key for change in training_changes(*both)]

    assert changes({"dtype": "auto", "model_path": "m"}) == changes({"dtype": "float32", "model_path": "m"}) == []
    others = ({"dtype": "bfloat16", "model_path": "m"}, {"dtype": "auto", "model_path": "n"}, {"dtype": "auto"})
    for other in others:
        assert changes(other) == ["groups"]
    assert changes() == ["groups"]


@pytest.mark.gpu
def test_auto_on_this_machine() -> None:
    device = "cpu" if ON_CPU else devices.accelerator()
    expected = torch.bfloat16 if devices.computes_bfloat16(device) else torch.float32
    dtype = compute_dtype(configured().actor.model, device)
    assert dtype == expected
    found = torch.ones(8, 8, device=device, dtype=dtype) @ torch.ones(8, 8, device=device, dtype=dtype)
    assert float(found.sum()) == 512
