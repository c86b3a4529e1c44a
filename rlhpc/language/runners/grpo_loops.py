"""Training loops of GRPO: synchronous, asynchronous and colocated, with the worker groups and phases that they share.

`make_loop` chooses the loop of a run. Each loop's `step` first calls the worker groups, then waits for the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rollout.prompt_queue import PromptTracker
from rlhpc.language.rollout.validation import ask_until_complete, validation_metrics
from rlhpc.language.scoring.groups import CRITIC, ENGINE, learning_groups, raters, scoring_groups
from rlhpc.language.training.prompt_dispatch import (
    EPISODES,
    TICKETS,
    PromptMap,
    channel_to,
    evaluation_phase,
    training_phase,
)
from rlhpc.metrics import PhaseTimers
from rlhpc.runs.replicas import CompletedCall, Replicas
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.rpc import Handle
from rlhpc.runtime.text import format_names
from rlhpc.runtime.worker_group import WorkerGroup

Metrics = dict[str, float]

#: Seconds to wait for deliveries before the driver checks whether prompts were returned to the queue.
_DELIVERY_S = 0.2
#: Results of a trainer that are times of the step, not training metrics.
_TIME_METRICS = ("update_s", "late_score_s", "proof_s", "cpu_s")


class Agents:
    """Elastic group of agent workers: the other ranks restart the episodes of a lost rank.

    Args:
        group: Launched group of `AgentWorker`; None if the rollout ranks run agents themselves, or the run has no agents.
        prompts: Map with the names of the groups.
        timeout: Seconds to wait for a call.
        count_restarts: Function that returns the number of allowed restarts.
    """

    def __init__(
        self, group: WorkerGroup | None, prompts: PromptMap, timeout: float, count_restarts: Callable[[], int]
    ) -> None:
        self._group = group
        self._prompts = prompts
        self._timeout = timeout
        self._replicas: Replicas | None = None
        if group is not None:
            cost = "other ranks begin its episodes again, and nothing else is lost"
            self._replicas = Replicas(group, self._open, self._join_ranks, count_restarts, cost)

    @property
    def group(self) -> WorkerGroup:
        """Worker group of the agents; available only in a run with this group."""
        assert self._group is not None
        return self._group

    def _open(self, *ranks: int) -> Handle:
        return self.group.execute_on(*ranks).init_worker(self._prompts)

    def _join_ranks(self, *ranks: int) -> None:
        self.group.execute_on(*ranks).connect().wait(self._timeout)

    def open(self) -> list[Handle]:
        """Makes the ranks start the processes that run agents; returns the handles."""
        return [] if self._group is None else [self._open(*self.group.present)]

    def connect(self) -> list[Handle]:
        """Makes the ranks connect to the queue from `create_queue`; returns the handles."""
        return [] if self._group is None else [self.group.connect()]

    def create_queue(self) -> None:
        """Creates the queue of episodes; replaces an existing one."""
        if self._group is not None:
            Channel.create(EPISODES)

    def begin(self) -> None:
        """Ends all episodes in flight and creates the queue again; all ranks take part again."""
        if self._replicas is not None:
            self.group.begin().wait(self._timeout)
            self.create_queue()
            self._replicas.begin()

    def update_presence(self) -> None:
        """Handles joined and lost ranks before a step (`Replicas.update_presence`)."""
        if self._replicas is not None:
            self._replicas.update_presence()

    def serve(self, phase: str) -> Handle | CompletedCall:
        """Calls the ranks to run episodes until a phase ends."""
        return CompletedCall() if self._replicas is None else self._replicas.step_group().serve(phase)

    def end(self, phase: str) -> None:
        """Notifies the ranks that a phase has ended."""
        for rank in self._replicas.present() if self._replicas is not None else ():
            p2p.post({"end": phase}, TICKETS, self.group.name, rank)


class AuxiliaryGroups:
    """Worker groups that score tokens or rate answers.

    Args:
        cfg: The run's configuration.
        groups: Launched groups of `ScoringWorker` and `RatingWorker`, by name.

    Attributes:
        groups: All groups, by name.
        rating: Groups that rate answers, by name.
        scoring: Groups that score tokens, by name.
    """

    def __init__(self, cfg: GrpoConfig, groups: Mapping[str, WorkerGroup]) -> None:
        self.groups = dict(groups)
        rater_names = raters(cfg)
        self.rating = {name: group for name, group in groups.items() if name in rater_names}
        self.scoring = {name: group for name, group in groups.items() if name not in rater_names}
        group_configs = scoring_groups(cfg)
        self._engines = [name for name in self.scoring if group_configs[name].scorer == ENGINE]
        self._offloaded_roles = set[str]()

    def open_engines(self, prompts: PromptMap, timeout_s: float) -> None:
        """Starts the engines of the groups that score tokens in a colocated run, one after the other, and offloads each.

        A starting engine would count memory that other processes allocate or free at the same time as its own.
        """
        for name in self._engines:
            self.scoring[name].init_worker(prompts).wait(timeout_s)
            self.scoring[name].offload().wait(timeout_s)
            self._offloaded_roles.add(name)

    def open(self, prompts: PromptMap) -> list[Handle]:
        """Calls the remaining groups to load their scorers."""
        return [group.init_worker(prompts) for name, group in self.groups.items() if name not in self._offloaded_roles]

    def rate(self, phase: str) -> dict[str, Handle]:
        """Calls the raters to rate answers until the phase ends."""
        return {name: group.serve(phase) for name, group in self.rating.items()}

    def end(self, phase: str) -> None:
        """Notifies the raters that a phase has ended."""
        for name, group in self.rating.items():
            requests = Channel.connect(channel_to(name))
            for rank in range(group.world_size):
                requests.put({"end": phase}, key=str(rank))

    def offload(self, timeout: float) -> None:
        """Frees the accelerators of the groups that score tokens, for use by other groups."""
        for offload_call in [
            group.offload() for name, group in self.scoring.items() if name not in self._offloaded_roles
        ]:
            offload_call.wait(timeout)


def served_metrics(answers: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, float]:
    """Returns metrics of the groups that score or rate.

    The metrics are seconds of the slowest rank, throughput of all ranks, and sums of the ranks' counts.
    """
    row: dict[str, float] = {}
    for name, rank_results in answers.items():
        busy_s = max(rank["busy_s"] for rank in rank_results)
        row[f"time/{name}_s"] = busy_s
        answer_unit = "answers" if "answers" in rank_results[0] else "tokens"
        row[f"time/{name}_{answer_unit}_per_s"] = sum(rank[answer_unit] for rank in rank_results) / max(busy_s, 1e-9)
        for count_key in (key for key in rank_results[0] if key.startswith("count/")):
            count_name = count_key.removeprefix("count/")
            metric = f"time/{name}_{count_name[5:]}" if count_name.startswith("time/") else f"{name}/{count_name}"
            row[metric] = sum(rank[count_key] for rank in rank_results)
    return row


@dataclass(frozen=True)
class GrpoGroups:
    """Worker groups of a GRPO run, as the driver calls them.

    Attributes:
        actor, rollout: Groups of `GrpoActor` and `LanguageRolloutWorker`.
        critic: Group of the critic; None in a run without a critic.
        reference: Group of the reference if its weights change; otherwise None.
        auxiliary: Groups that score tokens or rate answers.
        agents: Group that runs agents.
        replicas: Engines that take part in a step.
        tracker: Tracker of the prompts of all steps.
        shares_accelerators: Whether each engine gets the weights from the actor rank on its accelerator (`weight_sources`).
    """

    actor: WorkerGroup
    rollout: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    auxiliary: AuxiliaryGroups
    agents: Agents
    replicas: Replicas
    tracker: PromptTracker
    shares_accelerators: bool = False


@dataclass(frozen=True)
class StepResults:
    """Results of one step.

    Attributes:
        generated: Sums over the step's samples, then the results of each rollout rank.
        served: Metrics of the groups that score and rate.
        receive_results: Results of `GrpoActor.receive`, one per rank of the actor.
        updated: Results of `GrpoActor.update`, one per rank.
        critic: Metrics of the critic; {} if there is no critic.
    """

    generated: list[Metrics]
    served: Metrics
    receive_results: list[Metrics]
    updated: list[Metrics]
    critic: Metrics

    def metrics(self, times: Metrics) -> Metrics:
        """Returns the step's metrics of training, scoring and time.

        Args:
            times: Seconds of the step's phases, by metric name.
        """
        train_metrics = self.updated[0]
        row = {
            f"train/{name}": metric_value for name, metric_value in train_metrics.items() if name not in _TIME_METRICS
        }
        row |= {
            f"critic/{name}": metric_value for name, metric_value in self.critic.items() if name not in _TIME_METRICS
        }
        row |= self.served
        row |= times
        row["time/score_s"] = max(result["score_s"] for result in self.receive_results) + train_metrics["late_score_s"]
        row["time/train_s"] = train_metrics["update_s"]
        for name in ("proof_s", "cpu_s"):
            row[f"time/{name}"] = sum(metrics.get(name, 0.0) for metrics in (*self.generated, *self.updated))
        row["time/train_tokens_per_s"] = (
            train_metrics["tokens"] * train_metrics["updates"] / max(train_metrics["update_s"], 1e-9)
        )
        return row


class StepRollout:
    """Rollout of one step in progress, with its scoring and rating.

    Args:
        step: Step of the run.
        groups: The worker groups.
    """

    def __init__(self, step: int, groups: GrpoGroups) -> None:
        self.step = step
        self._groups = groups
        self._agent_call = groups.agents.serve(training_phase(step))
        self._generation_call = self._generate()
        self._rating_calls = groups.auxiliary.rate(training_phase(step))
        self._scoring_groups = {**({CRITIC: groups.critic} if groups.critic else {}), **groups.auxiliary.scoring}
        self._scoring_calls = dict[str, Handle]()

    def _generate(self) -> Handle:
        """Calls the engines to lease prompts of the step and generate until the queue is empty."""
        replicas = self._groups.replicas
        return replicas.step_group().generate(self.step, len(replicas.firsts()))

    def serve_fixed(self, learning: Collection[str]) -> None:
        """Calls the groups to score on arrival, except the groups in `learning`.

        The weights of groups in `learning` change from step to step, and a rank runs one call after the other. The previous
        step may still have to train these groups, save them or send them weights.
        """
        self._serve(name for name in self._scoring_groups if name not in learning)

    def serve(self) -> None:
        """Calls the remaining groups to score on arrival, once they have the weights for the step."""
        self._serve(name for name in self._scoring_groups if name not in self._scoring_calls)

    def _serve(self, names: Iterable[str]) -> None:
        self._scoring_calls |= {name: self._scoring_groups[name].serve(self.step) for name in names}

    def wait(self, timeout: float) -> list[Metrics]:
        """Waits for the rollout and ends the step; returns the sums over the samples, then the results of the rollout ranks.

        Raises:
            DeadlineExceeded: Answers were not delivered in time; the message names the prompts.
        """
        tracker = self._groups.tracker
        rank_metrics: list[Metrics] = self._generation_call.wait(timeout)
        deadline = time.monotonic() + timeout
        while not tracker.wait_complete(self.step, _DELIVERY_S):
            if tracker.has_returned_prompts(self.step):  # prompts of a lost rank
                rank_metrics += self._generate().wait(timeout)
            elif time.monotonic() > deadline:
                missing_positions = format_names(tracker.list_missing_positions(self.step), limit=8)
                raise DeadlineExceeded(
                    f"step {self.step}: the answers to prompts {missing_positions} were not delivered within "
                    f"runner.step_timeout_s "
                    f"({timeout:g} s)"
                )
        self._groups.auxiliary.end(training_phase(self.step))
        self._groups.agents.end(training_phase(self.step))
        # All sample groups have arrived, also second groups of a prompt.
        for name, group in self._scoring_groups.items():
            group_channel = Channel.connect(channel_to(name))
            for rank in range(group.world_size):
                group_channel.put({"end": self.step}, key=str(rank))
        return [tracker.close(self.step), *rank_metrics]

    def score_in_turn(self, timeout_s: float) -> None:
        """Scores the step by one group after the other; each group is reloaded before, and offloaded afterwards."""
        for name, group in self._scoring_groups.items():
            group.reload().wait(timeout_s)
            self._scoring_calls[name] = group.serve(self.step)
            self._scoring_calls[name].wait(timeout_s)
            group.offload().wait(timeout_s)

    def collect_served(self, timeout: float) -> Metrics:
        """Waits for the groups that score, rate and run agents; returns their metrics (`served_metrics`)."""
        row = served_metrics(
            {
                name: rating_call.wait(timeout)
                for name, rating_call in {**self._rating_calls, **self._scoring_calls}.items()
            }
        )
        agent_metrics = self._agent_call.wait(timeout)
        return {**row, **({"time/agent_s": max(rank["busy_s"] for rank in agent_metrics)} if agent_metrics else {})}


class GrpoLoop:
    """Base class of the loops, with the phases of a step; a subclass orders the phases in `step`.

    Args:
        cfg: The run's configuration.
        groups: The worker groups.
        end_step: Step at which this attempt of the run ends.

    Attributes:
        resume_note: Note to the user when a run is resumed; "" for no note.
        rollout_sums: Sums over the rollout ranks that only this loop reports (`rollout/NAME`).
        repeats_steps: Whether a step may be repeated from the current weights if only ranks without state were lost.
    """

    resume_note = ""
    rollout_sums: tuple[str, ...] = ()
    repeats_steps = True

    def __init__(self, cfg: GrpoConfig, groups: GrpoGroups, end_step: int) -> None:
        self.cfg = cfg
        self.groups = groups
        self.end_step = end_step
        self.timeout = cfg.runner.step_timeout_s
        self.learning = learning_groups(cfg)

    # -- start and recovery ---------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drops rollouts that were started for later steps."""

    def await_engines(self, open_call: Handle, prompts: PromptMap) -> None:
        """Waits until the engines have loaded, if no group may load at the same time; `open_call` is the loading call."""

    def offload_loaded(self) -> None:
        """Frees the accelerators of the loaded groups, if the groups share accelerators."""

    def offload_actor(self) -> None:
        """Frees the actor's accelerators after a failure, which may have interrupted one of its calls."""

    def offload_restarted(self, name: str, group: WorkerGroup, ranks: Collection[int]) -> None:
        """Frees the accelerators of restarted ranks once they have loaded."""

    def begin(self, step: int) -> None:
        """Sends the weights of `step`, from which this attempt continues, to the engines."""
        self._sync_weights(step)

    def sample_probe(self, step: int, phase: int, *, is_perturbed: bool) -> list[dict[str, Any]]:
        """Sends trial weights to the engines; returns each engine's samples (`LanguageRolloutWorker.sample_probe`)."""
        self._sync_weights(step, is_trial=True, is_perturbed=is_perturbed)
        return self.groups.replicas.step_group().sample_probe(phase).wait(self.timeout)

    def _sync_weights(self, step: int, *, is_trial: bool = False, is_perturbed: bool = False) -> None:
        replicas = self.groups.replicas
        send_call = self.groups.actor.sync_weights(step, replicas.ranks, is_trial=is_trial, is_perturbed=is_perturbed)
        for sync_call in (send_call, replicas.step_group().take_weights(step)):
            sync_call.wait(self.timeout)

    # -- phases ---------------------------------------------------------------------------------------------------

    def step(self, step: int, timers: PhaseTimers) -> StepResults:
        """Runs a step: generation, rewards, scoring, update, weight sync."""
        raise NotImplementedError

    def evaluates(self, step: int) -> bool:
        """Returns whether the weights of a step are evaluated."""
        eval_interval = self.cfg.runner.val_check_interval
        return eval_interval > 0 and step % eval_interval == 0

    def evaluate(self, step: int) -> Metrics:
        """Evaluates the suites with the weights of a step; returns their metrics."""
        phase, replicas = evaluation_phase(step), self.groups.replicas
        rating_calls, agent_run = self.groups.auxiliary.rate(phase), self.groups.agents.serve(phase)
        suite_rows = ask_until_complete(
            replicas.firsts,
            lambda leaders: replicas.step_group().evaluate(step, leaders).wait(self.timeout),
            self.timeout,
        )
        metrics = validation_metrics(suite_rows)
        self.groups.auxiliary.end(phase)
        self.groups.agents.end(phase)
        agent_run.wait(self.timeout)
        for rating_call in rating_calls.values():
            rating_call.wait(self.timeout)
        return metrics

    def _start_rollout(self, step: int) -> StepRollout:
        """Enqueues the prompts that may be sampled from now on; starts and returns the rollout of a step."""
        self.groups.tracker.enqueue(min(step + self.cfg.algorithm.max_staleness, self.end_step))
        return StepRollout(step, self.groups)

    def _send_weights(self, step: int) -> list[Handle]:
        """Calls the actor to send the weights of a step; returns the call, or [] if no engine will sample with them."""
        return (
            [self.groups.actor.sync_weights(step, self.groups.replicas.ranks)]
            if self._engine_samples_with(step)
            else []
        )

    def _engine_samples_with(self, step: int) -> bool:
        """Returns whether an engine will sample with the weights of a step."""
        return step < self.end_step or self.evaluates(step)

    def _train_on(self, rollout: StepRollout, timers: PhaseTimers, *, engines_wait: bool) -> StepResults:
        """Trains on a step's rollout and sends the weights.

        The actor scores the first groups while the last groups are still generated.

        Args:
            rollout: Rollout of the step, whose scoring groups have been called.
            timers: Timers of the step's phases.
            engines_wait: Whether to call the engines to receive the weights.
        """
        groups, step, timeout_s = self.groups, rollout.step, self.timeout
        receive_call = groups.actor.receive(step)
        actor_update = groups.actor.update(step)
        critic_update = groups.critic.update(step) if groups.critic else None
        send_calls = self._send_weights(step)
        with timers("rollout"):
            rollout_metrics = rollout.wait(timeout_s)
            served_groups = rollout.collect_served(timeout_s)
        with timers("receive"):
            receive_results = receive_call.wait(timeout_s)
        with timers("update"):
            update_metrics = actor_update.wait(timeout_s)
            critic = critic_update.wait(timeout_s)[0] if critic_update else {}
        with timers("sync"):
            if send_calls and engines_wait:
                send_calls.append(groups.replicas.step_group().take_weights(step))
            for send_call in send_calls:
                send_call.wait(timeout_s)
        self._update_reference(step, timers)
        return StepResults(rollout_metrics, served_groups, receive_results, update_metrics, critic)

    def _update_reference(self, step: int, timers: PhaseTimers) -> None:
        """Replaces the reference's weights by the current ones every `reference.update_interval` steps."""
        if self.groups.reference is None or step % self.cfg.reference.update_interval:
            return
        with timers("sync"):
            for refresh_call in (self.groups.actor.refresh_reference(step), self.groups.reference.take_weights()):
                refresh_call.wait(self.timeout)


