"""Sample of RLinf's example files that train: `python -m tests.rlinf_sample FOLDER [--only PATTERN]`.

FOLDER is a checkout of RLinf. Each file of `tests/data/rlinf/sample.yaml` is imported, shrunk by the overrides that the list
names, and trained for two steps on a CPU. Options of simulators are dropped, because small environments stand in for them.
The exit code is 1 if a run fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

SAMPLE = Path(__file__).parent / "data/rlinf/sample.yaml"
_ENVIRONMENTS = Path(__file__).parent / "integration/embodied"
TIMEOUT_S = 300


def sample() -> dict[str, list[str]]:
    """Returns file → overrides."""
    content = yaml.safe_load(SAMPLE.read_text())
    overrides_of = content["overrides"]
    return {
        name: [override for group in groups for override in overrides_of.get(group, [group])]
        for name, groups in content["files"].items()
    }


def train(file: Path, overrides: Sequence[str], scratch: Path) -> list[dict[str, Any]]:
    """Imports a file, trains two steps, and returns the rows of metrics.

    Raises:
        RuntimeError: A command failed; the message is the end of its output.
    """
    folder = scratch / file.stem
    folder.mkdir()
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(16)]
    (folder / "problems.jsonl").write_text("\n".join(rows) + "\n")
    _run(folder, "config", "import", str(file), "-o", "ours.yaml")
    tree = yaml.safe_load((folder / "ours.yaml").read_text())
    for side in tree.get("env", {}).values():
        side.pop("kwargs", None)
        side.pop("simulator_python", None)
    (folder / "ours.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    _run(folder, "train", "ours.yaml", "runner.name=run", "runner.run_dir=runs", *overrides)
    return [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]


def _run(folder: Path, *words: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(_ENVIRONMENTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", *words], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-600:])


def is_trained(rows: Sequence[dict[str, Any]]) -> bool:
    """Returns whether two steps ran, the second one with finite losses and gradients that are not 0."""
    numbers = [
        value for name, value in rows[-1].items() if name.startswith("train/") and name.endswith(("loss", "grad_norm"))
    ]
    return len(rows) == 2 and all(map(math.isfinite, numbers)) and any(numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the files and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="checkout of RLinf")
    parser.add_argument("--only", default="*", help="pattern of the files' names below examples/")
    options = parser.parse_args(arguments)
    os.environ["REPO_PATH"] = str(options.folder)
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, overrides in sample().items():
            if not fnmatch.fnmatchcase(name, options.only):
                continue
            try:
                rows = train(options.folder / "examples" / name, overrides, Path(scratch))
                outcome = "trained" if is_trained(rows) else f"did not train: {rows[-1] if rows else 'no steps'}"
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                outcome = f"failed: {error}"
            failed += outcome != "trained"
            print(f"{name}\t{outcome}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
