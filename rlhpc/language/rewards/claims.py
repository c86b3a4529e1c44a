"""What the tests of a program claim, taken apart: what must be computed beside the program, and what is decided outside.

Of `assert abs(root(2.0) - 1.41) < 1e-6` only `root(2.0)` is computed where the program is; its value comes out, and the
subtraction, `abs` and the comparison are done here, on builtin values. So a program that redefines `abs` or `bool`, or
returns an object with operators of its own, gains nothing, and 1.41 is nowhere in its process to be found.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhpc.language.rewards import outside
from rlhpc.language.rewards.outside import Answer, Term
from rlhpc.language.rewards.syntax import MOST_ROUNDS, Renamed, Unclear, assigned, expression, items, literal, returns

_PLAIN_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Import, ast.ImportFrom, ast.FunctionDef,
                     ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Delete, ast.Pass)  # fmt: skip
_BINDING = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Lambda, ast.Global, ast.Nonlocal,
            ast.NamedExpr)  # fmt: skip


@dataclass
class Plan:
    """What is run beside a program, and what is claimed of it.

    Attributes:
        steps: For the first run, in order: `value` (an expression whose value comes out) and `do` (statements).
        scripts: For a second run: `do` as before, and `script`, statements that judge the program themselves. They hold
            what is expected, so they are not in the same process as the steps.
        claims: Of each assertion, whether it holds, from the answers to `steps`.
        verdicts: Indices into `scripts` that have to pass.
    """

    steps: list[dict[str, str]] = field(default_factory=list)
    scripts: list[dict[str, str]] = field(default_factory=list)
    claims: list[Term] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)


def read_tests(tests: Sequence[str | Mapping[str, Any]], meta: Mapping[str, Any]) -> Plan:
    """Takes all tests of a problem apart.

    Args:
        tests: Statements, or `{"call": expression, "output": value}`.
        meta: `entry_point` and `setup` are looked at.

    Raises:
        ValueError: A test is not valid Python.
    """
    plan, entry = Plan(), str(meta.get("entry_point", ""))
    names = _names(_parsed(str(meta.get("setup", ""))))
    for test in tests:
        if isinstance(test, Mapping):
            plan.claims.append(_equal(_told(plan, "value", str(test["call"])), test["output"]))
            continue
        # Judged inside, with all it holds, where it cannot be taken apart: never a bit of each.
        draft = Plan(list(plan.steps), list(plan.scripts), list(plan.claims), list(plan.verdicts))
        body = _parsed(test)
        try:
            plan = _Reader(draft, entry, names).read(body)
        except (Unclear, RecursionError):
            called = any(isinstance(s, ast.FunctionDef) and s.name == "check" for s in body) and entry
            plan.verdicts.append(len(plan.scripts))
            plan.scripts.append({"kind": "script", "source": f"{test}\ncheck({entry})" if called else test})
    return plan


def _parsed(test: str) -> list[ast.stmt]:
    try:
        return ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test of the problem is no Python: {error}") from None


def _names(body: Sequence[ast.stmt]) -> dict[str, str]:
    """What names mean that statements of the tests make: `math.isclose` for an import of it, "" for anything else."""
    found: dict[str, str] = {}
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            found |= {name.asname or name.name: f"{statement.module}.{name.name}" for name in statement.names}
        elif isinstance(statement, ast.Import):
            found |= {name.asname: name.name for name in statement.names if name.asname}
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = ""
        else:
            stored = (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            found |= dict.fromkeys(stored, "")
    return found


def _equal(number: int, wanted: Any) -> Term:
    return lambda answers: outside.value_of(answers, number) == wanted


def _told(plan: Plan, kind: str, source: str) -> int:
    plan.steps.append({"kind": kind, "source": source})
    if kind == "do":
        plan.scripts.append({"kind": kind, "source": source})
    return len(plan.steps) - 1


class _Reader:
    """Reads one test into `plan`."""

    def __init__(self, plan: Plan, entry: str, names: dict[str, str]) -> None:
        self.plan, self.entry, self.names = plan, entry, names
        self._leaves, self._all_inside, self._rounds = 0, False, 0
        self._bound: dict[str, list[Any]] = {}

    def read(self, body: list[ast.stmt]) -> Plan:
        check = next((s for s in body if isinstance(s, ast.FunctionDef) and s.name == "check"), None)
        rest = body if check is None or not self.entry else [s for s in body if s is not check]
        claims, steps = len(self.plan.claims), len(self.plan.steps)
        for statement in rest:
            self._statement(statement)
        if check is not None and self.entry:
            self._function(check)
        done = [n for n, step in enumerate(self.plan.steps) if n >= steps and step["kind"] == "do"]
        if len(self.plan.claims) == claims:
            if not done:
                raise Unclear
            self.plan.claims.append(lambda answers: True)
        if done:  # no statement of the test may raise
            self.plan.claims[claims:] = [outside.after(done, claim) for claim in self.plan.claims[claims:]]
        return self.plan

    def _function(self, check: ast.FunctionDef) -> None:
        """Its body, as if it stood outside of a function, with names of its own for what it assigns."""
        if len(check.args.args) != 1 or any(isinstance(node, _BINDING) for s in check.body for node in ast.walk(s)):
            raise Unclear
        stored = (
            n for s in check.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        )
        names: dict[str, ast.expr] = {n.id: ast.Name(f"_check_{n.id}", ast.Load()) for n in stored}
        names[check.args.args[0].arg] = ast.Name(self.entry, ast.Load())
        for statement in check.body:
            self._statement(Renamed(names).visit(statement))

    def _statement(self, statement: ast.stmt) -> None:
        inner = list(ast.walk(statement))
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement, ast.Assert):
            self.plan.claims.append(self._claim(statement.test))
        elif not any(isinstance(node, ast.Assert) for node in inner):
            if not isinstance(statement, _PLAIN_STATEMENTS) or returns(statement):
                raise Unclear
            self.names.update(_names([statement]))
            _told(self.plan, "do", ast.unparse(statement))
        elif isinstance(statement, ast.For):
            self._loop(statement, inner)
        else:
            raise Unclear

    def _loop(self, loop: ast.For, inner: list[ast.AST]) -> None:
        """Writes out a loop over what is known here."""
        if loop.orelse or any(isinstance(node, (ast.Break, ast.Continue, *_BINDING)) for node in inner):
            raise Unclear
        for value in items(loop.iter, self._known):
            self._rounds += 1
            if self._rounds > MOST_ROUNDS:
                raise Unclear
            names = assigned(loop.target, value)
            for statement in loop.body:
                self._statement(Renamed(names).visit(ast.parse(ast.unparse(statement)).body[0]))

    def _known(self, node: ast.expr) -> Any:
        """The value of an expression in which nothing of the program stands."""
        steps, leaves = len(self.plan.steps), self._leaves
        term = self._term(node)
        if self._leaves != leaves:
            del self.plan.steps[steps:]
            raise Unclear
        try:
            return term([])
        except Exception:
            raise Unclear from None

    def _claim(self, node: ast.expr) -> Term:
        steps, self._leaves = len(self.plan.steps), 0
        term = self._term(node)
        if self._leaves == 0:  # the program's own function has the name of a builtin one
            del self.plan.steps[steps:]
            self._all_inside = True
            term = self._term(node)
            self._all_inside = False
        return term

    def _term(self, node: ast.expr) -> Term:
        """How a value is made, outside as far as that is known here."""
        known, value = literal(node)
        if known:
            return lambda answers: value
        if self._is_leaf(node):
            return self._leaf(node)
        match node:
            case ast.BoolOp():
                parts = [self._term(part) for part in node.values]
                return outside.either(parts, stops=isinstance(node.op, ast.Or))
            case ast.UnaryOp():
                sign, operand = outside.SIGNS[type(node.op)], self._term(node.operand)
                return lambda answers: sign(operand(answers))
            case ast.Compare():
                return outside.compared(
                    [self._term(n) for n in (node.left, *node.comparators)], [type(op) for op in node.ops]
                )
            case ast.BinOp():
                kind, left, right = type(node.op), self._term(node.left), self._term(node.right)
                return lambda answers: outside.computed(kind, left(answers), right(answers))
            case ast.List() | ast.Tuple() | ast.Set():
                made = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
                items = [self._term(element) for element in node.elts]
                return lambda answers: made([item(answers) for item in items])
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node)
            case ast.Call():
                function = self._function_of(node)
                assert function is not None
                arguments = [self._term(argument) for argument in node.args]
                keywords = {str(k.arg): self._term(k.value) for k in node.keywords}
                return lambda answers: outside.called(
                    function, [a(answers) for a in arguments], {n: k(answers) for n, k in keywords.items()}
                )
        assert isinstance(node, (ast.Name, ast.Attribute))
        if isinstance(node, ast.Name) and node.id in self._bound:
            cell = self._bound[node.id]
            return lambda answers: cell[0]
        constant = outside.CONSTANTS[self._meaning(node)]
        return lambda answers: constant

    def _leaf(self, node: ast.expr) -> Term:
        if any(isinstance(n, ast.Name) and n.id in self._bound for n in ast.walk(node)):
            raise Unclear  # it needs values that are known only outside
        self._leaves += 1
        number = _told(self.plan, "value", ast.unparse(node))
        return lambda answers: outside.value_of(answers, number)

    def _is_leaf(self, node: ast.expr) -> bool:
        """Whether an expression is computed as a whole beside the program."""
        if literal(node)[0]:
            return False
        match node:
            case ast.BoolOp() | ast.Compare() | ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
                return False
            case ast.UnaryOp():
                return type(node.op) not in outside.SIGNS
            case ast.BinOp():
                return type(node.op) not in outside.ARITHMETIC
            case ast.List() | ast.Tuple() | ast.Set():
                return any(isinstance(element, ast.Starred) for element in node.elts)
            case ast.Call():
                if self._function_of(node) is None:
                    return True
                further = (*node.args[1:], *(keyword.value for keyword in node.keywords))
                converts = self._meaning(node.func) in outside.CONVERSIONS and node.args and self._is_leaf(node.args[0])
                return bool(converts) and all(isinstance(part, ast.Constant) for part in further)
            case ast.Name() if node.id in self._bound:
                return False
            case ast.Name() | ast.Attribute():
                return self._meaning(node) not in outside.CONSTANTS
        return True

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Term:
        made: Callable[[list[Any]], Any] = set if isinstance(node, ast.SetComp) else list
        bound, steps = dict(self._bound), len(self.plan.steps)
        try:
            if any(generator.is_async for generator in node.generators):
                raise Unclear
            rounds = self._rounds_of(node.generators, node.elt)
        except Unclear:
            if isinstance(node, ast.GeneratorExp) or bound:
                raise
            del self.plan.steps[steps:]
            return self._leaf(node)  # a list, after all, can come out as it is
        finally:
            self._bound = bound
        return lambda answers: made(list(rounds(answers)))

    def _rounds_of(self, generators: Sequence[ast.comprehension], element: ast.expr) -> Term:
        if not generators:
            term = self._term(element)
            return lambda answers: [term(answers)]
        first, rest = generators[0], generators[1:]
        try:  # each round is written out, so that it may call the program
            values = items(first.iter, self._known)
        except Unclear:
            values = None
        if values is not None and not self._bound:
            parts = []
            for value in values:
                self._rounds += 1
                if self._rounds > MOST_ROUNDS:
                    raise Unclear
                put = Renamed(assigned(first.target, value))
                conditions = [self._term(put.visit(expression(test))) for test in first.ifs]
                inner = [ast.comprehension(g.target, put.visit(expression(g.iter)),
                         [put.visit(expression(test)) for test in g.ifs], 0) for g in rest]  # fmt: skip
                parts.append((conditions, self._rounds_of(inner, put.visit(expression(element)))))
            return lambda answers: [
                found
                for conditions, part in parts
                if all(condition(answers) for condition in conditions)
                for found in part(answers)
            ]
        iterated = self._term(first.iter)
        cells: dict[str, list[Any]] = {name: [None] for name in assigned(first.target, None)}
        self._bound |= cells
        conditions = [self._term(test) for test in first.ifs]
        body = self._rounds_of(rest, element)

        def run(answers: Sequence[Answer]) -> Any:
            for value in iterated(answers):
                parts = [value] if isinstance(first.target, ast.Name) else list(value)
                for cell, part in zip(cells.values(), parts, strict=True):
                    cell[0] = part
                if all(condition(answers) for condition in conditions):
                    yield from body(answers)

        return run

    def _function_of(self, node: ast.Call) -> Callable[..., Any] | None:
        function, keywords = outside.FUNCTIONS.get(self._meaning(node.func), (None, ()))
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            return None
        if any(keyword.arg not in keywords for keyword in node.keywords):
            return None
        if function is isinstance:  # of classes of the program's own, only the program can tell
            kinds = node.args[1:2]
            kinds = kinds[0].elts if kinds and isinstance(kinds[0], ast.Tuple) else kinds
            if not kinds or not all(self._meaning(kind) in outside.TYPES for kind in kinds):
                return None
        return function

    def _meaning(self, node: ast.expr) -> str:
        """The name of what an expression stands for, "" where that is the program's or the setup's."""
        if self._all_inside:
            return ""
        if isinstance(node, ast.Name):
            return "" if node.id == self.entry else self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return f"{self.names.get(node.value.id, node.value.id)}.{node.attr}"
        return ""
