"""Data of other hosts: it lands in memory of this process, or in a segment that several processes of this host share."""

from __future__ import annotations

from collections.abc import Callable

from rlhpc.runtime.comm.landing import Landing
from rlhpc.runtime.comm.mappings import Mappings
from rlhpc.runtime.comm.payload import Origin
from rlhpc.runtime.comm.pool import SegmentPool, default_idle
from rlhpc.runtime.comm.segments import HEADER, discard
from rlhpc.runtime.comm.share import Share, once_for_all
from rlhpc.runtime.comm.sockets import Peers
from rlhpc.runtime.scratch import Scratch


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
        """

        def receive(memory: memoryview) -> None:
            self._peers.fetch(origin.bulk, path, HEADER, memory[HEADER : HEADER + size])

            def release() -> None:
                self._peers.release(origin.bulk, path, reader)

            release() if later is None else later.append(release)

        if share is None:
            view = self._landing.take(HEADER + size)
            receive(view)
            return view

        def receive_for_all() -> str:
            here = self._pool.reserve(size, share.of)
            try:
                receive(memoryview(here.memory))
            except BaseException:
                for number in range(share.of):
                    discard(here.path, number)
                raise
            return here.path

        found = once_for_all(self._scratch.shm, share, receive_for_all, self._check)
        return self._mappings.lease(found, share.number, own=own)
