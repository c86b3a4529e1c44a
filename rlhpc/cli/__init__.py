"""The `rlhpc` command. Heavy modules are imported by the command that needs them, when it runs."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhpc.cli import (
    clean,
    config,
    data,
    doctor,
    feedback,
    init,
    join,
    policies,
    replay,
    robot,
    run,
    scale,
    start,
    tune,
    watch,
)
from rlhpc.cli.parser import TopParser, add_command
from rlhpc.cli.streams import silence_output, standard_streams, tell
from rlhpc.runtime.environment_values import masked
from rlhpc.runtime.errors import RlhpcError, UserError
from rlhpc.runtime.shown import readable
from rlhpc.runtime.storage import explained

__all__ = ["build_parser", "main", "parse", "reported"]

#: How `rlhpc --help` shows the commands.
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
    "Use a policy": ("eval", "record", "pairs", "convert"),
    "Data": ("data", "replay", "dagger"),
    "This machine, this cluster": ("doctor", "clean", "completion", "help"),
}


def build_parser() -> TopParser:
    """Builds the parser of the command line."""
    parser = TopParser(GROUPS)
    for part in (
        init,
        config,
        run,
        start,
        tune,
        join,
        robot,
        scale,
        feedback,
        watch,
        policies,
        data,
        replay,
        doctor,
        clean,
    ):
        part.add_commands(parser.subparsers)
    parser.commands["completion"].set_defaults(parser=parser)  # what it writes a script for

    def help_(args: argparse.Namespace) -> int:
        parser.check_command([args.command or "help"])
        print((parser.commands[args.command] if args.command else parser).format_help(), end="")
        return 0

    shown = add_command(
        parser.subparsers, "help", help_, "show the commands, or one command's arguments and examples",
        ("rlhpc help", "rlhpc help train"),
    )  # fmt: skip
    shown.add_argument("command", nargs="?", help="a command")
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line; overrides may stand anywhere, also after an option, where argparse gives up on them."""
    parser = build_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    parser.check_command(words)
    further: list[str] = []
    if words and words[0] == "run" and "--" in words:  # the rest is Snakemake's
        cut = words.index("--")
        words, further = words[:cut], words[cut + 1 :]
    args, rest = parser.parse_known_args(words)
    args.further = further
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unknown argument{'s' if len(unknown) > 1 else ''}: {' '.join(unknown)}")
    args.overrides = [*args.overrides, *rest]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 for what the user got wrong, 1 for what went wrong."""
    standard_streams()
    try:
        Path.cwd()
    except FileNotFoundError:
        tell("rlhpc: error: the working directory has been removed; change to one that exists")
        return 2
    args = parse(argv)
    args.whole_process = argv is None  # the command may become another program
    return reported(lambda: int(args.function(args)))


def reported(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; what it raises is printed as a message."""
    try:
        try:
            code = command()
            sys.stdout.flush()  # here, because an error at the interpreter's end is only printed
            return code
        except Exception as error:
            failure = explained(error, "this command", anyway=False)
            if failure is error:
                raise
            raise failure from error
    except RlhpcError as error:
        tell(f"rlhpc: error: {(readable if isinstance(error, UserError) else masked)(str(error))}")
        return error.exit_code
    except KeyboardInterrupt:
        tell("rlhpc: interrupted")
        return 130
    except BrokenPipeError:
        silence_output()
        return 141
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            silence_output()
            where = error.filename or "standard output, or a file of the run (metrics, logs, checkpoints)"
            tell(f"rlhpc: error: cannot write {where}: {error.strerror}")
            return 1
        if error.errno == errno.ENAMETOOLONG:  # the user named it: rlhpc's own names are shorter
            tell(f"rlhpc: error: {readable(f'{error.filename}: {error.strerror}')}")
            return 2
        return _fault(error)
    except Exception as error:
        return _fault(error)


def _fault(error: Exception) -> int:
    """Reports an error that nobody has foreseen: one line, and where to find the traceback."""
    if os.environ.get("RLHPC_DEBUG"):
        traceback.print_exception(error)
    where = "; ".join(getattr(error, "__notes__", ())) or "set RLHPC_DEBUG=1 for the traceback"
    words = f"{error}".splitlines()
    text = f"{type(error).__name__}: {masked(words[0]) if words else ''}"
    tell(f"rlhpc: error: {text} (a fault of rlhpc itself, or of code it called; {where})")
    return 1
