"""The groups beside actor and rollout, as the loop drives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhpc.language.config import GrpoConfig
from rlhpc.language.roles.prompts import PromptMap
from rlhpc.language.scoring.groups import ENGINE, raters, scoring_groups
from rlhpc.runtime.group import WorkerGroup
from rlhpc.runtime.rpc import Handle


class Others:
    """The groups that score, by name.

    Args:
        cfg: Configuration.
        groups: Launched groups of `ScoringWorker` and `RatingWorker`.

    Attributes:
        groups: All of them.
        rating: Those that rate answers.
        scoring: Those that score tokens.
    """

    def __init__(self, cfg: GrpoConfig, groups: Mapping[str, WorkerGroup]) -> None:
        self.groups = dict(groups)
        rating = raters(cfg)
        self.rating = {name: group for name, group in groups.items() if name in rating}
        self.scoring = {name: group for name, group in groups.items() if name not in rating}
        known = scoring_groups(cfg)
        self._engines = [name for name in self.scoring if known[name].scorer == ENGINE]
        self._resting = set[str]()

    def open_engines(self, prompts: PromptMap, timeout: float) -> None:
        """Where roles take turns: has those that score tokens by an engine start it, one group after the other, and give their
        accelerators away at once. An engine takes for its own what others allocate or free while it starts."""
        for name in self._engines:
            self.scoring[name].init_worker(prompts).wait(timeout)
            self.scoring[name].offload().wait(timeout)
            self._resting.add(name)

    def open(self, prompts: PromptMap) -> list[Handle]:
        """Has them, or the rest of them, load what they score with."""
        return [group.init_worker(prompts) for name, group in self.groups.items() if name not in self._resting]

    def rate(self, phase: str) -> dict[str, Handle]:
        """Has answers rated until the rollout ranks say that they ask no more in a phase."""
        return {name: group.serve(phase) for name, group in self.rating.items()}

    def rest(self, timeout: float) -> None:
        """Those that score tokens give their accelerators to the other roles."""
        for handle in [group.offload() for name, group in self.scoring.items() if name not in self._resting]:
            handle.wait(timeout)


class Made:
    """A step's answers under way.

    Args:
        step: Which.
        generated: What the rollout ranks return.
        rated: What the groups return that rate answers.
        scoring: The groups that score tokens.
        wait: They score once the engines have given the accelerators away (`score`), rather than as answers come.
    """

    def __init__(
        self,
        step: int,
        generated: Handle,
        rated: Mapping[str, Handle],
        scoring: Mapping[str, WorkerGroup],
        *,
        wait: bool,
    ) -> None:
        self.step, self._generated, self._rated, self._scoring = step, generated, rated, scoring
        self._scored = {} if wait else {name: group.serve(step) for name, group in scoring.items()}

    def wait(self, timeout: float) -> list[dict[str, float]]:
        """What the rollout ranks return."""
        found: list[dict[str, float]] = self._generated.wait(timeout)
        return found

    def score(self, timeout: float) -> None:
        """Where roles take turns: the groups score one after the other."""
        for name, group in self._scoring.items():
            group.reload().wait(timeout)
            self._scored[name] = group.serve(self.step)
            self._scored[name].wait(timeout)
            group.offload().wait(timeout)

    def served(self, timeout: float) -> dict[str, float]:
        """Metrics of the groups: how long the slowest rank of each worked, and how much it did a second."""
        row: dict[str, float] = {}
        for name, handle in {**self._rated, **self._scored}.items():
            found: Sequence[dict[str, float]] = handle.wait(timeout)
            busy = max(rank["busy_s"] for rank in found)
            row[f"time/{name}_s"] = busy
            unit = "answers" if "answers" in found[0] else "tokens"
            row[f"time/{name}_{unit}_per_s"] = sum(rank[unit] for rank in found) / max(busy, 1e-9)
            for counted in (key for key in found[0] if key.startswith("count/")):
                of = counted.removeprefix("count/")
                metric = f"time/{name}_{of[5:]}" if of.startswith("time/") else f"{name}/{of}"
                row[metric] = sum(rank[counted] for rank in found)
        return row
