"""A process group of a sender and those who take in its weights: one rank's bucket goes to all others.

It is no part of torch's default group, which an engine or a trainer has for itself, and it meets in a store of the sender's
over the run's own sockets.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist

from rlhpc.runtime.comm.devices import own
from rlhpc.runtime.comm.store import ServiceStore
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded

_SHORTEST_S, _LONGEST_S = 0.0002, 0.02


class Group:
    """This process's end.

    Args:
        kind: `nccl` or `gloo`.
        members: Groups and ranks, the sender first.
        me: Which of them this is; the sender by default.
        name: As the sender has named it.
    """

    def __init__(
        self, kind: str, members: tuple[tuple[str, int], ...], me: tuple[str, int] | None = None, name: str = ""
    ) -> None:
        self.kind, self.members, self.name = kind, members, name or f"weights-{uuid.uuid4().hex}"
        self._rank = 0 if me is None else members.index(me)
        others = [f"{group}-{rank}" for group, rank in members if (group, rank) != members[self._rank]]
        self._whom = ", ".join(others if self._rank == 0 else others[:1])
        self._made: Any = None
        self._work: Any = None
        self._flat: torch.Tensor | None = None

    def memory(self, size: int) -> torch.Tensor:
        """Memory for a bucket, uint8."""
        device = own() if self.kind == "nccl" else None
        return torch.empty(size, dtype=torch.uint8) if device is None else device.empty(size)

    def begin(self, flat: torch.Tensor) -> None:
        """Begins to send a bucket, or to receive it; `settle` comes before the next."""
        made = self._form()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        try:
            self._flat, self._work = flat, made.broadcast([flat], options)
        except RuntimeError as error:
            raise self._lost(error) from error

    def settle(self) -> None:
        """Waits until it has been sent, or received.

        Raises:
            DeadlineExceeded: Somebody did not take part.
            ChannelError: Somebody was lost.
        """
        work, self._work = self._work, None
        if work is None:
            return
        context, pause = current(), _SHORTEST_S
        until = time.monotonic() + context.wait_deadline
        # NCCL's own wait is the stream's, not the host's, and would end the process where somebody is lost.
        while not work.is_completed():
            context.check()
            if time.monotonic() > until:
                self.end()
                raise DeadlineExceeded(
                    f"{context.name} waited {context.wait_deadline:.0f} s for {self._whom} in an update of weights by "
                    f"{self.kind}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        self._flat = None

    def end(self) -> None:
        """Ends it, without anybody else."""
        made, self._made, self._work, self._flat = self._made, None, None, None
        if made is not None and self.kind == "nccl":
            with contextlib.suppress(RuntimeError):
                made.abort()

    def _lost(self, error: RuntimeError) -> ChannelError:
        self.end()
        reason = str(error).strip().partition("\n")[0]
        return ChannelError(
            f"{current().name} lost {self._whom}, or one of these, in an update of weights by {self.kind}: {reason}"
        )

    def _form(self) -> Any:
        if self._made is None:
            context, rank, size = current(), self._rank, len(self.members)
            limit = min(context.wait_deadline, 1800)
            store = ServiceStore(context, self.members[0][0], self.name, limit, self.members[0][1])
            timeout = datetime.timedelta(seconds=limit)
            if self.kind == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._made = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._made = dist.ProcessGroupGloo(store, rank, size, timeout)
        return self._made
