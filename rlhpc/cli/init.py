"""New projects and shell completion: `init` writes a project, `completion` a script for the shell."""

from __future__ import annotations

import argparse
import contextlib
import os
import posixpath
import shlex
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from rlhpc import share
from rlhpc.cli.parser import add_command, argument, documentation_root
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.plugins import suggest_name
from rlhpc.runtime.text import short_repr

_EXAMPLES = {
    "init": (
        "rlhpc init myproject",
        "rlhpc init myproject --config reasoning/own",
        "rlhpc init myproject --config embodied/own",
        "rlhpc init --list",
    ),
    "completion": (
        "rlhpc completion bash > ~/.local/share/bash-completion/completions/rlhpc",
        "rlhpc completion zsh > ~/.zfunc/_rlhpc",
    ),
}
#: File of a project that names the run of its workflow.
_RUN = "config/config.yaml"
_SHELLS = ("bash", "zsh", "tcsh")
_SNAKEFILE = """# rlhpc's workflow on the run that config/config.yaml names; rules of your own go below.
#
#   snakemake --profile profiles/local
#   snakemake --profile profiles/slurm --config site=mycluster
from rlhpc.share import snakefile


configfile: "config/config.yaml"


module rlhpc:
    snakefile:
        snakefile()
    config:
        config


use rule * from rlhpc
"""
_README = """# {name}

```bash
rlhpc run {config}                        # train, evaluate, export, report; one bar
snakemake --profile profiles/local        # the same, as a workflow
snakemake --profile profiles/slurm --config site=mycluster
```

| | |
|---|---|
| `{config}` | the run; [all keys]({docs}/reference/config.md) |
{base}| `configs/site/mycluster.yaml` | [your cluster]({docs}/how-to/slurm.md); `rlhpc doctor --site mycluster` checks it |
| `config/config.yaml` | the run that the workflow makes |
| `profiles/` | where Snakemake runs its jobs |
| `runs/` | the results: `rlhpc status runs`, and a report in each run |

Environments, models and rewards of your own: a module beside the Snakefile, named `module:Class` in the configuration, with
`export PYTHONPATH=$PWD` ([how to extend rlhpc]({docs}/how-to/extend.md)). `rlhpc init --list` names projects that have some.
"""


_BASE_ROW = "| `configs/base/` | what it starts from |\n"


def _find_templates() -> dict[str, Path]:
    """Returns the folders of the example projects, which contain user code, by name.

    A folder holds only the files that are specific to the project.
    """
    folder = share.path("examples", "projects")
    return {
        file.parent.parent.relative_to(folder).as_posix(): file.parent.parent
        for file in sorted(folder.glob(f"*/*/{_RUN}"))
    }


def _find_configs() -> dict[str, Path]:
    """Returns the files of the configurations that a project can start from, by name."""
    folder = share.path("configs")
    paths = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    return {name: path for name, path in paths.items() if not name.startswith(("base/", "site/"))}


def _read_chain(name: str, files: dict[str, str]) -> dict[str, str]:
    """Returns the text of a configuration, and of all that its `defaults:` and `workflow.sft` name, by path.

    Args:
        name: Path of the configuration in the project.
        files: The project's own files, which have precedence over those of rlhpc.
    """
    yaml_text = files[name] if name in files else share.path(*PurePosixPath(name).parts).read_text()
    yaml_content = yaml.safe_load(yaml_text)
    sft = (yaml_content.get("workflow") or {}).get("sft")
    texts_by_name = {name: yaml_text}
    for base_name in (*(yaml_content.get("defaults") or ()), *([sft] if sft else [])):
        texts_by_name |= _read_chain(posixpath.normpath(posixpath.join(posixpath.dirname(name), base_name)), files)
    return texts_by_name


def project_files(name: str, config: str) -> dict[str, str]:
    """Returns the content of a new project's files, by name.

    Args:
        name: Name of the project.
        config: Configuration or example project that the new project starts from.

    Raises:
        ConfigError: The configuration does not exist.
    """
    configs, templates = _find_configs(), _find_templates()
    if config not in configs and config not in templates:
        file_names = [*templates, *configs]
        raise ConfigError(f"--config is {config!r}; {suggest_name(config, file_names)}allowed: {', '.join(file_names)}")
    template: dict[str, str] = {}
    run_config = f"configs/{config}.yaml"
    if folder := templates.get(config):
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
        template = {path.relative_to(folder).as_posix(): path.read_text() for path in paths}
        run_config = yaml.safe_load(template[_RUN])["run"]
    files = _read_chain(run_config, template)
    base_row = _BASE_ROW if any(name.startswith("configs/base/") for name in files) else ""
    for path in sorted(share.path("profiles").rglob("*.yaml")):
        snakefile_text = path.read_text().replace("snakefile: workflow/Snakefile", "snakefile: Snakefile")
        files[path.relative_to(share.root()).as_posix()] = snakefile_text
    files |= {
        "configs/site/mycluster.yaml": share.path("configs", "site", "example.yaml").read_text(),
        _RUN: f"# What may also be given with --config.\nrun: {run_config}\n",
        "Snakefile": _SNAKEFILE,
        "README.md": _README.replace("{name}", name).replace("{config}", run_config).replace("{base}", base_row),
        ".gitignore": "runs/\nmodels/\n.snakemake/\n__pycache__/\n",
        **template,
    }
    files["README.md"] = files["README.md"].replace("{docs}", documentation_root())
    return files


