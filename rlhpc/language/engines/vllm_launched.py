"""What a rank of a vLLM engine over several of our ranks must be told, and what vLLM must not do there.

vLLM's external launcher takes torch's default process group as it finds it: the engine's ranks, which have proven to each
other that they are of this run (`rlhpc.runtime.comm.gloo_auth`).
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.runtime.host import host_id

if TYPE_CHECKING:
    from rlhpc.language.engines.lockstep import Link


@contextmanager
def one_of_several(link: Link | None) -> Iterator[None]:
    """While vLLM builds the engine of this rank.

    - `RANK` and `LOCAL_RANK` are what it reads: a rank sees no accelerator but its own, which is its first.
    - The name of its process group becomes that of the shared memory by which ranks on one host add up what they computed:
      it must be the engine's own, and another on every host.
    - That shared memory has a name in /dev/shm, which is taken back once all have opened it: who is killed leaves nothing.
    - Who waits there never sleeps. Ranks that may be put on one core would wait for one that cannot run meanwhile, so these
      add up by gloo: vLLM does so where ranks have different names.
    - Its queue for messages between ranks would open a port that anybody may connect to. Nothing here sends by it.

    Args:
        link: To the engine's other ranks; None where there are none.
    """
    if link is None:
        yield
        return
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = link.ident.replace(":", "-").replace("/", "-")  # vLLM takes what comes behind the last colon
    if current_platform.is_cpu() and not cores_are_apart():
        name = f"{name}-{link.rank}"
    variables = {"RANK": str(link.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(link.size)}
    before = {name: os.environ.get(name) for name in variables}
    queues, launched = MessageQueue.create_from_process_group, ExecutorWithExternalLauncher._distributed_args

    def told(self: Any) -> tuple[str, int, int]:
        return f"rlhpc:{name}", link.rank, 0

    def none(*args: Any, **kwargs: Any) -> None:
        return None

    os.environ.update(variables)
    setattr(MessageQueue, "create_from_process_group", staticmethod(none))  # noqa: B010 (mypy knows its signature)
    setattr(ExecutorWithExternalLauncher, "_distributed_args", told)  # noqa: B010 (as above)
    _compile_no_lookup()
    try:
        yield
    finally:
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}-*-cpushm_*"):
            path.unlink(missing_ok=True)
        setattr(MessageQueue, "create_from_process_group", staticmethod(queues))  # noqa: B010 (as above)
        setattr(ExecutorWithExternalLauncher, "_distributed_args", launched)  # noqa: B010 (as above)
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def sees_all_cards(size: int) -> bool:
    """Returns whether this process's device mask shows as many accelerators as its engine has ranks.

    vLLM's own all-reduce takes the number of a rank for a place in that mask. Where there is no such place it fails, and NCCL
    has to add up.

    Args:
        size: Ranks of the engine.
    """
    from vllm.platforms import current_platform

    mask = os.environ.get(current_platform.device_control_env_var)
    return mask is None or len([device for device in mask.split(",") if device.strip()]) >= size


def cores_are_apart() -> bool:
    """Whether no two ranks of the default process group that are on one host may compute on the same core."""
    mine = (host_id(), frozenset(os.sched_getaffinity(0)))
    found: list[tuple[str, frozenset[int]]] = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    pairs = itertools.combinations(found, 2)
    return not any(host == other and cores & theirs for (host, cores), (other, theirs) in pairs)


def _compile_no_lookup() -> None:
    """A divided embedding finds its own tokens by a function that torch compiles, on a CPU by a compiler of C++: 15 seconds at
    the first step of every process, for two comparisons and a sum."""
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.platforms import current_platform

    compiled = vocab_parallel_embedding.get_masked_input_and_mask
    if current_platform.is_cpu():
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        setattr(vocab_parallel_embedding, "get_masked_input_and_mask", plain)  # noqa: B010 (mypy knows its signature)
