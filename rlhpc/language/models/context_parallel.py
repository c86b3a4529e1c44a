"""Rows of tokens that several ranks share (`actor.parallel.context`): each reads a run of neighbours, and for attention, heads
and tokens change places (Ulysses, Jacobs et al. 2023), so that each rank attends with some of the heads to the whole row.

That asks nothing of a model but that its tokens meet in attention alone, and that it takes positions. What is said of the
tokens is put together again on all ranks of the row, which therefore compute the same loss; its gradient goes back to whoever
read the token, and nowhere twice.
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
    """This rank's part in reading rows.

    Attributes:
        rank, size: Which of how many parts it reads.
        group: The ranks of a row.
    """

    rank: int
    size: int
    group: Any

    @classmethod
    def of(cls, mesh: Mesh | None) -> RowShare | None:
        """A mesh's; None if its rows are not shared."""
        if mesh is None or mesh.context is None:
            return None
        return cls(mesh.context.get_local_rank(), mesh.context.size(), mesh.context.get_group())

    def length(self, batch: TokenBatch) -> int:
        """Tokens of a part; the row is filled up so that all are equally long."""
        return -(-max(2, batch.tokens) // self.size)

    def bounds(self, batch: TokenBatch) -> tuple[int, int]:
        """Where in the row the part begins and ends."""
        length = self.length(batch)
        return self.rank * length, (self.rank + 1) * length

    def inputs(self, batch: TokenBatch) -> dict[str, Any]:
        """`TokenBatch.inputs` of a row, of this part; attention is told of all samples."""
        inputs = batch.inputs()
        ids, positions, segments = inputs["input_ids"], inputs["position_ids"], inputs["segments"]
        more = self.length(batch) * self.size - ids.shape[1]
        if more:
            ids = nn.functional.pad(ids, (0, more), value=batch.pad_id)
            positions = torch.cat([positions, torch.arange(more, device=positions.device)[None]], 1)
            lengths = [length for count, length in segments.runs for _ in range(count)]
            segments = Segments.of([*lengths, more], ids.device)
        start, end = self.bounds(batch)
        part = slice(start, end)
        return {
            "input_ids": ids[:, part], "position_ids": positions[:, part], "segments": replace(segments, group=self.group)
        }  # fmt: skip

    def whole(self, part: Tensor, batch: TokenBatch) -> Tensor:
        """What a model said of the part, `[1, t, …]`, beside what it said on the others: `[1, T, …]`."""
        start, end = self.bounds(batch)
        filled = part.new_zeros(1, self.length(batch) * self.size, *part.shape[2:])
        return self.together(filled.index_copy(1, torch.arange(start, end, device=part.device), part))

    def together(self, parts: Tensor) -> Tensor:
        """The sum over the row's ranks, of which each but one has a zero in every place."""
        found: Tensor = _Together.apply(parts, self.group)
        return found


class _Together(torch.autograd.Function):
    """The ranks compute the same of the sum, so each has the whole gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        summed = parts.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Exchange(torch.autograd.Function):
    """Splits along one dimension and joins along another, over the ranks of a row: its own reverse, the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split: int, join: int) -> Tensor:
        ctx.args = group, split, join
        sent = torch.stack(x.chunk(dist.get_world_size(group), split)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        group, split, join = ctx.args
        return _Exchange.apply(grad.contiguous(), group, join, split), None, None, None


class Heads:
    """Stands for a layer's attention whose heads are shared out: what transformers' function looks at of it."""

    is_causal = True

    def __init__(self, layer: nn.Module, query: Tensor, key: Tensor) -> None:
        self.training = layer.training
        self.num_key_value_groups = query.shape[1] // key.shape[1]


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`[1, heads, t, d]` of a rank's tokens to `[1, heads / n, T, d]` of all. Where there are fewer heads of keys and values
    than ranks, each is sent to several."""
    size, heads, kept = dist.get_world_size(group), query.shape[1], key.shape[1]
    if kept % size:
        each = size // kept if size % kept == 0 else heads // kept
        key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    q, k, v = (_Exchange.apply(one, group, 1, 2) for one in (query, key, value))
    return q, k, v


def to_tokens(found: Tensor, group: Any) -> Tensor:
    """`[1, T, heads / n, d]` back to `[1, t, heads, d]`."""
    tokens: Tensor = _Exchange.apply(found, group, 1, 2)
    return tokens
