"""The lane for tensors on an accelerator, between processes, with a device whose memory shows what was not waited for."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.runtime.comm import device_memory as devices
from rlhpc.runtime.comm.device_memory import DeviceMappings, DeviceMessage, DevicePool, NotReadable
from rlhpc.runtime.comm.shared_memory import FREE, USED, WRITTEN, SegmentGone, discard
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.host import has_ended, pid_namespace
from rlhpc.runtime.scratch import Scratch
from tests import warm
from tests.eventually import wait_until
from tests.stand_in_device import StandIn

ENDPOINT = {"host": "here", "ipc": "ipc://nowhere", "tcp": "", "bulk": ""}
ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def device(scratch: Scratch) -> Iterator[StandIn]:
    made = StandIn(scratch.shm)
    devices.use(made)
    yield made
    devices.use(None)


@pytest.fixture
def pool(scratch: Scratch, device: StandIn) -> DevicePool:
    return DevicePool(scratch, ENDPOINT)


class Other:
    """A process that reads."""

    def __init__(self, scratch: Scratch, *flags: str, address: str = "stand-in") -> None:
        command = [sys.executable, "-m", "tests.lane_reader", str(scratch.shm), address, *flags]
        self.process = warm.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def begin(self, name: str, *given: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump((name, given), self.process.stdin)
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        sound, value = pickle.load(self.process.stdout)
        if not sound:
            raise RuntimeError(value)
        return value

    def do(self, name: str, *given: Any) -> Any:
        self.begin(name, *given)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def other(scratch: Scratch) -> Iterator[Callable[..., Other]]:
    made: list[Other] = []

    def start(*flags: str, address: str = "stand-in") -> Other:
        made.append(Other(scratch, *flags, address=address))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


def state(pool: DevicePool, crossing: DeviceMessage, reader: int = 0) -> bytes:
    return pool._buffers[crossing.path].lease[reader : reader + 1]


def sent(pool: DevicePool, device: StandIn, *values: torch.Tensor, readers: int = 1) -> DeviceMessage:
    crossing = pool.write([device.tensor(value) for value in values], readers)
    assert crossing is not None
    return crossing


def numbers(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.float32)


def test_forms_and_values_arrive(pool, device, other):
    """Whatever shares a buffer: several dtypes, no element, one element, and sizes that follow one another."""
    reader = other()
    for count in (3, 5000, 17, 5001):
        values = [
            numbers(count).reshape(1, count), torch.arange(count, dtype=torch.uint8), torch.zeros(0, 4, dtype=torch.int64),
            torch.tensor(True), numbers(count).to(torch.bfloat16),
        ]  # fmt: skip
        arrived = reader.do("take", sent(pool, device, *values), 0)
        for one, value in zip(arrived, values, strict=True):
            assert one.dtype == value.dtype and torch.equal(one, value)


def test_nothing_is_read_before_it_is_written(pool, device, other):
    """The device lags behind: the reader has come, and waits for the event rather than reading what was there before."""
    reader = other()
    reader.do("take", sent(pool, device, torch.full((1000,), -1.0)), 0)
    reader.do("settle")
    device.lags = True
    crossing = sent(pool, device, numbers(1000))
    reader.begin("take", crossing, 0)
    wait_until(lambda: state(pool, crossing) == USED, 30)
    assert (pool._buffers[crossing.path].memory[:4000].view(torch.float32) == -1).all(), (
        "the device has done nothing yet"
    )
    device.run()
    assert torch.equal(reader.answer()[0], numbers(1000))


def test_a_buffer_is_lent_until_it_has_been_copied(pool, device, other):
    """The reader's device lags behind: what it was sent first must not be written over."""
    reader = other("lags")
    first = sent(pool, device, numbers(1000))
    reader.do("take", first, 0)
    reader.do("settle")
    assert state(pool, first) == USED
    second = sent(pool, device, numbers(1000, 7))
    assert second.path != first.path
    reader.do("run")
    assert torch.equal(reader.do("held")[0], numbers(1000))
    reader.do("settle")
    assert state(pool, first) == FREE
    assert sent(pool, device, numbers(1000)).path == first.path, "and is used again then"


