"""Which tensors hold a number that is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from rlhpc.algorithms.nonfinite import bad_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_infinities_that_cancel_and_finite_numbers_that_overflow(dtype) -> None:
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    both = torch.zeros(1000, dtype=dtype)
    both[7], both[8] = math.inf, -math.inf
    one = torch.ones(40, 3, dtype=dtype).T  # not contiguous
    one[1, 2] = math.nan
    named = [("largest", largest), ("both", both), ("nan", one), ("none", torch.zeros(0, dtype=dtype))]
    assert bad_tensors([*named, ("counts", torch.ones(3, dtype=torch.int64))]) == ["both", "nan"]
