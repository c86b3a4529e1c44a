"""Names of engines and backends stand in their registries alone: a message lists what is there, and what others offer."""

from __future__ import annotations

import pytest

from rlhpc.config.constraints import check_choice
from rlhpc.language.engines.registry import ENGINES
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry
from rlhpc.training.registry import BACKENDS


def test_what_comes_with_the_package_is_first() -> None:
    assert ENGINES.choices() == ["hf", "vllm", "module:Class"]
    assert BACKENDS.choices() == ["local", "fsdp", "deepspeed", "module:Class"]


def test_a_registered_name_is_allowed_and_listed() -> None:
    engines: Registry = Registry("engine", "rollout.rollout_backend", "rlhpc.none_of_these", {"zeta": "a:B"})
    engines.register("alpha")(type("Alpha", (), {}))

    def fail(key: str, rule: str) -> ConfigError:
        return ConfigError(f"{key}: {rule}")

    check_choice("rollout.rollout_backend", "Alpha", engines.choices(), fail)
    with pytest.raises(ConfigError, match=r"did you mean 'alpha'\? allowed: zeta, alpha, module:Class"):
        check_choice("rollout.rollout_backend", "alfa", engines.choices(), fail)
