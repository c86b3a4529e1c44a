"""The evaluation suites of a configuration, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import meant


class Named(Protocol):
    """A section of `data.eval`."""

    name: str


Section = TypeVar("Section", bound=Named)


def suite_named(sections: Sequence[Section], name: str) -> Section:
    """The section of `data.eval` with a suite's name; `default` is the first if none has that name.

    Raises:
        ConfigError: There is none; names those that there are.
    """
    suites = {section.name: section for section in sections}
    if not suites:
        raise ConfigError("data.eval is empty; an evaluation needs a suite, such as [{name: default, source: …}]")
    if name in suites:
        return suites[name]
    if name == "default":
        return next(iter(suites.values()))
    raise ConfigError(f"--suite is {name!r}; {meant(name, suites)}data.eval has: {', '.join(suites)}")
