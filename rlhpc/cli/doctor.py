"""`doctor`: checks whether a cluster meets the requirements of runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import check_file
from rlhpc.cli.parser import SITE, add_command, argument
from rlhpc.runtime.errors import ConfigError

_EXAMPLES = {
    "doctor": (
        "rlhpc doctor --site mycluster",
        "rlhpc doctor --site mycluster --folder /scratch/me/runs --nodes 16 --json doctor.json",
        "rlhpc doctor --nodes 0",
    ),
}


def _doctor(args: argparse.Namespace) -> int:
    from rlhpc.config import load_site
    from rlhpc.jobs.doctor import examine, render, to_json, worst_level

    if args.overrides:
        raise ConfigError(f"doctor takes no key=value words: {' '.join(args.overrides)}")
    if args.nodes < 0 or not args.start > 0:  # also refuses nan
        raise ConfigError("--nodes must be at least 0, and --start more than 0")
    if args.json:
        check_file("--json", Path(args.json))
    site = args.site or os.environ.get("RLHPC_SITE")
    section = load_site(site) if site else None
    lines = examine(section, Path(args.folder), start_s=args.start, max_nodes=args.nodes)
    print(render(lines))
    if args.json:
        Path(args.json).write_text(to_json(lines) + "\n")
    return int(worst_level(lines) == "fail")


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "doctor",
        _doctor,
        "check whether a cluster has what runs need, with small probe jobs",
        _EXAMPLES["doctor"],
        argument("--site", help=SITE),
        argument("--folder", default="runs", help="where runs are to be written (default: runs)"),
        argument("--nodes", type=int, default=8, help="nodes to probe in each partition (default 8; 0: no job)"),
        argument("--start", type=float, default=60.0, help="seconds to wait for a probe to start (default 60)"),
        argument("--json", help="file to write the findings to as well"),
    )
