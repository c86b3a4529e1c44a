"""From short runs to costs: which runs there are, and what each of them says."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhpc.runs.tuning.costs import Costs, Curve, word_of
from rlhpc.runs.tuning.measure import Measured, ShortRuns
from rlhpc.runs.tuning.model import Model
from rlhpc.runs.tuning.shape import Candidate, Place, Shape
from rlhpc.runs.tuning.workload import Knob, Workload
from rlhpc.runtime.errors import RlhpcError, Stopped

#: Runs a name with overrides, on some cores.
Run = Callable[[str, Sequence[str], frozenset[int]], Measured]

#: Plain runs that are further apart say that the machine is not ours alone; then there is one beside every other run.
_STEADY = 0.1


@dataclasses.dataclass
class Calibration:
    """Measures what the phases of a workload cost on this machine.

    Attributes:
        workload: What a step consists of.
        shape: The machines of the configuration.
        configured: The configuration's places and settings.
        runs: Makes short runs.
        say: Tells somebody what goes on.
    """

    workload: Workload
    shape: Shape
    configured: Candidate
    runs: ShortRuns
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        measured_with = dict(word.split("=", 1) for word in self.workload.measured_with)
        plain = {self.workload.stages: 1, self.workload.staleness: 0}
        settings = {
            key: plain[key] if key in measured_with else value for key, value in self.configured.settings.items()
        }
        self.plain = dataclasses.replace(self.configured, settings=settings)
        self.samples: dict[str, list[tuple[float, float]]] = {phase.name: [] for phase in self.workload.phases}
        self.first: list[Measured] = []
        self.refused: dict[str, str] = {}

    def costs(self) -> Costs:
        """Makes all short runs.

        Raises:
            RlhpcError: The configuration itself does not run.
        """
        for name in ("plain", "again"):
            self._add(self._level(self._plain(name), self.first[-1].step_s))
        for part, words in self.workload.smaller.items():
            if (found := self._try(f"part_{part}", words)) is not None:
                self._add(found, part)
        costs = self._without_factors()
        costs = dataclasses.replace(costs, scaling=self._scaling(costs))
        costs = dataclasses.replace(costs, together_s=self._together(costs))
        for knob in self.workload.knobs:
            for value in knob.values:
                if value != self.plain.settings[knob.key]:
                    costs = self._with(costs, knob, value)
        self._plain("last")
        usual = statistics.median(found.step_s for found in self.first)
        return dataclasses.replace(costs.times(usual / self.first[0].step_s), spread=self._spread())

    def _spread(self) -> float:
        """How far runs of the same thing, from the beginning to the end of all this, were apart."""
        steps = [found.step_s for found in self.first]
        return (max(steps) - min(steps)) / statistics.fmean(steps)

    def knobs(self) -> tuple[Knob, ...]:
        """The keys with those of their values that runs did not fail with."""
        return tuple(
            Knob(knob.key, tuple(v for v in knob.values if word_of(knob.key, v) not in self.refused))
            for knob in self.workload.knobs
        )

    # -- runs -----------------------------------------------------------------------------------------------------

    def _run(self, name: str, words: Iterable[str], cores: frozenset[int] = frozenset()) -> Measured:
        found = self.runs.run(name, [*self.workload.measured_with, *words], cores)
        self.say(f"{' '.join(words) or 'as it is'}: {found.step_s:.3g} s a step")
        return found

    def _try(self, name: str, words: Sequence[str], cores: frozenset[int] = frozenset()) -> Measured | None:
        """Makes a run that the costs can do without."""
        try:
            found = self._run(name, words, cores)
            if self._spread() <= _STEADY:
                return found
            before = self.first[-1].step_s  # others are at work here: how much, the runs before and after this one say
            return self._level(found, (before + self._plain("plain").step_s) / 2)
        except Stopped:
            raise
        except RlhpcError as error:
            self.refused[" ".join(words)] = str(error).splitlines()[0]
            self.say(f"{' '.join(words)}: left out: {error}")
            return None

    def _plain(self, name: str) -> Measured:
        """Runs the configuration as it is."""
        self.first.append(self._run(name, ()))
        return self.first[-1]

    def _level(self, found: Measured, now: float) -> Measured:
        """A run as it would have been at first, from the seconds of a plain step at its time."""
        drift = now / self.first[0].step_s
        metrics = {name: value / drift if name.startswith("time/") else value for name, value in found.metrics.items()}
        return dataclasses.replace(found, step_s=found.step_s / drift, metrics=metrics)

    def _add(self, found: Measured, part: int = 1) -> None:
        for phase in self.workload.phases:
            share = 1.0 / self.plain.ranks(phase.group) / part
            self.samples[phase.name].append((share, found.metrics.get(phase.metric, 0.0)))

    # -- what they say --------------------------------------------------------------------------------------------

    def _without_factors(self) -> Costs:
        """Curves, what is in no phase, threads and memory."""
        curves = {name: Curve.through(samples) for name, samples in self.samples.items()}
        plain = [self._level(found, found.step_s) for found in self.first]
        turns = [phase for phase in self.workload.phases if phase.turn]
        hops = [
            found.metrics.get(self.workload.turns, 0.0) - sum(found.metrics.get(phase.metric, 0.0) for phase in turns)
            for found in plain
        ]
        costs = Costs(
            curves,
            hop_s=max(0.0, statistics.median(hops)) if turns else 0.0,
            threads=self._threads(),
            memory=_most(found.memory for found in self.first),
            device_memory=_most(found.device_memory for found in self.first),
            spread=self._spread(),
        )
        known = self._model(costs).predict(self.plain).step_s
        return dataclasses.replace(costs, overhead_s=max(0.0, self.first[0].step_s - known))

    def _model(self, costs: Costs) -> Model:
        return Model(self.workload, costs, self.shape)

    def _threads(self) -> dict[str, int]:
        """Threads of a rank of each group, as the runtime gives them."""
        on_node: dict[int, int] = {}
        nodes: dict[str, set[int]] = {}
        for group, place in self.plain.places.items():
            for ranks in place.processes:
                node = self.shape.pools[place.label].resources[ranks[0]][0]
                on_node[node] = on_node.get(node, 0) + 1
                nodes.setdefault(group, set()).add(node)
        return {
            group: min(max(1, self.shape.cores[node] // on_node[node]) for node in at) for group, at in nodes.items()
        }

    def _scaling(self, costs: Costs) -> dict[str, float]:
        """How the phases speed up with threads: one run in which each rank has one."""
        ranks = sum(len(place.processes) for place in self.plain.places.values())
        granted = sorted(os.sched_getaffinity(0))
        if max(costs.threads.values()) < 2 or len(self.shape.cores) > 1 or "SLURM_JOB_ID" in os.environ:
            return {}
        found = self._try("one_thread", (), frozenset(granted[: max(1, ranks)]))
        if found is None:
            return {}
        scaling = {}
        for phase in self.workload.phases:
            before = costs.curves[phase.name].at(1.0 / self.plain.ranks(phase.group))
            now, threads = found.metrics.get(phase.metric, 0.0), costs.threads[phase.group]
            if before > 0 and now > before and threads > 1:
                scaling[phase.name] = min(1.0, math.log(now / before) / math.log(threads))
        return scaling

    def _together(self, costs: Costs) -> dict[str, float]:
        """What phases take longer on two ranks than one with half of the work: one run with twice as many, if they fit."""
        places = {}
        for group, place in self.plain.places.items():
            pool, count = self.shape.pools[place.label], len(place.resources)
            if group not in self.workload.groups or len(place.processes) != 1 or place.processes[0] != (0,):
                continue
            node = pool.resources[0][0]
            if pool.by_node and self.shape.cores[node] > 1:
                places[group] = Place.of(place.label, 0, 1, 2)
            elif not pool.by_node and len(pool.resources) >= 2 * count:
                places[group] = Place.of(place.label, 0, 2)
        if not places:
            return {}
        doubled = dataclasses.replace(self.plain, places={**self.plain.places, **places})
        found = self._try("two_ranks", [word_of("cluster.component_placement", doubled.placement())])
        if found is None:
            return {}
        expected = self._model(costs).predict(doubled).phases
        return {
            phase.name: max(0.0, found.metrics.get(phase.metric, 0.0) - expected[phase.name])
            for phase in self.workload.phases
            if phase.group in places
        }

    def _with(self, costs: Costs, knob: Knob, value: Any) -> Costs:
        """The costs with what a value of a key changes."""
        word = word_of(knob.key, value)
        found = self._try(f"{knob.key.rpartition('.')[2]}_{value}", [word])
        if found is None:
            return costs
        changed = dataclasses.replace(self.plain, settings={**self.plain.settings, knob.key: value})
        expected = self._model(costs).predict(changed).phases
        factors = {
            phase.name: found.metrics[phase.metric] / expected[phase.name]
            for phase in self.workload.phases
            if expected[phase.name] > 0 and found.metrics.get(phase.metric, 0.0) > 0 and self._is_work(knob, phase.name)
        }
        costs = dataclasses.replace(costs, factors={**costs.factors, word: factors})
        extra = found.step_s - self._model(costs).predict(changed).step_s
        return dataclasses.replace(costs, extra_s={**costs.extra_s, word: extra})

    def _is_work(self, knob: Knob, name: str) -> bool:
        """Whether a phase's metric still says how long its group is at work: where steps overlap, waits say something else."""
        phase = next(phase for phase in self.workload.phases if phase.name == name)
        return knob.key != self.workload.staleness or not phase.waits


def _most(found: Iterable[dict[str, float] | Any]) -> dict[str, float]:
    """Group → the most of all runs."""
    most: dict[str, float] = {}
    for one in found:
        for group, held in one.items():
            most[group] = max(most.get(group, 0.0), held)
    return most
