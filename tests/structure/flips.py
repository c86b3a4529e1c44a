"""Experiment on `make test-changed`: `python -m tests.structure.flips [--files N] [--seed S] [--only K …]`.

Draws modules over all packages, flips one comparison in each, in a copy of the checkout, and runs `tests.changed` on that file
there. Prints for each module whether a test noticed the mistake, and seconds of the clock and of the processors. Where a
machine does other work, only the latter say what the selection costs.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLIPPED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
}
#: What pytest returns where a test failed, and where collecting them did.
_NOTICED = (1, 2)


@dataclass(frozen=True)
class Flip:
    """A comparison that is replaced by its contrary.

    Attributes:
        line, start, end: Its operator: line from 1, columns of the bytes before and after.
        before, after: Text of the operator and of its contrary.
    """

    line: int
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: str) -> str:
        """Returns the source with the comparison flipped."""
        lines = source.splitlines(keepends=True)
        row = lines[self.line - 1].encode()
        lines[self.line - 1] = (row[: self.start] + self.after.encode() + row[self.end :]).decode()
        return "".join(lines)


def flips_of(source: str) -> list[Flip]:
    """Returns the comparisons of a source whose operator is on one line, each as its flip."""
    lines = [line.encode() for line in source.splitlines()]
    flips = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        before, after = FLIPPED[type(node.ops[0])]
        left, right = node.left, node.comparators[0]
        if left.end_lineno != right.lineno or left.end_lineno is None or left.end_col_offset is None:
            continue
        at = lines[right.lineno - 1].find(before.encode(), left.end_col_offset, right.col_offset + 1)
        if at >= 0:
            flips.append(Flip(right.lineno, at, at + len(before), before, after))
    return flips


def draw(root: Path, count: int, seed: int) -> list[tuple[Path, Flip]]:
    """Returns modules and a flip in each: as evenly over the packages as their numbers of modules allow."""
    random_numbers = random.Random(seed)
    packages: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((root / "rlhpc").rglob("*.py")):
        if flips_of(path.read_text(encoding="utf-8")):
            relative = path.relative_to(root)
            packages[relative.parts[1]].append(relative)
    for paths in packages.values():
        random_numbers.shuffle(paths)
    drawn: list[tuple[Path, Flip]] = []
    while len(drawn) < count and any(packages.values()):
        for name in sorted(packages):
            if packages[name] and len(drawn) < count:
                path = packages[name].pop()
                drawn.append((path, random_numbers.choice(flips_of((root / path).read_text(encoding="utf-8")))))
    return drawn


def children_s() -> float:
    """Returns the processors' time of all processes that this one has waited for, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def copy_checkout(root: Path, target: Path) -> None:
    """Copies the files that git knows, and links the environments."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name, follow_symlinks=False)
    for path in root.glob(".venv*"):
        (target / path.name).symlink_to(path.resolve())


def try_flip(copy: Path, path: Path, flip: Flip, limit_s: float, arguments: Sequence[str]) -> tuple[int, float, float]:
    """Runs the selection on a flipped module; returns pytest's exit status, and seconds of the clock and the processors."""
    source = (copy / path).read_text(encoding="utf-8")
    (copy / path).write_text(flip.apply(source), encoding="utf-8")
    begin, used = time.monotonic(), children_s()
    command = [sys.executable, "-m", "tests.changed", "--limit", str(limit_s), str(path), *arguments]
    try:
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        status = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False).returncode
    finally:
        (copy / path).write_text(source, encoding="utf-8")
    return status, time.monotonic() - begin, children_s() - used


def main() -> None:
    """Draws the flips, tries each, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure.flips", description="Flips a comparison a module.")
    parser.add_argument("--files", type=int, default=30, help="number of modules (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (default: %(default)s)")
    parser.add_argument(
        "--only", type=int, nargs="*", help="numbers of the drawn modules that are tried (default: all)"
    )
    parser.add_argument(
        "--limit", type=float, default=110, metavar="S", help="seconds of a selection (default: %(default)s)"
    )
    options, arguments = parser.parse_known_args()
    noticed = in_time = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(ROOT, Path(folder))
        for number, (path, flip) in enumerate(draw(ROOT, options.files, options.seed)):
            if options.only is not None and number not in options.only:
                continue
            status, clock_s, processors_s = try_flip(Path(folder), path, flip, options.limit, arguments)
            tried, noticed, in_time = tried + 1, noticed + (status in _NOTICED), in_time + (clock_s <= 120)
            result = "noticed" if status in _NOTICED else f"status {status}"
            where = f"{path}:{flip.line} {flip.before.strip()} -> {flip.after.strip()}"
            print(f"{number:3} {result:>9} {clock_s:7.1f} s {processors_s:6.1f} CPU s  {where}", flush=True)
    print(f"{noticed} of {tried} noticed, {in_time} of {tried} within two minutes")


if __name__ == "__main__":
    main()
