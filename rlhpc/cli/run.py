"""`run`: trains, evaluates, exports and reports; shorthand for the Snakemake command, with a progress display."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc import share
from rlhpc.cli.arguments import describe_saved
from rlhpc.cli.parser import RESUME_WITH, SITE, add_command, argument, positionals
from rlhpc.jobs.paths import RunPaths, refuse_braces
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.plugins import suggest_name
from rlhpc.runtime.standard_streams import tell

if TYPE_CHECKING:
    from rlhpc.cli.follow import Track, WorkflowFollower, WorkflowLog
    from rlhpc.cli.sweep import SweepFollower
    from rlhpc.config.sections import RunConfig
    from rlhpc.runs.sweep import Sweep

_EXAMPLES = (
    "rlhpc run configs/quickstart.yaml",
    "rlhpc run configs/quickstart.yaml runner.name=second runner.seed=2",
    "rlhpc run configs/embodied/cartpole_het.yaml --profile slurm --site mycluster",
    "rlhpc run configs/quickstart.yaml 'sweep={grid: {actor.optim.lr: [3e-4, 1e-3]}, seeds: [1, 2, 3]}'",
    "rlhpc run configs/quickstart.yaml -n",
    "rlhpc run configs/quickstart.yaml -- --forcerun report",
)
_POLL_S = 0.3
#: Function that ends the processes of a workflow after an interrupt, and returns the exit code.
Stop = Callable[["subprocess.Popen[bytes]", KeyboardInterrupt], int]
#: Seconds that a driver may take to save after Ctrl-C.
_SAVE_S = 600.0


class Interrupted(KeyboardInterrupt):
    """Interrupt by a signal.

    Attributes:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def find_profile(name: str) -> str:
    """Returns the folder of a profile, from its path or from its name in `./profiles` or in rlhpc.

    For a profile of the user or the site, returns the name, which Snakemake finds.

    Raises:
        ConfigError: The profile does not exist.
    """
    folder = expand_home(name)
    if folder.is_dir():
        return str(folder)
    if os.sep in name:
        raise ConfigError(f"--profile is {name}: there is no such folder")
    local_profile, packaged_profile = Path.cwd() / "profiles" / name, share.path("profiles", name)
    # A profile determines what Snakemake runs: another user's profile in a shared folder is not used.
    if local_profile.is_dir() and local_profile.stat().st_uid in (0, os.getuid()):
        return str(local_profile)
    if packaged_profile.is_dir():
        return str(packaged_profile)
    config_homes = [
        os.environ.get("XDG_CONFIG_HOME") or "~/.config",
        *os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"),
    ]
    if any((expand_home(config_home) / "snakemake" / name).is_dir() for config_home in config_homes if config_home):
        return name  # Snakemake finds it there
    profile_names = sorted(path.name for path in share.path("profiles").iterdir())
    raise ConfigError(
        f"--profile is {name!r}; {suggest_name(name, profile_names)}there are: {', '.join(profile_names)}, a folder's "
        "path, and what lies in ~/.config/snakemake or /etc/xdg/snakemake"
    )


def snakemake_command(args: argparse.Namespace) -> list[str]:
    """Returns the command line of Snakemake."""
    config = [
        f"run={args.config}",
        f"overrides={json.dumps(args.overrides, ensure_ascii=False)}",
        *([f"site={args.site}"] if args.site else []),
        *(["resume_with=true"] if args.resume_with else []),
    ]
    further_arguments = [*args.further]
    if "--config" in further_arguments:  # of several, Snakemake reads only the last
        index = further_arguments.index("--config") + 1
        further_arguments[index:index] = config
    else:
        separator = ["--"] if further_arguments[:1] and further_arguments[0][0] != "-" else []
        further_arguments = ["--config", *config, *separator, *further_arguments]
    return [
        sys.executable, "-P", "-m", "snakemake", "--snakefile", share.snakefile(),
        "--profile", find_profile(args.profile), *(["--dry-run"] if args.dry_run else []), *further_arguments,
    ]  # fmt: skip


def same_command(args: argparse.Namespace) -> str:
    """Returns the command line that repeats this command.

    Under make, the command line names the program by its path, because the user's PATH may not contain rlhpc.
    """
    script = Path(sys.argv[0])
    is_under_make = os.environ.get("MAKELEVEL") and script.name == "rlhpc" and script.is_file()
    program = os.path.relpath(script) if is_under_make else "rlhpc"
    return shlex.join(
        [
            program,
            "run",
            args.config,
            *args.overrides,
            *(["--profile", args.profile] if args.profile != "local" else []),
            *(["--site", args.site] if args.site else []),
            *(["--resume-with"] if args.resume_with else []),
            *(["--", *args.further] if args.further else []),
        ]
    )


