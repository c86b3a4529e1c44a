"""Output of `rlhpc status` and `rlhpc logs`."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlhpc.jobs.alerts import past_alerts
from rlhpc.jobs.elastic.records import HelperRecord, read_stays
from rlhpc.jobs.logs import ALL, LAST, LogFollower, lines_of_start
from rlhpc.jobs.paths import RunPaths, segment_name, step_name
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.start_times import format_ranks, open_phases, read_start_marks
from rlhpc.jobs.state import FINAL, OVER, Facts, RunState, duration, find_runs, number_of, states
from rlhpc.runtime.errors import UserError
from rlhpc.runtime.files import is_count, is_number, open_file, read_file
from rlhpc.runtime.host import host_id
from rlhpc.runtime.launchers import USAGE
from rlhpc.runtime.registry import CURRENT, DEPARTED, MEMBERS, RANKS, ROBOTS
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.start_phases import format_durations, read_phases
from rlhpc.runtime.text import one_line

#: Number of figures of a rank's usage.
_NUM_USAGE = 4
#: Maximum number of alerts to show.
_MAX_ALERT_LINES = 12
#: Maximum number of lines for ranks that have left.
_MAX_LEFT_LINES = 12


def helper_lines(paths: RunPaths, *, is_over: bool) -> list[str]:
    """Returns lines about helper jobs: jobs in the queue, and a table of the ranks that have joined; [] without helpers."""
    record, rank_stays, now = HelperRecord.read(paths), read_stays(paths), time.time()
    queued_jobs = [] if is_over else [job for job in record.live() if job.started is None]
    lines = []
    if queued_jobs:
        reasons_text = ", ".join(dict.fromkeys(job.reason for job in queued_jobs if job.reason)) or "submitted"
        lines.append(
            f"helpers      {len(queued_jobs)} job{'s' if len(queued_jobs) > 1 else ''} in the queue: {reasons_text}"
        )
    if not rank_stays:
        return lines
    present_stays = [stay for stay in rank_stays if stay.left_at is None]
    departed_stays = [stay for stay in rank_stays if stay.left_at is not None]
    total_hours = sum(stay.hours(now) for stay in rank_stays)
    lines.append(
        f"joined       {len(rank_stays)} ranks in all, {len(present_stays)} there now, {total_hours:.2f} hours"
    )
    lines += ["", f"{'joined':<16} {'node':<16} {'job':>10}  {'came':<11}  {'left':<11}  {'hours':>6}  why"]
    for stay in [*departed_stays[-_MAX_LEFT_LINES:], *present_stays]:
        joined_at, left_at = _format_time(stay.joined), "" if stay.left_at is None else _format_time(stay.left_at)
        reason = stay.leave_reason or ("works" if stay.works else "loads")
        lines.append(
            f"{f'{stay.group}-{stay.rank}':<16} {stay.node:<16} {stay.job or '-':>10}  {joined_at:<11}  {left_at:<11}  "
            f"{stay.hours(now):>6.2f}  {reason}"
        )
    if len(departed_stays) > _MAX_LEFT_LINES:
        lines.append(f"… and {len(departed_stays) - _MAX_LEFT_LINES} that left before; {paths.attendance.name} has all")
    return lines


def _format_time(unix_time: float) -> str:
    return time.strftime("%d.%m %H:%M", time.localtime(unix_time))


#: Headline numbers of runs as columns: title of the column → a text for each run.
_Headlines = Callable[[Sequence[RunPaths]], Mapping[str, Sequence[str]]]


def progress_line(paths: RunPaths, start_time: float = 0.0) -> str:
    """Returns a progress line such as `step 12/100, return 34.5, ETA 1m20s`; "" if no status is newer than `start_time`."""
    status = read_json_file(paths.driver_state)
    if status is None or (number_of(status, "updated") or 0.0) < start_time:
        return ""
    return ", ".join(_format_progress(status))


#: Key of status.json → format of its number, in the order of the progress line.
_PHRASES = {
    "return": "return {:.1f}",
    "env_steps_per_s": "{:.0f} env steps/s",
    "reward": "reward {:.3f}",
    "loss": "loss {:.3f}",
    "tokens_per_s": "{:.0f} tokens/s",
}


def _format_progress(status: dict[str, Any]) -> list[str]:
    step, eta = _step_text(status), number_of(status, "eta_s")
    status_numbers = {key: status_number for key in _PHRASES if (status_number := number_of(status, key)) is not None}
    return [
        *([f"step {step}"] if step else []),
        *(_PHRASES[key].format(status_number) for key, status_number in status_numbers.items()),
        *([f"ETA {duration(eta)}"] if eta is not None and status.get("state") not in FINAL else []),
    ]


def _step_text(status: dict[str, Any]) -> str:
    """Returns step and maximum, such as `12/100`; "" before the first step."""
    step, max_steps = number_of(status, "step"), number_of(status, "max_steps")
    goal_text = f"/{max_steps:.0f}" if max_steps is not None and max_steps >= 0 else ""
    return "" if step is None else f"{step:.0f}{goal_text}"


def best_checkpoint_text(status: dict[str, Any]) -> str:
    """Returns the best checkpoint, such as `step 30, by eval/loss 0.42`, from status.json, or ""."""
    step, best_value = number_of(status, "best_step"), number_of(status, "best_value")
    return (
        ""
        if step is None or best_value is None
        else f"step {step:.0f}, by {status.get('best_metric')} {best_value:.6g}"
    )


def _describe_transfer(status: dict[str, Any]) -> str:
    """Returns the transports of the newest weights and their rate, such as `ipc, 40 GB/s` or `ipc 98%, host 2%`; "" if
    unknown.
    """
    transport_shares = status.get("weights_by")
    share_by_transport = (
        {name: transport_share for name in transport_shares if (transport_share := number_of(transport_shares, name))}
        if isinstance(transport_shares, dict)
        else {}
    )
    transport_names = sorted(share_by_transport, key=lambda name: -share_by_transport[name])
    transports_text = ", ".join(
        name if len(transport_names) == 1 else f"{name} {share_by_transport[name]:.0%}" for name in transport_names
    )
    rate = number_of(status, "weights_gb_per_s")
    return transports_text + (f", {rate:.3g} GB/s" if transports_text and rate is not None else "")


def newest_generation(paths: RunPaths) -> Path | None:
    """Returns the registry folder of the current generation; without one, the newest folder or None."""
    with contextlib.suppress(OSError, ValueError):
        generation_folder = paths.registry / read_file(paths.registry / CURRENT).decode().strip()
        if generation_folder.is_dir():
            return generation_folder
    try:
        folders = [p for p in paths.registry.iterdir() if p.is_dir()]
        return max(folders, key=lambda p: p.stat().st_mtime) if folders else None
    except OSError:
        return None


def read_rank_records(paths: RunPaths) -> list[dict[str, Any]]:
    """Returns the ranks of the newest generation, sorted by group and rank. Ranks that have left have the state `left`.

    Reads the table that a live driver writes, which is up to 5 seconds old; without one, reads the file of each rank.
    """
    generation = newest_generation(paths)
    if generation is None:
        return []
    table = (read_json_file(generation / RANKS / f"{RANKS}.json") or {}).get("ranks")
    rows = [row for row in table if _is_rank_record(row)] if isinstance(table, list) else _read_rank_files(generation)
    return sorted(rows, key=lambda row: (str(row["group"]), int(row.get("rank") or 0)))


def usage_of_ranks(paths: RunPaths) -> dict[str, tuple[float | None, ...]]:
    """Returns the usage of each rank of the newest generation: processor cores, bytes of memory and of accelerator memory, and
    percent of time in which the accelerator is busy.

    A live driver writes them, at most every 10 seconds. None stands for a figure that a rank does not have.
    """
    generation = newest_generation(paths)
    usage_content = None if generation is None else read_json_file(generation / RANKS / f"{USAGE}.json")
    usage = (usage_content or {}).get("usage")
    if not isinstance(usage, dict):
        return {}
    return {
        name: tuple(usage_value if is_number(usage_value) else None for usage_value in rank_values)
        for name, rank_values in usage.items()
        if isinstance(rank_values, list) and len(rank_values) == _NUM_USAGE
    }


def _is_rank_record(row: Any) -> bool:
    return isinstance(row, dict) and "group" in row and is_count(row.get("rank") or 0)


def _read_rank_files(generation: Path) -> list[dict[str, Any]]:
    rows = []
    for path in (generation / MEMBERS).glob("*.json"):
        row, departure = read_json_file(path), read_json_file(generation / DEPARTED / path.name)
        if row is None or not _is_rank_record(row):
            continue
        # A rank that lost its connection no longer writes its file; the driver records the departure.
        is_lost = departure is not None and departure.get("incarnation") == row.get("incarnation")
        rows.append({**row, "state": "left"} if is_lost else row)
    return rows


def _read_shared_memory(rows: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Returns (allocated bytes, used bytes) of the session's shared memory; None if the session is over or on another host."""
    from rlhpc.runtime.comm.shared_memory import bytes_in_use  # imports numpy, which only this part needs

    tokens = {str(row["token"]) for row in rows if row.get("token") and row.get("host") == host_id()}
    sessions = [Scratch(token) for token in tokens]
    usage = [
        (session_scratch.used_bytes(), bytes_in_use(session_scratch.shm))
        for session_scratch in sessions
        if session_scratch.shm.is_dir()
    ]
    return (sum(held_bytes for held_bytes, _ in usage), sum(used_bytes for _, used_bytes in usage)) if usage else None


