"""Construction of the command line: the parser, its help, and arguments that several commands share."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import rlhpc
from rlhpc.runtime.similar_names import similar_names
from rlhpc.runtime.standard_streams import tell
from rlhpc.runtime.text import readable
from rlhpc.runtime.trust import FLAG

_Command = Callable[[argparse.Namespace], int]
_Argument = tuple[tuple[str, ...], Mapping[str, Any]]
_OVERRIDES = "key=value of the configuration, such as runner.max_steps=20; the value is YAML"
SITE = "site file of the cluster, by name or path (default: what RLHPC_SITE says)"
RESUME_WITH = "go on with a run although the configuration now says that something else is trained"
RUN = "run folder, or the run's configuration file (with the overrides it was started with)"


class _Parser(argparse.ArgumentParser):
    """argparse parser with the project's error format."""

    def error(self, message: str) -> NoReturn:
        tell(f"rlhpc: error: {readable(message)}; see {self.prog} --help")
        raise SystemExit(2)


class TopParser(_Parser):
    """Parser of `rlhpc` itself: its help groups the commands by purpose.

    Attributes:
        commands: The parser of each command, by name.
        groups: Title → commands, in the order in which the help shows them.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        super().__init__(prog="rlhpc", description="Reinforcement learning on batch-scheduled clusters.")
        self.groups = groups
        self.add_argument("--version", action="version", version=f"rlhpc {rlhpc.__version__}")
        self.subparsers: Any = self.add_subparsers(metavar="command", required=True, parser_class=_Parser)

    @property
    def commands(self) -> dict[str, argparse.ArgumentParser]:
        return dict(self.subparsers.choices)

    def format_help(self) -> str:
        summaries = {name: command.description or "" for name, command in self.commands.items()}
        grouped_names = [name for command_names in self.groups.values() for name in command_names]
        ungrouped_names = [name for name in summaries if name not in grouped_names]
        width = max(map(len, summaries)) + 4
        lines = ["usage: rlhpc command [arguments] [key=value …]", "", str(self.description), ""]
        for title, command_names in {**self.groups, **({"Other": ungrouped_names} if ungrouped_names else {})}.items():
            lines.append(f"{title}:")
            for name in command_names:
                summary_lines = textwrap.wrap(summaries[name], 100 - width)
                lines += [
                    f"  {name:<{width - 2}}{summary_lines[0]}",
                    *(" " * width + line for line in summary_lines[1:]),
                ]
            lines.append("")
        lines += [
            "rlhpc help COMMAND shows a command's arguments and examples; rlhpc --version, the version.",
            f"Documentation: {_find_documentation_page()}",
        ]
        return "\n".join(lines) + "\n"

    def suggestion(self, word: str) -> str:
        """Returns a hint at the command most similar to a word that is not a command; "" if no command is similar."""
        close_matches = similar_names(word, self.commands, 1, 0.5)
        return f"; did you mean rlhpc {close_matches[0]}?" if close_matches else ""

    def check_command(self, arguments: Sequence[str]) -> None:
        """Ends with an error for a command that does not exist, with a hint at the most similar command.

        argparse alone would list all commands in one long line.
        """
        if arguments and not arguments[0].startswith("-") and arguments[0] not in self.commands:
            self.error(f"there is no command {arguments[0]!r}{self.suggestion(arguments[0])}")


def documentation_root() -> str:
    """Returns the location of the documentation: the folder of a checkout, or the address in the installed package's
    metadata.
    """
    folder = Path(rlhpc.__file__).resolve().parents[1] / "docs"
    if (folder / "README.md").is_file():
        return str(folder)
    from importlib import metadata

    try:
        urls = dict(url.split(", ", 1) for url in metadata.metadata("rlhpc").get_all("Project-URL") or ())
    except metadata.PackageNotFoundError:
        urls = {}
    return (urls.get("Documentation") or urls.get("Homepage") or "docs").rstrip("/")


def _find_documentation_page() -> str:
    """Returns the first page of the documentation."""
    root = documentation_root()
    return root if "://" in root else f"{root}/README.md{'' if Path(root).is_absolute() else ' of the project'}"


def argument(*flag_names: str, **options: Any) -> _Argument:
    """Declares an argument of a command, with the parameters of `argparse.ArgumentParser.add_argument`."""
    return flag_names, options


def positionals(**help_by_name: str) -> list[_Argument]:
    """Declares positional arguments of a command, by name with their help texts, followed by the overrides."""
    return [
        *(argument(name, help=help_text) for name, help_text in help_by_name.items()),
        argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES),
    ]


#: Argument that allows code that a checkpoint names.
TRUST = argument(
    FLAG,
    action="store_true",
    help="import code that the checkpoint names (module:Class); for checkpoints of your own",
)
#: Arguments that name a checkpoint and the trust in its code, without an output and overrides.
CHECKPOINT = (
    argument("--checkpoint", help="checkpoint folder (global_step_<N>) of any run; with --run, best"),
    argument("--run", help=f"{RUN}; together with --step"),
    argument(
        "--step",
        help="global step of the checkpoint, latest or best (default: best where runner.keep_best keeps one, else latest)",
    ),
    TRUST,
)


def add_command(
    commands: Any, name: str, function: _Command, summary: str, examples: Sequence[str], *arguments: _Argument
) -> argparse.ArgumentParser:
    """Adds a command with its arguments to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(function=function, overrides=[])
    for flag_names, options in arguments:
        parser.add_argument(*flag_names, **options)
    return parser
