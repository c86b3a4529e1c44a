"""The `rlhpc` command. Each command imports heavy modules only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhpc.cli import (
    clean,
    config,
    data,
    doctor,
    evaluate,
    feedback,
    init,
    join,
    replay,
    robot,
    run,
    scale,
    status,
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
    "Look at a run": ("status", "logs", "report", "compare"),
    "Use a policy": ("eval", "play", "record", "pairs", "convert"),
    "Data": ("data", "replay", "dagger"),
    "This machine, this cluster": ("doctor", "clean", "completion", "help"),
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
        evaluate,
        data,
        replay,
        doctor,
        clean,
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
    for word in arguments:
        check_encoding(word)
    parser.check_command(arguments)
    further_arguments: list[str] = []
    if arguments and arguments[0] == "run" and "--" in arguments:  # the remainder is for Snakemake
        separator = arguments.index("--")
        arguments, further_arguments = arguments[:separator], arguments[separator + 1 :]
    args, remaining = parser.parse_known_args(arguments)
    args.further = further_arguments
    unknown = [argument for argument in remaining if argument.startswith("-") or "=" not in argument]
    if unknown:
        parser.error(f"unknown argument{'s' if len(unknown) > 1 else ''}: {' '.join(unknown)}")
    args.overrides = [*args.overrides, *remaining]
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

    def command() -> int:
        args = parse(argv)
        args.whole_process = argv is None  # the command may become another program
        return int(args.function(args))

    return report_errors(command)
