"""report/episodes.html: what agents' episodes left, turn by turn. One file that needs nothing but itself.

Drawn tokens are shaded by how unlikely they were; the mouse on one says its log-prob. A context that was rewritten, and each
role, is a branch beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import PAGE, RunPaths
from rlhpc.language.samples_page import read_samples, results_with_samples, samples_path, spread
from rlhpc.metrics.page import page, section, write_page
from rlhpc.runtime.files import is_count, is_number

EPISODES = 24
"""Episodes of a suite that are shown."""
_MAX_CHARACTERS = 4000
_EPISODE_CSS = """
.note{color:var(--muted);margin:0 0 14px}
.episode{border:1px solid var(--line);border-radius:10px;margin:16px 0;overflow:hidden}
.episode>header{background:var(--soft);padding:10px 16px;border-bottom:1px solid var(--line)}
.episode>header b{margin-right:14px}.episode>header span{color:var(--muted);font-size:13px;margin-right:14px}
.branches{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(320px,1fr);overflow-x:auto}
.branch{padding:10px 14px;border-left:1px solid var(--line);min-width:0}.branch:first-child{border-left:0}
.branch h4{margin:0 0 6px;font-size:13px}
.part{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;font-size:13px;margin:6px 0;padding:6px 10px;
border-radius:8px;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.read{background:var(--soft);color:var(--muted)}.drawn{border:1px solid var(--line)}
.drawn b,.read b{display:block;font:600 11.5px system-ui,sans-serif;color:var(--muted)}
.drawn i{font-style:normal;border-radius:3px}
.ok,.no{font-weight:650}.ok{color:var(--c2)}.no{color:var(--c3)}
"""
EpisodeRow = dict[str, Any]


def episodes_page(paths: RunPaths) -> Path:
    """Where the page of a run lies."""
    return paths.report.with_name("episodes.html")


def write_episodes_page(paths: RunPaths) -> Path | None:
    """Writes the page of a run's episodes, of each suite's last evaluation; None where none has several turns.

    Raises:
        RlhpcError: The page cannot be written.
    """
    sections = []
    for suite, results in results_with_samples(paths).items():
        step, path, _ = results[-1]
        rows = _episode_rows(samples_path(path))
        if rows:
            shown = [rows[at] for at in spread(len(rows), EPISODES)]
            note = f'<p class="note">{len(shown)} of {len(rows)} episodes, evenly spaced, at step {step}.</p>'
            sections.append(section(f"Suite {suite}", note + "".join(map(_episode, shown))))
    if not sections:
        return None
    target = episodes_page(paths)
    ways = f'<nav><a href="{PAGE}">The run</a></nav>'
    html = page(
        title=f"{paths.root.name}: episodes", subtitle="what was read, what was drawn, what it was worth",
        body=[ways, *sections], css=_EPISODE_CSS,
    )  # fmt: skip
    return write_page(html, target)


def _episode_rows(path: Path) -> list[EpisodeRow]:
    try:
        return [row for row in read_samples(path) if _is_episode(row.get("episode"))]
    except OSError:
        return []


def _is_episode(samples: Any) -> bool:
    """Says whether these are samples as `transcript` writes them: the file may be anybody's."""
    return isinstance(samples, list) and bool(samples) and all(
        isinstance(sample, dict) and isinstance(sample.get("parts"), list) and all(map(_is_part, sample["parts"]))
        for sample in samples
    )  # fmt: skip


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or not is_count(part.get("turn")) or not is_number(part.get("reward") or 0):
        return False
    if "drawn" not in part:
        return isinstance(part.get("read"), str)
    return isinstance(part["drawn"], list) and all(map(_is_token, part["drawn"]))


def _is_token(token: Any) -> bool:
    return isinstance(token, list) and len(token) == 2 and isinstance(token[0], str) and is_number(token[1])


def _episode(row: EpisodeRow) -> str:
    mark = '<span class="ok">✓ right</span>' if row["right"] else '<span class="no">✗ wrong</span>'
    samples: Sequence[Any] = row["episode"]
    turns = {(str(s.get("role")), p["turn"]) for s in samples for p in s["parts"] if "drawn" in p}
    facts = [f"{len(turns)} turns", f"{len(samples)} branches" if len(samples) > 1 else "one branch"]
    if "reward" in row:
        facts.append(f"reward {row['reward']:.3g}")
    if row.get("answer"):
        facts.append(f"answer {str(row['answer'])[:200]}")
    told = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    branches = "".join(_branch(number, sample, len(samples)) for number, sample in enumerate(samples, 1))
    head = f"<header><b>Problem {escape(str(row['id']))}</b>{mark} {told}</header>"
    return f'<article class="episode">{head}<div class="branches">{branches}</div></article>'


def _branch(number: int, sample: Any, of: int) -> str:
    role = escape(str(sample.get("role") or ""))
    title = " · ".join(filter(None, [role, f"branch {number} of {of}" if of > 1 else ""]))
    return f'<div class="branch"><h4>{title}</h4>{"".join(map(_part, sample["parts"]))}</div>'


def _part(part: Any) -> str:
    if "drawn" not in part:
        text = part["read"] if len(part["read"]) <= _MAX_CHARACTERS else part["read"][:_MAX_CHARACTERS] + "…"
        return f'<div class="part read" dir="auto"><b>read</b>{escape(text)}</div>'
    reward = f", reward {part['reward']:.3g}" if part.get("reward") else ""
    tokens = "".join(_token(text, logprob) for text, logprob in part["drawn"][:_MAX_CHARACTERS])
    return f'<div class="part drawn" dir="auto"><b>turn {part["turn"] + 1}{reward}</b>{tokens}</div>'


def _token(text: str, logprob: float) -> str:
    """The less likely, the fuller its colour."""
    share = round(100 * (1 - math.exp(min(0.0, logprob))))
    shade = f' style="background:color-mix(in srgb,var(--c3) {share}%,transparent)"' if share > 2 else ""
    return f'<i title="log-prob {logprob:.3f}"{shade}>{escape(text)}</i>'
