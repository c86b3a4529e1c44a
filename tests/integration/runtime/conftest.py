"""Fixtures of the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tests.launching import end_session, launch, meet

__all__ = ["end_session", "launch", "meet"]
