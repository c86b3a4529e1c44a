"""Conditions of configuration keys that all task types share, and the search for unused keys."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.algorithms.registry import ADVANTAGES, DISCOUNTED
from rlhpc.config.alerts import has_hook
from rlhpc.config.conditional_keys import Condition, UnusedKey, defaults_of, find_unused_keys, is_none_of, user_sources
from rlhpc.config.files import ConfigSource, read_files
from rlhpc.config.load import read_layers
from rlhpc.config.schema import Schema
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import select, typed
from rlhpc.runs.task_type import task_type_keys, task_type_of

#: Predicate of a configuration.
Rule = Callable[[Any], bool]
#: Condition of the policy loss's keys.
CLIPPED = Condition(
    ("algorithm.clip_ratio_low", "algorithm.clip_ratio_c"), is_none_of("algorithm.loss_type", "cispo"),
    "by algorithm.loss_type ppo, gspo, decoupled_ppo",
)  # fmt: skip
#: Conditions of keys that every run has.
COMMON = (
    Condition(("runner.max_epochs",), lambda cfg: cfg.runner.max_steps == -1, "where runner.max_steps is -1"),
    Condition(
        ("runner.trace.profile.ranks", "runner.trace.profile.steps"), lambda cfg: bool(cfg.runner.trace.profile.groups),
        "with runner.trace.profile.groups",
    ),
    Condition(
        ("runner.trace.profile.nsys_steps", "runner.trace.profile.nsys_options"),
        lambda cfg: bool(cfg.runner.trace.profile.nsys), "with runner.trace.profile.nsys",
    ),
    Condition(
        tuple(f"runner.alerts.{name}" for name in ("timeout_s", "stall_factor", "stall_floor_s")),
        lambda cfg: has_hook(cfg.runner.alerts),
        "with a hook: runner.alerts.command or runner.alerts.webhook",
    ),
)  # fmt: skip


def estimator_conditions(applies: Rule = lambda cfg: True) -> tuple[Condition, ...]:
    """Returns the conditions of the advantage estimator's keys.

    Args:
        applies: Predicate that is true for a run whose advantages depend on `algorithm.adv_type` only.
    """

    def read_by(*keys_read: str) -> Rule:
        other_estimators = [name for name in ADVANTAGES.built_in if name not in keys_read]
        return lambda cfg: not applies(cfg) or cfg.algorithm.adv_type not in other_estimators

    return (
        Condition(("algorithm.gamma",), read_by(*DISCOUNTED), f"by algorithm.adv_type {', '.join(DISCOUNTED)}"),
        Condition(("algorithm.gae_lambda",), read_by("gae"), "by algorithm.adv_type=gae"),
    )


def trainer_conditions(section: str) -> tuple[Condition, ...]:
    """Returns the conditions of the keys of a trainer's section.

    Args:
        section: `actor` or `critic`.
    """
    backend = f"{section}.training_backend"
    return (
        Condition((f"{section}.fsdp.*",), is_none_of(backend, "local", "deepspeed"), f"by {backend}=fsdp"),
        Condition((f"{section}.deepspeed.*",), is_none_of(backend, "local", "fsdp"), f"by {backend}=deepspeed"),
        Condition(
            (f"{section}.lora.alpha", f"{section}.lora.target_modules"),
            lambda cfg: select(cfg, f"{section}.lora.rank") > 0, f"with adapters: {section}.lora.rank of 1 or more",
        ),
    )  # fmt: skip


def find_unused(config: ConfigSource, overrides: Sequence[str], *, site: str | None = None) -> list[UnusedKey]:
    """Returns the keys that a user has set and that have no effect in this configuration. Takes the arguments of
    `load_config`.

    Raises:
        ConfigError: The configuration cannot be read; see `load_config`.
    """
    layers = read_layers(config, overrides, task_type_keys, site=site)
    cfg = typed(RunConfig, layers.cfg)
    task_type, (source_name, file_content) = task_type_of(cfg), read_files(config)[-1]
    return find_unused_keys(
        cfg,
        user_sources(layers, source_name, file_content),
        task_type.checks.conditions,
        _find_defaults(task_type.schema),
    )


@functools.cache
def _find_defaults(schema: Schema) -> Mapping[str, Any]:
    return defaults_of(schema.root, schema.keys)


def warn_of_unused(config: ConfigSource, overrides: Sequence[str], *, site: str | None = None) -> None:
    """Prints the unused keys to stderr, one per line. Takes the arguments of `find_unused`."""
    for key in find_unused(config, overrides, site=site):
        print(f"rlhpc: no effect: {key}", file=sys.stderr)
