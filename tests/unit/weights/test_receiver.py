"""Weight updates: all or nothing, copied or adopted, complete or what changed; the pool and its segments are real."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlhpc.runtime.comm import device_memory as devices
from rlhpc.runtime.comm.device_memory import DeviceMappings, DevicePool
from rlhpc.runtime.comm.shared_memory import Mappings, SegmentPool, bytes_in_use, discard, map_private
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.scratch import Scratch
from rlhpc.weights.base import Update, frozen_names
from rlhpc.weights.delta import Elements
from rlhpc.weights.receiver import Subscriber, UpdateTarget
from rlhpc.weights.sender import Announcement, DeviceChunkWriter, Publisher, WeightChunk
from tests.late_copies import LateCopies
from tests.serving import temporary_scratch
from tests.stand_in_device import StandIn


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    with temporary_scratch() as made:
        yield made


class Receiver:
    """One receiver with its inbox, as a process has it."""

    def __init__(self, number: int, module: torch.nn.Module, *, adopt: bool = False, whole: bool = False) -> None:
        self.number, self.module, self.adopt = number, module.requires_grad_(False), adopt
        self.subscriber, self.mappings = Subscriber(whole), Mappings()
        self.inbox: deque[Announcement] = deque()
        self.read_bytes = 0

    def read(self, part: WeightChunk, late: bool) -> Any:
        del late
        self.read_bytes += part.nbytes
        if not part.retained:
            return self.mappings.lease(part.path, self.number)
        memory = map_private(part.path)
        discard(part.path, self.number)
        return memory

    def take(self) -> Update:
        return self.subscriber.receive(self.inbox.popleft, self.read)

    def apply(self) -> int:
        adopt = self.module if self.adopt else None
        update = self.take()
        UpdateTarget(self.module.state_dict().items(), adopt).apply(update)
        return update.version


def send(
    publisher: Publisher,
    version: int,
    module: torch.nn.Module,
    receivers: list[Receiver],
    without: frozenset[str] = frozenset(),
) -> None:
    named = [(name, tensor) for name, tensor in module.state_dict().items() if name not in without]
    for announcement in publisher.publish(version, named, frozen_names(module)):
        for receiver in receivers:
            receiver.inbox.append(announcement)


def network(seed: int, width: int = 4) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2).bfloat16()
    )


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[name].contiguous().view(-1).view(torch.uint8), theirs[name].contiguous().view(-1).view(torch.uint8))
        for name in theirs
    )  # fmt: skip


def perturb(module: torch.nn.Module, seed: int, part: float) -> None:
    """Some elements of what is trained, and all of the running statistics, change."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                chosen = torch.rand(parameter.shape, generator=generator) < part
                parameter.copy_(torch.where(chosen, parameter + 1, parameter))
        for buffer in module.buffers():
            buffer.add_(1)


DELTAS = ("off", "frozen", "elements")


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("adopt", [False, True])
def test_a_detached_list_of_a_modules_tensors_updates_the_module(scratch: Scratch, adopt: bool, delta: str) -> None:
    sender, x = network(1), torch.randn(5, 3)
    one, two = (Receiver(i, network(2 + i), adopt=adopt) for i in range(2))
    publisher = Publisher(SegmentPool(scratch), 2, delta)
    send(publisher, 7, sender, [one, two])
    assert one.apply() == two.apply() == 7
    assert same(one.module, sender) and same(two.module, sender)
    one.module.eval(), sender.eval()
    assert torch.equal(one.module[1](one.module[0](x)), sender[1](sender[0](x)))


def test_receivers_of_a_host_share_what_they_adopt(scratch: Scratch) -> None:
    sender = network(1, width=100_000)
    receivers = [Receiver(i, network(2, width=100_000), adopt=True) for i in range(2)]
    pool = SegmentPool(scratch)
    publisher = Publisher(pool, 2)
    send(publisher, 1, sender, receivers)
    for receiver in receivers:
        receiver.apply()
    with torch.no_grad():
        receivers[0].module[0].weight[0, 0] = 42.0  # nobody may do this; here it shows whose memory it is
    assert receivers[1].module[0].weight[0, 0] == 42.0


def test_tied_weights_stay_tied(scratch: Scratch) -> None:
    modules = []
    for seed in range(2):
        torch.manual_seed(seed)
        module = torch.nn.Module()
        module.a = torch.nn.Parameter(torch.randn(3))
        module.b = module.a
        modules.append(module)
    sender, receiver = modules[0], Receiver(0, modules[1], adopt=True)
    publisher = Publisher(SegmentPool(scratch), 1, "elements")
    for version in range(3):
        with torch.no_grad():
            sender.a[version] += 1
        send(publisher, version, sender, [receiver])
        receiver.apply()
        assert receiver.module.a is receiver.module.b and torch.equal(receiver.module.a, sender.a)


