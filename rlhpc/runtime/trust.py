"""Trust in files that name code to import or programs to start.

The user's configuration may name any code. A checkpoint, an export or a data set may only use built-in names, registered names
and entry points of installed packages, unless the user declares the file trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
_IMPORTED = "names code to be imported and run"
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
#: Keys of section `cluster` whose texts become part of a job, with what they do.
_JOB_TEXTS = {
    "cluster.setup": "is a command of each job", "cluster.container": "starts ranks in a container",
    "cluster.container_python": "is the program that starts ranks in a container",
    "cluster.sbatch": "is an option of sbatch", "cluster.srun": "is an option of srun",
    "cluster.scratch": "is a folder that ranks fill", "cluster.environment_archive": "is the Python of ranks",
}  # fmt: skip


class NamedCode(NamedTuple):
    """Value of a configuration that has code run, or that reads the user's environment.

    Attributes:
        key: Key of the value.
        value: The value.
        effect: Effect of the value, such as `names code to be imported and run`.
        module: Module that is imported; "" if no module is named.
    """

    key: str
    value: str
    effect: str
    module: str = ""


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
    def from_config(cls, content: Any, everything: bool = False) -> Trust:
        """Returns trust in the names of the user's configuration.

        Args:
            content: Mappings and lists, or a text such as an override.
            everything: Whether to allow any code.
        """
        import_paths = (
            config_text
            for _, config_text in _list_texts(content, "")
            if _IMPORT_PATH.fullmatch(config_text) or _DOTTED.fullmatch(config_text)
        )
        switch_names = (_find_switch_name(key) for key, _ in _list_switches(content, ""))
        return cls(everything, frozenset((*import_paths, *switch_names)))

    @classmethod
    def from_overrides(cls, override_words: Sequence[str], everything: bool = False) -> Trust:
        """Returns trust in the names of the user's overrides (`key=value`)."""
        override_values: list[Any] = []
        for override in override_words:
            override_value = override.partition("=")[2]
            try:
                override_values.append(read_yaml(override_value))
            except Exception:  # not YAML; the code that applies it reports this
                override_values.append(override_value)
        return cls.from_config(override_values, everything)

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
        for key, code_name in _list_texts(content, ""):
            code_match = _IMPORT_PATH.fullmatch(code_name) or (
                key.startswith(_ENGINE_PREFIX) and _DOTTED.fullmatch(code_name)
            )
            if code_match and not _HARMLESS.fullmatch(code_name) and code_name not in self.names:
                self.refuse(origin, key, repr(code_name), _IMPORTED)
            if key.rsplit(".", 1)[-1] == _SECRET_KEY:
                self.refuse(origin, key, repr(code_name), "sends a variable of your environment to a service")
        for key, switch_value in _list_switches(content, ""):
            if _find_switch_name(key) in self.names:
                continue
            self.refuse(origin, key, repr(switch_value), _SWITCHES[_find_switch_name(key)])

    def refuse(self, origin: str, key: str, value: str, reason: str) -> None:
        """Refuses content that is not trusted.

        Raises:
            ConfigError: Always; the message has the key, the value, the reason, and the flag that allows the content.
        """
        raise ConfigError(
            f"{origin}: {key} is {value}, which {reason}; a file that comes with weights may not. If you know where it is "
            f"from, pass {FLAG} (in Python: trust_code=True), or name it in a configuration of your own with --config"
        )


def named_code(nested_config: Any) -> list[NamedCode]:
    """Returns everything in a configuration that has code run, starts programs or reads the user's environment.

    Unlike `Trust.check`, which ignores what only jobs read, this lists all sections.
    """
    code_entries = []
    for key, leaf in _leaves(nested_config, "", skipped_sections=()):
        section_key = key.split("[")[0]
        if _find_switch_name(key) in _SWITCHES and leaf:
            code_entries.append(NamedCode(key, str(leaf), _SWITCHES[_find_switch_name(key)]))
        if section_key in _JOB_TEXTS and leaf:
            code_entries.append(NamedCode(key, str(leaf), _JOB_TEXTS[section_key]))
        if not isinstance(leaf, str):
            continue
        if _IMPORT_PATH.fullmatch(leaf) and not _HARMLESS.fullmatch(leaf):
            code_entries.append(NamedCode(key, leaf, _IMPORTED, leaf.partition(":")[0]))
        elif key.startswith(_ENGINE_PREFIX) and _DOTTED.fullmatch(leaf):
            code_entries.append(NamedCode(key, leaf, _IMPORTED, leaf.rpartition(".")[0]))
        if key.rsplit(".", 1)[-1] == _SECRET_KEY:
            code_entries.append(NamedCode(key, leaf, "sends a variable of your environment to a service"))
        elif "${" in _REFERENCE.sub("", leaf):
            code_entries.append(NamedCode(key, leaf, "reads a variable of your environment"))
    return code_entries


def without_variables(nested_config: Any, code_trust: Trust, origin: str, key: str = "") -> Any:
    """Returns content from a file of another user, with `${oc.env:NAME}` and other resolvers as plain text.

    Args:
        nested_config: Unresolved mappings and lists.
        code_trust: Refuses a resolver outside the sections that only training and jobs read, because a policy, an
            environment or a reward would get the value.
        origin: Source of the content, such as a file name, for messages.
        key: Key of `nested_config`, for messages.

    Raises:
        ConfigError: The content has such a resolver; the message has the key and the flag that allows it.
    """
    if isinstance(nested_config, dict):
        return {
            n: without_variables(v, code_trust, origin, f"{key}.{n}" if key else str(n))
            for n, v in nested_config.items()
        }
    if isinstance(nested_config, list):
        return [
            without_variables(child, code_trust, origin, f"{key}[{index}]") for index, child in enumerate(nested_config)
        ]
    if not isinstance(nested_config, str) or "${" not in _REFERENCE.sub("", nested_config):
        return nested_config
    if key.split(".")[0] not in _JOB_SECTIONS:
        code_trust.refuse(origin, key, repr(nested_config), "reads a variable of your environment")
    return nested_config.replace("${", "$ {")


def _leaves(nested_config: Any, key: str, skipped_sections: Sequence[str] = _JOB_SECTIONS) -> Iterator[tuple[str, Any]]:
    if isinstance(nested_config, dict):
        for name, child in nested_config.items():
            if key or name not in skipped_sections:
                if isinstance(name, str) and ":" in name:  # import path of a wrapper, used as the key of its settings
                    yield key, name
                yield from _leaves(child, f"{key}.{name}" if key else str(name), skipped_sections)
    elif isinstance(nested_config, (list, tuple)):
        for index, child in enumerate(nested_config):
            yield from _leaves(child, f"{key}[{index}]", skipped_sections)
    else:
        yield key, nested_config


def _list_texts(nested_config: Any, key: str) -> Iterator[tuple[str, str]]:
    return ((path, leaf) for path, leaf in _leaves(nested_config, key) if isinstance(leaf, str))


def _list_switches(nested_config: Any, key: str) -> Iterator[tuple[str, Any]]:
    return ((path, leaf) for path, leaf in _leaves(nested_config, key) if _find_switch_name(path) in _SWITCHES and leaf)


def _find_switch_name(key: str) -> str:
    """Returns the name in `_SWITCHES` for a key; list indices in the key are ignored."""
    section_key = ".".join(key.split("[")[0].split(".")[:2])
    return section_key if section_key in _SWITCHES else key.rsplit(".", 1)[-1]
