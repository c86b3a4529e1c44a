"""A workload and costs as a run measures them."""

from __future__ import annotations

import itertools

from rlhpc.runs.tuning.costs import Costs, Curve
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape, GroupPlacement, Pool
from rlhpc.runs.tuning.workload import Knob, Phase, Workload

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
            GroupPlacement.from_range("cluster", first, count, per)
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
