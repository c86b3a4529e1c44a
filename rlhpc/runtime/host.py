"""Who this machine is: the one place that asks, for whoever compares hosts or names one."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path


def node_name() -> str:
    """What this machine calls itself, for messages and records."""
    return os.uname().nodename


def names_here(environ: Mapping[str, str]) -> frozenset[str]:
    """All that Slurm may call this node: its own name, in full and short, and what `SLURMD_NODENAME` says."""
    name = node_name()
    return frozenset({name, name.split(".")[0], environ.get("SLURMD_NODENAME", "")} - {""})


def host_id() -> str:
    """Identity of the machine whose shared memory and UNIX sockets this process can reach.

    `RLHPC_HOST_ID` overrides it, so that a test can make two hosts out of one.
    """
    return os.environ.get("RLHPC_HOST_ID") or _machine()


@functools.cache
def _machine() -> str:
    """Asked once: each message of this process begins with a look at whether it goes to another host."""
    return f"{node_name()}:{_boot_id()}"


@functools.cache
def process_space() -> str:
    """`name/boot id/pid namespace`: where a pid means the same process."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{node_name()}/{_boot_id()}/{namespace}"


@functools.cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
