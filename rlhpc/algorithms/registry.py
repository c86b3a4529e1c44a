"""Names to functions. A name is case-insensitive; one that is not registered may be an entry point or `module:function`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from rlhpc.runtime.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class Registry:
    """One kind of function.

    Args:
        kind: For messages: "advantage estimator".
        key: The configuration key that names one.
        group: Entry point group in which packages may offer more.
    """

    def __init__(self, kind: str, key: str, group: str) -> None:
        self.kind, self.key, self.group = kind, key, group
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, *names: str) -> Callable[[Function], Function]:
        """Decorator; a second function of the same name is an error."""

        def add(function: Function) -> Function:
            for name in names:
                if name.lower() in self._functions:
                    raise ConfigError(f"{self.kind} {name!r} is registered twice")
            self._functions |= dict.fromkeys((name.lower() for name in names), function)
            return function

        return add

    def names(self) -> list[str]:
        """All names, entry points included."""
        return sorted({*self._functions, *(e.name.lower() for e in entry_points(group=self.group))})

    def get(self, name: str) -> Callable[..., Any]:
        """The function of `name`.

        Raises:
            ConfigError: There is none; names the nearest and all allowed ones.
        """
        found = self._functions.get(str(name).lower())
        if found is not None:
            return found
        for entry in entry_points(group=self.group):
            if entry.name.lower() == str(name).lower():
                function: Callable[..., Any] = entry.load()
                return function
        if ":" in str(name):
            module, _, attribute = str(name).partition(":")
            try:
                loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                raise ConfigError(f"{self.key} is {name!r}: {error}") from None
            if not callable(loaded):
                raise ConfigError(f"{self.key} is {name!r}, which is a {type(loaded).__name__} and no function")
            return loaded
        near = difflib.get_close_matches(str(name).lower(), self.names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(
            f"{self.key} is {name!r}, which is no {self.kind}{hint} allowed: {', '.join(self.names())}, or module:function"
        )


ADVANTAGES = Registry("advantage estimator", "algorithm.adv_type", "rlhpc.advantages")
POLICY_LOSSES = Registry("policy loss", "algorithm.loss_type", "rlhpc.policy_losses")

register_advantage = ADVANTAGES.register
register_policy_loss = POLICY_LOSSES.register
