"""The lane: how tensors stay on an accelerator from the process that sends them to those that compute on the same one.

Where one of these cannot read them after all, they come through the host.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any

from rlhpc.runtime.comm.crossings import Crossing
from rlhpc.runtime.comm.device_mappings import DeviceMappings, Elsewhere
from rlhpc.runtime.comm.device_pool import DevicePool
from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.comm.queues import Taker
from rlhpc.runtime.comm.serialization import rebuild_tensor
from rlhpc.runtime.comm.sockets import Peers, choose
from rlhpc.runtime.scratch import Scratch

#: Seconds for the sender's service to copy a message to the host.
_DEADLINE_S = 60.0

#: `(origin, path, bytes)` -> memory laid out as a segment.
Read = Callable[[Origin, str, int], memoryview]


class Lane:
    """This process's ends of it.

    Args:
        scratch: The session's folders on this host.
        endpoint: This process's service.
        peers: The ways to other processes.
        read: Reads a segment, of this host or another.

    Attributes:
        pool: What it sends from.
        takers: Where the ranks that it has sent to compute.
    """

    def __init__(self, scratch: Scratch, endpoint: dict[str, str], peers: Peers, read: Read) -> None:
        self.pool = DevicePool(scratch, endpoint)
        self._mappings = DeviceMappings(self.pool.local)
        self._peers, self._read = peers, read
        self.takers: dict[tuple[str, int], Taker] = {}

    @property
    def crossed(self) -> int:
        """Messages of this process whose tensors stayed on the accelerator."""
        return self.pool.crossed

    def to(self, takers: Iterable[Taker]) -> DevicePool | None:
        """What to send from to these; None if it does not reach all of them, as far as is known."""
        found = False
        for host, device in takers:
            if not device or not self.pool.reaches(host, device):
                return None
            found = True
        return self.pool if found else None

    def settle(self) -> None:
        """Gives back what has been copied by now; called before this process waits."""
        if not self._mappings.reading:
            return
        with contextlib.suppress(RuntimeError):  # of an accelerator that has failed; who uses it will say so
            self._mappings.settle()

    def park(self) -> None:
        """Gives back what messages take of the accelerator, and closes what is other processes'."""
        self._mappings.park()
        self.pool.park()

    def forget(self) -> None:
        """After other ranks died: what was sent and not read yet never will be, and ranks may be elsewhere."""
        self.pool.forget()
        self.takers.clear()

    def close(self) -> None:
        """Ends everything."""
        with contextlib.suppress(RuntimeError):
            self._mappings.park()
        self.pool.forget()

    def land(self, crossing: Crossing, origin: Origin, reader: int) -> list[Any]:
        """The tensors of a message, on this process's accelerator, or on the CPU if it has none.

        Raises:
            SegmentGone: The sender has ended, or has forgotten the message.
            ChannelError: The same, of a sender that was asked for a copy on the host.
        """
        try:
            return self._mappings.take(crossing, reader)
        except Elsewhere as error:
            return self._through_the_host(crossing, origin, reader, str(error))

    def _through_the_host(self, crossing: Crossing, origin: Origin, reader: int, why: str) -> list[Any]:
        body = pickle.dumps((crossing.path, reader, why))
        whom = "the sender of a message to copy it from its accelerator"
        reply = self._peers.request(choose(crossing.endpoint), b"TO_HOST", [body], _DEADLINE_S, whom)
        path, start = pickle.loads(reply[0])
        view = self._read(origin, path, crossing.size)[start:]
        return [
            rebuild_tensor(view[part.offset : part.offset + part.nbytes], part.dtype, part.shape, "", False, False)
            for part in crossing.parts
        ]
