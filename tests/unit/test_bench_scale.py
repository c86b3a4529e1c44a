"""The simulation of `bench.scale_model`: closed forms that it must agree with."""

from __future__ import annotations

import math
from typing import cast

import pytest

from bench.scale_loop import Sizes
from bench.scale_model import FIT, Records, fit
from bench.simulation import (
    PHASES,
    Cost,
    Costs,
    LoopModel,
    Machine,
    MetadataServer,
    Network,
    Process,
    Reliability,
    SimulatedHost,
    Simulation,
    compute_best_interval_s,
    compute_tree_depth,
    find_tree_parent,
    simulate_failures,
    simulate_weight_tree,
)
from rlhpc.runtime.comm.context import Context
from rlhpc.weights.transport import _assign_slots

NO_COSTS = Costs({phase: {} for phase in PHASES})


def test_processes_queue_for_the_cores_of_their_host() -> None:
    simulation = Simulation()
    host = SimulatedHost(simulation, num_cores=2, slowdown=3.0)
    for process in [Process(host) for _ in range(5)]:
        process.execute(1.0)
        process.execute(1.0)
    assert simulation.run() == pytest.approx(5 * 3.0), "ten tasks of a second on two cores, three times as slow"
    assert host.busy_s == 10


def test_a_process_executes_one_task_at_a_time() -> None:
    simulation = Simulation()
    process = Process(SimulatedHost(simulation, num_cores=2))
    for _ in range(4):
        process.execute(0.5)
    assert simulation.run() == pytest.approx(2.0)


def test_a_metadata_server_has_a_latency_and_a_rate() -> None:
    simulation = Simulation()
    server = MetadataServer(simulation, latency_s=1.0, rate=10)
    ends: list[float] = []
    for _ in range(40):
        server.operate(1, lambda: ends.append(simulation.now))
    simulation.run()
    assert (ends[0], ends[-1]) == (pytest.approx(1.0), pytest.approx(4.0)), (
        "few wait for the answer, many for their turn"
    )


@pytest.mark.parametrize("hosts", [1, 2, 3, 6, 7, 14, 15, 100, 1024])
def test_the_tree_is_that_of_the_weight_sync(hosts: int) -> None:
    records = Records(ranks_per_host=1)
    slots, num_forwards = _assign_slots(cast(Context, records), [("rollout", rank) for rank in range(hosts)])
    hosts_by_address = {records.rank_record("rollout", rank)["data"]["bulk"]: rank for rank in range(hosts)}
    parents = [hosts_by_address.get(slots["rollout", rank].upstream, -1) for rank in range(hosts)]
    assert parents == [find_tree_parent(rank) for rank in range(hosts)]

    def depth(host: int) -> int:
        return 0 if host < 0 else 1 + depth(parents[host])

    assert (
        compute_tree_depth(hosts)
        == max(depth(host) for host in range(hosts))
        == num_forwards + 1
        <= math.log2(hosts) + 1
    )
    assert max(slot.num_downstream for slot in slots.values()) <= 2


def test_no_uplink_sends_a_version_more_than_twice() -> None:
    hosts, chunks, chunk_bytes = 500, 3, 1e6
    _, sent = simulate_weight_tree(hosts, chunks, chunk_bytes, Network(100, 100))
    assert sum(sent) == hosts * chunks * chunk_bytes, "each host gets each chunk once"
    assert max(sent) == sent[0] == 2 * chunks * chunk_bytes


def test_the_time_of_the_tree_by_hand() -> None:
    chunk_s = 1e9 / (80e9 / 8)  # 1 GB over 80 Gb/s
    assert simulate_weight_tree(1, 10, 1e9, Network(80, 80))[0] == pytest.approx(10 * chunk_s)
    assert simulate_weight_tree(2, 10, 1e9, Network(80, 80))[0] == pytest.approx(20 * chunk_s), "two copies by one link"
    assert simulate_weight_tree(2, 10, 1e9, Network(80, 40))[0] == pytest.approx(20 * chunk_s), (
        "as fast by two streams of half"
    )
    slow = simulate_weight_tree(62, 40, 1e9, Network(80, 80, hosts_per_leaf=1, oversubscription=8))[0]
    assert slow == pytest.approx(2 * 8 * 40 * chunk_s, rel=0.3), "the links to the spine are eight times as slow"


