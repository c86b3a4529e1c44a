"""Recorded and replayed passes, on a stand-in for a device's graphs that replays the same operations on the same memory."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rlhpc.embodied.algorithms import ppo
from rlhpc.embodied.algorithms.ppo import PolicyUpdate
from rlhpc.embodied.data.batches import TrainBatch
from rlhpc.embodied.models import build_model
from rlhpc.runtime.errors import ConfigError
from rlhpc.training import captured_passes
from rlhpc.training.captured_passes import CapturedPasses, Outputs, record_cuda_graph
from tests.replicas import replicated
from tests.unit.embodied.algorithms.ppo_updates import BATCH, OPTIM, TOTAL, Tiny
from tests.unit.embodied.algorithms.test_ppo import algorithm, rollout
from tests.unit.embodied.models.sections import section, seeded


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
            backend._captured_passes = CapturedPasses(backend._changed_by_passes, counted)
        update = PolicyUpdate(algorithm(**changes), backend, batch_size=BATCH, micro_batch=micro, seed=7)
        metrics = [update.run(rollout(masked), range(TOTAL), TOTAL, step, 1e-2) for step in range(2)]
        results.append((metrics, {name: tensor.clone() for name, tensor in module.state_dict().items()}))
    assert results[1][0] == results[0][0]
    assert all(torch.equal(results[1][1][name], tensor) for name, tensor in results[0][1].items())
    assert recordings == (2 if micro == 5 else 1)


@pytest.mark.parametrize(
    ("model_type", "kwargs"),
    [
        ("cnn", {}),
        ("resnet10", {"freeze": True}),
        ("flow", {"num_steps": 2}),
        ("flow", {"num_steps": 2, "network": "transformer", "width": 8, "heads": 2, "noise_method": "flow_noise"}),
    ],
    ids=str,
)
def test_an_update_of_a_policy_that_sees(model_type: str, kwargs: dict[str, Any]) -> None:
    space = spaces.Dict(
        {"rgb": spaces.Box(0, 255, (12, 12, 3), np.uint8), "state": spaces.Box(-1, 1, (2,), np.float32)}
    )
    draw = seeded(3)
    batch = TrainBatch(
        obs={
            "rgb": torch.randint(0, 256, (TOTAL, 12, 12, 3), generator=draw, dtype=torch.uint8),
            "state": torch.rand(TOTAL, 2, generator=draw),
        },
        actions=torch.rand(TOTAL, 1, 2, generator=draw),
        inputs={"inputs.chain": torch.randn(TOTAL, 3, 1, 2, generator=draw)} if model_type == "flow" else {},
        logprobs=-torch.rand(TOTAL, generator=draw),
        values=torch.rand(TOTAL, generator=draw),
        advantages=torch.randn(TOTAL, generator=draw),
        returns=torch.rand(TOTAL, generator=draw),
        mask=torch.ones(TOTAL),
    )
    results = []
    for captures in (False, True):
        cfg = section(model_type=model_type, kwargs=kwargs, hidden_sizes=[8])
        policy = build_model(cfg, space, spaces.Box(-1, 1, (2,), np.float32), seed=1)
        start = policy.state_dict()["critic.bias" if model_type != "flow" else "critic.0.bias"].clone()
        backend = replicated(policy, OPTIM)
        if captures:
            backend._captured_passes = CapturedPasses(backend._changed_by_passes, record)
        update = PolicyUpdate(algorithm(), backend, batch_size=BATCH, micro_batch=None, seed=7)
        metrics = update.run(batch, range(TOTAL), TOTAL, 0, 1e-2)
        results.append((metrics, {name: tensor.clone() for name, tensor in policy.state_dict().items()}))
    assert results[1][0] == results[0][0]
    assert all(torch.equal(results[1][1][name], tensor) for name, tensor in results[0][1].items())
    assert not torch.equal(results[1][1]["critic.bias" if model_type != "flow" else "critic.0.bias"], start)


@pytest.mark.parametrize("micro", [None, 7])
def test_ranks_record_few_sizes(micro: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a rank's rows differs between minibatches, because the transitions of all ranks are shuffled together:
    rows without weight fill passes up, and gradients are those of passes that are not filled up."""
    monkeypatch.setattr(ppo, "_NUM_RECORDED_SIZES", 2)
    torch.manual_seed(1)
    start = Tiny().state_dict()
    results, sizes = [], set[int]()

    def counted(compute: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        recordings.append(compute)
        return record(compute)

    recordings = list[object]()
    for captures in (False, True):
        module = Tiny()
        module.load_state_dict(start)
        # The other rank has no rows: its sums, of counts and of gradients, add nothing.
        backend = replicated(module, OPTIM)
        if captures:
            backend._captured_passes = CapturedPasses(backend._changed_by_passes, counted)
        update = PolicyUpdate(algorithm(), backend, batch_size=BATCH, micro_batch=micro, seed=7, num_ranks=2)
        local = range(TOTAL // 3)
        batch = rollout(True).map(lambda tensor: tensor[: TOTAL // 3])
        accumulate = update._accumulate

        def noting(batch: TrainBatch, shard: Any, accumulate: Any = accumulate) -> Any:
            sizes.add(len(shard.indices))
            return accumulate(batch, shard)

        monkeypatch.setattr(update, "_accumulate", noting)
        metrics = [update.run(batch, local, TOTAL, step, 1e-2) for step in range(3)]
        results.append((metrics, {name: tensor.clone() for name, tensor in module.state_dict().items()}))
    assert len(sizes) > 4 and len(recordings) <= 3, (sizes, len(recordings))
    for eager, replayed in zip(results[0][0], results[1][0], strict=True):
        assert replayed == pytest.approx(eager, rel=1e-10)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=1e-10, atol=1e-12)


def test_passes_of_too_many_sizes_run_without_a_recording(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captured_passes, "_MAX_RECORDINGS", 2)
    passes, recordings = CapturedPasses(list, record), list[int]()

    def compute(inputs: Inputs) -> Outputs:
        recordings.append(len(inputs.rows.x))
        return {"sum": inputs.rows.x.sum()}

    for _ in range(2):
        for rows in (2, 3, 4, 5):
            assert passes.run("a", inputs_of(1.0, rows=rows), compute)["sum"] == rows
    assert recordings == [2, 2, 3, 3, 4, 5, 4, 5], "a warm-up and a recording of two sizes; the others run each time"
    assert [line.getMessage() for line in caplog.records] == [
        "actor.capture_graphs: passes have more than 2 sizes; the others are not recorded"
    ]


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
    backend._captured_passes = CapturedPasses(backend._changed_by_passes, record)
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
            backend._captured_passes = CapturedPasses(backend._changed_by_passes, record)

        def loss(called: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value = called(x).square().sum()
            return value, {"loss": value}

        generator = torch.Generator().manual_seed(5)
        for _ in range(3):
            backend.forward_backward([torch.randn(8, 3, generator=generator)], loss)
        means.append((module[0].running_mean.clone(), int(module[0].num_batches_tracked)))
    assert torch.equal(means[0][0], means[1][0]) and means[0][1] == means[1][1] == 3


def test_a_capture_does_not_forbid_other_threads_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's default, a query of an event by any thread of the process invalidates the graph."""
    assert {"capture_error_mode", "pool"} <= inspect.signature(torch.cuda.graph.__init__).parameters.keys()
    modes: list[tuple[str, object]] = []

    @contextlib.contextmanager
    def graph(graph: Any, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
        modes.append((capture_error_mode, pool))
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, answer in {
        "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda chosen: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay="replay"), "graph": graph, "graph_pool_handle": object,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, answer)
    captured_passes._graph_memory.cache_clear()
    try:
        for _ in range(2):
            replay, outputs = record_cuda_graph(lambda: {"loss": torch.ones(1)})
            assert replay == "replay" and outputs["loss"] == 1
        ((mode, pool), second) = modes
        assert mode == "thread_local" and pool is not None
        assert second == (mode, pool), "graphs use the same memory one after the other"
    finally:
        captured_passes._graph_memory.cache_clear()
