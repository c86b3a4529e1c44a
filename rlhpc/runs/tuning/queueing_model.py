"""Prediction of the step time of a placement by a closed queueing network with the bounds of Denning and Buzen (1978).

The stations are the groups and the machines that they share. `K` customers circulate: the stages of a rollout between policy
and simulators, and the concurrent steps (staleness + 1) between rollout and training. A round takes at least
`max(D / K, D_max)`, where `D` is the demand of one customer at all stations and `D_max` is the demand of all customers at the
busiest station. The model uses this bound as the prediction, because service times are steady. An all-reduce among `n` ranks
takes `2 (n - 1) / n` times as long as among two ranks (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlhpc.runs.tuning.costs import Costs, word_of
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape
from rlhpc.runs.tuning.workload import Phase, Workload


@dataclass(frozen=True)
class Prediction:
    """Predicted step time and memory of a candidate.

    Attributes:
        step_s: Seconds of a step.
        idle: Idle share of the accelerators' time, or of the cores' time without accelerators.
        memory: Bytes of host memory on the fullest node.
        device_memory: Bytes on the fullest accelerator.
        phases: Phase → seconds per step.
    """

    step_s: float
    idle: float
    memory: float
    device_memory: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class QueueingModel:
    """Model of the step time of a workload.

    Attributes:
        workload: Workload with the phases of a step.
        costs: Measured costs.
        shape: Machines of the run.
    """

    workload: Workload
    costs: Costs
    shape: ClusterShape

    def lower_bound_s(self, candidate: Candidate) -> float:
        """Returns a lower bound of the seconds of a step, for any location of the candidate's ranks."""
        num_cores, placements = max(self.shape.cores), candidate.placements
        ranks_per_resource = {
            group: len(placement.processes) // max(1, len(placement.resources))
            for group, placement in placements.items()
        }
        threads = {group: max(1, num_cores // max(1, ranks_per_resource[group])) for group in placements}
        return self._step_period(candidate, self._predict_phase_seconds(candidate, threads), {})

    def predict(self, candidate: Candidate) -> Prediction:
        """Predicts step time, idle share and memory of a candidate."""
        threads = self.threads(candidate)
        phase_s = self._predict_phase_seconds(candidate, threads)
        loads = self._predict_loads(candidate, phase_s, threads)
        seconds_by_phase = {
            phase.name: phase_s[phase.name] * self._slowdown(candidate, phase, threads)
            for phase in self.workload.phases
        }
        step_s = self._step_period(candidate, seconds_by_phase, loads)
        host, device = self._memory(candidate)
        return Prediction(step_s, self._predict_idle_share(loads, step_s), host, device, seconds_by_phase)

    def threads(self, candidate: Candidate) -> dict[str, int]:
        """Returns the number of threads of a rank in each group, as the runtime assigns them."""
        ranks_by_node = self._count_ranks_by_node(candidate, tuple(candidate.placements))
        return {
            group: min(
                max(1, self.shape.cores[node] // ranks_by_node[node])
                for node in self._count_ranks_by_node(candidate, (group,))
            )
            for group in candidate.placements
        }

    # -- seconds of the phases ------------------------------------------------------------------------------------

    def _predict_phase_seconds(self, candidate: Candidate, threads: Mapping[str, int]) -> dict[str, float]:
        """Returns the seconds per step of each phase if each thread of a rank has a core that no other group uses."""
        costs = self.costs
        setting_factors = [
            costs.factors.get(word_of(key, setting_value), {}) for key, setting_value in candidate.settings.items()
        ]
        seconds_by_phase = {}
        for phase in self.workload.phases:
            ranks, name = candidate.ranks(phase.group), phase.name
            stages = self.stages(candidate) if phase.turn else 1
            phase_s = stages * costs.curves[name].seconds_at(1.0 / ranks / stages)
            phase_s += costs.together_s.get(name, 0.0) * 2.0 * (ranks - 1) / ranks
            phase_s *= math.prod(factors_by_phase.get(name, 1.0) for factors_by_phase in setting_factors)
            measured_threads, candidate_threads = costs.threads.get(phase.group, 1), threads[phase.group]
            seconds_by_phase[name] = phase_s * (measured_threads / candidate_threads) ** costs.scaling.get(name, 0.0)
        return seconds_by_phase

    def _slowdown(self, candidate: Candidate, phase: Phase, threads: Mapping[str, int]) -> float:
        """Returns the slow-down of a phase if its ranks on a node have more threads than the node has cores; 1 otherwise."""
        if not self._is_on_cores(candidate, phase):
            return 1.0
        ranks_by_node = self._count_ranks_by_node(candidate, (phase.group,))
        return max(
            1.0,
            *(num_ranks * threads[phase.group] / self.shape.cores[node] for node, num_ranks in ranks_by_node.items()),
        )

    def stages(self, candidate: Candidate) -> int:
        """Returns the number of stages in which alternating phases overlap."""
        return int(candidate.settings.get(self.workload.stages) or 1)

    def staleness(self, candidate: Candidate) -> int:
        """Returns the maximum staleness of the rollout in steps."""
        return int(candidate.settings.get(self.workload.staleness) or 0)

    # -- a step ---------------------------------------------------------------------------------------------------

    def _step_period(
        self, candidate: Candidate, seconds_by_phase: Mapping[str, float], loads: Mapping[object, float]
    ) -> float:
        busy_by_station: dict[str, float] = collections.defaultdict(float)
        turns = {phase.name: seconds_by_phase[phase.name] for phase in self.workload.phases if phase.turn}
        chain_s = previous_s = 0.0
        if turns:
            concurrent_stages = self.stages(candidate)
            chain_s = max(sum(turns.values()) / concurrent_stages + self.costs.hop_s, max(turns.values()))
            busy_by_station["turns"] = chain_s
        for phase in self.workload.phases:
            if phase.turn:
                continue
            phase_s = seconds_by_phase[phase.name]
            busy_by_station[phase.group] += phase_s
            if phase.streams and previous_s:
                pieces_per_rank = max(
                    1, math.ceil(self.workload.pieces / candidate.ranks(self.workload.phases[0].group))
                )
                phase_s = (
                    max(previous_s + phase_s / pieces_per_rank, phase_s + previous_s / pieces_per_rank) - previous_s
                )
            chain_s += phase_s
            previous_s = seconds_by_phase[phase.name]
        overhead_s = self.costs.overhead_s
        last_group = self.workload.phases[-1].group  # the driver's work delays the last group's next step
        busy_by_station[last_group] += overhead_s
        concurrent_steps = self.staleness(candidate) + 1
        extra_s = sum(
            self.costs.extra_s.get(word_of(key, setting_value), 0.0)
            for key, setting_value in candidate.settings.items()
        )
        period_s = max((chain_s + overhead_s) / concurrent_steps, *busy_by_station.values(), *loads.values())
        return max(period_s + extra_s, period_s / 2)  # limits the correction by measurements of another placement

    # -- machines -------------------------------------------------------------------------------------------------

    def _is_on_cores(self, candidate: Candidate, phase: Phase) -> bool:
        return phase.on_cores or self.shape.pools[candidate.placements[phase.group].label].by_node

    def _count_ranks_by_node(self, candidate: Candidate, groups: tuple[str, ...]) -> dict[int, int]:
        """Returns the number of ranks of these groups on each node."""
        return collections.Counter(
            node for group in groups for node in self.shape.nodes_of(candidate.placements[group])
        )

    def _predict_loads(
        self, candidate: Candidate, seconds_by_phase: Mapping[str, float], threads: Mapping[str, int]
    ) -> dict[object, float]:
        """Returns the busy seconds per step: accelerator → seconds, and node → seconds of all its cores."""
        loads: dict[object, float] = collections.defaultdict(float)
        for phase in self.workload.phases:
            by_cores = self._is_on_cores(candidate, phase)
            for resources in self.shape.resources_of(candidate.placements[phase.group]):
                node, _ = resources[0]
                width = min(threads[phase.group], self.shape.cores[node]) if by_cores else 1
                loads[node] += seconds_by_phase[phase.name] * width / self.shape.cores[node]
                for resource in () if by_cores else resources:
                    loads[resource] += seconds_by_phase[phase.name]
        return loads

    def _predict_idle_share(self, loads: Mapping[object, float], step: float) -> float:
        if self.shape.accelerators:
            busy_s = sum(load_s for resource, load_s in loads.items() if isinstance(resource, tuple))
            return max(0.0, 1.0 - busy_s / (step * self.shape.accelerators))
        cores = self.shape.cores
        busy_s = sum(load_s * cores[resource] for resource, load_s in loads.items() if isinstance(resource, int))
        return max(0.0, 1.0 - busy_s / (step * sum(cores)))

    def _memory(self, candidate: Candidate) -> tuple[float, float]:
        """Returns (bytes on the fullest node, bytes on the fullest accelerator)."""
        host_bytes: dict[int, float] = collections.defaultdict(float)
        device_bytes: dict[tuple[int, int], float] = collections.defaultdict(float)
        for group, placement in candidate.placements.items():
            for resources in self.shape.resources_of(placement):
                host_bytes[resources[0][0]] += self.costs.memory.get(group, 0.0)
                for resource in resources:
                    device_bytes[resource] += self.costs.device_memory.get(group, 0.0) / len(resources)
        return max(host_bytes.values(), default=0.0), max(device_bytes.values(), default=0.0)

    def fits(self, prediction: Prediction) -> bool:
        """Returns whether the predicted memory fits the machines; memory of unknown size counts as sufficient."""
        return (not self.shape.memory or prediction.memory <= self.shape.memory) and (
            not self.shape.device_memory or prediction.device_memory <= self.shape.device_memory
        )
