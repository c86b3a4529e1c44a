"""`data` and `replay`: inspect, measure, merge, split and convert datasets of trajectories, and replay buffers."""

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
    "rlhpc data stats lerobot/pusht --output norm_stats.json",
    "rlhpc data merge demos/round_0.h5 demos/round_1.h5 --output demos/all.h5",
    "rlhpc data split demos/all.h5 --parts 2 --output demos/halves",
    "rlhpc data convert demos/push_cube.h5 --to lerobot --videos --task 'push the cube' --output lerobot/push_cube",
)
_REPLAY_EXAMPLES = (
    "rlhpc replay inspect runs/pendulum_sac/checkpoints/global_step_60",
    "rlhpc replay merge runs/a/checkpoints/global_step_60 runs/b/checkpoints/global_step_60 --output prior",
    "rlhpc replay split prior --parts 4 --output pieces",
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
    if args.action == "stats":
        output = check_file("--output", Path(args.output))
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(datasets.norm_stats(args.paths), indent=1) + "\n")
        print(f"{output}: statistics of state and actions")
        return 0
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
        for name, num_episodes in datasets.split(args.paths, args.output, args.parts, options):
            print(f"{name}: {num_episodes} episodes")
    else:
        print(f"{args.output}: {datasets.convert(args.paths, args.output, options)} episodes")
    return 0


def _replay(args: argparse.Namespace) -> int:
    from rlhpc.embodied.data import replay_buffer

    if args.overrides:
        raise ConfigError(f"rlhpc replay takes no overrides ({args.overrides[0]})")
    if args.action != "merge" and len(args.folders) > 1:
        raise ConfigError(
            f"rlhpc replay {args.action} takes one folder, {len(args.folders)} are given; merge them first"
        )
    require_positive(args, "parts")
    if args.action == "inspect":
        print(json.dumps(replay_buffer.inspect(args.folders[0]), indent=1))
        return 0
    if not args.output:
        raise ConfigError(f"rlhpc replay {args.action} needs --output FOLDER")
    if args.action == "merge":
        print(f"{args.output}: {replay_buffer.merge(args.folders, args.output)} transitions")
        return 0
    for index, num_transitions in enumerate(replay_buffer.split(args.folders[0], args.output, args.parts)):
        print(f"{Path(args.output) / str(index)}: {num_transitions} transitions")
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "data",
        _data,
        "show, measure, merge, split and convert datasets of trajectories",
        _EXAMPLES,
        argument("action", choices=("info", "show", "stats", "merge", "split", "convert"), help="what to do"),
        argument("paths", nargs="+", help="files of trajectories, folders of them, Minari's or LeRobot's datasets"),
        argument("--output", help="page (show), JSON (stats), file (hdf5) or folder to write"),
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
    add_command(
        commands,
        "replay",
        _replay,
        "inspect, merge and split replay buffers",
        _REPLAY_EXAMPLES,
        argument("action", choices=("inspect", "merge", "split"), help="what to do"),
        argument("folders", nargs="+", help="checkpoints of off-policy runs, or folders that merge and split wrote"),
        argument("--output", help="folder to write (merge, split)"),
        argument("--parts", type=int, default=2, help="parts to split into, oldest first (default 2)"),
    )
