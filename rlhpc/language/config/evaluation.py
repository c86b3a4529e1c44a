"""Evaluation."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhpc.config.typed import plain, typed, untouched
from rlhpc.language.config.run import GrpoConfig, SftConfig

#: Sections that say how a model answers, and how its weights travel.
_SECTIONS = ("cluster", "runner", "workflow", "actor", "rollout", "agent", "data", "reward")


def answering_config(cfg: SftConfig) -> GrpoConfig:
    """Returns a configuration of reinforcement learning with the sections of a supervised run, by which its engines answer;
    keys that only the former has are at their defaults."""
    defaults = untouched(GrpoConfig)
    content = {name: section for name, section in plain(cfg).items() if name in _SECTIONS}
    return typed(GrpoConfig, OmegaConf.merge(defaults, _select_known_keys(content, defaults)))


def _select_known_keys(content: dict[str, Any], schema: DictConfig) -> dict[str, Any]:
    """Returns the keys that a schema has, section by section; a free mapping has any."""
    selected: dict[str, Any] = {}
    for name, value in content.items():
        if name not in schema:
            continue
        section = schema._get_node(name)
        is_section = isinstance(value, dict) and OmegaConf.get_type(section) is not dict
        selected[name] = _select_known_keys(value, section) if is_section and isinstance(section, DictConfig) else value
    return selected
