"""Authentication of gloo's connections: ports of process groups, and strangers who connect to them."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from rlhpc.runtime.errors import StrangerConnected, WorkerFailed
from rlhpc.runtime.os_resources import open_files_of_rank
from tests.eventually import wait_until
from tests.launching import Launch
from tests.strangers import Stranger

AS_ANOTHER = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


def said_in(*paths: Path) -> list[str]:
    """The words of files, once they are there."""
    wait_until(lambda: all(path.exists() for path in paths), 30)
    return [word for path in paths for word in path.read_text().split()]


def test_no_port_of_a_process_group_stays_open(meet: Launch) -> None:
    group = meet(4, "closed")
    assert group.form().wait() == [[6.0, 1.0], [6.0, 1.0], [6.0, 5.0], [6.0, 5.0]]
    assert group.doors().wait() == [[]] * 4
    assert max(group.idle_cpu().wait()) < 0.5, "gloo's thread must not spin over what took its socket's place"
    group.leave_group().wait()


def test_a_group_of_one_rank_leaves_no_port_open_either(meet: Launch) -> None:
    """In an interpreter of its own, which imports torch only after it has begun to be a rank."""
    group = meet(1, "alone", fork=False)
    assert group.alone().wait() == [3.0]
    assert group.doors().wait() == [[]]
    group.leave_group().wait()


@AS_ANOTHER
def test_a_stranger_who_takes_a_ranks_place_ends_the_start_and_gets_nothing(meet: Launch, tmp_path: Path) -> None:
    """The ranks are held between listening and connecting, so the stranger is first for certain."""
    go = tmp_path / "go"
    group = meet(2, "joined")
    with Stranger(1.0, 8, *(struct.pack("<q", number) for number in (0, 1))) as stranger:
        forming = group.form_late(str(go), 3.0)
        stranger.look(said_in(Path(f"{go}-0"), Path(f"{go}-1")))
        assert stranger.count() >= 2
        go.touch()
        with pytest.raises(WorkerFailed, match=r"did not prove to be of this run.*stranger.*start again") as raised:
            forming.wait()
    assert isinstance(raised.value.__cause__, StrangerConnected)
    assert re.search(r"joined-[01] on ", str(raised.value))
    assert "Traceback" not in str(raised.value)


@AS_ANOTHER
def test_strangers_who_say_nothing_or_nonsense_do_not_stop_a_start(meet: Launch, tmp_path: Path) -> None:
    go = tmp_path / "go"
    group = meet(2, "crowded")
    with Stranger(10.0, 200, b"", struct.pack("<q", 99)) as stranger:
        forming = group.form_late(str(go), 20.0)
        stranger.look(said_in(Path(f"{go}-0"), Path(f"{go}-1")))
        assert stranger.count() >= 100
        go.touch()
        assert forming.wait() == [1.0, 1.0]


#: Requests of a rank for each group that it is in.
REQUESTS = 6


@pytest.mark.parametrize(
    "size", [8, 32, pytest.param(64, marks=pytest.mark.long), pytest.param(128, marks=pytest.mark.long)]
)
def test_a_rank_makes_as_many_requests_in_a_large_group_as_in_a_small_one(meet: Launch, size: int) -> None:
    group = meet(size, f"of{size}")
    group.execute_on(0).count_requests().wait()
    most_open = max(group.form_own().wait())
    assert group.execute_on(0).counted_requests().wait() == [REQUESTS * size]
    assert most_open <= open_files_of_rank(size)
    tensor = 4
    sums = group.form_mesh(tensor).wait()
    assert sums[5] == [sum(range(1, size, tensor)), 4 + 5 + 6 + 7]
    assert group.execute_on(0).counted_requests().wait() == [2 * REQUESTS * size]
    group.leave_group().wait()


def test_a_rank_that_connects_late_is_no_stranger(meet: Launch) -> None:
    """The others have their connections to it long before, because the kernel accepts them."""
    group = meet(3, "tardy")
    assert group.form_slowly(2, 3.0, 1.0).wait() == [3.0] * 3
    group.leave_group().wait()
