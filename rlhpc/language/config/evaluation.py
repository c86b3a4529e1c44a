"""Configuration of engines for runs on demonstrations."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhpc.config.typed import plain, typed, untouched
from rlhpc.language.config.run import GrpoConfig, SftConfig

#: Sections that determine generation and weight sync.
_SECTIONS = ("cluster", "runner", "workflow", "actor", "rollout", "agent", "data", "reward")


def answering_config(cfg: SftConfig) -> GrpoConfig:
    """Returns a GRPO configuration with the sections of a supervised run, for the run's engines.

    Keys that the supervised run lacks have their defaults.
    """
    defaults = untouched(GrpoConfig)
    content = {name: section for name, section in plain(cfg).items() if name in _SECTIONS}
    return typed(GrpoConfig, OmegaConf.merge(defaults, _select_known_keys(content, defaults)))


def _select_known_keys(content: dict[str, Any], schema: DictConfig) -> dict[str, Any]:
    """Returns the keys of `content` that exist in a schema, section by section; a free mapping accepts all keys."""
    known_content: dict[str, Any] = {}
    for name, value in content.items():
        if name not in schema:
            continue
        section = schema._get_node(name)
        is_section = isinstance(value, dict) and OmegaConf.get_type(section) is not dict
        known_content[name] = (
            _select_known_keys(value, section) if is_section and isinstance(section, DictConfig) else value
        )
    return known_content
