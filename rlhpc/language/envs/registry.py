"""Registry of environments of language models. Users register a class, or add an entry point of group
`rlhpc.language_environments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.config.options import check_options
from rlhpc.language.envs.base import Environment
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment", "agent.target", "rlhpc.language_environments",
    {
        "search": "rlhpc.language.envs.search:Search",
        "guess": "rlhpc.language.envs.games:Guess",
        "mastermind": "rlhpc.language.envs.games:Mastermind",
        "kuhn_poker": "rlhpc.language.envs.games:KuhnPoker",
        "proposer": "rlhpc.language.envs.games:Proposer",
        "sql": "rlhpc.language.envs.sql:Sql",
        "tools": "rlhpc.language.envs.tools:ProblemTools",
        "micro_swe": "rlhpc.language.envs.micro_swe:MicroSwe",
    },
)  # fmt: skip
register_environment = ENVIRONMENTS.register


def find_environment(name: str, kwargs: Mapping[str, Any], key: str = "agent.target") -> type[Environment]:
    """Returns the environment class of a name, after checking that its constructor takes `kwargs`. `key` is the configuration
    key of the name.

    Raises:
        ConfigError: The name is unknown or not an environment, or the constructor does not take the arguments.
    """
    environment = ENVIRONMENTS.find(name, key)
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        raise ConfigError(f"{key} is {name!r}, which is no subclass of rlhpc.language.envs.base:Environment")
    check_options(environment, kwargs, f"{key.removesuffix('.target')}.kwargs", f"environment {name}")
    return environment
