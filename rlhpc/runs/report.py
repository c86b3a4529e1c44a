"""Report of a run: report/index.html, a self-contained page without scripts, fonts or network access."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import read_manifest, verify
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.start_times import format_ranks, open_phases, phase_times, read_start_marks
from rlhpc.jobs.status import best_checkpoint_text, newest_generation
from rlhpc.metrics.accounting import render_accounting_tables, render_joined_section, write_accounting
from rlhpc.metrics.charts import Line, line_chart, standalone
from rlhpc.metrics.energy import energy_section
from rlhpc.metrics.logger import has_number, read_metrics, series
from rlhpc.metrics.page import (
    Cell,
    decimals,
    facts,
    page,
    render_figures,
    render_placeholder,
    section,
    table,
    time_unit,
    write_page,
)
from rlhpc.metrics.phase_times import phase_columns
from rlhpc.metrics.provenance import list_skipped_results, read_provenance, resumes_with_changes
from rlhpc.runs.step_pages import render_steps_section
from rlhpc.runs.task_type import task_type_of_run
from rlhpc.runtime.disk_errors import unwritten_page_error
from rlhpc.runtime.errors import CheckpointError, UserError
from rlhpc.runtime.files import read_file
from rlhpc.runtime.start_phases import read_phases
from rlhpc.runtime.text import format_bytes, format_duration
from rlhpc.weights.transfer_metrics import GIGABYTES, RATE, SECONDS, SHARE, summarize_transfers

_CPU = -1
_NO_METRICS = "No metrics yet: metrics.jsonl is missing or empty."


def render_placement_grid(placement: Mapping[str, Sequence[Mapping[str, Any]]] | None) -> str:
    """Renders a table with one row per node and one column per accelerator. Ranks without an accelerator are in column `CPU`.

    Args:
        placement: `{component: [{"rank": 0, "node": "n1", "accelerators": [0, 1]}, ...]}`; `node_rank` is used if
            `node` is missing.
    """
    if not placement or not any(placement.values()):
        return render_placeholder("No placement recorded in provenance.json.")
    try:
        return _render_grid(placement)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return render_placeholder(f"The placement in provenance.json cannot be read: {escape(str(error))}")


def _render_grid(placement: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    # The key of a node is its rank and its name, because virtual nodes on one machine may share the name.
    cells: dict[tuple[int, str], dict[int, dict[str, list[int]]]] = {}
    for component, ranks in placement.items():
        for rank_entry in ranks:
            node_rank = int(rank_entry.get("node_rank", 0))
            slots_of = cells.setdefault((node_rank, str(rank_entry.get("node", f"node {node_rank}"))), {})
            for slot in rank_entry.get("accelerators") or [_CPU]:
                slots_of.setdefault(int(slot), {}).setdefault(component, []).append(int(rank_entry["rank"]))
    used_slots = {slot for slots_of in cells.values() for slot in slots_of}
    slots = [*range(max(used_slots) + 1), *([_CPU] if _CPU in used_slots else [])]
    colors = {component: index % 8 for index, component in enumerate(placement)}
    head = "".join(f"<th>{'CPU' if slot == _CPU else f'accelerator {slot}'}</th>" for slot in slots)
    cell_names = [name for _, name in cells]
    rows_html = ""
    for node_rank, name in sorted(cells):
        label = name if cell_names.count(name) == 1 else f"{name} ({node_rank})"
        rows_html += f'<tr><td class="name">{escape(label)}</td>'
        for slot in slots:
            ranks_by_component = cells[node_rank, name].get(slot, {})
            chips_html = "".join(
                _render_chips(component, ranks, colors[component]) for component, ranks in ranks_by_component.items()
            )
            rows_html += f"<td>{chips_html}</td>" if chips_html else '<td class="free"></td>'
        rows_html += "</tr>"
    legend_html = "".join(
        f"<span>{_render_chip(component, colors[component])}{len(ranks)} process{'es' if len(ranks) != 1 else ''}</span>"
        for component, ranks in placement.items()
    )
    return (
        f'<p class="legend">{legend_html}</p><div class="scroll"><table class="grid"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows_html}</tbody></table></div>"
    )


def _render_chips(component: str, ranks: Sequence[int], color: int) -> str:
    """Renders one chip per rank; for more than six ranks, one chip with all ranges of ranks."""
    sorted_ranks = sorted(ranks)
    if len(sorted_ranks) <= 6:
        return "".join(_render_chip(f"{component} {rank}", color) for rank in sorted_ranks)
    return _render_chip(f"{component} {format_ranks(sorted_ranks)}", color)


def _render_chip(chip_text: str, color: int) -> str:
    return f'<span class="chip" style="background:var(--c{color})">{escape(chip_text)}</span>'


#: Maximum number of lines about values of a wrong type.
_MAX_LISTED = 20


def write_curves(paths: RunPaths, out_dir: Path) -> list[Path]:
    """Writes every curve of the run as a self-contained SVG file.

    Args:
        paths: Files of the run. A curve without data shows a note.
        out_dir: Output folder; created if missing.

    Returns:
        The written files: all curves of `Reporting.curves`, and other curves with logged metrics.
    """
    charts = task_type_of_run(paths).reporting.charts(paths, read_metrics(paths.metrics))
    chart_files = []
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for name, svg in charts.items():
            chart_files.append(out_dir / f"{name}.svg")
            chart_files[-1].write_text(standalone(svg))
    except OSError as error:
        raise unwritten_page_error(error, out_dir) from error
    return chart_files


def write_report(paths: RunPaths, output: Path | None = None) -> Path:
    """Writes the report of a finished or unfinished run. A note replaces each missing part.

    The report of a language model has a second page, samples.html, if evaluations have written samples.

    Args:
        paths: The run.
        output: File for a page without links to other files (videos, samples), which can lie in another folder; by default
            the page of the run folder.

    Returns:
        The HTML file.

    Raises:
        UserError: The run does not exist.
        RlhpcError: The page cannot be written.
    """
    if not paths.root.is_dir():
        raise UserError(f"{paths.root}: no such run folder; give runner.run_dir=… and runner.name=… of an existing run")
    html = render_report(paths, write_accounting(paths), linked=output is None)
    return write_page(html, output or paths.report)


def render_report(paths: RunPaths, accounting: Mapping[str, Any] | None, *, linked: bool) -> str:
    """Renders the report of a run as HTML.

    Args:
        paths: The run.
        accounting: Record of the cost of the run's Slurm jobs; None if there are no jobs.
        linked: Write pages of samples next to the report, and link to them and to videos.
    """
    rows = read_metrics(paths.metrics)
    provenance = read_provenance(paths)
    report_sections = task_type_of_run(paths).reporting.parts(paths, rows, linked=linked)
    return page(
        title=paths.root.name,
        subtitle=_render_subtitle(report_sections.subject, rows, provenance),
        body=[
            report_sections.cards,
            _render_omitted(paths),
            section("Evaluation", report_sections.evaluation),
            section(
                "Learning curves",
                _render_resumes(provenance)
                + (render_figures(report_sections.curves) if rows else render_placeholder(_NO_METRICS)),
            ),
            section("Placement", render_placement_grid(provenance.get("placement"))),
            section("Time", _render_times(rows, report_sections.times)),
            section("Traced steps", render_steps_section(paths, linked=linked)),
            section("Weight sync", transfers_html) if (transfers_html := _render_transfers(rows)) else "",
            section("Start", start_html) if (start_html := _render_start(paths)) else "",
            section("Accounting", render_accounting_tables(accounting)) if accounting else "",
            section("Energy", energy_html) if (energy_html := energy_section(paths, rows)) else "",
            section("Ranks that joined", joined_html) if (joined_html := render_joined_section(paths)) else "",
            section(
                "Checkpoints", _render_checkpoints(paths, rows, report_sections.evaluated, *report_sections.trained)
            ),
            section("Configuration", _render_configuration(paths)),
            section("Provenance", _render_provenance(provenance)),
        ],
    )


def _render_resumes(provenance: Mapping[str, Any]) -> str:
    """Renders the steps from which on the run had a different training configuration; "" if no resume changed it."""
    resume_items = "".join(
        f"<li>from step {step} on: <code>{escape(config_changes)}</code></li>"
        for step, config_changes in resumes_with_changes(provenance)
    )
    return f"<p>Resumed with another configuration:</p><ul>{resume_items}</ul>" if resume_items else ""


def _render_omitted(paths: RunPaths) -> str:
    """Renders the list of values that the report omits because of a wrong type."""
    lines = list_skipped_results(paths)
    if len(lines) > _MAX_LISTED:
        lines = [*lines[:_MAX_LISTED], f"and {len(lines) - _MAX_LISTED} files more"]
    return render_placeholder(f"Left out, of a wrong type: {escape('; '.join(lines))}") if lines else ""


def _render_subtitle(run_subject: str, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> str:
    created_at, host = provenance.get("created"), provenance.get("host")
    subtitle_phrases = [
        run_subject,
        f"step {rows[-1]['step']}" if rows else "",
        f"started {str(created_at).replace('T', ' ')[:16]}" if created_at else "",
        f"on {host}" if host else "",
        f"report of {time.strftime('%Y-%m-%d %H:%M')}",
    ]
    return " · ".join(phrase for phrase in subtitle_phrases if phrase)


def _render_times(rows: Sequence[Mapping[str, Any]], charts: list[str]) -> str:
    if not rows:
        return render_placeholder("No metrics yet.")
    phases = {name: sum(phase_values) for name, phase_values in phase_columns(rows).items()}
    total_s = sum(phases.values())
    table_rows: list[list[Cell]] = [
        [name, format_duration(phase_s), f"{phase_s / len(rows):.4f}", f"{phase_s / total_s:.1%}" if total_s else "–"]
        for name, phase_s in phases.items()
    ]
    unit_name, unit_s = time_unit(total_s)
    header = ["phase", "total", "s per step", f"share of {total_s / unit_s:.1f} {unit_name}"]
    return render_figures(charts) + (
        f'<div class="scroll">{table(header, table_rows, text_columns={0})}</div>' if table_rows else ""
    )


def _render_transfers(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders how the weights reached the rollout ranks, and the rate of each step; "" if there is no measured step."""
    shown_names = (GIGABYTES, SECONDS, RATE)
    typed_rows = [
        {
            key: metric_value
            for key, metric_value in row.items()
            if key.startswith((*shown_names, SHARE)) and has_number(row, key)
        }
        for row in rows
    ]
    if not any(GIGABYTES in row and SECONDS in row for row in typed_rows):
        return ""
    summary, rates = summarize_transfers(typed_rows), series(rows, RATE)
    pairs = {
        "strategy": summary.strategy,
        "a version": format_bytes(int(summary.gigabytes * 1e9)),
        "seconds of a version": f"{summary.seconds:.3g} (median)",
        "rate": "" if summary.rate is None else f"{summary.rate:.3g} GB/s (median)",
    }
    rate_chart = line_chart("Rate of weight updates", "global step", "GB/s", [Line("", *rates, color=6)])
    return facts(pairs) + (render_figures([rate_chart]) if len(rates[0]) > 1 else "")


