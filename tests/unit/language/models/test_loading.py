"""`auto` as a precision, and no batch size: what suits the device, said in each place where it is asked for."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.common import EngineOptions, engine_dtype
from rlhpc.language.models import loading as models
from rlhpc.language.models.loading import compute_dtype, use_liger_kernels
from rlhpc.runs.config_changes import training_changes
from rlhpc.runtime import devices as devices
from rlhpc.runtime.errors import ConfigError
from tests.accelerators import ON_CPU
from tests.extras import need_extra


def configured(**changes: Any) -> Any:
    cfg = default_section(GrpoConfig)
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator that computes in bfloat16."""
    monkeypatch.setattr(models, "computes_bfloat16", lambda device: device == "cuda")


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


def liger_source(name: str) -> str:
    """The source of a module of liger-kernel, which cannot be imported here, for it needs Triton."""
    root = importlib.util.find_spec("liger_kernel")
    assert root is not None and root.submodule_search_locations
    return (Path(root.submodule_search_locations[0]) / name).read_text()


def test_what_is_assumed_of_liger() -> None:
    """Names and arguments in the installed version; and that each function can leave the loss alone."""
    need_extra("llm", "liger")
    tree = ast.parse(liger_source("transformers/monkey_patch.py"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    apply = functions["_apply_liger_kernel_to_instance"]
    assert [argument.arg for argument in apply.args.args] == ["model"] and apply.args.kwarg is not None
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_TYPE_TO_APPLY_LIGER_FN"
    )
    assert isinstance(table, ast.Dict)
    by_type = {
        ast.literal_eval(key): ast.unparse(value) for key, value in zip(table.keys, table.values, strict=True) if key
    }
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma3_text"} <= by_type.keys()
    for name in set(by_type.values()):
        arguments = {argument.arg for argument in functions[name].args.args}
        assert {"cross_entropy", "fused_linear_cross_entropy", "model"} <= arguments or "model" in arguments, name
    # What is imported of it.
    exported = liger_source("transformers/__init__.py")
    assert "_apply_liger_kernel_to_instance" in exported


def test_liger_is_told_to_leave_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []
    package, patches = ModuleType("liger_kernel.transformers"), ModuleType("liger_kernel.transformers.monkey_patch")
    package._apply_liger_kernel_to_instance = lambda model, **options: calls.append((model, options))  # type: ignore[attr-defined]
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    for module in (ModuleType("liger_kernel"), package, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    model = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    use_liger_kernels(model, "cuda", "actor.kernels")
    assert calls == [(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})]
    with pytest.raises(
        ConfigError, match=r"actor\.kernels=liger: .* no kernels for models of type mamba: set it to torch"
    ):
        use_liger_kernels(SimpleNamespace(config=SimpleNamespace(model_type="mamba")), "cuda", "actor.kernels")
    with pytest.raises(ConfigError, match=r"actor\.kernels=liger needs a GPU, and this rank computes on the CPU"):
        use_liger_kernels(model, "cpu", "actor.kernels")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ConfigError, match=r"actor\.kernels=liger needs the package liger-kernel .*rlhpc\[liger\]"):
        use_liger_kernels(model, "cuda", "actor.kernels")
