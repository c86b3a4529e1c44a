"""Operations on datasets of trajectories in any format: statistics, conversion, splitting, and an HTML page; and the
facts of a dataset that its episodes do not contain: frame rate, robot, names of components and cameras, task.

The command `rlhpc data` calls them.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.data.column_statistics import RunningStatistics
from rlhpc.embodied.data.lerobot_reader import lerobot_facts, marks_interventions
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.embodied.data.minari import MinariWriter, minari_spaces
from rlhpc.embodied.data.trajectories import SUFFIXES, TrajectoryWriter, metadata, read_trajectories
from rlhpc.embodied.data.trajectory import EpisodeWriter, Trajectory, shapes
from rlhpc.embodied.envs.observations import is_channel_last
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, find_files

_FORMATS = ("hdf5", "lerobot", "minari")
_KEY = "rlhpc data PATH"


@dataclass(frozen=True)
class WriteOptions:
    """Options for writing a dataset.

    Attributes:
        to: Format, one of `_FORMATS`.
        fps: LeRobot: frames per second; None takes the rate of the sources or `_DEFAULT_FPS`.
        task: LeRobot: text of the task; by default the task of the sources or the id of the environment.
        videos: LeRobot: write images to mp4 files.
    """

    to: str = "hdf5"
    fps: int | None = None
    task: str | None = None
    videos: bool = False

    def lerobot_writer(self, folder: Path, env_id: str, dataset_facts: DatasetFacts) -> LeRobotWriter:
        """Builds the writer of a LeRobot dataset, for episodes of an environment and the facts of their sources."""
        fps = self.fps if self.fps is not None else dataset_facts.fps
        if fps is None:
            fps = _DEFAULT_FPS
            note(f"{folder}: nothing says the frame rate; {fps} frames a second are written (--fps)")
        return LeRobotWriter(
            folder,
            fps=_whole_rate(fps),
            task=self.task or dataset_facts.task or env_id,
            videos=self.videos,
            robot=dataset_facts.robot_type or env_id,
            names=dataset_facts.names,
            cameras=dataset_facts.cameras,
        )


def read(paths: Sequence[str], *, load_images: bool = True) -> Iterator[Trajectory]:
    """Returns an iterator of the episodes of files and folders (`read_trajectories`). If a dataset marks interventions, the
    episodes of the others have none.

    Raises:
        ConfigError: See `read_trajectories`.
    """
    trajectories = read_trajectories(paths, require=("actions",), key=_KEY, load_images=load_images)
    if any(marks_interventions(expand_home(path)) for path in paths):
        return ({"taken": np.zeros(len(trajectory["actions"]), bool), **trajectory} for trajectory in trajectories)
    return trajectories


def inspect(paths: Sequence[str]) -> dict[str, Any]:
    """Returns a summary of datasets: numbers of episodes and steps, shapes, truncations and, if recorded, returns and
    successes.
    """
    episode_lengths, returns, successes, num_truncated, shape = list[int](), list[float](), list[bool](), 0, ""
    for trajectory in read(paths, load_images=False):
        shape = shape or shapes(trajectory)
        episode_lengths.append(len(trajectory["actions"]))
        num_truncated += bool(trajectory["truncations"].any())
        if trajectory["rewards"] is not None:
            returns.append(float(trajectory["rewards"].sum()))
        if trajectory["success"] is not None:
            successes.append(bool(trajectory["success"].any()))
    summary: dict[str, Any] = {
        "env_id": _read_env_info(paths).get("env_id"),
        "episodes": len(episode_lengths),
        "steps": sum(episode_lengths),
        "length": [min(episode_lengths), max(episode_lengths)],
        "of_a_step": shape,
        "truncated": num_truncated,
    }
    if returns:
        summary["return"] = {"mean": float(np.mean(returns)), "min": min(returns), "max": max(returns)}
    if successes:
        summary["success_once"] = float(np.mean(successes))
    return summary


def norm_stats(paths: Sequence[str]) -> dict[str, Any]:
    """Returns the statistics of states and actions in openpi's form (`norm_stats.json`), from one pass over the numbers of the
    datasets.

    Raises:
        ConfigError: An episode has no observed state.
    """
    running_by_name = {"state": RunningStatistics(), "actions": RunningStatistics()}
    for trajectory in read(paths, load_images=False):
        obs = trajectory["obs"]
        state_obs = obs.get("state") if isinstance(obs, Mapping) else obs
        if not isinstance(state_obs, np.ndarray):
            raise ConfigError(
                f"{trajectory['source']} has no observation state, of which statistics are to be computed"
            )
        running_by_name["state"].add(state_obs[:-1])
        running_by_name["actions"].add(trajectory["actions"])
    statistic_names = ("mean", "std", "q01", "q99", "min", "max")
    statistics = {name: column.all() for name, column in running_by_name.items()}
    return {
        "norm_stats": {
            name: {key: column[key].tolist() for key in statistic_names} for name, column in statistics.items()
        }
    }


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


def split(paths: Sequence[str], output: str, num_parts: int, options: WriteOptions) -> list[tuple[str, int]]:
    """Distributes the episodes over `num_parts` datasets in a folder, round robin.

    Returns:
        Path and number of episodes of each part.

    Raises:
        ConfigError: The datasets have fewer episodes than parts, or see `convert`.
    """
    num_episodes = sum(1 for _ in read(paths, load_images=False))
    if num_episodes < num_parts:
        raise ConfigError(f"--parts is {num_parts}, but there are {num_episodes} episodes")
    suffix = ".h5" if options.to == "hdf5" else ""
    output_names = [str(Path(output) / f"{index}{suffix}") for index in range(num_parts)]
    with ExitStack() as stack:
        writers = [stack.enter_context(_open_writer(paths, name, options)) for name in output_names]
        for index, trajectory in enumerate(read(paths)):
            writers[index % num_parts].add(trajectory)
        return [(name, len(writer)) for name, writer in zip(output_names, writers, strict=True)]


def _open_writer(paths: Sequence[str], output: str, options: WriteOptions) -> EpisodeWriter:
    env_info, target = _read_env_info(paths), Path(output)
    env_id = str(env_info.get("env_id") or "unknown")
    if options.to == "hdf5" and target.exists():
        raise ConfigError(f"{target} is there already; name another file")
    dataset_facts = merge_facts(source_facts(paths, _KEY), options.fps)
    builders: dict[str, Callable[[], EpisodeWriter]] = {
        "hdf5": lambda: TrajectoryWriter(
            target,
            env_id=env_id,
            env_kwargs=env_info.get("env_kwargs"),
            max_episode_steps=env_info.get("max_episode_steps"),
            source_type="converted",
            source_desc=", ".join(paths),
            facts=dataset_facts.to_json(),
        ),
        "lerobot": lambda: options.lerobot_writer(target, env_id, dataset_facts),
        "minari": lambda: MinariWriter(target, env_id=env_id, spaces=minari_spaces(paths)),
    }
    return builders[options.to]()


def _read_env_info(paths: Sequence[str]) -> dict[str, Any]:
    """Returns the environment's description from ManiSkill's files; {} if no dataset is in ManiSkill's format.

    Raises:
        ConfigError: The descriptions differ.
    """
    env_info: dict[str, Any] = {}
    source_file: Path | None = None
    for path in paths:
        folder = expand_home(path)
        if folder.is_dir() and any((folder / name).exists() for name in ("meta", "data")):
            continue
        for file in find_files(path, SUFFIXES, _KEY):
            info = metadata(file).get("env_info") or {}
            if source_file is not None and info.get("env_id") != env_info.get("env_id"):
                raise ConfigError(
                    f"{file} is of {info.get('env_id')}, {source_file} of {env_info.get('env_id')}; one data set has one task"
                )
            source_file, env_info = (source_file, env_info) if source_file is not None else (file, dict(info))
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
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(fact_value))}</td></tr>" for name, fact_value in facts.items()
    )
    sections = "".join(_render_episode(index, trajectory) for index, trajectory in enumerate(trajectories))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1><table>{rows}</table>{sections}'
        "</body></html>\n"
    )


def _render_episode(episode_number: int, trajectory: Trajectory) -> str:
    summary = [f"{len(trajectory['actions'])} steps"]
    if trajectory["rewards"] is not None:
        summary.append(f"return {float(trajectory['rewards'].sum()):.3f}")
    if trajectory["success"] is not None:
        summary.append("success" if trajectory["success"].any() else "no success")
    summary.append("ended by the task" if trajectory["terminations"].any() else "cut off")
    obs = trajectory["obs"]
    arrays = obs if isinstance(obs, Mapping) else {} if obs is None else {"obs": obs}
    figure_htmls = [_render_frames(name, array) for name, array in arrays.items() if array.ndim == 4]
    if trajectory["rewards"] is not None:
        figure_htmls.append(_render_plot("rewards", trajectory["rewards"]))
    figure_htmls.append(_render_plot("actions", trajectory["actions"]))
    figure_htmls += [_render_plot(name, array) for name, array in arrays.items() if array.ndim < 4]
    source_html = f"<p>{escape(str(trajectory['source']))}</p>"
    return f"<section><h2>Episode {episode_number}: {', '.join(summary)}</h2>{source_html}{''.join(figure_htmls)}</section>"


def _render_frames(name: str, pictures: np.ndarray) -> str:
    """Returns HTML with evenly spaced pictures of an episode, from the first camera."""
    step_indices = np.unique(np.linspace(0, len(pictures) - 1, _NUM_PICTURES).round().astype(int))
    images_html = "".join(
        f'<img width="{_WIDTH}" alt="step {step}" src="{_encode_png_url(pictures[step])}">' for step in step_indices
    )
    return f"<div>{images_html}</div><p>{escape(name)}: steps {', '.join(map(str, step_indices))}</p>"


def _encode_png_url(picture: np.ndarray) -> str:
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
    min_depth, max_depth = float(depth.min()), float(depth.max())
    return ((depth - min_depth) / ((max_depth - min_depth) or 1.0) * 255).astype(np.uint8)


def _render_plot(name: str, values: np.ndarray) -> str:
    rows = np.asarray(values, np.float64).reshape(len(values), -1)
    finite = rows[np.isfinite(rows)]
    low_value, high_value = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    lines = "".join(
        _render_line(rows[:, i], low_value, high_value, _COLORS[i % len(_COLORS)])
        for i in range(min(rows.shape[1], _MAX_LINES))
    )
    lines_text = f", the first {_MAX_LINES} of {rows.shape[1]}" if rows.shape[1] > _MAX_LINES else ""
    width, height = _PLOT_SIZE
    svg_attributes = (
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}"'
    )
    caption = f"<figcaption>{escape(name)}{lines_text}: {low_value:.3g} to {high_value:.3g}</figcaption>"
    return f"<figure><svg {svg_attributes}>{lines}</svg>{caption}</figure>"


def _render_line(column: np.ndarray, low_value: float, high_value: float, color: str) -> str:
    width, height = _PLOT_SIZE
    x = np.linspace(2, width - 2, len(column)) if len(column) > 1 else np.array([width / 2])
    y = height - 4 - (column - low_value) / ((high_value - low_value) or 1.0) * (height - 8)
    line_points: Sequence[str] = [f"{px:.1f},{py:.1f}" for px, py in zip(x, y, strict=True) if np.isfinite(py)]
    return f'<polyline fill="none" stroke="{color}" points="{" ".join(line_points)}"/>'


#: Frames per second if neither a source nor an environment declares a rate; ManiSkill's control rate.
_DEFAULT_FPS = 20


@dataclass(frozen=True)
class DatasetFacts:
    """Facts of a dataset that conversion, merging, splitting and recording retain.

    Attributes:
        fps: Frames per second; None if unknown.
        robot_type: LeRobot's name of the robot.
        names: Names of a column's components, as in LeRobot's `info.json`.
        cameras: Names of the camera columns, in the order of their channels in `rgb`.
        task: Text of the only task; None if the dataset has several tasks or no task.
    """

    fps: float | None = None
    robot_type: str | None = None
    names: dict[str, Any] = field(default_factory=dict)
    cameras: tuple[str, ...] = ()
    task: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the known facts as a JSON object."""
        facts_by_name = {"fps": self.fps, "robot_type": self.robot_type, "names": self.names, "task": self.task}
        return {name: fact_value for name, fact_value in facts_by_name.items() if fact_value} | (
            {"cameras": list(self.cameras)} if self.cameras else {}
        )


