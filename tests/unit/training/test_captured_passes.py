"""Recorded and replayed passes, on a stand-in for a device's graphs that replays the same operations on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rlhpc.embodied.algorithms.ppo import PolicyUpdate
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.captured_passes import CapturedPasses, Outputs
from tests.replicas import replicated
from tests.unit.embodied.algorithms.ppo_updates import BATCH, OPTIM, TOTAL, Tiny
from tests.unit.embodied.algorithms.test_ppo import algorithm, rollout


class Recording(TorchDispatchMode):
    """Notes each operation with its very tensors. As on a device, what Python computes beside them is not recorded, and
    a value cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, recorded in self.operations:
                outputs = func(*args, **kwargs)
                for old, new in zip(tree_flatten(recorded)[0], tree_flatten(outputs)[0], strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def record(compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
    compute()
    recording = Recording()
    with recording:
        outputs = compute()
    return recording.replay, outputs


@pytest.mark.parametrize(
    ("micro", "changes"),
    [
        (None, {}),
        (BATCH // 2, {}),
        (5, {}),  # the last one of a minibatch is shorter: another graph
        (None, {"normalize_advantages": "none", "value_clip": None, "clip_ratio_c": 3.0}),
        (None, {"target_kl": 0.02}),
        (None, {"loss_type": "gspo", "value_coef": 0.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True])
def test_an_update_of_replays_is_the_update(micro: int | None, changes: dict[str, Any], masked: bool) -> None:
    """Weights and metrics after three epochs, bit for bit; and one recording for each size of a micro-batch."""
    torch.manual_seed(1)
    start = Tiny().state_dict()
    results = []
    recordings = 0

    def counted(compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        nonlocal recordings
        recordings += 1
        return record(compute)

    for captures in (False, True):
        module = Tiny()
        module.load_state_dict(start)
        backend = replicated(module, OPTIM)
        if captures:
            backend._captured = CapturedPasses(backend._changed_by_passes, counted)
        update = PolicyUpdate(algorithm(**changes), backend, batch_size=BATCH, micro_batch=micro, seed=7)
        metrics = [update.run(rollout(masked), range(TOTAL), TOTAL, step, 1e-2) for step in range(2)]
        results.append((metrics, {name: tensor.clone() for name, tensor in module.state_dict().items()}))
    assert results[1][0] == results[0][0]
    assert all(torch.equal(results[1][1][name], tensor) for name, tensor in results[0][1].items())
    assert recordings == (2 if micro == 5 else 1)


class Rows(NamedTuple):
    x: torch.Tensor
    more: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    rows: Rows
    scale: float


def inputs_of(value: float, rows: int = 2, scale: float = 2.0) -> Inputs:
    return Inputs(Rows(torch.full((rows,), value), {"y": torch.ones(rows)}), scale)


def test_a_recording_serves_one_layout_and_its_results_are_the_callers() -> None:
    state, names = torch.zeros(()), list[str]()
    passes = CapturedPasses(lambda: [state], record)

    def compute(inputs: Inputs) -> Outputs:
        names.append("recorded")
        state.add_(1)
        return {"sum": (inputs.rows.x + inputs.rows.more["y"]).sum() * inputs.scale}

    first = passes.run("a", inputs_of(1.0), compute)
    second = passes.run("a", inputs_of(3.0), compute)
    assert first["sum"] == 8 and second["sum"] == 16, "results are not overwritten by the next replay"
    assert state == 2, "what was done to record is undone"
    assert len(names) == 2, "a warm-up, and the recording"
    for changed in (inputs_of(1.0, rows=3), inputs_of(1.0, scale=5.0)):
        passes.run("a", changed, compute)
    passes.run("b", inputs_of(1.0), compute)
    assert len(names) == 8, "another size, another constant, another function"
    passes.clear()
    assert passes.run("a", inputs_of(1.0), compute)["sum"] == 8 and len(names) == 10


def test_a_pass_that_reads_a_value_is_refused() -> None:
    class Reads(Tiny):
        def default_forward(self, inputs: Any, **options: Any) -> Any:
            if float(inputs["obs"].sum()) > 1e9:
                raise AssertionError
            return super().default_forward(inputs, **options)

    backend = replicated(Reads(), OPTIM)
    backend._captured = CapturedPasses(backend._changed_by_passes, record)
    update = PolicyUpdate(algorithm(), backend, batch_size=BATCH, micro_batch=None, seed=7)
    with pytest.raises(
        ConfigError, match=r"actor\.capture_graphs: a pass of this policy cannot be captured \(operation not"
    ):
        update.run(rollout(False), range(TOTAL), TOTAL, 1, 1e-2)


def test_statistics_in_the_network_count_each_pass_once() -> None:
    torch.manual_seed(0)
    start = nn.BatchNorm1d(3).state_dict()
    means = []
    for captures in (False, True):
        module = nn.Sequential(nn.BatchNorm1d(3))
        module[0].load_state_dict(start)
        backend = replicated(module, OPTIM)
        if captures:
            backend._captured = CapturedPasses(backend._changed_by_passes, record)

        def loss(called: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value = called(x).square().sum()
            return value, {"loss": value}

        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            backend.forward_backward([torch.randn(8, 3, generator=generator)], loss)
        means.append((module[0].running_mean.clone(), int(module[0].num_batches_tracked)))
    assert torch.equal(means[0][0], means[1][0]) and means[0][1] == means[1][1] == 3
