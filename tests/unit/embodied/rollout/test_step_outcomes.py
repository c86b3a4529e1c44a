"""Rollout outcomes and next values, against a plain loop over slots and steps."""

from __future__ import annotations

import numpy as np

from rlhpc.embodied.rollout.step_outcomes import (
    EpisodeLog,
    Outcomes,
    autonomous_episodes,
    episode_metrics,
    merge_reports,
    next_values,
)


def play(rng, size, steps):
    """Random outcomes of a vector environment with one-number observations."""
    rows = []
    for _ in range(steps):
        terminations, truncations = rng.random(size) < 0.2, rng.random(size) < 0.1
        infos = {
            "final_obs": rng.normal(size=(size, 1)).astype(np.float32),
            "episode": {
                "return": rng.normal(size=size),
                "length": rng.integers(1, 9, size),
                "mask": terminations | truncations,
            },
        }
        rows.append((rng.normal(size=size).astype(np.float32), terminations, truncations, infos))
    return rows


def test_parts_and_next_values_match_a_loop():
    rng = np.random.default_rng(0)
    size, steps, share = 6, 9, range(12, 18)
    rows = play(rng, size, steps)
    outcomes = Outcomes(share, steps)
    for t, row in enumerate(rows):
        outcomes.add(t, *row)
    values = rng.normal(size=(size, steps)).astype(np.float32)
    last_obs = rng.normal(size=(size, 1)).astype(np.float32)
    for part in (slice(0, 6), slice(0, 2), slice(2, 6), slice(5, 6)):
        message = outcomes.part(part, last_obs[part])
        found = next_values(
            values[part],
            2 * message.last_obs[:, 0],
            message.final_slot,
            message.final_step,
            2 * message.final_obs[:, 0],
        )
        for row, slot in enumerate(range(part.start, part.stop)):
            for t in range(steps):
                rewards, terminations, truncations, infos = rows[t]
                assert message.rewards[row, t] == rewards[slot]
                assert message.terminations[row, t] == terminations[slot]
                assert message.truncations[row, t] == truncations[slot]
                if terminations[slot] or truncations[slot]:
                    expected = 2 * infos["final_obs"][slot, 0]
                elif t + 1 < steps:
                    expected = values[slot, t + 1]
                else:
                    expected = 2 * last_obs[slot, 0]
                assert found[row, t] == expected


def test_a_rollout_without_ends_has_empty_finals():
    outcomes = Outcomes(range(2), 1)
    assert outcomes.add(0, np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {}) is None
    message = outcomes.part(slice(0, 2), np.zeros((2, 3), np.float32))
    assert message.final_obs.shape == (0, 3) and message.final_slot.size == 0


def test_episodes_are_in_the_same_order_whatever_the_partition():
    rng = np.random.default_rng(1)
    rows = play(rng, 4, 7)

    def logged(shares):
        parts = []
        for share in shares:
            log = EpisodeLog()
            for t, (_, terminations, truncations, infos) in enumerate(rows):
                cut = {"episode": {k: v[share.start : share.stop] for k, v in infos["episode"].items()}}
                ended = np.flatnonzero((terminations | truncations)[share.start : share.stop])
                if ended.size:
                    log.add(t, share.start, cut, ended)
            parts.append(log.arrays())
        return merge_reports(parts)

    whole, split = logged([range(4)]), logged([range(2, 4), range(1), range(1, 2)])
    assert len(whole["return"]) > 3
    for name in whole:
        np.testing.assert_array_equal(whole[name], split[name])


def test_success_and_return_are_of_episodes_without_help() -> None:
    log = EpisodeLog()
    ended = {"mask": np.ones(3, bool), "return": np.array([1.0, 5.0, 3.0]), "length": np.array([4, 4, 4])}
    episode = {**ended, "success": np.array([0.0, 1.0, 1.0]), "helped": np.array([False, True, False])}
    infos = {"episode": episode, "intervened": np.array([[True, False], [True, True], [False, False]])}
    infos["chunk"] = {"mask": np.array([[True, True], [True, True], [True, False]])}
    log.count_actions(infos)
    log.add(0, 0, infos, np.arange(3))
    report = log.report()
    metrics = episode_metrics(report)
    assert metrics["rollout/episodes"] == 3 and metrics["rollout/helped_episodes"] == 1
    assert metrics["rollout/success_once"] == 0.5 and metrics["rollout/episode_return"] == 2.0
    assert metrics["rollout/intervention_rate"] == 3 / 5
    assert autonomous_episodes(report) == [(1.0, 4.0, 0.0), (3.0, 4.0, 1.0)]
    alone = EpisodeLog()
    alone.add(0, 0, {"episode": ended}, np.arange(3))
    assert not {"rollout/intervention_rate", "rollout/helped_episodes"} & episode_metrics(alone.report()).keys()
