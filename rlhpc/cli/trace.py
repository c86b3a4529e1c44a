"""`trace`: records the next steps of a running run, or merges and exports the records of its ranks."""

from __future__ import annotations

import argparse
import io
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.cli.arguments import require_driver, run_paths
from rlhpc.cli.parser import RUN, add_command, argument
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home

if TYPE_CHECKING:
    from rlhpc.tracing.model import Trace

_EXAMPLES = (
    "rlhpc trace runs/cartpole --steps 3",
    "rlhpc trace runs/cartpole -o trace.json.gz",
    "rlhpc trace runs/cartpole -o trace.pftrace --only 10-12",
    "rlhpc trace runs/cartpole --open",
)
_MAX_STEPS = 100_000


def _trace(args: argparse.Namespace) -> int:
    paths = run_paths(args.run, args.overrides)
    if args.steps is not None:
        if args.output is not None or args.only is not None or args.open:
            raise ConfigError("--steps asks a run to record; merge what it has recorded with a second command, -o FILE")
        return _request_trace(paths, args.steps)
    if args.open:
        if args.output is not None:
            raise ConfigError("--open writes no file; give either --open or -o FILE")
        return _open(paths, args.only, args.port, args.socket)
    if args.output is None:
        raise ConfigError(
            f"say what to do: rlhpc trace {args.run} --steps 3 records, -o trace.json.gz merges, --open shows"
        )
    return _merge(paths, Path(args.output), args.only)


def _request_trace(paths: RunPaths, steps_text: str) -> int:
    from rlhpc.runtime.registry import GenerationFolder

    if not (steps_text.isascii() and steps_text.isdecimal() and 1 <= int(steps_text[:7]) <= _MAX_STEPS):
        raise ConfigError(f"--steps is {steps_text!r}; give a number from 1 to {_MAX_STEPS}")
    registry = GenerationFolder(require_driver(paths))
    registry.request_trace(int(steps_text))
    print(
        f"{paths.root.name}: its next {int(steps_text)} steps will be recorded from the step on that begins in some seconds; "
        f"then: rlhpc trace {paths.root} -o trace.json.gz"
    )
    return 0


def _read(paths: RunPaths, ranks: str | None) -> Trace:
    from rlhpc.config.constraints import parse_steps
    from rlhpc.tracing.read import read_trace

    steps = None if ranks is None else parse_steps(ranks)
    if ranks is not None and not steps:
        raise ConfigError(f"--only is {ranks!r}; write steps such as 10-12 or 3,7-9")
    return read_trace(paths.root, steps)


def _merge(paths: RunPaths, output: Path, ranks: str | None) -> int:
    from rlhpc.config.constraints import format_steps
    from rlhpc.tracing.export import export_trace, format_of

    format_of(output)
    trace = _read(paths, ranks)
    export_trace(trace, output)
    recorded_steps = trace.steps()
    num_spans = sum(len(track.spans) for track in trace.tracks)
    steps_text = f"steps {format_steps(recorded_steps)}" if recorded_steps else "no complete step"
    print(f"{output}: {steps_text}, {len(trace.tracks)} ranks, {num_spans} spans, {len(trace.flows)} messages")
    for clock in trace.clocks:
        if clock.error_ns:
            print(
                f"  clock of {clock.host}: {clock.offset_ns / 1e9:+.6f} s from the driver's, ± {clock.error_ns / 1e6:.3f} ms"
            )
    for track in trace.tracks:
        if track.dropped:
            print(f"  {track.name} dropped {track.dropped} spans and messages")
    return 0


def _open(paths: RunPaths, ranks: str | None, port: int | None, socket_path: str | None) -> int:
    """Serves Perfetto's interface with the trace, until Ctrl-C; writes no file."""
    from rlhpc.live.server import PerfettoApp, serve_on_port, serve_on_socket, stop_event
    from rlhpc.tracing.export import format_of

    if port is not None and socket_path is not None:
        raise ConfigError("--open takes either --port or --socket")
    if not 0 <= (port or 0) <= 65535:
        raise ConfigError(f"--port is {port}; it must be between 0 and 65535, or 0 for any")
    perfetto_file = io.BytesIO()
    format_of(Path("trace.pftrace"))(_read(paths, ranks), perfetto_file)
    app, stop_request = PerfettoApp(perfetto_file.getvalue()), stop_event()
    if socket_path is not None:
        path = expand_home(socket_path).absolute()
        with serve_on_socket(app, path):
            print(
                f"{path}\nfrom your own machine: ssh -N -L 8080:{path} {socket.getfqdn()}\n"
                "then open http://localhost:8080 there; Ctrl-C here ends it",
                flush=True,
            )
            stop_request.wait()
        return 0
    with serve_on_port(app, port or 0) as address:
        port_text = address.split(":")[2].partition("/")[0]
        print(
            f"{address}\nfrom your own machine: ssh -N -L {port_text}:127.0.0.1:{port_text} {socket.getfqdn()}\n"
            "then open the address there; Ctrl-C here ends it",
            flush=True,
        )
        stop_request.wait()
    return 0


def add_commands(commands: Any) -> None:
    """Adds the commands of this module to the command line."""
    add_command(
        commands,
        "trace",
        _trace,
        "record the next steps of a running run, or merge what its ranks have recorded",
        _EXAMPLES,
        argument("run", help=RUN),
        argument("--steps", metavar="N", help="record the next N steps of a run that is under way"),
        argument(
            "-o", "--output", metavar="FILE", help="merge into FILE: .json, .json.gz (Chrome) or .pftrace (Perfetto)"
        ),
        argument("--only", metavar="STEPS", help="merge or open only these steps, such as 10-12 or 3,7-9"),
        argument(
            "--open",
            action="store_true",
            help="show the merged trace in Perfetto's interface, served to your browser alone: on a port of 127.0.0.1 that "
            "asks for the token in the printed address and resets connections of other users (extra trace)",
        ),
        argument("--port", type=int, metavar="N", help="port of --open (default: any)"),
        argument("--socket", metavar="PATH", help="UNIX socket of --open in place of a port; only you can open it"),
    )