@pytest.mark.parametrize("adopt", [False, True])
def test_weights_of_another_model_change_nothing(scratch: Scratch, adopt: bool) -> None:
    receiver, other = Receiver(0, network(2), adopt=adopt), network(1)
    before = {name: tensor.clone() for name, tensor in receiver.module.state_dict().items()}
    publisher = Publisher(SegmentPool(scratch), 1)
    send(publisher, 3, other, [receiver], without=frozenset({"2.bias"}))
    with pytest.raises(RlhpcError, match=r"weights of version 3 do not fit the receiver: it has .*2\.bias.*got None"):
        receiver.apply()
    assert all(torch.equal(tensor, before[name]) for name, tensor in receiver.module.state_dict().items())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("chunk_bytes", [200, 1 << 20])
@pytest.mark.parametrize("carried", [False, True])
def test_many_versions_equal_complete_ones_bit_for_bit(
    scratch: Scratch, delta: str, whole: bool, chunk_bytes: int, carried: bool
) -> None:
    """Written at once, or beside what is gathered next. Small and large changes, none, NaN and −0; with a receiver that is
    started anew, one that comes late, and one that lags behind."""
    sender = network(1, width=50)
    sender[0].requires_grad_(False)
    pool = SegmentPool(scratch)
    publisher = Publisher(pool, 3, delta, chunk_bytes, DeviceChunkWriter(pool, LateCopies()) if carried else None)
    receivers = [Receiver(i, network(2 + i, width=50), adopt=i == 1 and not whole, whole=whole) for i in range(2)]
    lagging = Receiver(2, network(9, width=50), whole=whole)
    for version in range(60):
        perturb(sender, version, part=(0.01, 0.0, 0.9)[version % 3])
        with torch.no_grad():
            sender[2].weight[0, version % 50] = (float("nan"), -0.0, 0.0)[version % 3]
        if version == 20:
            receivers[0] = Receiver(0, network(7, width=50), whole=whole)  # a new process
        if version == 33:
            receivers[1].subscriber.forget()
        send(publisher, version, sender, [*receivers, lagging])
        for receiver in receivers:
            if whole:
                update = receiver.take()
                assert update.complete
                tensors = dict(update.tensors)
                assert tensors.keys() == sender.state_dict().keys()
                assert not any(isinstance(tensor, Elements) for tensor in tensors.values())
                receiver.module.load_state_dict(tensors)
            else:
                assert receiver.apply() == version
            assert same(receiver.module, sender)
        if version % 4 == 3:  # it takes in several at once
            while lagging.inbox:
                if whole:
                    lagging.module.load_state_dict(dict(lagging.take().tensors))
                else:
                    lagging.apply()
            assert same(lagging.module, sender)
    # What the log holds stays within a few copies of the weights (segments are whole pages).
    files = len(list(scratch.shm.iterdir()))
    assert files < (150 if chunk_bytes == 200 else 80)


def test_frozen_weights_travel_once(scratch: Scratch) -> None:
    sender = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 1, bias=False))
    sender[0].requires_grad_(False)
    frozen, trained = 4 * (100 * 100 + 100), 4 * 100
    publisher = Publisher(SegmentPool(scratch), 1)

    def fresh() -> Receiver:
        return Receiver(0, torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 1, bias=False)))

    receiver = fresh()
    read = []
    for version in range(6):
        if version == 3:
            receiver = fresh()  # the rollout rank was started anew; the sender was not told
        perturb(sender, version, 1.0)
        before = receiver.read_bytes
        # Once they were sent, a sender need not even gather them.
        send(publisher, version, sender, [receiver], frozenset({"0.weight", "0.bias"}) if version else frozenset())
        receiver.apply()
        read.append(receiver.read_bytes - before)
        assert same(receiver.module, sender)
    assert read == [frozen + trained, trained, trained, frozen + trained, trained, trained]


@pytest.mark.parametrize("delta", DELTAS)
def test_what_changes_without_being_trained_arrives(scratch: Scratch, delta: str) -> None:
    sender = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    sender[1].requires_grad_(False)  # a moving average of the first
    receivers = [Receiver(i, torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))) for i in range(2)]
    publisher = Publisher(SegmentPool(scratch), 2, delta)
    for version in range(6):
        perturb(sender, version, 1.0)
        if version != 1:
            for average, parameter in zip(sender[1].parameters(), sender[0].parameters(), strict=True):
                average.lerp_(parameter.detach(), 0.1)
        if version == 4:
            receivers[0].subscriber.forget()
        send(publisher, version, sender, receivers)
        for receiver in receivers:
            receiver.apply()
            assert same(receiver.module, sender)


def test_few_changed_elements_are_few_bytes(scratch: Scratch) -> None:
    sender = torch.nn.Linear(1000, 1000, bias=False)
    receiver = Receiver(0, torch.nn.Linear(1000, 1000, bias=False))
    publisher = Publisher(SegmentPool(scratch), 1, "elements")
    send(publisher, 0, sender, [receiver])
    receiver.apply()
    perturb(sender, 1, 0.01)
    before = receiver.read_bytes
    send(publisher, 1, sender, [receiver])
    receiver.apply()
    assert same(receiver.module, sender)
    assert receiver.read_bytes - before == pytest.approx(0.01 * 1e6 * 8, rel=0.1)
    send(publisher, 2, sender, [receiver])
    before = receiver.read_bytes
    assert receiver.apply() == 2 and receiver.read_bytes == before


