"""Verification of weights: digests that notice other weights and no sound update, and the processor time that they take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from rlhpc.runtime.comm.shared_memory import SegmentPool
from rlhpc.runtime.scratch import Scratch
from rlhpc.weights import receiver as target
from rlhpc.weights import sender as publish
from rlhpc.weights import verification as proof
from rlhpc.weights.base import NamedUpdates, Update, VersionDigests
from rlhpc.weights.delta import Elements, copy_update
from rlhpc.weights.sender import Publisher
from rlhpc.weights.verification import COST, Cost, UpdateVerification, WeightsDiffer, digest, digests

from .test_receiver import Receiver, scratch  # noqa: F401 (a fixture)


def test_what_is_within_counts_once() -> None:
    cost, ticks = Cost(), itertools.count(10)

    def clock() -> float:
        return float(next(ticks))

    for _ in range(2):
        with cost.measure(clock), cost.measure(clock):
            pass
    with pytest.raises(ValueError, match="broke"), cost.measure(clock):
        raise ValueError("broke")
    found = cost.pop()
    assert found["proof_s"] == 3.0 and found["cpu_s"] >= 0.0
    assert cost.pop()["proof_s"] == 0.0


def test_digests_count_at_both_ends(monkeypatch: pytest.MonkeyPatch, pool: SegmentPool) -> None:
    def slow(tensor: torch.Tensor, version: int) -> int:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return version

    def all_slow(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
        return {name: slow(tensor, version) for name, tensor in tensors}

    for module in (publish, proof):
        monkeypatch.setattr(module, "digests", all_slow)
    monkeypatch.setattr(proof, "digest", slow)
    named = {f"t{i}": torch.randn(8) for i in range(4)}
    COST.pop()
    (announcement,) = Publisher(pool, 1).publish(1, named.items())
    assert announcement.version_digests == VersionDigests(1, dict.fromkeys(named, 1)) and COST.pop()["proof_s"] >= 0.04
    taken = UpdateVerification(Update(1, True, iter(named.items()), lambda: announcement.version_digests))
    assert len(list(taken.tensors())) == 4 and COST.pop()["proof_s"] >= 0.04
    taken.check(named.get)
    assert COST.pop()["proof_s"] >= 0.04


#: An optimizer's smallest steps: in half precision few elements of a weight move at all.
RATE = 1e-6


class Trainer:
    """Weights in single precision that move by so much, sent in the dtype of the engine."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = {"embed": (64, 64), "q": (64, 64), "k": (64, 64), "norm": (256,), "frozen": (64, 64)}
        self.dtype, self.generator = dtype, generator
        self.masters = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}

    def step(self, rate: float = RATE) -> None:
        for name, master in self.masters.items():
            if name != "frozen":
                master += rate * torch.randn(master.shape, generator=self.generator).sign()

    def named(self) -> dict[str, torch.Tensor]:
        return {name: master.to(self.dtype, copy=True) for name, master in self.masters.items()}


