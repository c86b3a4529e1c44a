"""Plan of a problem's tests: what runs with the program in the sandbox, and which claims are evaluated outside."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.language.rewards.expected_values import Term


@dataclass
class TestPlan:
    """Plan of a problem's tests: steps to run with a program, and claims about their results.

    Attributes:
        steps: For the first run, in order: `value` (an expression whose value is returned), `raises` (statements whose
            exception is returned) and `do` (statements).
        scripts: For a second run: `do` as before, and `script`, statements that test the program in the sandbox. They contain
            the expected values, so they run in a different process from the steps.
        claims: For each assertion, a function that evaluates it from the answers to `steps`.
        verdicts: Indices into `scripts` that have to pass.
        setup: Statements to run before the steps.
        values: Values of names that the tests have bound so far, if they are known here.
        strict: Whether the program has to define a builtin function's name for the tests of that function to count.
    """

    steps: list[dict[str, str]] = field(default_factory=list)
    scripts: list[dict[str, str]] = field(default_factory=list)
    claims: list[Term] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)
    setup: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    prepared: list[int] = field(default_factory=list)
    strict: list[bool] = field(default_factory=lambda: [False])

    def set_prepared(self, steps: list[int]) -> None:
        """Sets the steps that prepare the tests that follow."""
        self.prepared = steps

    def copy(self) -> TestPlan:
        """Returns a plan that can be extended and discarded."""
        return TestPlan(
            list(self.steps), list(self.scripts), list(self.claims), list(self.verdicts), self.setup, dict(self.values),
            dict(self.meanings), dict(self.definitions), list(self.prepared), self.strict,
        )  # fmt: skip


def meanings_of(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Returns the meanings of names that the tests' statements bind: `math.isclose` for an import of it, else ""."""
    meanings: dict[str, str] = {}
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            meanings |= {name.asname or name.name: f"{statement.module}.{name.name}" for name in statement.names}
        elif isinstance(statement, ast.Import):
            meanings |= {name.asname: name.name for name in statement.names if name.asname}
            root_modules = (name.name.partition(".")[0] for name in statement.names if not name.asname)
            meanings |= {root: root for root in root_modules}
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            meanings[statement.name] = ""
        else:
            stored_names = (
                n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
            meanings |= dict.fromkeys(stored_names, "")
    return meanings


def add_step(plan: TestPlan, kind: str, source: str) -> int:
    """Adds a step to both runs, if it is one of statements (`do`), else to the first; returns its index."""
    plan.steps.append({"kind": kind, "source": source})
    if kind == "do":
        plan.scripts.append({"kind": kind, "source": source})
    return len(plan.steps) - 1


def has_check(body: Sequence[ast.stmt]) -> bool:
    """Returns whether statements define a function `check`, as HumanEval's tests do."""
    return any(isinstance(statement, ast.FunctionDef) and statement.name == "check" for statement in body)


def calls(body: Sequence[ast.stmt], name: str) -> bool:
    """Returns whether statements outside functions call a function of this name."""
    nodes = (n for statement in body if not isinstance(statement, ast.FunctionDef) for n in ast.walk(statement))
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in nodes)
