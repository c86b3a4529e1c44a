"""Analysis and transformation of Python expressions: literals, renaming, assertions and bound names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MOST_ROUNDS = 1000
"""Maximum number of rounds of an unrolled loop; longer loops run in the sandbox."""


class Unclear(Exception):
    """Error of a test, or a part of a test, that cannot be evaluated outside the sandbox."""


class NameReplacer(ast.NodeTransformer):
    """Transformer that replaces names by expressions."""

    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        replacement = self._names.get(node.id)
        if replacement is None:
            return node
        if not isinstance(node.ctx, ast.Load) and not isinstance(replacement, ast.Name):
            raise Unclear  # a loop variable is assigned to
        return ast.Name(replacement.id, node.ctx) if isinstance(replacement, ast.Name) else replacement


def parse_literal(node: ast.expr) -> tuple[bool, Any]:
    """Returns whether an expression is a literal, and the literal's value or None."""
    try:
        return True, ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None


def is_always_true(test: ast.expr) -> bool:
    """Returns whether an assertion always holds, such as the assertion of a tuple (condition, message)."""
    if isinstance(test, (ast.Tuple, ast.List, ast.Set)):
        return bool(test.elts) and not all(isinstance(element, ast.Starred) for element in test.elts)
    return isinstance(test, (ast.GeneratorExp, ast.Lambda))


def has_return(statement: ast.stmt) -> bool:
    """Returns whether a statement contains a `return`, `yield`, `await` or scope declaration of the enclosing function."""
    nested_ids = {
        id(n)
        for nested_function in ast.walk(statement)
        if isinstance(nested_function, (ast.FunctionDef, ast.Lambda))
        for n in ast.walk(nested_function)
    }
    statement_types = (
        ast.Return,
        ast.Yield,
        ast.YieldFrom,
        ast.Await,
        ast.AsyncFor,
        ast.AsyncWith,
        ast.Global,
        ast.Nonlocal,
    )
    return any(isinstance(node, statement_types) and id(node) not in nested_ids for node in ast.walk(statement))


def items(node: ast.expr, evaluate: Callable[[ast.expr], Any]) -> list[Any]:
    """Returns the elements over which a loop iterates.

    Raises:
        Unclear: The value is unknown outside the sandbox, or is no container of bounded length.
    """
    literal_container = evaluate(node)
    if not isinstance(literal_container, (list, tuple, str, range, enumerate, zip)) or (
        isinstance(literal_container, range) and len(literal_container) > MOST_ROUNDS
    ):
        raise Unclear
    return list(literal_container)


def assign_expressions(target: ast.expr, value: Any) -> dict[str, ast.expr]:
    """Returns an expression for the value of each name in a loop's target.

    Raises:
        Unclear: The assignment cannot be evaluated without running the program.
    """
    target_names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    if not all(isinstance(name, ast.Name) for name in target_names):
        raise Unclear
    try:
        element_values = (
            [value] if isinstance(target, ast.Name) else [None] * len(target_names) if value is None else list(value)
        )
    except TypeError:
        raise Unclear from None
    if len(element_values) != len(target_names):
        raise Unclear
    return {
        name.id: to_expression(element_value)
        for name, element_value in zip(target_names, element_values, strict=True)
        if isinstance(name, ast.Name)
    }


def expression(node: ast.expr) -> ast.expr:
    """Returns a copy of an expression."""
    return ast.parse(ast.unparse(node), mode="eval").body


def to_expression(value: Any) -> ast.expr:
    """Returns a literal expression for a value.

    Raises:
        Unclear: The value has no literal.
    """
    try:
        expression_node = ast.parse(repr(value), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unclear from None
    if not parse_literal(expression_node)[0]:
        raise Unclear  # inf, or a value without a literal
    return expression_node


def has_assertion(body: Sequence[ast.stmt], functions: Mapping[str, ast.FunctionDef]) -> bool:
    """Returns whether statements, or functions that they call, contain assertions."""
    pending_nodes, entered_functions = list[ast.AST](body), set[str]()
    while pending_nodes:
        node = pending_nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name.startswith("assert") or name in ("raises", "fail"):
                return True
        if isinstance(node, ast.Name) and node.id in functions and node.id not in entered_functions:
            entered_functions.add(node.id)
            pending_nodes += functions[node.id].body
        pending_nodes += ast.iter_child_nodes(node)
    return False


def bound_names(target: ast.expr, value: Any) -> list[tuple[str, Any]]:
    """Returns the names in the target of an assignment, with the values that they get.

    Raises:
        Unclear: The target is not a name, or does not match the value's elements.
    """
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    if (
        not isinstance(target, (ast.Tuple, ast.List))
        or not isinstance(value, (list, tuple, str))
        or len(target.elts) != len(value)
    ):
        raise Unclear
    return [
        pair
        for inner_target, element in zip(target.elts, value, strict=True)
        for pair in bound_names(inner_target, element)
    ]


def mutable_ids(value: Any) -> set[int]:
    """Returns the ids (`id`) of all mutable containers in a value."""
    if isinstance(value, (list, set)):
        return {id(value)}.union(*(mutable_ids(element) for element in value))
    if isinstance(value, dict):
        return {id(value)}.union(*(mutable_ids(element) for element in value.values()))
    return set().union(*(mutable_ids(element) for element in value)) if isinstance(value, tuple) else set()