def _run(args: argparse.Namespace) -> int:
    from rlhpc.config import find_config, total_steps
    from rlhpc.runs.configuration import load_config
    from rlhpc.runs.sweep import load_sweep
    from rlhpc.runs.task_type import task_type_of

    if (sweep := load_sweep(args.config, args.overrides, site=args.site)) is not None:
        return _run_sweep(args, sweep)
    cfg = load_config(args.config, args.overrides, site=args.site)
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    refuse_braces(args.config, paths.root)
    command = snakemake_command(args)
    if args.dry_run:
        return subprocess.run(command, check=False).returncode
    from rlhpc.cli.follow import Track, WorkflowFollower, WorkflowLog
    from rlhpc.jobs.accelerators import with_accelerators
    from rlhpc.runs.conditional_keys import warn_of_unused
    from rlhpc.runs.memory.plan import refuse_overfull

    launcher = "slurm" if "slurm" in Path(args.profile).name else "local"
    refuse_overfull(with_accelerators(cfg, launcher), args.config, launcher)
    warn_of_unused(args.config, args.overrides, site=args.site)

    tracks = {"run": Track(cfg.runner.name, paths, total_steps(cfg))}
    if (sft := task_type_of(cfg).offline.preparation(cfg).sft) is not None:
        sft_cfg = load_config(find_config(args.config).parent / sft[0], sft[1], site=args.site)
        sft_paths = RunPaths.from_run_dir(sft_cfg.runner.run_dir, sft_cfg.runner.name)
        tracks["sft"] = Track(sft_cfg.runner.name, sft_paths, total_steps(sft_cfg))
    with _open_workflow_log(paths.logs) as path:
        saved_steps = paths.complete_steps()
        start_text = f", from step {saved_steps[-1][0]} on" if saved_steps else ""
        print_line(
            f"{cfg.runner.name}: {total_steps(cfg)} steps into {relative(paths.root)}{start_text}; "
            f"Snakemake log: {relative(path)}"
        )
        log = WorkflowLog(path, Path.cwd())
        start_time = time.monotonic()
        exit_code = _follow(
            command,
            path,
            WorkflowFollower(log, tracks),
            lambda process, interrupt: _stop(process, interrupt, args, tracks),
        )
        if exit_code == 0:
            print("\n".join(render_ending(cfg, paths, args, time.monotonic() - start_time)), flush=True)
        elif not isinstance(exit_code, InterruptedCode):
            exit_code = _print_failure(log, path, args, exit_code)
    return exit_code


def _run_sweep(args: argparse.Namespace, sweep: Sweep) -> int:
    """Runs all runs of a sweep in one Snakemake workflow; returns the exit code."""
    from rlhpc.cli.follow import Track, WorkflowLog
    from rlhpc.cli.sweep import SweepFollower, render_sweep_ending
    from rlhpc.config import total_steps
    from rlhpc.runs.sweep import check_begun

    refuse_braces(args.config, sweep.paths.root)
    check_begun(sweep, resume_with=args.resume_with)
    command = snakemake_command(args)
    index = command.index("--config")  # with any profile: a failed run does not stop the others
    command[index:index] = ["--keep-going"]
    if args.dry_run:
        return subprocess.run(command, check=False).returncode
    with _open_workflow_log(sweep.paths.logs) as path:
        print_line(
            f"{sweep.name}: {len(sweep.runs)} runs into {relative(sweep.paths.root)}; Snakemake log: {relative(path)}"
        )
        log = WorkflowLog(path, Path.cwd())
        tracks = {run.point.name: Track(run.point.name, run.paths, total_steps(run.cfg)) for run in sweep.runs}
        tracks |= {folder.name: Track(folder.name, RunPaths(folder), 0) for folder in sweep.paths.root.glob("sft-*")}
        exit_code = _follow(
            command, path, SweepFollower(log, sweep), lambda process, interrupt: _stop(process, interrupt, args, tracks)
        )
        if isinstance(exit_code, InterruptedCode):
            return exit_code
        if not log.started_jobs and not log.failed_jobs and exit_code != 0 and not sweep.paths.is_there:
            return _print_failure(log, path, args, exit_code)  # nothing started
        print("\n".join(["", *render_sweep_ending(sweep)]))
        if sweep.paths.page.is_file():
            print(f"  page    {relative(sweep.paths.page)}", flush=True)
        if exit_code != 0:
            exit_code = _print_failure(log, path, args, exit_code)
    return exit_code


