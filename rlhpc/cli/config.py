"""`config`: JSON schema and description of configuration keys; translation of another project's configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import check_file
from rlhpc.cli.parser import add_command, argument, positionals
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.files import expand_home

_EXAMPLES = {
    "config": (
        "rlhpc config import RLinf/examples/embodiment/config/maniskill_ppo_mlp.yaml -o pick_cube.yaml",
        "rlhpc config import maniskill_sac_mlp.yaml runner.name=try > try.yaml",
        "rlhpc config show actor.optim.lr",
        "rlhpc config schema -o .rlhpc.schema.json",
    ),
}


def _config(args: argparse.Namespace) -> int:
    action = {"import": _import, "schema": _print_schema, "show": _show}[args.action]
    if args.action != "import" and args.overrides:
        raise ConfigError(f"rlhpc config {args.action} takes no key=value: {args.overrides[0]}")
    if args.action != "import" and args.ignore_unknown:
        raise ConfigError(f"rlhpc config {args.action} takes no --ignore-unknown, which is for rlhpc config import")
    return action(args)


def _print_schema(args: argparse.Namespace) -> int:
    import json

    from rlhpc.config.json_schema import SITE, site_schema, task_type_schema
    from rlhpc.runs.task_type import all_task_types, find_task_type

    output = check_file("--output", expand_home(args.output)) if args.output else None
    if args.subject == SITE:
        schema = site_schema()
    else:
        schema = task_type_schema(
            [
                task_type.keys
                for task_type in (all_task_types() if args.subject is None else [find_task_type(args.subject)])
            ]
        )
    _write(json.dumps(schema, indent=1, ensure_ascii=False) + "\n", output)
    return 0


def _show(args: argparse.Namespace) -> int:
    from rlhpc.config.reference import describe_key
    from rlhpc.runs.task_type import all_task_types

    if args.output:
        raise ConfigError("rlhpc config show prints; it takes no --output")
    if args.subject is None:
        raise ConfigError("rlhpc config show: name a key, such as actor.optim.lr")
    print(describe_key(args.subject, {task_type.name: task_type.keys for task_type in all_task_types()}))
    return 0


def _write(yaml_text: str, output: Path | None) -> None:
    """Writes a text to a file, or to standard output if `output` is None."""
    if output is None:
        print(yaml_text, end="")
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(yaml_text)


def _import(args: argparse.Namespace) -> int:
    import yaml

    from rlhpc.cli.foreign import format_config, format_report, translate
    from rlhpc.cli.foreign.hydra import compose
    from rlhpc.config.constraints import null_numbers
    from rlhpc.config.load import TASK
    from rlhpc.config.merge import ConfigLayers, parse_override
    from rlhpc.config.schema import typed_value
    from rlhpc.config.yaml_files import Scalar, WrittenScalars
    from rlhpc.runs.task_type import find_task_type

    if args.subject is None:
        raise ConfigError("rlhpc config import: name the other project's YAML file")
    path = expand_home(args.subject)
    output = check_file("--output", expand_home(args.output)) if args.output else None
    if output is not None and output.exists() and output.resolve() == path.resolve():
        raise ConfigError(f"--output is {output}, the file that is to be imported; choose another")
    composed_config = compose(path.resolve())
    translation = translate(composed_config, args.subject)
    if not args.ignore_unknown:
        translation.check_known_keys(args.subject, "RLinf")
    override_values = dict(map(parse_override, args.overrides))
    task_type = find_task_type(typed_value(override_values.get(TASK, translation.ours.get(TASK)), str))
    schema = task_type.schema
    for key, origin_keys in translation.origin.items():
        if (
            len(origin_keys) == 1
            and origin_keys[0] in composed_config.texts
            and translation.ours[key] == composed_config.leaves[origin_keys[0]]
        ):
            translation.ours[key] = typed_value(
                Scalar(translation.ours[key], composed_config.texts[origin_keys[0]]), schema.type_of(key)
            )
    for key, key_value in override_values.items():
        translation.ours[key], translation.origin[key] = typed_value(key_value, schema.type_of(key)), []
    config_text = format_config(translation, args.subject, "RLinf")
    # Refuses values whose type the key does not take, before anything is written.
    layers = ConfigLayers(schema, task_type.keys, null_numbers(task_type.keys.by_path))
    layers.add(yaml.load(config_text, WrittenScalars), args.subject)
    sys.stderr.write(
        format_report(
            translation,
            args.subject,
            "RLinf",
            composed_config.files,
            _describe_validity(config_text, str(output or args.subject), training=translation.training),
        )
    )
    _write(config_text, output)
    return 0


def _describe_validity(config_text: str, name: str, *, training: bool) -> str:
    """Describes whether rlhpc accepts the translated configuration, by the checks that every command makes."""
    command = "rlhpc plan" if training else "rlhpc eval"
    import tempfile

    from rlhpc.runs.configuration import load_config

    with tempfile.TemporaryDirectory(prefix="rlhpc-import-") as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(config_text)
        try:
            load_config(file, site="", training=training)
        except (ConfigError, PlacementError) as error:
            return f"{command} does not accept it yet: {str(error).replace(str(file), name)}"
    return f"its keys and values are right; {command} also looks at the files that they name"


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "config",
        _config,
        "explain a configuration key, write a JSON schema for editors, or translate a configuration of RLinf, key by key",
        _EXAMPLES["config"],
        argument(
            "action",
            choices=("import", "schema", "show"),
            help="import: translate a configuration of RLinf; schema: write the JSON schema of configuration files, by which "
            "editors complete and check them; show: explain a key",
        ),
        argument(
            "subject",
            nargs="?",
            metavar="subject",
            help="of import: the other project's YAML file, in its folder: the files of its `defaults:` are read, too; "
            "of schema: a task type, or site for site files (default: all task types); of show: a key or section",
        ),
        *positionals(),
        argument(
            "--ignore-unknown",
            action="store_true",
            help="import: leave out keys that the importer does not know (default: refuse the file)",
        ),
        argument("-o", "--output", help="file to write (default: standard output; the report goes to standard error)"),
    )
