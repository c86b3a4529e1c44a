"""Bottlenecks of real runs of language models: the trace names them, and nothing else; its advice makes steps shorter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

from test_reasoning import SFT, LanguageRun

from tests.bottlenecks import advised, assert_advice_helps, check_advice, named, step_s

#: 32 answers a step, of six forward passes each.
PACED = (
    "runner.max_steps=6", "runner.trace.steps=3-5", "data.prompts_per_step=8", "algorithm.group_size=4",
    "actor.global_batch_size=32",
    "rollout.rollout_backend=slow_parts:PacedEngine", "rollout.max_batch_size=32", "rollout.max_new_tokens=64",
    "reward.terms=[{name: length, kwargs: {limit: 64, start: 32}}]",
)  # fmt: skip
Train = Callable[..., LanguageRun]
pytestmark = pytest.mark.long(together=True)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    folder = tmp_path_factory.mktemp("bottlenecks")

    def train(name: str, *overrides: str, **environment: Any) -> LanguageRun:
        run = LanguageRun(folder / name, *PACED, *overrides)
        run.environment |= {key: str(value) for key, value in environment.items()}
        run.train()
        return run

    return train


def test_a_balanced_run_names_none(train: Train) -> None:
    assert named(train("balanced").root) == {}


def test_a_balanced_supervised_run_names_none(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "sft", "runner.max_steps=6", "runner.trace.steps=2-5", config=SFT)
    run.train()
    assert named(run.root) == {}


#: Only large files are written while training continues.
SLOW_DISK = (
    "algorithm.adv_type=slow_parts:grpo", "runner.save_interval=1", "runner.async_save=false",
    "actor.model.kwargs={hidden: 512, layers: 2, heads: 2}",
)  # fmt: skip
SMALL_BATCH = ("rollout.max_batch_size=4",)
DISK_S = {"RLHPC_TEST_DISK_S": 1.5}


@pytest.fixture(scope="module")
def both(train: Train) -> LanguageRun:
    """A run with a small batch and a slow disk."""
    return train("batch-disk", *SLOW_DISK, *SMALL_BATCH, **DISK_S)


def test_two_bottlenecks_are_both_named(both: LanguageRun) -> None:
    causes = named(both.root)
    assert set(causes) == {"small_batch", "slow_disk"}
    assert causes["small_batch"].key == "rollout.max_batch_size"
    assert causes["small_batch"].advice.startswith("32")
    assert causes["slow_disk"].key == "runner.async_save"
    assert causes["slow_disk"].advice.startswith("true")


@pytest.mark.parametrize("kind", ["slow_disk", "small_batch"])
def test_advice_for_one_of_two_leaves_the_other(train: Train, both: LanguageRun, kind: str) -> None:
    causes = named(both.root)
    one = train(f"without-{kind}", *SLOW_DISK, *SMALL_BATCH, advised(causes[kind]), **DISK_S)
    assert set(causes) - {kind} <= set(named(one.root))
    assert_advice_helps(both.root, one.root, causes[kind])
    assert step_s(one.root) < step_s(both.root)


#: Bottleneck alone → overrides and environment that make it, then what `check_advice` expects.
ALONE: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, str, float]]] = {
    "batch": (SMALL_BATCH, {}, ("small_batch", "rollout.max_batch_size", 0.9)),
    # The smallest that a prompt and an answer fit into.
    "micro-batch": (
        ("rollout.max_new_tokens=8", "actor.max_tokens_per_micro_batch=24"), {},
        ("small_batch", "actor.max_tokens_per_micro_batch", 0.95),
    ),
    "disk": (SLOW_DISK, DISK_S, ("slow_disk", "runner.async_save", 0.9)),
    "judge": (
        ("reward.terms=[{name: 'slow_parts:slow_ones'}]",), {}, ("slow_judge", "reward.processes", 0.8),
    ),
    "tail": ((), {"RLHPC_TEST_LONG_ANSWER": 60}, ("long_tail", "algorithm.max_staleness", 0.9)),
}  # fmt: skip


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ALONE)
def test_the_advice_of_the_step_page_makes_steps_shorter(train: Train, name: str) -> None:
    overrides, environment, expected = ALONE[name]

    def pair(suffix: str, *advice: str) -> Path:
        return train(f"{name}-{suffix}", *overrides, *advice, **environment).root

    check_advice(pair, *expected)