def render_status(
    paths: RunPaths,
    *,
    headlines: _Headlines | None = None,
    changed_resumes: Callable[[RunPaths], Sequence[tuple[int, str]]] = lambda paths: (),
) -> str:
    """Renders a summary of the run in several lines.

    Args:
        paths: The run.
        headlines: Returns the headline numbers of the run.
        changed_resumes: Returns the step and the changes of each resume with another training configuration.

    Raises:
        UserError: The run does not exist.
    """
    if not paths.root.is_dir():
        raise UserError(f"there is no run at {paths.root}; runs are in runner.run_dir, `ls` shows their names")
    [(facts, run)] = states([paths])
    status = facts.status
    reason = f": {run.reason}" if run.reason else ""
    lines = [f"run          {paths.root.name}  ({paths.root})", f"state        {run.state}{reason}"]
    progress = _format_progress(status) if run.is_current or run.state in OVER else []
    if progress:
        lines.append(f"progress     {', '.join(progress)}")
    if headlines is not None and (headline_cells := headlines([paths])):
        lines.append("results      " + ", ".join(f"{title} {cell}" for title, (cell,) in headline_cells.items()))
    lines += [f"changed      from step {step} on: {changes}" for step, changes in changed_resumes(paths)]
    lines += _format_time_lines(status, run)
    done = paths.finished_segments()
    lines.append(f"segments     {', '.join(map(str, done)) + ' done' if done else 'none done'}")
    steps = [step for step, _ in paths.complete_steps()]
    lines.append("checkpoints  " + (", ".join(step_name(step) for step in steps) if steps else "none"))
    if best_text := best_checkpoint_text(status):
        lines.append(f"best         {best_text}")
    if transfer := _describe_transfer(status):
        lines.append(f"weight sync  {transfer}")
    rows = read_rank_records(paths) if run.state in OVER or _is_generation_new(facts, run) else []
    shm = _read_shared_memory(rows)
    if shm is not None:
        lines.append(f"shared mem   {shm[0] / 2**20:.1f} MiB, payloads in use {shm[1] / 2**20:.1f} MiB")
    if rows and (generation := newest_generation(paths)) is not None:
        lines += _start_lines(generation, is_over=run.state in OVER)
    if rows:
        lines += ["", f"{'group':<12} {'rank':>4}  {'node':<16} {'pid':>8}  state"]
        lines += [_format_rank_line(row, is_over=run.state in OVER) for row in rows]
    lines += [] if run.state in OVER else _format_robot_lines(paths)
    lines += _format_alert_lines(paths)
    if helpers := helper_lines(paths, is_over=run.state in OVER):
        lines += ["", *helpers]
    return "\n".join(map(one_line, lines))


