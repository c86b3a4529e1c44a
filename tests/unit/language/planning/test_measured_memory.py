"""Memory of a training step as PyTorch's own tracker finds it, against the account of the memory model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.planning.measured_memory import DEPTHS, MeasuredMemory, accounted_bytes, measure_memory
from rlhpc.language.planning.memory_model import STEP, Training
from rlhpc.language.planning.model_size import HUB_CONFIGS, size_of
from rlhpc.runtime.errors import ConfigError

NAME = "Qwen/Qwen2.5-7B"


@pytest.fixture(autouse=True)
def without_process_group() -> Iterator[None]:
    if dist.is_initialized():  # of an engine, in a test before
        dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def training(**changes: object) -> Training:
    asked = Training(size_of(NAME), "fsdp", MeshSizes(shard=8), 4096, 2, accelerated=True, checkpointing=True)
    return dataclasses.replace(asked, **changes)  # type: ignore[arg-type]


def test_pytorchs_tracker_finds_what_is_accounted_for() -> None:
    found = measure_memory(training(), NAME, {})
    assert tuple(found.peaks) == DEPTHS
    for layers, peak in found.peaks.items():
        assert found.accounted[layers] == pytest.approx(peak, rel=0.05)
    assert found.full_model_accounted_bytes == pytest.approx(found.full_model_bytes, rel=0.1)
    assert HUB_CONFIGS["qwen/qwen2.5-7b"]["num_hidden_layers"] == training().size.layers
    assert not dist.is_initialized(), "its process group is gone"


def test_a_process_with_a_process_group_is_refused() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with pytest.raises(ConfigError, match="--measure makes a process group of its own, and this process has one"):
        measure_memory(training(), NAME, {})
    assert dist.is_initialized()


def test_the_optimizer_and_the_context_are_not_part_of_what_is_measured() -> None:
    asked = training()
    moments = [moment for moment in asked.moments() if moment.name != STEP]
    assert 0 < accounted_bytes(asked) < max(moment.nbytes for moment in moments)


def test_the_line_has_both_numbers_and_their_difference() -> None:
    gib = 2.0**30
    found = MeasuredMemory({4: gib, 8: 2 * gib}, {4: gib, 8: 2 * gib}, 10 * gib, 11 * gib, 3.4)
    line = found.describe()
    assert "4 layers 1.0 GiB (accounted 1.0 GiB), 8 layers 2.0 GiB" in line
    assert "10.0 GiB, by the account 11.0 GiB (+10.0%); 3 s" in line
