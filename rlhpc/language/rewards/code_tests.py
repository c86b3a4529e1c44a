"""Static analysis of a program's tests: split into expressions that run with the program in the sandbox, and expressions that
are computed outside.

For `assert abs(root(2.0) - 1.41) < 1e-6`, the sandbox computes only `root(2.0)` and returns its value. The subtraction, `abs`
and the comparison are computed outside, on builtin values. So a program that redefines `abs` or `bool`, or returns an object
with overloaded operators, gains nothing, and 1.41 does not occur in its process. Names that the tests bind to values are also
evaluated outside. The sandbox binds such a name only if the program receives its value.
"""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.language.rewards import expected_values as outside
from rlhpc.language.rewards import problem_formats
from rlhpc.language.rewards.code_test_plan import TestPlan, add_step, has_call, has_check, meanings_of
from rlhpc.language.rewards.expected_values import Answer, Term
from rlhpc.language.rewards.python_expressions import (
    MOST_ROUNDS,
    NameReplacer,
    Unclear,
    assign_expressions,
    bound_names,
    expression,
    has_assertion,
    has_return,
    items,
    mutable_ids,
    parse_literal,
    to_expression,
)

_PLAIN_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Import, ast.ImportFrom, ast.FunctionDef,
                     ast.ClassDef, ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Delete, ast.Pass)  # fmt: skip
_BINDING = (ast.FunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal)
_FRAMEWORKS = ("pytest", "unittest", "doctest")
_CONSTANT = (bool, int, float, complex, str, bytes, type(None))


