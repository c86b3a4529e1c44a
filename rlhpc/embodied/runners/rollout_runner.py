"""Training loops of runs with simulators.

Each step has four phases: the actors send their weights to the rollout workers, the policy acts in the simulators, the
actors receive the trajectories, and the actors train on them. The driver issues the calls of a step together and each rank
executes its own in order, so no phase waits for a round trip to the driver. The loops are `SyncRolloutLoop`,
`AsyncRolloutLoop` and `ColocatedRolloutLoop`.

With `algorithm.max_staleness: k` the rollout runs up to k steps ahead of the training, with weights at most k versions older
than in the synchronous loop. It pauses before a checkpoint and before an evaluation, so that a resumed run continues like an
uninterrupted one. Env and rollout ranks may join and leave such a run (`RolloutSources`).
"""

from __future__ import annotations

import collections
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rlhpc.algorithms.nonfinite import MAX_IN_A_ROW, nonfinite
from rlhpc.embodied.config import PlayingConfig, PpoConfig, SacConfig
from rlhpc.embodied.data.batches import DropReason, RolloutCounts
from rlhpc.embodied.envs.base import timing_row
from rlhpc.embodied.evaluation.episodes import EvaluationRows, evaluation_metrics
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import merge_reports
from rlhpc.embodied.rollout.work_sharing import FullRollout, cuts, divisible
from rlhpc.embodied.runners.rollout_sources import RolloutSources, wait_all
from rlhpc.embodied.training.blueprint import check_backend
from rlhpc.jobs.signals import StopRequest
from rlhpc.metrics import PhaseTimers
from rlhpc.metrics.phase_times import active_s
from rlhpc.runs.run_folder import RunFolder, note
from rlhpc.runs.runner import Runner
from rlhpc.runtime.worker_group import WorkerGroup


