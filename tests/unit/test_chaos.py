"""The events of `make chaos-scale`, and what it remembers of them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from tests.slurm import chaos
from tests.slurm.chaos import WEIGHTS, Event, State, drawn_events


def test_an_interrupted_part_goes_on_with_its_next_event(tmp_path: Path) -> None:
    file = tmp_path / "states" / "seed-7.json"
    state = State.load(file)
    assert state.outcomes == []
    state.add("cut: went on")
    state.add("worker: went on")
    assert State.load(file).outcomes == ["cut: went on", "worker: went on"]


def test_the_events_of_a_seed_are_the_same_in_each_part() -> None:
    events = drawn_events(7, 100)
    assert events == drawn_events(7, 100) and events[:10] == drawn_events(7, 10) and events != drawn_events(8, 100)
    assert {event.kind for event in events} == set(WEIGHTS)
    cuts = [event for event in events if event.kind == "cut"]
    assert {event.seconds for event in cuts} == {10.0, 120.0} and len({frozenset(event.hosts) for event in cuts}) == 6


class Disturber:
    """Stands in for the one that disturbs a run: notes the events, and fails when it is told to."""

    events: list[Event]
    fails_at: str

    def __init__(self, run: object) -> None:
        self.commits = MagicMock()

    def disturb(self, event: Event) -> str:
        self.events.append(event)
        if self.fails_at == event.seed:
            raise RuntimeError("no such process")
        return "went on"

    def finish(self) -> str:
        assert self.fails_at != "the end", "every step's row is there once"
        return "9 steps"


@pytest.mark.parametrize("fails_at", ["7 4", "the end"])
def test_a_part_that_failed_goes_on_with_the_event_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails_at: str
) -> None:
    """Events have the same choices then. What must hold at the end of a run belongs to its last event."""
    for name in ("SlurmCluster", "ChaosRun"):
        monkeypatch.setattr(chaos, name, MagicMock())
    monkeypatch.setattr(chaos, "Disturber", Disturber)
    arguments = ["--seed=7", "--part=1/2", "--events=6", f"--state={tmp_path}"]
    Disturber.events, Disturber.fails_at = [], fails_at
    if fails_at == "the end":
        assert chaos.main(arguments) == 1
    else:
        with pytest.raises(RuntimeError, match="no such process"):
            chaos.main(arguments)
    output = capsys.readouterr().out
    assert "seed 7, part 1/2: 3 of 3 events remain" in output
    assert "seed 7, part 1/2, event 3: " in output and "SEED=7 PART=1/2 EVENTS=6 RANKS=64" in output
    assert [event.seed for event in Disturber.events] == ["7 0", "7 2", "7 4"]
    Disturber.events, Disturber.fails_at = [], ""
    assert chaos.main(arguments) == 0 and [event.seed for event in Disturber.events] == ["7 4"]
    assert chaos.main(arguments) == 0 and len(Disturber.events) == 1
    assert chaos.main([*arguments, "--ranks=8"]) == 0 and len(Disturber.events) == 4, "another run"