def _format_alert_lines(paths: RunPaths) -> list[str]:
    """Returns a table of the run's alerts, with the deliveries that failed; [] without alerts."""
    alerts = past_alerts(paths)
    if not alerts:
        return []
    num_omitted = len(alerts) - _MAX_ALERT_LINES
    lines = ["", f"{'alert':<11}  {'rule':<18} {'step':>8}  what"]
    if num_omitted > 0:
        lines.append(f"… and {num_omitted} before; {paths.alerts} has all")
    for alert, errors in alerts[-_MAX_ALERT_LINES:]:
        step = "" if alert.step is None else str(alert.step)
        lines.append(f"{_format_time(alert.time)}  {alert.rule:<18} {step:>8}  {alert.message}")
        lines += [f"{'':<11}  {'':<18} {'':>8}  not delivered: {error}" for error in errors]
    return lines


def _start_lines(generation: Path, *, is_over: bool) -> list[str]:
    """Returns lines about the start of the run: its duration, or the phases in which the ranks are before the first step."""
    start_marks = read_start_marks(generation)
    if {"driver", "first_step"} <= start_marks.keys():
        return [f"start        {start_marks['first_step'] - start_marks['driver']:.1f} s to the end of the first step"]
    phases = [] if is_over else open_phases(read_phases(generation))
    if not phases:
        return []
    lines = ["", f"{'start':<12} {'ranks':<10} {'phase':<26} {'for':>6}  before"]
    for phase in phases:
        elapsed_text = duration(max(0.0, time.time() - phase.start_time))
        durations_text = format_durations(phase.ended_phases)
        lines.append(
            f"{phase.group:<12} {format_ranks(phase.ranks):<10} {phase.phase:<26} {elapsed_text:>6}  {durations_text}".rstrip()
        )
    return lines


