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
from rlhpc.jobs.status import best_checkpoint_text
from rlhpc.metrics.accounting import write_accounting
from rlhpc.metrics.accounting_page import accounting_tables, joined_section
from rlhpc.metrics.charts import standalone
from rlhpc.metrics.logger import read_metrics
from rlhpc.metrics.page import (
    Cell,
    decimals,
    duration,
    facts,
    figures,
    missing,
    page,
    section,
    table,
    time_unit,
    write_page,
)
from rlhpc.metrics.phase_times import phase_columns
from rlhpc.metrics.provenance import left_out, read_provenance
from rlhpc.runs.task_type import task_type_of_run
from rlhpc.runtime.disk_errors import unwritten
from rlhpc.runtime.errors import CheckpointError, UserError
from rlhpc.runtime.files import read_file
from rlhpc.runtime.text import format_bytes

_CPU = -1
_NO_METRICS = "No metrics yet: metrics.jsonl is missing or empty."


def placement_grid(placement: Mapping[str, Sequence[Mapping[str, Any]]] | None) -> str:
    """Renders a table with one row per node and one column per accelerator. Ranks without an accelerator are in column `CPU`.

    Args:
        placement: `{component: [{"rank": 0, "node": "n1", "accelerators": [0, 1]}, ...]}`; `node_rank` is used if
            `node` is missing.
    """
    if not placement or not any(placement.values()):
        return missing("No placement recorded in provenance.json.")
    try:
        return _render_grid(placement)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        return missing(f"The placement in provenance.json cannot be read: {escape(str(error))}")


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
    names = [name for _, name in cells]
    rows_html = ""
    for node_rank, name in sorted(cells):
        label = name if names.count(name) == 1 else f"{name} ({node_rank})"
        rows_html += f'<tr><td class="name">{escape(label)}</td>'
        for slot in slots:
            ranks_by_component = cells[node_rank, name].get(slot, {})
            chips = "".join(
                _render_chips(component, ranks, colors[component]) for component, ranks in ranks_by_component.items()
            )
            rows_html += f"<td>{chips}</td>" if chips else '<td class="free"></td>'
        rows_html += "</tr>"
    legend = "".join(
        f"<span>{_render_chip(component, colors[component])}{len(ranks)} process{'es' if len(ranks) != 1 else ''}</span>"
        for component, ranks in placement.items()
    )
    return (
        f'<p class="legend">{legend}</p><div class="scroll"><table class="grid"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows_html}</tbody></table></div>"
    )


def _render_chips(component: str, ranks: Sequence[int], color: int) -> str:
    """Renders one chip per rank; for more than six ranks, one chip with all ranges of ranks."""
    sorted_ranks = sorted(ranks)
    if len(sorted_ranks) <= 6:
        return "".join(_render_chip(f"{component} {rank}", color) for rank in sorted_ranks)
    stretches: list[list[int]] = []
    for rank in sorted_ranks:
        if stretches and rank == stretches[-1][-1] + 1:
            stretches[-1].append(rank)
        else:
            stretches.append([rank])
    spans = ", ".join(f"{stretch[0]}–{stretch[-1]}" if len(stretch) > 1 else str(stretch[0]) for stretch in stretches)
    return _render_chip(f"{component} {spans}", color)


def _render_chip(text: str, color: int) -> str:
    return f'<span class="chip" style="background:var(--c{color})">{escape(text)}</span>'


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
        raise unwritten(error, out_dir) from error
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
    rows = read_metrics(paths.metrics)
    provenance = read_provenance(paths)
    accounting = write_accounting(paths)
    report_sections = task_type_of_run(paths).reporting.parts(paths, rows, linked=output is None)
    html = page(
        title=paths.root.name,
        subtitle=_render_subtitle(report_sections.subject, rows, provenance),
        body=[
            report_sections.cards,
            _render_omitted(paths),
            section("Evaluation", report_sections.evaluation),
            section("Learning curves", figures(report_sections.curves) if rows else missing(_NO_METRICS)),
            section("Placement", placement_grid(provenance.get("placement"))),
            section("Time", _render_times(rows, report_sections.times)),
            section("Accounting", accounting_tables(accounting)) if accounting else "",
            section("Ranks that joined", joined_html) if (joined_html := joined_section(paths)) else "",
            section(
                "Checkpoints", _render_checkpoints(paths, rows, report_sections.evaluated, *report_sections.trained)
            ),
            section("Configuration", _render_configuration(paths)),
            section("Provenance", _render_provenance(provenance)),
        ],
    )
    return write_page(html, output or paths.report)


