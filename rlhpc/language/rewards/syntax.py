"""Python's expressions as data: read, renamed, and written again."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

MOST_ROUNDS = 1000
"""Rounds of a loop that is written out; longer ones are judged inside."""


class Unclear(Exception):
    """A test, or a part of one, that cannot be decided outside."""


class Renamed(ast.NodeTransformer):
    """Puts expressions in place of names."""

    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self._names.get(node.id)
        if found is None:
            return node
        if not isinstance(node.ctx, ast.Load) and not isinstance(found, ast.Name):
            raise Unclear  # a loop's own variable is assigned to
        return ast.Name(found.id, node.ctx) if isinstance(found, ast.Name) else found


def literal(node: ast.expr) -> tuple[bool, Any]:
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def returns(statement: ast.stmt) -> bool:
    """Whether it has a `return` or the like that belongs to the function around it."""
    inside = {id(n) for f in ast.walk(statement) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for n in ast.walk(f)}
    kinds = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Global, ast.Nonlocal)
    return any(isinstance(node, kinds) and id(node) not in inside for node in ast.walk(statement))


def items(node: ast.expr, known: Callable[[ast.expr], Any]) -> list[Any]:
    value = known(node)
    if not isinstance(value, (list, tuple, str, range, enumerate, zip)) or (
        isinstance(value, range) and len(value) > MOST_ROUNDS
    ):
        raise Unclear
    return list(value)


def assigned(target: ast.expr, value: Any) -> dict[str, ast.expr]:
    """The value, as an expression, of each name in a loop's target."""
    names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    if not all(isinstance(name, ast.Name) for name in names):
        raise Unclear
    try:
        parts = [value] if isinstance(target, ast.Name) else [None] * len(names) if value is None else list(value)
    except TypeError:
        raise Unclear from None
    if len(parts) != len(names):
        raise Unclear
    return {name.id: written_out(part) for name, part in zip(names, parts, strict=True) if isinstance(name, ast.Name)}


def expression(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def written_out(value: Any) -> ast.expr:
    try:
        written = ast.parse(repr(value), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unclear from None
    if not literal(written)[0]:
        raise Unclear  # inf, or a value without a notation
    return written
