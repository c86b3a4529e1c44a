"""The names of a run's files and folders stand once, in `rlhpc/jobs/paths.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rlhpc.jobs.paths import COMPLETE, RunPaths, segment_name, step_name, step_of

ROOT = Path(__file__).resolve().parents[3]
NAMES = re.compile(
    r"(^|/)(config\.yaml|status\.json|provenance\.json|metrics\.jsonl|loggers\.json|accounting\.json|COMPLETE|manifest\.json"
    r"|model\.safetensors|index\.html|checkpoints|\.driver\.(lock|json))$|(global_step|segment)_(\d|\*|\?|\{|$)"
)
#: The workflow's own configuration, and keys of records and labels of tables that are called like a folder.
ELSEWHERE = {"rlhpc/cli/init.py: config/config.yaml"} | {
    f"rlhpc/{module}.py: checkpoints"
    for module in (
        "cli/share",
        "live/loaded_run",
        "publishing/comparison",
        "publishing/contents",
        "publishing/crate",
        "publishing/reader",
        "runs/step_pages",
    )
}


def literals(source: str) -> list[str]:
    """Texts of a program, apart from docstrings and messages: without blanks, and f-strings with `{` for what is put in."""
    tree, found = ast.parse(source), []
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "{" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(node.value)
    return [text for text in found if not re.search(r"\s", text)]


def test_each_name_stands_once() -> None:
    again = []
    for path in (ROOT / "rlhpc").rglob("*.py"):
        if path != ROOT / "rlhpc" / "jobs" / "paths.py":
            again += [f"{path.relative_to(ROOT)}: {text}" for text in literals(path.read_text()) if NAMES.search(text)]
    for path in (ROOT / "workflow" / "rules").glob("*.smk"):
        texts = re.findall(r'"([^"\s]*)"', path.read_text())
        again += [f"{path.name}: {text}" for text in texts if NAMES.search(text)]
    assert [line for line in again if line not in ELSEWHERE] == []


@pytest.mark.parametrize("text", ["config.yaml", "{/checkpoints", "global_step_{", "global_step_*", "segment_{.json"])
def test_what_it_looks_for_is_found(text: str) -> None:
    assert NAMES.search(text)


def test_names_and_back(tmp_path: Path) -> None:
    paths = RunPaths.from_run_dir(tmp_path, "run")
    checkpoint = paths.checkpoint(12)
    assert (checkpoint.name, step_of(checkpoint.name), step_of("global_step_x")) == (step_name(12), 12, None)
    assert (
        RunPaths.from_checkpoint(checkpoint) == paths
        and RunPaths.from_checkpoint(tmp_path / "export" / step_name(12)) is None
    )
    for step in (3, 12):
        paths.checkpoint(step).mkdir(parents=True)
    (checkpoint / COMPLETE).touch()
    assert [step for step, _ in paths.checkpoint_steps()] == [3, 12]
    assert paths.complete_steps() == [(12, checkpoint)]
    assert paths.submitted_segments() == []
    paths.submit.mkdir()
    for name in ("10.json", "2.json", "2.attempts.json", "2.lock"):
        (paths.submit / segment_name(name)).touch()
    assert paths.submitted_segments() == [2, 10]
