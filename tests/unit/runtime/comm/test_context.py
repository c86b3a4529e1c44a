"""Who asks where a process belongs begins nothing; the doors to a run do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm.context import current, install, installed_context
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.session import Session


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as one that belongs to no run."""
    before = installed_context()
    install(None)
    yield
    install(before)


def test_a_process_without_a_run_is_told_so(alone: None) -> None:
    running = Session.running()
    with pytest.raises(RlhpcError, match="belongs to no run yet: launch a group or create a channel first"):
        current()
    assert installed_context() is None
    assert Session.running() is running


def test_creating_a_channel_begins_a_run(alone: None) -> None:
    if (earlier := Session.running()) is not None:
        earlier.stop()
    channel = Channel.create("first")
    try:
        channel.put(1)
        assert current().name == "driver"
        assert Channel.connect("first").get() == 1
    finally:
        Session.current().stop()
    assert installed_context() is None
