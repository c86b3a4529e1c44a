"""Run folders of somebody else, whose files hold what this program never wrote: wrong types, huge numbers, deep nesting,
and text that a terminal obeys.

    python -m tests.attack.run_folders [--seed S] [--tries N]    # exits with 1 where a command ended in a fault

Every field of every JSON and JSONL file may be changed. The commands that read a run must answer, or refuse in one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "flat_runs"
#: A title, a cleared screen, colours of C1, directions, a deletion: all that a terminal or an eye obeys.
OBEYED_TEXT = "\x1b]0;owned\x07\x1b[2J\x9b31mred\u202egnp.\u2066\x7f\x0c\x85\u2028\u200f"
#: What may reach a terminal: text, tab, line feed, and the carriage return of a line's end or a bar.
OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
#: What `status` and `logs` read; the pages read the rest.
_OF_STATUS = ("status.json", "segments", "registry")
_DEEP = "[" * 400 + "]" * 400

#: Stands in a file instead of a value; not all is JSON by the letter, but Python reads it.
WRONG: dict[str, str] = {
    "text": '"5"', "empty text": '""', "huge": "1e400", "minus huge": "-1e400", "nan": "NaN", "long integer": "1" + "0" * 400,
    "longer integer": "9" * 5000, "null": "null", "true": "true", "list": "[1, 2]", "empty list": "[]", "object": '{"a": 1}',
    "empty object": "{}", "deep": _DEEP, "fraction": "2.5", "negative": "-3", "surrogate": '"\\ud800"', "nul": '"a\\u0000b"',
}  # fmt: skip
_EPISODE = [
    {"role": "solver", "parts": [{"turn": 0, "read": "84+86="},
                                 {"turn": 0, "drawn": [["1", -0.1], ["70", -2.5]], "reward": 0.5},
                                 {"turn": 1, "read": "right?"}, {"turn": 1, "drawn": [["yes", -0.01]]}]},
    {"role": "critic", "parts": [{"turn": 0, "drawn": [["no", -1.0]]}]},
]  # fmt: skip


def whole_run(kind: str, target: Path) -> Path:
    """Writes a run with all the files that the reading commands look at; `kind` is language or embodied."""
    shutil.copytree(DATA / kind, target)
    step = target / "eval" / "global_step_2"
    if kind == "language":
        rows = [json.loads(line) for line in (step / "held_out.samples.jsonl").read_text().splitlines()]
        for row in rows:
            row |= {"episode": _EPISODE, "answer": "170"}
        (step / "held_out.samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        result = json.loads((step / "held_out.json").read_text())
        result |= {
            "pass_at_k": {"1": 0.0, "2": 0.5},
            "pass_at_k_ci95": {"1": [0.0, 0.4], "2": [0.2, 0.7]},
            "samples": 2,
        }
        (step / "held_out.json").write_text(json.dumps(result))
    group = "rollout" if kind == "language" else "env"
    member = {"generation": "local-0", "group": group, "rank": 0, "pid": 1, "node": "n", "host": "h", "data": {"host": "h"},
              "state": "running", "started": 1.0, "token": "t", "incarnation": "i", "log_err": str(target / "logs/x.err")}  # fmt: skip
    driver = member | {"group": "driver"}
    slurm = {"JOB_ID": "7", "NODELIST": "n"}
    start = {"command": "rlhpc train", "host": "n", "started": "2026-01-01T00:00:00", "slurm": slurm,
             "git": {"commit": "abc", "branch": "main", "dirty": False}}  # fmt: skip
    files: dict[str, Any] = {
        "status.json": {"state": "running", "segment": 0, "step": 2, "max_steps": 2, "end_step": 2, "pid": 1, "host": "n",
                        "started": 1.0, "updated": 2.0, "stop_reason": "max_steps", "elapsed_s": 1.0, "return": 1.0,
                        "eta_s": 3.0, "reward": 1.0, "loss": 2.0, "tokens_per_s": 3.0, "env_steps_per_s": 2.0},
        "provenance.json": start | {
            "created": "2026-01-01T00:00:00", "folder": "/f", "versions": {"torch": "2"}, "platform": "x", "cpus_granted": 1,
            "cpu_count": 2, "config_sha256": "00", "segments": [start],
            "placement": {"actor": [{"rank": 0, "node": "n", "node_rank": 0, "accelerators": [0], "cpus": 1}]}},
        "segments/0.json": {"segment": 0, "global_step": 2, "state": "finished", "stop_reason": "max_steps"},
        "registry/local-0/members/driver.json": driver,
        f"registry/local-0/members/{group}-0.json": member,
        f"registry/local-0/left/{group}-0.json": {"incarnation": "i", "why": "gone", "at": 3.0},
        "registry/local-0/timeline.json": {"driver": 1.0, "launched": 1.5, "ranks": 2.0, "ready": 2.5, "first_step": 3.0},
        "registry/local-0/start/ranks.json": {"generation": "local-0", "ranks": [
            {"group": group, "rank": 0, "phases": [["environment", 1.0], ["imports", 1.5], ["waiting", 2.0]]}]},
        "registry/local-0/robots/slot_0.json": {"robot": "arm", "slot": 0, "since": 1.0, "there": True},
    }  # fmt: skip
    for name, content in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(json.dumps(content))
    (target / "registry" / "current").write_text("local-0")
    (target / "logs" / "segment_0").mkdir(parents=True)
    (target / "logs" / "segment_0" / f"{group}-0.err").write_text("said\n")
    return target


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to every value in a JSON value, but the outermost."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], marker: str) -> Any:
    if not path:
        return marker
    if isinstance(value, dict):
        return {key: _replaced(part, path[1:], marker) if key == path[0] else part for key, part in value.items()}
    return [_replaced(part, path[1:], marker) if at == path[0] else part for at, part in enumerate(value)]


def with_wrong_field(text: str, path: tuple[Any, ...], wrong: str) -> str:
    """Returns the JSON text with one value replaced by any text."""
    return json.dumps(_replaced(json.loads(text), path, "@HERE@")).replace('"@HERE@"', wrong)


def with_text_everywhere(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value in which each text is changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: with_text_everywhere(part, change) for key, part in value.items()}
    return [with_text_everywhere(part, change) for part in value] if isinstance(value, list) else value


def fields(run: Path) -> list[tuple[Path, int, tuple[Any, ...]]]:
    """Lists every field of a run's JSON and JSONL files: file, line, way to it. Lines of one file have equal fields."""
    found = []
    for file in sorted([*run.rglob("*.json"), *run.rglob("*.jsonl")]):
        if "model" in file.parts or file.name in ("model.json", "backend.json", "runner.json"):
            continue
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        found += [(file.relative_to(run), 0, path) for path in places(json.loads(lines[0]))]
    return found


