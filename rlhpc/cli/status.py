"""Commands that inspect runs: `status`, `logs`, `report`, `compare`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import check_file, check_folder, is_run, run_paths
from rlhpc.cli.parser import RUN, add_command, argument, words
from rlhpc.cli.sweep import render_sweep, sweep_paths
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, unwritable

_EXAMPLES = {
    "status": (
        "rlhpc status runs/quickstart",
        "rlhpc status runs",
        "rlhpc status runs/cartpole-lr",
        "rlhpc status configs/quickstart.yaml runner.name=try",
    ),
    "logs": (
        "rlhpc logs runs/quickstart",
        "rlhpc logs runs/quickstart --group env --rank 0 --follow",
    ),
    "report": (
        "rlhpc report runs/quickstart",
        "rlhpc report configs/quickstart.yaml runner.name=try",
    ),
    "compare": (
        "rlhpc compare runs/push-s1 runs/push-s2 runs/scratch-s1 runs/scratch-s2 --output compare.html",
        "rlhpc compare 'from demos=runs/push-s1' 'from scratch=runs/other' --output compare.html",
        "rlhpc compare runs/cartpole-lr",
    ),
}


def _status(args: argparse.Namespace) -> int:
    from rlhpc.jobs.state import find_runs
    from rlhpc.jobs.status import render_runs, render_status
    from rlhpc.runs.headlines import run_headlines

    folder = expand_home(args.run).absolute()
    if (sweep := sweep_paths(args.run, args.overrides)) is not None:
        print(render_sweep(sweep))
        return 0
    if folder.is_dir() and not args.overrides and not is_run(RunPaths(folder)) and any(find_runs(folder)):
        print(render_runs(folder, headlines=run_headlines))
        return 0
    print(render_status(run_paths(args.run, args.overrides), headlines=run_headlines))
    return 0


def _logs(args: argparse.Namespace) -> int:
    from rlhpc.jobs.status import print_logs

    if args.lines < 0:
        raise ConfigError(f"--lines is {args.lines}; it must be 0 or more")
    if args.rank is not None and args.rank < 0:
        raise ConfigError(f"--rank is {args.rank}; ranks count from 0")
    if args.start not in ("last", "all") and not (args.start.isdecimal() and int(args.start)):
        raise ConfigError(f"--start is {args.start!r}; allowed: 1, 2, …, last or all")
    print_logs(
        run_paths(args.run, args.overrides), group=args.group, rank=args.rank, follow=args.follow, lines=args.lines,
        start=args.start,
    )  # fmt: skip
    return 0


def _report(args: argparse.Namespace) -> int:
    from rlhpc.runs.report import write_report

    paths = run_paths(args.run, args.overrides)
    write_error = unwritable(paths.report.parent)
    if write_error and not args.curves:
        raise ConfigError(
            f"{paths.report}: {write_error}; --curves FOLDER writes the page, the pictures and the numbers elsewhere"
        )
    if args.curves:
        check_folder("--curves", Path(args.curves))
        from rlhpc.runs.report import write_curves

        for path in write_curves(paths, Path(args.curves)):
            print(path)
        print(write_report(paths, Path(args.curves) / "page.html"))
    if not write_error:
        print(write_report(paths))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from rlhpc.runs.compare import labels_of, write_comparison

    sweeps = {run_argument: sweep for run_argument in args.runs if (sweep := sweep_paths(run_argument)) is not None}
    single_sweep = sweeps.get(args.runs[0]) if len(args.runs) == 1 else None
    output = check_file("--output", Path(args.output or (single_sweep.page if single_sweep else "compare.html")))
    if single_sweep is not None:
        from rlhpc.runs.sweep_page import write_sweep_page

        print(write_sweep_page(single_sweep, output, args.suite, args.metric))
        return 0
    if args.metric is not None:
        raise ConfigError("--metric is for a sweep; name its folder, and nothing else")
    labelled_runs: list[tuple[str | None, RunPaths]] = []
    for run_argument in args.runs:
        if run_argument in sweeps:
            from rlhpc.runs.sweep import read_sweep

            record = read_sweep(sweeps[run_argument])
            # Other sweeps may vary the same keys.
            prefix = f"{record.get('name', run_argument)}: " if len(args.runs) > 1 else ""
            labelled_runs += [
                (f"{prefix}{run['label']}", sweeps[run_argument].run(run["name"])) for run in record["runs"]
            ]
            continue
        label, _, folder = run_argument.rpartition("=") if not Path(run_argument).exists() else ("", "", run_argument)
        labelled_runs.append((label or None, run_paths(folder)))
    print(write_comparison(labels_of(labelled_runs), output, args.suite))
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "status",
        _status,
        "show where a run is, or all runs below a folder",
        _EXAMPLES["status"],
        *words(run=f"{RUN}; or a folder with runs below it"),
    )
    add_command(
        commands,
        "logs",
        _logs,
        "print the logs of a run's groups and ranks",
        _EXAMPLES["logs"],
        *words(run=RUN),
        argument("--group", help="only this group"),
        argument("--rank", type=int, help="only this rank"),
        argument("--follow", "-f", action="store_true", help="go on printing what is added"),
        argument(
            "--start",
            default="last",
            metavar="N",
            help="only this start of the run: 1, 2, …, last or all (default last)",
        ),
        argument("--lines", "-n", type=int, default=50, help="last lines of each file (default 50)"),
    )
    add_command(
        commands,
        "report",
        _report,
        "write a run's report page",
        _EXAMPLES["report"],
        *words(run=RUN),
        argument(
            "--curves",
            help="folder to write the single plots to as well, and the page without links; where the run is not "
            "yours to write to, only there",
        ),
    )
    add_command(
        commands,
        "compare",
        _compare,
        "write a page that compares runs, with mean and spread over seeds",
        _EXAMPLES["compare"],
        argument(
            "runs",
            nargs="+",
            metavar="run",
            help="run folders, or the folder of a sweep; runs whose names differ in "
            "a number at the end are seeds of one thing, or say what they are as label=folder",
        ),
        argument("--output", help="the page (default: compare.html; of a sweep, in its folder)"),
        argument(
            "--suite", help="evaluation suite that is compared (default: the first that the runs are evaluated on)"
        ),
        argument("--metric", help="of a sweep: what is compared, such as eval/return_mean (default: what it says)"),
    )
