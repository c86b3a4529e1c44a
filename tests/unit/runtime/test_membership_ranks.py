"""What is known of ranks, and waited for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from rlhpc.runtime.launchers import Member
from rlhpc.runtime.membership import RankTable


def test_who_is_starting_is_waited_for_before_anything_is_decided() -> None:
    """A rank that starts again, or joins, while another fails: it is ready, or has ended, by the time it counts."""
    launcher: Any = SimpleNamespace(limit_s=0.0)
    specs: list[Any] = [SimpleNamespace(name=f"many-{rank}", group="many") for rank in range(3)]
    here, starting, ending = members = [Member(spec, launcher) for spec in specs]
    ranks = RankTable(lambda ended: None)
    ranks.add(members)
    ranks.arrived(here, 1, {})
    ranks.settle()
    assert starting.state == ending.state == "starting"
    timers = [
        threading.Timer(0.1, ranks.arrived, [starting, 1, {}]),
        threading.Timer(0.2, ranks.processes_ended, [[ending]]),
    ]
    for timer in timers:
        timer.start()
    ranks.settle(30.0)
    assert [member.state for member in members] == ["ready", "ready", "ended"]
