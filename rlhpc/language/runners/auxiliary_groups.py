"""Auxiliary worker groups of the GRPO loop: agents, scorers and raters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.scoring.groups import ENGINE, raters, scoring_groups
from rlhpc.language.training.prompt_dispatch import EPISODES, TICKETS, PromptMap, channel_to
from rlhpc.runs.replicas import CompletedCall, Replicas
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.rpc import Handle
from rlhpc.runtime.worker_group import WorkerGroup


class Agents:
    """Elastic group of agent workers: other ranks restart the episodes of a lost one.

    Args:
        group: Launched group of `AgentWorker`; None if the rollout ranks run agents themselves, or the run has no agents.
        prompts: Map with the names of the groups.
        timeout: Seconds of a call.
        restarts: Returns the number of restarts that are allowed.
    """

    def __init__(
        self, group: WorkerGroup | None, prompts: PromptMap, timeout: float, restarts: Callable[[], int]
    ) -> None:
        self._group = group
        self._prompts = prompts
        self._timeout = timeout
        self._replicas: Replicas | None = None
        if group is not None:
            cost = "other ranks begin its episodes again, and nothing else is lost"
            self._replicas = Replicas(group, self._open, self._join, restarts, cost)

    @property
    def group(self) -> WorkerGroup:
        """The worker group; only in a run that has one."""
        assert self._group is not None
        return self._group

    def _open(self, *ranks: int) -> Handle:
        handle: Handle = self.group.execute_on(*ranks).init_worker(self._prompts)
        return handle

    def _join(self, *ranks: int) -> None:
        self.group.execute_on(*ranks).connect().wait(self._timeout)

    def open(self) -> list[Handle]:
        """Calls its ranks to start the processes that run agents."""
        return [] if self._group is None else [self._open(*self.group.present)]

    def connect(self) -> list[Handle]:
        """Calls its ranks to connect to the queue, which exists by now."""
        return [] if self._group is None else [self.group.connect()]

    def create_queue(self) -> None:
        """Creates the queue of episodes; drops an earlier one."""
        if self._group is not None:
            Channel.create(EPISODES)

    def begin(self) -> None:
        """Ends all episodes in flight; all ranks take part."""
        if self._replicas is not None:
            self.group.begin().wait(self._timeout)
            self.create_queue()
            self._replicas.begin()

    def tend(self) -> None:
        """Handles joined and lost ranks before a step (`Replicas.tend`)."""
        if self._replicas is not None:
            self._replicas.tend()

    def serve(self, phase: str) -> Handle | CompletedCall:
        """Calls its ranks to run episodes until a phase ends."""
        if self._replicas is None:
            return CompletedCall()
        handle: Handle = self._replicas.of_step().serve(phase)
        return handle

    def end(self, phase: str) -> None:
        """Tells its ranks that a phase has ended."""
        for rank in self._replicas.present() if self._replicas is not None else ():
            p2p.post({"end": phase}, TICKETS, self.group.name, rank)


class AuxiliaryGroups:
    """Worker groups that score tokens or rate answers, by name.

    Args:
        cfg: The run's configuration.
        groups: Launched groups of `ScoringWorker` and `RatingWorker`.

    Attributes:
        groups: All groups.
        rating: Groups that rate answers.
        scoring: Groups that score tokens.
    """

    def __init__(self, cfg: GrpoConfig, groups: Mapping[str, WorkerGroup]) -> None:
        self.groups = dict(groups)
        rating = raters(cfg)
        self.rating = {name: group for name, group in groups.items() if name in rating}
        self.scoring = {name: group for name, group in groups.items() if name not in rating}
        group_configs = scoring_groups(cfg)
        self._engines = [name for name in self.scoring if group_configs[name].scorer == ENGINE]
        self._offloaded = set[str]()

    def open_engines(self, prompts: PromptMap, timeout: float) -> None:
        """Starts the engines of the groups that score tokens, one group after the other, in a colocated run, and has each
        free its accelerators at once. While it starts, an engine counts memory that other processes allocate or free as its
        own."""
        for name in self._engines:
            self.scoring[name].init_worker(prompts).wait(timeout)
            self.scoring[name].offload().wait(timeout)
            self._offloaded.add(name)

    def open(self, prompts: PromptMap) -> list[Handle]:
        """Calls the remaining groups to load their scorers."""
        return [group.init_worker(prompts) for name, group in self.groups.items() if name not in self._offloaded]

    def rate(self, phase: str) -> dict[str, Handle]:
        """Calls the raters to rate answers until the phase ends."""
        return {name: group.serve(phase) for name, group in self.rating.items()}

    def end(self, phase: str) -> None:
        """Tells the raters that a phase has ended."""
        for name, group in self.rating.items():
            requests = Channel.connect(channel_to(name))
            for rank in range(group.world_size):
                requests.put({"end": phase}, key=str(rank))

    def offload(self, timeout: float) -> None:
        """Frees the accelerators of the groups that score tokens for the other groups."""
        for handle in [group.offload() for name, group in self.scoring.items() if name not in self._offloaded]:
            handle.wait(timeout)


def served_metrics(answers: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, float]:
    """Returns metrics from the results of each scoring group's ranks: seconds of the slowest rank, throughput of all ranks,
    and the sums of their counts."""
    row: dict[str, float] = {}
    for name, results in answers.items():
        busy = max(rank["busy_s"] for rank in results)
        row[f"time/{name}_s"] = busy
        unit = "answers" if "answers" in results[0] else "tokens"
        row[f"time/{name}_{unit}_per_s"] = sum(rank[unit] for rank in results) / max(busy, 1e-9)
        for count_key in (key for key in results[0] if key.startswith("count/")):
            count_name = count_key.removeprefix("count/")
            metric = f"time/{name}_{count_name[5:]}" if count_name.startswith("time/") else f"{name}/{count_name}"
            row[metric] = sum(rank[count_key] for rank in results)
    return row
