"""Attacks on what a user takes from others: run folders, data sets, repositories, models and the programs that they drive.

    python tests/attack/tries.py                # all of them, as a table
    python tests/attack/tries.py sandbox git    # those whose class has one of these words

Each must be held: the attacker gains nothing, and whoever is beside it goes on. One that is within a limit that the documentation
names says so. Exits with 1 where another one gets through. Needs root for what another user does (uid 65534), and `bwrap` for
its sandbox; no try takes more than 300 MB or 300 processes.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Modules with the tries, by the words that name their classes.
MODULES = ("tries_sandbox", "tries_gateway", "tries_files", "tries_people")
_LIMIT_S = 150
_RESULTS = ("held", "documented", "through", "failed", "not run")


@dataclass(frozen=True)
class Try:
    """An attack.

    Attributes:
        label: Of its class.
        name: What it tries.
        run: Returns how it got through, "" where it was held.
        documented: The limit that it is within, if there is one.
    """

    label: str
    name: str
    run: Callable[[], str]
    documented: str = ""


class CannotRunError(Exception):
    """The attack needs what is not there."""


TRIES: list[Try] = []


def attack(label: str, name: str, documented: str = "") -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Registers a function as an attack."""

    def add(run: Callable[[], str]) -> Callable[[], str]:
        TRIES.append(Try(label, name, run, documented))
        return run

    return add


def outcome(attempt: Try) -> tuple[str, str]:
    """Returns what came of an attack (`held`, `through`, `documented` or `not run`), and how."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"no end within {_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_LIMIT_S)
    try:
        how = attempt.run()
    except CannotRunError as error:
        return "not run", str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "failed", f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return ("documented" if attempt.documented else "through", how) if how else ("held", "")


def all_tries() -> list[Try]:
    """Returns the attacks of all modules."""
    if not TRIES:
        for name in MODULES:
            importlib.import_module(f"tests.attack.{name}")
    return TRIES


def main(words: list[str]) -> int:
    """Runs attacks and prints a table; returns how many got through."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only classes with one of these words")
    args = parser.parse_args(words)
    counts: dict[str, dict[str, int]] = {}
    for attempt in all_tries():
        if args.words and not any(word in f"{attempt.label} {attempt.name}" for word in args.words):
            continue
        began = time.monotonic()
        result, how = outcome(attempt)
        row = counts.setdefault(attempt.label, {})
        row[result] = row.get(result, 0) + 1
        said = " ".join(how.split())[:300] + (f" [{attempt.documented}]" if how and attempt.documented else "")
        print(f"{attempt.label} | {attempt.name} | {result} | {said} | {time.monotonic() - began:.1f} s", flush=True)
    print(f"\nclass | tries | {' | '.join(_RESULTS)}")
    for label, row in counts.items():
        print(" | ".join([label, str(sum(row.values())), *(str(row.get(result, 0)) for result in _RESULTS)]))
    return sum(row.get("through", 0) + row.get("failed", 0) for row in counts.values())


if __name__ == "__main__":
    sys.modules.setdefault("tests.attack.tries", sys.modules["__main__"])
    sys.exit(min(main(sys.argv[1:]), 1))