def test_a_failure_loses_what_the_interval_of_checkpoints_says() -> None:
    reliability = Reliability(
        step_s=60, checkpoint_steps=10, save_stall_s=0, save_s=0, recovery_s=300, failures_per_day=4
    )
    outcome = simulate_failures(reliability, duration_days=2000)
    assert outcome.failures == pytest.approx(4 * 2000, rel=0.05)
    assert outcome.max_lost_steps == 9, "the tenth step is saved"
    assert outcome.lost_steps == pytest.approx(4.5, rel=0.05) and outcome.lost_s == pytest.approx(300, rel=0.05)
    assert outcome.goodput == pytest.approx(1 - 4 * (300 + 300) / 86400, rel=0.005)
    assert simulate_failures(reliability, duration_days=50) == simulate_failures(reliability, duration_days=50)


def test_a_save_that_is_not_complete_does_not_count() -> None:
    reliability = Reliability(
        step_s=60, checkpoint_steps=10, save_stall_s=0, save_s=120, recovery_s=0, failures_per_day=4
    )
    outcome = simulate_failures(reliability, duration_days=2000)
    assert outcome.max_lost_steps == 11, "two more steps while the tenth is being saved"
    assert outcome.lost_steps == pytest.approx(4.5 + 2, rel=0.05)


def test_no_failure_loses_nothing() -> None:
    reliability = Reliability(60, 10, save_stall_s=6, save_s=0, recovery_s=300, failures_per_day=0)
    outcome = simulate_failures(reliability, duration_days=10)
    assert (outcome.failures, outcome.lost_s) == (0, 0) and outcome.goodput == pytest.approx(600 / 606, rel=1e-3)


def test_the_best_interval_of_checkpoints() -> None:
    interval_s = compute_best_interval_s(30, 8)
    assert interval_s == pytest.approx(math.sqrt(2 * 30 * 86400 / 8))

    def goodput(factor: float) -> float:
        reliability = Reliability(20, round(interval_s * factor / 20), 30, 0, 100, 8)
        return simulate_failures(reliability, duration_days=100).goodput

    assert goodput(1) > goodput(1 / 4) and goodput(1) > goodput(4)


def test_costs_come_from_the_processor_time_of_the_runs() -> None:
    """Runs whose processor time follows known costs give these costs back."""
    costs = Costs(
        {
            phase: {
                "driver": Cost(0.002, 1e-4), "sender": Cost(0.001, 2e-4), "fork server": Cost(0.0, 1e-3),
                "actor": Cost(0.0, 3e-4), "rollout": Cost(0.0, 5e-4),
            }
            for phase in PHASES
        }
    )  # fmt: skip
    runs = []
    for ranks in FIT:
        model = LoopModel(Sizes(ranks), costs, Machine())
        runs.append({"ranks": ranks, "phases": {phase: {"cpu_s": model.run(phase).busy_s} for phase in PHASES}})
    fitted = fit(runs)
    for phase, part in (("rollout", "driver"), ("weights", "sender"), ("calls", "rollout"), ("connect", "driver")):
        assert fitted.find_cost(phase, part).message_s == pytest.approx(
            costs.find_cost(phase, part).message_s, rel=0.01
        ), (
            phase,
            part,
        )


def test_requests_grow_with_the_ranks_and_no_faster() -> None:
    for phase in PHASES:
        small, large = (
            sum(LoopModel(Sizes(ranks), NO_COSTS, Machine(), is_first_version=False).run(phase).counts.values())
            for ranks in (64, 1024)
        )
        assert large <= 16 * small, phase
