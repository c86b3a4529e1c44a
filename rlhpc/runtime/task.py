"""A rank that is a task of a job step: what it is told, when it ends, which devices are its own.

It reads its instructions from its standard input, which stays open: when the driver or its srun is gone, however they died,
the input ends and the rank with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import threading
from collections.abc import Callable, Mapping, Sequence

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.spec import WorkerSpec

_LENGTH = struct.Struct("!Q")
#: What a joined rank reads when it is to leave.
LEAVE = b"L"


def for_input(specs: Sequence[WorkerSpec]) -> bytes:
    """Encodes the instructions for the tasks of a step, in order."""
    body = pickle.dumps(list(specs))
    return _LENGTH.pack(len(body)) + body


def read_specs(stream: int) -> list[WorkerSpec]:
    """Reads what `for_input` encoded.

    Raises:
        EOFError: The driver is gone.
    """

    def exactly(size: int) -> bytes:
        parts = []
        while size:
            part = os.read(stream, min(size, 1 << 20))
            if not part:
                raise EOFError("the driver was gone before it said what to do")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    specs: list[WorkerSpec] = pickle.loads(exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0]))
    return specs


def end_with_input(stream: int, leave: Callable[[], None], told: Callable[[], bool] = lambda: True) -> None:
    """Ends this process as soon as its input ends, because the driver or srun is gone; calls `leave` before.

    Args:
        stream: The input.
        leave: See above.
        told: Called when the input says `LEAVE`: whether this process ends by itself then. Otherwise it ends at once.
    """

    def watch() -> None:
        why = b"the driver of this run is gone; this rank ends\n"
        while True:
            try:
                said = os.read(stream, 4096)
            except OSError:
                break
            if not said:
                break
            if LEAVE in said and not told():
                why = b"this rank was told to leave, and has nothing under way; it ends\n"
                break
        with contextlib.suppress(OSError):  # a full disk
            os.write(2, why)
        with contextlib.suppress(Exception):
            leave()
        os._exit(1)

    threading.Thread(target=watch, name="rlhpc-lifeline", daemon=True).start()


def own_devices(spec: WorkerSpec, environ: Mapping[str, str], visible: Sequence[str]) -> str:
    """The rank's `CUDA_VISIBLE_DEVICES`: index i is the i-th device that this step was given on this node.

    Raises:
        ConfigError: The step was given fewer devices than the placement needs.
    """
    if not spec.accelerators:
        return ""
    if not visible and "CUDA_VISIBLE_DEVICES" not in environ:
        return ",".join(str(i) for i in spec.accelerators)  # the site masks nothing
    if max(spec.accelerators) >= len(visible):
        raise ConfigError(
            f"{spec.name} on node {spec.node} is placed on accelerator {max(spec.accelerators)}, but the step was given "
            f"{len(visible)} there (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r})"
        )
    return ",".join(visible[i] for i in spec.accelerators)
