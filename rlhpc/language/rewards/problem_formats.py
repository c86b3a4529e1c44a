"""Conversion of the tests in published problem sets to plain assertions.

The tests may be in the columns of HumanEval, BigCodeBench and KodCode (`test`), MBPP (`test_list`), APPS, TACO and PRIME
(`input_output`) and LiveCodeBench (`public_test_cases`), or in the column `tests` in any of these forms. Statements may be
pytest functions, unittest classes, `check(candidate)`, doctests, and main guards.
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhpc.language.rewards.python_expressions import Unclear

COLUMNS = ("tests", "test", "test_list", "input_output", "public_test_cases")
_SETUPS = ("setup", "test_setup_code", "test_imports")
#: Modules from which published tests import the program.
PROGRAM_MODULES = ("solution", "program")
_COMPRESSED = re.compile(r"[A-Za-z0-9+/=\s]{120,}")
_METHOD = "(Solution().{0} if 'Solution' in globals() else {0})({1})"

Test = str | Mapping[str, Any]


def tests_of(meta: Mapping[str, Any]) -> list[Test]:
    """Returns the tests of a problem as Python statements, `{"call", "output"}` or `{"input", "output"}`.

    Raises:
        ValueError: The problem has no tests, or their format is not supported.
    """
    column = next((name for name in COLUMNS if meta.get(name)), None)
    if column is None:
        raise ValueError(f"the problem has no tests: its meta has none of {', '.join(map(repr, COLUMNS))}")
    return list(_iter_tests(meta[column], entry_of(meta)))


def setup_of(meta: Mapping[str, Any]) -> str:
    """Returns the statements of a problem that run before its tests."""
    setup_texts = [meta[name] for name in _SETUPS if meta.get(name)]
    return "\n".join(
        setup_text if isinstance(setup_text, str) else "\n".join(map(str, setup_text)) for setup_text in setup_texts
    )


def entry_of(meta: Mapping[str, Any]) -> str:
    """Returns the expression of the function that the tests call; "" if the problem does not name the function."""
    if meta.get("entry_point"):
        return str(meta["entry_point"])
    metadata = meta.get("metadata")
    if isinstance(metadata, str):
        metadata = _try_parse_json(metadata)
    return str(metadata.get("func_name") or "") if isinstance(metadata, Mapping) else ""


def _iter_tests(raw_tests: Any, entry_name: str) -> Iterator[Test]:
    """Yields the tests in the value of a column."""
    if isinstance(raw_tests, str):
        tests_text = raw_tests.strip()
        if tests_text[:1] in ("{", "[") and (parsed_json := _try_parse_json(tests_text)) is not None:
            yield from _iter_tests(parsed_json, entry_name)
        elif _COMPRESSED.fullmatch(tests_text) and " " not in tests_text:
            raise ValueError("a test is compressed (private_test_cases of LiveCodeBench): decode it first")
        else:
            yield raw_tests
    elif isinstance(raw_tests, Mapping):
        yield from _iter_input_output(raw_tests, entry_name)
    elif isinstance(raw_tests, Sequence):
        for element in raw_tests:
            yield from _iter_tests(element, entry_name)
    else:
        raise ValueError(
            f"a test is a {type(raw_tests).__name__}; allowed: Python statements, or objects with input and output"
        )


def _try_parse_json(json_text: str) -> Any:
    try:
        parsed_json = json.loads(json_text)
    except (ValueError, RecursionError):
        return None
    return parsed_json if isinstance(parsed_json, (dict, list)) else None


def _iter_input_output(test: Mapping[str, Any], entry_name: str) -> Iterator[Test]:
    """Yields the tests of an object with calls or inputs and their outputs."""
    test_keys = set(test)
    if {"call", "output"} <= test_keys:
        yield test
    elif {"inputs", "outputs"} <= test_keys:
        inputs, outputs = test["inputs"], test["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
            raise ValueError("a test has inputs and outputs that are no lists of one length")
        if name := test.get("fn_name"):
            # APPS wraps each result in a list of one.
            has_wrapped_outputs = all(isinstance(output, list) and len(output) == 1 for output in outputs)
            for arguments, output in zip(inputs, outputs, strict=True):
                yield _call_test(str(name), arguments, output[0] if has_wrapped_outputs else output)
        else:
            for stdin, stdout in zip(inputs, outputs, strict=True):
                yield {"input": _join_lines(stdin), "output": _join_lines(stdout)}
    elif {"input", "output"} <= test_keys:
        test_type = str(test.get("testtype") or test.get("type") or "stdin")
        if test_type in ("stdin", "stdin_stdout"):
            yield {"input": _join_lines(test["input"]), "output": _join_lines(test["output"])}
        elif test_type == "functional":
            if not entry_name:
                raise ValueError("a test calls a function that the problem does not name: set entry_point")
            try:
                arguments = [json.loads(line) for line in str(test["input"]).splitlines() if line.strip()]
                yield _call_test(entry_name, arguments, json.loads(str(test["output"])))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"a functional test has input or output that is no JSON: {error}") from None
        else:
            raise ValueError(f"a test has testtype {test_type!r}; allowed: stdin, functional")
    else:
        raise ValueError(
            f"a test is an object with the keys {', '.join(sorted(map(str, test_keys))) or 'none'}; allowed: call and output; "
            "input and output; inputs and outputs, with fn_name or without"
        )


def _call_test(name: str, arguments: Any, output: Any) -> Test:
    if not isinstance(arguments, list):
        raise ValueError(f"a test calls {name} with a {type(arguments).__name__}, not with a list of arguments")
    arguments_source = ", ".join(map(repr, arguments))
    return {
        "call": _METHOD.format(name, arguments_source) if name.isidentifier() else f"{name}({arguments_source})",
        "output": output,
    }


def _join_lines(lines_or_text: Any) -> str:
    """Returns the text of stdin or stdout, which some data sets store as a list of lines."""
    return "\n".join(map(str, lines_or_text)) if isinstance(lines_or_text, list) else str(lines_or_text)


def parse_test(test: str) -> list[ast.stmt]:
    """Parses a test into statements; converts doctests to assertions and replaces main guards by their bodies.

    Raises:
        ValueError: The test is not valid Python, or has an unsupported doctest.
    """
    if test.lstrip().startswith(">>>"):
        return _convert_doctest(test)
    try:
        body = ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"a test of the problem is no Python: {error}") from None
    return list(_iter_statements(body))


def _iter_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If) and _is_main_guard(statement.test):
            yield from _iter_statements(statement.body)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            if isinstance(statement.value.value, str) and ">>>" in statement.value.value:
                yield from _convert_doctest(statement.value.value)
        elif isinstance(statement, ast.ImportFrom) and statement.module in PROGRAM_MODULES and not statement.level:
            for alias in statement.names:
                if alias.asname:
                    yield ast.parse(f"{alias.asname} = {alias.name}").body[0]
        elif not _calls_test_runner(statement):
            yield statement


def _is_main_guard(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Eq)
        and {ast.unparse(test.left), ast.unparse(test.comparators[0])} == {"__name__", "'__main__'"}
    )


def _calls_test_runner(statement: ast.stmt) -> bool:
    """Returns whether a statement calls a test runner. The tests are called anyway, so the statement can be dropped."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) in ("unittest.main", "pytest.main", "doctest.testmod")
    )


