"""The `rlhpc` command. Each command imports heavy modules only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.cli import (
    config,
    data,
    evaluate,
    feedback,
    init,
    join,
    machine,
    robot,
    run,
    scale,
    share,
    status,
    trace,
    train,
    tune,
)
from rlhpc.cli.parser import TopParser, add_command, argument
from rlhpc.runtime.exit_codes import report_errors
from rlhpc.runtime.files import check_encoding
from rlhpc.runtime.known_warnings import quiet_known_warnings
from rlhpc.runtime.standard_streams import standard_streams, tell

__all__ = ["build_parser", "main", "parse"]

#: Groups of commands in `rlhpc --help`.
GROUPS = {
    "Train": (
        "init",
        "config",
        "run",
        "plan",
        "tune",
        "train",
        "submit",
        "join",
        "robot",
        "scale",
        "feedback",
        "cancel",
    ),
    "Look at a run": ("status", "watch", "serve", "logs", "report", "compare", "trace"),
    "Share a run": ("bundle", "reproduce", "push"),
    "Use a policy": ("eval", "check-policy", "play", "record", "pairs", "convert"),
    "Data": ("data", "replay", "dagger"),
    "This machine, this cluster": ("doctor", "explain", "clean", "pack", "completion", "help"),
}


def build_parser() -> TopParser:
    """Builds the parser of the command line."""
    parser = TopParser(GROUPS)
    for module in (
        init,
        config,
        run,
        train,
        tune,
        join,
        robot,
        scale,
        feedback,
        status,
        trace,
        share,
        evaluate,
        data,
        machine,
    ):
        module.add_commands(parser.subparsers)
    parser.commands["completion"].set_defaults(parser=parser)  # the parser that the shell script completes

    def show_help(args: argparse.Namespace) -> int:
        parser.check_command([args.command or "help"])
        print((parser.commands[args.command] if args.command else parser).format_help(), end="")
        return 0

    add_command(
        parser.subparsers, "help", show_help, "show the commands, or one command's arguments and examples",
        ("rlhpc help", "rlhpc help train"), argument("command", nargs="?", help="a command"),
    )  # fmt: skip
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line; overrides may stand anywhere, even after an option, where
    argparse alone does not accept them.
    """
    parser = build_parser()
    arguments = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    for user_argument in arguments:
        check_encoding(user_argument)
    parser.check_command(arguments)
    further_arguments: list[str] = []
    if arguments and arguments[0] == "run" and "--" in arguments:  # the remainder is for Snakemake
        separator = arguments.index("--")
        arguments, further_arguments = arguments[:separator], arguments[separator + 1 :]
    args, remaining_arguments = parser.parse_known_args(arguments)
    args.further = further_arguments
    unknown_arguments = [
        user_argument
        for user_argument in remaining_arguments
        if user_argument.startswith("-") or "=" not in user_argument
    ]
    if unknown_arguments:
        parser.error(f"unknown argument{'s' if len(unknown_arguments) > 1 else ''}: {' '.join(unknown_arguments)}")
    args.overrides = [*args.overrides, *remaining_arguments]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 for a mistake of the user, 1 for a failure."""
    standard_streams()
    quiet_known_warnings()
    try:
        Path.cwd()
    except FileNotFoundError:
        tell("rlhpc: error: the working directory has been removed; change to one that exists")
        return 2

    def run_command() -> int:
        args = parse(argv)
        args.whole_process = argv is None  # the command may become another program
        return int(args.function(args))

    return report_errors(run_command)
