"""Weights on the accelerators that a trainer shares with its receivers: pairs of sender and receivers, and sizes of chunks.

`transport_select` chooses the transport `ipc` on a shared accelerator. The memory plan and the sender use the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhpc.runtime.comm.shared_memory import largest_size_within
from rlhpc.runtime.devices import message_budget

#: Values of `rollout.weight_sync` with which weights may stay on the accelerators that trainer and rollout ranks share.
STAY_ON_ACCELERATORS = ("auto", "broadcast", "ipc")


def weight_sources(
    actor: Sequence[frozenset[tuple[int, int]]], rollout: Sequence[frozenset[tuple[int, int]]]
) -> tuple[int, ...]:
    """Returns for each rollout rank the actor rank on the same accelerator, which sends it the weights within the accelerator.

    Args:
        actor: Accelerators of each actor rank, as (node, index).
        rollout: Accelerators of each rollout rank.

    Returns:
        An actor rank for each rollout rank; empty if some rollout rank shares its accelerators with no actor rank, or only in
        part. Then the weights travel between accelerators anyway.
    """
    ranks_by_accelerators = {accelerators: rank for rank, accelerators in reversed([*enumerate(actor)]) if accelerators}
    source_ranks = [ranks_by_accelerators.get(accelerators) for accelerators in rollout]
    return tuple(rank for rank in source_ranks if rank is not None) if None not in source_ranks else ()


def source_of(source_ranks: Sequence[int], rollout_rank: int) -> int:
    """Returns the actor rank that sends the weights to a rollout rank: rank 0 if `source_ranks` is empty."""
    return source_ranks[rollout_rank] if source_ranks else 0


def receivers_of(source_ranks: Sequence[int], actor_rank: int, rollout_ranks: Sequence[int]) -> list[int]:
    """Returns those of the rollout ranks to which an actor rank sends the weights."""
    return [rank for rank in rollout_ranks if source_of(source_ranks, rank) == actor_rank]


#: Bytes of a chunk: large enough to make fixed costs per chunk negligible, small enough to keep a few chunks in memory.
CHUNK_BYTES = 256 << 20
#: Number of chunks that need accelerator buffers at once: two that the receiver has not opened yet, one that it copies, and
#: one that is being written.
NUM_DEVICE_CHUNKS = 4


def device_chunk_bytes(budget: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Returns the maximum bytes of a chunk that stays on the accelerator, where larger tensors are sent in pieces; 0 if the
    budget is too small for any chunk.

    Args:
        budget: Bytes of accelerator memory for messages in transit (`devices.message_budget`).
        chunk_bytes: Bytes of a chunk with any other transport.
    """
    return min(chunk_bytes, largest_size_within(budget // NUM_DEVICE_CHUNKS))


def buffer_bytes(memory_bytes: float) -> int:
    """Returns the maximum bytes of a sender's buffers on an accelerator with this many bytes of memory, while its receivers
    read the weights as they are sent.
    """
    return NUM_DEVICE_CHUNKS * device_chunk_bytes(message_budget(int(memory_bytes)))


def update_bytes(weight_bytes: float, is_on_accelerator: bool, memory_bytes: float | None) -> float:
    """Returns the maximum bytes of a sender's buffers, on an accelerator or on a host.

    Args:
        weight_bytes: Bytes of all weights that are sent.
        is_on_accelerator: True if the sender computes on an accelerator.
        memory_bytes: Bytes of the accelerator's memory; None if unknown.
    """
    if not is_on_accelerator:
        return min(weight_bytes, CHUNK_BYTES)
    return min(weight_bytes, NUM_DEVICE_CHUNKS * CHUNK_BYTES if memory_bytes is None else buffer_bytes(memory_bytes))


#: Minimum of `spare_bytes`.
_MIN_SPARE_BYTES = 2 << 30


def spare_bytes(largest_bytes: float, memory_bytes: float) -> float:
    """Returns the bytes that an update needs on a shared accelerator, in addition to the trainer's memory and the receivers'
    weights, if the trainer is not offloaded.

    An update needs the sender's buffers, the receiver's copy of a chunk, and the largest weight twice: as the sender has
    gathered it, and as the receiver joins its pieces.

    Args:
        largest_bytes: Bytes of the largest weight.
        memory_bytes: Bytes of the accelerator's memory.
    """
    chunk_bytes = device_chunk_bytes(message_budget(int(memory_bytes)))
    return max(_MIN_SPARE_BYTES, buffer_bytes(memory_bytes) + chunk_bytes + 2.0 * largest_bytes)
