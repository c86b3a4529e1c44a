"""`tune`: measures a run for a few steps, and recommends a placement of its groups."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from typing import Any

from rlhpc.cli.parser import SITE, add_command, argument, positionals
from rlhpc.runtime.errors import ConfigError

_EXAMPLES = (
    "rlhpc tune configs/quickstart.yaml",
    "rlhpc tune configs/quickstart.yaml --verify 3",
    "rlhpc tune configs/quickstart.yaml --max-staleness 1 --verify 3",
    "rlhpc tune configs/reasoning/demo.yaml actor.model.model_path=builtin:tiny --nodes 2 --gpus 4",
)


def _tune(args: argparse.Namespace) -> int:
    options = {"--nodes": (args.nodes, 1), "--gpus": (args.gpus, 0), "--verify": (args.verify, 0), "--steps": (args.steps, 3),
             "--max-staleness": (args.max_staleness, 0), "--samples": (args.samples, 1)}  # fmt: skip
    for name, (option_value, minimum) in options.items():
        if option_value is not None and option_value < minimum:
            raise ConfigError(f"{name} is {option_value}; it must be {minimum} or more")
    if not args.deadline > 0:
        raise ConfigError(f"--deadline is {args.deadline:g}; it must be more than 0 seconds")
    from rlhpc.cli.run import interrupt_on_signals
    from rlhpc.jobs.paths import RunPaths
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.tuning.tune import TuneRequest, render, tune

    start_time = time.monotonic()

    def print_line(message: str) -> None:
        print(f"rlhpc: [{time.monotonic() - start_time:.0f} s] {message}", file=sys.stderr, flush=True)

    request = TuneRequest(
        args.config, tuple(args.overrides), args.site, args.nodes, args.gpus, args.verify, args.max_staleness, args.samples,
        args.steps, args.deadline,
    )  # fmt: skip
    with interrupt_on_signals():
        record = tune(request, print_line)
    cfg = load_config(args.config, args.overrides, site=args.site, check=False)
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    command_words = [
        "rlhpc",
        "run",
        str(paths.tuned_config),
        *args.overrides,
        *(["--site", args.site] if args.site else []),
    ]
    print(render(record, str(paths.tuned_config), shlex.join(command_words)))
    return 0


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    add_command(
        commands,
        "tune",
        _tune,
        "measure a run for a few steps, and find where its groups should be",
        _EXAMPLES,
        *positionals(config="YAML file of the run"),
        argument("--nodes", type=int, metavar="N", help="place it on this many nodes (default: as configured)"),
        argument("--gpus", type=int, metavar="G", help="with this many accelerators each (default: as configured)"),
        argument("--verify", type=int, default=0, metavar="K", help="run the best K, too, and the configured one"),
        argument(
            "--max-staleness",
            type=int,
            metavar="K",
            help="consider algorithm.max_staleness up to this, which changes what is learned (default: as configured)",
        ),
        argument(
            "--samples", type=int, metavar="N", help="give the hours for so many samples (default: the whole run)"
        ),
        argument("--steps", type=int, default=10, help="steps of a short run that count (default 10)"),
        argument(
            "--deadline",
            type=float,
            default=1800.0,
            metavar="SECONDS",
            help="how long a short run may take (default 1800)",
        ),
        argument("--site", help=SITE),
    )
