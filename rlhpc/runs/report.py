"""report/index.html: one page about a run that needs nothing but itself (no script, no font, no network)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.checkpoint.manifest import read_manifest, verify
from rlhpc.jobs.paths import RunPaths
from rlhpc.language import curves as language
from rlhpc.metrics.accounting import write_accounting
from rlhpc.metrics.accounting_page import accounting_tables
from rlhpc.metrics.curves import (
    evaluation_curve,
    learning_curves,
    phase_columns,
    read_evaluations,
    success_curve,
    time_curves,
    time_unit,
)
from rlhpc.metrics.logger import read_metrics, series
from rlhpc.metrics.page import Cell, card, duration, facts, figures, missing, page, section, size, table
from rlhpc.metrics.placement import placement_grid
from rlhpc.metrics.provenance import read_provenance
from rlhpc.language.samples_page import write_samples_page
from rlhpc.metrics.svg import number
from rlhpc.runtime.durable import replace_durably
from rlhpc.runtime.errors import CheckpointError, RlhpcError
from rlhpc.runtime.plain import read_yaml
from rlhpc.runtime.storage import unwritten


def write_report(paths: RunPaths, output: Path | None = None) -> Path:
    """Write the report of a run, finished or not; pieces that are not there yet say so.

    That of a language-model run has a second page, samples.html, where evaluations have left samples.

    Args:
        paths: The run.
        output: Write the page there, without what refers to other files (films, samples): for use in another place.

    Returns:
        The HTML file.

    Raises:
        RlhpcError: There is no such run, or the page cannot be written.
    """
    if not paths.root.is_dir():
        raise RlhpcError(
            f"{paths.root}: no such run folder; give runner.run_dir=… and runner.name=… of an existing run"
        )
    rows = read_metrics(paths.metrics)
    provenance = read_provenance(paths)
    accounting = write_accounting(paths)
    task = language.language_task(paths)
    cards, curves, evaluation, times, checkpoints = (
        _language(paths, rows, task, output is None) if task else _embodied(paths, rows, output is None)
    )
    page_file = output or paths.report
    html = page(
        title=paths.root.name,
        subtitle=_subtitle(paths, rows, provenance),
        body=[
            cards,
            section("Learning curves", _learning(rows, curves)),
            section("Evaluation", evaluation),
            section("Placement", placement_grid(provenance.get("placement"))),
            section("Time", _time(rows, times)),
            section("Accounting", accounting_tables(accounting)) if accounting else "",
            section("Checkpoints", checkpoints),
            section("Configuration", _configuration(paths)),
            section("Provenance", _provenance(provenance)),
        ],
    )
    try:
        replace_durably(page_file, html.encode())
    except OSError as error:
        raise unwritten(error, page_file) from error
    return page_file


#: Suites whose film the page shows.
_MAX_VIDEOS = 6

Parts = tuple[str, list[str], str, list[str], str]
"""Key figures, learning curves, evaluation, time curves, checkpoints."""


def _embodied(paths: RunPaths, rows: Sequence[Mapping[str, Any]], linked: bool) -> Parts:
    evaluations = read_evaluations(paths)
    evaluated: dict[int, str] = {}
    for result in evaluations:
        rate = result.get("success_once")
        shown = f"{result['return_mean']:.1f}" if rate is None else f"{rate:.0%}, {result['return_mean']:.1f}"
        evaluated.setdefault(result["global_step"], shown)
    return (
        _key_figures(rows, evaluations),
        list(learning_curves(rows).values()),
        _evaluation(evaluations) + (_videos(evaluations) if linked else ""),
        list(time_curves(rows).values())[::-1],
        _checkpoints(paths, rows, evaluated, "train/episode_return", "training return"),
    )


def _language(paths: RunPaths, rows: Sequence[Mapping[str, Any]], task: str, linked: bool) -> Parts:
    evaluations = language.read_evaluations(paths)
    samples = write_samples_page(paths) if linked else None
    evaluated: dict[int, str] = {}
    for result in evaluations:
        evaluated.setdefault(result["global_step"], f"{result['accuracy']:.1%}")
    trained = ("train/loss", "training loss") if task == "sft" else ("train/reward", "training reward")
    return (
        language.key_figures(rows, evaluations, task),
        list(language.learning_curves(rows, task).values()),
        language.evaluation_section(evaluations, samples.name if samples else None),
        list(language.time_curves(rows).values())[::-1],
        _checkpoints(paths, rows, evaluated, *trained),
    )


def _subtitle(paths: RunPaths, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]) -> str:
    parts = [language.data_name(paths) if language.language_task(paths) else _env_id(paths)]
    if rows:
        parts.append(f"step {rows[-1]['step']}")
    if provenance.get("created"):
        parts.append(f"started {str(provenance['created']).replace('T', ' ')[:16]}")
    if provenance.get("host"):
        parts.append(f"on {provenance['host']}")
    parts.append(f"report of {time.strftime('%Y-%m-%d %H:%M')}")
    return " · ".join(part for part in parts if part)


def _env_id(paths: RunPaths) -> str:
    import yaml

    try:
        return str(read_yaml(paths.config.read_bytes())["env"]["train"]["env_id"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return ""


def _last(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = series(rows, name)[1]
    return values[-1] if values else None


def _key_figures(rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> str:
    best = max(evaluations, key=lambda r: (r.get("success_once") or 0.0, r["return_mean"]), default=None)
    last = max(evaluations, key=lambda result: result["global_step"], default=None)
    env_steps, wall, returned = (_last(rows, k) for k in ("rollout/env_steps", "time/wall_s", "train/episode_return"))
    demonstrations, loss = _last(rows, "train/demonstrations"), _last(rows, "train/loss")
    rates = series(rows, "time/env_steps_per_s")[1]
    rate = env_steps / wall if env_steps and wall else (sum(rates) / len(rates) if rates else None)

    def evaluated(title: str, result: Mapping[str, Any] | None) -> str:
        if result is None:
            return card(title, "–", "not evaluated yet")
        if isinstance(result.get("success_once"), (int, float)):
            return card(title, f"{result['success_once']:.0%}", f"success, step {result['global_step']}")
        return card(title, f"{result['return_mean']:.1f}", f"mean return, step {result['global_step']}")

    return (
        '<div class="cards">'
        + evaluated("Best evaluation", best)
        + evaluated("Last evaluation", last)
        + (
            card("Training return", "–" if returned is None else f"{returned:.1f}", "at the last step")
            + card("Environment steps", "–" if env_steps is None else number(env_steps), f"{len(rows)} training steps")
            if demonstrations is None
            else card("Demonstrations", number(demonstrations), f"{len(rows)} training steps")
            + card("Imitation loss", "–" if loss is None else f"{loss:.3g}", "at the last step")
        )
        + card("Wall time", "–" if wall is None else duration(wall), "training")
        + (
            card("Env steps / s", "–" if rate is None else f"{rate:,.0f}", "mean over the run")
            if demonstrations is None
            else ""
        )
        + "</div>"
    )


def _learning(rows: Sequence[Mapping[str, Any]], curves: list[str]) -> str:
    if not rows:
        return missing("No metrics yet: metrics.jsonl is missing or empty.")
    return figures(curves[:2]) + figures(curves[2:], "small")


def _evaluation(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if not evaluations:
        return missing("No evaluation yet: <code>rlhpc eval</code> on a checkpoint, or the workflow's eval rule.")
    best = max(result["return_mean"] for result in evaluations)
    rates = [name for name in ("success_once", "success_at_end") if any(name in result for result in evaluations)]
    rows: list[list[Cell]] = [
        [
            str(result["suite"]),
            result["global_step"],
            result.get("episodes", "–"),
            *(_rate(result, name) for name in rates),
            f"{result['return_mean']:.2f}" + (" ★" if result["return_mean"] == best else ""),
            f"{result['return_std']:.2f}" if isinstance(result.get("return_std"), (int, float)) else "–",
            f"{result['low']:.2f} … {result['high']:.2f}",
        ]
        for result in evaluations
    ]
    head = [
        "suite",
        "step",
        "episodes",
        *(name.replace("_", " ") for name in rates),
        "mean return",
        "std",
        "95 % interval",
    ]
    charts = [*(success_curve(evaluations, name) for name in rates[:1]), evaluation_curve(evaluations)]
    shown = f'<div class="scroll">{table(head, rows, text_columns={0})}</div>'
    if len(charts) > 1:
        return figures(charts) + shown
    return f'<div class="figures beside"><figure>{charts[0]}</figure>{shown}</div>'


def _rate(result: Mapping[str, Any], name: str) -> str:
    """A share of the episodes, with its interval."""
    if not isinstance(result.get(name), (int, float)):
        return "–"
    low, high = result.get(f"{name}_ci95") or (None, None)
    return f"{result[name]:.1%}" + (f" ({low:.1%} … {high:.1%})" if low is not None else "")


def _videos(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The newest film of each suite; the files lie beside the evaluations' results."""
    newest = {str(result["suite"]): result for result in evaluations if result.get("video")}
    films = [
        f'<figure><video controls muted loop preload="metadata" width="100%" '
        f'src="../eval/global_step_{result["global_step"]}/{escape(str(result["video"]), quote=True)}"></video>'
        f"<figcaption>{escape(suite)}, step {result['global_step']}: first episodes; a green frame means success"
        "</figcaption></figure>"
        for suite, result in list(newest.items())[:_MAX_VIDEOS]
    ]
    return f'<div class="figures videos">{"".join(films)}</div>' if films else ""


