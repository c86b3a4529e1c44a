"""The sandboxes that agents' tests run in."""

from __future__ import annotations

import shutil

import pytest

SANDBOXES = [
    "unshare",
    pytest.param(
        "bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bwrap: install bubblewrap")
    ),
]