def _render_start(paths: RunPaths) -> str:
    """Renders the phases of the newest start, by worker group; "" if the ranks reported none."""
    generation = newest_generation(paths)
    ranks = [] if generation is None else read_phases(generation)
    if generation is None or not ranks:
        return ""
    start_marks = read_start_marks(generation)
    first_step = start_marks.get("first_step")
    if first_step is None:
        phases_text = "; ".join(
            f"{phase.group} {format_ranks(phase.ranks)} in {phase.phase!r}" for phase in open_phases(ranks)
        )
        legend = f"The first step was not finished; the last phases: {phases_text}."
    else:
        ranks = [rank.truncate_at(first_step) for rank in ranks]
        stages = {
            "launched": "ranks launched",
            "ranks": "ranks ready",
            "ready": "models ready",
            "first_step": "first step done",
        }
        legend = "Seconds after the start of the driver: " + ", ".join(
            f"{stage_text} {start_marks[name] - start_marks['driver']:.1f}"
            for name, stage_text in stages.items()
            if {name, "driver"} <= start_marks.keys()
        )
    rows: list[list[Cell]] = [
        [row.group, row.phase, row.num_ranks, f"{row.longest_s:.2f}", row.slowest_rank, f"{row.shortest_s:.2f}"]
        for row in phase_times(ranks)
    ]
    header = ["group", "phase", "ranks", "longest, s", "of rank", "shortest, s"]
    return f'<p class="legend">{escape(legend)}</p><div class="scroll">{table(header, rows, text_columns={0, 1})}</div>'


