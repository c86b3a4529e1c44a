"""What leaves an accelerator, and the memory of the host that it goes to: once per storage, kept from one time to the next."""

from __future__ import annotations

import torch

from rlhpc.training.backend import HostMemory, OffloadedTensors


def test_every_view_is_right_again_and_scratch_is_not_moved() -> None:
    flat = torch.arange(10.0)
    halves, other, gradients = flat.split(5), torch.arange(7), torch.ones(1000)
    host = HostMemory()
    parked = OffloadedTensors([*halves, other], [gradients], host)
    assert all(t.untyped_storage().nbytes() == 0 for t in (flat, other, gradients))
    assert parked.nbytes == 40 + 56 + 4000 and host.nbytes == 64 + 64  # each rounded up to 64 bytes
    parked.restore()
    assert torch.equal(halves[1], torch.arange(5.0, 10.0)) and torch.equal(other, torch.arange(7))
    assert gradients.untyped_storage().nbytes() == 4000
    flat[7] = -1  # they are views of one memory again
    assert halves[1][2] == -1


def test_the_same_memory_of_the_host_is_used_each_time_and_no_more_of_it_than_wanted() -> None:
    host = HostMemory()
    size = (1 << 20) + 64  # a power of two would be nearly twice as much
    (first,) = host.blocks([size], "cpu")
    (second,) = host.blocks([size], "cpu")
    less, more = host.blocks([100, 200], "cpu")
    assert first.data_ptr() == second.data_ptr() == less.data_ptr() and host.nbytes == size
    assert (less.nbytes, more.nbytes) == (100, 200) and more.data_ptr() == first.data_ptr() + 128
    (larger,) = host.blocks([2 * size], "cpu")
    assert host.nbytes == larger.nbytes == 2 * size


def test_what_is_there_now_comes_back_and_not_what_was_there_the_first_time() -> None:
    host, tensor = HostMemory(), torch.zeros(100)
    for value in range(3):
        tensor.fill_(value)
        parked = OffloadedTensors([tensor], host=host)
        parked.restore()
        assert torch.equal(tensor, torch.full((100,), float(value)))
