"""Test plans of problems: tests split into steps to run with a program, and claims about the results of the steps."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.language.rewards import expected_values as outside
from rlhpc.language.rewards import problem_formats
from rlhpc.language.rewards.code_test_plan import TestPlan, add_step, has_call, has_check, meanings_of
from rlhpc.language.rewards.code_tests import Reader
from rlhpc.language.rewards.expected_values import Term
from rlhpc.language.rewards.python_expressions import Unclear, has_assertion, is_always_true, to_expression

_PREPARATION = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Pass)


def read_tests(tests: Sequence[str | Mapping[str, Any]], meta: Mapping[str, Any]) -> TestPlan:
    """Builds the test plan of a problem.

    Args:
        tests: Tests as statements, or as `{"call": expression, "output": value}`.
        meta: Metadata of the problem, with `entry_point` and `setup` or the columns of published sets for them.

    Raises:
        ValueError: A test is not valid Python, has an unsupported format, or tests nothing.
    """
    entry_point, setup = problem_formats.entry_of(meta), problem_formats.parse_test(problem_formats.setup_of(meta))
    problem_formats.require_modules(setup)
    plan = _read_setup(setup, entry_point)
    defined_functions = {
        setup_statement.name: setup_statement
        for setup_statement in setup
        if isinstance(setup_statement, ast.FunctionDef)
    }
    if entry_point in vars(builtins):  # otherwise a program without it would pass
        plan.prepared.append(add_step(plan, "do", f"globals()[{entry_point!r}]"))
    num_dependent = num_conditional = 0
    for test_number, test in enumerate(tests, 1):
        if isinstance(test, Mapping):
            claim = _build_equality_claim(add_step(plan, "value", str(test["call"])), test["output"])
            plan.claims.append(outside.require_steps(plan.prepared, claim) if plan.prepared else claim)
            num_dependent += 1
            continue
        body = problem_formats.parse_test(test)
        problem_formats.require_modules(body)
        _refuse_constant(body, test_number)
        reader = Reader(plan.copy(), entry_point, defined_functions)
        try:  # a test that cannot be split runs completely in the sandbox
            plan, num_dependent_of_test = reader.read(body), reader.num_dependent
            num_conditional += reader.num_conditional
        except (Unclear, RecursionError):
            num_dependent_of_test = _add_script(plan, body, entry_point, defined_functions)
        if (
            not num_dependent_of_test
            and not reader.num_conditional
            and not (body and all(map(_may_prepare_tests, body)))
        ):
            raise ValueError(f"test {test_number} tests nothing: {_explain(body)}")
        defined_functions |= {
            setup_statement.name: setup_statement
            for setup_statement in body
            if isinstance(setup_statement, ast.FunctionDef)
        }
        num_dependent += num_dependent_of_test
    plan.strict[0] = not num_dependent
    if tests and not num_dependent and not num_conditional:
        syntax_example = next(
            (body for test in tests if isinstance(test, str) and (body := problem_formats.parse_test(test))), []
        )
        raise ValueError(f"its tests test nothing: {_explain(syntax_example)}")
    return plan


def _read_setup(setup: Sequence[ast.stmt], entry_name: str) -> TestPlan:
    """Returns a plan with the values that the setup binds, except values that other statements of the setup use."""
    plan = TestPlan()
    used_names = {
        n.id
        for setup_statement in setup
        if not isinstance(setup_statement, ast.Assign)
        for n in ast.walk(setup_statement)
        if isinstance(n, ast.Name)
    }
    lines = []
    reader = Reader(plan, entry_name, {})
    for statement in setup:
        plan.meanings.update(meanings_of([statement]))
        stored_names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if not isinstance(statement, ast.Assign) or stored_names & used_names or not reader.bind(statement):
            lines.append(ast.unparse(statement))
            used_names |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            for name in used_names & plan.values.keys():  # needed by later statements of the setup
                lines.insert(len(lines) - 1, f"{name} = {ast.unparse(to_expression(plan.values.pop(name)))}")
    plan.setup = "\n".join(lines)
    return plan


def _refuse_constant(body: Sequence[ast.stmt], body_index: int) -> None:
    for node in (n for statement in body for n in ast.walk(statement)):
        if isinstance(node, ast.Assert) and is_always_true(node.test):
            raise ValueError(
                f"test {body_index} has an assertion that is always true, {ast.unparse(node)[:60]}: write assert CONDITION"
            )


def _explain(body: Sequence[ast.stmt]) -> str:
    if not body:
        return "it has no statement"
    if any(isinstance(statement, ast.FunctionDef) and statement.name == "check" for statement in body):
        return "nothing calls its function check; name the program's function in entry_point"
    if any(isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call) for statement in body):
        return "it compares without assert; write assert CONDITION"
    return "it has no assertion that is reached; write assert CONDITION"


def _add_script(
    plan: TestPlan, body: Sequence[ast.stmt], entry_name: str, defined_functions: Mapping[str, ast.FunctionDef]
) -> int:
    """Adds a test that runs completely in the sandbox; returns 1, or 0 if the test asserts nothing."""
    plain_statements, functions, classes = problem_formats.test_functions(body)
    source_statements: list[ast.stmt] = [*plain_statements, *functions, *classes]
    lines = [f"{function.name}()" for function in functions]
    if has_check(plain_statements) and entry_name and not has_call(plain_statements, "check"):
        lines.append(f"check({entry_name})")
    if classes:
        class_names = ", ".join(class_.name for class_ in classes)
        lines.append(
            f"import unittest as _unittest\nfor _case in ({class_names},):\n    _result = _unittest.TestResult()\n"
            "    _unittest.defaultTestLoader.loadTestsFromTestCase(_case).run(_result)\n"
            "    assert _result.testsRun and _result.wasSuccessful() and not _result.skipped"
        )
    script_code = "\n".join(
        [*(ast.unparse(ast.fix_missing_locations(source_statement)) for source_statement in source_statements), *lines]
    )
    tree = ast.parse(script_code)
    functions_by_name = dict(defined_functions) | {
        source_statement.name: source_statement
        for source_statement in tree.body
        if isinstance(source_statement, ast.FunctionDef)
    }
    if not (has_assertion(tree.body, functions_by_name) or classes):
        return 0
    mentioned_names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    value_statements = [
        f"{name} = {ast.unparse(to_expression(known_value))}"
        for name, known_value in plan.values.items()
        if name in mentioned_names and _has_literal(known_value)
    ]
    value_statements += [f"globals()[{entry_name!r}]"] if entry_name in vars(builtins) else []
    value_statements += [ast.unparse(plan.definitions[name]) for name in plan.definitions if name in mentioned_names]
    plan.verdicts.append(len(plan.scripts))
    plan.scripts.append({"kind": "script", "source": "\n".join([*value_statements, script_code])})
    return 1


def _may_prepare_tests(statement: ast.stmt) -> bool:
    """Returns whether a statement may prepare later tests."""
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return is_call or isinstance(statement, _PREPARATION)


def _has_literal(plain_value: Any) -> bool:
    try:
        to_expression(plain_value)
    except Unclear:
        return False
    return True


def _build_equality_claim(test_number: int, output: Any) -> Term:
    return lambda answers: outside.as_json(outside.value_of(answers, test_number)) == outside.as_json(output)


def program_names(plan: TestPlan) -> list[str]:
    """Returns the names in the plan that only a program can define."""
    program_sources = [step["source"] for step in (*plan.steps, *plan.scripts)] + [plan.setup]
    nodes = [node for program_source in program_sources for node in ast.walk(ast.parse(program_source))]
    loaded_names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    stored_names = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    defined_names = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    defined_names |= {
        alias.asname or alias.name.partition(".")[0]
        for n in nodes
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for alias in n.names
    }
    defined_names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    imported_names = {
        alias.name
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.module in problem_formats.PROGRAM_MODULES
        for alias in n.names
    }
    return sorted((loaded_names - stored_names - defined_names - vars(builtins).keys()) | imported_names)
