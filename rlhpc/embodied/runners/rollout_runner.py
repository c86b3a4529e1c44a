"""Training loops of runs with simulators.

Each step has four phases: the actors send their weights to the rollout workers, the policy acts in the simulators, the
actors receive the trajectories, and the actors train on them. The driver issues the calls of a step together and each rank
executes its own in order, so no phase waits for a round trip to the driver. The loops are `SyncRolloutLoop`,
`AsyncRolloutLoop` and `ColocatedRolloutLoop`. Actors that simulate and act themselves have a `TensorRunner`.

With `algorithm.max_staleness: k` the rollout runs up to k steps ahead of the training, with weights at most k versions older
than in the synchronous loop. It pauses before a checkpoint and before an evaluation, so that a resumed run continues like an
uninterrupted one. Env and rollout ranks may join and leave such a run (`RolloutSources`).
"""

from __future__ import annotations

import collections
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import numpy as np

from rlhpc.algorithms.nonfinite import MAX_IN_A_ROW, nonfinite
from rlhpc.embodied.config import PlayingConfig, PpoConfig, acts_in_actor
from rlhpc.embodied.data.batches import DropReason, RolloutCounts
from rlhpc.embodied.evaluation.episodes import EvaluationRows, evaluation_metrics
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import autonomous_episodes, episode_metrics, joined_metrics, merge_reports
from rlhpc.embodied.rollout.work_sharing import FullRollout, divisible, num_parts_of
from rlhpc.embodied.runners.rollout_sources import RolloutSources, wait_all
from rlhpc.embodied.training import check_backend
from rlhpc.jobs.signals import StopRequest
from rlhpc.metrics import PhaseTimers
from rlhpc.metrics.phase_times import active_s
from rlhpc.runs.run_folder import RunFolder, note
from rlhpc.runs.runner import Runner
from rlhpc.runtime.worker_group import WorkerGroup
from rlhpc.weights.device_sharing import STAY_ON_ACCELERATORS, weight_sources
from rlhpc.weights.receiver import transfer_facts

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
        act_s, simulate_s: Seconds in which rollout ranks acted and env ranks simulated; None if the actor ranks do both.
        train_metrics: Metrics of the update.
        joined_decisions: Number of decisions made by joined ranks, by rank.
    """

    counts: RolloutCounts
    episodes: dict[str, np.ndarray]
    act_s: float | None
    simulate_s: float | None
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
        weight_sync_interval: `runner.weight_sync_interval`.
    """

    sources: RolloutSources
    actor: WorkerGroup
    receive_phase: str
    timeout: float
    _: KW_ONLY
    weight_sync_interval: int = 1
    #: Whether the rollout ranks have received weights since the start or the last restart of ranks.
    _has_synced: bool = field(default=False, init=False)

    def build_policies(self, spaces: tuple[Any, Any]) -> None:
        """Builds the policy on actor and rollout ranks for an observation space and an action space."""
        groups = (self.sources.rollout, self.actor)
        wait_all([group.init_worker(self.sources.slots, *spaces) for group in groups], self.timeout)

    def begin(self, step: int) -> None:
        """Starts the loop after `step`, with no steps in progress."""
        self._has_synced = False
        self.sources.begin(step)

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Restarts env and rollout ranks that have ended, and reconnects all ranks."""
        self._has_synced = False
        self.sources.rebuild(lost_ranks)

    def step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step. Issues all calls at once; each rank executes its calls in order.

        Args:
            step: Number of the step.
            progress: Completed fraction of the run.
            timers: Timers of the phases.
        """
        weights = self._sync_if_due(step)
        self.sources.play(step)
        receive_call = self.sources.receive(step)
        update_call = self.actor.update(step, progress)
        with timers("sync"):
            wait_all(weights, self.timeout)
        with timers("rollout"):
            episodes, act_s, simulate_s = self.sources.outcome(step)
        with timers(self.receive_phase):
            rollout_counts = RolloutCounts.sum(receive_call.wait(self.timeout))
        with timers("update"):
            train_metrics = update_call.wait(self.timeout)[0]
        return RolloutStepResults(rollout_counts, episodes, act_s, simulate_s, train_metrics)

    def _sync_if_due(self, step: int) -> list[Any]:
        """Sends the weights before a step in which a weight sync is due; returns the handles of both sides."""
        return self.sources.sync(step - 1) if self._is_sync_due(step) else []

    def _is_sync_due(self, step: int) -> bool:
        """Returns whether the weights are sent before a step: at the start, after a restart of ranks, and at each interval."""
        is_due = not self._has_synced or (step - 1) % self.weight_sync_interval == 0
        self._has_synced = True
        return is_due

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
    leave. With `weight_sync_interval` k, the weights that act are up to `max_staleness` + k - 1 updates old.

    Args:
        max_staleness: `algorithm.max_staleness`.
        last_step_ahead: Returns, for a step, the last step that may be played ahead of it.
        others: See `SyncRolloutLoop`.
    """

    max_staleness: int
    last_step_ahead: Callable[[int], int]
    #: Handles of weight syncs that rollout ranks have not confirmed, and the rollout ranks of the last step.
    _unconfirmed_syncs: list[Any] = field(default_factory=list, init=False)
    _acting_ranks: tuple[int, ...] = field(default=(), init=False)

    def begin(self, step: int) -> None:
        """Starts the loop after `step` (`SyncRolloutLoop.begin`) and drops the steps that were played before the training
        needed them.
        """
        self._unconfirmed_syncs = []
        super().begin(step)

    def step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step (`SyncRolloutLoop.step`); rollout ranks receive weights after the steps that they are playing."""
        self.sources.update_ranks(step - 1)
        ranks_before, self._acting_ranks = self._acting_ranks, tuple(self.sources.slots.acting_ranks)
        self._has_synced = self._has_synced and self._acting_ranks == ranks_before  # a joined rank has no weights
        weights = self._sync_if_due(step)
        self.sources.start_until(min(step + self.max_staleness, self.last_step_ahead(step)))
        with timers("rollout"):
            shards = self.sources.wait_for_shards(step)
        receive_call = self.sources.receive(step, shards)
        update_call = self.actor.update(step, progress)
        confirms = self.sources.plays(step)
        with timers("rollout"):
            episodes, act_s, simulate_s = self.sources.outcome(step, shards)
        with timers("sync"):
            self._await_weights(weights, confirms=confirms)
        with timers(self.receive_phase):
            rollout_counts = RolloutCounts.sum(receive_call.wait(self.timeout))
        with timers("update"):
            train_metrics = update_call.wait(self.timeout)[0]
        decisions = self.sources.joined_decisions(shards)
        return RolloutStepResults(rollout_counts, episodes, act_s, simulate_s, train_metrics, decisions)

    def _await_weights(self, weights: list[Any], *, confirms: bool) -> None:
        """Waits until the rollout ranks have received the weights; without `confirms`, until they are sent."""
        self._unconfirmed_syncs += weights
        for weights_call in self._unconfirmed_syncs if confirms else weights[:1]:
            weights_call.wait(self.timeout)
        if confirms:
            self._unconfirmed_syncs = []


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
        self._give_devices_to_actor()

    def step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step (`SyncRolloutLoop.step`); the actors are offloaded during the rollout."""
        with timers("sync"):
            if self._is_sync_due(step):
                self._sync(step - 1)
            self._give_devices_to_rollout()
        self.sources.play(step)
        receive_call = self.sources.receive(step)
        with timers("rollout"):
            episodes, act_s, simulate_s = self.sources.outcome(step)
        with timers(self.receive_phase):
            rollout_counts = RolloutCounts.sum(receive_call.wait(self.timeout))
        with timers("update"):
            self._give_devices_to_actor()
            train_metrics = self.actor.update(step, progress).wait(self.timeout)[0]
        return RolloutStepResults(rollout_counts, episodes, act_s, simulate_s, train_metrics)

    def evaluate(self, version: int) -> list[EvaluationRows]:
        """Runs evaluation episodes (`SyncRolloutLoop.evaluate`) while the actors are offloaded."""
        self._sync(version)
        self._give_devices_to_rollout()
        evaluation_parts = self.sources.evaluate()()
        self._give_devices_to_actor()
        return evaluation_parts

    def _sync(self, version: int) -> None:
        """Sends the actor's weights, as `version`, while the actors occupy the accelerators.

        A rollout rank that gets the weights within its accelerator first reloads its policy, if there is memory for both.
        """
        rollout, timeout_s = self.sources.rollout, self.timeout
        if self.offload_rollout and self.sources.slots.weight_sources:
            self.actor.release_cache().wait(timeout_s)
            if min(rollout.free_beside_update().wait(timeout_s)) > 0:
                rollout.reload().wait(timeout_s)
        wait_all(self.sources.sync(version), timeout_s)

    def _give_devices_to_rollout(self) -> None:
        if self.offload_actor:
            self.actor.offload().wait(self.timeout)
        if self.offload_rollout:
            self.sources.rollout.reload().wait(self.timeout)

    def _give_devices_to_actor(self) -> None:
        self._offload_sources()
        if self.offload_actor:
            self.actor.reload().wait(self.timeout)

    def _offload_sources(self) -> None:
        """Offloads rollout and env ranks from the accelerators."""
        if self.offload_rollout:
            self.sources.rollout.offload().wait(self.timeout)
        self.sources.rollout.release_observations().wait(self.timeout)
        self.sources.env.offload().wait(self.timeout)


class RolloutRunner(Runner[Cfg]):
    """Base of runners whose policies are trained on their own rollouts: counters and metrics of episodes.

    Args:
        cfg: Configuration.
        groups: Launched groups by role.
        run: Run folder; by default the folder given by `runner.run_dir` and `runner.name`.
        stop: Request to end early, checked between steps.
    """

    def __init__(
        self, cfg: Cfg, groups: dict[str, Any], *, run: RunFolder | None = None, stop: StopRequest | None = None
    ) -> None:
        super().__init__(cfg, groups, run=run, stop=stop)
        self.env_steps, self.episodes, self._num_nonfinite_steps = 0, 0, 0
        self.lost_counts: collections.Counter[str] = collections.Counter()
        self.window: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=WINDOW)
        self._recent_steps: collections.deque[tuple[float, int]] = collections.deque(maxlen=_RATE_STEPS)

    @abstractmethod
    def run_step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step on the ranks.

        Args:
            step: Number of the step.
            progress: Completed fraction of the run.
            timers: Timers of the phases.
        """

    @abstractmethod
    def evaluate(self, version: int) -> list[EvaluationRows]:
        """Runs evaluation episodes with the weights of the latest update, of `version`; returns the results of the parts
        that the ranks played.
        """

    def pop_num_lost(self) -> int:
        """Returns the number of ranks lost since the last call."""
        return 0

    def pop_transfer_metrics(self) -> dict[str, float]:
        """Returns the metrics of the weight updates since the last call."""
        return {}

    # -- steps ----------------------------------------------------------------------------------------------------

    def one_step(self) -> dict[str, float]:
        """Runs one step and returns its row of metrics."""
        step, timers, start_s = self.step + 1, PhaseTimers(), active_s()
        step_outcome = self.run_step(step, self.step / max(self.folder.total, 1), timers)
        rollout_counts, chunk = step_outcome.counts, self.cfg.actor.model.num_action_chunks
        num_executed = rollout_counts.num_received * chunk - int(step_outcome.episodes["skipped"].sum())
        losses = {"ranks": self.pop_num_lost(), "steps": rollout_counts.dropped[DropReason.RANK_LOST] * chunk}
        self.lost_counts.update({name: num_lost for name, num_lost in losses.items() if num_lost})
        row = self._build_row(
            step,
            start_s,
            step_outcome.train_metrics,
            step_outcome.episodes,
            float(rollout_counts.version),
            num_executed,
            timers,
        )
        busy_s = {"time/simulate_s": step_outcome.simulate_s, "time/act_s": step_outcome.act_s}
        row |= {name: rank_busy_s for name, rank_busy_s in busy_s.items() if rank_busy_s is not None}
        row |= joined_metrics(step_outcome.joined_decisions, chunk) | self.pop_transfer_metrics()
        self._count_nonfinite(step, row, rollout_counts.dropped[DropReason.NONFINITE])
        if num_failed := rollout_counts.dropped[DropReason.ENV_FAILED]:
            row["env/failed"] = num_failed
        if num_filtered := rollout_counts.dropped[DropReason.FILTERED]:
            row["env/filtered"] = num_filtered
        return row

    def _count_nonfinite(self, step: int, row: dict[str, float], num_nonfinite: int) -> None:
        """Counts transitions that were dropped because they contain non-finite values.

        Raises:
            NonFinite: Too many consecutive steps had no finite transitions.
        """
        if num_nonfinite:
            row["env/nonfinite"] = num_nonfinite
        all_nonfinite = num_nonfinite * self.cfg.actor.model.num_action_chunks >= self._count_transitions_per_step()
        self._num_nonfinite_steps = self._num_nonfinite_steps + 1 if all_nonfinite else 0
        if self._num_nonfinite_steps >= MAX_IN_A_ROW:
            raise nonfinite(
                f"step {step}: nothing that the environments brought was finite, {self._num_nonfinite_steps} steps in a row"
            )

    def _build_row(
        self,
        step: int,
        start_s: float,
        train_metrics: dict[str, float],
        episodes: dict[str, np.ndarray],
        version: float,
        num_transitions: int,
        timers: PhaseTimers,
    ) -> dict[str, float]:
        """Adds a step that began at `start_s` to the counters and returns its row of metrics. Runs an evaluation if it
        is due.
        """
        elapsed_s = active_s() - start_s
        self.step = step
        self.env_steps += num_transitions
        self._recent_steps.append((elapsed_s, num_transitions))
        self.episodes += len(episodes["return"])
        self.window.extend(autonomous_episodes(episodes))
        row: dict[str, float] = {
            f"train/{name}": metric for name, metric in train_metrics.items() if name != "update_s"
        }
        if "update_s" in train_metrics:  # updates without transitions to train on have no duration
            row["time/train_s"] = train_metrics["update_s"]
        row.update(self._compute_episode_metrics())
        row.update(episode_metrics(episodes))
        row["rollout/version"], row["rollout/env_steps"] = version, self.env_steps
        if num_restarts := int(episodes["restarts"].sum()):
            row["env/restarts"] = num_restarts
        if num_nonfinite := int(episodes["spoiled"].sum()):
            row["env/nonfinite_episodes"] = num_nonfinite
        row.update({f"env/lost_{name}": num_lost for name, num_lost in self.lost_counts.items()})
        eval_interval = self.cfg.runner.val_check_interval
        if eval_interval > 0 and step % eval_interval == 0:
            with timers("eval"):
                metrics = evaluation_metrics(self.cfg, self.evaluate(step))
                row.update({f"eval/{name}": metric for name, metric in metrics.items()})
        row.update(timers.pop())
        row["time/step_s"] = elapsed_s
        row["time/env_steps_per_s"] = sum(num_env_steps for _, num_env_steps in self._recent_steps) / sum(
            s for s, _ in self._recent_steps
        )
        return row

    def _count_transitions_per_step(self) -> int:
        """Returns the number of transitions per step."""
        cfg = self.cfg
        return (cfg.env.train.num_envs * cfg.algorithm.rollout_steps) * cfg.actor.model.num_action_chunks

    def _mean_return(self) -> float | None:
        return float(np.mean([row[0] for row in self.window])) if self.window else None

    def _compute_episode_metrics(self) -> dict[str, float]:
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
            **transfer_facts(row),
        }


