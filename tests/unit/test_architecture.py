"""What holds the house up: imports go down only, and the light doors stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "submitit", "snakemake", "gymnasium", "matplotlib", "tensorboard")


def test_imports_go_down_only() -> None:
    lint = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
    assert "0 broken" in lint.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import rlhpc",
        "import rlhpc.config",
        "import rlhpc.runtime.paths, rlhpc.runtime.errors",
        "from rlhpc.cli import main\nfor args in (['--help'], ['train', '--help']):\n"
        "    try: main(args)\n    except SystemExit as end: assert not end.code",
    ],
    ids=["import rlhpc", "config", "paths", "rlhpc --help"],
)
def test_light_doors(code: str) -> None:
    script = f"{code}\nimport sys\nloaded = [m for m in {HEAVY!r} if m in sys.modules]\nassert not loaded, loaded"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_constraints_pin_every_core_dependency() -> None:
    import re
    import tomllib

    pins = dict(
        line.split("==")
        for line in (ROOT / "envs/constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for need in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name = re.match(r"[A-Za-z0-9_.-]+", need)
        assert name and re.sub(r"[-_.]+", "-", name[0]).lower() in pins, need
