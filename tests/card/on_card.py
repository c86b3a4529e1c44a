"""What `tests/unit/test_card.py` runs where the accelerator of `tests.card` is."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhpc.config.sections import DeepspeedConfig, OptimConfig, ParallelConfig
from rlhpc.runtime.comm.payload import dumps, loads
from rlhpc.runtime.comm.shared_memory import SegmentPool
from rlhpc.runtime.devices import SideCopies, accelerator, host_memory, move_module, torch_device
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.scratch import Scratch
from rlhpc.training.backend import Blueprint
from rlhpc.training.data_parallel import ReplicatedBackend
from rlhpc.weights.sender import Publisher
from tests.extras import need_extra
from tests.unit.weights.test_receiver import Receiver, send

CARD = "card"


def test_it_is_the_accelerator() -> None:
    assert accelerator() == CARD and torch_device([0]) == CARD and torch_device([]) == "cpu"


def test_what_touches_its_memory_is_ended() -> None:
    held = torch.ones(4, device=CARD)
    if not (child := os.fork()):
        ctypes.string_at(held.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert held.sum().item() == 4


class Small(Blueprint):
    """Two layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def build(self, *, empty: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 4))

    def named_weights(self, module: nn.Module, full: Any, without: Any = ()) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, full(tensor).detach()) for name, tensor in module.state_dict().items())

    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        return frozenset()


def trainer(kind: Callable[..., Any], dtype: torch.dtype, accelerators: tuple[int, ...]) -> Any:
    """A backend of one rank."""
    optim = OptimConfig(lr=1e-2, name="adamw", weight_decay=0.1)
    ranks = SimpleNamespace(
        rank=0, world_size=1, accelerators=accelerators, all_reduce=lambda tensor, op="sum": tensor, barrier=lambda: None,
        all_gather_object=lambda one: [one], init_process_group=lambda: None,
    )  # fmt: skip
    actor = SimpleNamespace(
        optim=optim, training_backend=kind.__name__, parallel=ParallelConfig(), deepspeed=DeepspeedConfig()
    )
    return kind(Small(dtype), actor, ranks)


def step(backend: Any, seed: int) -> float:
    """One update; its loss."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(seed)).to(backend.device, backend.dtype)
    (found,) = backend.forward_backward([x], lambda model, x: ((y := model(x).float().pow(2).mean()), {"loss": y}))
    backend.optimizer_step(1e-2)
    return float(found["loss"])


def weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in backend.named_weights()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_leaves_it_saves_and_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Checkpoints and weights are asked for while it is away; and all is as on the CPU."""
    before = torch.accelerator.memory_allocated()
    card, cpu = trainer(ReplicatedBackend, dtype, (0,)), trainer(ReplicatedBackend, dtype, ())
    assert card.device.type == CARD and cpu.device.type == "cpu"
    for seed in range(2):
        assert step(card, seed) == pytest.approx(step(cpu, seed), rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
    held = torch.accelerator.memory_allocated() - before
    card.offload()
    assert card.is_offloaded and torch.accelerator.memory_allocated() - before < held / 4
    card.save(tmp_path)
    sent = weights(card)
    assert card.is_offloaded
    card.reload()
    losses = [step(card, 2), step(card, 3)]
    card.offload()
    card.load(tmp_path)
    assert card.is_offloaded and all(torch.equal(tensor, sent[name]) for name, tensor in weights(card).items())
    card.reload()
    assert [step(card, 2), step(card, 3)] == losses
    again = trainer(ReplicatedBackend, dtype, ())  # and it goes on where there is no accelerator
    again.load(tmp_path)
    assert step(again, 2) == pytest.approx(losses[0], rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_weights_and_messages_come_from_it() -> None:
    source = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).to(CARD)
    scratch = Scratch.create()
    pool = SegmentPool(scratch)
    try:
        receiver = Receiver(0, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)))
        there = Receiver(1, nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)).to(CARD))
        publisher = Publisher(pool, 2, "off")
        for version in range(3):
            with torch.no_grad():
                source[0].weight += 1
            send(publisher, version, source, [receiver, there])
            for each in (receiver, there):
                assert each.apply() == version
                for name, tensor in source.state_dict().items():
                    assert torch.equal(each.module.state_dict()[name].cpu(), tensor.cpu())
    finally:
        pool.close()
        scratch.remove()
        scratch.release()
    data, buffers = dumps({"obs": source[0].weight.detach()})
    arrived = loads(data, [bytes(buffer) for buffer in buffers])["obs"]
    assert arrived.device.type == CARD and torch.equal(arrived.cpu(), source[0].weight.cpu())


def test_copies_beside() -> None:
    source = torch.arange(1000.0, device=CARD)
    target = host_memory(4000, CARD).view(torch.float32)
    SideCopies(CARD).begin([(target, source)])()
    assert torch.equal(target, torch.arange(1000.0))


def test_what_has_two_names_stays_one() -> None:
    module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    module[1].weight = module[0].weight
    there = move_module(module, torch.device(CARD))
    assert there[0].weight is there[1].weight and there[0].weight.device.type == CARD


def test_deepspeed_computes_where_the_rank_does() -> None:
    need_extra("deepspeed")
    from rlhpc.training.deepspeed import DeepSpeedBackend

    with pytest.raises(
        ConfigError, match=r"DeepSpeed would compute on 'cpu' .* computes on 'card'.*training_backend fsdp"
    ):
        trainer(DeepSpeedBackend, torch.float32, (0,))