def facts_of(json_values: Mapping[str, Any]) -> DatasetFacts:
    """Builds facts from the JSON of `DatasetFacts.to_json`. Malformed facts count as unknown."""
    fps, column_names, cameras = json_values.get("fps"), json_values.get("names"), json_values.get("cameras")
    has_rate = isinstance(fps, int | float) and math.isfinite(fps) and fps > 0
    text_facts = {
        name: json_values[name] if isinstance(json_values.get(name), str) else None for name in ("robot_type", "task")
    }
    return DatasetFacts(
        fps=fps if has_rate else None,
        names=dict(column_names) if isinstance(column_names, Mapping) else {},
        cameras=tuple(map(str, cameras)) if isinstance(cameras, list) else (),
        **text_facts,
    )


_FPS_HINT = "give --fps, which all frames then have"


def source_facts(paths: Iterable[str], key: str) -> list[tuple[str, DatasetFacts]]:
    """Returns the facts of each file or folder, from LeRobot's `info.json` or an HDF5 file's JSON."""
    named_facts: list[tuple[str, DatasetFacts]] = []
    for path in paths:
        folder = expand_home(path)
        if (folder / "meta" / "info.json").is_file():
            named_facts.append((str(folder), facts_of(lerobot_facts(folder))))
        elif not (folder / "data").exists():  # Minari's files contain no such facts
            for file in find_files(path, SUFFIXES, key):
                env_info = metadata(file).get("env_info") or {}
                recorded_facts = env_info.get("dataset")
                named_facts.append((str(file), facts_of(recorded_facts if isinstance(recorded_facts, Mapping) else {})))
    return named_facts


