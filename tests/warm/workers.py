"""pytest-xdist's processes, forked from one that has imported what most tests need: a plugin of pytest.

Each would import it all anew, and so would the server of warm processes that each has. This takes place where everything is
tested; for a part, starting what that needs takes less.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests import warm
from tests.warm import starting


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Where the tests are dealt out. execnet starts the processes by what it takes for `subprocess`."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and starting.preload_everything():
        from execnet.gateway_base import ThreadExecModel

        ThreadExecModel.subprocess = property(lambda self: warm)


def pytest_configure(config: pytest.Config) -> None:
    """Where they run: the server that was forked with this process is for those that ask for it."""
    if hasattr(config, "workerinput"):
        starting.only_where_asked()
