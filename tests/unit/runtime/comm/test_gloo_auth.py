"""Authentication of gloo's connections: ports of process groups, and strangers who connect to them."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from rlhpc.runtime.errors import StrangerConnected, WorkerFailed
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
