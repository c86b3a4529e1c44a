"""What `rlhpc status` and `rlhpc logs` show, from the files of a run alone: no process is asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.launch.claim import Claim, SegmentFiles, read_json
from rlhpc.runtime.launch.jobs import host_identity
from rlhpc.runtime.paths import RunPaths
from rlhpc.runtime.registry import CURRENT
from rlhpc.runtime.scratch import Scratch, host_id

_FINAL = ("finished", "failed", "stopped")
#: A driver on another host that has not written its status for this long is not called running.
_SILENT_S = 300.0


def duration(seconds: float | None) -> str:
    """`1h02m`, `3m20s`, `12s`; `?` for what is not known."""
    if seconds is None or seconds != seconds or seconds < 0 or seconds == float("inf"):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def progress_line(paths: RunPaths, since: float = 0.0) -> str:
    """`step 12/100, return 34.5, 1234 env steps/s, ETA 1m20s`, or "" when the driver wrote nothing after `since`."""
    status = read_json(paths.driver_state)
    if status is None or (_number(status, "updated") or 0.0) < since:
        return ""
    return ", ".join(_progress(status))


def _number(status: dict[str, Any], key: str) -> float | None:
    value = status.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _progress(status: dict[str, Any]) -> list[str]:
    parts = []
    step, most = _number(status, "step"), _number(status, "max_steps")
    if step is not None:
        parts.append(f"step {step:.0f}" + (f"/{most:.0f}" if most is not None and most >= 0 else ""))
    value, rate, eta = (_number(status, key) for key in ("return", "env_steps_per_s", "eta_s"))
    if value is not None:
        parts.append(f"return {value:.1f}")
    if rate is not None:
        parts.append(f"{rate:.0f} env steps/s")
    for name in ("reward", "loss"):
        if (found := _number(status, name)) is not None:
            parts.append(f"{name} {found:.3f}")
    if (tokens := _number(status, "tokens_per_s")) is not None:
        parts.append(f"{tokens:.0f} tokens/s")
    if eta is not None and status.get("state") not in _FINAL:
        parts.append(f"ETA {duration(eta)}")
    return parts


def run_state(paths: RunPaths) -> tuple[str, str]:
    """(state, explanation): waiting, running, stopped, finished, failed or dead (its process is gone)."""
    status = read_json(paths.driver_state) or {}
    state = str(status.get("state") or "")
    reason = str(status.get("stop_reason") or "")
    newest = _newest_segment(paths)
    claim = Claim.newest(newest) if newest is not None else None
    ended = read_json(newest.exit) if newest is not None else None
    if claim is not None and claim.alive_here():
        return ("running" if state not in _FINAL else state), f"job {claim.job_id}"
    if ended is not None and claim is not None and ended.get("token") == claim.token and not newest_done(newest):
        return "failed", (str(ended.get("message") or "").strip().splitlines() or [""])[0]
    if state in _FINAL:
        return state, reason
    if not state:
        return ("waiting", "submitted, not started yet") if newest is not None else ("unknown", "no status.json")
    pid, host = status.get("pid"), str(status.get("host") or "").partition(":")[0]
    if host == host_identity().split("/")[0] and isinstance(pid, int):
        if Path(f"/proc/{pid}").exists():
            return state, reason
        return "dead", f"its driver (pid {pid}) is gone; submit the run again to resume it"
    silent = time.time() - (_number(status, "updated") or 0.0)
    if silent > _SILENT_S:
        return "dead", f"its driver on {host or '?'} has not been heard of for {duration(silent)}"
    return state, reason


def newest_done(files: SegmentFiles | None) -> bool:
    """Whether the segment is finished."""
    return files is not None and files.marker.exists()


def _newest_segment(paths: RunPaths) -> SegmentFiles | None:
    try:
        names = [p.name.removeprefix("segment_").removesuffix(".json") for p in paths.submit.glob("segment_*.json")]
    except OSError:
        return None
    numbers = [int(name) for name in names if name.isdigit()]
    return SegmentFiles(paths, max(numbers)) if numbers else None


def newest_generation(paths: RunPaths) -> Path | None:
    """The registry folder of the current generation, or the one made last where none is declared."""
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
    """Member files of the newest generation, by group and rank."""
    generation = newest_generation(paths)
    if generation is None:
        return []
    found = [read_json(path) for path in sorted((generation / "members").glob("*.json"))]
    rows = [row for row in found if row is not None and "group" in row]
    return sorted(rows, key=lambda row: (str(row["group"]), int(row.get("rank") or 0)))


def _shared_memory(rows: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Bytes of shared memory that the session holds, and those in use; None when it is over or on another host."""
    from rlhpc.runtime.comm.segments import bytes_in_use  # with numpy, which the rest of a status does without

    tokens = {str(row["token"]) for row in rows if row.get("token") and row.get("host") == host_id()}
    sessions = [Scratch(token) for token in tokens]
    found = [(scratch.used_bytes(), bytes_in_use(scratch.shm)) for scratch in sessions if scratch.shm.is_dir()]
    return (sum(held for held, _ in found), sum(used for _, used in found)) if found else None


