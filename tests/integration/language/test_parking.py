"""Backends that give their memory away for real, as they do on an accelerator: the training is the same, and checkpoints and
weights can be asked for meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from lm_ranks import Trainer, groups_of, make_config

from tests.accelerators import loose

#: Bytes a parameter that are kept: weights and two averages in float32. Gradients and copies are not.
KEPT = 12


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Any]]:
    """Groups of real worker processes, one of each size."""
    yield from groups_of(Trainer, "parking")


BACKENDS = {
    "local": {"training_backend": "local"},
    "local bf16": {"training_backend": "local", "model__dtype": "bfloat16"},
    "fsdp": {"training_backend": "fsdp"},
    "fsdp bf16": {"training_backend": "fsdp", "model__dtype": "bfloat16"},
}


@pytest.mark.parametrize("kind", BACKENDS)
def test_memory_can_be_given_away_between_steps(kind: str, ranks: Callable[[int], Any], model: Path) -> None:
    cfg = make_config(model, **BACKENDS[kind])
    whole = ranks(2).train(cfg, steps=range(3)).wait()[0]
    for losses, given, held in ranks(2).train_parked(cfg).wait():
        assert losses == pytest.approx(whole["losses"], rel=loose(0), abs=loose(0))
        assert given > 4 * whole["trained"] and held == 0


@pytest.mark.parametrize("kind", BACKENDS)
def test_what_was_given_away_is_saved_loaded_and_sent(
    kind: str, ranks: Callable[[int], Any], model: Path, tmp_path: Path
) -> None:
    cfg = make_config(model, **BACKENDS[kind])
    for found in ranks(2).save_and_load_parked(cfg, str(tmp_path)).wait():
        assert found and all(found.values()), found


@pytest.mark.parametrize("kind", ["local", "local bf16"])
def test_only_what_cannot_be_made_again_is_moved(kind: str, ranks: Callable[[int], Any], model: Path) -> None:
    trained, moved = ranks(1).moved(make_config(model, **BACKENDS[kind])).wait()[0]
    assert KEPT * trained <= moved < (KEPT + 1) * trained