def test_the_log_does_not_grow_without_end(scratch: Scratch) -> None:
    sender = torch.nn.Linear(500, 1000, bias=False)  # 2 MB
    receivers = [Receiver(i, torch.nn.Linear(500, 1000, bias=False)) for i in range(2)]
    pool = SegmentPool(scratch)
    publisher = Publisher(pool, 2, "elements")
    for version in range(100):
        perturb(sender, version, 0.04)
        send(publisher, version, sender, receivers)
        for receiver in receivers:
            receiver.apply()
        assert sum(path.stat().st_size for path in scratch.shm.iterdir()) < 4 * 2.3e6 + 40 * 4096
    late = Receiver(0, torch.nn.Linear(500, 1000, bias=False))
    send(publisher, 100, sender, [late, receivers[1]])
    assert late.apply() == 100 and same(late.module, sender)
    publisher.forget()
    pool.close()
    assert bytes_in_use(scratch.shm) == 0


def test_what_is_left_of_a_version_that_broke_off_is_skipped(scratch: Scratch) -> None:
    sender, receiver = network(1, width=50), Receiver(0, network(2, width=50))
    pool = SegmentPool(scratch)
    publisher = Publisher(pool, 1, chunk_bytes=200)
    send(publisher, 0, sender, [receiver])
    update = receiver.take()
    next(update.tensors)  # the engine failed after the first tensor
    send(publisher, 1, sender, [receiver])
    assert receiver.apply() == 1 and same(receiver.module, sender)


class OnDevice:
    """Stages chunks in buffers on a stand-in for an accelerator (`TransportSender`), unless they are kept from it."""

    def __init__(self, scratch: Scratch, budget: int) -> None:
        self.device = StandIn(scratch.shm, budget=budget)
        self.pool = DevicePool(scratch, {"host": "here", "ipc": "", "tcp": "", "bulk": ""})
        self.mappings = DeviceMappings(self.pool.local)
        self.device_budget, self.sizes = budget, list[int]()
        self.refused: set[int] = set()

    def stage(self, tensors: Any) -> Any:
        if len(self.sizes) in self.refused:
            self.refused.remove(len(self.sizes))
            return None
        message = self.pool.write(tensors)
        self.sizes.append(0 if message is None else message.size)
        return message


BUDGET = 1 << 20


@pytest.mark.parametrize("refused", [(), (1, 3)], ids=["all on the device", "two pieces through the host"])
def test_a_tensor_larger_than_the_budget_stays_on_the_device_in_pieces(
    scratch: Scratch, refused: tuple[int, ...]
) -> None:
    """Odd shapes and dtypes among small tensors, frozen ones and empty ones; every one has the sender's bits."""
    road = OnDevice(scratch, BUDGET)
    devices.use(road.device)
    try:
        values = {
            "small": torch.randn(3),
            "wide": torch.randn(BUDGET + 777).to(torch.bfloat16),
            "frozen": torch.randn(BUDGET // 4 + 5),
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(7),
            "bytes": torch.randint(0, 256, (3, BUDGET // 2 + 1), dtype=torch.uint8),
            "last": torch.randn(2, 2).double(),
        }
        sent = {name: road.device.tensor(value) if value.numel() else value for name, value in values.items()}
        pool, mappings = SegmentPool(scratch), Mappings()
        publisher = Publisher(pool, 1, "frozen", transport=road)  # type: ignore[arg-type]
        subscriber, inbox = Subscriber(), deque[Announcement]()

        def read(chunk: WeightChunk, late: bool) -> Any:
            del late
            if chunk.payload is not None:
                message: Any = chunk.payload[0]
                return road.mappings.take(message, 0)
            return map_private(chunk.path) if chunk.retained else mappings.lease(chunk.path, 0)

        for version in range(2):
            road.sizes.clear()
            road.refused = set(refused) if version else set()
            announcements = publisher.publish(version, sent.items(), {"frozen"})

            def next_announcement(announcements: Iterator[Announcement] = announcements) -> Announcement:
                inbox.append(next(announcements))
                return inbox.popleft()

            update = subscriber.receive(next_announcement, read)
            received = dict(update.tensors)
            assert received.keys() == {*values} - ({"frozen"} if version else set())
            for name, tensor in received.items():
                assert isinstance(tensor, torch.Tensor)
                assert tensor.shape == values[name].shape and tensor.dtype == values[name].dtype
                assert torch.equal(tensor, values[name]), name
            version_digests = update.version_digests()
            assert version_digests is not None and version_digests.digests.keys() >= received.keys()
            assert len(road.sizes) >= 14 and all(0 < size <= BUDGET // 4 for size in road.sizes), "none was too large"
    finally:
        devices.use(None)
