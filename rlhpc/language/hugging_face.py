"""The package that language models come from, which not every installation has."""

from __future__ import annotations

from typing import Any

from rlhpc.runtime.lookup import required


def transformers() -> Any:
    """The transformers package.

    Raises:
        ConfigError: It is not installed.
    """
    return required("transformers", "language models need transformers")