def _time(rows: Sequence[Mapping[str, Any]], charts: list[str]) -> str:
    if not rows:
        return missing("No metrics yet.")
    phases = {name: sum(values) for name, values in phase_columns(rows).items()}
    total = sum(phases.values())
    body: list[list[Cell]] = [
        [name, duration(seconds), f"{seconds / len(rows):.4f}", f"{seconds / total:.1%}" if total else "–"]
        for name, seconds in phases.items()
    ]
    unit, length = time_unit(total)
    head = ["phase", "total", "s per step", f"share of {total / length:.1f} {unit}"]
    return figures(charts) + (f'<div class="scroll">{table(head, body, text_columns={0})}</div>' if body else "")


def _checkpoints(
    paths: RunPaths, rows: Sequence[Mapping[str, Any]], evaluated: Mapping[int, str], metric: str, label: str
) -> str:
    found = paths.checkpoint_steps()
    if not found:
        return missing("No checkpoint yet.")
    by_step = {row["step"]: row for row in rows}
    body: list[list[Cell]] = []
    for step, path in found:
        faults = verify(path, checksums=False)
        count, total = _contents(path)
        trained = by_step.get(step, {}).get(metric)
        body.append(
            [
                path.name,
                "complete" if not faults else f"faulty: {faults[0]}",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime)),
                count,
                size(total),
                _trained(trained),
                evaluated.get(step, "–"),
            ]
        )
    head = ["checkpoint", "state", "saved", "files", "size", label, "evaluation"]
    return f'<div class="scroll">{table(head, body, text_columns={0, 1, 2})}</div>'