class SyncLoop(GrpoLoop):
    """Synchronous loop: all groups of a step are generated, scored and trained on before the next step starts."""

    def step(self, step: int, timers: PhaseTimers) -> StepResults:
        """Runs a step.

        Actor and critic score the first groups while the last groups are generated, and update when all groups have arrived.
        """
        rollout = self._start_rollout(step)
        rollout.serve()
        return self._train_on(rollout, timers, engines_wait=True)


class AsyncLoop(GrpoLoop):
    """Asynchronous loop (`algorithm.max_staleness`): the next step's rollout starts before the current step's training.

    The engines receive new weights between two tokens.
    """

    resume_note = (
        "async generation: what was under way is made anew, so this resume loses nothing but is not bit for bit"
    )
    rollout_sums = ("continued", "continued_tokens")

    def __init__(self, cfg: GrpoConfig, groups: GrpoGroups, end_step: int) -> None:
        super().__init__(cfg, groups, end_step)
        self._next_rollout: StepRollout | None = None

    def reset(self) -> None:
        """Drops the rollout of the next step."""
        self._next_rollout = None

    def step(self, step: int, timers: PhaseTimers) -> StepResults:
        """Runs a step; first starts the rollout of the next step, unless the weights of this step are evaluated."""
        rollout = self._next_rollout or self._start_fixed(step)
        rollout.serve()
        overlaps = step < self.end_step and not self.evaluates(step)
        self._next_rollout = self._start_fixed(step + 1) if overlaps else None
        # Engines that are sampling the next step receive the weights without a call.
        return self._train_on(rollout, timers, engines_wait=self._next_rollout is None)

    def _start_fixed(self, step: int) -> StepRollout:
        rollout = self._start_rollout(step)
        rollout.serve_fixed(self.learning)
        return rollout