class Reader:
    """Parser of a test that adds the test's steps and claims to `plan`.

    Attributes:
        num_dependent: Number of assertions that depend on the program.
        num_conditional: Number of assertions that depend on the program only if it defines the name of a builtin function.
    """

    def __init__(self, plan: TestPlan, entry: str, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.plan, self.entry = plan, entry
        self.num_dependent = self.num_conditional = 0
        self._functions = dict(functions)
        self._num_leaves, self._all_inside, self._num_rounds, self._is_trial = 0, False, 0, False
        self._bound: dict[str, list[Any]] = {}
        self._step_numbers: list[int] = []

    def read(self, body: list[ast.stmt]) -> TestPlan:
        """Parses the statements of a test; returns the extended plan.

        Raises:
            Unclear: The test cannot be split.
            ValueError: A test function asserts nothing about the program.
        """
        num_claims = len(self.plan.claims)
        plain_statements, functions, classes = problem_formats.test_functions(body)
        calls_check = self.entry and has_check(plain_statements) and not has_call(plain_statements, "check")
        for statement in plain_statements:
            self._read_statement(statement)
        if calls_check:
            check_function = self._functions["check"]
            self._inline(check_function, [ast.parse(self.entry, mode="eval").body])
        for function in [*functions, *(f for class_ in classes for f in problem_formats.unittest_functions(class_))]:
            num_before = self.num_dependent + self.num_conditional
            self._inline(function, [])
            if self.num_dependent + self.num_conditional == num_before:
                raise ValueError(f"the test {function.name} asserts nothing of the program")
        prepared_steps = [*self.plan.prepared, *self._step_numbers]
        if (
            not self.num_dependent and not self.num_conditional
        ):  # the steps of a test without assertions prepare later tests
            self.plan.set_prepared(prepared_steps)
        if prepared_steps:  # no statement of the test may raise
            self.plan.claims[num_claims:] = [
                outside.require_steps(prepared_steps, claim) for claim in self.plan.claims[num_claims:]
            ]
        return self.plan

    def _add_statement(self, statement: ast.stmt) -> None:
        """Adds a statement to the plan's steps, after the definitions that it needs."""
        stored_names = {
            n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        }
        is_simple = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr))
        statement_source = ast.unparse(self._insert_values(statement, is_simple))
        for name in stored_names:
            self.plan.values.pop(name, None)
        self.plan.meanings.update(meanings_of([statement]))
        self._step_numbers.append(add_step(self.plan, "do", statement_source))

    def _insert_values(self, node: Any, is_simple: bool = True) -> Any:
        """Returns a copy of a node with known expressions replaced by their values. Binds a name in the sandbox instead if the
        program may change or keep the name's object.
        """
        node = (
            ast.parse(ast.unparse(node), mode="eval").body
            if isinstance(node, ast.expr)
            else ast.parse(ast.unparse(node)).body[0]
        )
        local_names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        local_names |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        if any(
            isinstance(n, ast.Name) and n.id in _FRAMEWORKS and n.id not in self.plan.values for n in ast.walk(node)
        ):
            raise Unclear
        inserter = _ValueInserter(self, local_names, is_simple)
        node = inserter.visit(node)
        for name in sorted(inserter.needed_names):
            self._bind_inside(name)
        self._define({n.id for n in ast.walk(node) if isinstance(n, ast.Name)})
        return node

    def _bind_inside(self, name: str) -> None:
        """Binds a name in the sandbox, because the program receives the name's object and may change it."""
        if name not in self.plan.values:
            return
        known_value = self.plan.values.pop(name)
        value_source = ast.unparse(to_expression(known_value))
        shared_ids = mutable_ids(known_value)
        self.plan.meanings[name] = ""
        self._step_numbers.append(add_step(self.plan, "do", f"{name} = {value_source}"))
        for alias, alias_value in list(self.plan.values.items()):
            if alias_value is known_value and shared_ids:
                del self.plan.values[alias]
                self.plan.meanings[alias] = ""
                self._step_numbers.append(add_step(self.plan, "do", f"{alias} = {name}"))
            elif shared_ids & mutable_ids(alias_value):
                raise Unclear

    def _define(self, defined_names: set[str]) -> None:
        """Adds the definitions of the tests' functions and classes among `defined_names` to the sandbox's steps."""
        for name in sorted(defined_names & self.plan.definitions.keys()):
            definition = self.plan.definitions.pop(name)
            self._add_statement(definition)

    def bind(self, statement: ast.Assign) -> bool:
        """Binds the names of an assignment outside the sandbox; returns False if the value depends on the program."""
        try:
            constant_value = self.constant_value(statement.value)
            if isinstance(constant_value, (zip, enumerate)):
                constant_value = list(constant_value)
            pairs = [pair for target in statement.targets for pair in bound_names(target, constant_value)]
        except Unclear:
            return False
        for name, bound_value in pairs:
            self._bind(name, bound_value)
        return True

    def _bind(self, name: str, value: Any) -> None:
        self.plan.values[name], self.plan.meanings[name] = value, ""

    def _inline(self, function: ast.FunctionDef, arguments: Sequence[ast.expr]) -> None:
        """Parses the body of a called function with renamed local variables, in place of the call."""
        parameters = function.args
        if len(parameters.args) != len(arguments) or parameters.vararg or parameters.kwarg or parameters.kwonlyargs:
            raise Unclear
        inner_nodes = [node for statement in function.body for node in ast.walk(statement)]
        if function.decorator_list or any(isinstance(node, _BINDING) for node in inner_nodes):
            raise Unclear
        stored_names = {n.id for n in inner_nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if stored_names & {n.arg for n in inner_nodes if isinstance(n, ast.arg)}:
            raise Unclear
        replacements: dict[str, ast.expr] = {
            name: ast.Name(f"_{function.name}_{name}", ast.Load()) for name in stored_names
        }
        replacements |= {
            parameter.arg: argument_value for parameter, argument_value in zip(parameters.args, arguments, strict=True)
        }
        for statement in function.body:
            statement_copy = ast.parse(ast.unparse(statement)).body[0]
            self._read_statement(ast.fix_missing_locations(NameReplacer(replacements).visit(statement_copy)))

    def _read_statement(self, statement: ast.stmt) -> None:
        """Parses a statement of a test: adds assertions as claims, and other statements as steps or known values."""
        inner_nodes = list(ast.walk(statement))
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement, ast.Assert):
            self._read_assertion(statement.test)
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            if isinstance(statement, ast.FunctionDef):
                self._functions[statement.name] = statement
            self.plan.definitions[statement.name], self.plan.meanings[statement.name] = statement, ""
            self.plan.values.pop(statement.name, None)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.plan.meanings.update(meanings_of([statement]))
            module = statement.module if isinstance(statement, ast.ImportFrom) else statement.names[0].name
            if module not in _FRAMEWORKS:
                self._add_statement(statement)
        elif isinstance(statement, ast.With) and self._expects_exception(statement):
            self._read_raises(statement)
        elif isinstance(statement, ast.If) and any(isinstance(node, ast.Assert) for node in inner_nodes):
            for branch_statement in statement.body if self.constant_value(statement.test) else statement.orelse:
                self._read_statement(branch_statement)
        elif isinstance(statement, ast.For) and any(isinstance(node, (ast.Assert, ast.With)) for node in inner_nodes):
            self._unroll_loop(statement, inner_nodes)
        elif isinstance(statement, ast.Expr) and self._inline_asserting_call(statement.value):
            pass
        elif any(isinstance(node, ast.Assert) for node in inner_nodes):
            raise Unclear
        elif not (isinstance(statement, ast.Assign) and self.bind(statement)):
            if (
                not isinstance(statement, _PLAIN_STATEMENTS)
                or has_return(statement)
                or has_assertion([statement], self._functions)
            ):
                raise Unclear
            self._add_statement(statement)

    def _inline_asserting_call(self, call: ast.expr) -> bool:
        """Inlines a call of a test's function with assertions; returns False for other expressions.

        Raises:
            Unclear: The call cannot be inlined.
        """
        if not isinstance(call, ast.Call) or not has_assertion([ast.Expr(call)], self._functions):
            return False
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        simple_types = (ast.Name, ast.Constant, ast.Attribute)
        if (
            name not in self.plan.definitions
            or call.keywords
            or not all(isinstance(argument, simple_types) for argument in call.args)
        ):
            raise Unclear
        self._inline(self._functions[name], call.args)
        return True

    def _expects_exception(self, statement: ast.With) -> bool:
        call = statement.items[0].context_expr
        return (
            len(statement.items) == 1
            and isinstance(call, ast.Call)
            and self._find_qualified_name(call.func) == "pytest.raises"
        )

    def _read_raises(self, statement: ast.With) -> None:
        """Parses `with pytest.raises(...)`. The sandbox returns the exception; its classes are compared outside."""
        call = statement.items[0].context_expr
        assert isinstance(call, ast.Call)
        match_values = [
            keyword.value.value
            for keyword in call.keywords
            if keyword.arg == "match" and isinstance(keyword.value, ast.Constant)
        ]
        if (
            statement.items[0].optional_vars is not None
            or len(match_values) != len(call.keywords)
            or len(call.args) != 1
        ):
            raise Unclear
        if any(isinstance(node, (ast.Assert, ast.With)) for s in statement.body for node in ast.walk(s)):
            raise Unclear
        classes = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]]
        exception_names = [ast.unparse(node).rpartition(".")[2] for node in classes]
        statement_source = "\n".join(
            ast.unparse(self._insert_values(inner_statement, False)) for inner_statement in statement.body
        )
        step_number = add_step(self.plan, "raises", statement_source)
        pattern = str(match_values[0]) if match_values else None
        self.plan.claims.append(lambda answers: outside.has_raised(answers, step_number, exception_names, pattern))
        self.num_dependent += 1

    def _unroll_loop(self, loop: ast.For, inner_loops: list[ast.AST]) -> None:
        """Unrolls a loop over values that are known outside the sandbox."""
        if loop.orelse or any(isinstance(node, (ast.Break, ast.Continue, *_BINDING)) for node in inner_loops):
            raise Unclear
        for element in items(loop.iter, self.constant_value):
            self._num_rounds += 1
            if self._num_rounds > MOST_ROUNDS:
                raise Unclear
            for name, bound_value in bound_names(loop.target, copy.deepcopy(element)):
                self._bind(name, bound_value)
            for statement in loop.body:
                self._read_statement(statement)

    def _is_known(self, node: ast.expr, build_term: Callable[[ast.expr], Term] | None = None) -> bool:
        """Returns whether an expression is independent of the program.

        Args:
            node: The expression.
            build_term: Function that builds the term of the expression; by default `_build_term`.
        """
        previous_trial, previous_rounds, self._is_trial = self._is_trial, self._num_rounds, True
        try:
            (build_term or self._build_term)(node)
        except (Unclear, LookupError):
            return False
        finally:
            self._is_trial, self._num_rounds = previous_trial, previous_rounds
        return True

    def constant_value(self, node: ast.expr) -> Any:
        """Returns the value of an expression that is independent of the program.

        Raises:
            Unclear: The expression depends on the program, or its evaluation raises.
        """
        if self._bound or not self._is_known(node):
            raise Unclear
        try:
            return self._build_term(node)([])
        except Exception:
            raise Unclear from None

    def _read_assertion(self, node: ast.expr) -> None:
        """Adds a claim for an assertion; an assertion that holds independently of the program adds none."""
        num_steps, self._num_leaves = len(self.plan.steps), 0
        term = self._build_term(node)
        if self._num_leaves:
            self.plan.claims.append(term)
            self.num_dependent += 1
            return
        del self.plan.steps[num_steps:]
        stored_names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        stored_names |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        loaded_names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        unknown_names = sorted(loaded_names - stored_names - self.plan.meanings.keys() - self.plan.values.keys())
        if not unknown_names:  # nothing depends on the program
            if not outside.holds(term, []):
                self.plan.claims.append(term)
            return
        # The program may define a function with a builtin function's name, or import a name of a module.
        step_number = add_step(self.plan, "value", f"any(name in globals() for name in {unknown_names!r})")
        self._all_inside = True
        try:
            inside_term = self._build_term(node)
        finally:
            self._all_inside = False
        is_strict = self.plan.strict
        self.plan.claims.append(
            lambda answers: (
                inside_term(answers)
                if outside.value_of(answers, step_number) is True
                else not is_strict[0] and term(answers)
            )
        )
        self.num_conditional += 1

    def _build_term(self, node: ast.expr) -> Term:
        """Returns a function that computes an expression outside the sandbox from the values of its leaves, which the sandbox
        returns.
        """
        is_literal, literal_value = parse_literal(node)
        if is_literal:
            return lambda answers: literal_value
        if self._is_leaf(node):
            return self._add_leaf(node)
        match node:
            case ast.BoolOp():
                part_terms = [self._build_term(part_node) for part_node in node.values]
                return outside.evaluate_bool_op(part_terms, stop_value=isinstance(node.op, ast.Or))
            case ast.UnaryOp():
                sign_function, operand = outside.SIGNS[type(node.op)], self._build_term(node.operand)
                return lambda answers: sign_function(operand(answers))
            case ast.Compare():
                return outside.compare_chain(
                    [self._build_term(n) for n in (node.left, *node.comparators)],
                    [type(operator) for operator in node.ops],
                )
            case ast.BinOp():
                operator_type, left_term, right_term = (
                    type(node.op),
                    self._build_term(node.left),
                    self._build_term(node.right),
                )
                return lambda answers: outside.compute(operator_type, left_term(answers), right_term(answers))
            case ast.List() | ast.Tuple() | ast.Set():
                container_type = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
                element_terms = [self._build_term(element) for element in node.elts]
                return lambda answers: container_type([element_term(answers) for element_term in element_terms])
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._build_comprehension(node)
            case ast.Dict():
                pairs = [
                    (self._build_term(key), self._build_term(value_term))
                    for key, value_term in zip(node.keys, node.values, strict=True)
                    if key
                ]
                return lambda answers: {key(answers): value_term(answers) for key, value_term in pairs}
            case ast.Subscript():
                container_term, index_term = self._build_term(node.value), self._index(node.slice)
                return lambda answers: container_term(answers)[index_term(answers)]
            case ast.NamedExpr():
                constant_term = self.constant_value(node.value)
                if not self._is_trial:
                    self._bind(node.target.id, constant_term)
                return lambda answers: constant_term
            case ast.Call() if self._is_method(node):
                assert isinstance(node.func, ast.Attribute)
                name, receiver = node.func.attr, self._build_term(node.func.value)
                part_terms = [self._build_term(argument) for argument in node.args]
                return lambda answers: outside.call_method(
                    receiver(answers), name, [part_term(answers) for part_term in part_terms]
                )
            case ast.JoinedStr():
                part_texts = [self._text(part_node) for part_node in node.values]
                return lambda answers: "".join(part_text(answers) for part_text in part_texts)
            case ast.Call():
                function = self._find_outside_function(node)
                assert function is not None
                arguments = [self._build_term(argument) for argument in node.args]
                keywords = {
                    str(keyword.arg): self._key(keyword.value)
                    if keyword.arg == "key"
                    else self._build_term(keyword.value)
                    for keyword in node.keywords
                }
                return lambda answers: outside.call_function(
                    function,
                    [argument_term(answers) for argument_term in arguments],
                    {n: keyword_term(answers) for n, keyword_term in keywords.items()},
                )
        assert isinstance(node, (ast.Name, ast.Attribute))
        if isinstance(node, ast.Name) and node.id in self._bound:
            cell = self._bound[node.id]
            return lambda answers: cell[0]
        name = node.id if isinstance(node, ast.Name) else ""
        constant = (
            self.plan.values[name] if name in self.plan.values else outside.CONSTANTS[self._find_qualified_name(node)]
        )
        return lambda answers: constant

    def _add_leaf(self, node: ast.expr) -> Term:
        """Adds a step that computes an expression in the sandbox; returns a term for its value."""
        # The sandbox cannot compute a leaf with values that are known only outside.
        if self._is_trial or any(isinstance(n, ast.Name) and n.id in self._bound for n in ast.walk(node)):
            raise Unclear
        self._num_leaves += 1
        leaf_source = ast.unparse(self._insert_values(node))
        for name in [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]:
            self.plan.values.pop(name, None)
        step_number = add_step(self.plan, "value", leaf_source)
        return lambda answers: outside.value_of(answers, step_number)

    def _text(self, node: ast.expr) -> Term:
        """Returns a term for a part of an f-string."""
        if not isinstance(node, ast.FormattedValue):
            return self._build_term(node)
        convert = {-1: None, 115: str, 114: repr, 97: ascii}[node.conversion]
        format_term = self._build_term(node.format_spec) if node.format_spec else (lambda answers: "")
        value_term = self._build_term(node.value)
        return lambda answers: format(
            convert(value_term(answers)) if convert else value_term(answers), format_term(answers)
        )

    def _index(self, node: ast.expr) -> Term:
        if not isinstance(node, ast.Slice):
            return self._build_term(node)
        slice_terms = [
            self._build_term(bound_node) if bound_node else (lambda answers: None)
            for bound_node in (node.lower, node.upper, node.step)
        ]
        return lambda answers: slice(*[slice_term(answers) for slice_term in slice_terms])

    def _key(self, node: ast.expr) -> Term:
        """Returns a term that computes the `key` function of a sort."""
        if not isinstance(node, ast.Lambda):
            function = outside.FUNCTIONS[self._find_qualified_name(node)][0]
            return lambda answers: function
        if len(node.args.args) != 1 or node.args.defaults or node.args.vararg or node.args.kwarg:
            raise Unclear
        cell, outer_bindings = [None], dict(self._bound)
        self._bound[node.args.args[0].arg] = cell
        try:
            body = self._build_term(node.body)
        finally:
            self._bound = outer_bindings

        def key(answers: Sequence[Answer]) -> Any:
            def value(element: Any) -> Any:
                cell[0] = element
                return body(answers)

            return value

        return key

    def _is_method(self, node: ast.Call) -> bool:
        """Returns whether a call invokes a read-only method of a known value, with known arguments."""
        if not isinstance(node.func, ast.Attribute) or node.keywords or self._all_inside:
            return False
        try:
            receiver = self.constant_value(node.func.value)
        except Unclear:
            return False
        method_names = outside.KNOWN_METHODS.get(type(receiver), ())
        return node.func.attr in method_names and all(self._is_known(argument) for argument in node.args)

    def _is_leaf(self, node: ast.expr) -> bool:
        """Returns whether the sandbox computes a complete expression."""
        if parse_literal(node)[0]:
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
            case ast.Dict():
                return None in node.keys
            case ast.Subscript():
                index_nodes = [node.slice] if not isinstance(node.slice, ast.Slice) else [
                    bound for bound in (node.slice.lower, node.slice.upper, node.slice.step) if bound]  # fmt: skip
                return not all(self._is_known(child) for child in (node.value, *index_nodes))
            case ast.JoinedStr():
                formatted_nodes = [n.value for n in ast.walk(node) if isinstance(n, ast.FormattedValue)]
                return bool(self._bound) or not all(self._is_known(value_node) for value_node in formatted_nodes)
            case ast.NamedExpr():
                return bool(self._bound) or not self._is_known(node.value)
            case ast.Call() if self._is_method(node):
                return False
            case ast.Call():
                if self._find_outside_function(node) is None:
                    return True
                other_arguments = (*node.args[1:], *(keyword.value for keyword in node.keywords))
                is_conversion = (
                    self._find_qualified_name(node.func) in outside.CONVERSIONS
                    and node.args
                    and self._is_leaf(node.args[0])
                )
                return bool(is_conversion) and all(
                    isinstance(argument, (ast.Constant, ast.Lambda, ast.Name)) for argument in other_arguments
                )
            case ast.Name() if node.id in self._bound or node.id in self.plan.values:
                return False
            case ast.Name() | ast.Attribute():
                return self._find_qualified_name(node) not in outside.CONSTANTS
        return True

    def _build_comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Term:
        container_type: Callable[[list[Any]], Any] = set if isinstance(node, ast.SetComp) else list
        outer_bindings, plan_before = dict(self._bound), (self.plan.copy(), list(self._step_numbers))
        try:
            if any(generator.is_async for generator in node.generators):
                raise Unclear
            rounds = self._build_rounds(node.generators, node.elt)
        except Unclear:
            if isinstance(node, ast.GeneratorExp) or outer_bindings:
                raise
            self.plan, self._step_numbers = plan_before
            return self._add_leaf(node)  # the sandbox can return a list
        finally:
            self._bound = outer_bindings
        return lambda answers: container_type(list(rounds(answers)))

    def _build_rounds(self, generators: Sequence[ast.comprehension], element: ast.expr) -> Term:
        """Returns a term that computes the elements of a comprehension."""
        if not generators:
            term = self._build_term(element)
            return lambda answers: [term(answers)]
        first_generator, other_generators = generators[0], generators[1:]
        try:  # the loop is unrolled, so that each round may call the program
            elements = items(first_generator.iter, self.constant_value)
        except Unclear:
            elements = None
        if elements is not None and not self._bound:
            rounds_terms = []
            for element_term in elements:
                self._num_rounds += 1
                if self._num_rounds > MOST_ROUNDS:
                    raise Unclear
                renamer = NameReplacer(assign_expressions(first_generator.target, element_term))
                condition_terms = [self._build_term(renamer.visit(expression(test))) for test in first_generator.ifs]
                inner_generators = [ast.comprehension(g.target, renamer.visit(expression(g.iter)),
                         [renamer.visit(expression(test)) for test in g.ifs], 0) for g in other_generators]  # fmt: skip
                rounds_terms.append(
                    (condition_terms, self._build_rounds(inner_generators, renamer.visit(expression(element))))
                )
            return lambda answers: [
                element_value
                for condition_terms, inner_term in rounds_terms
                if all(condition_term(answers) for condition_term in condition_terms)
                for element_value in inner_term(answers)
            ]
        iterable_term = self._build_term(first_generator.iter)
        cells: dict[str, list[Any]] = {name: [None] for name in assign_expressions(first_generator.target, None)}
        self._bound |= cells
        condition_terms = [self._build_term(test) for test in first_generator.ifs]
        body = self._build_rounds(other_generators, element)

        def run(answers: Sequence[Answer]) -> Any:
            for round_value in iterable_term(answers):
                target_values = [round_value] if isinstance(first_generator.target, ast.Name) else list(round_value)
                for cell, target_value in zip(cells.values(), target_values, strict=True):
                    cell[0] = target_value
                if all(condition_term(answers) for condition_term in condition_terms):
                    yield from body(answers)

        return run

    def _find_outside_function(self, node: ast.Call) -> Callable[..., Any] | None:
        """Returns the function of a call if it can be computed outside the sandbox; None otherwise."""
        name = self._find_qualified_name(node.func)
        function, keywords = outside.FUNCTIONS.get(name, (None, ()))
        if name in outside.KNOWN_FUNCTIONS and not self._bound:
            argument_nodes = [*node.args, *(keyword.value for keyword in node.keywords)]
            if all(self._is_known(argument_node) for argument_node in argument_nodes):
                function, keywords = outside.KNOWN_FUNCTIONS[name]
        for keyword in node.keywords:
            is_supported = keyword.arg is not None and (outside.ANY in keywords or keyword.arg in keywords)
            if not is_supported or (keyword.arg == "key" and not self._is_known(keyword.value, self._key)):
                return None
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            return None
        if function is isinstance:  # only the sandbox knows the program's classes
            type_nodes = node.args[1:2]
            type_nodes = type_nodes[0].elts if type_nodes and isinstance(type_nodes[0], ast.Tuple) else type_nodes
            if not type_nodes or not all(
                self._find_qualified_name(type_node) in outside.TYPES for type_node in type_nodes
            ):
                return None
        return function

    def _find_qualified_name(self, node: ast.expr) -> str:
        """Returns the qualified name to which an expression refers; "" if program, setup or tests define it."""
        if self._all_inside:
            return ""
        if isinstance(node, ast.Name):
            return "" if node.id == self.entry else self.plan.meanings.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return f"{self.plan.meanings.get(node.value.id, node.value.id)}.{node.attr}"
        return ""