def _render_checkpoints(
    paths: RunPaths, rows: Sequence[Mapping[str, Any]], scores_by_step: Mapping[int, str], metric: str, label: str
) -> str:
    checkpoints = paths.checkpoint_steps()
    if not checkpoints:
        return render_placeholder("No checkpoint yet.")
    by_step = {row["step"]: row for row in rows}
    table_rows: list[list[Cell]] = []
    for step, path in checkpoints:
        file_faults = verify(path, checks_digests=False)
        num_files, num_bytes = _count_files(path)
        train_metric = by_step.get(step, {}).get(metric)
        table_rows.append(
            [
                path.name,
                "complete" if not file_faults else f"faulty: {file_faults[0]}",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime)),
                num_files,
                format_bytes(num_bytes),
                decimals(train_metric) if isinstance(train_metric, (int, float)) else "–",
                scores_by_step.get(step, "–"),
            ]
        )
    header = ["checkpoint", "state", "saved", "files", "size", label, "evaluation"]
    best_text = best_checkpoint_text(read_json_file(paths.driver_state) or {})
    best_note = f'<p class="legend">Best: {escape(best_text)} (<code>runner.keep_best</code>).</p>' if best_text else ""
    return f'<div class="scroll">{table(header, table_rows, text_columns={0, 1, 2})}</div>{best_note}'