class InterruptedCode(int):
    """Exit code of a workflow that was interrupted."""


@contextlib.contextmanager
def _open_workflow_log(logs: Path) -> Iterator[Path]:
    """Yields an empty log file for Snakemake: `snakemake.log`, or `snakemake-2.log` and so on while other commands hold the
    earlier ones.
    """
    from rlhpc.jobs.lease import Lease

    path = logs / "workflow" / "snakemake.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for log_number in itertools.count(2):
            lease = Lease(path.with_suffix(".lease"))
            if lease.take_over():
                break
            path = logs / "workflow" / f"snakemake-{log_number}.log"
        path.write_bytes(b"")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; choose another runner.run_dir") from error
    try:
        yield path
    finally:
        lease.release()


def _follow(command: list[str], path: Path, follower: WorkflowFollower | SweepFollower, stop_process: Stop) -> int:
    """Runs Snakemake and displays its progress.

    Returns:
        Snakemake's exit code; after an interrupt, the exit code of `stop_process` as an `InterruptedCode`.
    """
    from rlhpc.metrics.logger import quiet_terminal

    with path.open("ab") as output, interrupt_on_signals(), quiet_terminal():
        # in a new process group: Ctrl-C reaches only this process, which ends the others in order
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0)
        try:
            while process.poll() is None:
                follower.update()
                time.sleep(_POLL_S)
            follower.close()
        except KeyboardInterrupt as interrupt:
            follower.close()
            return InterruptedCode(stop_process(process, interrupt))
    return process.returncode


def _print_failure(log: WorkflowLog, path: Path, args: argparse.Namespace, exit_code: int) -> int:
    """Prints the error of a failed workflow and the command that continues it.

    Returns:
        The exit code, which is 2 if the workflow refused the user's input.
    """
    from rlhpc.cli.follow import find_error

    if exit_code < 0:
        signal_name = signal.Signals(-exit_code).name
        print_line(
            f"Snakemake was killed by {signal_name}; jobs in Slurm go on\n  the same command finds them: {same_command(args)}"
        )
        return 128 - exit_code
    error_text, error_log = find_error(log, path)
    print(error_text or f"Snakemake ended with exit code {exit_code} and said nothing", file=sys.stderr)
    if not log.failed_jobs and error_text.startswith("rlhpc: error: "):
        return 2
    more_text = f"; Snakemake's: {relative(path)}" if error_log != path else ""
    print_line(
        f"failed; log: {relative(error_log)}{more_text}\n"
        f"  the same command goes on from the last checkpoint: {same_command(args)}"
    )
    return exit_code


def print_line(message: str) -> None:
    """Prints a message with the prefix `rlhpc: `."""
    tell(f"rlhpc: {message}")


