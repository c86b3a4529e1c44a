"""Pages of traced steps: the time of each category, the estimated gains of changes, and the timeline."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.page import Cell, card, page, render_placeholder, section, table, write_page
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.files import read_yaml_file
from rlhpc.runtime.text import format_duration, printable
from rlhpc.tracing.analysis import GroupLoad, StepAnalysis, analyze
from rlhpc.tracing.bottlenecks import MATERIAL, Bottleneck, find_bottlenecks
from rlhpc.tracing.model import Trace
from rlhpc.tracing.timeline import timeline

#: Colour of each category in charts and timelines; the other categories are drawn without one.
COLORS = {
    "engine": "--c0", "train": "--c1", "simulator": "--c2", "save": "--c3", "judge": "--c4", "weights": "--c5",
    "receive": "--c6", "send": "--c6", "tool": "--c2", "turn": "--c7",
}  # fmt: skip
#: Meaning of the categories, for readers who have not seen a trace.
_MEANINGS = {
    "engine": "generation of answers", "train": "training and log-probs", "simulator": "simulation and actions",
    "save": "checkpoints", "judge": "rewards", "weights": "weights to and from engines", "receive": "messages on their way",
    "send": "sending messages", "tool": "tools of agents", "turn": "turns of agents", "call": "other work of a rank's method",
    "phase": "other work of the driver", "step": "other work of the driver", "wait": "waits that no message explains",
    "none": "nothing recorded",
}  # fmt: skip
#: Minimum share of a step that the key of the bar names.
_MIN_SHOWN = 0.005
#: Maximum number of pages that a report writes, and of rows of a table of ranks.
_MAX_PAGES, _MAX_RANKS = 30, 200
_SCRIPT = Path(__file__).with_name("timeline.js")
_CSS = """
.card b{white-space:normal;overflow-wrap:anywhere;font-size:20px}
.timeline{position:relative;border:1px solid var(--line);border-radius:10px;background:var(--panel);padding:8px 10px}
.timeline canvas{display:block;width:100%}#timeline-axis{height:22px}#timeline-canvas{cursor:crosshair;touch-action:pan-y}
#timeline-canvas:focus-visible{outline:2px solid var(--c0);outline-offset:1px}
#timeline-scroll{max-height:70vh;overflow-y:auto}
.tools{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin:0 0 8px}
.tools button{font:inherit;color:inherit;background:var(--soft);border:1px solid var(--line);border-radius:6px;min-height:32px;
min-width:36px;padding:2px 10px;cursor:pointer}.tools button[aria-pressed=true]{border-color:var(--c0);color:var(--c0)}
.tip{position:absolute;pointer-events:none;background:var(--panel);border:1px solid var(--line);border-radius:6px;
padding:4px 8px;font-size:12.5px;max-width:min(420px,80%);z-index:2;box-shadow:0 2px 8px #0003;overflow-wrap:anywhere}
#timeline-status{min-height:1.5em;margin:8px 0 0;font-size:13.5px;overflow-wrap:anywhere}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;border:1px solid var(--muted);margin-right:6px;
vertical-align:-1px}
.bar{display:flex;height:30px;border-radius:8px;overflow:hidden;border:1px solid var(--line);margin:0 0 12px}
.timeline+.legend,.advice+.legend{margin-top:12px}.bar i{display:block;min-width:1px}
.advice{margin:0;padding:0;list-style:none;display:grid;gap:12px}
.advice li{border:1px solid var(--line);border-left:4px solid var(--c3);border-radius:8px;background:var(--panel);
padding:10px 14px}
.advice b{display:block}.advice p{margin:4px 0 0;overflow-wrap:anywhere}
"""


def read_steps(paths: RunPaths) -> tuple[Trace, dict[int, StepAnalysis]] | None:
    """Reads the trace of a run and analyzes its steps; None if the run has no trace or it cannot be read."""
    from rlhpc.tracing.read import read_trace  # heavy for the many runs without a trace

    try:
        trace = read_trace(paths.root)
    except (RlhpcError, OSError):
        return None
    return trace, analyze(trace)


def read_config(paths: RunPaths) -> Mapping[str, Any]:
    """Reads a run's config.yaml; {} if it is missing or broken."""
    import yaml

    try:
        config = read_yaml_file(paths.config)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def step_rows(analyses: Mapping[int, StepAnalysis], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each traced step, as JSON values.

    Returns:
        `step`, `seconds`, `length` with its unit, `categories` with their shares of the critical path, and `bottlenecks` by
        title.
    """
    return [
        {
            "step": step,
            "seconds": analysis.length_ns / 1e9,
            "length": format_duration(analysis.length_ns / 1e9),
            "categories": {
                category: category_ns / max(1, analysis.length_ns)
                for category, category_ns in analysis.path_categories().items()
            },
            "bottlenecks": [printable(bottleneck.title) for bottleneck in find_bottlenecks(analysis, config)],
        }
        for step, analysis in analyses.items()
    ]


def render_steps_section(paths: RunPaths, *, linked: bool) -> str:
    """Renders the report's section about traced steps, and writes their pages next to the report.

    Args:
        paths: The run.
        linked: Write pages of the steps, and link to them.
    """
    traced_steps = read_steps(paths)
    if traced_steps is None or not traced_steps[1]:
        return render_placeholder(
            "No step of this run was traced. Record some with <code>runner.trace.steps=10-12</code>, or, while the run goes "
            f"on, with <code>rlhpc trace {escape(printable(str(paths.root)))} --steps 3</code>; their pages then say what "
            "each step was spent on, and what would make it shorter."
        )
    trace, analyses = traced_steps
    config = read_config(paths)
    rows: list[list[Cell]] = []
    links: dict[str, str] = {}
    pages = list(analyses)[-_MAX_PAGES:] if linked else []
    for row in step_rows(analyses, config):
        step = row["step"]
        shares_text = ", ".join(
            f"{category} {category_share:.0%}" for category, category_share in list(row["categories"].items())[:3]
        )
        rows.append([f"step {step}", row["length"], shares_text, ", ".join(row["bottlenecks"]) or "none"])
        if step in pages:
            path = step_page_path(paths, step)
            write_page(render_step(trace, analyses[step], config), path)
            links[f"step {step}"] = f"{path.parent.name}/{path.name}"
    html = table(["step", "length", "critical path", "bottlenecks"], rows, text_columns={0, 2, 3})
    for name, link in links.items():
        html = html.replace(f'<td class="t">{name}</td>', f'<td class="t"><a href="{escape(link)}">{name}</a></td>', 1)
    return f'<div class="scroll">{html}</div>'


def step_page_path(paths: RunPaths, step: int) -> Path:
    """Returns the file of a step's page."""
    return paths.report.with_name("steps") / f"step-{step}.html"


def render_step(trace: Trace, step: StepAnalysis, config: Mapping[str, Any]) -> str:
    """Renders the page of a traced step as HTML, with its data and its script inside.

    Args:
        trace: The trace.
        step: Analysis of the step.
        config: Configuration of the run, by which advice is chosen.
    """
    bottlenecks = find_bottlenecks(step, config)
    return page(
        title=f"{trace.run}, step {step.step}",
        subtitle=_format_subtitle(trace, step),
        body=[
            _render_cards(step, bottlenecks),
            section("What would help", _render_bottlenecks(bottlenecks)),
            section("What the step was spent on", _render_path(step)),
            section("Timeline", _render_timeline(trace, step)),
            section("Ranks", _render_groups(step.groups)),
        ],
        css=_CSS,
        script=_read_script(),
        script_policy=step_policy(),
    )


def step_policy() -> str:
    """Returns the content security policy of a step's page: it runs the timeline's script, and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(_read_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    )


@functools.cache
def _read_script() -> str:
    return _SCRIPT.read_text()


def _format_subtitle(trace: Trace, step: StepAnalysis) -> str:
    hosts = {track.host for track in trace.tracks}
    error_ns = max((clock.error_ns for clock in trace.clocks), default=0)
    subtitle_phrases = [
        format_duration(step.length_ns / 1e9),
        f"{len(trace.tracks)} ranks on {len(hosts)} host{'s' if len(hosts) != 1 else ''}",
        f"clocks agree within {error_ns / 1e6:.3g} ms" if error_ns else "",
    ]
    return " · ".join(phrase for phrase in subtitle_phrases if phrase)


def _render_cards(step: StepAnalysis, bottlenecks: Sequence[Bottleneck]) -> str:
    category, category_ns = next(iter(step.path_categories().items()))
    idlest = max(step.groups, key=lambda group: group.idle_share, default=None)
    has_checkpoint = any(span.category == "save" for span in step.spans.get(step.driver_name, ()))
    cards = [
        card(
            "Length",
            format_duration(step.length_ns / 1e9),
            "with its checkpoint" if has_checkpoint else "from start to end",
        ),
        card(
            "Most of the critical path",
            category,
            f"{category_ns / step.length_ns:.0%}: {_MEANINGS.get(category, category)}",
        ),
    ]
    if idlest is not None:
        cards.append(card("Most idle group", idlest.group, f"idle {idlest.idle_share:.0%} of the step"))
    title = bottlenecks[0].title if bottlenecks else "none"
    note_text = (
        f"up to {bottlenecks[0].share:.0%} shorter without"
        if bottlenecks
        else f"no cause takes {MATERIAL:.0%} of the step"
    )
    cards.append(card("Largest bottleneck", title, note_text))
    return f'<div class="cards">{"".join(cards)}</div>'


def _render_bottlenecks(bottlenecks: Sequence[Bottleneck]) -> str:
    if not bottlenecks:
        return render_placeholder(f"Nothing stands out: no known cause takes {MATERIAL:.0%} of this step or more.")
    bottleneck_items = "".join(
        f"<li><b>{escape(bottleneck.title)}: up to {format_duration(bottleneck.gain_ns / 1e9)} "
        f"({bottleneck.share:.0%}) shorter</b>"
        f"<p>{escape(bottleneck.evidence[:1].upper() + bottleneck.evidence[1:])}.</p>"
        f"<p>Change <code>{escape(bottleneck.key)}</code>: {escape(bottleneck.advice)}.</p></li>"
        for bottleneck in bottlenecks
    )
    note_text = (
        '<p class="legend">Gains are estimates, at most, of each change alone; record a step again after a change.</p>'
    )
    return f'<ul class="advice">{bottleneck_items}</ul>{note_text}'


def _render_swatch(category: str) -> str:
    return f'<span class="swatch" style="background:var({COLORS.get(category, "--soft")})"></span>'


def _render_path(step: StepAnalysis) -> str:
    """Renders the critical path's time by category as a bar, and by group and category as a table."""
    categories = step.path_categories()
    bar_html = "".join(
        f'<i style="width:{100 * category_ns / step.length_ns:.3f}%;background:var({COLORS.get(category, "--soft")})" '
        f'title="{escape(category)} {category_ns / step.length_ns:.0%}"></i>'
        for category, category_ns in categories.items()
    )
    legend_html = "".join(
        f"<span>{_render_swatch(category)}{escape(category)} {nanoseconds / step.length_ns:.0%}</span>"
        for category, nanoseconds in categories.items()
        if nanoseconds >= _MIN_SHOWN * step.length_ns
    )
    rows: list[list[Cell]] = [
        [
            group or "–", category, _MEANINGS.get(category, ""), format_duration(group_ns / 1e9),
            f"{group_ns / step.length_ns:.1%}",
        ]
        for (group, category), group_ns in step.path_groups().items()
    ]  # fmt: skip
    label = ", ".join(f"{category} {nanoseconds / step.length_ns:.0%}" for category, nanoseconds in categories.items())
    return (
        '<p class="legend">Along the critical path: the chain of work and messages, over all ranks, that decided when the '
        "step ended. Other work does not lengthen the step.</p>"
        f'<div class="bar" role="img" aria-label="{escape(label)}">{bar_html}</div><p class="legend">{legend_html}</p>'
        f'<div class="scroll">{table(["group", "category", "meaning", "time", "share"], rows, text_columns={0, 1, 2})}</div>'
    )


def _render_timeline(trace: Trace, step: StepAnalysis) -> str:
    data = timeline(trace, step)
    legend_html = "".join(
        f"<span>{_render_swatch(category)}{escape(category)}</span>"
        for category in [*COLORS, "wait"]
        if category in data["texts"]
    )
    omitted_text = (
        f'<p class="legend">{data["omitted"]} ranks without spans are left out.</p>' if data["omitted"] else ""
    )
    legend_keys = (
        "drag: zoom; ← → + − 0: move, zoom, whole; ↑ ↓ n p: rows and spans; Enter: zoom to the span; c: critical path"
    )
    return (
        '<div class="timeline" id="timeline"><div class="tools">'
        '<button type="button" id="timeline-out" aria-label="zoom out">−</button>'
        '<button type="button" id="timeline-in" aria-label="zoom in">+</button>'
        '<button type="button" id="timeline-whole">whole step</button>'
        '<button type="button" id="timeline-path" aria-pressed="true">critical path</button></div>'
        '<canvas id="timeline-axis" aria-hidden="true"></canvas>'
        f'<div id="timeline-scroll"><canvas id="timeline-canvas" tabindex="0" role="application" '
        f'aria-label="timeline of the ranks; {legend_keys}" aria-describedby="timeline-status"></canvas></div>'
        '<div class="tip" id="timeline-tip" hidden></div><p id="timeline-status" role="status"></p></div>'
        f'<p class="legend">{legend_html}</p><p class="legend">The line above the tracks is the critical path. '
        f"{legend_keys}.</p>{omitted_text}"
        f"{_render_json('timeline-data', data)}{_render_json('timeline-colors', COLORS)}"
    )


def _render_json(name: str, json_value: Any) -> str:
    """Renders JSON values as an element that no browser runs; nothing in them can end the element."""
    json_text = json.dumps(json_value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{json_text}</script>'


def _render_groups(groups: Sequence[GroupLoad]) -> str:
    if not groups:
        return render_placeholder("The trace has no track of a worker group.")
    summary: list[list[Cell]] = [
        [
            group.group, len(group.ranks), f"{group.idle_share:.0%}", group.slowest.track,
            format_duration(group.slowest.busy_ns / 1e9), format_duration(group.excess_ns / 1e9),
        ]
        for group in groups
    ]  # fmt: skip
    loads = [rank_load for group in groups for rank_load in group.ranks]
    rows: list[list[Cell]] = [
        [
            rank_load.track, rank_load.host, format_duration(rank_load.busy_ns / 1e9), f"{rank_load.idle_share:.0%}",
            ", ".join(
                f"{category} {format_duration(category_ns / 1e9)}"
                for category, category_ns in sorted(rank_load.categories.items(), key=lambda named: -named[1])[:4]
            ),
        ]
        for rank_load in loads[:_MAX_RANKS]
    ]  # fmt: skip
    head = ["group", "ranks", "idle", "slowest rank", "it worked", "longer than the median"]
    omission_text = f'<p class="legend">{len(loads) - _MAX_RANKS} ranks more.</p>' if len(loads) > _MAX_RANKS else ""
    return (
        f'<div class="scroll">{table(head, summary, text_columns={0, 3})}</div><details><summary>all ranks</summary>'
        f'<div class="scroll">{table(["rank", "host", "worked", "idle", "most of it"], rows, text_columns={0, 1, 4})}</div>'
        f"{omission_text}</details>"
    )