def render_status(paths: RunPaths) -> str:
    """The run at a glance, several lines.

    Raises:
        RlhpcError: There is no such run.
    """
    if not paths.root.is_dir():
        raise RlhpcError(f"there is no run at {paths.root}; runs are in runner.run_dir, `ls` shows their names")
    status = read_json(paths.driver_state) or {}
    state, why = run_state(paths)
    lines = [f"run          {paths.root.name}  ({paths.root})", f"state        {state}" + (f": {why}" if why else "")]
    progress = _progress(status)
    if progress:
        lines.append(f"progress     {', '.join(progress)}")
    started, updated = _number(status, "started"), _number(status, "updated")
    if started is not None and updated is not None:
        age = f", last heard {duration(time.time() - updated)} ago" if state not in _FINAL else ""
        lines.append(f"running for  {duration(updated - started)} on {status.get('host', '?')}{age}")
    done = sorted(int(p.stem) for p in paths.segments.glob("*.json") if p.stem.isdigit())
    lines.append(f"segments     {', '.join(map(str, done)) + ' done' if done else 'none done'}")
    steps = [step for step, path in paths.checkpoint_steps() if (path / "COMPLETE").exists()]
    lines.append("checkpoints  " + (", ".join(f"global_step_{step}" for step in steps) if steps else "none"))
    rows = members(paths)
    shm = _shared_memory(rows)
    if shm is not None:
        lines.append(f"shared mem   {shm[0] / 2**20:.1f} MiB, payloads in use {shm[1] / 2**20:.1f} MiB")
    if rows:
        lines += ["", f"{'group':<12} {'rank':>4}  {'node':<16} {'pid':>8}  state"]
        lines += [_member_line(row, over=state in (*_FINAL, "dead")) for row in rows]
    return "\n".join(lines)


def _member_line(row: dict[str, Any], *, over: bool) -> str:
    pid, node, state = row.get("pid"), str(row.get("node") or "?"), str(row.get("state") or "?")
    if state not in (*_FINAL, "dead", "ended"):
        here = row.get("host") == host_id() and isinstance(pid, int)
        if over or (here and not Path(f"/proc/{pid}").exists()):
            state = "ended" if over else "gone"
    return f"{row['group']!s:<12} {row.get('rank', '?')!s:>4}  {node:<16} {pid if pid else '?':>8}  {state}"


def _log_files(paths: RunPaths, group: str | None, rank: int | None) -> dict[Path, str]:
    """Log files with the label for their lines: of the newest segment's folder, and where the members say."""
    labels: dict[Path, str] = {}
    for row in members(paths):
        for key in ("log_out", "log_err"):
            if row.get(key):
                labels[Path(str(row[key]))] = f"{row['group']}-{row.get('rank', 0)}"
    folders = sorted(paths.logs.glob("segment_*"), key=lambda p: p.stat().st_mtime) if paths.logs.is_dir() else []
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
    """(last lines, position after them)."""
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
    """Print the last lines of the logs, each behind `[group-rank]`; the driver's behind `[driver]`.

    Args:
        paths: The run.
        group: Only this group (`driver` is one, too).
        rank: Only this rank.
        follow: Go on printing what is added, until the run is over or Ctrl-C.
        lines: How many lines of each file.
        out: stdout by default.
        poll_s: How often to look for more.

    Raises:
        RlhpcError: There are no such logs; names what there is.
    """
    target = out or sys.stdout
    files = _log_files(paths, group, rank)
    if not files and not follow:
        there = sorted(set(_log_files(paths, None, None).values()))
        asked = (
            "" if group is None and rank is None else f" of {group or 'any group'}{'' if rank is None else f'-{rank}'}"
        )
        raise RlhpcError(f"no logs{asked} in {paths.logs}; there are: {', '.join(there) or 'none yet'}")
    at: dict[Path, int] = {}
    for path, label in files.items():
        text, at[path] = _tail(path, lines)
        _write(target, label, text)
    while follow:
        over = run_state(paths)[0] in (*_FINAL, "dead", "unknown")
        for path, label in _log_files(paths, group, rank).items():
            _write(target, label, list(_added(path, at)))
        if over:
            return
        time.sleep(poll_s)


def _added(path: Path, at: dict[Path, int]) -> Iterator[str]:
    """Whole lines that were appended since the position in `at`, which moves on."""
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
