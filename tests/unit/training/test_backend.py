"""What leaves an accelerator, and the memory of the host that it goes to: once per storage, kept from one time to the next."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.training.backend import HostMemory, OffloadedTensors, Perturbation


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


INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(INTEGERS[tensor.dtype]).flatten().tolist()


@given(data=st.data(), dtype=st.sampled_from([*INTEGERS]))
def test_every_pattern_of_bits_is_restored(data: st.DataObject, dtype: torch.dtype) -> None:
    """Also infinities, NaNs with whatever payload, numbers below the normal ones, and both zeros."""
    width = torch.finfo(dtype).bits
    patterns = st.lists(st.integers(-(1 << width - 1), (1 << width - 1) - 1), max_size=8)
    tensors = [torch.tensor(data.draw(patterns), dtype=INTEGERS[dtype]).view(dtype) for _ in range(3)]
    before, change = [bits(tensor) for tensor in tensors], Perturbation()
    change.apply(tensors)
    for tensor, was in zip(tensors, before, strict=True):
        assert all(new != old for new, old in zip(bits(tensor), was, strict=True)), "every number is another"
    change.undo(tensors)
    assert [bits(tensor) for tensor in tensors] == before


@pytest.mark.parametrize("dtype", INTEGERS)
def test_numbers_move_by_a_sixth_and_zeros_move(dtype: torch.dtype) -> None:
    numbers, zeros = torch.randn(1000).to(dtype), torch.zeros(5, dtype=dtype)
    before = numbers.double().clone()
    Perturbation().apply([numbers, zeros])
    moved = numbers.double() / before - 1
    assert float(moved.abs().min()) > 0.12 and float(moved.abs().max()) <= 0.25
    assert 0.3 < float((moved > 0).double().mean()) < 0.7 and float(zeros.abs().min()) > 0.01


def test_parts_of_a_tensor_change_as_they_are_seen() -> None:
    whole = torch.randn(4, 6)
    before, change = whole.clone(), Perturbation()
    change.apply([whole[:, 1:3]])
    assert torch.equal(whole[:, 0], before[:, 0]) and (whole[:, 1:3] != before[:, 1:3]).all()
    change.undo([whole[:, 1:3]])
    assert torch.equal(whole, before)


def test_what_is_no_float_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int64.*cannot be perturbed"):
        Perturbation().apply([torch.arange(3)])
