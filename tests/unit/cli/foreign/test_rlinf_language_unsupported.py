"""Reasons for RLinf's keys of language models that are left out: none of them denies what rlhpc has."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from rlhpc.cli.foreign import rlinf_language_unsupported as tables
from rlhpc.cli.foreign.rlinf import EVERYWHERE
from rlhpc.language.agents.registry import AGENTS
from rlhpc.language.algorithms.registry import ALGORITHMS
from rlhpc.language.data.registry import SOURCES
from rlhpc.language.engines.registry import ENGINES
from rlhpc.language.envs.registry import ENVIRONMENTS
from rlhpc.language.rewards.registry import REWARDS
from rlhpc.runs.task_type import all_task_types
from rlhpc.training.registry import BACKENDS
from tests.unit.cli.foreign.rlinf_configs import CRITIC, FSDP, _kinds
from tests.unit.cli.foreign.test_rlinf_agents import CODE, LIGHTNING, ONLINE, SEARCH, WIDE
from tests.unit.cli.foreign.test_rlinf_language import translated
from tests.unit.cli.foreign.test_rlinf_language_kinds import SFT

_kinds()

ENTRIES = [
    *tables.LANGUAGE_KEYS, *tables.CRITIC_KEYS, *tables.AGENT_KEYS, *tables.EVALUATION_KEYS, *tables.SUPERVISED_KEYS,
]  # fmt: skip
#: Changes of a configuration by which rules give their reasons.
CHANGES: list[Any] = [
    {}, CRITIC, FSDP, CODE, LIGHTNING, ONLINE, SEARCH, WIDE, SFT,
    {"actor": {"lr_sched": {"lr_decay_style": "WSD", "min_lr": 1e-7, "lr_decay_iters": 10}}},
    {"actor": {"lr_sched": {"min_lr": 1e-7, "lr_decay_iters": 10}}, "runner": {"max_steps": -1}},
    {"reward": {"reward_type": "unheard_of"}}, {"data": {"type": "vlm", "choice_key": "options", "image_keys": ["a", "b"]}},
    {"runner": {"task_type": "reasoning_eval"}},
]  # fmt: skip
#: Words by which a reason claims that rlhpc lacks something.
_ABSENCE = re.compile(
    r"\brlhpc (has no|does not)|\bthere (is|are) no\b|\bcannot\b|\bno such\b|\bnot at videos\b|\bsample without\b"
)
#: Word of a capability → a key that proves it. Reasons of earlier versions denied these.
_DENIED = {
    r"critic": "critic.warmup_steps", r"pictures": "data.train.images_key", r"one accelerator": "rollout.parallel.tensor",
    r"reward model": "reward.model.model_path", r"adapters": "actor.lora.rank", r"judge": "judge.rubric",
    r"experts": "actor.parallel.expert",
}  # fmt: skip


@functools.cache
def capabilities() -> tuple[str, ...]:
    """Returns a line for each key, each of its words, and each registered name of language runs."""
    lines = []
    for task_type in all_task_types():
        for key in task_type.keys.tree.values():
            lines.append(f"{task_type.name} key {key.path}: {key.doc}")
            lines += [f"{task_type.name} key {key.path} takes {word}" for word in key.choices]
    for registry in (AGENTS, ALGORITHMS, BACKENDS, ENGINES, ENVIRONMENTS, REWARDS, SOURCES):
        lines += [f"name {name}" for name in registry.names()]
    return tuple(lines)


def contradictions(pattern: str) -> list[str]:
    return [line for line in capabilities() if re.search(pattern, line, re.IGNORECASE)]


def reasons() -> dict[str, str]:
    """Returns every reason, of tables and of rules, with the pattern of what it calls missing."""
    found = {entry.reason: entry.missing_feature for entry in ENTRIES}
    for change in CHANGES:
        made = translated(change)
        found |= {
            reason: made.missing_feature[key]
            for key, (reason, _) in made.omitted.items()
            if key in made.missing_feature
        }
        found |= {reason: found.get(reason, "") for reason, _ in made.omitted.values()}
    return found


def test_what_a_reason_calls_missing_is_in_no_registry_and_no_schema() -> None:
    patterns = {missing_feature: reason for reason, missing_feature in reasons().items() if missing_feature}
    assert len(patterns) > 15
    assert not {
        reason: contradictions(missing_feature)[:2]
        for missing_feature, reason in patterns.items()
        if contradictions(missing_feature)
    }


def test_a_reason_that_claims_absence_tells_of_what() -> None:
    shared = {entry.reason for entry in EVERYWHERE}
    assert not [
        text
        for text, missing_feature in reasons().items()
        if _ABSENCE.search(text) and not missing_feature and text not in shared
    ]


@pytest.mark.parametrize("word", _DENIED)
def test_no_reason_denies_what_the_package_has(word: str) -> None:
    assert contradictions(rf"key {re.escape(_DENIED[word])}:")
    denials = re.compile(rf"\b(there (is|are) no|rlhpc has no|without|an engine runs on) (\w+ )?{word}")
    assert not [
        text for entry in ENTRIES if denials.search(text := entry.reason) and not text.startswith("without a critic")
    ]


def test_a_claim_that_outlived_the_gap_is_found() -> None:
    for claim in (
        r"key critic\.warmup_steps",
        r"^name vllm$",
        r"^sft .*\bimages_key",
        r"takes bradley_terry$|^name math$",
    ):
        assert contradictions(claim), claim
