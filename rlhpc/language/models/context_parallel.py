"""Context parallelism (`actor.parallel.context`, Ulysses, Jacobs et al. 2023): several ranks share a packed row of tokens.

Each rank reads a contiguous part of the row. For attention, an all-to-all exchanges tokens for heads, so that each rank
computes some of the heads over the full row.

The model must mix tokens in attention alone, and take positions. The outputs are gathered on all ranks of the row, which
therefore compute the same loss. The gradient of a token's output goes to the rank that read the token, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhpc.language.models.token_batch import Segments, TokenBatch
from rlhpc.training.mesh import Mesh


@dataclass(frozen=True)
class RowShare:
    """Rank's share of a packed row.

    Attributes:
        rank, size: Index of the rank's part, and the number of parts.
        group: The ranks of a row.
    """

    rank: int
    size: int
    group: Any

    @classmethod
    def of(cls, mesh: Mesh | None) -> RowShare | None:
        """Returns the share of a mesh's rank; None if its rows are not shared."""
        if mesh is None or mesh.context is None:
            return None
        return cls(mesh.context.get_local_rank(), mesh.context.size(), mesh.context.get_group())

    def length(self, batch: TokenBatch) -> int:
        """Returns the tokens of a part; the row is padded so that all parts have the same length."""
        return -(-max(2, batch.tokens) // self.size)

    def bounds(self, batch: TokenBatch) -> tuple[int, int]:
        """Returns the start and the end of the part in the row."""
        length = self.length(batch)
        return self.rank * length, (self.rank + 1) * length

    def inputs(self, batch: TokenBatch) -> dict[str, Any]:
        """Returns this part of `TokenBatch.inputs` of a row; the segments describe all samples of the row."""
        inputs = batch.inputs()
        ids, positions, segments = inputs["input_ids"], inputs["position_ids"], inputs["segments"]
        padding = self.length(batch) * self.size - ids.shape[1]
        if padding:
            ids = nn.functional.pad(ids, (0, padding), value=batch.pad_id)
            positions = torch.cat([positions, torch.arange(padding, device=positions.device)[None]], 1)
            lengths = [length for count, length in segments.runs for _ in range(count)]
            segments = Segments.of([*lengths, padding], ids.device)
        start, end = self.bounds(batch)
        local_tokens = slice(start, end)
        return {
            "input_ids": ids[:, local_tokens],
            "position_ids": positions[:, local_tokens],
            "segments": replace(segments, group=self.group),
        }

    def gather(self, part: Tensor, batch: TokenBatch) -> Tensor:
        """Gathers a model's output of the parts, `[1, t, …]` each, into that of the row, `[1, T, …]`, with gradients."""
        start, end = self.bounds(batch)
        padded_row = part.new_zeros(1, self.length(batch) * self.size, *part.shape[2:])
        return self.sum(padded_row.index_copy(1, torch.arange(start, end, device=part.device), part))

    def sum(self, parts: Tensor) -> Tensor:
        """Returns the sum over the row's ranks, with gradients; each position is nonzero on one rank at most."""
        summed: Tensor = _SumOverRanks.apply(parts, self.group)
        return summed


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; the gradient passes unchanged, since all ranks compute the same loss from the sum."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        summed = parts.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    """All-to-all over the ranks of a row that splits one dimension and joins another; its gradient is the reverse exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split: int, join: int) -> Tensor:
        ctx.args = group, split, join
        send_buffer = torch.stack(x.chunk(dist.get_world_size(group), split)).contiguous()
        receive_buffer = torch.empty_like(send_buffer)
        dist.all_to_all_single(receive_buffer, send_buffer, group=group)
        return torch.cat(receive_buffer.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, split, join = ctx.args
        return _Exchange.apply(grad.contiguous(), group, join, split), None, None, None


class Heads:
    """Substitute for a layer's attention module whose heads are shared: the attributes that transformers' function reads."""

    is_causal = True

    def __init__(self, layer: nn.Module, query: Tensor, key: Tensor) -> None:
        self.training = layer.training
        self.num_key_value_groups = query.shape[1] // key.shape[1]


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges tokens for heads: `[1, heads, t, d]` of a rank's tokens to `[1, heads / n, T, d]` of all tokens.

    With fewer key-value heads than ranks, each of these heads is sent to several ranks.
    """
    size, num_heads, num_kv_heads = dist.get_world_size(group), query.shape[1], key.shape[1]
    if num_kv_heads % size:
        num_copies = size // num_kv_heads if size % num_kv_heads == 0 else num_heads // num_kv_heads
        key, value = key.repeat_interleave(num_copies, 1), value.repeat_interleave(num_copies, 1)
    q, k, v = (_Exchange.apply(states, group, 1, 2) for states in (query, key, value))
    return q, k, v


def to_tokens(values: Tensor, group: Any) -> Tensor:
    """Exchanges heads for tokens: `[1, T, heads / n, d]` back to `[1, t, heads, d]`."""
    tokens: Tensor = _Exchange.apply(values, group, 1, 2)
    return tokens