@contextlib.contextmanager
def changed_file(run: Path, field: tuple[Path, int, tuple[Any, ...]], wrong: str) -> Iterator[None]:
    """Changes one field of a run's file for as long as the block runs."""
    name, line, path = field
    file = run / name
    before = file.read_text()
    lines = before.splitlines() if file.suffix == ".jsonl" else [before]
    lines[line] = with_wrong_field(lines[line], path, wrong)
    file.write_text("\n".join(lines) + "\n")
    try:
        yield
    finally:
        file.write_text(before)


def reading_commands(run: Path) -> dict[str, list[str]]:
    """The commands that read a run's folder and start nothing."""
    return {
        "status": ["status", str(run)],
        "status of all": ["status", str(run.parent)],
        "logs": ["logs", str(run), "-n", "3"],
        "report": ["report", str(run)],
        "compare": ["compare", str(run), "--output", str(run.parent / "compare.html")],
    }


def faults(run: Path, field: tuple[Path, int, tuple[Any, ...]], kind: str) -> list[str]:
    """Runs the reading commands on a run with one wrong field; lists those that ended in a fault."""
    from rlhpc.cli import main

    found = []
    with changed_file(run, field, WRONG[kind]):
        for name, words in reading_commands(run).items():
            if (field[0].parts[0] in _OF_STATUS) != (name in ("status", "status of all", "logs")):
                continue
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(words)
            if code not in (0, 2) or "a fault of rlhpc" in err.getvalue():
                where = "".join(f"[{part!r}]" for part in field[2])
                found.append(f"{name}: {field[0]}{where} = {kind}: {err.getvalue().strip()[-300:]}")
    return found


def tried(folder: Path, seed: int, tries: int, *, talk: bool = False) -> list[str]:
    """Changes `tries` fields of each kind of run, drawn by the seed; returns the faults."""
    draw, found, told = random.Random(seed), list[str](), 0
    for kind in ("language", "embodied"):
        run = whole_run(kind, folder / kind / "run")
        every = [(field, wrong) for field in fields(run) for wrong in WRONG]
        for field, wrong in draw.sample(every, min(tries, len(every))):
            found += faults(run, field, wrong)
            if talk:
                print(*found[told:], sep="\n", end="\n" if found[told:] else "", flush=True)
                told = len(found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tries", type=int, default=10**9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = tried(Path(folder), args.seed, args.tries, talk=True)
    print(f"{len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