def _format_robot_lines(paths: RunPaths) -> list[str]:
    """Returns a line for each remote robot: the robot has connected, or the run waits for it."""
    generation, lines = newest_generation(paths), []
    for file in sorted((generation / ROBOTS).glob("slot_*.json")) if generation else ():
        robot_state = read_json_file(file) or {}
        waiting_since = number_of(robot_state, "since")
        duration_text = "" if waiting_since is None else f" for {duration(max(0.0, time.time() - waiting_since))}"
        name = f"{robot_state.get('robot')} (slot {robot_state.get('slot')})"
        waiting_text = f"is waited for{duration_text}: rlhpc robot invite {paths.root} --output FILE"
        lines.append(
            f"robot        {name} " + (f"has been there{duration_text}" if robot_state.get("there") else waiting_text)
        )
    return lines


def _format_time_lines(status: dict[str, Any], run: RunState) -> list[str]:
    """Returns lines with the run's total training time and the training time since the latest start."""
    start_time, updated_at, elapsed_s = (number_of(status, key) for key in ("started", "updated", "elapsed_s"))
    if start_time is None or updated_at is None:
        return []
    lines = []
    if elapsed_s is not None:
        lines.append(f"trained for  {duration(elapsed_s)} in all")
    if run.is_current or run.state in OVER:
        age_text = "" if run.state in OVER else f", last heard {duration(time.time() - updated_at)} ago"
        lines.append(f"this start   {duration(updated_at - start_time)} on {status.get('host', '?')}{age_text}")
    return lines