def _count_files(checkpoint: Path) -> tuple[int, int]:
    try:
        files = read_manifest(checkpoint)["files"]
    except CheckpointError:
        file_sizes = [path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()]
        return len(file_sizes), sum(file_sizes)
    return len(files), sum(file_entry["size"] for file_entry in files.values())


def _render_configuration(paths: RunPaths) -> str:
    try:
        config_text = read_file(paths.config).decode(errors="replace")
    except OSError:
        return render_placeholder("config.yaml is missing.")
    num_lines = config_text.count("\n")
    return (
        f"<details><summary>config.yaml, as run ({num_lines} lines)</summary><pre>{escape(config_text)}</pre></details>"
    )


def _render_provenance(record: Mapping[str, Any]) -> str:
    if not record:
        return render_placeholder("provenance.json is missing.")
    git = record.get("git") or {}
    commit_text = (
        f"{git.get('commit', '')}{' (dirty)' if git.get('dirty') else ''}, {git.get('branch', '')}" if git else ""
    )
    versions = record.get("versions") or {}
    slurm = record.get("slurm") or {}
    rows = {
        "command": record.get("command"),
        "folder": record.get("folder"),
        "git": commit_text or "not in a git repository",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "host": record.get("host"),
        "platform": record.get("platform"),
        "CPUs": f"{record.get('cpus_granted', '?')} granted of {record.get('cpu_count', '?')}",
        "Slurm": ", ".join(f"{key.lower()} {variable_value}" for key, variable_value in slurm.items())
        or "not in a Slurm job",
        "configuration SHA-256": record.get("config_sha256"),
    }
    start_rows: list[list[Cell]] = [
        [
            index,
            str(segment.get("started", "–")).replace("T", " "),
            str(segment.get("host", "–")),
            str((segment.get("slurm") or {}).get("JOB_ID", "–")),
            str((segment.get("git") or {}).get("commit", "–"))[:10],
            str(segment.get("command", "–")),
        ]
        for index, segment in enumerate(record.get("segments") or [], start=1)
    ]
    head = ["start", "time", "host", "job", "commit", "command"]
    return facts(rows) + (
        f'<h3>Starts</h3><div class="scroll">{table(head, start_rows, text_columns={1, 2, 3, 4, 5})}</div>'
        if start_rows
        else ""
    )
