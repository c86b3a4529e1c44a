"""`config import`: translates a configuration of another project."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import check_file
from rlhpc.cli.parser import add_command, add_words
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home

_EXAMPLES = {
    "config": (
        "rlhpc config import RLinf/examples/embodiment/config/maniskill_ppo_mlp.yaml -o pick_cube.yaml",
        "rlhpc config import maniskill_sac_mlp.yaml runner.name=try > try.yaml",
    ),
}


def _import(args: argparse.Namespace) -> int:
    from rlhpc.cli.foreign import report, translate, written
    from rlhpc.cli.foreign.hydra import compose
    from rlhpc.config.load import TASK
    from rlhpc.config.merge import parse_override
    from rlhpc.config.schema import typed_value
    from rlhpc.config.yaml_files import Scalar
    from rlhpc.runs.task_type import find_kind

    path = expand_home(args.file)
    output = check_file("--output", expand_home(args.output)) if args.output else None
    if output is not None and output.exists() and output.resolve() == path.resolve():
        raise ConfigError(f"--output is {output}, the file that is to be imported; choose another")
    composed = compose(path.resolve())
    translation = translate(composed, args.file)
    changes = dict(map(parse_override, args.overrides))
    schema = find_kind(typed_value(changes.get(TASK, translation.ours.get(TASK)), str)).schema
    for key, keys in translation.origin.items():
        if len(keys) == 1 and keys[0] in composed.texts and translation.ours[key] == composed.leaves[keys[0]]:
            translation.ours[key] = typed_value(
                Scalar(translation.ours[key], composed.texts[keys[0]]), schema.kind(key)
            )
    for key, value in changes.items():
        translation.ours[key], translation.origin[key] = typed_value(value, schema.kind(key)), []
    text = written(translation, args.file, "RLinf")
    sys.stderr.write(report(translation, args.file, "RLinf", composed.files, _verdict(text, str(output or args.file))))
    if output is None:
        print(text, end="")
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    return 0


def _verdict(text: str, name: str) -> str:
    """Returns whether the result is valid in rlhpc, by the checks of every command."""
    import tempfile

    from rlhpc.runs.configuration import load_config

    with tempfile.TemporaryDirectory(prefix="rlhpc-import-") as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(text)
        try:
            load_config(file, site="")
        except ConfigError as error:
            return f"rlhpc plan does not accept it yet: {str(error).replace(str(file), name)}"
    return "its keys and values are right; rlhpc plan also looks at the files that they name"


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    config = add_command(
        commands, "config", _import, "translate a configuration of RLinf, and say key by key what is left out",
        _EXAMPLES["config"],
    )  # fmt: skip
    config.add_argument("action", choices=("import",), help="what to do")
    add_words(config, file="the other project's YAML file, in its folder: the files of its `defaults:` are read, too")
    config.add_argument(
        "-o", "--output", help="file to write (default: standard output; the report goes to standard error)"
    )
