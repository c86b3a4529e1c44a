"""Software-repair environment: a small package with one fault, which the model repairs with tools; hidden tests check the
repair.

Code of the model runs only in a sandbox (`rlhpc.language.sandbox.python`).
"""

from __future__ import annotations

import functools
import json
import random
from typing import Any

from rlhpc.language.data.prompts import Prompt
from rlhpc.language.envs.base import EnvResponse, Step, Task, ToolEnvironment, tool
from rlhpc.language.sandbox.python import Sandbox

_QUESTION = "The package `stock` fails its tests. Find the fault, mend it, and say done."
_FILES = {
    "stock/counts.py": '''"""Counts of things."""


def total(counts):
    """The sum of all counts."""
    result = 0
    for name in counts:
        result += counts[name]
    return result


def missing(counts, wanted):
    """How many of each thing are missing; what is not missing is left out."""
    return {name: wanted[name] - counts.get(name, 0) for name in wanted if wanted[name] > counts.get(name, 0)}
''',
    "stock/prices.py": '''"""What things cost."""


def price(counts, prices):
    """The price of all things together."""
    return sum(counts[name] * prices[name] for name in counts)


def cheapest(prices, most):
    """The names of at most so many things, the cheapest first; of equal ones in the order of the alphabet."""
    return sorted(prices, key=lambda name: (prices[name], name))[:most]
''',
    "stock/orders.py": '''"""Orders."""

from stock.counts import missing
from stock.prices import price


def order(counts, wanted, prices, money):
    """What to buy, and what is left of the money; nothing, if it is not enough."""
    needed = missing(counts, wanted)
    cost = price(needed, prices)
    if cost > money:
        return {}, money
    return needed, money - cost
''',
}
#: Faults as (file, correct text, faulty text).
FAULTS = (
    ("stock/counts.py", "result = 0", "result = 1"),
    ("stock/counts.py", "result += counts[name]", "result = counts[name]"),
    ("stock/counts.py", "wanted[name] - counts", "wanted[name] + counts"),
    ("stock/counts.py", "if wanted[name] > counts", "if wanted[name] >= counts"),
    ("stock/prices.py", "counts[name] * prices[name]", "counts[name] + prices[name]"),
    ("stock/prices.py", "[:most]", "[most:]"),
    ("stock/prices.py", "(prices[name], name)", "(-prices[name], name)"),
    ("stock/orders.py", "cost > money", "cost >= money"),
    ("stock/orders.py", "money - cost", "money + cost"),
    ("stock/orders.py", "return {}, money", "return {}, 0"),
)
_IMPORTS = "from stock.counts import *\nfrom stock.prices import *\nfrom stock.orders import *"
_VISIBLE = (
    "assert total({'a': 2, 'b': 3}) == 5",
    "assert missing({'a': 1, 'b': 2}, {'a': 3, 'b': 2}) == {'a': 2}",
    "assert price({'a': 2, 'b': 1}, {'a': 3, 'b': 5}) == 11",
    "assert cheapest({'a': 3, 'b': 1, 'c': 2}, 2) == ['b', 'c']",
    "assert order({}, {'a': 2}, {'a': 5}, 10) == ({'a': 2}, 0)",
    "assert order({}, {'a': 3}, {'a': 5}, 10) == ({}, 10)",
)
#: Expressions whose values are compared outside the sandbox, so that the model's code cannot fake a success.
_HIDDEN = {
    "total({}), total({'x': 7}), total({'a': 1, 'b': 4, 'c': 9})": "(0, 7, 14)",
    "missing({'a': 5}, {'a': 5, 'b': 1}), missing({'a': 2}, {'a': 7})": "({'b': 1}, {'a': 5})",
    "price({}, {}), price({'a': 3, 'b': 4}, {'a': 7, 'b': 2})": "(0, 29)",
    "cheapest({'b': 1, 'a': 1, 'c': 0}, 3), cheapest({'a': 1}, 0)": "(['c', 'a', 'b'], [])",
    "order({'a': 1}, {'a': 2}, {'a': 4}, 4), order({}, {'a': 2}, {'a': 4}, 9)": "(({'a': 1}, 0), ({'a': 2}, 1))",
    "order({}, {'a': 2}, {'a': 4}, 7)": "({}, 7)",
}


