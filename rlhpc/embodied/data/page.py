"""A page that shows the episodes of a dataset: pictures at equal distances, and the course of rewards, actions and numbers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from rlhpc.embodied.data.trajectory import Trajectory
from rlhpc.embodied.envs.observations import is_channel_last

#: Pictures of an episode, their width in pixels, and lines of a plot.
_PICTURES, _WIDTH, _LINES = 8, 128, 8
_SIZE = (420, 110)
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;background:#fff}"
    "section{border-top:1px solid #ddd;padding:1rem 0}figure{display:inline-block;margin:.3rem 1rem .3rem 0}"
    "figcaption{color:#666;font-size:.85rem}img{margin-right:2px}td,th{padding:.1rem .8rem .1rem 0;text-align:left}"
)


def page(title: str, facts: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> str:
    """The page, whole in itself.

    Args:
        title: Its heading.
        facts: Of the whole dataset, by name.
        trajectories: The episodes that it shows.
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    shown = "".join(_episode(number, trajectory) for number, trajectory in enumerate(trajectories))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1><table>{rows}</table>{shown}'
        "</body></html>\n"
    )


def _episode(number: int, trajectory: Trajectory) -> str:
    words = [f"{len(trajectory['actions'])} steps"]
    if trajectory["rewards"] is not None:
        words.append(f"return {float(trajectory['rewards'].sum()):.3f}")
    if trajectory["success"] is not None:
        words.append("success" if trajectory["success"].any() else "no success")
    words.append("ended by the task" if trajectory["terminations"].any() else "cut off")
    obs = trajectory["obs"]
    parts = obs if isinstance(obs, Mapping) else {} if obs is None else {"obs": obs}
    figures = [_film(name, value) for name, value in parts.items() if value.ndim == 4]
    if trajectory["rewards"] is not None:
        figures.append(_plot("rewards", trajectory["rewards"]))
    figures.append(_plot("actions", trajectory["actions"]))
    figures += [_plot(name, value) for name, value in parts.items() if value.ndim < 4]
    source = f"<p>{escape(str(trajectory['source']))}</p>"
    return f"<section><h2>Episode {number}: {', '.join(words)}</h2>{source}{''.join(figures)}</section>"


def _film(name: str, pictures: np.ndarray) -> str:
    """Pictures of the first camera."""
    at = np.unique(np.linspace(0, len(pictures) - 1, _PICTURES).round().astype(int))
    shown = "".join(f'<img width="{_WIDTH}" alt="step {i}" src="{_png(pictures[i])}">' for i in at)
    return f"<div>{shown}</div><p>{escape(name)}: steps {', '.join(map(str, at))}</p>"


def _png(picture: np.ndarray) -> str:
    from PIL import Image

    image = Image.fromarray(_drawable(picture))
    image.thumbnail((2 * _WIDTH, 2 * _WIDTH))
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _drawable(picture: np.ndarray) -> np.ndarray:
    """Returns uint8 `[H, W]` or `[H, W, 3]`: of several cameras the first, of stacked grey frames the newest, the last."""
    if not is_channel_last(picture.shape):
        picture = np.moveaxis(picture, 0, -1)
    if picture.dtype != np.uint8:
        return _grey(picture[..., 0])
    return picture[..., :3] if picture.shape[-1] % 3 == 0 else picture[..., -1]


def _grey(depth: np.ndarray) -> np.ndarray:
    low, high = float(depth.min()), float(depth.max())
    return ((depth - low) / ((high - low) or 1.0) * 255).astype(np.uint8)


def _plot(name: str, values: np.ndarray) -> str:
    rows = np.asarray(values, np.float64).reshape(len(values), -1)
    finite = rows[np.isfinite(rows)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    lines = "".join(_line(rows[:, i], low, high, _COLORS[i % len(_COLORS)]) for i in range(min(rows.shape[1], _LINES)))
    of = f", the first {_LINES} of {rows.shape[1]}" if rows.shape[1] > _LINES else ""
    width, height = _SIZE
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}"'
    caption = f"<figcaption>{escape(name)}{of}: {low:.3g} to {high:.3g}</figcaption>"
    return f"<figure><svg {box}>{lines}</svg>{caption}</figure>"


def _line(column: np.ndarray, low: float, high: float, color: str) -> str:
    width, height = _SIZE
    x = np.linspace(2, width - 2, len(column)) if len(column) > 1 else np.array([width / 2])
    y = height - 4 - (column - low) / ((high - low) or 1.0) * (height - 8)
    points: Sequence[str] = [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b)]
    return f'<polyline fill="none" stroke="{color}" points="{" ".join(points)}"/>'
