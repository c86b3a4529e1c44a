"""`scale`: requests a number of ranks from separate jobs for a running run."""

from __future__ import annotations

import argparse
from typing import Any

from rlhpc.cli.arguments import require_driver, run_paths
from rlhpc.cli.parser import RUN, add_command
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError

_EXAMPLES = ("rlhpc scale runs/reasoning rollout=8", "rlhpc scale runs/reasoning rollout=auto")
_AUTO = "auto"


def _scale(args: argparse.Namespace) -> int:
    from rlhpc.jobs.elastic.records import HelperRecord, stays
    from rlhpc.jobs.shared_files import read_json_file, write_json

    paths = run_paths(args.run)
    bounds = _bounds(paths)
    requested = {
        group: number for word in (args.number, *args.overrides) for group, number in [_parse_request(word, bounds)]
    }
    require_driver(paths)
    before = {group: number for group, number in (read_json_file(paths.asked_ranks) or {}).items() if group in bounds}
    all_requests = {**before, **requested}
    write_json(paths.asked_ranks, {group: number for group, number in all_requests.items() if number is not None})
    live = HelperRecord.read(paths).live()
    for group, number in requested.items():
        num_present = sum(stay.left_at is None and stay.group == group for stay in stays(paths))
        queued = sum(job.started is None and job.group == group for job in live)
        number_text = "as many as the rule says" if number is None else f"{number}"
        print(
            f"{paths.root.name}: {number_text} ranks of {group} are asked for; {num_present} there, {queued} jobs in the queue"
        )
    return 0


def _bounds(paths: RunPaths) -> dict[str, tuple[int, int]]:
    """Returns group → minimum and maximum number of ranks, from the run's configuration.

    Raises:
        ConfigError: The run accepts no ranks from separate jobs.
    """
    from rlhpc.config.yaml_files import UniqueKeys
    from rlhpc.runtime.cluster import read_key
    from rlhpc.runtime.files import read_yaml

    content: Any = {}
    if paths.config.is_file():
        content = read_yaml(paths.config.read_bytes(), UniqueKeys)
    entries = read_key(read_key(content, "cluster"), "elastic", ())
    bounds = {str(read_key(raw, "group", "rollout")): (int(raw["min"]), int(raw["max"])) for raw in entries}
    if not bounds:
        raise ConfigError(
            f"{paths.root.name} takes no ranks from jobs of their own: start it with cluster.elastic, or add some by hand "
            f"(rlhpc join {paths.root})"
        )
    return bounds


def _parse_request(word: str, bounds: dict[str, tuple[int, int]]) -> tuple[str, int | None]:
    group, _, text = word.partition("=")
    if group not in bounds:
        raise ConfigError(f"{word}: groups of this run that can be scaled: {', '.join(bounds)}")
    if text == _AUTO:
        return group, None
    min_ranks, max_ranks = bounds[group]
    if not text.isascii() or not text.isdigit() or not min_ranks <= int(text) <= max_ranks:
        raise ConfigError(
            f"{word}: give a number from {min_ranks} to {max_ranks} (cluster.elastic), or {group}={_AUTO}"
        )
    return group, int(text)


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    scale = add_command(
        commands, "scale", _scale, "ask a run that is under way for a number of ranks from jobs of their own", _EXAMPLES
    )  # fmt: skip
    scale.add_argument("run", help=RUN)
    scale.add_argument(
        "number", metavar="group=N",
        help="how many ranks besides those that the run started with, within min and max of cluster.elastic; `auto` gives the "
        "number back to the rule",
    )  # fmt: skip
