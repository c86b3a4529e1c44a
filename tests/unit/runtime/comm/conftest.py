"""What tests of messages and shared memory have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhpc.runtime.scratch import Scratch


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    made = Scratch.create()
    yield made
    made.remove()
