"""Trust in files that name code to import or programs to start.

The user's configuration may name any code. A checkpoint, an export or a data set may only use built-in names, registered names
and entry points of installed packages, unless the user declares the file trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_yaml

FLAG = "--trust-checkpoint-code"
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_][\w./-]*")
#: Reference to another key. Any other text in braces calls a resolver, such as `oc.env`.
_REFERENCE = re.compile(r"\$\{[\w.\[\]]+\}")
#: Import paths that need no trust: wrappers of Gymnasium, which only wrap an environment, and built-in names.
_HARMLESS = re.compile(r"gymnasium\.wrappers:(?!RecordVideo\b)[A-Z]\w*|builtin:[a-z_]+")
#: Sections that only training, the submission of jobs and the workflow read.
_JOB_SECTIONS = ("cluster", "workflow", "runner")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
"""Import path with dots only, a form that engines accept."""
_ENGINE_PREFIX = "rollout.engine_kwargs."
_SWITCHES = {
    "simulator_python": "starts a program",
    "trust_remote_code": "runs code that comes with a model",
    "allow_unconfined": "runs programs without a sandbox",
    "agent.command": "starts a program",
    "agent.python": "starts a program",
    "agent.servers": "starts a program, or asks one elsewhere",
    "agent.services": "starts a program",
    "agent.framework": "loads an environment's code, or asks one elsewhere",
}
_SECRET_KEY = "token_env"


@dataclass(frozen=True)
class Trust:
    """Permissions for loading the code that a file from another source names.

    Attributes:
        everything: Whether the user allows any code.
        names: Import paths that the user's configuration names, and switches that it sets, such as `trust_remote_code`.
    """

    everything: bool = False
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, content: Any, everything: bool = False) -> Trust:
        """Returns trust in the names of the user's configuration.

        Args:
            content: Mappings and lists, or a text such as an override.
            everything: Whether to allow any code.
        """
        import_paths = (
            text for _, text in _texts(content, "") if _IMPORT_PATH.fullmatch(text) or _DOTTED.fullmatch(text)
        )
        switched = (_switch_name(key) for key, _ in _switches(content, ""))
        return cls(everything, frozenset((*import_paths, *switched)))

    @classmethod
    def of_words(cls, words: Sequence[str], everything: bool = False) -> Trust:
        """Returns trust in the names of the user's overrides (`key=value`)."""
        values: list[Any] = []
        for override in words:
            value = override.partition("=")[2]
            try:
                values.append(read_yaml(value))
            except Exception:  # not YAML; the code that applies it reports this
                values.append(value)
        return cls.of(values, everything)

    def check(self, content: Any, origin: str) -> None:
        """Refuses content that names untrusted code, starts programs, or exposes variables of the user's environment.

        Args:
            content: Parsed content: mappings and lists.
            origin: Source of the content, such as a file name, for messages.

        Raises:
            ConfigError: The content names such code or data; the message has the key, the name, and the flag that allows it.
        """
        if self.everything:
            return
        for key, code_name in _texts(content, ""):
            code = _IMPORT_PATH.fullmatch(code_name) or (
                key.startswith(_ENGINE_PREFIX) and _DOTTED.fullmatch(code_name)
            )
            if code and not _HARMLESS.fullmatch(code_name) and code_name not in self.names:
                self.refuse(origin, key, repr(code_name), "names code to be imported and run")
            if key.rsplit(".", 1)[-1] == _SECRET_KEY:
                self.refuse(origin, key, repr(code_name), "sends a variable of your environment to a service")
        for key, switch_value in _switches(content, ""):
            if _switch_name(key) in self.names:
                continue
            self.refuse(origin, key, repr(switch_value), _SWITCHES[_switch_name(key)])

    def refuse(self, origin: str, key: str, value: str, why: str) -> None:
        """Refuses content that is not trusted.

        Raises:
            ConfigError: Always; the message has the key, the value, the reason, and the flag that allows the content.
        """
        raise ConfigError(
            f"{origin}: {key} is {value}, which {why}; a file that comes with weights may not. If you know where it is from, "
            f"pass {FLAG} (in Python: trust_code=True), or name it in a configuration of your own with --config"
        )


def without_variables(content: Any, trust: Trust, origin: str, key: str = "") -> Any:
    """Returns content from a file of another user, with `${oc.env:NAME}` and other resolvers as plain text.

    Args:
        content: Unresolved mappings and lists.
        trust: Refuses a resolver outside the sections that only training and jobs read, because a policy, an environment or
            a reward would get the value.
        origin: Source of the content, such as a file name, for messages.
        key: Key of `content`, for messages.

    Raises:
        ConfigError: The content has such a resolver; the message has the key and the flag that allows it.
    """
    if isinstance(content, dict):
        return {n: without_variables(v, trust, origin, f"{key}.{n}" if key else str(n)) for n, v in content.items()}
    if isinstance(content, list):
        return [without_variables(child, trust, origin, f"{key}[{index}]") for index, child in enumerate(content)]
    if not isinstance(content, str) or "${" not in _REFERENCE.sub("", content):
        return content
    if key.split(".")[0] not in _JOB_SECTIONS:
        trust.refuse(origin, key, repr(content), "reads a variable of your environment")
    return content.replace("${", "$ {")


def _leaves(content: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for name, child in content.items():
            if key or name not in _JOB_SECTIONS:
                if isinstance(name, str) and ":" in name:  # import path of a wrapper, used as the key of its settings
                    yield key, name
                yield from _leaves(child, f"{key}.{name}" if key else str(name))
    elif isinstance(content, (list, tuple)):
        for index, child in enumerate(content):
            yield from _leaves(child, f"{key}[{index}]")
    else:
        yield key, content


def _texts(content: Any, key: str) -> Iterator[tuple[str, str]]:
    return ((path, leaf) for path, leaf in _leaves(content, key) if isinstance(leaf, str))


def _switches(content: Any, key: str) -> Iterator[tuple[str, Any]]:
    return ((path, leaf) for path, leaf in _leaves(content, key) if _switch_name(path) in _SWITCHES and leaf)


def _switch_name(key: str) -> str:
    """Returns the name in `_SWITCHES` for a key; list indices in the key are ignored."""
    section_key = ".".join(key.split("[")[0].split(".")[:2])
    return section_key if section_key in _SWITCHES else key.rsplit(".", 1)[-1]
