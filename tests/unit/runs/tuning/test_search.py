"""Search of layouts: the best of all of them, by bounds."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlhpc.runs.tuning.costs import Costs
from rlhpc.runs.tuning.queueing_model import QueueingModel
from rlhpc.runs.tuning.search import Space, search
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape, GroupPlacement
from rlhpc.runs.tuning.workload import Knob, Workload
from tests.unit.runs.tuning.measured import ANSWERS, CPU, CROWDED, GPUS, SIMULATORS, TWO, everything


@pytest.mark.parametrize(
    ("case", "shape"), [(SIMULATORS, GPUS), (CROWDED, CPU), (ANSWERS, TWO)], ids=["simulators", "crowded", "answers"]
)
def test_the_search_finds_the_optimum(case: tuple[Workload, Costs], shape: ClusterShape) -> None:
    workload, costs = case
    model = QueueingModel(workload, costs, dataclasses.replace(shape, device_memory=65))
    configured = Candidate(
        {group: GroupPlacement.from_range("cluster", 0, 1) for group in workload.groups},
        {k.key: k.values[0] for k in workload.knobs},
    )
    found = search(Space(model, configured), 5)
    predicted = [model.predict(candidate) for candidate in everything(workload, shape)]
    steps = sorted(one.step_s for one in predicted if model.fits(one))
    assert found[0].prediction.step_s == pytest.approx(steps[0])
    assert [one.prediction.step_s for one in found] == sorted(one.prediction.step_s for one in found)
    assert found[0].prediction.step_s < 0.8 * model.predict(configured).step_s
    assert len({json.dumps([one.candidate.placement(), one.candidate.settings]) for one in found}) == 5


def test_sizes_of_a_mesh_are_keys_like_others() -> None:
    """A kind of run names them, short runs measure them, the configuration's rules say which go with which numbers of
    ranks."""
    workload, costs = ANSWERS
    workload = dataclasses.replace(workload, knobs=(*workload.knobs, Knob("tensor", (1, 2, 4))))
    costs = dataclasses.replace(
        costs, factors={**costs.factors, "tensor=2": {"generate": 0.6}, "tensor=4": {"generate": 0.5}}
    )
    model = QueueingModel(workload, costs, GPUS)

    def allowed(candidate: Candidate) -> bool:
        ranks = len(candidate.placements["rollout"].processes)
        return bool(ranks % candidate.settings["tensor"] == 0)

    one = {group: GroupPlacement.from_range("cluster", 0, 1) for group in workload.groups}
    configured = Candidate(one, {knob.key: knob.values[0] for knob in workload.knobs})
    found = search(Space(model, configured), 5, allowed)
    steps = sorted(model.predict(candidate).step_s for candidate in everything(workload, GPUS) if allowed(candidate))
    assert found[0].prediction.step_s == pytest.approx(steps[0])
    assert found[0].candidate.settings["tensor"] > 1
    free = search(Space(model, configured), 1)[0]
    assert free.prediction.step_s <= found[0].prediction.step_s and all(allowed(one.candidate) for one in found)