def _convert_doctest(docstring: str) -> list[ast.stmt]:
    """Converts the examples of a doctest to assertions."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError as error:
        raise ValueError(f"a doctest of the problem cannot be read: {error}") from None
    body: list[ast.stmt] = []
    for example in examples:
        if example.options:
            raise ValueError("a doctest of the problem has options, which are not read: write it as an assertion")
        try:
            statements = ast.parse(example.source).body
        except SyntaxError as error:
            raise ValueError(f"a doctest of the problem is no Python: {error}") from None
        example_source, expected_output = example.source.strip(), example.want.strip()
        if example.exc_msg is not None:
            exception_type = example.exc_msg.split(":", 1)[0].strip().rpartition(".")[2]
            indented_source = "\n".join(f"    {line}" for line in example_source.splitlines())
            body += ast.parse(f"with pytest.raises({exception_type}):\n{indented_source}").body
        elif not expected_output:
            body += statements
        elif len(statements) != 1 or not isinstance(statements[0], ast.Expr):
            raise ValueError("a doctest of the problem prints from a statement: write it as an assertion")
        else:
            expression, converter = statements[0].value, "repr"
            if isinstance(expression, ast.Call) and ast.unparse(expression.func) == "print":
                if len(expression.args) != 1 or expression.keywords:
                    raise ValueError("a doctest of the problem prints several values: write it as an assertion")
                expression, converter = expression.args[0], "str"
            body += ast.parse(f"assert {converter}({ast.unparse(expression)}) == {expected_output!r}").body
    return body


def test_functions(body: Sequence[ast.stmt]) -> tuple[list[ast.stmt], list[ast.FunctionDef], list[ast.ClassDef]]:
    """Splits statements into plain statements, functions that pytest would call, and unittest classes.

    Raises:
        ValueError: A test function is asynchronous, takes fixtures or has an unsupported decorator, or a class has no tests.
    """
    plain_statements: list[ast.stmt] = []
    functions: list[ast.FunctionDef] = []
    classes: list[ast.ClassDef] = []
    for statement in body:
        if isinstance(statement, ast.AsyncFunctionDef) and statement.name.startswith("test"):
            raise ValueError(f"the test {statement.name} is asynchronous, which is not read here")
        if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test"):
            functions.append(_expand_parameters(statement))
        elif isinstance(statement, ast.ClassDef) and any(
            ast.unparse(base_class).rpartition(".")[2] in ("TestCase", "IsolatedAsyncioTestCase")
            for base_class in statement.bases
        ):
            if not any(
                isinstance(method, ast.FunctionDef) and method.name.startswith("test") for method in statement.body
            ):
                raise ValueError(f"the class {statement.name} has no method test…, so it tests nothing")
            classes.append(statement)
        elif isinstance(statement, ast.ClassDef) and statement.name.startswith("Test") and not statement.bases:
            functions += _convert_pytest_methods(statement)
        else:
            plain_statements.append(statement)
    return plain_statements, functions, classes


def _expand_parameters(function: ast.FunctionDef) -> ast.FunctionDef:
    """Returns a test function without parameters; converts pytest's parametrize to loops around its body.

    Raises:
        ValueError: The function takes fixtures, or has an unsupported decorator.
    """
    body, parameter_names = list(function.body), {argument.arg for argument in function.args.args}
    for decorator in reversed(function.decorator_list):
        if not (
            isinstance(decorator, ast.Call)
            and ast.unparse(decorator.func).endswith("mark.parametrize")
            and len(decorator.args) == 2
        ):
            raise ValueError(
                f"the test {function.name} has the decorator {ast.unparse(decorator)}, which is not read here"
            )
        try:
            name_argument = ast.literal_eval(decorator.args[0])
        except ValueError:
            raise ValueError(f"the test {function.name} has parameters whose names are computed") from None
        columns = (
            [column_name.strip() for column_name in name_argument.split(",")]
            if isinstance(name_argument, str)
            else list(name_argument)
        )
        target = columns[0] if len(columns) == 1 else f"({', '.join(columns)})"
        loop = ast.parse(f"for {target} in {ast.unparse(decorator.args[1])}: pass").body[0]
        assert isinstance(loop, ast.For)
        loop.body = body
        body, parameter_names = [loop], parameter_names - set(columns)
    parameter_names -= {
        argument.arg for argument in function.args.args[len(function.args.args) - len(function.args.defaults) :]
    }
    if parameter_names or function.args.vararg or function.args.kwonlyargs:
        raise ValueError(
            f"the test {function.name} takes {', '.join(sorted(parameter_names)) or 'arguments'}, which a fixture would give: "
            "write the values into it"
        )
    defaults = zip(
        function.args.args[len(function.args.args) - len(function.args.defaults) :], function.args.defaults, strict=True
    )
    body = [*(ast.parse(f"{parameter.arg} = {ast.unparse(default)}").body[0] for parameter, default in defaults), *body]
    plain_function = ast.parse(f"def {function.name}(): pass").body[0]
    assert isinstance(plain_function, ast.FunctionDef)
    plain_function.body = body
    return plain_function


def _convert_pytest_methods(class_: ast.ClassDef) -> list[ast.FunctionDef]:
    """Converts the tests of a pytest class without base classes to functions.

    Raises:
        ValueError: The class has no tests, or its tests use `self`.
    """
    functions = []
    for method in class_.body:
        if not isinstance(method, ast.FunctionDef) or not method.name.startswith("test"):
            if isinstance(method, ast.Expr):
                continue
            raise ValueError(f"the class {class_.name} holds more than tests, which is not read here")
        if not method.args.args or any(isinstance(n, ast.Name) and n.id == "self" for n in ast.walk(method)):
            raise ValueError(f"the test {class_.name}.{method.name} uses an object, which is not read here")
        method.args.args = method.args.args[1:]
        function = _expand_parameters(method)
        function.name = f"{method.name}_{class_.name}"
        functions.append(function)
    if not functions:
        raise ValueError(f"the class {class_.name} has no method test…, so it tests nothing")
    return functions


_COMPARISONS = {
    "assertEqual": "==", "assertEquals": "==", "assertNotEqual": "!=", "assertIs": "is", "assertIsNot": "is not",
    "assertIn": "in", "assertNotIn": "not in", "assertGreater": ">", "assertGreaterEqual": ">=", "assertLess": "<",
    "assertLessEqual": "<=", "assertListEqual": "==", "assertDictEqual": "==", "assertTupleEqual": "==",
    "assertSetEqual": "==", "assertSequenceEqual": "==", "assertMultiLineEqual": "==",
}  # fmt: skip
_UNARY_ASSERTIONS = {
    "assertTrue": "assert {}", "assertFalse": "assert not {}", "assertIsNone": "assert {} is None",
    "assertIsNotNone": "assert {} is not None",
}  # fmt: skip


def unittest_functions(class_: ast.ClassDef) -> list[ast.FunctionDef]:
    """Converts the tests of a unittest class to functions with plain assertions.

    Raises:
        Unclear: The class has members other than `setUp` and tests, or a test cannot be converted.
    """
    methods = {
        class_statement.name: class_statement
        for class_statement in class_.body
        if isinstance(class_statement, ast.FunctionDef)
    }
    non_methods = [
        class_statement
        for class_statement in class_.body
        if not isinstance(class_statement, ast.FunctionDef) and not isinstance(class_statement, ast.Expr)
    ]
    if non_methods or any(
        method.decorator_list or len(method.args.args) != 1 or not (name == "setUp" or name.startswith("test"))
        for name, method in methods.items()
    ):
        raise Unclear
    functions = []
    for name, method in methods.items():
        if name == "setUp":
            continue
        function = ast.parse(f"def {name}_{class_.name}(): pass").body[0]
        assert isinstance(function, ast.FunctionDef)
        setup_statements = methods["setUp"].body if "setUp" in methods else []
        body_copy = ast.parse("\n".join(ast.unparse(statement) for statement in (*setup_statements, *method.body)))
        body = (
            _Unittest().visit(body_copy).body
        )  # the full body, because a `with self.subTest` becomes several statements
        if any(
            isinstance(n, ast.Name) and n.id == "self" for class_statement in body for n in ast.walk(class_statement)
        ):
            raise Unclear
        function.body = body
        functions.append(ast.fix_missing_locations(function))
    return functions


class _Unittest(ast.NodeTransformer):
    """Transformer that converts unittest assertions to statements, and attributes of `self` to names."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id == "self" and not node.attr.startswith("assert"):
            return ast.Name(f"_self_{node.attr}", node.ctx)
        self.generic_visit(node)
        return node

    def visit_With(self, node: ast.With) -> Any:
        call = node.items[0].context_expr
        function_name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if function_name == "self.subTest" and len(node.items) == 1:
            return [self.visit(statement) for statement in node.body]
        if function_name == "self.assertRaises" and isinstance(call, ast.Call):
            call.func = ast.parse("pytest.raises", mode="eval").body
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if ast.unparse(node.func).startswith("self."):
            raise Unclear  # a method other than an assertion, or an assertion within an expression
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("self.assert"):
            self.generic_visit(node)
            return node
        call.args = [self.visit(argument) for argument in call.args]
        for keyword in call.keywords:
            keyword.value = self.visit(keyword.value)
        name, arguments = ast.unparse(call.func).removeprefix("self."), [ast.unparse(a) for a in call.args]
        keywords = {str(k.arg): ast.unparse(k.value) for k in call.keywords if k.arg != "msg"}
        if name in _COMPARISONS and len(arguments) in (2, 3) and not keywords:
            assertion_source = f"assert ({arguments[0]}) {_COMPARISONS[name]} ({arguments[1]})"
        elif name in _UNARY_ASSERTIONS and len(arguments) in (1, 2) and not keywords:
            assertion_source = _UNARY_ASSERTIONS[name].format(f"({arguments[0]})")
        elif name in ("assertIsInstance", "assertNotIsInstance") and len(arguments) in (2, 3) and not keywords:
            negation = "not " * (name == "assertNotIsInstance")
            assertion_source = f"assert {negation}isinstance({arguments[0]}, {arguments[1]})"
        elif name in ("assertAlmostEqual", "assertAlmostEquals") and len(arguments) in (2, 3):
            if "delta" in keywords:
                assertion_source = f"assert abs(({arguments[0]}) - ({arguments[1]})) <= {keywords['delta']}"
            else:
                num_places = arguments[2] if len(arguments) == 3 else keywords.get("places", "7")
                assertion_source = f"assert round(abs(({arguments[0]}) - ({arguments[1]})), {num_places}) == 0"
        elif name == "assertRaises" and len(arguments) >= 2 and not keywords:
            assertion_source = f"with pytest.raises({arguments[0]}):\n    {arguments[1]}({', '.join(arguments[2:])})"
        else:
            raise Unclear
        return ast.parse(assertion_source).body[0]


def require_modules(body: Sequence[ast.stmt]) -> None:
    """Checks that the modules that tests import are installed. Without a module every program would fail.

    Raises:
        ValueError: A module is missing; the message names it.
    """
    for statement in body:
        module_names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            module_names = [statement.module]
        for name in module_names:
            root = name.partition(".")[0]
            if root not in PROGRAM_MODULES and importlib.util.find_spec(root) is None:
                raise ValueError(f"its tests import {root}, which is not installed here")
