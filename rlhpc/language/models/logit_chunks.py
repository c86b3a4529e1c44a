"""Size of the chunks in which logits are computed: one rule for the trainer and for the memory plan."""

from __future__ import annotations

import functools

#: Minimum number of elements of a chunk; 64 MiB in float32.
MIN_ELEMENTS = 1 << 24
#: A float32 chunk takes at most this share of an accelerator's memory, so that the products of a chunk read the LM head, and
#: add to its gradient, seldom: 1 GiB, or 1 800 rows of 152 000 logits, on a GPU of 141 GB.
_MEMORY_SHARE = 1 / 128
#: On a CPU, a chunk is a quarter of the minimum, which suits caches and the C library's heap, but has at least as many rows,
#: which a fast matrix product needs.
_HOST_DIVISOR, _MIN_HOST_ROWS = 4, 128
#: Multiple of the rows, because libraries compute the last rows of other numbers in another way.
_TILE = 32


@functools.cache
def chunk_rows(width: int, *, is_on_host: bool, memory: float | None = None) -> int:
    """Returns the maximum number of rows of a chunk.

    Args:
        width: Logits of a row.
        is_on_host: Whether the logits are computed on a CPU.
        memory: Bytes of the accelerator; None takes the minimum size.
    """
    elements = MIN_ELEMENTS if memory is None or is_on_host else max(MIN_ELEMENTS, int(memory * _MEMORY_SHARE / 4))
    num_rows = max(1, elements // width)
    if is_on_host:
        num_rows = min(num_rows, max(_MIN_HOST_ROWS, num_rows // _HOST_DIVISOR))
    return num_rows // _TILE * _TILE or num_rows