def _is_generation_new(facts: Facts, run: RunState) -> bool:
    """Returns whether the ranks in the registry belong to the newest attempt, by the modification times of two files. The
    same file server sets both times.
    """
    if facts.files is None:
        return True
    try:
        return (facts.paths.registry / CURRENT).stat().st_mtime_ns >= facts.files.attempts.stat().st_mtime_ns
    except OSError:
        return run.is_current


def render_runs(
    folder: Path,
    named_runs: Sequence[RunPaths] | None = None,
    notes: Mapping[str, str] | None = None,
    *,
    headlines: _Headlines | None = None,
) -> str:
    """Renders a table with a line for each run, after one Slurm query for all runs. Omits columns without any text.

    Args:
        folder: The folder.
        named_runs: Runs to show, including runs that have not begun; by default the runs below the folder.
        notes: Name of a run → an additional note.
        headlines: Returns the headline numbers of the runs: title of the column → a text for each run.

    Raises:
        UserError: No run exists.
    """
    runs = list(find_runs(folder)) if named_runs is None else list(named_runs)
    if not runs:
        raise UserError(f"there is no run below {folder}")
    cells = [
        _run_cells(folder, run_facts, run_state, (notes or {}).get(run_facts.paths.root.name, ""))
        for run_facts, run_state in states(runs)
    ]
    columns: dict[str, Sequence[str]] = {title: [row[title] for row in cells] for title in cells[0]}
    last_columns = {title: columns.pop(title) for title in ("time left", "note")}
    columns |= {} if headlines is None else headlines(runs)
    columns |= last_columns
    filled_columns = [
        (title, *map(one_line, column_cells))
        for title, column_cells in columns.items()
        if title in ("run", "state") or any(column_cells)
    ]
    widths = [max(map(len, column)) for column in filled_columns]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*filled_columns, strict=True)
    )


def _run_cells(folder: Path, facts: Facts, run: RunState, run_note: str) -> dict[str, str]:
    """Returns a run's row of the table: title of the column → text."""
    eta = number_of(facts.status, "eta_s")
    reason = run.reason.removeprefix(run.job).lstrip(":;, ") if run.job else run.reason
    exists = facts.paths.root.is_dir()
    prefix = "ended: " if reason and run.state in FINAL else ""
    return {
        "run": str(facts.paths.root.relative_to(folder)),
        "state": run.state if exists else "not started",
        "job": run.job,
        "step": _step_text(facts.status),
        "time left": duration(eta) if eta is not None and run.state == "running" else "",
        "note": "; ".join(filter(None, (f"{prefix}{reason}" if exists else "", run_note))),
    }


def rank_state(row: Mapping[str, Any], *, is_over: bool) -> str:
    """Returns the state of a rank: as it was written last, or `ended` or `gone` if its process cannot be there any more.

    Args:
        row: Row of `read_rank_records`.
        is_over: Whether no process of the run remains.
    """
    pid, written_state = row.get("pid"), str(row.get("state") or "?")
    if written_state in (*OVER, "ended", "left"):
        return written_state
    is_local = row.get("host") == host_id() and isinstance(pid, int)
    if is_over:
        return "ended"
    return "gone" if is_local and not Path(f"/proc/{pid}").exists() else written_state


def _format_rank_line(row: dict[str, Any], *, is_over: bool) -> str:
    pid, node, state = row.get("pid"), str(row.get("node") or "?"), rank_state(row, is_over=is_over)
    return f"{row['group']!s:<12} {row.get('rank', '?')!s:>4}  {node:<16} {pid if pid else '?'!s:>8}  {state}"