class ColocatedLoop(GrpoLoop):
    """Colocated loop (`actor.offload_in_rollout`): the groups use the same accelerators one after the other.

    Each group is offloaded while another group uses the accelerators.
    """

    repeats_steps = False  # the actor may have been interrupted while it offloaded or reloaded its weights

    def await_engines(self, open_call: Handle, prompts: PromptMap) -> None:
        """Waits until the engines have loaded, offloads them, then starts the engines of the scoring groups.

        Engines start one after the other, because a starting engine measures free memory, and would count memory that
        another process allocates or frees at the same time as its own.
        """
        open_call.wait(self.timeout)
        self.groups.rollout.offload().wait(self.timeout)
        self.groups.auxiliary.open_engines(prompts, self.timeout)

    def offload_loaded(self) -> None:
        """Frees the accelerators of the groups that score, and of the critic."""
        self.groups.auxiliary.offload(self.timeout)
        if self.groups.critic:
            self.groups.critic.offload().wait(self.timeout)

    def offload_actor(self) -> None:
        """Frees the actor's accelerators."""
        self.groups.actor.offload().wait(self.timeout)

    def offload_restarted(self, name: str, group: WorkerGroup, ranks: Collection[int]) -> None:
        """Frees the accelerators of all engines if an engine was restarted, or of the restarted ranks of a scoring group."""
        if group is self.groups.rollout:
            group.offload().wait(self.timeout)
        elif name in self.groups.auxiliary.scoring:
            group.execute_on(*ranks).offload().wait(self.timeout)

    def begin(self, step: int) -> None:
        """Sends the weights and offloads the actor."""
        self._send_in_turn(step)
        self.groups.actor.offload().wait(self.timeout)

    def _send_in_turn(self, step: int, *, is_trial: bool = False, is_perturbed: bool = False) -> None:
        """Sends the weights of a step to engines that are offloaded.

        Engines on the actor's accelerators receive the weights there, if their memory suffices: they reload the memory of
        their weights beside the actor's, and the rest of their memory when the actor is offloaded. Other engines receive the
        weights when they are reloaded.
        """
        groups, timeout_s = self.groups, self.timeout
        takes_at_once = groups.shares_accelerators and min(groups.actor.release_cache().wait(timeout_s)) > 0
        if takes_at_once:
            groups.rollout.reload_weights().wait(timeout_s)
        handles = [
            groups.actor.sync_weights(
                step, groups.replicas.ranks, is_trial=is_trial, is_perturbed=is_perturbed, engines_wait=takes_at_once
            )
        ]
        if takes_at_once:
            handles.append(groups.replicas.step_group().take_update(step))
        for send_call in handles:
            send_call.wait(timeout_s)

    def sample_probe(self, step: int, phase: int, *, is_perturbed: bool) -> list[dict[str, Any]]:
        """Sends trial weights and returns the engines' samples; the actor uses the accelerators first, then the engines."""
        groups, timeout_s = self.groups, self.timeout
        self._send_in_turn(step, is_trial=True, is_perturbed=is_perturbed)
        groups.actor.offload().wait(timeout_s)
        groups.rollout.reload().wait(timeout_s)
        groups.replicas.step_group().take_weights(step).wait(timeout_s)
        samples = groups.replicas.step_group().sample_probe(phase).wait(timeout_s)
        groups.rollout.offload().wait(timeout_s)
        return samples

    def step(self, step: int, timers: PhaseTimers) -> StepResults:
        """Runs a step: the engines, the scoring groups, the actor and the critic use the accelerators one after the other."""
        groups, timeout_s = self.groups, self.timeout
        reload_handle = groups.rollout.reload()
        rollout = self._start_rollout(step)
        receive_call = groups.actor.receive(step)
        with timers("turns"):
            reload_handle.wait(timeout_s)
        with timers("rollout"):
            rollout_metrics = rollout.wait(timeout_s)
        with timers("turns"):
            groups.rollout.offload().wait(timeout_s)
        rollout.score_in_turn(timeout_s)
        reload_handle = groups.actor.reload()
        actor_update = groups.actor.update(step)
        with timers("turns"):
            reload_handle.wait(timeout_s)
        with timers("rollout"):
            served_groups = rollout.collect_served(timeout_s)
        with timers("receive"):
            receive_results = receive_call.wait(timeout_s)
        with timers("update"):
            update_metrics = actor_update.wait(timeout_s)
        if is_sent := self._engine_samples_with(step):
            with timers("sync"):
                self._send_in_turn(step)
        if is_sent or groups.critic:
            with timers("turns"):
                groups.actor.offload().wait(timeout_s)
        critic = self._update_critic(step, timers) if groups.critic else {}
        self._update_reference(step, timers)
        return StepResults(rollout_metrics, served_groups, receive_results, update_metrics, critic)

    def _update_critic(self, step: int, timers: PhaseTimers) -> Metrics:
        critic = self.groups.critic
        assert critic is not None
        with timers("turns"):
            critic.reload().wait(self.timeout)
        with timers("update"):
            critic_metrics = critic.update(step).wait(self.timeout)
        with timers("turns"):
            critic.offload().wait(self.timeout)
        return dict(critic_metrics[0])

    def evaluate(self, step: int) -> Metrics:
        """Evaluates the suites and returns their metrics; reloads the engines before and offloads them afterwards.

        The weights are sent once more, because engines may drop them when they are offloaded.
        """
        self.groups.rollout.reload()
        metrics = super().evaluate(step)
        self.groups.rollout.offload().wait(self.timeout)
        if step < self.end_step:
            self._send_in_turn(step)
        return metrics


def make_loop(cfg: GrpoConfig, groups: GrpoGroups, end_step: int) -> GrpoLoop:
    """Creates the loop of a configuration.

    The loop is colocated with `actor.offload_in_rollout`, asynchronous with `algorithm.max_staleness`, otherwise synchronous.
    """
    if cfg.actor.offload_in_rollout:
        return ColocatedLoop(cfg, groups, end_step)
    loop = AsyncLoop if cfg.algorithm.max_staleness > 0 else SyncLoop
    return loop(cfg, groups, end_step)