class _ValueInserter(ast.NodeTransformer):
    """Transformer that replaces the known parts of an expression by their values, for the sandbox.

    Attributes:
        needed_names: Names that must be bound in the sandbox, because the program receives the objects themselves.
    """

    def __init__(self, reader: Reader, local_names: set[str], is_simple: bool) -> None:
        self._reader, self._local_names, self._simple = reader, local_names, is_simple
        self.needed_names: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        """Replaces an expression by its value if all its parts are known. Replaces a name only by a constant."""
        if not isinstance(node, ast.expr):
            return self.generic_visit(node)
        used_names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if not used_names & self._reader.plan.values.keys():
            return node
        is_load = isinstance(getattr(node, "ctx", None) or ast.Load(), ast.Load)
        may_be_replaced = self._simple and is_load and not used_names & self._local_names
        if isinstance(node, ast.Name):
            known_value = self._reader.plan.values[node.id]
            if may_be_replaced and isinstance(known_value, _CONSTANT):
                with contextlib.suppress(Unclear):
                    return to_expression(known_value)
            self.needed_names.add(node.id)
            return node
        if may_be_replaced and not isinstance(node, ast.Starred):
            with contextlib.suppress(Unclear):
                return to_expression(self._reader.constant_value(node))
        return self.generic_visit(node)
