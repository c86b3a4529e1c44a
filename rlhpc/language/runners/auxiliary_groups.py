"""The groups beside actor and rollout, as the loop drives them."""

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
    """Ranks that come and go: what a lost one had under way, others begin again.

    Args:
        group: The launched group of `AgentWorker`; None if engines' ranks run agents themselves, or there are none.
        prompts: Names the groups.
        timeout: Seconds of a call.
        restarts: How often ranks may be started again.
    """

    def __init__(
        self, group: WorkerGroup | None, prompts: PromptMap, timeout: float, restarts: Callable[[], int]
    ) -> None:
        self._there, self._prompts, self._timeout = group, prompts, timeout
        self._replicas: Replicas | None = None
        if group is not None:
            cost = "other ranks begin its episodes again, and nothing else is lost"
            self._replicas = Replicas(group, self._open, self._join, restarts, cost)

    @property
    def group(self) -> WorkerGroup:
        """The group; only where there is one."""
        assert self._there is not None
        return self._there

    def _open(self, *ranks: int) -> Handle:
        handle: Handle = self.group.execute_on(*ranks).init_worker(self._prompts)
        return handle

    def _join(self, *ranks: int) -> None:
        self.group.execute_on(*ranks).connect().wait(self._timeout)

    def open(self) -> list[Handle]:
        """Has its ranks start what runs agents."""
        return [] if self._there is None else [self._open(*self.group.present)]

    def connect(self) -> list[Handle]:
        """Connects its ranks to the queue, which is there by now."""
        return [] if self._there is None else [self.group.connect()]

    def create_queue(self) -> None:
        """Makes the queue of episodes; one that was there is dropped."""
        if self._there is not None:
            Channel.create(EPISODES)

    def begin(self) -> None:
        """Ends what is under way; all ranks take part."""
        if self._replicas is not None:
            self.group.begin().wait(self._timeout)
            self.create_queue()
            self._replicas.begin()

    def tend(self) -> None:
        """Before a step: see `Replicas.tend`."""
        if self._replicas is not None:
            self._replicas.tend()

    def serve(self, phase: str) -> Handle | CompletedCall:
        """Has episodes run until a phase is over."""
        if self._replicas is None:
            return CompletedCall()
        handle: Handle = self._replicas.of_step().serve(phase)
        return handle

    def end(self, phase: str) -> None:
        """A phase is over."""
        for rank in self._replicas.present() if self._replicas is not None else ():
            p2p.post({"end": phase}, TICKETS, self.group.name, rank)


#: How long deliveries may be on their way before the driver looks whether prompts have come back.
_DELIVERY_S = 0.2


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

    def end(self, phase: str) -> None:
        """Tells those that rate answers that nobody asks any more in a phase."""
        for name, group in self.rating.items():
            asked = Channel.connect(channel_to(name))
            for rank in range(group.world_size):
                asked.put({"end": phase}, key=str(rank))

    def rest(self, timeout: float) -> None:
        """Those that score tokens give their accelerators to the other roles."""
        for handle in [group.offload() for name, group in self.scoring.items() if name not in self._resting]:
            handle.wait(timeout)


class Made:
    """A step's answers under way.

    Args:
        step: Which.
        ledger: Whose prompts these are.
        generate: Has the rollout ranks take prompts of the step until none is left.
        others: The groups that score.
        critic: The critic, if there is one.
        agents: The group that runs agents, if there is one.
        wait: Those that score tokens do so once the engines have given the accelerators away (`score`), rather than as answers
            come.
        learning: Groups whose weights change from step to step. They score once the step before has ended (`serve`): a rank
            does one call after the other, and that step yet has to train, save or send them weights.
    """

    def __init__(
        self,
        step: int,
        ledger: PromptTracker,
        generate: Callable[[int], Handle],
        others: Others,
        critic: WorkerGroup | None,
        agents: Agents,
        *,
        wait: bool,
        learning: Container[str] = (),
    ) -> None:
        self.step, self._ledger, self._generate, self._others = step, ledger, generate, others
        self._agents, self._run = agents, agents.serve(training_phase(step))
        self._generated = generate(step)
        self._rated = others.rate(training_phase(step))
        self._scoring = {**({CRITIC: critic} if critic else {}), **others.scoring}
        self._wait = wait
        self._scored = dict[str, Handle]()
        self._serve(name for name in self._scoring if name not in learning)
        self._found: list[dict[str, float]] | None = None

    def serve(self) -> None:
        """Has the groups score whose weights are by now those that the step is scored with."""
        self._serve(name for name in self._scoring if name not in self._scored)

    def _serve(self, names: Iterable[str]) -> None:
        if not self._wait:
            self._scored |= {name: self._scoring[name].serve(self.step) for name in names}

    def wait(self, timeout: float) -> list[dict[str, float]]:
        """What the rollout ranks return, and the sums over the step's samples.

        Raises:
            DeadlineExceeded: Answers were not delivered in time; says to which prompts.
        """
        if self._found is not None:
            return self._found
        found: list[dict[str, float]] = self._generated.wait(timeout)
        deadline = time.monotonic() + timeout
        while not self._ledger.whole(self.step, _DELIVERY_S):
            if self._ledger.returned(self.step):  # by a rank that was lost, when the others had found nothing left
                found += self._generate(self.step).wait(timeout)
            elif time.monotonic() > deadline:
                missing = self._ledger.missing(self.step)[:8]
                raise DeadlineExceeded(
                    f"step {self.step}: the answers to prompts {missing} were not delivered within runner.step_timeout_s "
                    f"({timeout:g} s)"
                )
        self._others.end(training_phase(self.step))
        self._agents.end(training_phase(self.step))
        for (
            name,
            group,
        ) in self._scoring.items():  # a group that was lost on its way and drawn again is there by now, too
            scored = Channel.connect(channel_to(name))
            for rank in range(group.world_size):
                scored.put({"end": self.step}, key=str(rank))
        self._found = [self._ledger.close(self.step), *found]
        return self._found

    def score(self, timeout: float) -> None:
        """Where roles take turns: the groups score one after the other."""
        for name, group in self._scoring.items():
            group.reload().wait(timeout)
            self._scored[name] = group.serve(self.step)
            self._scored[name].wait(timeout)
            group.offload().wait(timeout)

    def served(self, timeout: float) -> dict[str, float]:
        """Metrics of the groups (`served_metrics`)."""
        row = served_metrics({name: handle.wait(timeout) for name, handle in {**self._rated, **self._scored}.items()})
        run = self._run.wait(timeout)
        return {**row, **({"time/agent_s": max(rank["busy_s"] for rank in run)} if run else {})}


def served_metrics(answers: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, float]:
    """From what the ranks of each group that scores return: how long the slowest worked, how much all did a second, and what
    they counted."""
    row: dict[str, float] = {}
    for name, found in answers.items():
        busy = max(rank["busy_s"] for rank in found)
        row[f"time/{name}_s"] = busy
        unit = "answers" if "answers" in found[0] else "tokens"
        row[f"time/{name}_{unit}_per_s"] = sum(rank[unit] for rank in found) / max(busy, 1e-9)
        for counted in (key for key in found[0] if key.startswith("count/")):
            of = counted.removeprefix("count/")
            metric = f"time/{name}_{of[5:]}" if of.startswith("time/") else f"{name}/{of}"
            row[metric] = sum(rank[counted] for rank in found)
    return row
