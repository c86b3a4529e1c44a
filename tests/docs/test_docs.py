"""The documentation is kept true: links resolve, keys and commands exist, code blocks run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.cli import build_parser
from rlhpc.config import reference
from rlhpc.config.load import all_keys

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SMALL = (
    "runner.max_steps=2", "runner.segments=1", "runner.save_interval=1", "algorithm.rollout_steps=32",
    "algorithm.update_epochs=1", "env.eval.num_episodes=2",
)  # fmt: skip


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_keys_and_commands_exist(page):
    keys = set(all_keys())
    sections = {key.rsplit(".", i)[0] for key in keys for i in (1, 2, 3)}
    commands = set(build_parser()._subparsers._group_actions[0].choices)
    text = page.read_text()
    pattern = r"\b((?:runner|algorithm|env|rollout|actor|cluster|workflow)\.[a-z_]+(?:\.[a-z_]+)*)(?==|`)"
    for key in re.findall(pattern, text):
        assert key in keys | sections or any(key.startswith(k + ".") for k in keys), f"{page.name}: no key {key}"
    for command in re.findall(r"^rlhpc ([a-z]+)", text, re.M):
        assert command in commands, f"{page.name}: no command rlhpc {command}"


def test_the_reference_of_keys_is_current():
    assert (ROOT / "docs" / "reference" / "config.md").read_text() == reference.render(), "run: make docs"


@pytest.mark.timeout(900)
def test_the_tutorials_commands_run_in_order(tmp_path):
    """Each `rlhpc` line of the tutorial, in a folder of its own, with few and small steps."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    lines = [line for block in blocks(ROOT / "docs/tutorial/quickstart.md", "bash") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("rlhpc ")]
    assert len(commands) >= 6
    for words in commands:
        small = list(SMALL) if words[1] in ("train", "plan") else []
        done = subprocess.run(
            [sys.executable, "-m", "rlhpc.cli", *words[1:], *small],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
    code = blocks(ROOT / "docs/tutorial/quickstart.md", "python")[-1]
    setup = "import torch\nobservations = torch.zeros(3, 4)\n"
    done = subprocess.run([sys.executable, "-c", setup + code + "\nassert actions.shape == (3, 1, 1)"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
def test_the_code_of_how_to_extend_runs(tmp_path):
    """The page's model, advantage and loss train two steps, named by import path."""
    model, functions = blocks(ROOT / "docs/how-to/extend.md", "python")
    (tmp_path / "my_models.py").write_text(model)
    (tmp_path / "my_code.py").write_text(functions)
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", str(ROOT / "configs/quickstart.yaml"), *SMALL,
        "actor.model.model_type=my_models:Linear", "algorithm.adv_type=my_code:centred",
        "algorithm.loss_type=my_code:reinforce",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
