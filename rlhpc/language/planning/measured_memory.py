"""The account held against PyTorch's own: `FSDPMemTracker` follows every tensor of a step of FSDP2 on a group of ranks that
does not exist, over tensors without contents. That takes seconds, no accelerator, and hardly any memory, whatever the model.

Followed are forward and backward pass of two micro-batches, without log-probs (whose chunks depend on the batch) and optimizer
(whose state the tracker counts wrongly under fake tensors). It is done at two depths, and what a layer adds is taken on to the
model's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.planning.memory_model import STEP, Training
from rlhpc.language.planning.model_size import config_of, size_of
from rlhpc.runs.memory.account import gib
from rlhpc.runtime.errors import ConfigError

#: Layers of the models that are followed.
DEPTHS = (4, 8)


@dataclass(frozen=True)
class MeasuredMemory:
    """What the tracker found.

    Attributes:
        peaks: Layers → bytes of a rank at most.
        accounted: The same by the account.
        whole: Bytes of the whole model, taken on from the two depths.
        whole_accounted: The same by the account.
        seconds: How long it took.
    """

    peaks: Mapping[int, float]
    accounted: Mapping[int, float]
    whole: float
    whole_accounted: float
    seconds: float

    def words(self) -> str:
        """In a line."""
        deep = ", ".join(
            f"{layers} layers {gib(n)} (accounted {gib(self.accounted[layers])})" for layers, n in self.peaks.items()
        )
        off = self.whole_accounted / self.whole - 1
        return (
            f"measured with fake tensors, forward and backward pass under FSDP: {deep}; the whole model {gib(self.whole)}, by "
            f"the account {gib(self.whole_accounted)} ({off:+.1%}); {self.seconds:.0f} s"
        )


def measure(training: Training, path: str | None, kwargs: Mapping[str, Any]) -> MeasuredMemory:
    """Follows a group's step.

    Args:
        training: How it trains; with any backend, what is followed is FSDP over as many ranks.
        path, kwargs: Its model.

    Raises:
        ConfigError: This PyTorch or transformers cannot build the model without contents.
        NotKnown: Nothing is known of the model.
    """
    begun = time.monotonic()
    config = dict(config_of(path, kwargs))
    plain = dataclasses.replace(
        training, backend="fsdp", sizes=MeshSizes(shard=training.ranks), lora=0, offload=False, reference=False, beside=0.0,
        logits=False, head=True, edges_apart=False, accelerated=True, eager=0,
    )  # fmt: skip
    peaks, accounted = {}, {}
    for layers in DEPTHS:
        shallow = {**config, "num_hidden_layers": layers}
        shallow.pop("layer_types", None)
        peaks[layers] = _peak(plain, shallow)
        accounted[layers] = accounted_bytes(dataclasses.replace(plain, size=size_of(path, config=shallow)))
    first, last = DEPTHS
    each = (peaks[last] - peaks[first]) / (last - first)
    whole = peaks[last] + each * (training.size.layers - last)
    return MeasuredMemory(peaks, accounted, whole, accounted_bytes(plain), time.monotonic() - begun)


def accounted_bytes(training: Training) -> float:
    """What the account says of that which is followed."""
    left_out = {"optimizer", "context and collectives"}
    return max(
        sum(term.nbytes for term in moment.terms if term.name not in left_out)
        for moment in training.moments()
        if moment.name != STEP
    )


def _peak(training: Training, config: Mapping[str, Any]) -> float:
    """Bytes that the tracker finds at most."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(str(config["model_type"]), **{k: v for k, v in config.items() if k != "model_type"})
    with _ranks(training.ranks), warnings.catch_warnings(), contextlib.ExitStack() as fake:
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (training.ranks,))  # reads numbers, which tensors without contents have not
        fake.enter_context(FakeTensorMode())
        try:
            model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="sdpa")
            model.config.use_cache = False
            if training.checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            trunk: nn.Module = model.base_model
            precision = (
                MixedPrecisionPolicy(torch.bfloat16, torch.float32) if training.mixed else MixedPrecisionPolicy()
            )
            parts = [*_layers(trunk), model]
            for part in parts:
                fully_shard(
                    part, mesh=mesh, mp_policy=precision, reshard_after_forward=training.reshard and part is not model
                )
            for part in parts:
                assert isinstance(part, FSDPModule)
                part.set_force_sum_reduction_for_comms(True)
            ids = torch.zeros(1, training.tokens, dtype=torch.long)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((ids,))
            with tracker:
                for _ in range(2):  # gradients of the first micro-batch are there in the second
                    tracker.reset_mod_stats()
                    model(input_ids=ids, logits_to_keep=1).logits.float().mean().backward()
            found = tracker.get_tracker_snapshot("peak")
        except (RuntimeError, ValueError, KeyError, AttributeError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"--measure: models of type {config.get('model_type')} cannot be followed: {reason}"
            ) from error
    return float(sum(_total(snapshot) for snapshot in found.values()))


def _total(snapshot: Mapping[Any, int]) -> int:
    """The tracker's own sum, or that of its parts."""
    return next(
        (n for kind, n in snapshot.items() if str(kind).rpartition(".")[2].lower() == "total"), sum(snapshot.values())
    )


def _layers(trunk: nn.Module) -> list[nn.Module]:
    """The decoder layers."""
    found = max((m for m in trunk.children() if isinstance(m, nn.ModuleList)), key=len, default=None)
    return [] if found is None else list(found)


@contextlib.contextmanager
def _ranks(number: int) -> Iterator[None]:
    """A process group of so many ranks, of which there is only this one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("--measure makes a process group of its own, and this process has one")
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
