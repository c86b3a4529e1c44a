"""Generated parts of the pages on algorithms: keys with defaults, configurations, charts and figures.

    python -m bench.gallery_pages        # writes the parts anew; make docs-reference does so, too

A part stands between two comments: `<!-- keys off_policy: algorithm.tau … -->`, `<!-- config sac -->`, `<!-- curve sac -->`,
`<!-- run sac -->` or `<!-- pictures sac -->`, and `<!-- end -->`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from bench.gallery import CONFIGS, CURVES, ROOT, RUNS, TASKS, build_training_commands, read_points
from bench.gallery_pictures import ENTRIES, IMAGES
from rlhpc.config.reference import default_text
from rlhpc.runs.task_type import task_type_keys
from rlhpc.runtime.errors import ConfigError

PAGES = (*sorted((ROOT / "docs" / "algorithms").glob("*.md")), ROOT / "docs" / "gallery.md")
_PART = re.compile(r"(<!-- (keys|config|curve|run|pictures) ([^>]*?) -->\n).*?(<!-- end -->)", re.S)


def render_keys(arguments: str, page: Path) -> str:
    """Returns a table of keys with their defaults and meanings, from the schema of a task type."""
    name, _, paths = arguments.partition(":")
    tree = task_type_keys(name.strip(), str(page)).by_path
    rows = []
    for path in paths.split():
        if path not in tree:
            raise ConfigError(f"{page}: {name} has no key {path}")
        key = tree[path]
        doc_text = " ".join(key.doc.split()).replace("|", "\\|")
        rows.append(f"| `{path}` | {default_text(key.default)} | {doc_text} |\n")
    return "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)


def render_config(arguments: str, page: Path) -> str:
    """Returns a configuration of configs/algorithms as a block, with its path."""
    path = CONFIGS / f"{arguments}.yaml"
    return f"`{path.relative_to(ROOT)}`:\n\n```yaml\n{path.read_text()}```\n"


def render_curves(arguments: str, page: Path) -> str:
    """Returns the pictures of charts, with a sentence about how each was made."""
    folder = os.path.relpath(CURVES, page.parent)
    names = arguments.split()
    pictures_text = "\n".join(f"![{_read_title(name)}]({folder}/{name}.svg)" for name in names)
    return f"{pictures_text}\n\n" + "\n".join(f"- {describe_origin(name)}" for name in names) + "\n"


def _read_title(name: str) -> str:
    task_curve = TASKS[name].curve
    assert task_curve is not None
    return f"{task_curve.title}: {task_curve.label} by {task_curve.x[1]}"


def describe_origin(name: str) -> str:
    """Returns a sentence about a chart: command, seeds, time, machine and commit."""
    if not (CURVES / f"{name}.json").is_file():
        raise ConfigError(f"{CURVES / name}.json does not exist: make curve-{name}")
    points = read_points(name)
    seeds = sorted({row["seed"] for row in points["points"]})
    seconds = statistics.median(points["seconds"])
    host = points["machine"]
    seeds_text = (
        f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))} (mean, lowest to highest)"
    )
    return (
        f"`{points['command']}`: {seeds_text}, {seconds:.0f} s a run with its start, on {host['cores']} "
        f"cores of {host['cpu']} "
        f"that other programs used, too (load {host['load']:.0f}), commit {host['commit']}, {host['date']}"
    )


def render_commands(arguments: str, page: Path) -> str:
    """Returns the commands of a task and of the tasks that it needs, as a block."""
    lines: list[str] = []

    def add(name: str) -> None:
        for needed_task in TASKS[name].needs:
            add(needed_task)
        commands = ["rlhpc " + command.format(runs=RUNS) for command, _ in TASKS[name].commands]
        if TASKS[name].config is not None:
            commands.append(shlex.join(build_training_commands(name)[0][0]))
        lines.extend(command for command in commands if command not in lines)

    add(arguments)
    return "```bash\n" + "\n".join(lines) + "\n```\n"


def render_pictures(arguments: str, page: Path) -> str:
    """Returns the pictures of a run of the gallery, its commands, times and answers."""
    path = IMAGES / f"{arguments}.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: python -m bench.gallery_pictures {arguments}")
    content, entry = json.loads(path.read_text()), ENTRIES[arguments]
    folder = IMAGES.relative_to(ROOT / "docs")
    commands = "\n".join([f"make curve-{entry.task}", *content["commands"][1:]])
    lines = [f"```bash\n{commands}\n```\n"]
    host = content["machine"]
    result = content["result"]
    figures = (
        f"accuracy {result['accuracy']:.3g} of {result['n']} held-out rows"
        if "accuracy" in result
        else f"mean return {result['return_mean']:.0f} in {result['episodes']} episodes"
    )
    lines.append(
        f"Training took {content['seconds']} s with its start, on {host['cores']} cores of {host['cpu']} that other programs "
        f"used, too. Evaluation: {figures}.\n"
    )
    if entry.video:
        lines.append(f"![A frame of the evaluation's video]({folder}/{arguments}_film.png)\n")
    if entry.samples:
        lines.append("| prompt | answer of the model | right answer | reward |\n|---|---|---|---|")
        lines += [
            f"| `{row['prompt']}` | `{row['response']}` | `{row['answer']}` | {row['reward']:g} |"
            for row in content["samples"]
        ]
        lines.append("")
    lines.append(f"![The upper part of the run's report]({folder}/{arguments}.png)")
    return "\n".join(lines) + "\n"


_RENDERERS: dict[str, Callable[[str, Path], str]] = {
    "keys": render_keys,
    "config": render_config,
    "curve": render_curves,
    "run": render_commands,
    "pictures": render_pictures,
}


def render_page(page: Path) -> str:
    """Returns a page with its generated parts replaced."""

    def replace(match: re.Match[str]) -> str:
        start, kind, arguments, end = match.groups()
        return f"{start}\n{_RENDERERS[kind](arguments, page)}\n{end}"

    return _PART.sub(replace, page.read_text())


def main() -> int:
    """Writes the generated parts of all pages; returns 2 if a page cannot be generated."""
    num_failed = 0
    for page in PAGES:
        try:
            content = render_page(page)
        except ConfigError as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            num_failed = 2
            continue
        if content != page.read_text():
            page.write_text(content)
            print(page.relative_to(ROOT))
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
