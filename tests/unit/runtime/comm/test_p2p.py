"""Messages between two ranks: order, background sends, broadcasts, posts, and ranks that have left."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhpc.runtime.comm import p2p
from rlhpc.runtime.comm.context import Context, install
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.registry import DEPARTED
from rlhpc.runtime.scratch import Scratch
from tests.unit.runtime.comm.rank_pairs import rank_pair


@pytest.fixture
def pair(tmp_path: Path, scratch: Scratch) -> Iterator[tuple[Context, Context]]:
    with rank_pair(tmp_path, scratch) as contexts:
        yield contexts


def test_messages_arrive_in_order_whatever_their_size(pair: tuple[Context, Context]) -> None:
    large = np.arange(300_000)
    p2p.send("first", "left", 0, "right", 0)
    p2p.send(large, "left", 0, "right", 0)
    p2p.send("of another tag", "left", 0, "right", 0, tag="t")
    install(pair[1])
    assert p2p.recv("left", 0) == "first"
    np.testing.assert_array_equal(p2p.recv("left", 0), large)
    assert p2p.recv("left", 0, tag="t") == "of another tag"


def test_a_background_send_copies_its_object(pair: tuple[Context, Context]) -> None:
    array = np.zeros(10)
    work = p2p.send(array, "left", 0, "right", 0, async_op=True)
    array[:] = 1
    assert work is not None
    work.wait(20)
    install(pair[1])
    assert p2p.recv("left", 0).sum() == 0


def test_a_rank_sends_to_itself(pair: tuple[Context, Context]) -> None:
    p2p.send({"a": 1}, "left", 0, "left", 0)
    assert p2p.recv("left", 0) == {"a": 1}


def test_a_broadcast_reaches_all_receivers(pair: tuple[Context, Context]) -> None:
    groups = [("left", [0]), ("right", [0])]
    assert p2p.broadcast("news", "left", 0, groups, ("left", 0)) == "news"
    install(pair[1])
    assert p2p.broadcast(None, "right", 0, groups, ("left", 0)) == "news"


def test_a_broadcast_can_be_followed_with_a_check(pair: tuple[Context, Context]) -> None:
    p2p.begin_broadcast([1], "left", 0, [("right", [0])])()
    install(pair[1])
    checks: list[None] = []
    assert p2p.follow_broadcast(("left", 0), lambda: checks.append(None)) == [1] and checks


def test_posts_are_polled_by_key(pair: tuple[Context, Context]) -> None:
    assert p2p.post("note", "about", "right", 0)
    install(pair[1])
    assert p2p.poll("about") == "note"
    with pytest.raises(queue.Empty):
        p2p.poll("about")
    with pytest.raises(DeadlineExceeded, match="a message from left-0"):
        p2p.await_post("about", 0.05, "left-0")


def test_a_post_to_a_rank_that_has_left_is_no_error(pair: tuple[Context, Context]) -> None:
    left, right = pair
    assert left.rank_record("right", 0)["incarnation"] == "1"
    right.service.stop()
    left.registry.put(DEPARTED, "right-0", {"incarnation": "1", "why": "its job has ended"})
    assert not p2p.post("note", "about", "right", 0)
    with pytest.raises(ChannelError):
        p2p.send("message", "left", 0, "right", 0)


def test_a_cleared_inbox_has_no_message(pair: tuple[Context, Context]) -> None:
    p2p.post(np.zeros(100_000), "about", "right", 0)
    install(pair[1])
    p2p.clear_inbox(pair[1].service)
    with pytest.raises(queue.Empty):
        p2p.poll("about")


@pytest.mark.parametrize("received", [np.zeros(3, np.float32), np.zeros((2, 2), np.float32)])
def test_a_tensor_of_another_shape_is_refused(received: np.ndarray) -> None:
    with pytest.raises(ValueError, match="was sent"):
        p2p.copy_into(torch.zeros(2), torch.from_numpy(received))
