"""Groups of judged answers: who is trained on and compared, and which groups are refilled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section, typed
from rlhpc.language.agents.episodes import Episode, Outcome
from rlhpc.language.algorithms.base import ADVANTAGES, VALUES
from rlhpc.language.algorithms.registry import make_algorithm
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.rollout.group_builder import GroupBuilder
from rlhpc.language.rollout.pending_group import PendingGroup
from rlhpc.language.rollout.sample_group import SampleGroup

#: Why a member of a group may be left out.
REASONS = ("cut", "failed", "stale")


def configuration(size: int = 4, **changes: Any) -> GrpoConfig:
    cfg = default_section(GrpoConfig)
    given = {
        "algorithm.group_size": size, "algorithm.max_staleness": 1, "rollout.max_new_tokens": 20,
        "reward.terms": [{"name": "math"}], "runner.on_nonfinite": "skip", **changes,
    }  # fmt: skip
    for key, value in given.items():
        OmegaConf.update(cfg, key, value)
    return typed(GrpoConfig, cfg)


def answer(tokens: int, *, left_out: str = "", version: int = 4) -> Episode:
    episode = Episode(
        0, (1, 2), token_ids=[3] * tokens, logprobs=[-0.5 - 0.01 * t for t in range(tokens)],
        versions=[1 if left_out == "stale" else version] * tokens, loss_mask=[True] * tokens, turn_ids=[0] * tokens,
        finish_reason="length" if left_out == "cut" else "stop",
    )  # fmt: skip
    if left_out == "failed":
        episode.outcome = Outcome(error="it broke")
    return episode


def group(
    cfg: GrpoConfig, position: int, answers: list[Episode], rewards: list[float]
) -> tuple[SampleGroup, dict[str, float]]:
    maker = GroupBuilder(cfg, make_algorithm(cfg), 0, "rollout-0")
    slot = PendingGroup(5, position, 0, Prompt(0, ()), (1, 2), dict(enumerate(answers)))
    slot.scores = {member: Scored(reward, {"math": reward}) for member, reward in enumerate(rewards)}
    judged = maker.score_group(slot, may_refill=False)
    assert judged is not None
    return maker.build(slot, judged)


def trained_on(cfg: GrpoConfig, groups: list[SampleGroup]) -> TokenBatch:
    batch = TokenBatch.joined([one.trained_samples() for one in groups])
    batch.columns[VALUES] = batch.ids * 0.1 + batch.columns["rollout_logprobs"]
    batch.columns[ADVANTAGES] = make_algorithm(cfg).advantages(batch, None)
    return batch


@pytest.mark.parametrize("adv_type", ["gae", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "raw"])
@pytest.mark.parametrize("normalize", ["none", "batch"])
def test_the_others_are_as_if_answers_had_been_removed_beforehand(adv_type: str, normalize: str) -> None:
    """Bit for bit, whatever the reason; a group that is not finite is one, too."""
    algorithm = {
        "algorithm.adv_type": adv_type, "algorithm.normalize_advantages": normalize, "algorithm.gamma": 0.9,
        "algorithm.overlong_filter": True,
    }  # fmt: skip
    cfg = configuration(6, **algorithm)
    random = np.random.default_rng(3)
    every, rest = list[SampleGroup](), list[SampleGroup]()
    for position in range(8):
        reasons = ["", "", *random.choice(["", *REASONS], 4).tolist()]
        answers = [answer(int(random.integers(2, 9)), left_out=why) for why in reasons]
        rewards = random.choice([-1.0, 0.0, 0.5, 1.0], 6).tolist()
        if position == 5:
            answers[0].logprobs[0] = float("nan")
        every.append(group(cfg, position, answers, rewards)[0])
        remaining = [(a, r) for a, r, why in zip(answers, rewards, reasons, strict=True) if not why]
        if position != 5:
            rest.append(group(cfg, position, *map(list, zip(*remaining, strict=True)))[0])
    found, expected = trained_on(cfg, every), trained_on(cfg, rest)
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.group, expected.group)
    assert torch.equal(found.columns[ADVANTAGES], expected.columns[ADVANTAGES])
    assert found.columns[ADVANTAGES].abs().max() > 0.1


def test_an_answer_that_is_cut_does_not_punish_the_others() -> None:
    cfg = configuration(**{"algorithm.overlong_filter": True})
    answers = [answer(3), answer(4), answer(2), answer(20, left_out="cut")]
    made, facts = group(cfg, 0, answers, [-1.0] * 4)
    assert made.members.tolist() == [True, True, True, False]
    assert not trained_on(cfg, [made]).columns[ADVANTAGES].any()
    assert facts["truncated"] == 1 and facts["samples"] == 4 and facts["untrained/cut"] == 20


REFILLED: dict[str, tuple[dict[str, Any], list[Episode], list[dict[str, float]], bool]] = {
    "wrong answers of different lengths": (
        {"algorithm.overlong_buffer": 10}, [answer(12), answer(18)], [{"math": 0.0}, {"math": 0.0}], True,
    ),
    "right and wrong": ({"algorithm.overlong_buffer": 10}, [answer(12), answer(18)], [{"math": 0.0}, {"math": 1.0}], False),
    "a term about the length": (
        {"reward.terms": [{"name": "math"}, {"name": "length", "weight": 0.1}]}, [answer(12), answer(18)],
        [{"math": 0.3, "length": -0.7}, {"math": 0.3, "length": -0.9}], True,
    ),
    "nothing but the length": (
        {"reward.terms": [{"name": "length"}]}, [answer(12), answer(18)], [{"length": -0.7}, {"length": -0.9}], False,
    ),
    "the only other answer is cut": (
        {"algorithm.overlong_filter": True}, [answer(12), answer(20, left_out="cut")], [{"math": 1.0}, {"math": 0.0}], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFILLED)
def test_groups_are_filtered_by_the_tasks_reward_of_those_that_are_compared(name: str) -> None:
    changes, answers, terms, refilled = REFILLED[name]
    cfg = configuration(2, **{"algorithm.filter_groups": True, **changes})
    maker = GroupBuilder(cfg, make_algorithm(cfg), 0, "rollout-0")
    slot = PendingGroup(5, 0, 0, Prompt(0, ()), (1, 2), dict(enumerate(answers)))
    weights = {term.name: term.weight for term in cfg.reward.terms}
    slot.scores = {
        member: Scored(sum(weights[term] * value for term, value in found.items()), found)
        for member, found in enumerate(terms)
    }
    assert (maker.score_group(slot, may_refill=True) is None) == refilled
    judged = maker.score_group(slot, may_refill=False)
    assert judged is not None and judged.rewards_differ != refilled
