"""Transformations of Python expressions: literals, renaming, assertions and assignments."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from rlhpc.language.rewards import python_expressions as expressions
from rlhpc.language.rewards.python_expressions import MOST_ROUNDS, NameReplacer, Unclear


def expression(text: str) -> ast.expr:
    """Returns the syntax tree of an expression."""
    return ast.parse(text, mode="eval").body


def body(text: str) -> list[ast.stmt]:
    """Returns the syntax trees of statements."""
    return ast.parse(text).body


def target(text: str) -> ast.expr:
    """Returns the target of a loop over it."""
    [loop] = body(f"for {text} in x: pass")
    assert isinstance(loop, ast.For)
    return loop.target


def test_names_are_replaced_by_expressions() -> None:
    renamed = NameReplacer({"a": expression("[1, 2]"), "b": expression("c")})
    assert ast.unparse(renamed.visit(expression("f(a, b, d)"))) == "f([1, 2], c, d)"
    assert ast.unparse(renamed.visit(body("b = 1")[0])) == "c = 1"
    with pytest.raises(Unclear):
        renamed.visit(body("a = 1")[0])


@pytest.mark.parametrize(("text", "result"), [("[1, (2, 'x')]", (True, [1, (2, "x")])), ("f(1)", (False, None))])
def test_literals(text: str, result: tuple[bool, Any]) -> None:
    assert expressions.parse_literal(expression(text)) == result


@pytest.mark.parametrize(
    ("text", "holds"),
    [("(x == 1, 'message')", True), ("[x]", True), ("{*x}", False), ("()", False), ("(y for y in x)", True),
     ("lambda: x", True), ("x == 1", False)],
)  # fmt: skip
def test_assertions_that_hold_whatever_the_program_does(text: str, holds: bool) -> None:
    assert expressions.is_always_true(expression(text)) == holds


@pytest.mark.parametrize(
    ("text", "result"),
    [("return 1", True), ("if a:\n    yield 1", True), ("def f():\n    return 1", False), ("x = lambda: (yield)", False),
     ("global x", True), ("x = 1", False)],
)  # fmt: skip
def test_returns_of_the_function_around_a_statement(text: str, result: bool) -> None:
    assert expressions.has_return(ast.parse(text).body[0]) == result


def test_items_of_a_loop_are_bounded() -> None:
    assert expressions.items(expression("x"), lambda node: range(3)) == [0, 1, 2]
    assert expressions.items(expression("x"), lambda node: "ab") == ["a", "b"]
    for value in (range(MOST_ROUNDS + 1), 7, {1: 2}):
        with pytest.raises(Unclear):
            expressions.items(expression("x"), lambda node, value=value: value)


def test_each_name_of_a_loops_target_gets_its_value() -> None:
    named = expressions.assign_expressions(target("a, b"), (1, [2]))
    assert {name: ast.unparse(value) for name, value in named.items()} == {"a": "1", "b": "[2]"}
    assert ast.unparse(expressions.assign_expressions(target("a"), (1, 2))["a"]) == "(1, 2)"
    for text, value in (("a, b", (1, 2, 3)), ("a, b", 7), ("a[0]", 1), ("a", float("inf")), ("a", object())):
        with pytest.raises(Unclear):
            expressions.assign_expressions(target(text), value)


def test_values_are_bound_to_nested_targets() -> None:
    assert expressions.bound_names(target("a, (b, c)"), (1, "xy")) == [("a", 1), ("b", "x"), ("c", "y")]
    for text, value in (("a, b", (1,)), ("a, b", 7), ("a.b", 1)):
        with pytest.raises(Unclear):
            expressions.bound_names(target(text), value)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("assert f(1) == 2", True),
        ("for x in y:\n    if x:\n        raise ValueError", True),
        ("self.assertEqual(1, 2)", True),
        ("with pytest.raises(ValueError):\n    f(1)", True),
        ("check(f)", True),  # which asserts
        ("idle(f)", False),
        ("def inner():\n    assert True", False),  # is not called
        ("print(f(1))", False),
    ],
)
def test_statements_that_assert_something(text: str, result: bool) -> None:
    functions = {
        node.name: node
        for node in body("def check(c):\n    assert c(1)\n    check(c)\ndef idle(c):\n    c(1)")
        if isinstance(node, ast.FunctionDef)
    }
    assert expressions.has_assertion(body(text), functions) == result


def test_a_copy_of_an_expression_is_equal_and_another_object() -> None:
    node = expression("a + [1]")
    copy = expressions.expression(node)
    assert ast.dump(copy) == ast.dump(node) and copy is not node


def test_the_mutable_parts_of_a_value() -> None:
    inner: list[int] = []
    value = {"a": (inner, {1}), "b": 2}
    assert expressions.mutable_ids(value) == {id(value), id(inner), id(value["a"][1])}  # type: ignore[index]
    assert expressions.mutable_ids((1, "x")) == set()
