"""Terminal screen of `rlhpc watch`: runs, the ranks of one run, its curve and the end of a log, while they change."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, Input, RichLog, Sparkline, Static

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.state import duration
from rlhpc.jobs.status import helper_lines, rank_state, read_rank_records, usage_of_ranks
from rlhpc.live.metric_table import MetricTable, smooth, thin
from rlhpc.live.run_index import MAX_OPS_PER_S, RunIndex
from rlhpc.live.run_views import FIRST_METRICS, log_tail, logs
from rlhpc.metrics.charts import number
from rlhpc.runtime.text import format_bytes, one_line

#: Seconds between two looks at the runs, and maximum number of lines of a log.
_INTERVAL_S, _LOG_LINES = 2.0, 200
#: Filesystem operations that show one rank, and one run without its ranks.
_OPS_PER_RANK, _OPS_PER_RUN = 3, 14
#: Share of a curve's points over which it is averaged, if it has more than the minimum number of points.
_SMOOTHING, _MIN_SMOOTHED = 0.02, 100
_RUN_COLUMNS = ("run", "state", "step", "left", "return", "reward", "rate", "why")
_RANK_COLUMNS = ("rank", "node", "state", "CPU", "memory", "GPU", "GPU memory")
#: Group → metrics of the time that its slowest rank worked in a step; other groups have `time/<group>_s`.
_WORK_METRICS = {
    "actor": ("time/train_s", "time/score_s"), "rollout": ("time/generate_s", "time/act_s"), "env": ("time/simulate_s",)
}  # fmt: skip
#: Number of steps over which the idle share is averaged.
_IDLE_STEPS = 10
_STATE_STYLES = {
    **dict.fromkeys(("running", "finished"), "green"),
    **dict.fromkeys(("failed", "dead"), "red"),
    **dict.fromkeys(("pending", "waiting", "starting", "ending", "suspended"), "yellow"),
}


class WatchApp(App[None]):
    """Screen of several runs.

    Args:
        indices: Index of each folder that is watched.
    """

    CSS = """
    #runs { height: 45%; border: round $primary; }
    #detail { height: 1fr; }
    #left { width: 50%; }
    #title { height: auto; padding: 0 1; }
    #curve { height: 4; margin: 0 1; }
    #ranks { height: 1fr; }
    #log { width: 1fr; border: round $primary; }
    #filter { display: none; }
    #filter.shown { display: block; }
    .-narrow #runs { height: 40%; min-height: 5; border: none; scrollbar-size-horizontal: 0; }
    .-narrow #detail { layout: vertical; }
    .-narrow #left { width: 100%; height: 2fr; }
    .-narrow #curve { height: 1; }
    .-narrow.-short #curve { display: none; }
    .-narrow #ranks { min-height: 3; scrollbar-size-horizontal: 0; }
    .-narrow #log { width: 100%; height: 1fr; min-height: 3; scrollbar-size-horizontal: 0; }
    """
    #: Below a hundred columns the ranks stand above the log, and below a run's name only what fits.
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012 (textual declares the type)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall")]  # noqa: RUF012
    TITLE = "rlhpc watch"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "end"),
        Binding("slash", "find", "find runs"),
        Binding("escape", "end_find", "all runs", show=False),
        Binding("l", "next_log", "next log"),
        Binding("m", "next_metric", "next metric"),
        Binding("j", "move(1)", "next run", show=False),
        Binding("k", "move(-1)", "previous run", show=False),
    ]

    def __init__(self, indices: Sequence[RunIndex]) -> None:
        super().__init__()
        self._indices = indices
        self._rows: dict[str, dict[str, Any]] = {}
        self._paths: dict[str, RunPaths] = {}
        self._filter = ""
        self._current_run = self._detailed_run = ""
        self._next_detail_at = 0.0
        self._metrics: dict[Path, MetricTable] = {}
        self._metric_index = self._log_index = 0
        self._log_content: tuple[str, list[str]] = ("", [])

    def compose(self) -> ComposeResult:
        """Yields the parts of the screen."""
        yield Input(placeholder="words of a run's name or state", id="filter")
        yield DataTable(id="runs", cursor_type="row", zebra_stripes=True)
        with Horizontal(id="detail"):
            with Vertical(id="left"):
                yield Static(id="title")
                yield Sparkline([], id="curve")
                yield DataTable(id="ranks", cursor_type="none")
            yield RichLog(id="log", wrap=False, markup=False, highlight=False)
        yield Footer()

    def on_mount(self) -> None:
        """Fills the screen, and renews it from then on."""
        self.query_one("#runs", DataTable).add_columns(*_RUN_COLUMNS)
        self.query_one("#ranks", DataTable).add_columns(*_RANK_COLUMNS)
        self.query_one("#runs", DataTable).focus()
        for signal_number in (signal.SIGTERM, signal.SIGHUP):  # the terminal is put back before the process ends
            asyncio.get_running_loop().add_signal_handler(signal_number, self.exit)
        self.renew()
        self.set_interval(_INTERVAL_S, self.renew)

    def renew(self) -> None:
        """Reads the changed files, and updates the display."""
        rows: dict[str, dict[str, Any]] = {}
        for index in self._indices:
            for row in index.rows():
                text = f"{row['name']} {row['state']} {row['label']}".lower()
                paths = index.paths(row["name"])
                if paths is not None and all(word in text for word in self._filter.split()):
                    self._paths[str(paths.root)] = paths
                    rows[str(paths.root)] = row
        table = self.query_one("#runs", DataTable)
        if list(rows) != list(self._rows):
            self._rows = rows
            table.clear()
            for key, row in rows.items():
                table.add_row(*_run_cells(row), key=key)
            if self._current_run in rows:
                table.move_cursor(row=list(rows).index(self._current_run))
        else:
            self._rows = rows
            for position, row in enumerate(rows.values()):
                for column, cell in enumerate(_run_cells(row)):
                    table.update_cell_at(Coordinate(position, column), cell, update_width=True)
        if self._current_run not in rows:
            self._current_run = next(iter(rows), "")
        is_live = self._current_run not in rows or rows[self._current_run]["is_live"]
        if self._detailed_run != self._current_run or (is_live and time.monotonic() >= self._next_detail_at):
            self._show_current()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Shows the run under the cursor."""
        key = str(event.row_key.value) if event.data_table.id == "runs" else ""
        if key in self._rows and key != self._current_run:
            self._current_run, self._log_index = key, 0
            self._show_current()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Shows only the runs that fit the filter."""
        self._filter = event.value.lower()
        self.renew()

    def on_input_submitted(self) -> None:
        """Returns to the table, with the filter."""
        self.query_one("#runs", DataTable).focus()

    def action_find(self) -> None:
        """Opens the filter."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.focus()

    def action_end_find(self) -> None:
        """Closes the filter, and shows all runs."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.remove_class("shown")
        self.query_one("#runs", DataTable).focus()

    def action_next_log(self) -> None:
        """Shows the log of the next rank."""
        self._log_index += 1
        self._show_current()

    def action_next_metric(self) -> None:
        """Draws the next metric."""
        self._metric_index += 1
        self._show_current()

    def action_move(self, offset: int) -> None:
        """Moves the cursor in the table of runs."""
        table = self.query_one("#runs", DataTable)
        table.move_cursor(row=table.cursor_row + offset)

    def _show_current(self) -> None:
        paths = self._paths.get(self._current_run)
        self._detailed_run = self._current_run
        ranks = self.query_one("#ranks", DataTable)
        ranks.clear()
        if paths is None or not paths.root.is_dir():
            self.query_one("#title", Static).update(Text("no runs here yet" if not self._rows else "this run is gone"))
            return
        rank_rows = read_rank_records(paths)
        is_live = bool(self._rows[self._current_run]["is_live"])
        usage = usage_of_ranks(paths) if is_live else {}
        for row in rank_rows:
            ranks.add_row(*_rank_cells({**row, "state": rank_state(row, is_over=not is_live)}, usage))
        num_ops = _OPS_PER_RANK * len(rank_rows) + _OPS_PER_RUN
        self._next_detail_at = time.monotonic() + max(_INTERVAL_S, num_ops / MAX_OPS_PER_S)
        self._show_curve(paths, {str(row["group"]) for row in rank_rows})
        self._show_log(paths)

    def _show_curve(self, paths: RunPaths, groups: Collection[str]) -> None:
        table = self._metrics.setdefault(paths.metrics, MetricTable(paths.metrics))
        table.update()
        names = [name for name in FIRST_METRICS if name in table.names()] or table.names()
        name = names[self._metric_index % len(names)] if names else ""
        curve = table.curve(name) if name else None
        values = (
            []
            if curve is None
            else thin(smooth(curve, _SMOOTHING if len(curve.y) > _MIN_SMOOTHED else 0.0), 200).y.tolist()
        )
        self.query_one("#curve", Sparkline).data = values
        last_text = f"{name} {number(float(curve.y[-1]))}" if curve is not None and len(curve.y) else "no metrics yet"
        lines = [
            f"{paths.root.name}: {last_text}",
            *_idle_line(idle_shares(table, groups)),
            *helper_lines(paths, is_over=not self._rows[self._current_run]["is_live"])[:3],
        ]
        self.query_one("#title", Static).update(Text("\n".join(map(one_line, lines))))

    def _show_log(self, paths: RunPaths) -> None:
        labels = logs(paths)
        labels.sort(key=lambda label: label != "driver")
        label = labels[self._log_index % len(labels)] if labels else ""
        lines = log_tail(paths, label, _LOG_LINES) if label else []
        content = (f"{self._current_run} {label}", lines)
        if content == self._log_content:
            return
        self._log_content = content
        log = self.query_one("#log", RichLog)
        log.border_title = one_line(label) or "no logs"
        log.clear()
        for line in lines:
            log.write(Text(one_line(line)))


def idle_shares(table: MetricTable, groups: Collection[str]) -> dict[str, float]:
    """Returns, by group, the share of the last steps in which its slowest rank was idle; omits unmeasured groups."""
    steps, shares = table.curve("time/step_s"), dict[str, float]()
    if not len(steps.y):
        return shares
    for group in sorted(groups):
        work_s = np.zeros(len(steps.y[-_IDLE_STEPS:]))
        is_measured = False
        for name in _WORK_METRICS.get(group, (f"time/{group}_s",)):
            curve = table.curve(name)
            if len(curve.y) and curve.x[-1] == steps.x[-1]:
                work_s += np.interp(steps.x[-_IDLE_STEPS:], curve.x, curve.y)
                is_measured = True
        if is_measured and (length_s := float(steps.y[-_IDLE_STEPS:].sum())) > 0:
            shares[group] = min(max(1.0 - float(work_s.sum()) / length_s, 0.0), 1.0)
    return shares


def _idle_line(shares: Mapping[str, float]) -> list[str]:
    """Returns a line with the idle shares; [] if there are no shares."""
    texts = [f"{group} {100 * share:.0f} %" for group, share in shares.items()]
    return [f"idle in the last steps: {', '.join(texts)}"] if texts else []


def _rank_cells(row: Mapping[str, Any], usage: Mapping[str, tuple[float | None, ...]]) -> list[Text]:
    name = f"{row['group']}-{row.get('rank', 0)}"
    cpu, memory, accelerator_memory, utilisation = usage.get(name, (None,) * 4)
    cells = (
        name,
        row.get("node") or "?",
        row.get("state") or "?",
        "–" if cpu is None else f"{100 * cpu:.0f} %",
        "–" if memory is None else format_bytes(memory),
        "–" if utilisation is None else f"{utilisation:.0f} %",
        "–" if accelerator_memory is None else format_bytes(accelerator_memory),
    )
    return [Text(one_line(str(cell))) for cell in cells]


def _run_cells(row: dict[str, Any]) -> list[Text]:
    goal = f"/{row['max_steps']:.0f}" if row.get("max_steps", -1) >= 0 else ""
    rates = [
        f"{row[key]:.0f} {unit}"
        for key, unit in (("env_steps_per_s", "steps/s"), ("tokens_per_s", "tokens/s"))
        if key in row
    ]
    reason = re.sub(r"\s+", " ", str(row["reason"]))
    cells = (
        row["name"],
        row["state"],
        f"{row['step']:.0f}{goal}" if "step" in row else "",
        duration(row["eta_s"]) if "eta_s" in row and row["is_live"] else "",
        number(row["return"]) if "return" in row else "",
        number(row["reward"]) if "reward" in row else "",
        ", ".join(rates),
        reason,
    )
    texts = [Text(one_line(str(cell))) for cell in cells]
    texts[1].stylize(_STATE_STYLES.get(str(row["state"]), ""))
    return texts
