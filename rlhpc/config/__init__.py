"""Configuration: YAML files as typed dataclasses, checked before a run starts."""

from rlhpc.config.files import find_config
from rlhpc.config.load import config_to_yaml, segment_end, segment_ends, total_steps
from rlhpc.config.sites import find_site, load_site

__all__ = [
    "config_to_yaml",
    "find_config",
    "find_site",
    "load_site",
    "segment_end",
    "segment_ends",
    "total_steps",
]
