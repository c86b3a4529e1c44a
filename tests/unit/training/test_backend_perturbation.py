"""A change of weights that is seen by whoever computes with them, and that is undone to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.training.backend import Perturbation

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
