"""Exact search for the best placement and settings: best-first, by a bound that does not depend on the location of ranks.

The search first enumerates the numbers of ranks and the settings. For each combination, the model gives a lower bound of the
step time over all layouts on the machines. The search visits the combinations in ascending order of their bounds and predicts
all layouts of each. It stops when the bound exceeds the best predictions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlhpc.runs.tuning.queueing_model import Prediction, QueueingModel
from rlhpc.runs.tuning.shapes import Candidate, GroupPlacement, Pool

#: Maximum size of a pool in which the search tries every number of resources and every offset. In larger pools, it tries
#: divisors and powers of two, and offsets at the ends of other groups.
_MAX_EXHAUSTIVE = 8
#: Size of a group: (number of resources, ranks on each resource).
Size = tuple[int, int]


@dataclass(frozen=True)
class RankedCandidate:
    """Candidate with its prediction."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True)
class Space:
    """Search space of candidates.

    Attributes:
        model: Model with workload, costs and machines.
        configured: Placement and settings of the configuration. Groups without a phase keep this placement.
    """

    model: QueueingModel
    configured: Candidate

    def settings(self) -> Iterator[dict[str, Any]]:
        """Yields all combinations of the keys' values."""
        knobs = self.model.workload.knobs
        for knob_values in itertools.product(*(knob.values for knob in knobs)):
            yield {knob.key: knob_value for knob, knob_value in zip(knobs, knob_values, strict=True)}

    def sizes(self, group: str) -> list[Size]:
        """Returns all allowed sizes of a group."""
        pool = self.pool(group)
        num_resources = len(pool.resources)
        resource_counts = [
            n
            for n in range(1, num_resources + 1)
            if num_resources <= _MAX_EXHAUSTIVE or not num_resources % n or n & (n - 1) == 0
        ]
        divides = self.model.workload.divides.get(group, 0)
        group_sizes = [
            (num_resources_used, ranks_per_resource)
            for num_resources_used in resource_counts
            for ranks_per_resource in self._list_ranks_per_resource(group, pool)
        ]
        return [group_size for group_size in group_sizes if not divides or divides % math.prod(group_size) == 0]

    def _list_ranks_per_resource(self, group: str, pool: Pool) -> list[int]:
        resources_per_node = max(
            sum(node == other_node for other_node, _ in pool.resources) for node, _ in pool.resources
        )
        num_cores = max(1, min(self.model.shape.cores[node] for node, _ in pool.resources) // resources_per_node)
        if not pool.by_node and group not in self.model.workload.several:
            return [1]
        return [
            n for n in range(1, num_cores + 1) if num_cores <= _MAX_EXHAUSTIVE or not num_cores % n or n & (n - 1) == 0
        ]

    def pool(self, group: str) -> Pool:
        """Returns the pool of resources on which a group is placed."""
        return self.model.shape.pools[self.configured.placements[group].label]

    def iter_sizes(self) -> Iterator[Candidate]:
        """Yields a candidate for every combination of sizes and settings; each group lies at the beginning of its pool."""
        groups = self.model.workload.groups
        settings = list(self.settings())
        for size_choices in itertools.product(*(self.sizes(group) for group in groups)):
            placements = {
                group: GroupPlacement.from_range(self.pool(group).label, 0, num_resources, ranks_per_resource)
                for group, (num_resources, ranks_per_resource) in zip(groups, size_choices, strict=True)
            }
            for chosen_settings in settings:
                yield Candidate({**self.configured.placements, **placements}, chosen_settings)

    def iter_layouts(self, base_candidate: Candidate) -> Iterator[Candidate]:
        """Yields the candidates with the same numbers of ranks, at every offset of each group in its pool."""
        groups = self.model.workload.groups
        group_starts: list[list[int]] = []
        for group in groups:
            num_pool_resources, num_group_resources = (
                len(self.pool(group).resources),
                len(base_candidate.placements[group].resources),
            )
            offsets = range(num_pool_resources - num_group_resources + 1)
            group_starts.append(
                [*offsets]
                if num_pool_resources <= _MAX_EXHAUSTIVE
                else [o for o in offsets if o in self._offsets(base_candidate, group)]
            )
        for first_resources in itertools.product(*group_starts):
            placements = {}
            for group, first_resource in zip(groups, first_resources, strict=True):
                placement = base_candidate.placements[group]
                num_group_resources = len(placement.resources)
                placements[group] = GroupPlacement.from_range(
                    placement.label,
                    first_resource,
                    num_group_resources,
                    len(placement.processes) // num_group_resources,
                )
            yield Candidate({**base_candidate.placements, **placements}, base_candidate.settings)

    def _offsets(self, base: Candidate, group: str) -> set[int]:
        """Returns the offsets to try for a group in a large pool: the beginning of the pool, after any other groups, and the
        last possible offset.
        """
        label = base.placements[group].label
        other_counts = [
            len(placement.resources)
            for name, placement in base.placements.items()
            if name != group and placement.label == label
        ]
        sums = {
            sum(combination)
            for n in range(len(other_counts) + 1)
            for combination in itertools.combinations(other_counts, n)
        }
        return sums | {len(self.pool(group).resources) - len(base.placements[group].resources)}


def order(
    ranked_candidate: RankedCandidate, configured_candidate: Candidate
) -> tuple[float, float, float, int, int, str]:
    """Returns the sort key of a candidate: shortest step first, then least memory, fewest ranks and fewest changes."""
    candidate, prediction = ranked_candidate.candidate, ranked_candidate.prediction
    num_ranks = sum(len(placement.processes) for placement in candidate.placements.values())
    num_changes = sum(
        configured_candidate.settings.get(key) != setting_value for key, setting_value in candidate.settings.items()
    )
    num_changes += sum(
        configured_candidate.placements[group].processes != placement.processes
        for group, placement in candidate.placements.items()
    )
    return (
        round(prediction.step_s, 9), prediction.device_memory, prediction.memory, num_ranks, num_changes,
        "".join(placement.text for placement in candidate.placements.values()),
    )  # fmt: skip


def _make_equivalence_key(ranked_candidate: RankedCandidate) -> object:
    """Returns a key that is equal for equivalent candidates: the same sizes, mode and predicted step time."""
    group_sizes = tuple(
        (group, len(placement.resources), len(placement.processes))
        for group, placement in ranked_candidate.candidate.placements.items()
    )
    return group_sizes, ranked_candidate.candidate.mode, round(ranked_candidate.prediction.step_s, 9)


def search(
    space: Space, count: int, is_allowed: Callable[[Candidate], bool] = lambda candidate: True
) -> list[RankedCandidate]:
    """Returns the best candidates, the best first.

    Among candidates that differ only in the location of ranks, returns the best of each mode. Among candidates that differ
    only in settings without an effect, returns the candidate with the fewest changes.

    Args:
        space: Search space.
        count: Maximum number of candidates to return.
        is_allowed: Returns whether a candidate is allowed. It may be slow, so it is called only for candidates to return.
    """
    model, best_by_key = space.model, dict[object, RankedCandidate]()
    forbidden_keys: set[object] = set()

    def find_worst_step_s() -> float:
        rows = sort_best_first() if len(best_by_key) >= count else []
        return rows[count - 1].prediction.step_s if len(rows) >= count else math.inf

    def sort_best_first() -> list[RankedCandidate]:
        rows: dict[object, RankedCandidate] = {}
        for entry in sorted(best_by_key.values(), key=lambda entry: order(entry, space.configured)):
            rows.setdefault(_make_equivalence_key(entry), entry)
        return list(rows.values())

    bounded_candidates = sorted(
        (
            (model.lower_bound_s(counted_candidate), index, counted_candidate)
            for index, counted_candidate in enumerate(space.iter_sizes())
        ),
        key=lambda row: row[:2],
    )
    for lower_bound_s, index, base_candidate in bounded_candidates:
        worst_s = find_worst_step_s()
        if lower_bound_s > worst_s + 1e-9:
            break
        for candidate in space.iter_layouts(base_candidate):
            key = (index, candidate.mode)
            if key in forbidden_keys:
                continue
            ranked_candidate = RankedCandidate(candidate, model.predict(candidate))
            if ranked_candidate.prediction.step_s > worst_s + 1e-9 or not model.fits(ranked_candidate.prediction):
                continue
            if key in best_by_key:
                best_by_key[key] = min(
                    best_by_key[key], ranked_candidate, key=lambda entry: order(entry, space.configured)
                )
            elif is_allowed(candidate):
                best_by_key[key] = ranked_candidate
            else:
                forbidden_keys.add(key)
    return sort_best_first()[:count]
