"""Rules that name bottlenecks, on steps whose causes are known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from rlhpc.tracing.analysis import analyze, analyze_step
from rlhpc.tracing.bottlenecks import MATERIAL, Bottleneck, find_bottlenecks
from rlhpc.tracing.model import MessageFlow, RankTrack, Span, Trace
from tests.unit.tracing.test_critical_path import traces
from tests.unit.tracing.traces import driver, flow, ns, span, trace, track

#: A rollout until 60 and training until 100 by one rank each.
GENERATION = span("engine step", "engine", 0, 60, batch=8)
TRAINING = span("update", "train", 60, 100)


def found(
    *tracks: RankTrack, config: dict[str, Any] | None = None, flows: tuple[MessageFlow, ...] = ()
) -> dict[str, Bottleneck]:
    (step,) = analyze(trace(*tracks, flows=flows)).values()
    return {one.kind: one for one in find_bottlenecks(step, config)}


def work(*spans: Span, end_ms: float = 100) -> dict[str, Bottleneck]:
    """The bottlenecks of a step in which one rank does everything."""
    return found(driver(end_ms, span("wait", "wait", 0, end_ms)), track("rollout", 0, *spans))


def test_a_balanced_step_names_none() -> None:
    assert work(GENERATION, TRAINING) == {}
    assert found(driver(100)) == {}


@pytest.mark.parametrize("seconds", [MATERIAL * 100 - 1, MATERIAL * 100 + 1])
def test_what_costs_less_than_the_limit_is_not_named(seconds: float) -> None:
    # A transfer of the weights of half that length would be saved at most.
    causes = work(span("chunk", "weights", 0, 2 * seconds), span("update", "train", 2 * seconds, 100))
    assert set(causes) == ({"slow_network"} if seconds > MATERIAL * 100 else set())


def simulators(*milliseconds: float) -> list[RankTrack]:
    return [
        track("env", rank, span("simulate", "simulator", 0, end), span("actions", "wait", end, 100))
        for rank, end in enumerate(milliseconds)
    ]


def test_a_slow_env_rank() -> None:
    causes = found(driver(100, span("env.interact", "wait", 0, 100)), *simulators(50, 52, 95))
    assert list(causes) == ["slow_env_rank"]
    cause = causes["slow_env_rank"]
    assert (cause.title, cause.key) == ("slow env rank env-2", "env.train.simulators")
    assert cause.advice.startswith("4, or one per core")
    config = {"env": {"train": {"simulators": 4}}}
    more = found(driver(100, span("env.interact", "wait", 0, 100)), *simulators(50, 52, 95), config=config)
    assert more["slow_env_rank"].advice.startswith("8, or")
    assert cause.gain_ns == 43_000_000
    assert cause.share == pytest.approx(0.43)
    assert "env-2 on n1 worked 95 ms, the median rank of env 52 ms" in cause.evidence
    assert found(driver(100, span("env.interact", "wait", 0, 100)), *simulators(90, 92, 95)) == {}
    assert found(driver(100, span("env.interact", "wait", 0, 100)), *simulators(95)) == {}


def test_a_slow_rank_that_nothing_waits_for_is_not_named() -> None:
    actor = track("actor", 0, span("update", "train", 0, 99))
    assert found(driver(100, span("actor.update", "wait", 0, 100, group="actor")), actor, *simulators(10, 80)) == {}


def test_a_slow_rank_of_another_group() -> None:
    ranks = [track("actor", rank, span("update", "train", 0, end)) for rank, end in enumerate((40, 41, 90))]
    causes = found(driver(100, span("wait", "wait", 0, 100)), *ranks)
    assert {kind: cause.key for kind, cause in causes.items()} == {"slow_rank": "cluster.sbatch"}


def test_a_slow_judge() -> None:
    reward = span("reward", "judge", 40, 80, thread="rewards task 1")
    spans = (
        span("engine step", "engine", 0, 40),
        span("rewards", "wait", 40, 80),
        reward,
        span("update", "train", 80, 100),
    )
    cause = work(*spans)["slow_judge"]
    assert (cause.key, cause.gain_ns) == ("reward.processes", 30_000_000)
    assert cause.advice.startswith("4 (now 1)")
    rank = track("rollout", 0, *spans)
    config = {"reward": {"processes": 8}}
    assert found(driver(100, span("w", "wait", 0, 100)), rank, config=config)["slow_judge"].advice.startswith(
        "32 (now 8)"
    )


def test_a_slow_group_of_judges() -> None:
    causes = found(
        driver(100, span("wait", "wait", 0, 100)), track("judge", 0, span("rate", "judge", 10, 90)),
        track("judge", 1, span("rate", "judge", 10, 85)),
    )  # fmt: skip
    assert causes["slow_judge"].key == "cluster.component_placement"
    assert "more than 2 ranks for judge" in causes["slow_judge"].advice


def generation(batches: list[int], *, capacity: int, finished: int, step_ms: float = 10) -> list[Span]:
    return [
        span("generation", "engine", 0, step_ms * len(batches), capacity=capacity, finished=finished),
        *(
            span("engine step", "engine", step_ms * index, step_ms * index + step_ms, batch=batch)
            for index, batch in enumerate(batches)
        ),
    ]


def test_a_small_batch() -> None:
    cause = work(*generation([2] * 10, capacity=2, finished=10))["small_batch"]
    assert cause.key == "rollout.max_batch_size"
    assert cause.advice.startswith("10,")
    assert cause.gain_ns == 80_000_000  # two steps of ten sequences instead of ten steps of two
    assert work(*generation([8] * 10, capacity=64, finished=8)) == {}


@pytest.mark.parametrize(("tokens", "is_small"), [(50, True), (4000, False)])
def test_small_micro_batches(tokens: int, is_small: bool) -> None:
    spans = [span("micro-batch", "train", 5 * index, 5 * index + 5, tokens=tokens) for index in range(20)]
    causes = work(*spans)
    assert set(causes) == ({"small_batch"} if is_small else set())
    if is_small:
        assert causes["small_batch"].key == "actor.max_tokens_per_micro_batch"
        assert causes["small_batch"].gain_ns == 95_000_000  # one instead of twenty
        assert "trained on 1000 tokens in 20 micro-batches" in causes["small_batch"].evidence


def test_a_long_tail() -> None:
    spans = generation([8, 8, 8, 8, 1, 1, 1, 1, 1, 1], capacity=64, finished=8)
    cause = work(*spans)["long_tail"]
    assert (cause.key, cause.gain_ns) == ("algorithm.max_staleness", 60_000_000)
    rank = track("rollout", 0, *spans)
    config = {"algorithm": {"max_staleness": 2}}
    cause = found(driver(100, span("w", "wait", 0, 100)), rank, config=config)["long_tail"]
    assert cause.key == "rollout.max_new_tokens"


def test_a_slow_disk() -> None:
    spans = (
        span("step 1", "step", 0, 60, step=1),
        span("save", "save", 60, 100),
        span("actor.begin_save", "wait", 61, 99),
    )
    tracks = (track("driver", 0, *spans), track("actor", 0, span("begin_save", "call", 62, 98)))
    written = {"bytes": 1 << 25, "is_large": True}
    files = [span("begin_save", "call", 62, 98), span("model.safetensors", "save", 62, 92, **written)]
    sync = {"runner": {"async_save": False, "save_interval": 5}}
    cause = found(tracks[0], track("actor", 0, *files), config=sync)["slow_disk"]
    assert (cause.key, cause.gain_ns) == ("runner.async_save", 30_000_000)
    files[1] = span("model.safetensors", "save", 62, 92, bytes=1 << 20, is_large=False)
    cause = found(tracks[0], track("actor", 0, *files), config=sync)["slow_disk"]
    assert cause.key == "runner.save_interval", "small files are written at once in any case"
    cause = found(*tracks, config={"runner": {"save_interval": 5}})["slow_disk"]
    assert (cause.key, cause.gain_ns) == ("runner.save_interval", 30_000_000)
    assert found(*tracks)["slow_disk"].key == "runner.run_dir"


def test_a_slow_network() -> None:
    spans = (span("send weights", "weights", 0, 60, bytes=2_000_000_000), TRAINING)
    cause = work(*spans)["slow_network"]
    assert cause.key == "rollout.weight_delta"
    assert "(1.9 GiB in all)" in cause.evidence
    rank = track("rollout", 0, *spans)
    cause = found(driver(100, span("w", "wait", 0, 100)), rank, config={"env": {}})["slow_network"]
    assert (cause.key, cause.advice[:9]) == ("runner.weight_sync_interval", "4 (now 1)")


@pytest.mark.parametrize("hosts", [("n1", "n1"), ("n1", "n2")])
def test_a_message_counts_as_the_networks_only_between_hosts(hosts: tuple[str, str]) -> None:
    rank = RankTrack("rollout", 0, hosts[0], 1, [span("engine step", "engine", 0, 20)])
    actor = RankTrack("actor", 0, hosts[1], 2, [span("groups", "wait", 0, 80), span("update", "train", 80, 100)])
    flows = (flow("groups", "rollout-0", 20, "actor-0", 80),)
    causes = found(driver(100, span("wait", "wait", 0, 100, group="actor")), rank, actor, flows=flows)
    assert {kind: cause.key for kind, cause in causes.items()} == (
        {} if hosts[0] == hosts[1] else {"slow_network": "cluster.interface"}
    )


def test_two_causes_are_both_named_the_larger_first() -> None:
    spans = (span("send weights", "weights", 0, 50), span("reward", "judge", 50, 90), span("update", "train", 90, 100))
    (step,) = analyze(trace(driver(100, span("wait", "wait", 0, 100)), track("rollout", 0, *spans))).values()
    assert [cause.kind for cause in find_bottlenecks(step)] == ["slow_judge", "slow_network"]


@pytest.mark.parametrize(
    "config", [{"reward": 3}, {"runner": {"async_save": "no", "save_interval": True}}, {"env": None}]
)
def test_a_configuration_of_wrong_types_counts_as_the_defaults(config: dict[str, Any]) -> None:
    spans = (span("reward", "judge", 0, 90), span("engine step", "engine", 90, 100))
    causes = found(driver(100, span("wait", "wait", 0, 100)), track("rollout", 0, *spans), config=config)
    assert causes["slow_judge"].advice.startswith("4 (now 1)")


def test_arguments_of_wrong_types_are_left_out() -> None:
    spans = [span("step", "engine", 0, 50, batch=float("nan")), span("step", "engine", 50, 99, batch="8", bytes=[])]
    assert work(*spans) == {}


@settings(max_examples=200, deadline=None)
@given(traces())
def test_a_gain_is_never_more_than_the_step(arbitrary: Trace) -> None:
    step = analyze_step(arbitrary, 1, ns(0), ns(100))
    for cause in find_bottlenecks(step):
        assert MATERIAL <= cause.share <= 1
        assert cause.gain_ns <= step.length_ns
