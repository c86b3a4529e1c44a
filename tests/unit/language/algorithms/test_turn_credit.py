"""Credit by turn, by hand: two prompts' groups of episodes whose turns were paid for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section, typed
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.algorithms.policy_gradient import PolicyGradient
from rlhpc.language.config.rewards import RewardTermConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.token_batch import TokenBatch, cumulate
from rlhpc.language.rewards.pool import Scored

#: Of each episode of a group: its turns, as what each had just read and what it was paid.
PLAYED = [[(7, 0.0), (8, 1.0)], [(7, 0.5), (9, 0.0), (8, 0.0)], [(7, 0.0), (9, 2.0)], [(7, 0.0)]]


def algorithm(**options: Any) -> PolicyGradient:
    cfg = default_section(GrpoConfig)
    for key, value in {"credit": "turn", "adv_type": "rloo", **options}.items():
        OmegaConf.update(cfg, f"algorithm.{key}", value)
    cfg = typed(GrpoConfig, cfg)
    cfg.agent.kind = "environment"
    cfg.reward.terms = [RewardTermConfig("agent", 2.0), RewardTermConfig("length")]
    return PolicyGradient(cfg)


def batch(besides: float = 0.0) -> TokenBatch:
    """Two groups alike. A turn is a token that it reads and two that it draws; the agent's word weighs 2. Of the second
    episode the last turn is a sample of its own, that stands first."""
    ids, mask, turn, paid, lengths, episode = [], [], [], [], [], []
    for number, turns in enumerate(PLAYED * 2):
        samples = [range(len(turns))] if number % 4 != 1 else [[2], [0, 1]]
        for sample in samples:
            for at in sample:
                ids += [turns[at][0], 3, 4]
                mask += [False, True, True]
                turn += [at] * 3
                paid += [0.0, 0.0, 2 * turns[at][1]]
            lengths.append(3 * len(sample))
            episode.append(number)
    worth = torch.tensor([2 * sum(reward for _, reward in turns) + besides for turns in PLAYED * 2])
    numbers = torch.tensor(episode)
    return TokenBatch(
        cumulate(lengths), torch.tensor(ids), torch.tensor(mask), torch.tensor(turn), numbers, torch.zeros_like(numbers),
        numbers // 4, worth[numbers], {"turn_rewards": torch.tensor(paid)},
    )  # fmt: skip


def of_turns(batch: TokenBatch, advantages: torch.Tensor) -> list[list[float]]:
    """By episode of the first group and turn; all tokens of a turn have the same."""
    owner = torch.repeat_interleave(batch.episode, batch.lengths)
    found = []
    for number in range(4):
        own = []
        for turn in range(len(PLAYED[number])):
            values = advantages[(owner == number) & (batch.turn == turn) & batch.mask]
            assert len(values) == 2 and values[0] == values[1]
            own.append(values[0].item())
        found.append(own)
    assert torch.equal(advantages[owner < 4].sort()[0], advantages[owner >= 4].sort()[0]), (
        "groups know nothing of each other"
    )
    assert not advantages[~batch.mask].any()
    return found


def rloo(values: list[float]) -> list[float]:
    whole, count = sum(values), len(values)
    return [value - (whole - value) / (count - 1) if count > 1 else 0.0 for value in values]


def test_turns_are_compared_by_their_number() -> None:
    given = batch()
    found = of_turns(given, algorithm(turn_gamma=0.5).advantages(given, None))
    first = rloo([0.0 + 0.5 * 2, 1.0, 0.5 * 4, 0.0])
    second = rloo([2.0, 0.0, 4.0])
    expected = [[first[0], second[0]], [first[1], second[1], 0.0], [first[2], second[2]], [first[3]]]
    assert found == [pytest.approx(turns) for turns in expected]


def test_turns_that_had_read_the_same_are_compared_besides_episodes() -> None:
    given = batch()
    found = of_turns(given, algorithm(credit="state", turn_gamma=0.5, turn_coef=0.25).advantages(given, None))
    whole = rloo([2.0, 1.0, 4.0, 0.0])
    after = [[1.0, 2.0], [1.0, 0.0, 0.0], [2.0, 4.0], [0.0]]
    sevens = rloo([turns[0] for turns in after])  # the beginning
    eights, nines = rloo([2.0, 0.0]), rloo([0.0, 4.0])
    states = [[sevens[0], eights[0]], [sevens[1], nines[0], eights[1]], [sevens[2], nines[1]], [sevens[3]]]
    expected = [[whole[at] + 0.25 * value for value in turns] for at, turns in enumerate(states)]
    assert found == [pytest.approx(turns) for turns in expected]


def test_what_an_episode_is_worth_besides_comes_with_its_last_turn() -> None:
    given = batch(besides=3.0)
    rewards = algorithm().rewards(given.by_episode())
    paid = [
        given.by_episode().flat(rewards)[torch.repeat_interleave(given.episode, given.lengths) == n] for n in range(4)
    ]
    assert [values[values != 0].tolist() for values in paid] == [
        [5.0],
        [3.0, 1.0],
        [7.0],
        [3.0],
    ]  # 3 in the sample that is first
    estimated = algorithm(credit="episode", adv_type="raw", gamma=1.0).advantages(given, None)
    owner = torch.repeat_interleave(given.episode, given.lengths)
    first = estimated[(owner == 2) & given.mask]
    assert first.tolist() == [7.0] * 4, "what credits tokens with what follows takes it where it is"
    normalized = algorithm(normalize_advantages="batch").advantages(given, None)[given.mask]
    assert normalized.mean().item() == pytest.approx(0.0, abs=1e-6) and normalized.std().item() == pytest.approx(
        1.0, abs=1e-5
    )


def test_a_rank_hands_over_what_turns_were_worth_in_the_weight_of_the_agents_word() -> None:
    sample = Episode(0, (1,), token_ids=[3, 4, 5], rewards=[0.0, 0.5, -1.0])
    assert algorithm().rollout_columns(sample, Scored(0.0, {}, False)) == {"turn_rewards": [0.0, 1.0, -2.0]}
    assert algorithm().rollout_columns(Episode(0, (1,), token_ids=[3]), Scored(0.0, {}, False)) == {
        "turn_rewards": [0.0]
    }
    inline = PolicyGradient(typed(GrpoConfig, default_section(GrpoConfig)))
    assert "turn_rewards" not in [column.name for column in inline.columns]
