"""`scale`: requests a number of ranks from separate jobs for a running run."""

from __future__ import annotations

import argparse
from typing import Any

from rlhpc.cli.arguments import require_driver, run_paths
from rlhpc.cli.parser import RUN, add_command, argument
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError

_EXAMPLES = ("rlhpc scale runs/reasoning rollout=8", "rlhpc scale runs/reasoning rollout=auto")
_AUTO = "auto"


def _scale(args: argparse.Namespace) -> int:
    from rlhpc.jobs.elastic.records import HelperRecord, read_stays
    from rlhpc.jobs.shared_files import read_json_file, write_json

    paths = run_paths(args.run)
    bounds = _bounds(paths)
    requested_ranks = {
        group: num_requested
        for request_word in (args.number, *args.overrides)
        for group, num_requested in [_parse_request(request_word, bounds)]
    }
    require_driver(paths)
    previous_requests = {
        group: num_requested
        for group, num_requested in (read_json_file(paths.requested_ranks) or {}).items()
        if group in bounds
    }
    all_requests = {**previous_requests, **requested_ranks}
    write_json(
        paths.requested_ranks,
        {group: num_requested for group, num_requested in all_requests.items() if num_requested is not None},
    )
    live_jobs = HelperRecord.read(paths).live()
    for group, num_requested in requested_ranks.items():
        num_present = sum(rank_stay.left_at is None and rank_stay.group == group for rank_stay in read_stays(paths))
        num_queued = sum(job.started is None and job.group == group for job in live_jobs)
        number_text = "as many as the rule says" if num_requested is None else f"{num_requested}"
        print(
            f"{paths.root.name}: {number_text} ranks of {group} are asked for; {num_present} there, {num_queued} jobs "
            f"in the queue"
        )
    return 0


def _bounds(paths: RunPaths) -> dict[str, tuple[int, int]]:
    """Returns each group's minimum and maximum number of ranks, from the run's configuration.

    Raises:
        ConfigError: The run accepts no ranks from separate jobs.
    """
    from rlhpc.config.yaml_files import UniqueKeys
    from rlhpc.runtime.cluster import read_key
    from rlhpc.runtime.files import read_yaml

    bounds_content: Any = {}
    if paths.config.is_file():
        bounds_content = read_yaml(paths.config.read_bytes(), UniqueKeys)
    helper_sections = read_key(read_key(bounds_content, "cluster"), "elastic", ())
    bounds = {
        str(read_key(helper_section, "group", "rollout")): (int(helper_section["min"]), int(helper_section["max"]))
        for helper_section in helper_sections
    }
    if not bounds:
        raise ConfigError(
            f"{paths.root.name} takes no ranks from jobs of their own: start it with cluster.elastic, or add some by hand "
            f"(rlhpc join {paths.root})"
        )
    return bounds


def _parse_request(group_request: str, bounds: dict[str, tuple[int, int]]) -> tuple[str, int | None]:
    group, _, number_text = group_request.partition("=")
    if group not in bounds:
        raise ConfigError(f"{group_request}: groups of this run that can be scaled: {', '.join(bounds)}")
    if number_text == _AUTO:
        return group, None
    min_ranks, max_ranks = bounds[group]
    if not number_text.isascii() or not number_text.isdigit() or not min_ranks <= int(number_text) <= max_ranks:
        raise ConfigError(
            f"{group_request}: give a number from {min_ranks} to {max_ranks} (cluster.elastic), or {group}={_AUTO}"
        )
    return group, int(number_text)


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "scale",
        _scale,
        "ask a run that is under way for a number of ranks from jobs of their own",
        _EXAMPLES,
        argument("run", help=RUN),
        argument(
            "number",
            metavar="group=N",
            help="how many ranks besides those that the run started with, within min and max of cluster.elastic; `auto` gives "
            "the number back to the rule",
        ),
    )
