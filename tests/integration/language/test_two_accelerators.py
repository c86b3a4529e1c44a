"""Between two accelerators (`tests/accelerators.py`); on the CPU between two ranks, by gloo."""

from __future__ import annotations

import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from accelerator_ranks import Linked
from lm_ranks import make_config

from rlhpc import Session, Worker
from rlhpc.language.models.tiny import make_tiny_model
from tests.accelerators import ON_CPU, cluster_of, kind, placed

pytestmark = pytest.mark.gpu

#: Of the order of summation; accelerators sum in another one each time.
TOLERANCE = 1e-5 if ON_CPU else 2e-4


@pytest.fixture(scope="module")
def linked() -> Iterator[Callable[[int], Any]]:
    """Groups of one and of two ranks."""
    made: dict[int, Any] = {}

    def of(ranks: int) -> Any:
        if ranks not in made:
            group = Linked.create_group()
            made[ranks] = group.launch(cluster_of(2), placement_strategy=placed(ranks), name=f"linked{ranks}")
        return made[ranks]

    yield of
    for group in made.values():
        group.shutdown()
    if session := Session.running():
        session.stop()


def test_collectives_and_messages(linked: Callable[[int], Any]) -> None:
    """What one sent is on the other's own accelerator."""
    group = linked(2)
    Worker.create_channel("between")
    first, second = group.exchange("between").wait()
    plain = [float(i) for i in range(6)]
    total = (kind(), [10.0 + 2 * i for i in range(6)])
    back = (kind(), [1.0 + i for i in range(6)])
    assert first == {"own": kind(), "sum": total, "message": back, "channel": back}
    assert second == {"own": kind(), "sum": total, "message": (kind(), plain), "channel": (kind(), plain)}


@pytest.mark.parametrize("backend", ["local", "fsdp", "deepspeed"])
def test_shards_on_two_train_as_one(linked: Callable[[int], Any], tmp_path: Path, backend: str) -> None:
    """The same losses and weights, however many share the work."""
    need_extra("deepspeed")
    make_tiny_model(tmp_path, vocabulary=string.printable[:60], hidden=32, layers=2)
    cfg = make_config(tmp_path, training_backend=backend, deepspeed__zero_stage=3, model__dtype="float32")
    (alone,) = linked(1).train(cfg).wait()
    for found in linked(2).train(cfg).wait():
        assert found["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE, abs=TOLERANCE)
        assert found["norms"] == pytest.approx(alone["norms"], rel=10 * TOLERANCE)
        torch.testing.assert_close(found["after"], alone["after"], rtol=0, atol=20 * TOLERANCE)
        for name, tensor in found["weights"].items():
            torch.testing.assert_close(tensor, alone["weights"][name], rtol=0, atol=5 * TOLERANCE, msg=name)


def test_each_rank_sees_its_own_card(linked: Callable[[int], Any]) -> None:
    counts, which = zip(*linked(2).seen().wait(), strict=True)
    assert counts == (1, 1) and len(set(which)) == 2
