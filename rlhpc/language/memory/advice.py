"""What to change where memory does not suffice, and what could be raised where it does."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from rlhpc.config.parallel import Sizes
from rlhpc.config.typed import select
from rlhpc.language.memory.serving import Serving
from rlhpc.language.memory.training import Training
from rlhpc.language.model_config import LanguageActorConfig
from rlhpc.runs.memory.account import Change

#: Most tokens that are looked at, and the multiple that they are of.
_MOST, _STEP = 1 << 22, 256
#: How many configurations are named.
_NAMED = 3
#: Distance of a change that costs time, in powers of two of the ranks that share a model's matrices.
_RECOMPUTING, _OFFLOADING, _SMALLER = 0.4, 2.5, 0.3


def held(training: Training) -> float:
    """What a rank holds at most."""
    return max(moment.nbytes for moment in training.moments())


def largest_micro_batch(name: str, training: Training, room: float) -> Mapping[str, str]:
    """The largest micro-batch that fits; nothing if none does."""
    tokens = largest_tokens(training, room)
    return {f"{name}.max_tokens_per_micro_batch": f"{tokens} tokens"} if tokens else {}


def largest_tokens(training: Training, room: float) -> int:
    """Tokens of the largest micro-batch that fits; 0 if none does."""
    low, high = 0, _MOST // _STEP
    while low < high:
        middle = (low + high + 1) // 2
        if held(training.with_tokens(middle * _STEP)) <= room:
            low = middle
        else:
            high = middle - 1
    return low * _STEP


def largest_context(name: str, serving: Serving, room: float) -> Mapping[str, str]:
    """The longest sequence of which the cache holds one."""
    del room
    if serving.engine != "vllm" or not serving.accelerated or serving.room is None:
        return {}
    tokens = min(serving.longest_in(serving.left()), serving.size.context or 1 << 62)
    return {f"{name}.max_model_len": f"{tokens} tokens"} if tokens > 0 else {}


def wider_engines(name: str, serving: Serving, room: float) -> Sequence[Change]:
    """The smallest engine of more ranks that fits, where engines may have several."""
    if serving.engine != "vllm" or name != "rollout":
        return ()
    for tensor in _powers(serving.size.heads):
        wider = dataclasses.replace(serving, tensor=tensor)
        most = max(moment.nbytes for moment in wider.moments())
        if tensor > serving.tensor and serving.size.heads % tensor == 0 and not wider.refusals() and most <= room:
            return (Change((f"{name}.parallel.tensor={tensor}",), most),)
    return ()


def nearest(name: str, training: Training, section: LanguageActorConfig, room: float) -> Sequence[Change]:
    """Configurations that fit, those that change least first.

    Args:
        name: The group.
        training: As it is.
        section: The group's section.
        room: What a rank may hold.
    """
    found: list[tuple[float, Change]] = []
    for distance, words, changed in _others(name, training, divides=select(section, "parallel") is not None):
        if words and (nbytes := held(changed)) <= room:
            found.append((distance, Change(words, nbytes)))
    found.sort(key=lambda one: (one[0], one[1].nbytes))
    best: list[Change] = []
    for _, change in found:
        if not any(set(other.overrides) <= set(change.overrides) for other in best):
            best.append(change)
    return best[:_NAMED]


def _others(name: str, training: Training, *, divides: bool) -> Iterator[tuple[float, tuple[str, ...], Training]]:
    """Every configuration nearby: how far it is, what to set, and what it would be."""
    recomputed = (False, True) if not training.checkpointing else (True,)
    offloaded = (False, True) if not training.offload else (True,)
    tokens = [(0, training.tokens), (1, training.tokens // 2), (2, training.tokens // 4)]
    for (cost, words, sized), again, away, (halved, fewer) in itertools.product(
        list(_divided(name, training, divides=divides)), recomputed, offloaded, tokens
    ):
        changed = dataclasses.replace(sized, checkpointing=again, offload=away, tokens=fewer)
        if away and not (training.accelerated and changed.backend != "local"):
            continue
        more: tuple[str, ...] = ()
        if again and not training.checkpointing:
            more += (f"{name}.model.gradient_checkpointing=true",)
        if away and not training.offload:
            section = "fsdp" if changed.backend == "fsdp" else "deepspeed"
            more += (f"{name}.{section}.cpu_offload=true",)
        if halved:
            more += (f"{name}.max_tokens_per_micro_batch={fewer}",)
        far = cost + _RECOMPUTING * (again and not training.checkpointing) + _SMALLER * halved
        yield far + _OFFLOADING * (away and not training.offload), (*words, *more), changed


def _divided(name: str, training: Training, *, divides: bool) -> Iterator[tuple[float, tuple[str, ...], Training]]:
    """Other ways in which as many ranks, or more, could share the model."""
    yield 0.0, (), training
    ranks, sizes = training.ranks, training.sizes
    if training.backend != "fsdp" and ranks > 1:
        yield 1.0, (f"{name}.training_backend=fsdp",), dataclasses.replace(
            training, backend="fsdp", sizes=Sizes(shard=ranks), offload=False
        )  # fmt: skip
    if training.backend == "deepspeed" and training.stage < 3:
        yield 1.2, (f"{name}.deepspeed.zero_stage=3",), dataclasses.replace(training, stage=3)
    if training.backend == "fsdp" and divides:
        for far, other in divisions(training):
            if far:
                yield far, _words(name, sizes, other.sizes), other
    for more in (2, 4, 8):  # more ranks
        if training.backend == "fsdp":
            wider = dataclasses.replace(sizes, shard=sizes.shard * more)
            yield (
                3.0 + math.log2(more),
                (f"{more * ranks} ranks for {name}",),
                dataclasses.replace(training, sizes=wider),
            )
        elif training.backend == "local":
            wide = dataclasses.replace(training, backend="fsdp", sizes=Sizes(shard=ranks * more), offload=False)
            yield 4.0 + math.log2(more), (f"{name}.training_backend=fsdp", f"{more * ranks} ranks for {name}"), wide


def divisions(training: Training) -> Iterator[tuple[float, Training]]:
    """All ways in which the same ranks can divide a model under FSDP, and how far each is from what is configured: what has no
    more copies than now, and sizes that are powers of two."""
    ranks, experts = training.ranks, training.ranks if training.size.experts else 1
    for replicate, context, tensor, expert in itertools.product(*map(_powers, (ranks, ranks, ranks, experts))):
        if ranks % (replicate * context * tensor) or replicate > training.sizes.replicate:
            continue
        sizes = Sizes(replicate, ranks // (replicate * context * tensor), context, tensor, expert)
        if _possible(training, sizes):
            yield _far(training.sizes, sizes), dataclasses.replace(training, sizes=sizes)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _possible(training: Training, sizes: Sizes) -> bool:
    """Whether the model can be divided so."""
    size = training.size
    within = sizes.shard * sizes.context * sizes.tensor
    return (
        size.kv_heads % sizes.tensor == 0
        and size.vocabulary % sizes.tensor == 0
        and (size.heads // sizes.tensor) % sizes.context == 0
        and (sizes.expert == 1 or (size.experts % sizes.expert == 0 and within % sizes.expert == 0))
        and not (sizes.expert > 1 and sizes.expert % sizes.tensor and sizes.tensor % sizes.expert)
        and not (size.experts and sizes.tensor > 1 and sizes.expert < sizes.tensor)
    )


def _far(before: Sizes, after: Sizes) -> float:
    """How far one is from the other: experts cost least, then context, then tensor."""
    weights = {"replicate": 0.5, "context": 0.8, "tensor": 1.0, "expert": 0.6}
    return sum(w * abs(math.log2(getattr(after, key) / getattr(before, key))) for key, w in weights.items())


def _words(name: str, before: Sizes, after: Sizes) -> tuple[str, ...]:
    keys = ("replicate", "context", "tensor", "expert")
    return tuple(
        f"{name}.parallel.{key}={getattr(after, key)}" for key in keys if getattr(after, key) != getattr(before, key)
    )
