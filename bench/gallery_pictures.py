"""Pictures of the gallery: reports of runs as a reader sees them, a frame of a video, answers of a language model.

    python -m bench.gallery_pictures            # all; needs Chromium
    python -m bench.gallery_pictures ppo grpo

Runs that `bench.gallery` has finished are not repeated. A run is evaluated, its report is written, and the pictures go to
docs/images/gallery, with commands, times and answers in NAME.json.
"""

from __future__ import annotations

import argparse
import io
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import gallery
from bench.gallery import ROOT, RUNS
from bench.machine import machine

IMAGES = ROOT / "docs" / "images" / "gallery"
_WIDTH = 1280
_SAMPLES = 6


@dataclass(frozen=True)
class Entry:
    """Run of the gallery.

    Attributes:
        task: Task of `bench.gallery`, whose first run is shown.
        evaluation: Words of `rlhpc eval` after the run.
        video: Whether the evaluation records a video, from which a frame is shown.
        samples: Whether answers are shown.
        height: Height of the picture of the report, in pixels.
        frame: Time of the video's frame, as a fraction.
    """

    task: str
    evaluation: str
    video: bool = False
    samples: bool = False
    height: int = 900
    frame: float = 0.5


_FILM = "--episodes 10 --suite film env.eval.video_episodes=1"
ENTRIES = {
    "ppo": Entry("ppo", _FILM, video=True, height=1180),
    "sac": Entry("sac", _FILM, video=True, height=1320, frame=0.9),
    "bc": Entry("bc", _FILM, video=True, frame=0.9),
    "grpo": Entry("grpo", "--suite held_out", samples=True),
    "dpo": Entry("dpo", "--suite held_out", samples=True),
    "reward_model": Entry("reward_model", "--suite held_out"),
}


def build_commands(name: str, runs: str = RUNS) -> list[str]:
    """Returns the commands that an entry's task needs, and then the commands of the entry."""
    entry = ENTRIES[name]
    argv, run_name = gallery.build_training_commands(entry.task, runs)[0]
    folder = f"{runs}/{run_name}"
    return [shlex.join(argv), f"rlhpc eval --run {folder} {entry.evaluation}", f"rlhpc report {folder}"]


def make_pictures(name: str, runs: str) -> None:
    """Trains the missing runs, evaluates, writes the report, and takes the pictures."""
    entry = ENTRIES[name]
    gallery.run_task(entry.task, runs, set())
    _, run_name = gallery.build_training_commands(entry.task, runs)[0]
    folder = ROOT / runs / run_name
    suite = entry.evaluation.split("--suite ")[1].split()[0]
    for command in build_commands(name, runs)[1:]:
        if "rlhpc eval" not in command or not list(folder.glob(f"eval/*/{suite}.json")):
            _run_command([sys.executable, "-m", "rlhpc.cli", *shlex.split(command)[1:]])
    (result,) = folder.glob(f"eval/*/{suite}.json")
    results = json.loads(result.read_text())
    IMAGES.mkdir(parents=True, exist_ok=True)
    _write_png(_take_screenshot(folder / "report" / "index.html", entry.height), IMAGES / f"{name}.png")
    content: dict[str, Any] = {
        "commands": build_commands(name),
        "seconds": json.loads((folder / "gallery.json").read_text())["seconds"],
        "machine": machine(),
        "result": {key: results[key] for key in ("accuracy", "n", "return_mean", "episodes") if key in results},
    }
    if entry.video:
        _write_png(_read_frame(result.with_suffix(".mp4"), entry.frame), IMAGES / f"{name}_film.png")
    if entry.samples:
        content["samples"] = _read_samples(result.parent / f"{suite}.samples.jsonl")
    (IMAGES / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def _run_command(argv: Sequence[str]) -> None:
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{shlex.join(argv)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}")


def _take_screenshot(page: Path, height: int) -> bytes:
    """Returns a picture of the upper part of a page, as PNG."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise SystemExit("pictures of pages need Chromium, and there is none on PATH")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
                   "--blink-settings=preferredColorScheme=1", f"--window-size={_WIDTH},{height}"]  # fmt: skip
        _run_command([program, *options, f"--screenshot={output}", page.as_uri()])
        return output.read_bytes()


def _read_frame(video: Path, fraction: float) -> bytes:
    """Returns a frame of a video, as PNG."""
    import av

    with av.open(str(video)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    buffer = io.BytesIO()
    frames[min(int(fraction * len(frames)), len(frames) - 1)].save(buffer, "PNG")
    return buffer.getvalue()


def _write_png(png_bytes: bytes, path: Path) -> None:
    """Writes a picture with a palette, which is a third of the size."""
    from PIL import Image

    Image.open(io.BytesIO(png_bytes)).convert("RGB").quantize(128).save(path, optimize=True)


def _read_samples(path: Path) -> list[dict[str, Any]]:
    """Returns the first answers of an evaluation: prompt, response and reward."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:_SAMPLES]]
    return [{key: row[key] for key in ("prompt", "response", "answer", "reward")} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the pictures of some entries or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENTRIES)}; default: all")
    parser.add_argument("--runs", default=RUNS, help="folder of the runs")
    options = parser.parse_args(argv)
    if unknown_names := [name for name in options.names if name not in ENTRIES]:
        parser.error(f"there is no {', '.join(unknown_names)}; there are {', '.join(ENTRIES)}")
    for name in options.names or ENTRIES:
        make_pictures(name, options.runs)
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
