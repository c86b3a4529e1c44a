"""`data`: inspects, merges, splits and converts datasets of trajectories."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import check_file, check_folder, require_positive
from rlhpc.cli.parser import add_command, argument
from rlhpc.runtime.errors import ConfigError

_EXAMPLES = (
    "rlhpc data info demos/push_cube.h5",
    "rlhpc data show demos/push_cube.h5 --output push_cube.html",
    "rlhpc data merge demos/round_0.h5 demos/round_1.h5 --output demos/all.h5",
    "rlhpc data split demos/all.h5 --parts 2 --output demos/halves",
    "rlhpc data convert demos/push_cube.h5 --to lerobot --videos --task 'push the cube' --output lerobot/push_cube",
)


def format_options(args: argparse.Namespace) -> Any:
    """Returns the options for writing a dataset, from the arguments in `FORMAT`.

    Raises:
        ConfigError: The frame rate is below 1.
    """
    from rlhpc.embodied.data.datasets import WriteOptions

    require_positive(args, "fps")
    return WriteOptions(args.to, args.fps, args.task, args.videos)


#: Options of LeRobot's datasets.
FORMAT = (
    argument("--fps", type=int, help="frames a second (LeRobot; default: as the sources or the environment have them)"),
    argument("--task", help="what is done in the episodes, in words (LeRobot; default: the environment's name)"),
    argument("--videos", action="store_true", help="pictures as mp4 instead of in the table (LeRobot)"),
)


def _data(args: argparse.Namespace) -> int:
    from rlhpc.embodied.data import datasets
    from rlhpc.embodied.data.datasets import page

    if args.overrides:
        raise ConfigError(f"rlhpc data takes no overrides ({args.overrides[0]})")
    require_positive(args, "parts", "episodes")
    options = format_options(args)
    if args.action == "info":
        print(json.dumps(datasets.inspect(args.paths), indent=1))
        return 0
    if not args.output:
        raise ConfigError(f"rlhpc data {args.action} needs --output")
    if args.action == "show":
        output = check_file("--output", Path(args.output))
        dataset_facts = datasets.inspect(args.paths)
        output.parent.mkdir(parents=True, exist_ok=True)
        episodes = itertools.islice(datasets.read(args.paths), args.episodes)
        output.write_text(page(", ".join(args.paths), dataset_facts, episodes))
        print(f"{output}: {min(args.episodes, dataset_facts['episodes'])} of {dataset_facts['episodes']} episodes")
        return 0
    if args.to == "hdf5" and args.action != "split":
        check_file("--output", Path(args.output))
    else:
        check_folder("--output", Path(args.output))
    if args.action == "split":
        for name, count in datasets.split(args.paths, args.output, args.parts, options):
            print(f"{name}: {count} episodes")
    else:
        print(f"{args.output}: {datasets.convert(args.paths, args.output, options)} episodes")
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "data",
        _data,
        "show, merge, split and convert datasets of trajectories",
        _EXAMPLES,
        argument("action", choices=("info", "show", "merge", "split", "convert"), help="what to do"),
        argument("paths", nargs="+", help="files of trajectories, folders of them, Minari's or LeRobot's datasets"),
        argument("--output", help="page (show), file (hdf5) or folder to write"),
        argument(
            "--to",
            choices=("hdf5", "lerobot", "minari"),
            default="hdf5",
            help="format (merge, split, convert): ManiSkill's HDF5 (default), LeRobot's v3.0, or Minari's",
        ),
        argument("--parts", type=int, default=2, help="datasets to deal the episodes out to (split; default 2)"),
        argument("--episodes", type=int, default=10, help="episodes to show (show; default 10)"),
        *FORMAT,
    )
