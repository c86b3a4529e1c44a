"""Which code this is: ranks of one run must have the same."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def fingerprint() -> str:
    """A digest of the package's sources, the same wherever they are."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.blake2b(digest_size=12)
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return found.hexdigest()