def log_files(paths: RunPaths, group: str | None = None, rank: int | None = None) -> dict[Path, str]:
    """Returns the label of each log file's lines, for the files of the newest segment and the files that ranks name."""
    labels: dict[Path, str] = {}
    for row in read_rank_records(paths):
        for key in ("log_out", "log_err"):
            if row.get(key):
                labels[Path(str(row[key]))] = f"{row['group']}-{row.get('rank', 0)}"
    folders = sorted(paths.logs.glob(segment_name("*")), key=lambda p: p.stat().st_mtime) if paths.logs.is_dir() else []
    for path in sorted([*folders[-1].glob("*.out"), *folders[-1].glob("*.err")]) if folders else []:
        labels.setdefault(path, path.stem)
    # the driver's label contains no rank
    pattern = re.compile(
        rf"{'.+' if group is None else re.escape(group)}{r'(-[^-]*)?' if rank is None else f'-{rank}'}"
    )
    return {path: label for path, label in labels.items() if pattern.fullmatch(label)}


def read_log_tail(path: Path, num_lines: int) -> list[str]:
    """Returns the last lines of a log since the last start of its rank; [] if the file cannot be read."""
    return _read_tail(path, num_lines, LAST)[0]


def _read_tail(path: Path, num_lines: int, start_id: str) -> tuple[list[str], int]:
    """Returns (last lines of a start, file position after them); ([], 0) if the file cannot be read."""
    try:
        with open_file(path) as file:
            file_size = file.seek(0, 2)
            file.seek(max(0, file_size - 512 * max(num_lines, 1) - 4096) if start_id in (LAST, ALL) else 0)
            tail_bytes = file.read(file_size - file.tell())
    except (OSError, ValueError):  # an invalid file name
        return [], 0
    tail_lines = lines_of_start(tail_bytes.decode("utf-8", "replace").splitlines(), start_id)
    return tail_lines[-num_lines:] if num_lines > 0 else [], file_size


def print_logs(
    paths: RunPaths,
    group: str | None = None,
    rank: int | None = None,
    follows: bool = False,
    num_lines: int = 50,
    *,
    start: str = LAST,
    out: TextIO | None = None,
    poll_s: float = 1.0,
) -> None:
    """Prints the last lines of the logs, each with the prefix `[group-rank]`, or `[driver]` for the driver's lines.

    Args:
        paths: The run.
        group: Print only this group's logs (`driver` is a group too).
        rank: Print only this rank's logs.
        follows: Keep printing new lines until the run is over or the user presses Ctrl-C.
        num_lines: Maximum number of lines to print of each file.
        start: Start of the run to print: its number, `last`, or `all`.
        out: Output stream; stdout by default.
        poll_s: Seconds between two checks for new lines.

    Raises:
        UserError: No such logs exist; the message names the existing logs.
    """
    target = out or sys.stdout
    files = log_files(paths, group, rank)
    if not files and not follows:
        labels = sorted(set(log_files(paths).values()))
        requested_text = (
            "" if group is None and rank is None else f" of {group or 'any group'}{'' if rank is None else f'-{rank}'}"
        )
        raise UserError(f"no logs{requested_text} in {paths.logs}; there are: {', '.join(labels) or 'none yet'}")
    offsets: dict[Path, int] = {}
    for path, label in files.items():
        tail_lines, offsets[path] = _read_tail(path, num_lines, start)
        _write_lines(target, label, tail_lines)
    if not follows:
        return
    follower = LogFollower(
        paths,
        lambda: log_files(paths, group, rank),
        offsets,
        lambda label, new_lines: _write_lines(target, label, new_lines),
    )
    while not follower.poll():
        time.sleep(poll_s)


def _write_lines(target: TextIO, label: str, lines: list[str]) -> None:
    for line in lines:
        for line_part in line.splitlines() or [""]:  # a progress bar overwrites its line repeatedly
            target.write(one_line(f"[{label}] {line_part}") + "\n")
    target.flush()
