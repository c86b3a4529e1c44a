"""Plan of a problem's tests: steps that run with the program in the sandbox, and claims that are evaluated outside."""

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
        steps: Steps of the first run, in order. Kinds of steps: `value` returns the value of an expression, `raises` returns
            the exception of statements, and `do` runs statements.
        scripts: Steps of the second run: `do` steps, and `script` steps with statements that test the program in the sandbox.
            Scripts contain the expected values, so they run in a different process from `steps`.
        claims: Functions that evaluate the assertions from the answers to `steps`.
        verdicts: Indices into `scripts` that have to pass.
        setup: Statements to run before the steps.
        values: Values of the names that the tests have bound so far, as far as they are known outside the sandbox.
        meanings: Qualified names to which the names in the tests refer; "" for names that the tests bind.
        definitions: Functions and classes of the tests that have not been added to the steps.
        prepared: Indices of the steps that prepare the tests that follow.
        strict: A list with one bool: whether tests of a builtin function count only if the program defines its name.
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
        """Returns a copy of the plan, which can be extended and discarded."""
        return TestPlan(
            list(self.steps), list(self.scripts), list(self.claims), list(self.verdicts), self.setup, dict(self.values),
            dict(self.meanings), dict(self.definitions), list(self.prepared), self.strict,
        )  # fmt: skip


def meanings_of(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Returns the meanings of the names that statements bind: the qualified name of an import, and "" for other names."""
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
    """Adds a step to the first run, and a `do` step to the second run, too; returns its index in the first run."""
    plan.steps.append({"kind": kind, "source": source})
    if kind == "do":
        plan.scripts.append({"kind": kind, "source": source})
    return len(plan.steps) - 1


def has_check(body: Sequence[ast.stmt]) -> bool:
    """Returns whether statements define a function `check`, as HumanEval's tests do."""
    return any(isinstance(statement, ast.FunctionDef) and statement.name == "check" for statement in body)


def has_call(body: Sequence[ast.stmt], name: str) -> bool:
    """Returns whether statements outside functions call the function of a name."""
    nodes = (n for statement in body if not isinstance(statement, ast.FunctionDef) for n in ast.walk(statement))
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in nodes)
