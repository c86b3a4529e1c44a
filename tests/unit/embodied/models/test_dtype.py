"""Precision `auto` of vision-language-action policies: bfloat16 where it is computed in and the update allows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.embodied import training
from rlhpc.embodied.config import EmbodiedActorConfig, ModelConfig
from rlhpc.embodied.models.registry import policy_dtype, policy_section
from rlhpc.runtime import devices


def actor(model_type: str, backend: str, rank: int, dtype: str = "auto") -> Any:
    section = EmbodiedActorConfig(training_backend=backend, model=ModelConfig(model_type=model_type, dtype=dtype))
    section.lora.rank = rank
    return OmegaConf.structured(section)


def test_the_default_is_auto() -> None:
    assert ModelConfig().dtype == "auto"


@pytest.mark.parametrize("model_type", ["vla", "pi0", "openvla"])
@pytest.mark.parametrize(
    ("backend", "rank", "expected"),
    [("local", 0, "float32"), ("local", 8, "bfloat16"), ("fsdp", 0, "bfloat16"), ("deepspeed", 0, "bfloat16")],
)
def test_auto(monkeypatch: pytest.MonkeyPatch, model_type: str, backend: str, rank: int, expected: str) -> None:
    section = actor(model_type, backend, rank)
    assert policy_dtype(section, True) == expected and policy_dtype(section, False) == "float32"
    assert policy_section(section).dtype == "auto", "which builds float32"
    monkeypatch.setattr(devices, "computes_bfloat16", lambda kind: kind == "cuda")
    monkeypatch.setattr(training, "computes_bfloat16", lambda kind: kind == "cuda")
    assert policy_section(section, torch.device("cuda")).dtype == ("auto" if expected == "float32" else expected)
    computes = torch.bfloat16 if expected == "bfloat16" and backend != "local" else torch.float32
    assert training._dtype(section, torch.device("cuda")) == computes
    assert training._dtype(section, torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_named_is_taken(dtype: str) -> None:
    section = actor("vla", "fsdp", 0, dtype)
    assert policy_dtype(section, True) == policy_dtype(section, False) == dtype


def test_other_policies_stay_in_float32() -> None:
    assert policy_dtype(actor("mlp", "fsdp", 0), True) == "float32"
    assert policy_dtype(actor("lerobot", "local", 0), True) == "float32"
