"""Getting started: `init` writes a project, `completion` what a shell needs to complete commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlhpc import share
from rlhpc.cli.parser import add_command
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import meant

_EXAMPLES = {
    "init": ("rlhpc init myproject", "rlhpc init myproject --config embodied/pendulum_sac"),
    "completion": (
        "rlhpc completion bash > ~/.local/share/bash-completion/completions/rlhpc",
        "rlhpc completion zsh > ~/.zfunc/_rlhpc",
    ),
}
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
| `{config}` | what is trained; all keys: `rlhpc help train`, the reference of the configuration |
| `configs/base/` | what it starts from |
| `configs/site/mycluster.yaml` | what your cluster calls things; `rlhpc doctor --site mycluster` checks it |
| `config/config.yaml` | which run the workflow makes |
| `profiles/` | where Snakemake runs its jobs |
| `runs/` | what comes out: `rlhpc status runs`, and a report in each run |

Environments, models and rewards of your own: a module beside the Snakefile, named `module:Class` in the configuration, with
`export PYTHONPATH=$PWD`.
"""


def _configs() -> dict[str, Path]:
    """The configurations that a project can start from, by name."""
    folder = share.path("configs")
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    return {name: path for name, path in found.items() if not name.startswith(("base/", "site/"))}


def _chain(path: Path) -> list[Path]:
    """The configuration, and the files that its `defaults:` name."""
    import yaml

    content = yaml.safe_load(path.read_text())
    before = [part for name in content.get("defaults") or () for part in _chain((path.parent / name).resolve())]
    sft = (content.get("workflow") or {}).get("sft")
    return [path, *before, *(_chain((path.parent / sft).resolve()) if sft else [])]


def project_files(name: str, config: str) -> dict[str, str]:
    """Names and content of a new project's files.

    Args:
        name: The project's name.
        config: Which configuration it starts from.

    Raises:
        ConfigError: There is no such configuration.
    """
    there = _configs()
    if config not in there:
        raise ConfigError(f"--config is {config!r}; {meant(config, there)}there are: {', '.join(there)}")
    root = share.root().resolve()
    files = {path.resolve().relative_to(root).as_posix(): path.read_text() for path in _chain(there[config])}
    for path in sorted(share.path("profiles").rglob("*.yaml")):
        text = path.read_text().replace("snakefile: workflow/Snakefile", "snakefile: Snakefile")
        files[path.relative_to(share.root()).as_posix()] = text
    main = f"configs/{config}.yaml"
    files |= {
        "configs/site/mycluster.yaml": share.path("configs", "site", "example.yaml").read_text(),
        "config/config.yaml": f"# What may also be given with --config.\nrun: {main}\n",
        "Snakefile": _SNAKEFILE,
        "README.md": _README.format(name=name, config=main),
        ".gitignore": "runs/\n.snakemake/\n",
    }
    return files


def _init(args: argparse.Namespace) -> int:
    folder = Path(args.folder).expanduser().absolute()
    files = project_files(folder.name, args.config)
    if there := [name for name in files if (folder / name).exists()]:
        raise ConfigError(f"{folder} has {there[0]} already; give another folder, nothing is overwritten")
    try:
        for name, text in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    print(f"{folder}: {len(files)} files\nnext: cd {args.folder} && rlhpc run configs/{args.config}.yaml")
    return 0


def _completion(args: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(args.parser, shell=args.shell))
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    init = add_command(
        commands, "init", _init, "write a new project: configuration, site file, profiles, Snakefile", _EXAMPLES["init"]
    )
    init.add_argument("folder", help="where")
    init.add_argument(
        "--config",
        default="quickstart",
        help="what it starts from, such as embodied/pendulum_sac (default: quickstart)",
    )
    init.set_defaults(overrides=[])
    completion = add_command(
        commands, "completion", _completion, "print a script by which a shell completes commands and options",
        _EXAMPLES["completion"],
    )  # fmt: skip
    completion.add_argument("shell", choices=_SHELLS, help="the shell")
    completion.set_defaults(overrides=[])