def frame_rates(paths: Iterable[str], key: str) -> dict[float, str]:
    """Returns the frame rates of files and folders, each with the first source that has it."""
    rates: dict[float, str] = {}
    for source_name, dataset_facts in source_facts(paths, key):
        if dataset_facts.fps is not None:
            rates.setdefault(dataset_facts.fps, source_name)
    return rates


def merge_facts(
    named_facts: Iterable[tuple[str, DatasetFacts]], fps: int | None = None, fps_hint: str = _FPS_HINT
) -> DatasetFacts:
    """Merges the facts of several sources. A source without a fact does not contradict the others.

    Args:
        named_facts: Name and facts of each source.
        fps: Frame rate from the user, which replaces the rates of the sources.
        fps_hint: What to do about sources with different rates, for the message.

    Raises:
        ConfigError: Two sources contradict each other.
    """
    facts_by_name: dict[str, tuple[str, Any]] = {}
    tasks: set[str | None] = set()
    merged_names: dict[str, Any] = {}
    for source_name, dataset_facts in named_facts:
        tasks.add(dataset_facts.task)
        for fact_name in ("fps", "robot_type", "cameras"):
            fact_value = getattr(dataset_facts, fact_name)
            if not fact_value or (fact_name == "fps" and fps is not None):
                continue
            first_source, first_value = facts_by_name.setdefault(fact_name, (source_name, fact_value))
            if first_value != fact_value:
                hint = fps_hint if fact_name == "fps" else "convert them one by one"
                raise ConfigError(
                    f"{source_name} has {fact_name} {_format(fact_value)}, {first_source} has {_format(first_value)}; {hint}"
                )
        for column, fact_value in dataset_facts.names.items():
            if merged_names.setdefault(column, fact_value) != fact_value:
                raise ConfigError(
                    f"{source_name} names the components of {column} {fact_value}, sources before it "
                    f"{merged_names[column]}; one dataset "
                    "has one order of components"
                )
    shared_facts = {fact_name: fact_value for fact_name, (_, fact_value) in facts_by_name.items()}
    if fps is not None:
        shared_facts["fps"] = fps
    return DatasetFacts(names=merged_names, task=tasks.pop() if len(tasks) == 1 else None, **shared_facts)


def _format(fact_value: Any) -> str:
    return ", ".join(fact_value) if isinstance(fact_value, tuple) else str(fact_value)


def _whole_rate(fps: float) -> int | float:
    """Returns an integral rate as an int, as LeRobot writes it; other rates stay floats."""
    rounded_fps = round(fps)
    return rounded_fps if abs(fps - rounded_fps) < 1e-6 * fps else fps
