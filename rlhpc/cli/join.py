"""`join`: adds a rank to a running run, from any allocation that can connect to its driver."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from rlhpc.cli.arguments import run_paths
from rlhpc.cli.parser import RUN, add_command, argument, positionals
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.standard_streams import tell

_EXAMPLES = (
    "rlhpc join runs/reasoning --group rollout",
    "sbatch --partition=preempt --gres=gpu:1 --time=1:00:00 --wrap='rlhpc join runs/reasoning --group rollout'",
    "srun --ntasks=4 --gpus-per-task=1 rlhpc join runs/reasoning --group rollout",
    "sbatch --partition=preempt --cpus-per-task=8 --time=1:00:00 --wrap='rlhpc join runs/cartpole --group env'",
)
#: Signals after which a rank leaves, with their meaning.
_REASONS: dict[int, str] = {
    signal.SIGTERM: "its job is being ended (SIGTERM)",
    signal.SIGINT: "interrupted (Ctrl-C)",
    signal.SIGUSR1: "it was told to leave (SIGUSR1)",
    signal.SIGUSR2: "its job must end soon (SIGUSR2: walltime or preemption)",
}


def _join(args: argparse.Namespace) -> int:
    from rlhpc.jobs.state import SharedRunFiles
    from rlhpc.runtime.allocation import granted_cpus, visible_accelerators
    from rlhpc.runtime.joining import LeaveEvent, join_request, stay

    for name, option_value in (("--patience", args.patience), ("--accelerators", args.accelerators)):
        if option_value is not None and option_value < 0:
            raise ConfigError(f"{name} is {option_value}; it must be 0 or more")
    paths = run_paths(args.run, args.overrides)
    num_visible = len(visible_accelerators(os.environ))
    accelerators = min(num_visible, 1) if args.accelerators is None else args.accelerators
    if accelerators > num_visible:
        raise ConfigError(f"--accelerators is {accelerators}, and this process sees {num_visible}")
    num_threads = max(1, int(os.environ.get("SLURM_CPUS_PER_TASK", granted_cpus())))
    leave_event = LeaveEvent()
    for signal_number in _REASONS:
        signal.signal(signal_number, lambda signum, _: leave_event.set_reason(_REASONS[signum]))
    request, run_files = join_request(args.group, num_threads, accelerators), SharedRunFiles(paths)
    stay(
        paths.registry, request, leave_event, tell, run_files, patience_s=args.patience, await_driver=args.await_driver
    )
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "join",
        _join,
        "add a rank to a run that is under way, for as long as this allocation lasts",
        _EXAMPLES,
        *positionals(run=RUN),
        argument("--group", default="rollout", help="the group: rollout (default), or env in runs with simulators"),
        argument("--accelerators", type=int, help="how many the rank has (default: one, where this process sees any)"),
        argument(
            "--patience",
            type=float,
            default=600.0,
            metavar="SECONDS",
            help="how long to wait for the run's next driver when this one has ended, as after a requeue (default 600)",
        ),
        argument("--await-driver", action="store_true", help="wait as long for a first driver, if none is at work"),
    )
