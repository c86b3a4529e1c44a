"""Code reward: share of a problem's tests that a program passes in a sandbox."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, TypeGuard

from rlhpc.language.rewards.base import Sample
from rlhpc.language.rewards.expected_values import holds
from rlhpc.language.rewards.problem_formats import COLUMNS, tests_of
from rlhpc.language.rewards.problem_tests import program_names, read_tests
from rlhpc.language.sandbox.python import Sandbox
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.former_names import former_members

_FENCE = re.compile(
    r"(?P<quote>(?:> ?)*)(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<fence>`{3,}(?=[^`]*$)|~{3,})[ \t]*(?P<info>.*)"
)
_MAX_PROBLEMS = 256


@former_members(whole="run_unfenced")
class CodeReward:
    """Reward of the program in the last Python block of a response, which runs with the problem's tests in a sandbox.

    The tests are in `meta["tests"]`, or in the column of a published set (`problem_formats.COLUMNS`). A test is one of:

    - statements with `assert`, a function `check(candidate)`, pytest functions, unittest classes, doctests. Assertions on
      calls are evaluated outside the sandbox: only the values of the calls leave the sandbox, as builtin values, and
      comparisons, `not`, `and`, `abs(a - b) < c`, `math.isclose`, `isinstance`, `all` and similar functions are applied to
      these values outside. Expected values, and names that the tests bind to values, never enter the sandbox, unless they are
      arguments of the program. Loops over values known in advance are unrolled. So an object that claims to equal everything,
      a redefined `abs`, or a program that ends early and prints success gains nothing. Tests that cannot be split (other
      loops, `try`, helpers of the setup that compare) run in the program's process in the sandbox, in a separate run. A
      malicious program can deceive these tests.
    - `{"input": text, "output": text}`: the program runs with the input on stdin, and its output is compared outside the
      sandbox, except for white space at line ends.
    - `{"call": expression, "output": value}`: the value of the call is compared outside the sandbox.

    `meta["setup"]` has statements to run before the tests. `meta["entry_point"]` is the name of the function that is passed to
    a test's `check(candidate)`. Problems with tests that test nothing are errors (`check_problem`), and so are problems with
    tests that an empty program passes.

    Args:
        partial: Whether the reward is the fraction of passed tests, rather than 1 if all tests pass and 0 otherwise.
        run_unfenced: Whether a response without a block is run as a program.
        timeout_s: Maximum time in seconds of all tests of a sample; must be below `reward.timeout_s`.
        sandbox: Arguments of the `Sandbox`.

    Raises:
        ConfigError: The sandbox does not take the arguments.
    """

    memory_mb = 8192

    def __init__(
        self,
        partial: bool = False,
        run_unfenced: bool = False,
        timeout_s: float = 6.0,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        self._partial = partial
        self._run_unfenced = run_unfenced
        self._timeout_s = timeout_s
        try:
            self._sandbox = Sandbox(**{"wall_s": timeout_s, **(sandbox or {})})
        except TypeError as error:
            raise ConfigError(f"reward.terms: sandbox of 'code': {error}") from None
        self._problems: dict[str, _Problem] = {}

    @staticmethod
    def check_problem(meta: Mapping[str, Any]) -> None:
        """Rejects a problem with tests that cannot be read or that test nothing. Runs no program.

        Raises:
            ValueError: The tests are rejected; the message gives the reason.
        """
        _Problem(meta)

    def __call__(self, sample: Sample) -> float:
        problem = self._parse_problem(sample.meta)
        program = last_block(sample.response)
        if program is None:
            if not self._run_unfenced:
                return 0.0
            program = sample.response
        test_passed = self._run_tests(problem, program, self._timeout_s, runs_all=self._partial)
        if not any(test_passed):
            return 0.0
        depends_on_program = self._depends_on_program(problem)
        if not self._partial:
            return float(all(test_passed))
        # A test that an empty program passes, such as a test that an argument is unchanged, counts only if it fails.
        counted_results = [
            has_passed
            for has_passed, is_dependent in zip(test_passed, depends_on_program, strict=True)
            if is_dependent or not has_passed
        ]
        return sum(counted_results) / len(counted_results)

    def _parse_problem(self, meta: Mapping[str, Any]) -> _Problem:
        """Returns the parsed problem from the cache, or parses it."""
        columns = (*COLUMNS, "setup", "test_setup_code", "test_imports", "entry_point", "metadata")
        key = repr([meta.get(name) for name in columns])
        if key not in self._problems:
            if len(self._problems) >= _MAX_PROBLEMS:
                self._problems.clear()
            self._problems[key] = _Problem(meta)
        return self._problems[key]

    def _run_tests(self, problem: _Problem, program: str, timeout_s: float, *, runs_all: bool) -> list[bool]:
        """Runs a program with all tests; returns whether each test passed. Without `runs_all`, tests after a failure are not
        run and count as failed.
        """
        deadline, test_passed, plan = time.monotonic() + timeout_s, list[bool](), problem.plan
        if plan.claims:
            checks = self._sandbox.check(program, plan.steps, plan.setup, timeout_s).checks
            answers = [checks.get(step_number, {}) for step_number in range(len(plan.steps))]
            test_passed += [holds(claim, answers) for claim in plan.claims]
        remaining_s = deadline - time.monotonic()
        if plan.verdicts and remaining_s > 0 and (runs_all or all(test_passed)):
            checks = self._sandbox.check(program, plan.scripts, plan.setup, remaining_s).checks
            test_passed += [checks.get(step_number, {}).get("passed") is True for step_number in plan.verdicts]
        else:
            test_passed += [False] * len(plan.verdicts)
        for test in problem.streams:
            remaining_s = deadline - time.monotonic()
            is_decided = runs_all or all(test_passed)
            test_passed.append(
                is_decided and remaining_s > 0 and self._matches_stream_output(program, test, remaining_s)
            )
        return test_passed

    def _depends_on_program(self, problem: _Problem) -> list[bool]:
        """Returns whether each test fails for an empty program. The empty program runs once per problem.

        Raises:
            ValueError: An empty program, or a program with functions that return None, passes all tests.
        """
        if problem.refusal is None:
            stub_passed = self._run_tests(problem, "", self._timeout_s, runs_all=True)
            problem.dependent = [not has_passed for has_passed in stub_passed]
            stub_code = "".join(f"def {name}(*args, **kwargs): return None\n" for name in program_names(problem.plan))
            if all(stub_passed):
                problem.refusal = "its tests test nothing: an empty program passes"
            elif all(self._run_tests(problem, stub_code, self._timeout_s, runs_all=False)):
                problem.refusal = "its tests test nothing: a program whose functions return None passes"
            else:
                problem.refusal = ""
        if problem.refusal:
            raise ValueError(problem.refusal)
        return problem.dependent

    def _matches_stream_output(self, program: str, test: Mapping[str, Any], timeout_s: float) -> bool:
        sandbox_result = self._sandbox.run(program, str(test.get("input", "")), timeout_s)
        return sandbox_result.status == "ok" and _lines(sandbox_result.stdout) == _lines(str(test["output"]))


class _Problem:
    """Parsed tests of a problem.

    Attributes:
        streams: Tests of the program's output on stdout.
        plan: Plan of all other tests.
        dependent: Whether an empty program fails each test.
        refusal: Reason why the tests are rejected, "" if they are valid, None before an empty program has run.
    """

    def __init__(self, meta: Mapping[str, Any]) -> None:
        tests = tests_of(meta)
        self.streams = [test for test in tests if _is_stream_test(test)]
        self.plan = read_tests([test for test in tests if not _is_stream_test(test)], meta)
        self.dependent: list[bool] = []
        self.refusal: str | None = None


def _is_stream_test(test: str | Mapping[str, Any]) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(test, Mapping) and "call" not in test


def last_block(response: str) -> str | None:
    """Returns the last closed code block that is marked as Python, or the last block without a language if none is marked so.

    Fences are as in CommonMark: three or more backticks or tildes, closed by at least as many of the same character. In list
    items and quotes, the indentation of the fence is removed from the block's lines.
    """
    blocks: list[tuple[str, str]] = []
    opening_fence: re.Match[str] | None = None
    code_lines: list[str] = []
    for line in response.splitlines():
        if opening_fence is None:
            opening_fence, code_lines = _FENCE.fullmatch(line), []
            continue
        content_line = line[len(opening_fence["quote"]) :] if line.startswith(opening_fence["quote"]) else line
        fence_line = content_line.strip()
        if (
            fence_line
            and set(fence_line) == {opening_fence["fence"][0]}
            and len(fence_line) >= len(opening_fence["fence"])
        ):
            blocks.append((_parse_language(opening_fence["info"]), "\n".join([*code_lines, ""])))
            opening_fence = None
        else:
            code_lines.append(_remove_indent(content_line, len(opening_fence["indent"].expandtabs(4))))
    for fence_languages in (("python", "py", "python3"), ("",)):
        code_blocks = [block for language, block in blocks if language in fence_languages]
        if code_blocks:
            return code_blocks[-1]
    return None


def _parse_language(info_string: str) -> str:
    """Returns the language of a fence: `python` for `python title=x`, `{.python .numberLines}` and `python3.11`."""
    info_words = re.findall(r"[a-z]+3?", info_string.lower())
    return info_words[0] if info_words else ""


def _remove_indent(line: str, width: int) -> str:
    """Removes up to `width` columns of white space from the start of a line."""
    expanded_line = line.expandtabs(4) if line[:width].strip(" ") != line[:width].strip() else line
    return expanded_line[min(width, len(expanded_line) - len(expanded_line.lstrip())) :]


def _lines(output_text: str) -> list[str]:
    return [line.rstrip() for line in output_text.rstrip().split("\n")]
