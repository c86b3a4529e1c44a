"""Data of other hosts: it lands in memory of this process, or in a segment that several processes of this host share."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlhpc.runtime.comm.landing import Landing
from rlhpc.runtime.comm.mappings import Mappings
from rlhpc.runtime.comm.offers import Withdrawn
from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.comm.pool import SegmentPool, default_idle
from rlhpc.runtime.comm.segments import HEADER, discard
from rlhpc.runtime.comm.share import Share, once_for_all
from rlhpc.runtime.comm.sockets import Peers
from rlhpc.runtime.errors import ChannelError
from rlhpc.runtime.scratch import Scratch

#: How long a host is given to have what it passes on, before it is asked for no more.
_PATIENCE_S = 10.0


class Above:
    """A process on another host that has the same data to pass on, at some time.

    Args:
        bulk: Where it serves data.

    Attributes:
        lost: It is gone, or had not got the data for too long: the owner is asked instead.
    """

    def __init__(self, bulk: str) -> None:
        self.bulk, self.lost = bulk, False


class Fetching:
    """Gets segments from the processes that wrote them.

    Args:
        scratch: The session's folders on this host.
        pool: For what this process fetches for others, too.
        mappings: For what another process fetched.
        peers: The ways to other hosts.
        check: Called while waiting; raises when the run has failed.
    """

    def __init__(
        self, scratch: Scratch, pool: SegmentPool, mappings: Mappings, peers: Peers, check: Callable[[], None]
    ) -> None:
        self._scratch, self._pool, self._mappings, self._peers, self._check = scratch, pool, mappings, peers, check
        self._landing = Landing(default_idle(scratch))

    def fetch(
        self,
        origin: Origin,
        path: str,
        size: int,
        reader: int,
        share: Share | None,
        *,
        own: bool,
        later: list[Callable[[], None]] | None = None,
        above: tuple[Above, str] | None = None,
        lock: bool = False,
    ) -> memoryview:
        """The data of a segment of another host; it is this process's until the last view of it is gone.

        Args:
            origin: Whose it is.
            path: The segment.
            size: Bytes of its data.
            reader: Which of its readers this is.
            share: Its place among the processes of this host that together are this reader.
            own: As `Mappings.lease` has it, for what is shared.
            later: Gets what to call once the reader is done with the data; by default it is called now.
            above: Who is asked first, and what it calls the data.
            lock: An accelerator of this process, if there is one, is to copy from there without the CPU's help.
        """

        def receive(memory: memoryview) -> None:
            target = memory[HEADER : HEADER + size]
            if above is None or not self._from_above(*above, target):
                self._peers.fetch(origin.bulk, path, HEADER, target)

            def release() -> None:
                self._peers.release(origin.bulk, path, reader)

            release() if later is None else later.append(release)

        if share is None:
            view = self._landing.take(HEADER + size, lock=lock)
            receive(view)
            return view

        def receive_for_all() -> str:
            here = self._pool.reserve(size, share.of, holders=share.holders)
            try:
                receive(memoryview(here.memory))
            except BaseException:
                for number in range(share.of):
                    discard(here.path, number)
                raise
            return here.path

        found = once_for_all(self._scratch.shm, share, receive_for_all, self._check)
        view = self._mappings.lease(found, share.number, own=own)
        if lock and own:
            self._mappings.lock(found)
        return view

    def _from_above(self, above: Above, name: str, target: memoryview) -> bool:
        """Whether the data came from a process that passes it on."""
        end = time.monotonic() + _PATIENCE_S
        try:
            while not above.lost:
                if self._peers.fetch(above.bulk, name, 0, target, offered=True):
                    return True
                above.lost = time.monotonic() > end
                self._check()
        except Withdrawn:  # this process came late, and will catch up
            return False
        except ChannelError:
            above.lost = True
        return False