def device_and_timing_metrics(episodes: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the timing metrics of robots and, if simulators produce observations on an accelerator, the fraction of
    observation messages that stayed on the accelerator.
    """
    num_device_messages, num_host_messages = int(episodes["by_device"].sum()), int(episodes["by_host"].sum())
    return (
        {"env/on_device": num_device_messages / (num_device_messages + num_host_messages)}
        if num_device_messages + num_host_messages
        else {}
    ) | timing_row(episodes)


def episode_metrics(episodes: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns metrics of only the episodes that ended in this step. The averages over `WINDOW` episodes react more
    slowly.
    """
    num_episodes = len(episodes["return"])
    metrics: dict[str, float] = {"rollout/episodes": num_episodes}
    if num_episodes:
        metrics["rollout/episode_return"] = float(episodes["return"].mean())
        if not np.isnan(episodes["success"]).any():
            metrics["rollout/success_once"] = float(episodes["success"].mean())
    return metrics


def joined_metrics(decisions: Counter[int], chunk: int) -> dict[str, float]:
    """Returns the number of a step's transitions from joined ranks, in total and for each rank.

    Args:
        decisions: Number of decisions by rank.
        chunk: Number of transitions per decision.
    """
    if not decisions:
        return {}
    by_rank = {f"env/joined_transitions_{rank}": count * chunk for rank, count in sorted(decisions.items())}
    return {"env/joined_transitions": decisions.total() * chunk, **by_rank}


#: Number of training episodes over which `train/episode_return` is averaged.
WINDOW = 100
#: Number of steps over which `env_steps_per_s` is averaged.
_RATE_STEPS = 10
Cfg = TypeVar("Cfg", bound=PlayingConfig)


@dataclass(frozen=True)
class RolloutStepResults:
    """Results of one step.

    Attributes:
        counts: Counts of the transitions that the actors received.
        episodes: Merged reports of the env ranks (`merge_reports`).
        act_s, simulate_s: Seconds in which rollout ranks acted and env ranks simulated.
        train_metrics: Metrics of the update.
        joined_decisions: Number of decisions made by joined ranks, by rank.
    """

    counts: RolloutCounts
    episodes: dict[str, np.ndarray]
    act_s: float
    simulate_s: float
    train_metrics: dict[str, float]
    joined_decisions: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class SyncRolloutLoop:
    """Loop of runs that collect each step's rollout with the weights of the preceding update.

    Args:
        sources: Env and rollout ranks.
        actor: Actor ranks.
        receive_phase: Name of the phase in which the actors receive the transitions.
        timeout: Maximum duration of a step, in seconds.
    """

    sources: RolloutSources
    actor: WorkerGroup
    receive_phase: str
    timeout: float

    def build_policies(self, spaces: tuple[Any, Any]) -> None:
        """Builds the policy on actor and rollout ranks for an observation space and an action space."""
        groups = (self.sources.rollout, self.actor)
        wait_all([group.init_worker(self.sources.slots, *spaces) for group in groups], self.timeout)

    def begin(self, step: int) -> None:
        """Starts the loop after `step`, with no steps in progress."""
        self.sources.begin(step)

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Restarts env and rollout ranks that have ended, and reconnects all ranks."""
        self.sources.rebuild(lost_ranks)

    def step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step. Issues all calls at once; each rank executes its calls in order.

        Args:
            step: Number of the step.
            progress: Completed fraction of the run.
            timers: Timers of the phases.
        """
        weights = self.sources.sync(step - 1)
        self.sources.play(step)
        receiving = self.sources.receive(step)
        training = self.actor.update(step, progress)
        with timers("sync"):
            wait_all(weights, self.timeout)
        with timers("rollout"):
            episodes, act_s, simulate_s = self.sources.outcome(step)
        with timers(self.receive_phase):
            counts = RolloutCounts.sum(receiving.wait(self.timeout))
        with timers("update"):
            train_metrics = training.wait(self.timeout)[0]
        return RolloutStepResults(counts, episodes, act_s, simulate_s, train_metrics)

    def evaluate(self, version: int) -> list[EvaluationRows]:
        """Runs evaluation episodes with the weights of the latest update, sent as `version`; returns the results of the
        parts that the ranks played.
        """
        weights = self.sources.sync(version)  # the rollout ranks still have the weights of the preceding update
        evaluation = self.sources.evaluate()
        wait_all(weights, self.timeout)
        return evaluation()


@dataclass(eq=False)
class AsyncRolloutLoop(SyncRolloutLoop):
    """Loop of runs whose rollout is up to `algorithm.max_staleness` steps ahead of the training. Ranks may join and
    leave.

    Args:
        max_staleness: `algorithm.max_staleness`.
        last_step_ahead: Returns, for a step, the last step that may be played ahead of it.
        others: See `SyncRolloutLoop`.
    """

    max_staleness: int
    last_step_ahead: Callable[[int], int]
    #: Handles of weight syncs that rollout ranks have not confirmed.
    _unconfirmed: list[Any] = field(default_factory=list, init=False)

    def begin(self, step: int) -> None:
        """Starts the loop after `step` (`SyncRolloutLoop.begin`) and drops the steps that were played ahead."""
        self._unconfirmed = []
        super().begin(step)

    def step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step (`SyncRolloutLoop.step`). Rollout ranks receive weights only after the steps that they are playing, so
        the loop waits for these steps first.
        """
        self.sources.update_ranks(step - 1)
        weights = self.sources.sync(step - 1)
        self.sources.start_until(min(step + self.max_staleness, self.last_step_ahead(step)))
        with timers("rollout"):
            shards = self.sources.wait_for_shards(step)
        receiving = self.sources.receive(step, shards)
        training = self.actor.update(step, progress)
        confirms = self.sources.plays(step)
        with timers("rollout"):
            episodes, act_s, simulate_s = self.sources.outcome(step, shards)
        with timers("sync"):
            self._await_weights(weights, confirms=confirms)
        with timers(self.receive_phase):
            counts = RolloutCounts.sum(receiving.wait(self.timeout))
        with timers("update"):
            train_metrics = training.wait(self.timeout)[0]
        decisions = self.sources.joined_decisions(shards)
        return RolloutStepResults(counts, episodes, act_s, simulate_s, train_metrics, decisions)

    def _await_weights(self, weights: list[Any], *, confirms: bool) -> None:
        """Waits until the rollout ranks have received the weights. Without `confirms`, waits only until the weights are
        sent, because the rollout ranks are busy with a later step.
        """
        self._unconfirmed += weights
        for handle in self._unconfirmed if confirms else weights[:1]:
            handle.wait(self.timeout)
        if confirms:
            self._unconfirmed = []


@dataclass(eq=False)
class ColocatedRolloutLoop(SyncRolloutLoop):
    """Loop of runs in which actor and rollout ranks alternate on the same accelerators.

    Between steps the actors occupy the accelerators, because they save and send weights at that time.

    Args:
        offload_actor, offload_rollout: `enable_offload` of the two sections.
        others: See `SyncRolloutLoop`.
    """

    offload_actor: bool
    offload_rollout: bool

    def build_policies(self, spaces: tuple[Any, Any]) -> None:
        """Builds the policy on one group after the other (`SyncRolloutLoop.build_policies`)."""
        self.sources.rollout.init_worker(self.sources.slots, *spaces).wait(self.timeout)
        self._offload_sources()
        self.actor.init_worker(self.sources.slots, *spaces).wait(self.timeout)

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Restarts ranks (`SyncRolloutLoop.rebuild`). Either side may occupy the accelerators at that time, so the actors
        are offloaded first.
        """
        if self.offload_actor:
            self.actor.offload().wait(self.timeout)
        super().rebuild(lost_ranks)
        self._switch_to_actor()

    def step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step (`SyncRolloutLoop.step`); the actors are offloaded during the rollout."""
        with timers("sync"):
            wait_all(self.sources.sync(step - 1), self.timeout)
            self._switch_to_rollout()
        self.sources.play(step)
        receiving = self.sources.receive(step)
        with timers("rollout"):
            episodes, act_s, simulate_s = self.sources.outcome(step)
        with timers(self.receive_phase):
            counts = RolloutCounts.sum(receiving.wait(self.timeout))
        with timers("update"):
            self._switch_to_actor()
            train_metrics = self.actor.update(step, progress).wait(self.timeout)[0]
        return RolloutStepResults(counts, episodes, act_s, simulate_s, train_metrics)

    def evaluate(self, version: int) -> list[EvaluationRows]:
        """Runs evaluation episodes (`SyncRolloutLoop.evaluate`) while the actors are offloaded."""
        wait_all(self.sources.sync(version), self.timeout)
        self._switch_to_rollout()
        parts = self.sources.evaluate()()
        self._switch_to_actor()
        return parts

    def _switch_to_rollout(self) -> None:
        if self.offload_actor:
            self.actor.offload().wait(self.timeout)
        if self.offload_rollout:
            self.sources.rollout.reload().wait(self.timeout)

    def _switch_to_actor(self) -> None:
        self._offload_sources()
        if self.offload_actor:
            self.actor.reload().wait(self.timeout)

    def _offload_sources(self) -> None:
        """Offloads rollout and env ranks from the accelerators."""
        if self.offload_rollout:
            self.sources.rollout.offload().wait(self.timeout)
        self.sources.rollout.release_observations().wait(self.timeout)
        self.sources.env.offload().wait(self.timeout)


class PlayingRunner(Runner[Cfg]):
    """Base of runners whose policies are trained on their own rollouts.

    Args:
        cfg: Configuration.
        actor, rollout, env: Launched groups.
        run: Run folder; by default the folder given by `runner.run_dir` and `runner.name`.
        stop: Request to end early, checked between steps.

    Raises:
        ConfigError: The numbers of environments, stages and ranks do not fit together.
    """

    #: Name of the phase in which the actors receive the trajectories.
    receive_phase = "advantage"

    def __init__(
        self,
        cfg: Cfg,
        actor: Any,
        rollout: Any,
        env: Any,
        *,
        run: RunFolder | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        names = {"actor_name": actor.name, "rollout_name": rollout.name, "env_name": env.name}
        names["token"] = secrets.token_hex(4)
        slots = SlotMap.from_config(
            cfg, env=env.world_size, rollout=rollout.world_size, actor=actor.world_size, **names
        )
        self.sources = RolloutSources(
            env,
            rollout,
            actor,
            slots,
            decisions=cfg.algorithm.rollout_steps,
            max_ahead=cfg.algorithm.max_staleness,
            divisible=divisible(cfg),
            cuts=cuts(cfg),
            generate=self.generate,
            has_random_actions=self.has_random_actions,
            restarts=lambda: self.max_recoveries,
            timeout=cfg.runner.step_timeout_s,
        )
        self.env, self.rollout = self.sources.env, self.sources.rollout
        super().__init__(cfg, {"actor": actor, "rollout": self.rollout, "env": self.env}, run=run, stop=stop)
        self.actor = actor
        self.check()
        self.env_steps, self.episodes, self._nonfinite_steps = 0, 0, 0
        self.lost_counts: collections.Counter[str] = collections.Counter()
        self.window: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=WINDOW)
        self._recent_steps: collections.deque[tuple[float, int]] = collections.deque(maxlen=_RATE_STEPS)
        self.loop = self.make_loop()

    @property
    def slots(self) -> SlotMap:
        """Current slot map."""
        return self.sources.slots

    def check(self) -> None:
        """Checks the configuration before any rank builds its model; subclasses override it."""

    def make_loop(self) -> SyncRolloutLoop:
        """Builds the loop that runs the steps."""
        staleness = self.cfg.algorithm.max_staleness
        if staleness:
            return AsyncRolloutLoop(
                self.sources,
                self.actor,
                self.receive_phase,
                self.timeout,
                max_staleness=staleness,
                last_step_ahead=self._last_step_ahead,
            )
        return SyncRolloutLoop(self.sources, self.actor, self.receive_phase, self.timeout)

    # -- start ----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Builds environments and models on all ranks and connects them."""
        self.loop.build_policies(self.sources.build())
        self.sources.connect()

    def restored(self, answers: dict[str, list[Any]]) -> None:
        """Writes a note if some simulators could not be restored and have lost their episodes in progress."""
        if not all(answers["env"]):
            note("the simulators cannot be restored; their episodes start anew, so this resume is not bit for bit")

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Restarts env and rollout ranks that have ended."""
        self.loop.rebuild(lost_ranks)

    def count_lost(self, ranks: int, before: dict[str, Any]) -> None:
        """Adds lost ranks, transitions (including those of the step in progress) and episodes to `lost_counts`."""
        self.lost_counts["ranks"] += ranks
        self.lost_counts["steps"] += before["env_steps"] - self.env_steps + self._transitions_per_step()
        self.lost_counts["episodes"] += before["episodes"] - self.episodes

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Drops the steps that were played ahead."""
        self.loop.begin(self.step)

    def one_step(self) -> dict[str, float]:
        """Runs one step (weight sync, rollout, receiving, update) and returns its row of metrics."""
        step, timers, start = self.step + 1, PhaseTimers(), active_s()
        outcome = self.loop.step(step, self.step / max(self.folder.total, 1), timers)
        counts, chunk = outcome.counts, self.cfg.actor.model.num_action_chunks
        executed = counts.received * chunk - int(outcome.episodes["skipped"].sum())
        losses = {"ranks": self.sources.pop_num_lost(), "steps": counts.dropped[DropReason.RANK_LOST] * chunk}
        self.lost_counts.update({name: count for name, count in losses.items() if count})
        row = self._build_row(
            step, start, outcome.train_metrics, outcome.episodes, float(counts.version), executed, timers
        )
        row |= {"time/simulate_s": outcome.simulate_s, "time/act_s": outcome.act_s}
        row |= joined_metrics(outcome.joined_decisions, chunk)
        self._count_nonfinite(step, row, counts.dropped[DropReason.NONFINITE])
        if failed := counts.dropped[DropReason.ENV_FAILED]:
            row["env/failed"] = failed
        return row

    def _count_nonfinite(self, step: int, row: dict[str, float], count: int) -> None:
        """Counts transitions that were dropped because they contain non-finite values.

        Raises:
            NonFinite: Too many consecutive steps had no finite transitions.
        """
        if count:
            row["env/nonfinite"] = count
        all_nonfinite = count * self.cfg.actor.model.num_action_chunks >= self._transitions_per_step()
        self._nonfinite_steps = self._nonfinite_steps + 1 if all_nonfinite else 0
        if self._nonfinite_steps >= MAX_IN_A_ROW:
            raise nonfinite(
                f"step {step}: nothing that the environments brought was finite, {self._nonfinite_steps} steps in a row"
            )

    def generate(self, rollout: WorkerGroup, turn: FullRollout) -> Any:
        """Makes the rollout ranks act in a turn; returns a handle."""
        return rollout.generate(turn)

    def has_random_actions(self, step: int) -> bool:
        """Returns whether all actions of a step are random."""
        del step
        return False

    def _last_step_ahead(self, step: int) -> int:
        """Returns the last step that may be played ahead of `step`: the next step with a checkpoint or an evaluation,
        or the run's last step.
        """
        intervals = (self.cfg.runner.save_interval, self.cfg.runner.val_check_interval)
        ends = [-(-step // interval) * interval for interval in intervals if interval > 0]
        return min([self.folder.end_step, *ends])

    def _save(self, logger: Any) -> None:
        if self.sources.in_progress:
            note(
                "the run stops while environments are ahead of the actors: the steps they have played since are played "
                "again after a resume, which so loses nothing but is not bit for bit"
            )
        super()._save(logger)

    def _build_row(
        self,
        step: int,
        start_s: float,
        train_metrics: dict[str, float],
        episodes: dict[str, np.ndarray],
        version: float,
        transitions: int,
        timers: PhaseTimers,
    ) -> dict[str, float]:
        """Adds a step that began at `start_s` to the counters and returns its row of metrics. Runs an evaluation if it
        is due.
        """
        seconds = active_s() - start_s
        self.step = step
        self.env_steps += transitions
        self._recent_steps.append((seconds, transitions))
        self.episodes += len(episodes["return"])
        self.window.extend(zip(*(episodes[name].tolist() for name in ("return", "length", "success")), strict=True))
        row: dict[str, float] = {
            f"train/{name}": metric for name, metric in train_metrics.items() if name != "update_s"
        }
        if "update_s" in train_metrics:  # updates without transitions to train on have no duration
            row["time/train_s"] = train_metrics["update_s"]
        row.update(self._episode_metrics())
        row.update(episode_metrics(episodes))
        row["rollout/version"], row["rollout/env_steps"] = version, self.env_steps
        if restarts := int(episodes["restarts"].sum()):
            row["env/restarts"] = restarts
        if num_nonfinite := int(episodes["spoiled"].sum()):
            row["env/nonfinite_episodes"] = num_nonfinite
        row.update(device_and_timing_metrics(episodes))
        row.update({f"env/lost_{name}": count for name, count in self.lost_counts.items()})
        eval_interval = self.cfg.runner.val_check_interval
        if eval_interval > 0 and step % eval_interval == 0:
            with timers("eval"):
                metrics = evaluation_metrics(self.cfg, self.loop.evaluate(step))
                row.update({f"eval/{name}": metric for name, metric in metrics.items()})
        row.update(timers.pop())
        row["time/step_s"] = seconds
        row["time/env_steps_per_s"] = sum(num_env_steps for _, num_env_steps in self._recent_steps) / sum(
            s for s, _ in self._recent_steps
        )
        return row

    def _transitions_per_step(self) -> int:
        """Returns the number of transitions per step."""
        return (self.slots.num_envs * self.cfg.algorithm.rollout_steps) * self.cfg.actor.model.num_action_chunks

    def _mean_return(self) -> float | None:
        return float(np.mean([row[0] for row in self.window])) if self.window else None

    def _episode_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {"train/episodes": self.episodes}
        if self.window:
            means = [float(column.mean()) for column in np.asarray(self.window, np.float64).T]
            metrics |= {"train/episode_return": means[0], "train/episode_length": means[1]}
            if not np.isnan(means[2]):
                metrics["train/success_once"] = means[2]
        return metrics

    # -- hooks of the base class ----------------------------------------------------------------------------------

    def goal(self) -> str:
        """Returns "stop_return" if the mean return of a full window reaches `runner.stop_return`, else ""."""
        stop_return, window_return = self.cfg.runner.stop_return, self._mean_return()
        is_full = len(self.window) == WINDOW
        return (
            "stop_return"
            if stop_return is not None and is_full and window_return is not None and window_return >= stop_return
            else ""
        )

    def state(self) -> dict[str, Any]:
        """Returns the counters, and the return, length and success of the latest episodes."""
        window = [[None if statistic != statistic else statistic for statistic in row] for row in self.window]
        return {"env_steps": self.env_steps, "episodes": self.episodes, "window": window}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `state` returned when the checkpoint was made."""
        self.env_steps, self.episodes = int(state["env_steps"]), int(state["episodes"])
        self.window.clear()
        rows = (
            [float("nan") if statistic is None else float(statistic) for statistic in row] for row in state["window"]
        )
        self.window.extend((row[0], row[1], row[2]) for row in rows)

    def result(self) -> dict[str, Any]:
        """Returns `env_steps` and the mean `episode_return`."""
        return {"env_steps": self.env_steps, "episode_return": self._mean_return()}

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        """Returns the mean return, the number of environment steps and their rate, for `rlhpc status`."""
        return {
            "return": row.get("train/episode_return"),
            "env_steps": self.env_steps,
            "env_steps_per_s": row["time/env_steps_per_s"],
        }


class EmbodiedRunner(PlayingRunner[PpoConfig]):
    """Runner of on-policy training in simulators."""

    def check(self) -> None:
        """Checks the settings of the training backend before any rank builds its model."""
        check_backend(self.cfg.actor)

    def make_loop(self) -> SyncRolloutLoop:
        """Builds the loop that runs the steps (`PlayingRunner.make_loop`): a colocated loop if a group is offloaded."""
        offload_actor, offload_rollout = self.cfg.actor.enable_offload, self.cfg.rollout.enable_offload
        if offload_actor or offload_rollout:
            return ColocatedRolloutLoop(
                self.sources,
                self.actor,
                self.receive_phase,
                self.timeout,
                offload_actor=offload_actor,
                offload_rollout=offload_rollout,
            )
        return super().make_loop()


class OffPolicyRunner(PlayingRunner[SacConfig]):
    """Runner of SAC and other off-policy algorithms. Batches come from a replay buffer, so their size is independent of
    the rollout's size.

    Takes the arguments of `EmbodiedRunner`.
    """

    receive_phase = "receive"

    def build(self) -> None:
        """Sets the number of random steps, then builds the workers (`PlayingRunner.build`)."""
        algorithm = self.cfg.algorithm
        self.random_steps = algorithm.replay_buffer.min_buffer_size
        if algorithm.random_steps is not None:
            self.random_steps = algorithm.random_steps
        elif self.cfg.runner.init_from is not None or algorithm.offline_steps:
            self.random_steps = 0  # the policy is already trained
        super().build()

    def state(self) -> dict[str, Any]:
        """Returns the state (`PlayingRunner.state`) and the number of random steps."""
        return {**super().state(), "random_steps": self.random_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `state` returned when the checkpoint was made."""
        super().load_state(state)
        self.random_steps = int(state["random_steps"])

    def one_step(self) -> dict[str, float]:
        """Runs one step (`PlayingRunner.one_step`); the first `algorithm.offline_steps` steps train offline."""
        return self._offline_step() if self.step < self.cfg.algorithm.offline_steps else super().one_step()

    def _offline_step(self) -> dict[str, float]:
        """Trains on the demonstrations alone, without the environments; returns the step's row of metrics."""
        step, timers, begin = self.step + 1, PhaseTimers(), active_s()
        with timers("update"):
            train_metrics = self.actor.update_offline(step, self.step / max(self.folder.total, 1)).wait(self.timeout)[0]
        row = self._build_row(step, begin, train_metrics, merge_reports([]), 0.0, 0, timers)
        del row["rollout/version"]
        self.sources.forget(step)
        return row

    def generate(self, rollout: WorkerGroup, turn: FullRollout) -> Any:
        """Makes the rollout ranks act in a turn (`PlayingRunner.generate`). The run's first actions are random."""
        return rollout.generate(turn, self._num_random_decisions)

    def has_random_actions(self, step: int) -> bool:
        """Returns whether all actions of a step are random (`PlayingRunner.has_random_actions`)."""
        return (step - 1) * self._decisions_per_step < self._num_random_decisions

    @property
    def _decisions_per_step(self) -> int:
        """Number of decisions per step, summed over all slots."""
        return self.slots.num_envs * self.cfg.algorithm.rollout_steps

    @property
    def _num_random_decisions(self) -> int:
        """Number of decisions with random actions at the start of the run; the decisions of offline steps count, too."""
        return (
            self.random_steps + self.cfg.algorithm.offline_steps * self._decisions_per_step if self.random_steps else 0
        )
