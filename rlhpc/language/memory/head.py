"""Memory of log-probs: the chunks of logits that `tokens.head` makes of hidden states, and the head's gradient."""

from __future__ import annotations

from rlhpc.language.memory.layers import Layers

#: Elements of a chunk, and of one on a CPU with the fewest rows it has (`rlhpc.language.tokens.rows.chunks`).
CHUNK, QUARTER, ROWS = 1 << 24, 4, 128


def chunk_rows(vocabulary: int, tokens: int, *, on_host: bool) -> int:
    """How many tokens' logits are looked at at once."""
    rows = max(1, CHUNK // vocabulary)
    if on_host:
        rows = min(rows, max(ROWS, rows // QUARTER))
    return min(rows, tokens)


def loss_chunk(layers: Layers, tokens: int) -> float:
    """Bytes of the logits that are there at once: three times in float32 (logits, log-probs, probabilities), and once in half
    precision where the model computes in it."""
    size = layers.size
    if size.whole_logits:  # the model makes them all, on each rank of a tensor group, and their gradient is as large
        rows = chunk_rows(size.vocabulary, tokens, on_host=layers.on_host)
        return (2.0 * layers.itemsize * tokens + 12.0 * rows) * size.vocabulary
    rows = chunk_rows(size.vocabulary // layers.tensor, tokens, on_host=layers.on_host)
    return (12.0 if layers.itemsize == 4 else 14.0) * rows * size.vocabulary / layers.tensor


def scoring_chunk(layers: Layers, tokens: int) -> float:
    """The same where nothing is trained."""
    size = layers.size
    rows = chunk_rows(size.vocabulary, tokens, on_host=layers.on_host)
    whole = layers.itemsize * tokens * size.vocabulary / layers.tensor if size.whole_logits else 0.0
    return whole + (8.0 if layers.itemsize == 4 else 10.0) * rows * size.vocabulary / layers.tensor


def head_gradient(layers: Layers) -> float:
    """The head's gradient, summed in float32, and one chunk's where that is in half precision."""
    return (4.0 if layers.itemsize == 4 else 6.0) * layers.size.embedding / layers.tensor
