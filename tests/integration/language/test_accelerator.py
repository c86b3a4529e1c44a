"""On one accelerator: it is woken after the fork, given away and taken back (`tests/accelerators.py`)."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "deepspeed")

sys.path.insert(0, str(Path(__file__).parent))

from accelerator_ranks import Sharing, Without
from lm_ranks import make_config

from rlhpc import NodePlacementStrategy, Session
from rlhpc.language.models.tiny import make_tiny_model
from tests.accelerators import ON_CPU, STAND_IN, cluster_of, kind, placed

pytestmark = pytest.mark.gpu

#: On an accelerator, weights must outweigh what its libraries allocate for themselves.
HIDDEN = 32 if ON_CPU else 128 if STAND_IN else 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, vocabulary=string.printable[:60], hidden=HIDDEN, layers=2)
    return folder


@pytest.fixture
def sharing() -> Iterator[Any]:
    """A rank of its own for each backend: each wants torch's process group as its own."""
    group = Sharing.create_group().launch(cluster_of(1), placement_strategy=placed(1), name="sharing")
    yield group
    group.shutdown()
    session = Session.running()
    if session:
        session.stop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "backend",
    [
        {"training_backend": "local"}, {"training_backend": "fsdp"},
        {"training_backend": "fsdp", "fsdp__cpu_offload": True},
        *({"training_backend": "deepspeed", "deepspeed__zero_stage": stage} for stage in (1, 2, 3)),
    ],
    ids=["local", "fsdp", "fsdp on the host", "zero 1", "zero 2", "zero 3"],
)  # fmt: skip
def test_memory_is_given_back_and_a_checkpoint_goes_on_as_before(
    sharing: Any, model: Path, tmp_path: Path, backend: dict[str, Any], dtype: str
) -> None:
    cfg = make_config(model, model__dtype=dtype, **backend)
    (found,) = sharing.rest_and_resume(cfg, tmp_path).wait()
    assert found["device"] == kind()
    training, away, written = found["allocated"]
    if not ON_CPU and "fsdp__cpu_offload" not in backend:
        assert away < training / 4 and written < training / 4
    assert found["first"].keys() == found["again"].keys()
    for name, tensor in found["first"].items():
        torch.testing.assert_close(found["again"][name], tensor, rtol=1e-5, atol=1e-5)


def test_a_tensor_arrives_at_a_rank_without_an_accelerator(sharing: Any) -> None:
    without = Without.create_group().launch(
        cluster_of(1), placement_strategy=NodePlacementStrategy([0]), name="without"
    )
    try:
        taken = without.take("sharing")
        (sent,) = sharing.give("without").wait()
        assert taken.wait() == [("cpu", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])]
        assert (sent == "cpu") is ON_CPU
    finally:
        without.shutdown()
