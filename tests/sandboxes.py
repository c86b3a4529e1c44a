"""The sandboxes that agents' tests run in."""

from __future__ import annotations

import pytest

from tests.extras import needs_programs

SANDBOXES = ["unshare", pytest.param("bubblewrap", marks=needs_programs("bwrap"))]
