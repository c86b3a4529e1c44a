"""Whether a program passes its tests."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from rlhpc.language.rewards.base import Sample
from rlhpc.language.rewards.claims import read_tests
from rlhpc.language.rewards.outside import holds
from rlhpc.language.rewards.sandbox import Sandbox
from rlhpc.runtime.errors import ConfigError

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class CodeReward:
    """Runs the last Python block of a response against `meta["tests"]`, in a sandbox.

    A test is one of:

    - statements with `assert`, or a function `check(candidate)`. What an assertion says of calls is judged outside:
      only the values of the calls come out of the sandbox, and comparisons, `not`, `and`, `abs(a - b) < c`,
      `math.isclose`, `isinstance`, `all` and the like are applied to them here, as builtin values; what is expected
      never goes in. Loops over what is known beforehand are written out. So an object that claims to equal everything,
      an `abs` of the program's own, or a program that ends early and prints success, gains nothing. What cannot be
      taken apart (other loops, `try`, helpers of the setup that compare) is judged inside, beside the program, in a
      run of its own; a program bent on it can deceive those.
    - `{"input": text, "output": text}`: the program is run with that on stdin, and what it prints is compared outside,
      up to white space at line ends.
    - `{"call": expression, "output": value}`: as the first.

    `meta["setup"]` has statements to run before the tests, `meta["entry_point"]` the name that a `check(candidate)`
    function among the tests is called with.

    Args:
        partial: The part of the tests that pass, rather than 1 for all of them and 0 else.
        whole: A response without a block is taken for a program as it stands.
        timeout_s: Wall time of all tests of a sample; must be below `reward.timeout_s`.
        sandbox: Arguments of the `Sandbox`.
    """

    memory_mb = 8192

    def __init__(
        self,
        partial: bool = False,
        whole: bool = False,
        timeout_s: float = 6.0,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        self._partial, self._whole, self._timeout_s = partial, whole, timeout_s
        try:
            self._sandbox = Sandbox(**{"wall_s": timeout_s, **(sandbox or {})})
        except TypeError as error:
            raise ConfigError(f"reward.terms: sandbox of 'code': {error}") from None

    def __call__(self, sample: Sample) -> float:
        tests = sample.meta.get("tests")
        if not tests:
            raise ValueError("the problem has no tests: its meta has no 'tests'")
        tests = [tests] if isinstance(tests, (str, Mapping)) else list(tests)
        program = last_block(sample.response)
        if program is None:
            if not self._whole:
                return 0.0
            program = sample.response
        deadline = time.monotonic() + self._timeout_s
        streams = [test for test in tests if isinstance(test, Mapping) and "call" not in test]
        plan = read_tests([test for test in tests if test not in streams], sample.meta)
        setup, passed = str(sample.meta.get("setup", "")), []
        if plan.claims:
            found = self._sandbox.check(program, plan.steps, setup, self._timeout_s).checks
            answers = [found.get(number, {}) for number in range(len(plan.steps))]
            passed += [holds(claim, answers) for claim in plan.claims]
        left = deadline - time.monotonic()
        if plan.verdicts and left > 0 and (self._partial or all(passed)):
            found = self._sandbox.check(program, plan.scripts, setup, left).checks
            passed += [found.get(number, {}).get("passed") is True for number in plan.verdicts]
        else:
            passed += [False] * len(plan.verdicts)
        for test in streams:
            left = deadline - time.monotonic()
            enough = self._partial or all(passed)
            passed.append(enough and left > 0 and self._prints(program, test, left))
        return sum(passed) / len(passed) if self._partial else float(all(passed))

    def _prints(self, program: str, test: Mapping[str, Any], left: float) -> bool:
        result = self._sandbox.run(program, str(test.get("input", "")), left)
        return result.status == "ok" and _lines(result.stdout) == _lines(str(test["output"]))


def last_block(response: str) -> str | None:
    """The last closed block that is marked as Python, or else the last without a mark."""
    blocks = _BLOCK.findall(response)
    for marks in (("python", "py", "python3"), ("",)):
        found = [code for mark, code in blocks if mark.lower() in marks]
        if found:
            return str(found[-1])
    return None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
