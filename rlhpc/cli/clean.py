"""`clean`: removes files that finished runs have left on this node."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rlhpc.cli.parser import SITE, add_command, argument
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.host import node_name

_EXAMPLES = {
    "clean": (
        "rlhpc clean",
        "srun --nodes=4 --ntasks-per-node=1 rlhpc clean",
        "srun --nodelist=gpu[01-04] --nodes=4 --ntasks-per-node=1 rlhpc clean --site mycluster",
    ),
}


def _clean(args: argparse.Namespace) -> int:
    from rlhpc.runtime.scratch import live, remove_stale

    if args.overrides:
        raise ConfigError(f"clean takes no key=value words: {' '.join(args.overrides)}")
    if site := args.site or os.environ.get("RLHPC_SITE"):
        from rlhpc.config import load_site

        if scratch := load_site(site).get("scratch"):
            os.environ["RLHPC_SCRATCH"] = str(expand_home(str(scratch)))
    node = node_name().split(".")[0]
    removed_paths, live_segments = remove_stale(), live()
    for path in removed_paths:
        print(f"{node}: removed {path}")
    for path in live_segments:
        print(f"{node}: left {path}, which a live run has")
    if not removed_paths and not live_segments:
        print(f"{node}: nothing to remove")
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "clean",
        _clean,
        "remove what your ended runs have left in this node's /tmp and /dev/shm",
        _EXAMPLES["clean"],
        argument("--site", help=f"{SITE}; its cluster.scratch is looked at, too"),
    )
