"""Configuration: YAML into typed dataclasses, checked before anything is started or written."""

from rlhpc.config.changes import (
    Change,
    evaluation_fingerprint,
    require_same_run,
    training_changes,
    training_fingerprint,
)
from rlhpc.config.files import find_config
from rlhpc.config.load import (
    config_to_yaml,
    segment_end,
    segment_ends,
    total_steps,
)
from rlhpc.config.sites import find_site, load_site

__all__ = [
    "Change",
    "config_to_yaml",
    "evaluation_fingerprint",
    "find_config",
    "find_site",
    "load_site",
    "require_same_run",
    "segment_end",
    "segment_ends",
    "total_steps",
    "training_changes",
    "training_fingerprint",
]
