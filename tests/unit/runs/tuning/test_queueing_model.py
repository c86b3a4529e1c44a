"""The search finds what trying everything finds, and the model says what a step of known phases takes."""

from __future__ import annotations

import pytest

from rlhpc.runs.tuning.queueing_model import QueueingModel
from rlhpc.runs.tuning.shapes import Candidate, GroupPlacement
from tests.unit.runs.tuning.measured import (
    ANSWERS,
    CPU,
    CROWDED,
    GPUS,
    SIMULATORS,
    TWO,
    everything,
    line,
    playing,
    writing,
)


def test_a_bound_is_below_every_layout() -> None:
    for (workload, costs), shape in ((SIMULATORS, GPUS), (CROWDED, CPU), (ANSWERS, TWO)):
        model = QueueingModel(workload, costs, shape)
        for candidate in everything(workload, shape)[::97]:
            assert model.lower_bound_s(candidate) <= model.predict(candidate).step_s + 1e-9


def test_steps_of_known_phases() -> None:
    workload, costs = playing(line(0.0, 4.0), line(0.0, 2.0), line(0.0, 3.0), overhead_s=1.0)
    model = QueueingModel(workload, costs, GPUS)

    def step(env: GroupPlacement, rollout: GroupPlacement, actor: GroupPlacement, **settings: object) -> float:
        values = {"stages": 1, "staleness": 0, "micro": None, **settings}
        return model.predict(Candidate({"rollout": rollout, "env": env, "actor": actor}, values)).step_s

    one, next_ = GroupPlacement.from_range("cluster", 0, 1), GroupPlacement.from_range("cluster", 1, 1)
    assert step(one, one, one) == pytest.approx(4 + 2 + 3 + 1)  # one after the other
    assert step(one, one, one, stages=2) == pytest.approx(4 + 3 + 1)  # the policy hides behind the simulators
    assert step(one, one, next_, staleness=1) == pytest.approx(6)  # training hides behind the rollout
    assert step(one, one, GroupPlacement.from_range("cluster", 0, 2)) == pytest.approx(4 + 2 + 1.5 + 1)
    assert step(GroupPlacement.from_range("cluster", 0, 1, 2), one, one) == pytest.approx(2 + 2 + 3 + 1)
    workload, costs = writing(line(0.0, 4.0), line(0.0, 2.0), line(0.0, 5.0))
    model = QueueingModel(workload, costs, GPUS)
    apart = {"rollout": one, "actor": next_}
    alone = model.predict(Candidate(apart, {"staleness": 0, "micro": 1024}))
    assert alone.step_s == pytest.approx(4 + 2 / 4 + 5)  # three of four pieces are scored meanwhile
    assert alone.idle == pytest.approx(1 - (4 + 2 + 5) / (4 * 9.5))
    assert model.predict(Candidate(apart, {"staleness": 1, "micro": 1024})).step_s == pytest.approx(7)
    shared = {"rollout": one, "actor": one}  # on one accelerator, nothing is gained by being ahead
    assert model.predict(Candidate(shared, {"staleness": 1, "micro": 1024})).step_s == pytest.approx(11)


def test_a_slower_machine_takes_longer_everywhere() -> None:
    for (workload, costs), shape in ((SIMULATORS, GPUS), (CROWDED, CPU), (ANSWERS, TWO)):
        for candidate in everything(workload, shape)[::211]:
            step = QueueingModel(workload, costs, shape).predict(candidate).step_s
            assert QueueingModel(workload, costs.times(3.0), shape).predict(candidate).step_s == pytest.approx(3 * step)
