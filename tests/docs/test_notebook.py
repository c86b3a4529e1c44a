"""The notebook of the documentation: valid, without outputs, and each of its cells runs, in order, as a kernel runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebooks" / "first-run.ipynb"
#: Runs the cells of a notebook in one namespace. Like a kernel, `__main__` has no file, and an event loop is running.
KERNEL = """
import ast, asyncio, json, sys

async def main(cells):
    names = sys.modules["__main__"].__dict__
    names.pop("__file__", None)
    for number, cell in enumerate(cells):
        tree = ast.parse(cell)
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"<cell {number}>", "exec"), names)
        value = eval(compile(last, f"<cell {number}>", "eval"), names) if last else None
        if value is not None:
            html = getattr(value, "_repr_html_", None)
            print(json.dumps({"cell": number, "text": repr(value), "html": html() if html else ""}), file=shown, flush=True)

shown = open(sys.argv[1], "w")
asyncio.run(main(json.loads(sys.stdin.read())))
"""


def cells() -> list[str]:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_it_is_valid_and_has_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 8 and all(not cell.outputs and cell.execution_count is None for cell in code)


def test_its_cells_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, str(tmp_path / "shown")], cwd=tmp_path, input=json.dumps(cells()), text=True,
        capture_output=True, timeout=280, env={**os.environ, "PYTHONPATH": str(NOTEBOOK.parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [json.loads(line) for line in (tmp_path / "shown").read_text().splitlines()]
    assert any("TrainingRun(" in value["text"] for value in shown)
    assert sum("<table>" in value["html"] for value in shown) >= 2
    assert (tmp_path / "runs" / "first" / "report" / "index.html").is_file()
    assert "return " in done.stdout and "runs/first/report/index.html" in done.stdout
