"""Hidden states of trainer and engine, layer by layer."""

from __future__ import annotations

import json
import math
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.cli import main
from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.base import RolloutBackend
from rlhpc.language.evaluation.layer_mismatch import (
    LayerDifference,
    format_table,
    join_passes,
    measure_layer_mismatch,
)
from rlhpc.language.models.tiny import make_tiny_model
from rlhpc.runtime.errors import ConfigError

LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, hidden=32, layers=LAYERS)
    problems = [json.dumps({"prompt": f"{a}+{a + 3}=" * a, "answer": "?"}) for a in range(1, 5)]
    (folder / "problems.jsonl").write_text("\n".join(problems))
    return folder


def settings(model: Path, **changes: Any) -> dict[str, Any]:
    suite = {"source": "jsonl", "path": str(model / "problems.jsonl"), "chat_template": False, "temperature": 1.0}
    return {
        "runner": {"name": "test", "task_type": "reasoning", "seed": 3, **changes},
        "actor": {"model": {"model_path": str(model), "dtype": "float32"}},
        "rollout": {"rollout_backend": "hf", "max_new_tokens": 6},
        "data": {"eval": [suite], "train": suite | {"temperature": None}}
        if changes.get("task_type")
        else {"eval": [suite]},
        "reward": {"terms": [{"name": "exact"}]},
    }


def measure(model: Path, output: Path | None = None, **changes: Any) -> dict[str, Any]:
    cfg = OmegaConf.merge(default_section(GrpoConfig), settings(model, **changes))
    return measure_layer_mismatch(cfg, model, "default", num_problems=3, output=output)  # type: ignore[arg-type]


def test_equal_models_differ_by_rounding_in_all_layers(model: Path, tmp_path: Path) -> None:
    result = measure(model, tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (
        len(result["layers"]) == LAYERS and result["tokens"] == sum((5, 9, 13)) + 3 * 5
    )  # with the token that begins a text
    for layer in result["layers"]:
        assert max(layer["prompt"], layer["answer"], layer["largest"]) < 1e-5 and 0 < layer["unequal"] <= 1
    assert result["logprob"] < 1e-5 and result["dtype"] == "float32"
    assert "no layer's difference is more than rounding explains" in format_table(result)


def test_a_deterministic_run_has_equal_bits_in_all_layers(model: Path) -> None:
    assert {layer["unequal"] for layer in measure(model, deterministic=True)["layers"]} == {0.0}


def hook_engine(monkeypatch: pytest.MonkeyPatch, hook: Any) -> None:
    """Adds a forward hook to the second layer of each engine that is made."""
    from rlhpc.language.evaluation import layer_mismatch

    make_rollout = layer_mismatch.make_rollout

    def make_false(*args: Any, **kwargs: Any) -> Any:
        engine: Any = make_rollout(*args, **kwargs)
        engine._model.model.layers[1].register_forward_hook(hook)
        return engine

    monkeypatch.setattr(layer_mismatch, "make_rollout", make_false)


def test_the_first_false_layer_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook_engine(monkeypatch, lambda layer, inputs, output: output * 1.25)
    result = measure(model)
    differences = [layer["answer"] for layer in result["layers"]]
    assert differences[0] < 1e-5 and differences[1] == pytest.approx(0.25, rel=1e-3)
    assert result["layers"][1]["prompt"] == pytest.approx(0.25, rel=1e-3) and result["logprob"] > 1e-3
    assert re.search(r"jumps in layer 1: from \S+ to 0\.25 \(", format_table(result))


def test_a_fault_of_decoding_alone_is_told_from_one_of_the_prefill(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook_engine(monkeypatch, lambda layer, inputs, output: output + 0.5 if output.shape[1] == 1 else output)
    layer = measure(model)["layers"][1]
    assert layer["prompt"] < 1e-5 < 1e-2 < layer["answer"] and layer["largest"] > layer["answer"] / 2


@pytest.mark.parametrize(
    ("dtype", "differences", "text"),
    [
        ("float32", [(0.1, 0.3), (0.2, 0.3)], "jumps in layer 0: from 1.2e-07 to 0.3 (answer)"),
        ("float32", [(3e-7, 2e-7), (8e-7, 9e-7), (1e-3, 1e-6)], "jumps in layer 2: from 9e-07 to 0.001 (prompt)"),
        ("bfloat16", [(0.004, 0.005), (0.02, 0.03)], "no layer's difference is more than rounding explains"),
    ],
)
def test_a_jump_is_told_from_rounding(dtype: str, differences: list[tuple[float, float]], text: str) -> None:
    layers = [{"prompt": p, "answer": a, "largest": max(p, a), "unequal": 1.0} for p, a in differences]
    assert text in format_table({"layers": layers, "dtype": dtype, "logprob": 0.1, "tokens": 9, "backend": "hf"})


def test_an_engine_without_layers_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhpc.language.engines.hf import HFRollout

    monkeypatch.setattr(HFRollout, "observed_layers", RolloutBackend.observed_layers)
    with pytest.raises(ConfigError, match="HFRollout does not give the hidden states of its layers"):
        measure(model)


def test_an_engine_with_other_layers_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhpc.language.engines.hf import HFRollout

    observe = HFRollout.observed_layers

    @contextmanager
    def observe_first(self: Any, on_output: Any) -> Any:
        with observe(self, lambda index, states: index or on_output(index, states)):
            yield

    monkeypatch.setattr(HFRollout, "observed_layers", observe_first)
    with pytest.raises(ConfigError, match="1 decoder layers that can be observed, and the trainer 3 of 3"):
        measure(model)


def test_passes_are_joined_without_padding() -> None:
    states = torch.arange(8.0)[:, None].expand(8, 2)
    chunks = [states[:3], torch.cat([states[3:5], torch.full((2, 2), -1.0)])]
    decoded = [torch.cat([states[row : row + 1], torch.full((7, 2), -1.0)]) for row in range(5, 8)]
    assert torch.equal(join_passes([*chunks, *decoded], 5, 8), states)
    assert torch.equal(join_passes([*chunks, *decoded], 5, 7), states[:7])


def test_differences_are_those_of_their_definition() -> None:
    trainer, engine = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    engine[2] = trainer[2]
    difference = LayerDifference()
    difference.add(trainer[:4], engine[:4], 3)
    difference.add(trainer[4:], engine[4:], 1)
    delta, prompt = trainer - engine, [0, 1, 2, 4]
    answer = [3, 5]
    assert difference.summary() == pytest.approx(
        {
            "prompt": math.sqrt(delta[prompt].square().mean() / trainer[prompt].square().mean()),
            "answer": math.sqrt(delta[answer].square().mean() / trainer[answer].square().mean()),
            "largest": max(float(d.norm() / t.norm()) for d, t in zip(delta, trainer, strict=True)),
            "unequal": 5 / 6,
        }
    )


def test_the_command_prints_a_row_a_layer(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    OmegaConf.save(OmegaConf.create(settings(model)), config)
    assert main(["eval", "--model", str(model), "--config", str(config), "--layers", "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layer", "prompt", "answer", "largest", "unequal"]
    assert [line.split()[0] for line in lines[1 : 1 + LAYERS]] == ["0", "1", "2"]
    assert "hf, float32" in lines[-1]
