"""Times of a start, by worker group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc.jobs.start_times import format_ranks, open_phases, phase_times, read_start_marks
from rlhpc.runtime.start_phases import WAITING, RankPhases


def rank(number: int, *phases: tuple[str, float], group: str = "rollout") -> RankPhases:
    return RankPhases(group, number, phases)


def test_ranks_are_grouped_by_the_phase_that_they_are_in() -> None:
    ranks = [
        rank(0, ("imports", 1.0), ("profile", 5.0)),
        rank(1, ("imports", 1.0)),
        rank(2, ("imports", 2.0), ("profile", 9.0)),
        rank(0, ("imports", 0.0), (WAITING, 1.0), group="actor"),
        rank(3),
    ]
    profile, imports, waiting = open_phases(ranks)
    assert (profile.group, profile.phase, profile.ranks, profile.start_time) == ("rollout", "profile", (0, 2), 5.0)
    assert profile.ended_phases == {"imports": 7.0}, "the longest"
    assert (imports.phase, imports.ranks, imports.ended_phases) == ("imports", (1,), {})
    assert (waiting.group, waiting.phase) == ("actor", WAITING)
    [actor, rollout] = phase_times([ranks[3], *ranks[:3]])
    assert (actor.group, actor.longest_s, actor.num_ranks) == ("actor", 1.0, 1)
    assert (rollout.longest_s, rollout.slowest_rank, rollout.shortest_s, rollout.num_ranks) == (7.0, 2, 4.0, 2)


def test_stages_are_there_once_the_first_step_is_done(tmp_path: Path) -> None:
    assert read_start_marks(tmp_path) == {}
    (tmp_path / "timeline.json").write_text(json.dumps({"driver": 1.0, "first_step": 3, "ready": "soon"}))
    assert read_start_marks(tmp_path) == {"driver": 1.0, "first_step": 3.0}


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1], "0–1"), ([0, 1, 2, 5, 7, 8], "0–2, 5, 7–8"), ([1, 3], "1, 3")]
)
def test_ranks_are_given_as_ranges(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
