"""All boxes of a small tensor."""

from __future__ import annotations

from hypothesis import strategies as st

from rlhpc.checkpoint.tensor_slice import Box


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(starts, tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True)))
