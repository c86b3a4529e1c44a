"""Commands that share runs and policies: `bundle`, `reproduce`, `push`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import run_paths
from rlhpc.cli.parser import RUN, SITE, add_command, argument, positionals
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.text import format_bytes

_EXAMPLES = {
    "bundle": (
        "rlhpc bundle runs/quickstart",
        "rlhpc bundle runs/quickstart -o quickstart.zip --checkpoints include --author 'A. Turing' --license CC-BY-4.0",
        "rlhpc bundle configs/quickstart.yaml runner.name=try -o folder",
    ),
    "reproduce": (
        "rlhpc reproduce quickstart.crate.zip",
        "rlhpc reproduce quickstart.crate.zip --trust",
        "rlhpc reproduce demo.zip --trust --into again --current-environment --input inputs/0-train.jsonl=data/train.jsonl",
    ),
    "push": (
        "rlhpc push runs/quickstart/export/global_step_360 me/cartpole",
        "rlhpc push runs/demo/export/global_step_480 my-lab/sums --public",
    ),
}


def _write_bundle(args: argparse.Namespace) -> int:
    from rlhpc.checkpoint.manifest import digest
    from rlhpc.publishing.bundle import write_bundle
    from rlhpc.publishing.contents import BundleOptions

    paths = run_paths(args.run, args.overrides)
    output = expand_home(args.output) if args.output else Path(f"{paths.root.name}.crate.zip")
    options = BundleOptions(args.checkpoints, args.inputs, args.code, args.author, args.license)
    record = write_bundle(paths, output, options)
    print(output)
    if output.is_file():
        num_bytes, checksum = digest(output)
        print(f"  {format_bytes(num_bytes)}, sha256 {checksum}")
    for line in _render_contents(record):
        print(f"  {line}")
    return 0


def _reproduce_run(args: argparse.Namespace) -> int:
    from rlhpc.publishing.reader import open_bundle
    from rlhpc.publishing.reproduce import ReproduceOptions, Reproduction

    inputs = [input_text.partition("=") for input_text in args.input]
    if unnamed_inputs := [name for name, _, path in inputs if not path]:
        raise ConfigError(f"--input is {unnamed_inputs[0]!r}; write NAME=PATH, with a name that rlhpc reproduce lists")
    environment = "install" if args.install else "current" if args.current_environment else "match"
    with open_bundle(expand_home(args.bundle)) as bundle:
        folder = expand_home(args.into) if args.into else Path("reproduced") / bundle.config["runner"]["name"]
        reproduction = Reproduction(
            bundle,
            ReproduceOptions(
                folder,
                environment,
                {name: expand_home(path) for name, _, path in inputs},
                [*(["--profile", args.profile] if args.profile else []), *(["--site", args.site] if args.site else [])],
            ),
        )
        print("\n".join(reproduction.render()), flush=True)
        if not args.trust:
            print("\nnothing was written or run; --trust sets it up and runs it")
            return 0
        print(flush=True)
        exit_code, result_comparison = reproduction.run()
    if result_comparison is None:
        print(f"\nthe run did not end well; to go on: cd {folder} && {shlex.join(reproduction.command)}")
        return exit_code
    print("\n".join(["", *result_comparison.render(), f"  {folder / 'reproduction.json'}"]))
    return int(not result_comparison.is_equal and not reproduction.difference_reasons)


def _push(args: argparse.Namespace) -> int:
    from rlhpc.publishing.hub import push_export

    print(push_export(expand_home(args.folder), args.repository, is_public=args.public, revision=args.revision))
    return 0


def _render_contents(record: dict[str, Any]) -> list[str]:
    """Returns lines with the contents of a bundle, and the missing contents."""
    lines = [f"step {record['global_step']} of {record['max_steps']}"]
    for code_entry in record["code"]:
        commit_text = f" at commit {code_entry['commit'][:12]}" if code_entry.get("commit") else ""
        changes_text = " with changes" if code_entry.get("dirty") else ""
        lines.append(f"code: {code_entry['role']}{commit_text}{changes_text}, {code_entry.get('files', 0)} files")
        if code_entry.get("missing"):
            lines.append(f"  not complete: {code_entry['missing']}")
    for name in ("inputs", "checkpoints"):
        if included_files := [record_entry for record_entry in record[name] if record_entry.get("included")]:
            lines.append(f"{name}: {len(included_files)} included")
        if num_referenced := len(record[name]) - len(included_files):
            lines.append(f"{name}: {num_referenced} by checksum (--{name} include takes the files)")
    if record["redactions"]:
        redactions_text = ", ".join(
            f"{num_redacted} × {redaction_kind}" for redaction_kind, num_redacted in record["redactions"].items()
        )
        lines.append(f"taken out of texts: {redactions_text}")
    if record["not_promised"]:
        lines.append(f"not the same bit for bit when repeated: {'; '.join(record['not_promised'])}")
    return lines


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "bundle",
        _write_bundle,
        "write a run with configuration, code, environment and results into one file without secrets (RO-Crate)",
        _EXAMPLES["bundle"],
        *positionals(run=RUN),
        argument("--output", "-o", metavar="FILE.zip", help="a .zip file, or a folder (default: NAME.crate.zip here)"),
        argument(
            "--checkpoints",
            choices=("reference", "include"),
            default="reference",
            help="checksums and sizes, or the files",
        ),
        argument(
            "--inputs",
            choices=("reference", "include"),
            default="reference",
            help="of data sets and models: checksums, or the files",
        ),
        argument(
            "--code",
            choices=("include", "commit"),
            default="include",
            help="the files of the commit, or its name; the changes are there in both cases",
        ),
        argument("--author", default="", help="who publishes the run"),
        argument("--license", default="", metavar="SPDX", help="licence of the bundle, such as CC-BY-4.0"),
    )
    add_command(
        commands,
        "reproduce",
        _reproduce_run,
        "show what a bundle would run and what differs here; with --trust, run it again and compare",
        _EXAMPLES["reproduce"],
        argument("bundle", metavar="BUNDLE", help="file or folder that rlhpc bundle has written"),
        argument("--trust", action="store_true", help="run the bundle's code; without it nothing is written or run"),
        argument("--into", metavar="DIR", help="new folder for the run (default: reproduced/NAME)"),
        argument("--install", action="store_true", help="install the bundle's packages with uv where they differ"),
        argument("--current-environment", action="store_true", help="go on with the packages that are here"),
        argument(
            "--input",
            action="append",
            default=[],
            metavar="NAME=PATH",
            help="where a data set or model is that the bundle has by checksum; may be repeated",
        ),
        argument("--profile", help="profile of the workflow, as of rlhpc run"),
        argument("--site", help=SITE),
    )
    add_command(
        commands,
        "push",
        _push,
        "upload an export with its model card to the Hugging Face hub, for you alone unless --public",
        _EXAMPLES["push"],
        argument("folder", metavar="EXPORT", help="folder that rlhpc convert has written"),
        argument("repository", metavar="OWNER/NAME", help="repository of the hub; made if it does not exist"),
        argument("--public", action="store_true", help="everybody may read it (default: only you and its owner)"),
        argument("--revision", metavar="BRANCH", help="branch (default: the main one)"),
    )
