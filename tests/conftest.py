from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests import warm


@pytest.fixture(scope="session", autouse=True)
def warm_fork_servers() -> Iterator[None]:
    """The fork servers of sessions in this process are started warm: importing torch is not what their tests are about."""
    from rlhpc.runtime.starters import forked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "subprocess", warm)
        yield