def _make_project_folder(folder_text: str | None) -> Path:
    """Returns the folder of a new project.

    Raises:
        ConfigError: The name is missing, or modules in it could not be imported.
    """
    if not folder_text:
        raise ConfigError(
            "init needs a folder: rlhpc init myproject; rlhpc init --list shows what it can start from; see rlhpc init --help"
        )
    folder = expand_home(folder_text).absolute()
    if os.pathsep in str(folder) or not str(folder).isprintable():
        raise ConfigError(
            f"{short_repr(str(folder))}: modules in it cannot be imported, because of {os.pathsep!r} or a character "
            "that is not printable in its name; give another folder"
        )
    return folder


def _check_free(folder: Path, file_names: Iterable[str]) -> None:
    """Checks that none of a new project's files exists.

    Raises:
        ConfigError: A file exists; the message names the first one.
    """
    for name in file_names:
        for ancestor in (folder / name, *(folder / name).parents):
            if os.path.lexists(ancestor) and (ancestor == folder / name or not ancestor.is_dir()):
                raise ConfigError(f"{ancestor} is there already; give another folder, nothing is overwritten")


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes all files, or none: if a file cannot be written, removes the files written before.

    Raises:
        ConfigError: Names the file or folder.
    """
    written_paths: list[Path] = []
    try:
        for name, file_content in files.items():
            target = folder / name
            for parent in reversed(target.parents):
                if not parent.is_dir():
                    parent.mkdir()
                    written_paths.append(parent)
            with target.open("x", encoding="utf-8") as file:
                written_paths.append(target)
                file.write(file_content)
    except BaseException as error:
        for path in reversed(written_paths):
            with contextlib.suppress(OSError):
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()
        if isinstance(error, OSError):
            raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
        raise


def _print_choices() -> int:
    """Prints the configurations and projects to start from, with the first sentence of each."""
    titles = {name: (folder / "README.md").read_text().splitlines()[0] for name, folder in _find_templates().items()}
    titles |= {name: path.read_text().splitlines()[0] for name, path in _find_configs().items()}
    width = max(map(len, titles))
    for name, line in titles.items():
        title = line.lstrip("# ") if line.startswith("#") else ""
        print(f"{name:<{width}}  {title.split('. ')[0].rstrip('.:')}")
    return 0


def _init(args: argparse.Namespace) -> int:
    if args.overrides:
        raise ConfigError(f"init takes no key=value words: {' '.join(args.overrides)}")
    if args.list:
        return _print_choices()
    folder = _make_project_folder(args.folder)
    files = project_files(folder.name, args.config)
    _check_free(folder, files)
    _write(folder, files)
    export_text = "export PYTHONPATH=$PWD && " if any(name.endswith(".py") for name in files) else ""
    print(f"{folder}: {len(files)} files; README.md says what they are")
    print(f"next: cd {shlex.quote(args.folder)} && {export_text}rlhpc run {yaml.safe_load(files[_RUN])['run']}")
    return 0


def _print_completion(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(args.parser, shell=args.shell))
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "init",
        _init,
        "write a new project: configuration, site file, profiles, Snakefile",
        _EXAMPLES["init"],
        argument("folder", nargs="?", help="where; nothing there is overwritten"),
        argument(
            "--config",
            default="quickstart",
            help="what it starts from: reasoning/own (data and a reward of your own), embodied/own (an environment of your "
            "own), or a configuration such as embodied/pendulum_sac (default: quickstart)",
        ),
        argument("--list", action="store_true", help="show what it can start from"),
    )
    add_command(
        commands,
        "completion",
        _print_completion,
        "print a script by which a shell completes commands and options",
        _EXAMPLES["completion"],
        argument("shell", choices=_SHELLS, help="the shell"),
    )
