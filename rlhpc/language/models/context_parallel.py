"""Context parallelism (`actor.parallel.context`; Ulysses, Jacobs et al. 2023): several ranks share a packed row of tokens.

Each rank reads a contiguous part of the row. For attention, an all-to-all exchanges tokens for heads, so that each rank
computes some of the heads over the full row.

Tokens of the model must interact only through attention, and the model must accept positions. The outputs are gathered on all
ranks of the row, which therefore compute the same loss. The gradient of a token's output flows only to the rank that read the
token.
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
    """Rank's part of a packed row in context parallelism.

    Attributes:
        rank, size: Index of the part, and number of parts.
        group: Process group of the ranks that share a row.
    """

    rank: int
    size: int
    group: Any

    @classmethod
    def from_mesh(cls, mesh: Mesh | None) -> RowShare | None:
        """Returns this rank's part according to the mesh; None if there is no context parallelism."""
        if mesh is None or mesh.context is None:
            return None
        return cls(mesh.context.get_local_rank(), mesh.context.size(), mesh.context.get_group())

    def length(self, batch: TokenBatch) -> int:
        """Returns the number of tokens of a part; the row is padded so that all parts have equal length."""
        return -(-max(2, batch.tokens) // self.size)

    def bounds(self, batch: TokenBatch) -> tuple[int, int]:
        """Returns the start and the end of the part in the row."""
        length = self.length(batch)
        return self.rank * length, (self.rank + 1) * length

    def inputs(self, batch: TokenBatch) -> dict[str, Any]:
        """Returns this rank's part of `TokenBatch.inputs`; the segments still describe all samples of the row."""
        inputs = batch.inputs()
        ids, positions, segments = inputs["input_ids"], inputs["position_ids"], inputs["segments"]
        padding = self.length(batch) * self.size - ids.shape[1]
        if padding:
            ids = nn.functional.pad(ids, (0, padding), value=batch.pad_id)
            positions = torch.cat([positions, torch.arange(padding, device=positions.device)[None]], 1)
            lengths = [length for count, length in segments.runs for _ in range(count)]
            segments = Segments.from_lengths([*lengths, padding], ids.device)
        start, end = self.bounds(batch)
        local_tokens = slice(start, end)
        return {
            "input_ids": ids[:, local_tokens],
            "position_ids": positions[:, local_tokens],
            "segments": replace(segments, process_group=self.group),
        }

    def gather(self, local_outputs: Tensor, batch: TokenBatch) -> Tensor:
        """Gathers the outputs of all parts, `[1, t, …]` each, into outputs of the padded row, `[1, T, …]`; differentiable."""
        start, end = self.bounds(batch)
        padded_row = local_outputs.new_zeros(1, self.length(batch) * self.size, *local_outputs.shape[2:])
        return self.sum(padded_row.index_copy(1, torch.arange(start, end, device=local_outputs.device), local_outputs))

    def sum(self, local_values: Tensor) -> Tensor:
        """Sums tensors over the row's ranks, differentiably; each position may be nonzero on at most one rank."""
        sum_over_ranks: Tensor = _SumOverRanks.apply(local_values, self.group)
        return sum_over_ranks


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks whose backward pass returns the gradient unchanged, as all ranks compute the same loss from the sum."""

    @staticmethod
    def forward(ctx: Any, local_values: Tensor, group: Any) -> Tensor:
        sum_over_ranks = local_values.clone()
        dist.all_reduce(sum_over_ranks, group=group)
        return sum_over_ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    """All-to-all over a row's ranks that splits one dimension and concatenates another; its gradient is the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split_dim: int, cat_dim: int) -> Tensor:
        ctx.args = group, split_dim, cat_dim
        send_buffer = torch.stack(x.chunk(dist.get_world_size(group), split_dim)).contiguous()
        receive_buffer = torch.empty_like(send_buffer)
        dist.all_to_all_single(receive_buffer, send_buffer, group=group)
        return torch.cat(receive_buffer.unbind(0), cat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, split_dim, cat_dim = ctx.args
        return _Exchange.apply(grad.contiguous(), group, cat_dim, split_dim), None, None, None


class AttentionSubstitute:
    """Substitute for an attention module after `to_heads`, with the attributes that transformers' attention function reads."""

    is_causal = True

    def __init__(self, layer: nn.Module, query: Tensor, key: Tensor) -> None:
        self.training = layer.training
        self.num_key_value_groups = query.shape[1] // key.shape[1]


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges tokens for heads: `[1, heads, t, d]` of a rank's tokens become `[1, heads / n, T, d]` of all tokens.

    If the number of key-value heads is not divisible by the number of ranks, key-value heads are repeated first.
    """
    size, num_heads, num_kv_heads = dist.get_world_size(group), query.shape[1], key.shape[1]
    if num_kv_heads % size:
        num_copies = size // num_kv_heads if size % num_kv_heads == 0 else num_heads // num_kv_heads
        key, value = key.repeat_interleave(num_copies, 1), value.repeat_interleave(num_copies, 1)
    q, k, v = (_Exchange.apply(states, group, 1, 2) for states in (query, key, value))
    return q, k, v


def to_tokens(values: Tensor, group: Any) -> Tensor:
    """Exchanges heads for tokens, the reverse of `to_heads`: `[1, T, heads / n, d]` become `[1, t, heads, d]`."""
    tokens: Tensor = _Exchange.apply(values, group, 1, 2)
    return tokens
