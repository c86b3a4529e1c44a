"""Exactly reversible perturbation of a model's trained weights, to test whether another process receives each of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: The integers of a float's size: their bits are flipped.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The mantissa bit that is flipped, from the highest. In float32 one stale tensor of SmolLM2 moves log-probs 1e4 times as far
#: as rounding does with the second, 1e3 times with the first, and 6e3 times with the third.
_BIT = 2
#: The value that every element of a tensor of zeros gets.
_FILL = 2.0**-6


class Perturbation:
    """Flip of one mantissa bit of each number: an operation that is its own inverse and needs no memory.

    The second bit of the mantissa moves a number by 12.5 to 25 %, in a direction that depends on its bits. This is enough to
    reveal one stale tensor, and too little for a deep model to amplify rounding. Zeros would hardly move: a tensor that
    contains only zeros (a new LoRA adapter's second factor) is filled with a constant, and later with zeros.
    """

    def __init__(self) -> None:
        self._zeros: list[bool] = []

    @torch.no_grad()
    def apply(self, tensors: Iterable[torch.Tensor]) -> None:
        """Changes the tensors in place.

        Raises:
            ValueError: A tensor has another dtype than floating-point numbers of 16, 32 or 64 bits.
        """
        self._zeros = []
        for tensor in tensors:
            bits = _bits(tensor)
            self._zeros.append(not bits.any())
            if self._zeros[-1]:
                tensor.fill_(_FILL)
            else:
                bits.bitwise_xor_(_mask(tensor.dtype))

    @torch.no_grad()
    def undo(self, tensors: Iterable[torch.Tensor]) -> None:
        """Restores the same tensors, in the same order, to the last bit."""
        for tensor, was_zero in zip(tensors, self._zeros, strict=True):
            if was_zero:
                tensor.zero_()
            else:
                _bits(tensor).bitwise_xor_(_mask(tensor.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as integers."""
    if not tensor.is_floating_point() or tensor.element_size() not in _INTEGERS:
        raise ValueError(f"{tensor.dtype} cannot be perturbed: floats of 16, 32 or 64 bits can")
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _mask(dtype: torch.dtype) -> int:
    """Returns the bit that is flipped."""
    mantissa = round(-torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64).log2().item())
    return 1 << (mantissa - _BIT)
