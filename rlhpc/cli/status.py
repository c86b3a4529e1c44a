"""Commands that inspect runs: `status`, `watch`, `serve`, `logs`, `report`, `compare`."""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
from pathlib import Path
from typing import Any

from rlhpc.cli.arguments import check_file, check_folder, is_run, run_paths
from rlhpc.cli.parser import RUN, add_command, argument, positionals
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
        "rlhpc status configs/quickstart.yaml --test-alert runner.alerts.command=[logger,-t,rlhpc]",
    ),
    "serve": (
        "rlhpc serve",
        "rlhpc serve runs/cartpole-lr",
        "rlhpc serve runs --port 0",
    ),
    "watch": (
        "rlhpc watch",
        "rlhpc watch runs/quickstart runs/cartpole-lr",
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


def _print_status(args: argparse.Namespace) -> int:
    from rlhpc.jobs.state import find_runs
    from rlhpc.jobs.status import render_runs, render_status
    from rlhpc.metrics.provenance import read_provenance, resumes_with_changes
    from rlhpc.runs.headlines import run_headlines

    if args.test_alert:
        return _test_alert(args)
    folder = expand_home(args.run).absolute()
    if (sweep := sweep_paths(args.run, args.overrides)) is not None:
        print(render_sweep(sweep))
        return 0
    if folder.is_dir() and not args.overrides and not is_run(RunPaths(folder)) and any(find_runs(folder)):
        print(render_runs(folder, headlines=run_headlines))
        return 0
    print(
        render_status(
            run_paths(args.run, args.overrides),
            headlines=run_headlines,
            changed_resumes=lambda paths: resumes_with_changes(read_provenance(paths)),
        )
    )
    return 0


def _test_alert(args: argparse.Namespace) -> int:
    """Sends a test alert by the hooks of a configuration, without a record; prints the result."""
    from rlhpc.config.files import find_config
    from rlhpc.jobs.alerts import TEST, Alert, AlertTargets, delivery_errors
    from rlhpc.runs.configuration import load_config

    location = expand_home(args.run)
    config_source = RunPaths(location).config if location.is_dir() else find_config(args.run)
    cfg = load_config(config_source, args.overrides, check=False)
    targets = AlertTargets.from_config(cfg.runner.alerts)
    if not targets:
        raise ConfigError(
            f"{config_source}: runner.alerts has neither a command nor a webhook; set runner.alerts.command, or "
            "runner.alerts.webhook to ${oc.env:NAME}"
        )
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    alert = Alert(TEST, TEST, cfg.runner.name, str(paths.root), "a test, nothing has happened", reporter="user")
    errors = delivery_errors(alert, targets)
    hooks = [name for name, is_set in (("command", targets.command), ("webhook", targets.url)) if is_set]
    for error in errors:
        print(f"rlhpc: error: {error}", file=sys.stderr)
    for hook in hooks:
        if not any(error.startswith(f"runner.alerts.{hook}:") for error in errors):
            print(f"runner.alerts.{hook}: delivered: {alert.text}")
    return 1 if errors else 0


def _logs(args: argparse.Namespace) -> int:
    from rlhpc.jobs.status import print_logs

    if args.lines < 0:
        raise ConfigError(f"--lines is {args.lines}; it must be 0 or more")
    if args.rank is not None and args.rank < 0:
        raise ConfigError(f"--rank is {args.rank}; ranks count from 0")
    if args.start not in ("last", "all") and not (args.start.isdecimal() and int(args.start)):
        raise ConfigError(f"--start is {args.start!r}; allowed: 1, 2, …, last or all")
    print_logs(
        run_paths(args.run, args.overrides), group=args.group, rank=args.rank, follows=args.follow, num_lines=args.lines,
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


def _serve(args: argparse.Namespace) -> int:
    from rlhpc.live.server import RunsApp, default_socket, serve_on_port, serve_on_socket, stop_event

    if args.port is not None and not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; it must be between 0 and 65535, or 0 for any")
    folder = expand_home(args.folder)
    app, host = RunsApp(folder), socket.getfqdn()
    stop_request = stop_event()
    if args.port is not None:
        with contextlib.closing(app), serve_on_port(app, args.port) as address:
            print(f"{address}\nfrom your own machine: ssh -N -L PORT:127.0.0.1:PORT {host}, with this port", flush=True)
            stop_request.wait()
        return 0
    path = (expand_home(args.socket) if args.socket else default_socket(folder)).absolute()
    with contextlib.closing(app), serve_on_socket(app, path):
        print(
            f"serving {app.index.folder} on {path}\n"
            f"on your own machine: ssh -N -L 8080:{path} {host}\n"
            "then open http://localhost:8080 there; Ctrl-C here ends it",
            flush=True,
        )
        stop_request.wait()
    return 0


def _watch(args: argparse.Namespace) -> int:
    from rlhpc.live.run_index import RunIndex

    folders = [expand_home(folder) for folder in args.folders or ["runs"]]
    indices = [RunIndex(folder) for folder in folders]
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise ConfigError(f"watch needs a terminal; rlhpc status {folders[0]} prints the same once")
    from rlhpc.live.watch import WatchApp

    WatchApp(indices).run()
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "status",
        _print_status,
        "show where a run is, or all runs below a folder",
        _EXAMPLES["status"],
        *positionals(run=f"{RUN}; or a folder with runs below it"),
        argument("--test-alert", action="store_true", help="send a test alert by the hooks of runner.alerts instead"),
    )
    add_command(
        commands,
        "serve",
        _serve,
        "show runs in a browser while they train: curves, samples, videos, logs; read-only, without a daemon or a port",
        _EXAMPLES["serve"],
        argument("folder", nargs="?", default="runs", metavar="DIR", help="folder with the runs (default: runs)"),
        argument("--socket", metavar="PATH", help="UNIX socket (default: one in a folder that only you can open)"),
        argument(
            "--port",
            type=int,
            metavar="N",
            help="instead of a socket, a port of 127.0.0.1 with a token; 0 takes any",
        ),
    )
    add_command(
        commands,
        "watch",
        _watch,
        "show runs on one terminal screen while they train: states, progress, ranks, a curve, the end of a log",
        _EXAMPLES["watch"],
        argument("folders", nargs="*", metavar="DIR", help="run folders, or folders with runs (default: runs)"),
    )
    add_command(
        commands,
        "logs",
        _logs,
        "print the logs of a run's groups and ranks",
        _EXAMPLES["logs"],
        *positionals(run=RUN),
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
        *positionals(run=RUN),
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