def relative(path: Path) -> str:
    """Returns the path as text, relative to the working directory if it lies in it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def render_ending(cfg: RunConfig, paths: RunPaths, args: argparse.Namespace, elapsed_s: float) -> list[str]:
    """Returns the lines to print about a finished run: its result, its files, and the next commands."""
    from rlhpc.jobs.status import duration
    from rlhpc.metrics.provenance import last_result

    suite = next(iter(cfg.workflow.eval_suites), "default")
    step, last_metrics, result_text = last_result(paths, suite)
    program = same_command(args).split(" run ", 1)[0]
    run = shlex.quote(relative(paths.root))
    # Suites of language models have names in data.eval; those of episodes may have any.
    suite_options = "again --episodes 20" if "return_mean" in last_metrics else shlex.quote(suite)
    next_name = shlex.quote(f"{cfg.runner.name}-2")
    return [
        "",
        f"{cfg.runner.name}: done in {duration(elapsed_s)}{', ' if result_text else ''}{result_text}",
        f"  report  {relative(paths.report)}",
        *([f"  policy  {relative(paths.export(step))}"] if paths.export(step).is_dir() else []),
        "next",
        f"  {program} status {run}",
        *([f"  {program} eval --run {run} --suite {suite_options}"] if last_metrics else []),
        f"  {program} run {shlex.quote(args.config)} runner.name={next_name} runner.seed={cfg.runner.seed + 1}",
    ]


# -- interrupts -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Makes SIGTERM, SIGHUP and SIGINT raise `Interrupted` within the block, so that Snakemake ends with the command."""

    def handle(signum: int, frame: object) -> None:
        raise Interrupted(signum)

    previous_handlers = {
        signal_number: signal.signal(signal_number, handle)
        for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


def _stop(
    process: subprocess.Popen[bytes], interrupt: KeyboardInterrupt, args: argparse.Namespace, tracks: dict[str, Track]
) -> int:
    """Ends Snakemake and the jobs of this machine; prints the saved steps and the command that continues the run."""
    signum = interrupt.signum if isinstance(interrupt, Interrupted) else signal.SIGINT
    print_line("interrupted: saving; Ctrl-C again ends at once")
    is_hurried = False
    try:
        _end_process_group(process)
        for message in _end_drivers(tracks):
            print_line(message)
    except KeyboardInterrupt:
        is_hurried = True
        _end_process_group(process, immediately=True)
        with contextlib.suppress(KeyboardInterrupt):
            _end_drivers(tracks, grace_s=0.0)
    except RlhpcError as error:
        print_line(f"error: {error}")
    if "run" in tracks:
        _print_saved(tracks["run"], is_hurried)
    else:
        from rlhpc.jobs.state import run_state

        num_saved = sum(bool(track.paths.complete_steps()) for track in tracks.values())
        running_names = [
            name for name, track in tracks.items() if run_state(track.paths)[0] in ("running", "waiting", "pending")
        ]
        root = next(iter(tracks.values())).paths.root.parent
        print_line(f"interrupted; {num_saved} of {len(tracks)} runs have saved something")
        if running_names and not is_hurried:
            print_line(
                f"the jobs of {len(running_names)} runs go on; stop them: rlhpc cancel {shlex.quote(relative(root))}"
            )
    print_line(f"go on: {same_command(args)}")
    return 128 + signum


def _print_saved(track: Track, is_hurried: bool) -> None:
    """Prints the progress of an interrupted run, and whether its job continues."""
    from rlhpc.jobs.state import run_state

    saved_text = describe_saved(track.paths, track.total, relative(track.paths.root))
    if not is_hurried and run_state(track.paths)[0] in ("running", "waiting"):
        print_line(f"interrupted; its job goes on ({saved_text})")
        print_line(f"stop it: rlhpc cancel {shlex.quote(relative(track.paths.root))}")
    else:
        print_line(f"interrupted; {saved_text}")


def _end_drivers(tracks: dict[str, Track], grace_s: float = _SAVE_S) -> list[str]:
    """Ends the local drivers of all tracks concurrently, because each save may take long; returns the messages."""
    pool = ThreadPoolExecutor(16)
    try:
        messages_by_track = list(pool.map(lambda track: _end_local_driver(track.paths, grace_s), tracks.values()))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a second Ctrl-C does not wait for the drivers
    track_messages = zip(tracks.values(), messages_by_track, strict=True)
    return [
        f"{track.name}: {message}" if len(tracks) > 1 else message
        for track, messages in track_messages
        for message in messages
    ]


def _end_process_group(process: subprocess.Popen[bytes], *, immediately: bool = False) -> None:
    """Sends SIGINT to Snakemake and its commands; sends SIGTERM and then SIGKILL if they do not end."""
    for signum, timeout_s in () if immediately else ((signal.SIGINT, 20.0), (signal.SIGTERM, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
            return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_local_driver(paths: RunPaths, grace_s: float = _SAVE_S) -> list[str]:
    """Ends the run's driver if the driver is a process of this machine; a job of the cluster continues.

    Returns:
        A message for each process that was ended.
    """
    from rlhpc.jobs.segment import SegmentJournal
    from rlhpc.jobs.shared_files import read_json_file
    from rlhpc.jobs.submit import cancel

    records = [read_json_file(SegmentJournal(paths, segment).record) or {} for segment in paths.submitted_segments()]
    if not any(record.get("executor") == "local" for record in records):
        return []
    return cancel(paths, grace_s=grace_s)


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    add_command(
        commands,
        "run",
        _run,
        "train, evaluate, export and report, by Snakemake; shows what happens",
        _EXAMPLES,
        *positionals(config="YAML file of the run"),
        argument(
            "--profile",
            default="local",
            help="profile of Snakemake: local, slurm, slurm-no-accounting, or a folder (default: local)",
        ),
        argument("--site", help=SITE),
        argument("--resume-with", action="store_true", help=RESUME_WITH),
        argument("-n", "--dry-run", action="store_true", help="show what would be done"),
    )