class MicroSwe(ToolEnvironment):
    """Software repair with shell-like tools; the reward is 1 if all hidden tests pass."""

    @classmethod
    def count(cls) -> int:
        """Returns the number of problems, which is the number of faults."""
        return len(FAULTS)

    @classmethod
    def problem(cls, number: int) -> Prompt:
        """Returns a problem with a fault of the package."""
        path, _, _ = FAULTS[number]
        meta = {"fault": number, "part": str(number)}
        return Prompt(number, ({"role": "user", "content": _QUESTION},), "", meta, level=path)

    def reset(self, task: Task) -> EnvResponse:
        """Sets up the package; the observation is the task's question."""
        path, correct_source, faulty_source = self._fault = FAULTS[task.meta["fault"]]
        self._files = {**_FILES, path: _FILES[path].replace(correct_source, faulty_source)}
        self._num_steps = 0
        return None

    @tool
    def ls(self) -> str:
        """Lists the files of the package."""
        return "\n".join(self._files)

    @tool
    def cat(self, path: str) -> str:
        """Returns the content of a file."""
        return self._files[self._require_file(path)]

    @tool
    def replace(self, path: str, old: str, new: str) -> str:
        """Replaces a text in a file; the text must occur exactly once.

        Raises:
            ValueError: The text does not occur exactly once in the file.
        """
        file_text, num_matches = self._files[self._require_file(path)], self._files[path].count(old) if old else 0
        if num_matches != 1:
            raise ValueError(f"{path} has that text {num_matches} times")
        self._files[path] = file_text.replace(old, new)
        return "replaced"

    @tool
    def pytest(self) -> str:
        """Runs the tests of the package."""
        test_results = self._run_checks([{"kind": "do", "source": test} for test in _VISIBLE])
        failed_tests = [
            test for test_index, test in enumerate(_VISIBLE) if not test_results.get(test_index, {}).get("passed")
        ]
        return "all tests pass" if not failed_tests else "\n".join(f"FAILED {test}" for test in failed_tests)

    def _require_file(self, path: str) -> str:
        if path not in self._files:
            raise ValueError(f"there is no file {path}; there are: {', '.join(self._files)}")
        return path

    def answer(self, text: str) -> EnvResponse:
        """Ends the episode with reward 1 if all hidden tests pass."""
        test_results = self._run_checks([{"kind": "value", "source": f"repr(({test}))"} for test in _HIDDEN])
        test_values = [test_results.get(test_index, {}).get("value") for test_index in range(len(_HIDDEN))]
        num_failed = sum(
            test_value != expected_result
            for test_value, expected_result in zip(test_values, _HIDDEN.values(), strict=True)
        )
        return Step(reward=float(not num_failed), done=True, metrics={"hidden_failed": float(num_failed)})

    def _run_checks(self, checks: list[dict[str, str]]) -> dict[int, dict[str, Any]]:
        return _sandbox().check(_LOADER.format(files=self._files), checks, setup=_IMPORTS).checks

    def demonstrate(self, rng: random.Random) -> str:
        """Returns the next tool call of a repair: runs the tests, reads the file, repairs it, and runs the tests again."""
        path, correct_source, faulty_source = self._fault
        self._num_steps += 1
        if self._num_steps == 3:
            arguments = {"path": path, "old": faulty_source, "new": correct_source}
            return f"replace: {json.dumps(arguments)}"
        return ("pytest: {}", f"cat: {path}", "", "pytest: {}", "done")[self._num_steps - 1]


#: Program that creates the package's modules from the texts of its files.
_LOADER = """
import sys, types
files = {files!r}
for name in ("stock", "stock.counts", "stock.prices", "stock.orders"):
    module = sys.modules[name] = types.ModuleType(name)
    path = name.replace(".", "/") + ".py"
    if path in files:
        exec(compile(files[path], path, "exec"), module.__dict__)
"""


@functools.lru_cache(maxsize=1)
def _sandbox() -> Sandbox:
    return Sandbox(wall_s=10.0)
