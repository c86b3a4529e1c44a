"""Configuration: YAML into typed dataclasses, checked before anything is started or written."""

from rlhpc.config.load import config_to_yaml, find_site, load_config, load_site, segment_end, segment_ends, total_steps
from rlhpc.config.validate import validate

__all__ = [
    "config_to_yaml",
    "find_site",
    "load_config",
    "load_site",
    "segment_end",
    "segment_ends",
    "total_steps",
    "validate",
]
