"""Training in float16 with a scaled loss, on real ranks: against float32, with overflows, and resumed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from lm_ranks import Trainer, alone, groups_of, make_config, train

from rlhpc.runtime.errors import CheckpointError

HALF = {"model.dtype": "float16", "grad_scaler.init_scale": 1024.0}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Any]]:
    yield from groups_of(Trainer, "half-trainers")


@pytest.fixture(scope="module")
def run(ranks: Callable[[int], Any]) -> Callable[..., dict[str, Any]]:
    """Trains on n ranks (one: in this process) and gives rank 0's report; the others' must agree with it."""

    def on(n: int, cfg: Any, **options: Any) -> dict[str, Any]:
        if n == 1:
            return train(alone(), cfg, **options)
        first, *others = ranks(n).train(cfg, **options).wait()
        for other in others:
            assert (other["losses"], other["norms"], other["scales"]) == tuple(
                first[name] for name in ("losses", "norms", "scales")
            )
        return first

    return on


def update_error(report: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]) -> float:
    """Distance of two updates, relative to the update."""
    moved = apart = 0.0
    for name, weight in report["weights"].items():
        moved += float((expected["weights"][name].float() - start["weights"][name].float()).square().sum())
        apart += float((weight.float() - expected["weights"][name].float()).square().sum())
    return math.sqrt(apart / moved)


@pytest.mark.parametrize(
    ("backend", "n", "changes"),
    [
        ("local", 1, {}),
        ("local", 2, {}),
        ("local", 2, {"lora.rank": 2}),
        ("fsdp", 2, {}),
        ("fsdp", 2, {"lora.rank": 2}),
        ("fsdp", 2, {"fsdp.enable_gradient_accumulation": True}),
        ("fsdp", 2, {"fsdp.cpu_offload": True}),
    ],
)
def test_float16_follows_float32(run, model, backend: str, n: int, changes: dict[str, Any]) -> None:
    """In several micro-batches a step, with memory that is given away between them, clipped: float16 is an eighth of
    bfloat16's rounding."""
    exact = make_config(model, **{"model.dtype": "float32", "training_backend": backend, **changes})
    half = make_config(model, **{**HALF, "training_backend": backend, **changes})
    report, expected = run(n, half, offload=True), run(n, exact)
    start = run(1, make_config(model, **{"model.dtype": "float32", **changes}), steps=range(0))
    assert {weight.dtype for weight in report["weights"].values()} == {torch.float16}
    assert report["scales"] == [1024.0] * 5 and expected["scales"] == [None] * 5
    assert report["losses"] == pytest.approx(expected["losses"], abs=0.003)
    assert report["norms"] == pytest.approx(expected["norms"], rel=0.003)
    assert report["losses"] != expected["losses"]
    assert update_error(report, expected, start) < 0.05


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_an_overflow_on_one_rank_is_a_skipped_step_on_all(ranks, model, backend: str) -> None:
    """The scale is halved on each rank, no weight and no average moves, and the next step is that of a run without it."""
    cfg = make_config(model, **{**HALF, "training_backend": backend})
    reports = ranks(2).overflow(cfg).wait()
    for report in reports:
        norms, scales, overflowed, is_finite, weights, num_passes = zip(*report["reports"], strict=True)
        assert [math.isfinite(norm) for norm in norms] == [True, False, True]
        assert scales == (1024.0, 512.0, 512.0) and overflowed == (False, True, False) and all(is_finite)
        assert all(torch.equal(weight, weights[0][name]) for name, weight in weights[1].items())
        assert not all(torch.equal(weight, weights[0][name]) for name, weight in weights[2].items())
        assert min(num_passes) > 1 and torch.float32 in report["held"]
    expected = ranks(2).train(cfg, steps=range(2)).wait()[0]
    norm, _, _, _, weights, _ = reports[0]["reports"][2]
    # Scales are powers of two, so that only numbers below float16's smallest differ.
    assert norm == pytest.approx(expected["norms"][1], rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected["weights"][name], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_a_run_resumes_with_its_scale_bit_for_bit(run, model, tmp_path: Path, backend: str) -> None:
    """The scale doubles after three steps, which only the saved counter says after a resume in between."""
    half = {**HALF, "grad_scaler.growth_interval": 3, "training_backend": backend}
    cfg = make_config(model, **half)
    whole = run(2, cfg, save=tmp_path / "end")
    assert whole["scales"] == [1024.0, 1024.0, 1024.0, 2048.0, 2048.0]
    run(2, cfg, steps=range(2), save=tmp_path / "middle")
    rest = run(2, cfg, steps=range(2, 4), load=tmp_path / "middle", save=tmp_path / "again")
    assert rest["scales"][1:] == whole["scales"][3:]
    assert rest["losses"] == whole["losses"][2:] and rest["norms"] == whole["norms"][2:]
    assert all(torch.equal(weight, whole["weights"][name]) for name, weight in rest["weights"].items())
    assert (tmp_path / "again/backend.json").read_text() == (tmp_path / "end/backend.json").read_text()
    # Of one rank, and of float32, which has no scale.
    alone_again = run(1, cfg, steps=range(2, 4), load=tmp_path / "middle")
    assert alone_again["scales"][1:] == whole["scales"][3:]
    exact = make_config(model, **{"model.dtype": "float32", "training_backend": backend})
    assert run(1, exact, steps=range(2, 3), load=tmp_path / "middle")["scales"] == [None, None]
    damaged = tmp_path / "middle/backend.json"
    damaged.write_text(damaged.read_text().replace('"scale": 1024.0', '"scale": NaN'))
    with pytest.raises(CheckpointError, match="loss scale"):
        run(1, cfg, steps=range(2, 3), load=tmp_path / "middle")
