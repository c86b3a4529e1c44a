"""Context parallelism: parts of a row, and attention that two ranks compute like one.

The ranks are threads of this process. Models on real ranks are tested in tests/integration/training/test_mesh.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed import multi_threaded_pg

from rlhpc.language.models.context_parallel import AttentionSubstitute, RowShare, to_heads, to_tokens
from rlhpc.language.models.token_batch import TokenBatch

HEAD_DIM, SIZE = 4, 2
OnRanks = Callable[[Callable[[RowShare], Any]], list[Any]]


@pytest.fixture
def on_ranks() -> Iterator[OnRanks]:
    """Runs a function with the part of each rank; returns what it returns, by rank."""

    def run(function: Callable[[RowShare], Any]) -> list[Any]:
        store, results, errors = dist.HashStore(), [None] * SIZE, list[BaseException]()

        def work(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=SIZE, store=store)
                context = SimpleNamespace(
                    get_local_rank=lambda: rank, size=lambda: SIZE, get_group=lambda: dist.group.WORLD
                )
                mesh: Any = SimpleNamespace(context=context)
                share = RowShare.from_mesh(mesh)
                assert share is not None
                results[rank] = function(share)
            except BaseException as error:
                errors.append(error)
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # the other ranks would wait

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(SIZE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg.ProcessLocalGroup.reset()
    multi_threaded_pg._install_threaded_pg()
    yield run
    multi_threaded_pg._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


def batch_of(lengths: list[int]) -> TokenBatch:
    """Returns a packed batch of tokens 1, 2, 3, …"""
    samples, first = [], 1
    for length in lengths:
        samples.append(torch.arange(first, first + length))
        first += length
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    return TokenBatch.from_sequences(samples, masks, pad_id=99).read_by(packed=True)


# -- parts of a row


@pytest.mark.parametrize(("lengths", "size"), [([5, 3], 2), ([4, 2, 1], 2), ([5, 3, 3], 4), ([1], 2), ([], 2)])
def test_parts_of_a_row_have_equal_length_and_are_the_row_in_order(lengths: list[int], size: int) -> None:
    batch = batch_of(lengths)
    parts = [RowShare(rank, size, f"group {rank}").inputs(batch) for rank in range(size)]
    row = torch.cat([part["input_ids"] for part in parts], 1)[0].tolist()
    positions = torch.cat([part["position_ids"] for part in parts], 1)[0].tolist()
    padding = len(row) - sum(lengths)
    assert len({part["input_ids"].shape for part in parts}) == 1 and 0 <= padding <= max(2, size)
    assert row == [*range(1, sum(lengths) + 1), *[99] * padding]
    assert positions[: sum(lengths)] == [position for length in lengths for position in range(length)]
    for rank, part in enumerate(parts):
        segments = part["segments"]
        assert segments.process_group == f"group {rank}" and int(segments.ends[-1]) == len(row), (
            "all samples of the row"
        )
        counted = [length for count, length in segments.runs for _ in range(count)]
        assert counted[: len(lengths)] == lengths


def test_bounds_are_those_of_the_inputs() -> None:
    batch = batch_of([4, 3])
    for rank in range(2):
        share = RowShare(rank, 2, None)
        start, end = share.bounds(batch)
        assert end - start == share.length(batch) == 4
        assert share.inputs(batch)["input_ids"][0, 0] == start + 1


def test_without_context_parallelism_no_row_is_shared() -> None:
    mesh: Any = SimpleNamespace(context=None)
    assert RowShare.from_mesh(None) is None and RowShare.from_mesh(mesh) is None


# -- attention


def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns causal attention, `[1, heads, T, d]` to `[1, T, heads, d]`."""
    key, value = (states.repeat_interleave(layer.num_key_value_groups, 1) for states in (key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=layer.is_causal).transpose(1, 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths"),
    [(4, 4, [8]), (4, 2, [7]), (4, 1, [3, 4]), (6, 3, [8])],
    ids=["as many", "grouped and padded", "fewer key-value heads than ranks", "an odd number of them"],
)
def test_two_ranks_compute_the_attention_of_one(
    on_ranks: OnRanks, heads: int, kv_heads: int, lengths: list[int]
) -> None:
    """And each has the gradients of its own tokens."""
    batch = batch_of(lengths)
    counts, row_length = (heads, kv_heads, kv_heads), 8
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(1, count, row_length, HEAD_DIM, generator=generator).requires_grad_() for count in counts]
    weights = torch.randn(1, row_length, heads, HEAD_DIM, generator=generator)
    one = AttentionSubstitute(nn.Identity(), *full[:2])
    expected = attend(one, *full)
    (expected * weights).sum().backward()

    def rank_attention(share: RowShare) -> Any:
        part = slice(*share.bounds(batch))
        local = [states.detach()[:, :, part].clone().requires_grad_() for states in full]
        query, key, value = to_heads(local[0], local[1], local[2], share.group)
        assert query.shape == (1, heads // SIZE, row_length, HEAD_DIM), "some of the heads, all of the tokens"
        layer = AttentionSubstitute(nn.Identity().eval(), query, key)
        assert layer.training is False
        outputs = share.gather(to_tokens(attend(layer, query, key, value), share.group), batch)
        (outputs * weights).sum().backward()
        return part, outputs.detach(), [states.grad for states in local]

    for part, outputs, gradients in on_ranks(rank_attention):
        torch.testing.assert_close(outputs, expected.detach())
        for gradient, states in zip(gradients, full, strict=True):
            assert states.grad is not None
            torch.testing.assert_close(gradient, states.grad[:, :, part])


def test_the_gradient_of_a_sum_is_that_of_one_loss(on_ranks: OnRanks) -> None:
    """All ranks compute the same loss from the sum: their gradients are not added up."""

    def rank_sum(share: RowShare) -> list[float]:
        value = torch.zeros(SIZE)
        value[share.rank] = 10.0 + share.rank
        value.requires_grad_()
        total = share.sum(value)
        (total * torch.tensor([1.0, 2.0])).sum().backward()
        assert value.grad is not None
        return [*total.tolist(), *value.grad.tolist()]

    assert on_ranks(rank_sum) == [[10.0, 11.0, 1.0, 2.0]] * SIZE