def test_more_messages_than_buffers(scratch, device, other):
    device.budget = 3 << 12
    pool, reader = DevicePool(scratch, ENDPOINT), other()
    under_way = [sent(pool, device, numbers(1000, i)) for i in range(3)]
    assert pool.write([device.tensor(numbers(1000))]) is None, "the host's road is left"
    assert pool.bytes <= device.budget
    for i, crossing in enumerate(under_way):
        assert torch.equal(reader.do("take", crossing, 0)[0], numbers(1000, i))
    reader.do("settle")
    assert {sent(pool, device, numbers(1000)).path for _ in range(3)} == {one.path for one in under_way}


def test_room_is_made_for_another_size(scratch, device, other):
    device.budget = 40_000
    pool, reader = DevicePool(scratch, ENDPOINT), other()
    for count in (1000, 8000, 500):
        assert torch.equal(reader.do("take", sent(pool, device, numbers(count)), 0)[0], numbers(count))
        reader.do("settle")
        assert pool.bytes <= device.budget
    assert pool.write([device.tensor(numbers(20_000))]) is None, "more than there may ever be"


def test_a_message_to_two_readers(pool, device, other):
    readers = other(), other("lags")
    crossing = sent(pool, device, numbers(1000), readers=2)
    assert torch.equal(readers[0].do("take", crossing, 0)[0], numbers(1000))
    readers[0].do("settle")
    assert sent(pool, device, numbers(1000)).path != crossing.path, "the second has not come"
    readers[1].do("take", crossing, 1)
    assert (state(pool, crossing), state(pool, crossing, 1)) == (FREE, USED)
    readers[1].do("run")
    readers[1].do("settle")
    assert torch.equal(readers[1].do("held")[0], numbers(1000))
    assert sent(pool, device, numbers(1000)).path == crossing.path


def test_what_a_killed_reader_had_in_use_is_free(pool, device, other):
    reader, killed = other(), other("lags")
    crossing = sent(pool, device, numbers(1000))
    killed.do("take", crossing, 0)
    assert sent(pool, device, numbers(1000)).path != crossing.path
    killed.process.kill()
    wait_until(lambda: has_ended(f"{killed.process.pid}.{pid_namespace()}"), 30)  # though nobody has waited for it
    again = sent(pool, device, numbers(1000, 3))
    assert again.path == crossing.path
    assert torch.equal(reader.do("take", again, 0)[0], numbers(1000, 3))


