"""Index of the runs below a folder, kept up to date with few filesystem operations."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.state import FINAL, OVER, find_runs, holds_run, number_of, states
from rlhpc.runtime.errors import UserError

#: Maximum number of filesystem operations a second while nothing changes, for any number of viewers.
MAX_OPS_PER_S = 4.0
#: Minimum seconds between two looks at the runs' status, between two searches for runs, and between two Slurm queries.
_STATUS_S, _SEARCH_S, _QUERY_S = 2.0, 20.0, 30.0
#: Filesystem operations of a search, per run.
_SEARCH_OPS = 3
#: Fields of status.json that the table shows.
_NUMBERS = (
    "step", "max_steps", "eta_s", "elapsed_s", "started", "updated", "return", "reward", "loss", "env_steps",
    "env_steps_per_s", "tokens_per_s", "best_step", "best_value",
)  # fmt: skip


@dataclass
class _Entry:
    """Run of the index.

    Attributes:
        paths: Files of the run.
        sweep: Name of the run's sweep; "" outside a sweep.
        label: Label of the run in its sweep, without the seed; "" outside a sweep.
        seed: Seed of the run in its sweep.
        mtime_ns: Modification time of the run's status.json when it was read.
        status: Content of status.json.
        state, reason, job: State of the run, as `rlhpc status` shows it.
        is_checked: Whether the state takes the run's jobs into account, instead of status.json alone.
    """

    paths: RunPaths
    sweep: str = ""
    label: str = ""
    seed: Any = None
    mtime_ns: int = -1
    status: dict[str, Any] = field(default_factory=dict)
    state: str = "unknown"
    reason: str = ""
    job: str = ""
    is_checked: bool = False


class RunIndex:
    """Index of the runs below a folder. It reads the filesystem only when the runs are requested.

    Args:
        folder: Folder with runs below it, or the folder of one run.
        clock: Monotonic clock in seconds.

    Raises:
        UserError: The folder does not exist.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give the folder of your runs, by default runs")
        self.folder = folder.absolute()
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._sweeps: dict[Path, tuple[int, dict[str, tuple[str, Any]]]] = {}
        self._searched_at = self._last_read = self._queried_at = -math.inf
        self._lock = threading.Lock()
        self._query: threading.Thread | None = None

    def paths(self, name: str) -> RunPaths | None:
        """Returns the files of a run by its name in the index; None for an unknown name."""
        with self._lock:
            entry = self._entries.get(name)
        return entry.paths if entry is not None else None

    def label(self, name: str) -> str:
        """Returns the label of a run in its sweep, which runs of other seeds share; "" outside a sweep."""
        with self._lock:
            entry = self._entries.get(name)
        return f"{entry.sweep}: {entry.label}" if entry is not None and entry.sweep else ""

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each run: name, state and the numbers of its status, sorted by name."""
        with self._lock:
            self._refresh()
            return [_row(name, entry) for name, entry in sorted(self._entries.items())]

    def _refresh(self) -> None:
        now = self._clock()
        num_live = sum(entry.state not in OVER for entry in self._entries.values())
        if now - self._searched_at >= max(_SEARCH_S, 2 * _SEARCH_OPS * len(self._entries) / MAX_OPS_PER_S):
            self._searched_at = self._last_read = now
            self._search()
            self._read_statuses(list(self._entries.values()))
        elif now - self._last_read >= max(_STATUS_S, 2 * num_live / MAX_OPS_PER_S):
            self._last_read = now
            self._read_statuses([entry for entry in self._entries.values() if entry.state not in OVER])
        is_asking = self._query is not None and self._query.is_alive()
        unchecked_names = [
            name for name, entry in self._entries.items() if not entry.is_checked or entry.state not in OVER
        ]
        is_due = now - self._queried_at >= max(_QUERY_S, 20 * len(unchecked_names) / MAX_OPS_PER_S)
        if unchecked_names and not is_asking and (is_due or not all(e.is_checked for e in self._entries.values())):
            self._queried_at = now
            # A cluster whose controller is busy answers late; the table must not wait for it.
            self._query = threading.Thread(target=self._check_jobs, args=(unchecked_names,), daemon=True, name="states")
            self._query.start()

    def _search(self) -> None:
        is_run = holds_run(RunPaths(self.folder))
        found_paths = [RunPaths(self.folder)] if is_run else list(find_runs(self.folder))
        entries = {}
        for paths in found_paths:
            name = self.folder.name if is_run else str(paths.root.relative_to(self.folder))
            entry = self._entries.get(name) or _Entry(paths)
            entry.sweep, entry.label, entry.seed = self._sweep_facts(paths)
            entries[name] = entry
        self._entries = entries

    def _sweep_facts(self, paths: RunPaths) -> tuple[str, str, Any]:
        sweep = SweepPaths(paths.root.parent)
        if paths.root == self.folder:
            return "", "", None
        try:
            mtime_ns = sweep.record.stat().st_mtime_ns
        except OSError:
            return "", "", None
        known_mtime_ns, runs = self._sweeps.get(sweep.root, (-1, {}))
        if known_mtime_ns != mtime_ns:
            record = read_json_file(sweep.record) or {}
            run_records = record.get("runs")
            runs = {
                str(run_record.get("name")): (str(run_record.get("label")), run_record.get("seed"))
                for run_record in (run_records if isinstance(run_records, list) else [])
                if isinstance(run_record, dict)
            }
            self._sweeps[sweep.root] = mtime_ns, runs
        label, seed = runs.get(paths.root.name, ("", None))
        return (sweep.root.name if label else ""), label, seed

    def _read_statuses(self, entries: list[_Entry]) -> None:
        """Reads the status of runs whose status has changed."""
        for entry in entries:
            try:
                mtime_ns = entry.paths.driver_state.stat().st_mtime_ns
            except OSError:
                mtime_ns = 0
            if mtime_ns == entry.mtime_ns:
                continue
            entry.mtime_ns, entry.status = mtime_ns, read_json_file(entry.paths.driver_state) or {}
            state = str(entry.status.get("state") or "unknown")
            if not entry.is_checked or state in FINAL or entry.state in OVER:
                entry.state, entry.reason = state, str(entry.status.get("stop_reason") or "")
                entry.is_checked = False

    def _check_jobs(self, names: list[str]) -> None:
        """Replaces the states by those that follow from the runs' jobs and processes, with one Slurm query for all."""
        with self._lock:
            entries = {name: self._entries[name] for name in names if name in self._entries}
        try:
            results = states([entry.paths for entry in entries.values()])
        except OSError:  # a run folder has disappeared; the next query is due as if this one had been answered
            with self._lock:
                for entry in entries.values():
                    entry.is_checked = True
            return
        with self._lock:
            for entry, (facts, run_record) in zip(entries.values(), results, strict=True):
                entry.status = facts.status or entry.status  # of the same moment as the state
                entry.state, entry.reason, entry.job, entry.is_checked = (
                    run_record.state,
                    run_record.reason,
                    run_record.job,
                    True,
                )


def _row(name: str, entry: _Entry) -> dict[str, Any]:
    numbers = {key: number for key in _NUMBERS if (number := number_of(entry.status, key)) is not None}
    return {
        "name": name,
        "state": entry.state,
        "reason": entry.reason,
        "job": entry.job,
        "sweep": entry.sweep,
        "label": entry.label,
        "seed": entry.seed,
        "is_live": entry.state not in OVER,
        **{key: number for key, number in numbers.items() if math.isfinite(number)},
    }