def _render_omitted(paths: RunPaths) -> str:
    """Renders the list of values that the report omits because of a wrong type."""
    lines = left_out(paths)
    if len(lines) > _MAX_LISTED:
        lines = [*lines[:_MAX_LISTED], f"and {len(lines) - _MAX_LISTED} files more"]
    return missing(f"Left out, of a wrong type: {escape('; '.join(lines))}") if lines else ""


def _render_subtitle(subject: str, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> str:
    created, host = provenance.get("created"), provenance.get("host")
    phrases = [
        subject,
        f"step {rows[-1]['step']}" if rows else "",
        f"started {str(created).replace('T', ' ')[:16]}" if created else "",
        f"on {host}" if host else "",
        f"report of {time.strftime('%Y-%m-%d %H:%M')}",
    ]
    return " · ".join(phrase for phrase in phrases if phrase)


def _render_times(rows: Sequence[Mapping[str, Any]], charts: list[str]) -> str:
    if not rows:
        return missing("No metrics yet.")
    phases = {name: sum(values) for name, values in phase_columns(rows).items()}
    total_s = sum(phases.values())
    table_rows: list[list[Cell]] = [
        [name, duration(seconds), f"{seconds / len(rows):.4f}", f"{seconds / total_s:.1%}" if total_s else "–"]
        for name, seconds in phases.items()
    ]
    unit, length = time_unit(total_s)
    header = ["phase", "total", "s per step", f"share of {total_s / length:.1f} {unit}"]
    return figures(charts) + (
        f'<div class="scroll">{table(header, table_rows, text_columns={0})}</div>' if table_rows else ""
    )


def _render_checkpoints(
    paths: RunPaths, rows: Sequence[Mapping[str, Any]], evaluated: Mapping[int, str], metric: str, label: str
) -> str:
    checkpoints = paths.checkpoint_steps()
    if not checkpoints:
        return missing("No checkpoint yet.")
    by_step = {row["step"]: row for row in rows}
    table_rows: list[list[Cell]] = []
    for step, path in checkpoints:
        faults = verify(path, checksums=False)
        num_files, num_bytes = _count_files(path)
        train_metric = by_step.get(step, {}).get(metric)
        table_rows.append(
            [
                path.name,
                "complete" if not faults else f"faulty: {faults[0]}",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime)),
                num_files,
                format_bytes(num_bytes),
                decimals(train_metric) if isinstance(train_metric, (int, float)) else "–",
                evaluated.get(step, "–"),
            ]
        )
    header = ["checkpoint", "state", "saved", "files", "size", label, "evaluation"]
    best = best_checkpoint_text(read_json_file(paths.driver_state) or {})
    best_note = f'<p class="legend">Best: {escape(best)} (<code>runner.keep_best</code>).</p>' if best else ""
    return f'<div class="scroll">{table(header, table_rows, text_columns={0, 1, 2})}</div>{best_note}'


def _count_files(checkpoint: Path) -> tuple[int, int]:
    try:
        files = read_manifest(checkpoint)["files"]
    except CheckpointError:
        sizes = [path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()]
        return len(sizes), sum(sizes)
    return len(files), sum(file_entry["size"] for file_entry in files.values())


def _render_configuration(paths: RunPaths) -> str:
    try:
        config_text = read_file(paths.config).decode(errors="replace")
    except OSError:
        return missing("config.yaml is missing.")
    lines = config_text.count("\n")
    return f"<details><summary>config.yaml, as run ({lines} lines)</summary><pre>{escape(config_text)}</pre></details>"


def _render_provenance(record: Mapping[str, Any]) -> str:
    if not record:
        return missing("provenance.json is missing.")
    git = record.get("git") or {}
    commit = f"{git.get('commit', '')}{' (dirty)' if git.get('dirty') else ''}, {git.get('branch', '')}" if git else ""
    versions = record.get("versions") or {}
    slurm = record.get("slurm") or {}
    rows = {
        "command": record.get("command"),
        "folder": record.get("folder"),
        "git": commit or "not in a git repository",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "host": record.get("host"),
        "platform": record.get("platform"),
        "CPUs": f"{record.get('cpus_granted', '?')} granted of {record.get('cpu_count', '?')}",
        "Slurm": ", ".join(f"{key.lower()} {value}" for key, value in slurm.items()) or "not in a Slurm job",
        "configuration SHA-256": record.get("config_sha256"),
    }
    starts: list[list[Cell]] = [
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
        f'<h3>Starts</h3><div class="scroll">{table(head, starts, text_columns={1, 2, 3, 4, 5})}</div>'
        if starts
        else ""
    )