def test_what_a_killed_sender_left_is_gone(scratch, device, other):
    """Its event will never be recorded again: nobody may wait for it."""
    program = (
        "import pickle, sys, torch; from pathlib import Path; from tests.stand_in_device import StandIn\n"
        "from rlhpc.runtime.comm import device_memory as devices; from rlhpc.runtime.comm.device_memory import DevicePool\n"
        "class Place: shm = Path(sys.argv[1])\n"
        "device = StandIn(Place.shm); devices.use(device)\n"
        f"pool = DevicePool(Place, {ENDPOINT!r})\n"
        "for _ in range(2): pickle.dump(pool.write([device.tensor(torch.ones(1000))]), sys.stdout.buffer)\n"
        "sys.stdout.buffer.flush(); sys.stdin.read()"
    )
    sender = warm.Popen(
        [sys.executable, "-c", program, str(scratch.shm)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with sender:
        assert sender.stdout is not None
        first, second = pickle.load(sender.stdout), pickle.load(sender.stdout)
        mappings = DeviceMappings()
        assert mappings.take(first, 0)[0].sum() == 1000
        sender.kill()
        wait_until(lambda: has_ended(f"{sender.pid}.{pid_namespace()}"), 30)
        for crossing in (second, first):
            with pytest.raises(SegmentGone):
                mappings.take(crossing, 0)


@pytest.mark.parametrize("address", ["another", ""], ids=["another accelerator", "none"])
def test_a_reader_elsewhere_gets_a_copy_on_the_host(pool, device, scratch, address):
    crossing = sent(pool, device, numbers(1000))
    devices.use(StandIn(scratch.shm, address) if address else None)
    with pytest.raises(NotReadable, match=r"^$"):
        DeviceMappings().take(crossing, 0)
    assert torch.equal(pool.to_host(crossing.path, 0, "")[:4000].view(torch.float32), numbers(1000))
    assert state(pool, crossing) == FREE
    with pytest.raises(ChannelError, match="forgotten"):
        pool.to_host(crossing.path, 0, "")
    devices.use(device)
    assert pool.reaches("here", "stand-in"), "nothing is wrong with the lane"
    assert (
        not pool.reaches("here", "another") and not pool.reaches("there", "stand-in") and not pool.reaches("here", "")
    )


def test_a_peer_reads_it_where_it_lies(pool, device, scratch):
    crossing = sent(pool, device, numbers(1000))
    peer = StandIn(scratch.shm, "another", peers=("stand-in",))
    devices.use(peer)
    (arrived,) = DeviceMappings().take(crossing, 0)
    assert torch.equal(arrived, numbers(1000)) and peer.holds(arrived)


def test_a_lane_that_cannot_be_opened_is_given_up(pool, device, caplog):
    crossing = sent(pool, device, numbers(1000))
    device.opens = False
    with pytest.raises(NotReadable, match="not permitted") as refused:
        DeviceMappings().take(crossing, 0)
    assert state(pool, crossing) == WRITTEN
    assert torch.equal(pool.to_host(crossing.path, 0, str(refused.value))[:4000].view(torch.float32), numbers(1000))
    assert not pool.reaches("here", "stand-in")
    assert "not permitted" in caplog.text


def test_a_device_that_shares_nothing(scratch, caplog):
    device = StandIn(scratch.shm, exports=False)
    devices.use(device)
    try:
        pool = DevicePool(scratch, ENDPOINT)
        assert pool.write([device.tensor(numbers(1000))]) is None and not pool.reaches("here", "stand-in")
        assert "shares nothing" in caplog.text
    finally:
        devices.use(None)


def test_memory_is_given_back(pool, device, other):
    reader = other()
    first, second = (sent(pool, device, numbers(1000, i)) for i in range(2))
    reader.do("take", first, 0)
    reader.do("park")
    assert pool.park() == pool.bytes > 0, "the second message is still to be read"
    assert not Path(first.path).exists()
    assert torch.equal(reader.do("take", second, 0)[0], numbers(1000, 1))
    reader.do("settle")
    assert pool.park() == pool.bytes == 0
    assert torch.equal(reader.do("take", sent(pool, device, numbers(5)), 0)[0], numbers(5)), "and taken anew"


def test_what_was_forgotten_is_not_read_and_frees_nothing(pool, device, other):
    """A message from before a recovery must not touch what is sent after it."""
    reader, old = other(), sent(pool, device, numbers(1000))
    pool.forget()
    new = sent(pool, device, numbers(1000, 1))
    discard(old.path, 0)
    assert state(pool, new) == WRITTEN
    with pytest.raises(RuntimeError, match="SegmentGone"):
        reader.do("take", old, 0)
    with pytest.raises(ChannelError):
        pool.to_host(old.path, 0, "")
    assert torch.equal(reader.do("take", new, 0)[0], numbers(1000, 1))


def test_a_claim_that_was_given_up_is_not_read(pool, device):
    crossing = sent(pool, device, numbers(1000))
    discard(crossing.path, 0)
    with pytest.raises(SegmentGone):
        DeviceMappings().take(crossing, 0)


def test_a_process_reads_its_own_buffers_without_opening_them(pool, device):
    device.opens = False
    crossing = sent(pool, device, numbers(1000))
    assert torch.equal(DeviceMappings(pool.local).take(crossing, 0)[0], numbers(1000))