class PlayingRunner(RolloutRunner[Cfg]):
    """Base of runners with env and rollout ranks.

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
        group_names = {"actor_name": actor.name, "rollout_name": rollout.name, "env_name": env.name}
        group_names["token"] = secrets.token_hex(4)
        can_share = cfg.rollout.weight_sync in STAY_ON_ACCELERATORS and not cfg.algorithm.max_staleness
        slots = SlotMap.from_config(
            cfg, num_env_ranks=env.world_size, num_rollout_ranks=rollout.world_size,
            num_actor_ranks=actor.world_size, **group_names,
            weight_sources=weight_sources(actor.accelerators, rollout.accelerators) if can_share else (),
        )  # fmt: skip
        self.sources = RolloutSources(
            env,
            rollout,
            actor,
            slots,
            num_decisions=cfg.algorithm.rollout_steps,
            max_ahead=cfg.algorithm.max_staleness,
            is_divisible=divisible(cfg),
            num_parts=num_parts_of(cfg),
            generate=self.generate,
            has_random_actions=self.has_random_actions,
            restarts=lambda: self.max_recoveries,
            timeout=cfg.runner.step_timeout_s,
        )
        self.env, self.rollout = self.sources.env, self.sources.rollout
        super().__init__(cfg, {"actor": actor, "rollout": self.rollout, "env": self.env}, run=run, stop=stop)
        self.actor = actor
        self.check()
        self.loop = self.make_loop()

    @property
    def slots(self) -> SlotMap:
        """Current slot map."""
        return self.sources.slots

    def check(self) -> None:
        """Checks the configuration before any rank builds its model; subclasses override it."""

    @property
    def _loop_arguments(self) -> tuple[RolloutSources, WorkerGroup, str, float]:
        return self.sources, self.actor, self.receive_phase, self.timeout

    def make_loop(self) -> SyncRolloutLoop:
        """Builds the loop that runs the steps."""
        staleness, sync_interval = self.cfg.algorithm.max_staleness, self.cfg.runner.weight_sync_interval
        if staleness:
            return AsyncRolloutLoop(
                *self._loop_arguments, staleness, self._find_last_step_ahead, weight_sync_interval=sync_interval
            )
        return SyncRolloutLoop(*self._loop_arguments, weight_sync_interval=sync_interval)

    def run_step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Runs a step in the loop (`RolloutRunner.run_step`)."""
        return self.loop.step(step, progress, timers)

    def evaluate(self, version: int) -> list[EvaluationRows]:
        """Runs evaluation episodes in the loop (`RolloutRunner.evaluate`)."""
        return self.loop.evaluate(version)

    def pop_num_lost(self) -> int:
        """Returns the number of lost ranks (`RolloutSources.pop_num_lost`)."""
        return self.sources.pop_num_lost()

    def pop_transfer_metrics(self) -> dict[str, float]:
        """Returns the metrics of the weight updates since the last call (`RolloutRunner.pop_transfer_metrics`)."""
        return self.sources.pop_transfer_metrics()

    # -- start ----------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Builds environments and models on all ranks and connects them."""
        self.loop.build_policies(self.sources.build())
        self.sources.connect()

    def check_restored(self, answers: dict[str, list[Any]]) -> None:
        """Writes a note if some simulators could not be restored and have lost their episodes in progress."""
        if not all(answers["env"]):
            note("the simulators cannot be restored; their episodes start anew, so this resume is not bit for bit")

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Restarts env and rollout ranks that have ended."""
        self.loop.rebuild(lost_ranks)

    def count_lost(self, num_ranks: int, state_before: dict[str, Any]) -> None:
        """Adds lost ranks, transitions (including those of the step in progress) and episodes to `lost_counts`."""
        self.lost_counts["ranks"] += num_ranks
        self.lost_counts["steps"] += state_before["env_steps"] - self.env_steps + self._count_transitions_per_step()
        self.lost_counts["episodes"] += state_before["episodes"] - self.episodes

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Drops the steps that were played before the training needed them."""
        self.loop.begin(self.step)

    def generate(self, rollout: WorkerGroup, full_rollout: FullRollout) -> Any:
        """Starts a rollout on the rollout ranks; returns a handle."""
        return rollout.generate(full_rollout)

    def has_random_actions(self, step: int) -> bool:
        """Returns whether all actions of a step are random."""
        del step
        return False

    def _find_last_step_ahead(self, step: int) -> int:
        """Returns the last step that may be played before `step` is trained: the next that saves or evaluates, or the last."""
        intervals = (self.cfg.runner.save_interval, self.cfg.runner.val_check_interval)
        interval_ends = [-(-step // step_interval) * step_interval for step_interval in intervals if step_interval > 0]
        return min([self.folder.end_step, *interval_ends])

    def _save(self, logger: Any) -> None:
        if self.sources.in_progress:
            note(
                "the run stops while environments are ahead of the actors: the steps they have played since are played "
                "again after a resume, which so loses nothing but is not bit for bit"
            )
        if self.step % self.cfg.runner.weight_sync_interval and self.step < self.folder.total:
            note("the run stops between two weight syncs; a resume syncs at once, and so is not bit for bit")
        super()._save(logger)


class EmbodiedRunner(PlayingRunner[PpoConfig]):
    """Runner of on-policy training in simulators."""

    def check(self) -> None:
        """Checks the settings of the training backend before any rank builds its model."""
        check_backend(self.cfg.actor)

    def make_loop(self) -> SyncRolloutLoop:
        """Builds the loop that runs the steps (`PlayingRunner.make_loop`): a colocated loop if a group is offloaded."""
        offload_actor, offload_rollout = self.cfg.actor.enable_offload, self.cfg.rollout.enable_offload
        if not offload_actor and not offload_rollout:
            return super().make_loop()
        return ColocatedRolloutLoop(
            *self._loop_arguments,
            weight_sync_interval=self.cfg.runner.weight_sync_interval,
            offload_actor=offload_actor,
            offload_rollout=offload_rollout,
        )


class TensorRunner(RolloutRunner[Cfg]):
    """Runner of training with environments of tensors, on actor ranks alone.

    Args:
        cfg: Configuration.
        actor: Launched group of `SimulatingActor`.
        run, stop: See `RolloutRunner`.
    """

    def __init__(self, cfg: Cfg, actor: Any, *, run: RunFolder | None = None, stop: StopRequest | None = None) -> None:
        super().__init__(cfg, {"actor": actor}, run=run, stop=stop)
        ranks = actor.world_size
        self.slots = SlotMap.from_config(
            cfg, num_env_ranks=ranks, num_rollout_ranks=ranks, num_actor_ranks=ranks, actor_name=actor.name
        )
        self.actor = actor

    def build(self) -> None:
        """Builds environments and policy on all ranks."""
        self.actor.build(self.slots).wait(self.timeout)

    def check_restored(self, answers: dict[str, list[Any]]) -> None:
        """Writes a note if some episodes in progress could not be restored."""
        if not all(self.actor.has_restored_episodes().wait(self.timeout)):
            note("the simulators cannot be restored; their episodes start anew, so this resume is not bit for bit")

    def run_step(self, step: int, progress: float, timers: PhaseTimers) -> RolloutStepResults:
        """Plays a rollout, trains on it and reads the metrics (`RolloutRunner.run_step`). Issues all calls at once."""
        play_call = self.play(step)
        train_call = self.actor.train(step, progress)
        read_call = self.actor.read_step()
        with timers("rollout"):
            play_call.wait(self.timeout)
        with timers("update"):
            train_call.wait(self.timeout)
            rollout_counts, reports, train_metrics = zip(*read_call.wait(self.timeout), strict=True)
        return RolloutStepResults(
            RolloutCounts.sum(rollout_counts), merge_reports(list(reports)), None, None, train_metrics[0]
        )

    def play(self, step: int) -> Any:
        """Makes the actors play a step; returns a handle."""
        return self.actor.play(step)

    def evaluate(self, version: int) -> list[EvaluationRows]:
        """Evaluates on all ranks, each with a part of the slots (`RolloutRunner.evaluate`)."""
        del version
        ranks = self.actor.world_size
        evaluation_calls = [self.actor.execute_on(rank).evaluate(rank, ranks) for rank in range(ranks)]
        return [evaluation_call.wait(self.timeout)[0] for evaluation_call in evaluation_calls]


def ppo_runner(cfg: PpoConfig, **groups: Any) -> TensorRunner[PpoConfig] | EmbodiedRunner:
    """Builds the runner of an on-policy run from its groups, and from the options `run` and `stop`."""
    return TensorRunner(cfg, **groups) if acts_in_actor(cfg) else EmbodiedRunner(cfg, **groups)
