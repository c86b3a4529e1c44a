"""The search finds what trying everything finds, and the model says what a step of known phases takes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from rlhpc.jobs.plan import build_plan
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.plan import memory_plan
from rlhpc.runs.tuning.costs import Costs, Curve
from rlhpc.runs.tuning.queueing_model import QueueingModel
from rlhpc.runs.tuning.search import Space, search
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape, GroupPlacement, Pool
from rlhpc.runs.tuning.tune import TuneRequest, is_allowed
from rlhpc.runs.tuning.workload import Knob, Phase, Workload

MATH = str(Path(__file__).resolve().parents[4] / "configs" / "reasoning" / "math.yaml")

CPU = ClusterShape({"cluster": Pool("cluster", ((0, -1),))}, cores=(4,))
GPUS = ClusterShape({"cluster": Pool("cluster", tuple((0, i) for i in range(4)))}, cores=(8,), accelerators=4)
TWO = ClusterShape(
    {"cluster": Pool("cluster", tuple((n, i) for n in range(2) for i in range(3)))}, cores=(4, 4), accelerators=6
)


def line(fixed: float, work: float) -> Curve:
    return Curve(((0.0, fixed), (1.0, fixed + work)))


def playing(simulate: Curve, act: Curve, train: Curve, **more: object) -> tuple[Workload, Costs]:
    workload = Workload(
        phases=(
            Phase("act", "rollout", "", turn=True),
            Phase("simulate", "env", "", turn=True, on_cores=True),
            Phase("train", "actor", ""),
        ),
        samples=1024,
        unit="steps",
        knobs=(Knob("stages", (1, 2)), Knob("staleness", (0, 1)), Knob("micro", (None, 8))),
        stages="stages",
        staleness="staleness",
        divides=dict.fromkeys(("rollout", "env", "actor"), 12),
        several=frozenset({"env"}),
    )
    costs = Costs({"act": act, "simulate": simulate, "train": train}, **more)  # type: ignore[arg-type]
    return workload, costs


def writing(generate: Curve, score: Curve, train: Curve, **more: object) -> tuple[Workload, Costs]:
    workload = Workload(
        phases=(
            Phase("generate", "rollout", ""),
            Phase("score", "actor", "", streams=True),
            Phase("train", "actor", ""),
        ),
        samples=64,
        unit="responses",
        knobs=(Knob("staleness", (0, 1, 2)), Knob("micro", (1024, 512))),
        staleness="staleness",
        divides={"actor": 24},
        pieces=4.0,
    )
    return workload, Costs({"generate": generate, "score": score, "train": train}, **more)  # type: ignore[arg-type]


SIMULATORS = playing(line(0.02, 2.0), line(0.1, 0.3), line(0.05, 0.8), overhead_s=0.01, hop_s=0.02)
CROWDED = playing(
    line(0.3, 0.4), line(0.2, 0.5), line(0.0, 3.0), together_s={"train": 0.2}, scaling={"train": 0.7, "simulate": 0.4},
    threads={"actor": 2, "rollout": 1, "env": 2}, factors={"micro=8": {"train": 0.9}}, extra_s={"staleness=1": 0.03},
)  # fmt: skip
ANSWERS = writing(
    line(0.5, 4.0), line(0.0, 1.0), line(0.1, 2.0), together_s={"train": 0.3}, overhead_s=0.05, scaling={"train": 0.5},
    factors={"micro=512": {"train": 1.1, "score": 0.8}}, device_memory={"actor": 30.0, "rollout": 40.0},
)  # fmt: skip


def everything(workload: Workload, shape: ClusterShape) -> list[Candidate]:
    """Every placement at every offset with every setting, without any thought."""
    pool = shape.pools["cluster"]
    total = len(pool.resources)
    places: dict[str, list[GroupPlacement]] = {}
    for group in workload.groups:
        most = shape.cores[0] if pool.by_node else shape.cores[0] // (total // len(shape.cores))
        many = range(1, most + 1) if pool.by_node or group in workload.several else (1,)
        places[group] = [
            GroupPlacement.of("cluster", first, count, per)
            for first in range(total)
            for count in range(1, total - first + 1)
            for per in many
            if not workload.divides.get(group) or workload.divides[group] % (count * per) == 0
        ]
    settings = [
        dict(zip([k.key for k in workload.knobs], values, strict=True))
        for values in itertools.product(*(k.values for k in workload.knobs))
    ]
    return [
        Candidate(dict(zip(places, chosen, strict=True)), values)
        for chosen in itertools.product(*places.values())
        for values in settings
    ]


@pytest.mark.parametrize(
    ("case", "shape"), [(SIMULATORS, GPUS), (CROWDED, CPU), (ANSWERS, TWO)], ids=["simulators", "crowded", "answers"]
)
def test_the_search_finds_the_optimum(case: tuple[Workload, Costs], shape: ClusterShape) -> None:
    workload, costs = case
    model = QueueingModel(workload, costs, dataclasses.replace(shape, device_memory=65))
    configured = Candidate(
        {group: GroupPlacement.of("cluster", 0, 1) for group in workload.groups},
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
        ranks = len(candidate.places["rollout"].processes)
        return bool(ranks % candidate.settings["tensor"] == 0)

    one = {group: GroupPlacement.of("cluster", 0, 1) for group in workload.groups}
    configured = Candidate(one, {knob.key: knob.values[0] for knob in workload.knobs})
    found = search(Space(model, configured), 5, allowed)
    steps = sorted(model.predict(candidate).step_s for candidate in everything(workload, GPUS) if allowed(candidate))
    assert found[0].prediction.step_s == pytest.approx(steps[0])
    assert found[0].candidate.settings["tensor"] > 1
    free = search(Space(model, configured), 1)[0]
    assert free.prediction.step_s <= found[0].prediction.step_s and all(allowed(one.candidate) for one in found)


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

    one, next_ = GroupPlacement.of("cluster", 0, 1), GroupPlacement.of("cluster", 1, 1)
    assert step(one, one, one) == pytest.approx(4 + 2 + 3 + 1)  # one after the other
    assert step(one, one, one, stages=2) == pytest.approx(4 + 3 + 1)  # the policy hides behind the simulators
    assert step(one, one, next_, staleness=1) == pytest.approx(6)  # training hides behind the rollout
    assert step(one, one, GroupPlacement.of("cluster", 0, 2)) == pytest.approx(4 + 2 + 1.5 + 1)
    assert step(GroupPlacement.of("cluster", 0, 1, 2), one, one) == pytest.approx(2 + 2 + 3 + 1)
    workload, costs = writing(line(0.0, 4.0), line(0.0, 2.0), line(0.0, 5.0))
    model = QueueingModel(workload, costs, GPUS)
    apart = {"rollout": one, "actor": next_}
    alone = model.predict(Candidate(apart, {"staleness": 0, "micro": 1024}))
    assert alone.step_s == pytest.approx(4 + 2 / 4 + 5)  # three of four pieces are scored meanwhile
    assert alone.idle == pytest.approx(1 - (4 + 2 + 5) / (4 * 9.5))
    assert model.predict(Candidate(apart, {"staleness": 1, "micro": 1024})).step_s == pytest.approx(7)
    shared = {"rollout": one, "actor": one}  # on one accelerator, nothing is gained by being ahead
    assert model.predict(Candidate(shared, {"staleness": 1, "micro": 1024})).step_s == pytest.approx(11)


def test_a_curve_goes_on_as_it_was_measured() -> None:
    curve = Curve.through([(1.0, 4.0), (1.0, 4.2), (0.5, 2.1), (0.25, 2.2), (0.25, 1.0)])
    assert curve.at(1.0) == pytest.approx(4.1)
    assert curve.at(0.75) == pytest.approx(3.1)
    assert curve.at(2.0) == pytest.approx(8.1)
    assert curve.at(0.0) >= 0
    assert Curve(((0.5, 3.0),)).at(0.25) == pytest.approx(1.5)


def test_costs_outlive_a_file() -> None:
    for _, costs in (SIMULATORS, CROWDED, ANSWERS):
        assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs


def test_a_slower_machine_takes_longer_everywhere() -> None:
    for (workload, costs), shape in ((SIMULATORS, GPUS), (CROWDED, CPU), (ANSWERS, TWO)):
        for candidate in everything(workload, shape)[::211]:
            step = QueueingModel(workload, costs, shape).predict(candidate).step_s
            assert QueueingModel(workload, costs.times(3.0), shape).predict(candidate).step_s == pytest.approx(3 * step)


@pytest.mark.parametrize(
    ("memory", "check", "here"),
    [
        ("24G", "refuse", False),
        ("80G", "warn", False),
        ("80G", "refuse", True),
        ("80G", "off", True),
        (None, "refuse", False),
    ],
)
def test_what_the_account_of_memory_refuses_is_not_proposed(memory: str | None, check: str, here: bool) -> None:
    """For each number of ranks as a start of the very configuration would be judged, whatever fewer or more ranks held."""
    words = ["cluster.accelerators_per_node=8", f"cluster.memory_check={check}"]
    words += [] if memory is None else [f"cluster.accelerator_memory={memory}"]
    verdicts = []
    for ranks in (8, 1):
        place = GroupPlacement.of("cluster", 0, ranks)
        candidate = Candidate({"actor": place, "rollout": place}, {})
        cfg = load_config(MATH, [*words, *candidate.overrides()])
        fits = not memory_plan(cfg, build_plan(cfg, launcher="local" if here else "slurm"), build=False).refusals()
        verdicts.append(is_allowed(TuneRequest(MATH, tuple(words)), candidate, here=here))
        assert verdicts[-1] == (fits or check == "off")
    if not here:
        assert verdicts == {"24G": [False, False], "80G": [True, False], None: [True, True]}[memory]
