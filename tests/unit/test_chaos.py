"""The events of `make chaos-scale`, and what it remembers of them."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.chaos import WEIGHTS, State, drawn_events


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
