"""Commands for this machine and this cluster: `doctor`, `explain`, `clean` and `pack`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rlhpc import troubleshooting
from rlhpc.cli.arguments import check_file
from rlhpc.cli.parser import SITE, add_command, argument, documentation_root
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.host import node_name
from rlhpc.runtime.text import format_bytes

_EXAMPLES = {
    "doctor": (
        "rlhpc doctor --site mycluster",
        "rlhpc doctor --site mycluster --folder /scratch/me/runs --nodes 16 --json doctor.json",
        "rlhpc doctor --nodes 0",
    ),
    "explain": (
        "rlhpc explain",
        "rlhpc explain no-usable-gpu",
        "rlhpc explain 'actor.optim.lr is -1.0; it must be above 0 and at most 10'",
        "rlhpc logs runs/try --group rollout | rlhpc explain -",
    ),
    "clean": (
        "rlhpc clean",
        "srun --nodes=4 --ntasks-per-node=1 rlhpc clean",
        "srun --nodelist=gpu[01-04] --nodes=4 --ntasks-per-node=1 rlhpc clean --site mycluster",
    ),
    "pack": ("rlhpc pack ~/environment.tar", "rlhpc pack /lustre/project/rlhpc.tar"),
}
#: Maximum number of characters that are read from standard input: the end of a log is enough.
_MAX_CHARACTERS = 1 << 20


def _run_doctor(args: argparse.Namespace) -> int:
    from rlhpc.config import load_site
    from rlhpc.jobs.doctor import examine, render, to_json, worst_level

    if args.overrides:
        raise ConfigError(f"doctor takes no key=value words: {' '.join(args.overrides)}")
    if args.nodes < 0 or not args.start > 0:  # also refuses nan
        raise ConfigError("--nodes must be at least 0, and --start more than 0")
    if args.json:
        check_file("--json", Path(args.json))
    site = args.site or os.environ.get("RLHPC_SITE")
    section = load_site(site) if site else None
    lines = examine(section, Path(args.folder), start_s=args.start, max_nodes=args.nodes)
    print(render(lines))
    if args.json:
        Path(args.json).write_text(to_json(lines) + "\n")
    return int(worst_level(lines) == "fail")


def _explain(args: argparse.Namespace) -> int:
    message_words = [*args.message, *args.overrides]  # a pasted message may look like an override
    if not message_words:
        width = max(len(known_cause.slug) for known_cause in troubleshooting.causes())
        for chapter, causes in troubleshooting.CHAPTERS.items():
            print(
                "\n".join(
                    [f"{chapter}:", *(f"  {known_cause.slug:<{width}}  {known_cause.title}" for known_cause in causes)]
                )
            )
        return 0
    message_text = sys.stdin.read()[-_MAX_CHARACTERS:] if message_words == ["-"] else " ".join(message_words)
    cause = troubleshooting.find_by_slug(message_text.strip()) or troubleshooting.find_by_message(
        _find_error(message_text)
    )
    if cause is None:
        raise ConfigError(
            "no explanation fits this text; rlhpc explain without arguments lists all. Give the complete message, from "
            "'rlhpc: error:' on"
        )
    print(troubleshooting.render(cause, documentation_root()))
    return 0


def _find_error(log_text: str) -> str:
    """Returns the first error message in an output, because the first failure is the cause; without one, the text."""
    prefix, *messages = log_text.split("rlhpc: error:")
    return messages[0] if messages else prefix


def _clean(args: argparse.Namespace) -> int:
    from rlhpc.jobs.shared_probe import remove_unused_folders
    from rlhpc.runtime.environment_archive import remove_unused
    from rlhpc.runtime.scratch import live, remove_stale

    if args.overrides:
        raise ConfigError(f"clean takes no key=value words: {' '.join(args.overrides)}")
    if site := args.site or os.environ.get("RLHPC_SITE"):
        from rlhpc.config import load_site

        if scratch_root := load_site(site).get("scratch"):
            os.environ["RLHPC_SCRATCH"] = str(expand_home(str(scratch_root)))
    node = node_name().split(".")[0]
    removed_paths, live_segments = [*remove_stale(), *remove_unused(), *remove_unused_folders()], live()
    for path in removed_paths:
        print(f"{node}: removed {path}")
    for path in live_segments:
        print(f"{node}: left {path}, which a live run has")
    if not removed_paths and not live_segments:
        print(f"{node}: nothing to remove")
    return 0


def _pack(args: argparse.Namespace) -> int:
    from rlhpc.runtime.environment_archive import KEY, pack

    if args.overrides:
        raise ConfigError(f"pack takes no key=value words: {' '.join(args.overrides)}")
    archive = expand_home(args.file)
    environment = pack(archive)
    interpreter_note = ", with its interpreter" if environment.base else ""
    print(f"{archive}: {environment.num_files} files of {environment.prefix}{interpreter_note}, "
          f"{format_bytes(environment.num_bytes)} on each node")  # fmt: skip
    print(f"use it with {KEY}={archive}")
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "doctor",
        _run_doctor,
        "check whether a cluster has what runs need, with small probe jobs",
        _EXAMPLES["doctor"],
        argument("--site", help=SITE),
        argument("--folder", default="runs", help="where runs are to be written (default: runs)"),
        argument("--nodes", type=int, default=8, help="nodes to probe in each partition (default 8; 0: no job)"),
        argument("--start", type=float, default=60.0, help="seconds to wait for a probe to start (default 60)"),
        argument("--json", help="file to write the findings to as well"),
    )
    add_command(
        commands,
        "clean",
        _clean,
        "remove what your ended runs have left in this node's /tmp and /dev/shm",
        _EXAMPLES["clean"],
        argument("--site", help=f"{SITE}; its cluster.scratch is looked at, too"),
    )
    add_command(
        commands,
        "pack",
        _pack,
        "write this Python environment to one file, which the nodes of a run unpack (cluster.environment_archive)",
        _EXAMPLES["pack"],
        argument("file", help="archive to write, on a filesystem that all nodes share"),
    )
    add_command(
        commands,
        "explain",
        _explain,
        "explain an error message: its cause, how to see it, what to do",
        _EXAMPLES["explain"],
        argument(
            "message", nargs="*", help="name of an explanation, a pasted message, or - to read one from standard input"
        ),
    )
