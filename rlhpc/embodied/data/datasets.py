"""Operations on datasets of trajectories in any format: statistics, conversion, splitting, and an HTML page.

The command `rlhpc data` calls them.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.data.lerobot_info import DEFAULT_FPS, DatasetFacts, merge_facts, source_facts, whole_rate
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.embodied.data.minari import MinariWriter, minari_spaces
from rlhpc.embodied.data.trajectories import SUFFIXES, TrajectoryWriter, metadata, read_trajectories
from rlhpc.embodied.data.trajectory import EpisodeWriter, Trajectory, shapes
from rlhpc.embodied.envs.observations import is_channel_last
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files

FORMATS = ("hdf5", "lerobot", "minari")
_KEY = "rlhpc data"


@dataclass(frozen=True)
class WriteOptions:
    """Options for writing a dataset.

    Attributes:
        to: Format, one of `FORMATS`.
        fps: LeRobot: frames per second; None takes the rate of the sources or `DEFAULT_FPS`.
        task: LeRobot: text of the task; by default the task of the sources or the id of the environment.
        videos: LeRobot: write images to mp4 files.
    """

    to: str = "hdf5"
    fps: int | None = None
    task: str | None = None
    videos: bool = False

    def lerobot_writer(self, folder: Path, env_id: str, facts: DatasetFacts) -> LeRobotWriter:
        """Builds the writer of a LeRobot dataset, for episodes of an environment and the facts of their sources."""
        fps = self.fps if self.fps is not None else facts.fps
        if fps is None:
            fps = DEFAULT_FPS
            note(f"{folder}: nothing says the frame rate; {fps} frames a second are written (--fps)")
        return LeRobotWriter(
            folder,
            fps=whole_rate(fps),
            task=self.task or facts.task or env_id,
            videos=self.videos,
            robot=facts.robot_type or env_id,
            names=facts.names,
            cameras=facts.cameras,
        )


def read(paths: Sequence[str]) -> Iterator[Trajectory]:
    """Yields the episodes of files and folders, one after the other.

    Raises:
        ConfigError: See `read_trajectories`.
    """
    return read_trajectories(paths, require=("actions",), key=_KEY)


def inspect(paths: Sequence[str]) -> dict[str, Any]:
    """Returns a summary of datasets: numbers of episodes and steps, shapes, truncations and, if recorded, returns and
    successes.
    """
    lengths, returns, successes, num_truncated, shape = list[int](), list[float](), list[bool](), 0, ""
    for trajectory in read(paths):
        shape = shape or shapes(trajectory)
        lengths.append(len(trajectory["actions"]))
        num_truncated += bool(trajectory["truncations"].any())
        if trajectory["rewards"] is not None:
            returns.append(float(trajectory["rewards"].sum()))
        if trajectory["success"] is not None:
            successes.append(bool(trajectory["success"].any()))
    summary: dict[str, Any] = {
        "env_id": _env_info(paths).get("env_id"),
        "episodes": len(lengths),
        "steps": sum(lengths),
        "length": [min(lengths), max(lengths)],
        "of_a_step": shape,
        "truncated": num_truncated,
    }
    if returns:
        summary["return"] = {"mean": float(np.mean(returns)), "min": min(returns), "max": max(returns)}
    if successes:
        summary["success_once"] = float(np.mean(successes))
    return summary


def convert(paths: Sequence[str], output: str, options: WriteOptions) -> int:
    """Writes the episodes of all datasets to one dataset, and returns the number of episodes.

    Raises:
        ConfigError: The datasets have several tasks or shapes, or lack fields that the format needs.
    """
    episodes = read(paths)
    with _open_writer(paths, output, options) as writer:
        for trajectory in episodes:
            writer.add(trajectory)
        return len(writer)


def split(paths: Sequence[str], output: str, parts: int, options: WriteOptions) -> list[tuple[str, int]]:
    """Distributes the episodes over `parts` datasets in a folder, round robin.

    Returns:
        Path and number of episodes of each part.

    Raises:
        ConfigError: The datasets have fewer episodes than parts, or see `convert`.
    """
    count = sum(1 for _ in read(paths))
    if count < parts:
        raise ConfigError(f"--parts is {parts}, but there are {count} episodes")
    suffix = ".h5" if options.to == "hdf5" else ""
    names = [str(Path(output) / f"{index}{suffix}") for index in range(parts)]
    with ExitStack() as stack:
        writers = [stack.enter_context(_open_writer(paths, name, options)) for name in names]
        for index, trajectory in enumerate(read(paths)):
            writers[index % parts].add(trajectory)
        return [(name, len(writer)) for name, writer in zip(names, writers, strict=True)]


def _open_writer(paths: Sequence[str], output: str, options: WriteOptions) -> EpisodeWriter:
    env_info, target = _env_info(paths), Path(output)
    env_id = str(env_info.get("env_id") or "unknown")
    if options.to == "hdf5" and target.exists():
        raise ConfigError(f"{target} is there already; name another file")
    facts = merge_facts(source_facts(paths, _KEY), options.fps)
    builders: dict[str, Callable[[], EpisodeWriter]] = {
        "hdf5": lambda: TrajectoryWriter(
            target,
            env_id=env_id,
            env_kwargs=env_info.get("env_kwargs"),
            max_episode_steps=env_info.get("max_episode_steps"),
            source_type="converted",
            source_desc=", ".join(paths),
            facts=facts.to_json(),
        ),
        "lerobot": lambda: options.lerobot_writer(target, env_id, facts),
        "minari": lambda: MinariWriter(target, env_id=env_id, spaces=minari_spaces(paths)),
    }
    return builders[options.to]()


def _env_info(paths: Sequence[str]) -> dict[str, Any]:
    """Returns the environment's description from ManiSkill's files; {} if no dataset is in ManiSkill's format.

    Raises:
        ConfigError: The descriptions differ.
    """
    env_info: dict[str, Any] = {}
    source: Path | None = None
    for path in paths:
        folder = expand_home(path)
        if folder.is_dir() and any((folder / name).exists() for name in ("meta", "data")):
            continue
        for file in find_files(path, SUFFIXES, _KEY):
            info = metadata(file).get("env_info") or {}
            if source is not None and info.get("env_id") != env_info.get("env_id"):
                raise ConfigError(
                    f"{file} is of {info.get('env_id')}, {source} of {env_info.get('env_id')}; one data set has one task"
                )
            source, env_info = (source, env_info) if source is not None else (file, dict(info))
    return env_info


#: Number of pictures of an episode, width of a picture in pixels, and number of lines in a plot.
_NUM_PICTURES, _WIDTH, _MAX_LINES = 8, 128, 8
_PLOT_SIZE = (420, 110)
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;background:#fff}"
    "section{border-top:1px solid #ddd;padding:1rem 0}figure{display:inline-block;margin:.3rem 1rem .3rem 0}"
    "figcaption{color:#666;font-size:.85rem}img{margin-right:2px}td,th{padding:.1rem .8rem .1rem 0;text-align:left}"
)


def page(title: str, facts: Mapping[str, Any], trajectories: Iterable[Trajectory]) -> str:
    """Returns a self-contained HTML page about a dataset.

    Args:
        title: Heading of the page.
        facts: Facts of the complete dataset, by name.
        trajectories: Episodes on the page.
    """
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(fact))}</td></tr>" for name, fact in facts.items())
    sections = "".join(_render_episode(index, trajectory) for index, trajectory in enumerate(trajectories))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1><table>{rows}</table>{sections}'
        "</body></html>\n"
    )


def _render_episode(number: int, trajectory: Trajectory) -> str:
    summary = [f"{len(trajectory['actions'])} steps"]
    if trajectory["rewards"] is not None:
        summary.append(f"return {float(trajectory['rewards'].sum()):.3f}")
    if trajectory["success"] is not None:
        summary.append("success" if trajectory["success"].any() else "no success")
    summary.append("ended by the task" if trajectory["terminations"].any() else "cut off")
    obs = trajectory["obs"]
    arrays = obs if isinstance(obs, Mapping) else {} if obs is None else {"obs": obs}
    figures = [_render_frames(name, array) for name, array in arrays.items() if array.ndim == 4]
    if trajectory["rewards"] is not None:
        figures.append(_render_plot("rewards", trajectory["rewards"]))
    figures.append(_render_plot("actions", trajectory["actions"]))
    figures += [_render_plot(name, array) for name, array in arrays.items() if array.ndim < 4]
    source = f"<p>{escape(str(trajectory['source']))}</p>"
    return f"<section><h2>Episode {number}: {', '.join(summary)}</h2>{source}{''.join(figures)}</section>"


def _render_frames(name: str, pictures: np.ndarray) -> str:
    """Returns HTML with evenly spaced pictures of an episode, from the first camera."""
    step_indices = np.unique(np.linspace(0, len(pictures) - 1, _NUM_PICTURES).round().astype(int))
    images = "".join(
        f'<img width="{_WIDTH}" alt="step {step}" src="{_png_data_url(pictures[step])}">' for step in step_indices
    )
    return f"<div>{images}</div><p>{escape(name)}: steps {', '.join(map(str, step_indices))}</p>"


def _png_data_url(picture: np.ndarray) -> str:
    from PIL import Image

    image = Image.fromarray(_to_drawable(picture))
    image.thumbnail((2 * _WIDTH, 2 * _WIDTH))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _to_drawable(picture: np.ndarray) -> np.ndarray:
    """Converts a picture to uint8 `[H, W]` or `[H, W, 3]`. Uses the first of several cameras, and the last of stacked grey
    frames.
    """
    if not is_channel_last(picture.shape):
        picture = np.moveaxis(picture, 0, -1)
    if picture.dtype != np.uint8:
        return _to_grey(picture[..., 0])
    return picture[..., :3] if picture.shape[-1] % 3 == 0 else picture[..., -1]


def _to_grey(depth: np.ndarray) -> np.ndarray:
    low, high = float(depth.min()), float(depth.max())
    return ((depth - low) / ((high - low) or 1.0) * 255).astype(np.uint8)


def _render_plot(name: str, values: np.ndarray) -> str:
    rows = np.asarray(values, np.float64).reshape(len(values), -1)
    finite = rows[np.isfinite(rows)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    lines = "".join(
        _render_line(rows[:, i], low, high, _COLORS[i % len(_COLORS)]) for i in range(min(rows.shape[1], _MAX_LINES))
    )
    lines_text = f", the first {_MAX_LINES} of {rows.shape[1]}" if rows.shape[1] > _MAX_LINES else ""
    width, height = _PLOT_SIZE
    svg_attributes = (
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}"'
    )
    caption = f"<figcaption>{escape(name)}{lines_text}: {low:.3g} to {high:.3g}</figcaption>"
    return f"<figure><svg {svg_attributes}>{lines}</svg>{caption}</figure>"


def _render_line(column: np.ndarray, low: float, high: float, color: str) -> str:
    width, height = _PLOT_SIZE
    x = np.linspace(2, width - 2, len(column)) if len(column) > 1 else np.array([width / 2])
    y = height - 4 - (column - low) / ((high - low) or 1.0) * (height - 8)
    points: Sequence[str] = [f"{px:.1f},{py:.1f}" for px, py in zip(x, y, strict=True) if np.isfinite(py)]
    return f'<polyline fill="none" stroke="{color}" points="{" ".join(points)}"/>'
