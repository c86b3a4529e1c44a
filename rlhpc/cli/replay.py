"""`replay`: inspects, merges and splits replay buffers of off-policy runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import require_positive
from rlhpc.cli.parser import add_command, argument
from rlhpc.runtime.errors import ConfigError

_EXAMPLES = {
    "replay": (
        "rlhpc replay inspect runs/pendulum_sac/checkpoints/global_step_60",
        "rlhpc replay merge runs/a/checkpoints/global_step_60 runs/b/checkpoints/global_step_60 --output prior",
        "rlhpc replay split prior --parts 4 --output pieces",
    ),
}


def _replay(args: argparse.Namespace) -> int:
    from rlhpc.embodied.data import replay_buffer

    if args.overrides:
        raise ConfigError(f"rlhpc replay takes no overrides ({args.overrides[0]})")
    if args.action != "merge" and len(args.folders) > 1:
        raise ConfigError(
            f"rlhpc replay {args.action} takes one folder, {len(args.folders)} are given; merge them first"
        )
    require_positive(args, "parts")
    if args.action == "inspect":
        print(json.dumps(replay_buffer.inspect(args.folders[0]), indent=1))
        return 0
    if not args.output:
        raise ConfigError(f"rlhpc replay {args.action} needs --output FOLDER")
    if args.action == "merge":
        print(f"{args.output}: {replay_buffer.merge(args.folders, args.output)} transitions")
        return 0
    for index, count in enumerate(replay_buffer.split(args.folders[0], args.output, args.parts)):
        print(f"{Path(args.output) / str(index)}: {count} transitions")
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "replay",
        _replay,
        "inspect, merge and split replay buffers",
        _EXAMPLES["replay"],
        argument("action", choices=("inspect", "merge", "split"), help="what to do"),
        argument("folders", nargs="+", help="checkpoints of off-policy runs, or folders that merge and split wrote"),
        argument("--output", help="folder to write (merge, split)"),
        argument("--parts", type=int, default=2, help="parts to split into, oldest first (default 2)"),
    )
