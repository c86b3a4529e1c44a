"""Activations of a decoder layer, in bytes a token: what its forward pass keeps for the backward pass, and what that adds.

The terms are those that PyTorch's autograd saves of transformers' modules, one by one:

    norm            its input in float32, the normalized input, its output                  12 H, or in bfloat16 8 H
    attention       queries, keys and values after rotation, the output, its log-sums       b (2 q + 2 kv) + 4 heads
    normalized q k  the float32 input and the normalized one                                8 (q + kv), in bfloat16 6
    gated MLP       gate, its SiLU, up, and their product                                   4 b I
    mixture         the same of each token's experts, and what they are given and return    k b (4 W + 2 H)
                    (where ranks share experts, too: what travels is freed on arrival, and as many come as go on average)

with H the width, I the inner width of an MLP and W of an expert, k experts a token, q and kv the widths of queries and keys, b
bytes a number. Where only adapters are trained, what frozen weights would need falls away: of a norm the normalized input, of
queries and keys likewise.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from rlhpc.language.memory.model import ModelSize


@dataclass(frozen=True)
class Layers:
    """How a model's layers compute.

    Attributes:
        size: The model.
        itemsize: Bytes of a number: 4, or 2 in half precision.
        on_host: Whether on a CPU, where a row's samples are put together after attention.
        adapted: Names of linear layers with adapters, where those alone are trained; None if all weights are.
        tensor: Ranks that share each matrix.
        eager: Tokens of the longest sample, if attention makes its weights, one for each pair of tokens; 0 if it does not.
    """

    size: ModelSize
    itemsize: int
    on_host: bool = False
    adapted: Set[str] | None = None
    tensor: int = 1
    eager: int = 0

    @property
    def _q(self) -> float:
        return self.size.heads * self.size.head_dim / self.tensor

    @property
    def _kv(self) -> float:
        return max(self.size.kv_heads / self.tensor, 1) * self.size.head_dim

    @property
    def _float(self) -> bool:
        return self.itemsize == 4

    def norm(self) -> float:
        """Of a norm over the width."""
        hidden = self.size.hidden
        if self.adapted is None:
            return (12.0 if self._float else 8.0) * hidden
        return (8.0 if self._float else 6.0) * hidden

    def attention(self) -> float:
        """Of attention, without the norm before it."""
        size, b = self.size, self.itemsize
        found = b * (2 * self._q + 2 * self._kv) + 4.0 * size.heads / self.tensor
        if self.on_host and not self.eager:
            found += b * self._q
        if size.qk_norm:
            frozen = self.adapted is not None
            found += (4.0 if frozen else 8.0 if self._float else 6.0) * (self._q + self._kv)
        if self.eager:
            found += (4.0 + b) * size.heads / self.tensor * self.eager
        return found

    def feed_forward(self) -> float:
        """Of the MLP, or of the experts that a token goes to."""
        size, b, hidden = self.size, self.itemsize, self.size.hidden
        if size.experts:
            each = b * (4.0 * size.expert_width + 2.0 * hidden) + 40.0
            return size.per_token * each + 4.0 * size.experts
        inner = size.intermediate / self.tensor
        kept = 4.0 if self.adapted is None or "down_proj" in self.adapted else 3.0
        return kept * b * inner

    def layer(self) -> float:
        """All that a layer keeps."""
        return 2 * self.norm() + self.attention() + self.feed_forward()

    def edge(self) -> float:
        """Between layers: a layer's input."""
        return float(self.itemsize * self.size.hidden)

    def once(self) -> float:
        """Of the whole model: the rotation's sines and cosines."""
        return 2.0 * self.itemsize * self.size.head_dim

    def returning(self) -> float:
        """What the backward pass of a layer adds: gradients of what the widest part of it kept."""
        size, b = self.size, self.itemsize
        if size.experts:
            return b * (size.per_token * (2.0 * size.expert_width + 2.0 * size.hidden) + 2.0 * size.hidden)
        # Where the product of gate and up has passed its gradient on to both, and is there itself no more.
        return b * (2.0 * size.intermediate / self.tensor + size.hidden)

    def passing(self) -> float:
        """What a layer takes at most where nothing is kept."""
        size, b = self.size, self.itemsize
        inner = (
            size.per_token * (3.0 * size.expert_width + 2.0 * size.hidden)
            if size.experts
            else 3.0 * size.intermediate / self.tensor
        )
        return max(b * (2.0 * size.hidden + inner), 16.0 * size.hidden)
