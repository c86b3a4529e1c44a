"""One rank of DeepSpeed: the same steps as the local backend at each stage of ZeRO, checkpoints, offload, new weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("deepspeed")
SCRIPT = Path(__file__).with_name("deepspeed_steps.py")
STAGES = ("1", "2", "3")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deepspeed")
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_close(weights: dict[str, list[float]], expected: dict[str, list[float]], tolerance: float = 1e-6) -> None:
    assert weights.keys() == expected.keys()
    for name, values in expected.items():
        assert weights[name] == pytest.approx(values, abs=tolerance), name


@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_those_of_the_local_backend(results: dict[str, Any], stage: str) -> None:
    facts, local = results[stage], results["local"]
    assert facts["trained"] == local["trained"]
    assert facts["norms"][:2] == pytest.approx(local["norms"], rel=1e-5)
    for name in ("first", "second"):
        assert_close(facts[name], local[name])
    assert facts["first"] != facts["second"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_goes_on_with_the_same_bits(results: dict[str, Any], stage: str) -> None:
    assert results[stage]["resumed"] == results[stage]["second"]
    assert results[stage]["norms"][1] == results[stage]["norms"][2]


@pytest.mark.parametrize("stage", STAGES)
def test_tensors_that_were_away_come_back(results: dict[str, Any], stage: str) -> None:
    facts = results[stage]
    assert facts["is_away"]
    assert facts["returned"] == facts["second"]
    assert facts["local"] == facts["second"]  # one rank has everything, without padding


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_changed_for_a_while_and_replaced(results: dict[str, Any], stage: str) -> None:
    facts = results[stage]
    assert facts["perturbed"] != facts["second"]
    assert facts["restored"] == facts["second"]
    assert facts["replaced"] == facts["first"]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_refused(results: dict[str, Any], stage: str) -> None:
    facts = results[stage]
    assert facts["twice"] == "forward_backward was called twice before optimizer_step"
    assert "cannot be read" in facts["broken"]


def test_a_checkpoint_of_another_stage_is_refused_by_name(results: dict[str, Any]) -> None:
    assert "was saved with actor.deepspeed.zero_stage=1" in results["3"]["other"]
    assert "resume with that stage" in results["3"]["other"]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Steps in float16, of which the second overflows."""
    command = [sys.executable, str(SCRIPT.with_name("deepspeed_half.py")), str(tmp_path_factory.mktemp("half"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=SCRIPT.parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_float16_is_refused_where_deepspeed_has_none(half: dict[str, Any]) -> None:
    if not half["supported"]:
        assert "actor.model.dtype=float16: DeepSpeed does not train in float16 on this cpu" in half["refusal"]
        assert "\n" not in half["refusal"] and "training_backend fsdp or local" in half["refusal"]
    assert "actor.grad_scaler.init_scale is 48" in half["scale"] and "such as 64" in half["scale"]


@pytest.mark.parametrize("stage", STAGES)
def test_float16_by_deepspeed_s_scaler_is_the_local_backend_s(half: dict[str, Any], stage: str) -> None:
    """The same norms after unscaling, the same skipped step, and a scale that is saved."""
    steps, local = half[stage]["steps"], half["local"]
    for facts, expected in zip(steps, local, strict=True):
        assert (facts["scale"], facts["overflowed"]) == (expected["scale"], expected["overflowed"])
        assert (facts["norm"] is None) == (expected["norm"] is None)
        for weight, expected_weight in zip(facts["weights"], expected["weights"], strict=True):
            assert weight == pytest.approx(expected_weight, abs=2e-3)  # DeepSpeed starts from rounded weights
    assert steps[0]["norm"] == pytest.approx(local[0]["norm"], rel=1e-2)
    assert [facts["scale"] for facts in steps] == [64.0, 32.0, 32.0, 32.0]
    assert steps[1]["weights"] == steps[0]["weights"] != steps[2]["weights"]
    assert half[stage]["resumed"] == steps[2:]
    assert half[stage]["smallest"]["scale"] == 1.0 and not half[stage]["smallest"]["overflowed"]
    assert half[stage]["smallest"]["norm"] is None
