"""Token batches of sequences of given lengths."""

from __future__ import annotations

from hypothesis import strategies as st

from rlhpc.language.models.token_batch import TokenBatch

lengths_of_samples = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def batch_of(lengths: list[int]) -> TokenBatch:
    return TokenBatch.from_sequences(
        [[100 * i + t for t in range(n)] for i, n in enumerate(lengths)],
        [[t > 0 for t in range(n)] for n in lengths],
        {"advantage": [[float(t) for t in range(n)] for n in lengths]},
        pad_id=-1,
    )
