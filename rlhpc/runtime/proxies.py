"""Environment variables for HTTP proxies: requests to this host and to the nodes of the run use no proxy.

This module needs only the standard library and Python 3.8, because agents load it without an installation of rlhpc.
"""

from __future__ import annotations

import os
from typing import Iterable, Mapping  # noqa: UP035 (Python 3.8)

#: Names and addresses of this host.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NAMES = ("no_proxy", "NO_PROXY")


def without_proxy(hosts: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns values for `no_proxy` and `NO_PROXY`: the hosts of both variables, this host, and `hosts`.

    Sets both variables, because some libraries read one and some the other.

    Args:
        hosts: Names or addresses of further hosts.
        environ: Current environment.
    """
    user_hosts = [host.strip() for name in _NAMES for host in environ.get(name, "").split(",")]
    no_proxy = "*" if "*" in user_hosts else ",".join(dict.fromkeys(filter(None, (*user_hosts, *LOOPBACK, *hosts))))
    return dict.fromkeys(_NAMES, no_proxy)
