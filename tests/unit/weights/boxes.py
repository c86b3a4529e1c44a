"""All slices of a small tensor."""

from __future__ import annotations

from hypothesis import strategies as st

from rlhpc.checkpoint.tensor_slice import TensorSlice


@st.composite
def tensor_slices(draw: st.DrawFn, shape: tuple[int, ...]) -> TensorSlice:
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return TensorSlice(
        starts, tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True))
    )
