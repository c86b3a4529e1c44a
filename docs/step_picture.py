"""Picture of a traced step's page, for the documentation.

    rlhpc train configs/quickstart.yaml runner.name=traced runner.max_steps=6 runner.save_interval=2 runner.trace.steps=3-5
    python docs/step_picture.py runs/traced 4 docs/images/step.png

Needs Chromium, and Pillow to make the file small.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.report import write_report
from rlhpc.runs.step_pages import step_page_path
from tests.chromium_pipe import Browser

WIDTH, HEIGHT = 1100, 1240


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run with a trace")
    parser.add_argument("step", type=int, help="traced step")
    parser.add_argument("output", type=Path, help="PNG file")
    arguments = parser.parse_args()
    paths = RunPaths(arguments.run)
    write_report(paths)
    page = step_page_path(paths, arguments.step).absolute().as_uri()
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder), WIDTH, HEIGHT) as browser:
        browser.open(page)
        browser.wait("document.querySelector('#timeline-canvas')?.dataset.range !== undefined")
        # The table of the critical path is long, and the timeline below it shows more.
        browser.evaluate("document.querySelectorAll('.bar ~ .scroll').forEach((table) => table.remove())")
        browser.evaluate("document.documentElement.style.overflow = 'hidden'")
        browser.wait("document.querySelector('#timeline-canvas').dataset.range !== undefined")
        browser.picture(arguments.output)
    from PIL import Image

    with Image.open(arguments.output) as picture:
        picture.convert("RGB").quantize(255).save(arguments.output, optimize=True)


if __name__ == "__main__":
    main()
