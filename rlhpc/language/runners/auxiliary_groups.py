"""Auxiliary worker groups of the GRPO loop: agents, scorers and raters; and the rollout of one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rollout.prompt_queue import PromptTracker
from rlhpc.language.scoring.groups import CRITIC, ENGINE, raters, scoring_groups
from rlhpc.language.training.prompt_dispatch import EPISODES, TICKETS, PromptMap, channel_to, training_phase
from rlhpc.runs.replicas import CompletedCall, Replicas
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.errors import DeadlineExceeded
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


#: Seconds to wait for deliveries before the driver checks whether prompts were returned to the queue.
_DELIVERY_S = 0.2


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


class StepRollout:
    """Rollout of one step in flight, with its scoring and rating.

    Args:
        step: Step of the run.
        ledger: Tracker of the step's prompts.
        generate: Calls the rollout ranks to lease prompts of the step until the queue is empty.
        auxiliary: Groups that score tokens or rate answers.
        critic: Group of the critic, if the run has one.
        agents: Group that runs agents.
        wait: Whether tokens are scored once the engines have freed the accelerators (`score`), rather than on arrival.
        learning: Groups whose weights change from step to step. They score once the previous step has ended (`serve`): a rank
            runs one call after the other, and that step still has to train, save or send them weights.
    """

    def __init__(
        self,
        step: int,
        ledger: PromptTracker,
        generate: Callable[[int], Handle],
        auxiliary: AuxiliaryGroups,
        critic: WorkerGroup | None,
        agents: Agents,
        *,
        wait: bool,
        learning: Container[str] = (),
    ) -> None:
        self.step = step
        self._ledger = ledger
        self._generate = generate
        self._auxiliary = auxiliary
        self._agents, self._run = agents, agents.serve(training_phase(step))
        self._generated = generate(step)
        self._rated = auxiliary.rate(training_phase(step))
        self._scoring = {**({CRITIC: critic} if critic else {}), **auxiliary.scoring}
        self._wait = wait
        self._scored = dict[str, Handle]()
        self._serve(name for name in self._scoring if name not in learning)
        self._sums: list[dict[str, float]] | None = None

    def serve(self) -> None:
        """Calls the groups to score that now have the weights to score the step with."""
        self._serve(name for name in self._scoring if name not in self._scored)

    def _serve(self, names: Iterable[str]) -> None:
        if not self._wait:
            self._scored |= {name: self._scoring[name].serve(self.step) for name in names}

    def wait(self, timeout: float) -> list[dict[str, float]]:
        """Waits for the rollout; returns the sums over the step's samples and the results of the rollout ranks.

        Raises:
            DeadlineExceeded: Answers were not delivered in time; the message names the prompts.
        """
        if self._sums is not None:
            return self._sums
        results: list[dict[str, float]] = self._generated.wait(timeout)
        deadline = time.monotonic() + timeout
        while not self._ledger.wait_complete(self.step, _DELIVERY_S):
            if self._ledger.returned(self.step):  # by a lost rank, after the queue was empty for the other ranks
                results += self._generate(self.step).wait(timeout)
            elif time.monotonic() > deadline:
                missing = self._ledger.missing(self.step)[:8]
                raise DeadlineExceeded(
                    f"step {self.step}: the answers to prompts {missing} were not delivered within runner.step_timeout_s "
                    f"({timeout:g} s)"
                )
        self._auxiliary.end(training_phase(self.step))
        self._agents.end(training_phase(self.step))
        for (
            name,
            group,
        ) in self._scoring.items():  # a lost group that was sampled again has also arrived by now
            scored = Channel.connect(channel_to(name))
            for rank in range(group.world_size):
                scored.put({"end": self.step}, key=str(rank))
        self._sums = [self._ledger.close(self.step), *results]
        return self._sums

    def score(self, timeout: float) -> None:
        """Calls the groups to score, one after the other, in a colocated run."""
        for name, group in self._scoring.items():
            group.reload().wait(timeout)
            self._scored[name] = group.serve(self.step)
            self._scored[name].wait(timeout)
            group.offload().wait(timeout)

    def served(self, timeout: float) -> dict[str, float]:
        """Returns the metrics of the groups (`served_metrics`)."""
        row = served_metrics({name: handle.wait(timeout) for name, handle in {**self._rated, **self._scored}.items()})
        run = self._run.wait(timeout)
        return {**row, **({"time/agent_s": max(rank["busy_s"] for rank in run)} if run else {})}


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