def _trained(value: Any) -> str:
    """A return has one decimal; a reward of about 1, or a loss, needs more."""
    if not isinstance(value, (int, float)):
        return "–"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _contents(checkpoint: Path) -> tuple[int, int]:
    try:
        files = read_manifest(checkpoint)["files"]
    except CheckpointError:
        sizes = [path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()]
        return len(sizes), sum(sizes)
    return len(files), sum(entry["size"] for entry in files.values())


def _configuration(paths: RunPaths) -> str:
    try:
        text = paths.config.read_text(errors="replace")
    except OSError:
        return missing("config.yaml is missing.")
    lines = text.count("\n")
    return f"<details><summary>config.yaml, as run ({lines} lines)</summary><pre>{escape(text)}</pre></details>"


def _provenance(record: Mapping[str, Any]) -> str:
    if not record:
        return missing("provenance.json is missing.")
    git = record.get("git") or {}
    commit = f"{git.get('commit', '')}{' (dirty)' if git.get('dirty') else ''}, {git.get('branch', '')}" if git else ""
    versions = record.get("versions") or {}
    slurm = record.get("slurm") or {}
    shown = {
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
    return facts(shown) + (
        f'<h3>Starts</h3><div class="scroll">{table(head, starts, text_columns={1, 2, 3, 4, 5})}</div>'
        if starts
        else ""
    )