class Acting(torch.nn.Module):
    """What receives them."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in like.items():
            self.register_buffer(name, torch.zeros_like(tensor))


def published(publisher: Publisher, version: int, named: dict[str, torch.Tensor], receivers: list[Receiver]) -> None:
    for announcement in publisher.publish(version, named.items(), frozenset({"frozen"})):
        for receiver in receivers:
            receiver.inbox.append(announcement)


@pytest.fixture
def pool(scratch: Scratch) -> Iterator[SegmentPool]:  # noqa: F811
    made = SegmentPool(scratch)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", ["off", "frozen", "elements"])
def test_sound_updates_never_raise(pool: SegmentPool, delta: str, dtype: torch.dtype) -> None:
    """170 versions each of six ways, by copies, by adoption, and as an engine takes them that wants all of each."""
    trainer = Trainer(dtype)
    kinds: list[dict[str, Any]] = [{}, {"adopt": True}, {"whole": True}]
    receivers = [Receiver(number, Acting(trainer.named()), **kind) for number, kind in enumerate(kinds)]
    publisher = Publisher(pool, len(receivers), delta)
    for version in range(170):
        trainer.step(RATE * 10 ** (version % 4))
        published(publisher, version, trainer.named(), receivers)
        for receiver in receivers[:2]:
            assert receiver.apply() == version
        proof = UpdateVerification(receivers[2].take())
        taken = {name: tensor.clone() for name, tensor in proof.complete_tensors()}
        proof.check()
        assert all(torch.equal(taken[name], one) for name, one in trainer.named().items())


def dropped(given: NamedUpdates, before: dict[str, torch.Tensor]) -> NamedUpdates:
    yield from ((name, what) for name, what in given if name != "q")


def swapped(given: NamedUpdates, before: dict[str, torch.Tensor]) -> NamedUpdates:
    other = {"q": "k", "k": "q"}
    yield from ((other.get(name, name), what) for name, what in given)


def stale(given: NamedUpdates, before: dict[str, torch.Tensor]) -> NamedUpdates:
    yield from ((name, before[name] if name == "q" else what) for name, what in given)


def half(given: NamedUpdates, before: dict[str, torch.Tensor]) -> NamedUpdates:
    for name, what in given:
        if name == "q" and isinstance(what, torch.Tensor):
            what = torch.cat([what[:32], before[name][32:]])
        yield name, what


def twice(given: NamedUpdates, before: dict[str, torch.Tensor]) -> NamedUpdates:
    for name, what in given:
        yield name, what
        if name == "q":
            yield name, what


Fault = Callable[[NamedUpdates, dict[str, torch.Tensor]], NamedUpdates]


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [dropped, swapped, stale, half, twice])
def test_a_fault_is_noticed_at_the_first_update(
    pool: SegmentPool, fault: Fault, dtype: torch.dtype, rate: float
) -> None:
    trainer = Trainer(dtype)
    receiver = Receiver(0, Acting(trainer.named()), whole=True)
    publisher = Publisher(pool, 1, "off")
    published(publisher, 0, trainer.named(), [receiver])
    assert receiver.apply() == 0
    before = trainer.named()
    trainer.step(rate)
    published(publisher, 1, trainer.named(), [receiver])
    update = receiver.take()
    broken = Update(update.version, update.complete, fault(update.tensors, before), update.version_digests)
    proof = UpdateVerification(broken, "actor-0")
    for _ in proof.tensors():
        pass
    with pytest.raises(
        WeightsDiffer, match=r"weights of version 1: (q|q, k|embed, q).* actor-0.*nobody acts with them"
    ):
        proof.check()


@pytest.mark.parametrize("delta", ["off", "frozen", "elements"])
def test_what_a_receiver_does_not_take_in_is_noticed(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch, delta: str
) -> None:
    """All came, and one was not put where it belongs; with `elements`, one that an earlier version left wrong, too."""
    trainer = Trainer(torch.float32)
    receiver = Receiver(0, Acting(trainer.named()))
    publisher = Publisher(pool, 1, delta)
    published(publisher, 0, trainer.named(), [receiver])
    receiver.apply()

    def forgetful(to: torch.Tensor, what: torch.Tensor | Elements) -> None:
        if to.data_ptr() != receiver.module.get_buffer("k").data_ptr():
            copy_update(to, what)

    monkeypatch.setattr(target, "copy_update", forgetful)
    trainer.step()
    published(publisher, 1, trainer.named(), [receiver])
    with pytest.raises(WeightsDiffer, match="weights of version 1: k are others than those that"):
        receiver.apply()


def test_many_have_the_digests_that_each_has() -> None:
    """Whatever their size, dtype and layout; and of small ones every byte counts."""
    sizes = (0, 1, 257, 1 << 14, 1 << 15, 1 << 18)
    many = {
        f"{size} {dtype}": torch.arange(size).to(dtype) for size in sizes for dtype in (torch.bfloat16, torch.float64)
    }
    many |= {"turned": torch.randn(64, 32).t(), "every other": torch.randn(1 << 17)[::2], "scalar": torch.tensor(3)}
    assert digests(many.items(), 5) == {name: digest(tensor.clone(), 5) for name, tensor in many.items()}
    assert digests([("turned", many["turned"])], 5) == {"turned": digest(many["turned"].contiguous(), 5)}
    other = many["257 torch.bfloat16"].clone()
    other[256] += 2
    assert digest(other, 5) != digests(many.items(), 5)["257 torch.bfloat16"]


def test_a_large_tensor_is_looked_at_in_samples_that_together_are_all_of_it() -> None:
    large = torch.randn(3 << 20, generator=torch.Generator().manual_seed(1))
    for place in (0, 12345, 1 << 20, len(large) - 1):
        other = large.clone()
        other[place] += 1e-6
        noticed = [version for version in range(64) if digest(large, version) != digest(other, version)]
        assert len(noticed) in (1, 64)  # the last bytes are in every sample
    moved = large + RATE * torch.randn(large.shape).sign()
    assert all(digest(large, version) != digest(moved, version) for version in range(64))
    half_moved = torch.cat([large[: len(large) // 2], moved[len(large) // 2 :]])
    assert digest(half_moved, 7) != digest(moved, 7) and digest(large.view(-1, 1), 3) == digest(large, 3)
