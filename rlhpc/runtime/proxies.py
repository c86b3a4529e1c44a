"""Hosts that are reached without an HTTP proxy: this host, and the nodes of the run.

The standard library and Python 3.8 are enough: agents read this file without rlhpc being installed.
"""

from __future__ import annotations

import os
from typing import Iterable, Mapping  # noqa: UP035 (Python 3.8)

#: Names of this host, by which services and the endpoint are reached.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NAMES = ("no_proxy", "NO_PROXY")


def without_proxy(hosts: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns `no_proxy` and `NO_PROXY`, which libraries read by either name, each with the hosts of both variables and more
    hosts.

    Args:
        hosts: Names or addresses in addition to the loopback ones.
        environ: The present environment.
    """
    user_hosts = [host.strip() for name in _NAMES for host in environ.get(name, "").split(",")]
    no_proxy = "*" if "*" in user_hosts else ",".join(dict.fromkeys(filter(None, (*user_hosts, *LOOPBACK, *hosts))))
    return dict.fromkeys(_NAMES, no_proxy)
