"""What `rlhpc status` and `rlhpc logs` show."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlhpc.jobs.claim import read_json
from rlhpc.jobs.elastic.shown import helper_lines
from rlhpc.jobs.paths import RunPaths, segment_name, step_name
from rlhpc.jobs.state import FINAL, OVER, Facts, RunState, duration, find_runs, number_of, run_state, states
from rlhpc.runtime.errors import RlhpcError, UserError
from rlhpc.runtime.host import host_id
from rlhpc.runtime.registry import CURRENT, MEMBERS, ROBOTS
from rlhpc.runtime.scratch import Scratch


def progress_line(paths: RunPaths, since: float = 0.0) -> str:
    """`step 12/100, return 34.5, 1234 env steps/s, ETA 1m20s`, or "" if the driver wrote nothing after `since`."""
    status = read_json(paths.driver_state)
    if status is None or (number_of(status, "updated") or 0.0) < since:
        return ""
    return ", ".join(_progress(status))


def _progress(status: dict[str, Any]) -> list[str]:
    parts = []
    step, most = number_of(status, "step"), number_of(status, "max_steps")
    if step is not None:
        parts.append(f"step {step:.0f}" + (f"/{most:.0f}" if most is not None and most >= 0 else ""))
    value, rate, eta = (number_of(status, key) for key in ("return", "env_steps_per_s", "eta_s"))
    if value is not None:
        parts.append(f"return {value:.1f}")
    if rate is not None:
        parts.append(f"{rate:.0f} env steps/s")
    for name in ("reward", "loss"):
        if (found := number_of(status, name)) is not None:
            parts.append(f"{name} {found:.3f}")
    if (tokens := number_of(status, "tokens_per_s")) is not None:
        parts.append(f"{tokens:.0f} tokens/s")
    if eta is not None and status.get("state") not in FINAL:
        parts.append(f"ETA {duration(eta)}")
    return parts


def newest_generation(paths: RunPaths) -> Path | None:
    """The registry folder of the current generation; the one made last if none is declared current."""
    try:
        current = paths.registry / (paths.registry / CURRENT).read_text().strip()
        if current.is_dir():
            return current
    except OSError:
        pass
    try:
        folders = [p for p in paths.registry.iterdir() if p.is_dir()]
        return max(folders, key=lambda p: p.stat().st_mtime) if folders else None
    except OSError:
        return None


def members(paths: RunPaths) -> list[dict[str, Any]]:
    """Contents of the newest generation's member files, by group and rank."""
    generation = newest_generation(paths)
    if generation is None:
        return []
    found = [read_json(path) for path in sorted((generation / MEMBERS).glob("*.json"))]
    rows = [row for row in found if row is not None and "group" in row]
    return sorted(rows, key=lambda row: (str(row["group"]), int(row.get("rank") or 0)))


