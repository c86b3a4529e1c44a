"""What a rank computes on: an accelerator that was granted and cannot be used is an error, not the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc import Cluster, PackedPlacementStrategy, Worker
from rlhpc.runs.device import evaluation_device, set_tf32, set_up_process, worker_device
from rlhpc.runtime.comm.payload import dumps, loads, rebuild_tensor
from rlhpc.runtime.devices import torch_device
from rlhpc.runtime.errors import ConfigError

BEYOND = tuple(range(torch.cuda.device_count() + 1))
"""One accelerator more than there are."""


def test_a_grant_that_torch_cannot_use_is_an_error() -> None:
    with pytest.raises(ConfigError) as refused:
        torch_device(BEYOND, {})
    said = str(refused.value)
    assert torch.__version__ in said and "were granted" in said
    assert "RLHPC_TORCH=" in said and "cluster.accelerators_per_node=0" in said
    rank = SimpleNamespace(accelerators=BEYOND)
    with pytest.raises(ConfigError, match="were granted"):
        worker_device(rank)  # type: ignore[arg-type]


def test_a_tensor_of_an_accelerator_lands_on_the_receivers_own_or_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    data, buffers = dumps(torch.arange(6.0).reshape(2, 3))

    def received(sent_from: str) -> torch.Tensor:
        rebuild, args = loads(data, buffers), [bytes(buffers[0]), "float32", (2, 3), sent_from, False, False]
        assert rebuild.device.type == "cpu"  # one that lay on the CPU stays there
        return rebuild_tensor(*args)

    if not torch.cuda.is_available():
        there = received("cuda:3")
        assert there.device.type == "cpu" and there.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    # Its own, whatever the number was over there.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    assert received("meta:7").device == torch.device("meta")


@pytest.mark.parametrize("tf32", [True, False, None])
def test_float32_is_as_exact_as_configured(tf32: bool | None) -> None:
    """In ranks and in commands outside a run. Without a setting, torch's default or the user's choice stays."""
    before = not tf32 if tf32 is not None else torch.backends.cudnn.allow_tf32

    def precision() -> tuple[bool, bool, str]:
        matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return matmul, conv, torch.get_float32_matmul_precision()

    previous = precision()
    expected = previous if tf32 is None else (tf32, tf32, "high" if tf32 else "highest")
    cluster = SimpleNamespace(accelerators_per_node=0)
    runner: Any = SimpleNamespace(tf32=tf32, seed=3)
    try:
        for set_up in (
            lambda: set_up_process(runner, "actor", 0),
            lambda: evaluation_device(SimpleNamespace(runner=runner, cluster=cluster)),  # type: ignore[arg-type]
        ):
            if tf32 is not None:
                set_tf32(before)
            set_up()
            assert precision() == expected
    finally:
        torch.set_float32_matmul_precision(previous[2])
        torch.backends.cudnn.allow_tf32 = previous[1]


class Asked(Worker):
    """Says where it would compute."""

    def device(self) -> str:
        return str(worker_device(self))


def test_ranks_of_a_virtual_cluster_are_told() -> None:
    cluster = Cluster.local(num_nodes=1, accelerators_per_node=2)
    group = Asked.create_group().launch(cluster, placement_strategy=PackedPlacementStrategy(0, 1), name="asked")
    try:
        assert group.device().wait() == ["cuda" if torch.cuda.device_count() >= 1 else "cpu"] * 2
    finally:
        group.shutdown()
