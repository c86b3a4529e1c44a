"""Bottlenecks of real runs in simulators: the trace names them, and nothing else; its advice makes steps shorter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bottlenecks import advised, assert_advice_helps, check_advice, named, step_s
from tests.integration.embodied.test_layouts import Runs

#: Two env ranks with eight slots each; a rollout of 16 decisions.
LAYOUT = (
    "runner.max_steps=10", "runner.trace.steps=3-7", "runner.save_interval=-1", "algorithm.rollout_steps=16",
    "env.train.num_envs=16", "actor.global_batch_size=128", "env.eval.env_type=gymnasium",
    "env.train.env_type=tests.integration.embodied.slow_parts:SlowSlots",
    "cluster.component_placement={'actor': '0', 'rollout': '0', 'env': '0:0-1'}",
    "rollout.weight_sync=tests.integration.embodied.slow_parts:SlowTransfer", "rollout.weight_delta='off'",
)  # fmt: skip
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    runs = Runs(tmp_path_factory.mktemp("bottlenecks"))

    def train(name: str, *overrides: str, **seconds: float) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in seconds.items():
                patch.setenv(key, str(value))
            runs.finish(name, *LAYOUT, *overrides)
        return runs.folder / name

    return train


def test_a_balanced_run_names_none(train: Train) -> None:
    assert named(train("balanced")) == {}


SLOW = {
    "slow_env_rank": {"RLHPC_TEST_SLOW_SLOT_S": 0.012},
    "slow_network": {"RLHPC_TEST_TRANSFER_S": 0.8},
}


def test_two_at_once_and_the_advice_for_one_leaves_the_other(train: Train) -> None:
    slow = {name: value for one in SLOW.values() for name, value in one.items()}
    both = train("both", **slow)
    causes = named(both)
    assert set(causes) == {"slow_env_rank", "slow_network"}
    assert causes["slow_env_rank"].title == "slow env rank EnvWorker-1"
    assert causes["slow_network"].key == "runner.weight_sync_interval"
    for kind, cause in causes.items():
        one = train(f"without-{kind}", advised(cause), **slow)
        assert set(causes) - {kind} <= set(named(one))
        assert_advice_helps(both, one, cause)
        assert step_s(one) < step_s(both)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "key"), [("slow_env_rank", "env.train.simulators"), ("slow_network", "runner.weight_sync_interval")]
)
def test_the_advice_of_the_step_page_makes_steps_shorter(train: Train, kind: str, key: str) -> None:
    def pair(suffix: str, *advice: str) -> Path:
        return train(f"{kind}-{suffix}", *advice, **SLOW[kind])

    check_advice(pair, kind, key, 0.9)