def _shared_memory(rows: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Bytes of shared memory that the session holds, and those in use; None if it is over or on another host."""
    from rlhpc.runtime.comm.segments import bytes_in_use  # imports numpy, which the rest of a status does without

    tokens = {str(row["token"]) for row in rows if row.get("token") and row.get("host") == host_id()}
    sessions = [Scratch(token) for token in tokens]
    found = [(scratch.used_bytes(), bytes_in_use(scratch.shm)) for scratch in sessions if scratch.shm.is_dir()]
    return (sum(held for held, _ in found), sum(used for _, used in found)) if found else None


def render_status(paths: RunPaths) -> str:
    """Renders the run at a glance, in several lines.

    Raises:
        RlhpcError: There is no such run.
    """
    if not paths.root.is_dir():
        raise RlhpcError(f"there is no run at {paths.root}; runs are in runner.run_dir, `ls` shows their names")
    [(facts, found)] = states([paths])
    status = facts.status
    why = f": {found.why}" if found.why else ""
    lines = [f"run          {paths.root.name}  ({paths.root})", f"state        {found.state}{why}"]
    progress = _progress(status) if found.own or found.state in OVER else []
    if progress:
        lines.append(f"progress     {', '.join(progress)}")
    lines += _time_lines(status, found)
    done = sorted(int(p.stem) for p in paths.segments.glob("*.json") if p.stem.isdigit())
    lines.append(f"segments     {', '.join(map(str, done)) + ' done' if done else 'none done'}")
    steps = [step for step, _ in paths.complete_steps()]
    lines.append("checkpoints  " + (", ".join(step_name(step) for step in steps) if steps else "none"))
    rows = members(paths) if found.state in OVER or _generation_is_new(facts, found) else []
    shm = _shared_memory(rows)
    if shm is not None:
        lines.append(f"shared mem   {shm[0] / 2**20:.1f} MiB, payloads in use {shm[1] / 2**20:.1f} MiB")
    if rows:
        lines += ["", f"{'group':<12} {'rank':>4}  {'node':<16} {'pid':>8}  state"]
        lines += [_member_line(row, over=found.state in OVER) for row in rows]
    lines += [] if found.state in OVER else _robot_lines(paths)
    if helpers := helper_lines(paths, over=found.state in OVER):
        lines += ["", *helpers]
    return "\n".join(lines)


def _robot_lines(paths: RunPaths) -> list[str]:
    """Who has come from outside the cluster, and who is waited for."""
    generation, lines = newest_generation(paths), []
    for file in sorted((generation / ROBOTS).glob("slot_*.json")) if generation else ():
        place = read_json(file) or {}
        began = number_of(place, "since")
        since = "" if began is None else f" for {duration(max(0.0, time.time() - began))}"
        name = f"{place.get('robot')} (slot {place.get('slot')})"
        waits = f"is waited for{since}: rlhpc robot invite {paths.root} --output FILE"
        lines.append(f"robot        {name} " + (f"has been there{since}" if place.get("there") else waits))
    return lines


def _time_lines(status: dict[str, Any], found: RunState) -> list[str]:
    """How long the run has trained in total, and since its latest start."""
    started, updated, elapsed = (number_of(status, key) for key in ("started", "updated", "elapsed_s"))
    if started is None or updated is None:
        return []
    lines = []
    if elapsed is not None:
        lines.append(f"trained for  {duration(elapsed)} in all")
    if found.own or found.state in OVER:
        age = "" if found.state in OVER else f", last heard {duration(time.time() - updated)} ago"
        lines.append(f"this start   {duration(updated - started)} on {status.get('host', '?')}{age}")
    return lines


def _generation_is_new(facts: Facts, found: RunState) -> bool:
    """Whether the ranks in the registry belong to the newest attempt; both files are dated by the file server."""
    if facts.files is None:
        return True
    try:
        return (facts.paths.registry / CURRENT).stat().st_mtime_ns >= facts.files.attempts.stat().st_mtime_ns
    except OSError:
        return found.own


_COLUMNS = ("run", "state", "job", "step", "return", "left", "")


def render_runs(folder: Path, named: Sequence[RunPaths] | None = None, notes: Mapping[str, str] | None = None) -> str:
    """Renders a line for each run below a folder; Slurm is asked once for all of them.

    Args:
        folder: The folder.
        named: The runs to show, whether they have begun or not; by default those that are there.
        notes: Name of a run → what else to say about it.

    Raises:
        UserError: There is no run.
    """
    found = list(find_runs(folder)) if named is None else list(named)
    if not found:
        raise UserError(f"there is no run below {folder}")
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for facts, state in states(found):
        *cells, why = _row(folder, facts, state)
        note = (notes or {}).get(facts.paths.root.name, "")
        if not facts.paths.root.is_dir():
            cells[1], why = "not started", ""
        rows.append((*cells, "; ".join(filter(None, (why, note)))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    )


def _row(folder: Path, facts: Facts, found: RunState) -> tuple[str, ...]:
    status = facts.status
    step, most, value, eta = (number_of(status, key) for key in ("step", "max_steps", "return", "eta_s"))
    steps = "" if step is None else f"{step:.0f}" + (f"/{most:.0f}" if most is not None and most >= 0 else "")
    left = duration(eta) if eta is not None and found.state == "running" else ""
    why = found.why.removeprefix(found.job).lstrip(":;, ") if found.job else found.why
    name = str(facts.paths.root.relative_to(folder))
    return name, found.state, found.job, steps, "" if value is None else f"{value:.1f}", left, why


def _member_line(row: dict[str, Any], *, over: bool) -> str:
    pid, node, state = row.get("pid"), str(row.get("node") or "?"), str(row.get("state") or "?")
    if state not in (*OVER, "ended"):
        here = row.get("host") == host_id() and isinstance(pid, int)
        if over or (here and not Path(f"/proc/{pid}").exists()):
            state = "ended" if over else "gone"
    return f"{row['group']!s:<12} {row.get('rank', '?')!s:>4}  {node:<16} {pid if pid else '?':>8}  {state}"


def _log_files(paths: RunPaths, group: str | None, rank: int | None) -> dict[Path, str]:
    """Log files with the label for their lines: those in the newest segment's folder, and those that members name."""
    labels: dict[Path, str] = {}
    for row in members(paths):
        for key in ("log_out", "log_err"):
            if row.get(key):
                labels[Path(str(row[key]))] = f"{row['group']}-{row.get('rank', 0)}"
    folders = sorted(paths.logs.glob(segment_name("*")), key=lambda p: p.stat().st_mtime) if paths.logs.is_dir() else []
    for path in sorted([*folders[-1].glob("*.out"), *folders[-1].glob("*.err")]) if folders else []:
        labels.setdefault(path, path.stem)
    wanted = {}
    for path, label in labels.items():
        name, _, number = label.rpartition("-")
        if not name:
            name, number = label, ""  # the driver has no rank
        if (group is None or group == name) and (rank is None or str(rank) == number):
            wanted[path] = label
    return wanted


def _tail(path: Path, lines: int) -> tuple[list[str], int]:
    """(last lines, file position after them)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 512 * max(lines, 1) - 4096))
            data = file.read(size - file.tell())
    except OSError:
        return [], 0
    text = data.decode("utf-8", "replace").splitlines()
    return text[-lines:] if lines > 0 else [], size


def print_logs(
    paths: RunPaths,
    group: str | None = None,
    rank: int | None = None,
    follow: bool = False,
    lines: int = 50,
    *,
    out: TextIO | None = None,
    poll_s: float = 0.5,
) -> None:
    """Prints the last lines of the logs, each prefixed with `[group-rank]`, the driver's with `[driver]`.

    Args:
        paths: The run.
        group: Print only this group's logs (`driver` is a group too).
        rank: Print only this rank's logs.
        follow: Keep printing what is added, until the run is over or Ctrl-C.
        lines: How many lines of each file to print.
        out: Where to print; stdout by default.
        poll_s: Seconds between two looks for new lines.

    Raises:
        UserError: There are no such logs; the message names those that exist.
    """
    target = out or sys.stdout
    files = _log_files(paths, group, rank)
    if not files and not follow:
        there = sorted(set(_log_files(paths, None, None).values()))
        asked = (
            "" if group is None and rank is None else f" of {group or 'any group'}{'' if rank is None else f'-{rank}'}"
        )
        raise UserError(f"no logs{asked} in {paths.logs}; there are: {', '.join(there) or 'none yet'}")
    at: dict[Path, int] = {}
    for path, label in files.items():
        text, at[path] = _tail(path, lines)
        _write(target, label, text)
    while follow:
        over = run_state(paths)[0] in (*OVER, "unknown")
        for path, label in _log_files(paths, group, rank).items():
            _write(target, label, list(_added(path, at)))
        if over:
            return
        time.sleep(poll_s)


def _added(path: Path, at: dict[Path, int]) -> Iterator[str]:
    """Whole lines appended since the position in `at`, which is moved past them."""
    try:
        with path.open("rb") as file:
            start = at.get(path, 0)
            if file.seek(0, 2) < start:
                start = 0  # replaced by a shorter file
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start += len(line)
                yield line.decode("utf-8", "replace").rstrip("\n")
            at[path] = start
    except OSError:
        return


def _write(target: TextIO, label: str, lines: list[str]) -> None:
    for line in lines:
        target.write(f"[{label}] {line}\n")
    target.flush()
