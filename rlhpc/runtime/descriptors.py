"""How many files and sockets a process may have open: the limit, and how near it is."""

from __future__ import annotations

import contextlib
import os
import resource
import select
from collections.abc import Iterable

from rlhpc.runtime.errors import ConfigError

#: With fewer the driver cannot start a rank.
LEAST = 64
#: Never ask for more: programs that close every descriptor they might have inherited would be busy for seconds, such as
#: older versions of srun.
_MOST = 65_536


def raise_limit() -> None:
    """Raises this process's soft limit to its hard one, within reason; its children inherit that.

    Raises:
        ConfigError: The hard limit is too low for a run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if 0 <= soft < LEAST:
        raise ConfigError(
            f"a process may open {soft} files here; a run needs {LEAST} or more. Raise the limit with ulimit -n, or have it "
            "raised (limits.conf)"
        )


def readable(descriptors: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Waits until one of the descriptors can be read or has ended; returns those of which that is true.

    `select.select` refuses descriptors beyond 1023, which a process with many open files has.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def crowded() -> bool:
    """Whether three quarters of this process's descriptors are in use: the kernel always gives out the lowest free one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    return soft != resource.RLIM_INFINITY and lowest >= soft * 3 // 4
