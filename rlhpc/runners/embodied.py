"""EmbodiedRunner: the loop of a run with simulators.

Each step has four phases: the actor's weights go to the rollout workers; policy and simulators play; the actors take in
the trajectories; they train. The calls of a step are issued together and each rank executes its own in order, so that
no phase waits for a round trip to the driver.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.checkpoint import CheckpointWriter, newest_valid, prune
from rlhpc.metrics import MetricLogger, PhaseTimers, ProgressBar
from rlhpc.roles.actor import check_batches
from rlhpc.roles.exchange import SlotMap
from rlhpc.roles.outcomes import in_order
from rlhpc.runners.run_folder import RunFolder, note, segment_end
from rlhpc.runtime.comm.channel import Channel
from rlhpc.runtime.context import current
from rlhpc.runtime.errors import ChannelError, CheckpointError, RlhpcError, StepFailed, WorkerFailed
from rlhpc.runtime.launch.signals import StopRequest, end_of_job
from rlhpc.runtime.session import Session

#: Training episodes that `train/episode_return` averages over.
WINDOW = 100
#: Steps over which `env_steps_per_s` is averaged.
_RATE_STEPS = 10


def _p95(seconds: Collection[float]) -> float:
    return float(np.percentile(list(seconds), 95)) if seconds else 0.0


class EmbodiedRunner:
    """Owns the loop, the timers, the checkpoint cadence and the stop decision.

    Args:
        cfg: Configuration.
        actor, rollout, env: Launched groups.
        run: The run's folder; by default what `runner.run_dir` and `runner.name` say.
        stop: Asked between steps whether to end early.

    Raises:
        ConfigError: The counts of environments, stages and ranks do not divide one another.
    """

    def __init__(
        self,
        cfg: Any,
        actor: Any,
        rollout: Any,
        env: Any,
        *,
        run: RunFolder | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.cfg, self.actor, self.rollout, self.env = cfg, actor, rollout, env
        names = {"actor_name": actor.name, "rollout_name": rollout.name, "env_name": env.name}
        names["token"] = secrets.token_hex(4)
        self.slots = SlotMap.from_config(
            cfg, env=env.world_size, rollout=rollout.world_size, actor=actor.world_size, **names
        )
        check_batches(cfg)
        self.folder = RunFolder.plan(cfg) if run is None else run
        self.stop = stop or StopRequest()
        self.step, self.env_steps, self.episodes, self.elapsed = 0, 0, 0, 0.0
        self.window: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=WINDOW)
        self.stop_reason = ""
        self.timeout = None if cfg.runner.step_timeout_s is None else float(cfg.runner.step_timeout_s)
        self._recent: collections.deque[tuple[float, int]] = collections.deque(maxlen=_RATE_STEPS)
        self._steps_s: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._saves_s: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._saved_step = -1
        self._ready = False
        #: How often the environments and rollout ranks may be started again without a new checkpoint in between.
        self.max_recoveries = 0
        self.recoveries = 0
        self._vain, self._recovered_from = 0, -1

    # -- start ----------------------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Builds environments and models on all ranks, connects them, and restores the checkpoint to continue from."""
        self.folder.open(self.cfg)
        facts = self.env.init_worker(self.slots).wait(self.timeout)[0]
        spaces = (facts["observation_space"], facts["action_space"])
        built = [self.actor.init_worker(self.slots, *spaces), self.rollout.init_worker(self.slots, *spaces)]
        for handle in built:
            handle.wait(self.timeout)
        self._connect()
        if self.folder.resume.path is not None:
            self._restore(self.folder.resume.path)
        self._ready = True
        self.folder.mark("ready")

    def _connect(self) -> None:
        for name, home in self.slots.channels().items():
            Channel.create(name, home=home)
        for handle in [group.connect() for group in (self.env, self.actor, self.rollout)]:
            handle.wait(self.timeout)

    def _restore(self, checkpoint: Path) -> None:
        handles = [group.load(str(checkpoint)) for group in (self.actor, self.rollout, self.env)]
        restored = [handle.wait(self.timeout) for handle in handles][-1]
        if not all(restored):
            note("the simulators cannot be restored; their episodes start anew, so this resume is not bit for bit")
        try:
            state = json.loads((checkpoint / "runner.json").read_text())
            self.step, self.env_steps, self.episodes = (int(state[key]) for key in ("step", "env_steps", "episodes"))
            rows = ([float("nan") if value is None else float(value) for value in row] for row in state["window"])
            self.window.extend((row[0], row[1], row[2]) for row in rows)
            self.elapsed, self.stop_reason = float(state["elapsed_s"]), str(state["stop_reason"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{checkpoint / 'runner.json'}: cannot be read ({error!r})") from error
        self._saved_step = -1 if self.folder.foreign else self.step

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Trains until the end of this start, or until somebody asks to stop.

        Returns:
            global_step, env_steps, episode_return, stop_reason, finished (whether this start reached its end),
            checkpoint, elapsed_s.
        """
        if not self._ready:
            self.init_workers()
        folder = self.folder
        resumed = None if folder.resume.path is None else self.step
        while True:
            try:
                self._train(resumed)
                break
            except (WorkerFailed, StepFailed, ChannelError) as error:
                resumed = self._recover(error)
        finished = self.stop_reason != "signal"
        reason = self.stop_reason or ("max_steps" if self.step >= folder.total else "segment_end")
        why = self.stop.reason if reason == "signal" else reason
        state = "finished" if finished and reason != "segment_end" else "stopped"
        folder.write_status(state, self.step, force=True, stop_reason=why, **{"return": self._return()})
        return {
            "global_step": self.step,
            "env_steps": self.env_steps,
            "episode_return": self._return(),
            "stop_reason": reason,
            "finished": finished,
            "checkpoint": str(folder.paths.checkpoint(self.step)),
            "elapsed_s": self.elapsed,
        }

    def _train(self, resumed: int | None) -> None:
        """The loop, from the present step to the end of this start."""
        cfg, folder = self.cfg, self.folder
        backends = list(cfg.runner.logger.logger_backends)
        started, before = time.perf_counter(), self.elapsed
        # A stop_return that was reached stays reached; one that has since been raised does not.
        self.stop_reason = self._stop_return() if self.stop_reason == "stop_return" else ""
        with (
            MetricLogger(folder.paths, backends, resumed) as logger,
            ProgressBar(folder.end_step, self.step, name=str(cfg.runner.name)) as bar,
        ):
            folder.write_status("running", self.step, force=True, recoveries=self.recoveries)
            while self.step < folder.end_step and not self.stop_reason:
                self._check_walltime()
                if self.stop.requested:
                    self.stop_reason = "signal"
                    break
                row = self._step(before, started)
                if "first_step" not in folder.marks:
                    folder.mark("first_step")
                    folder.write_marks(current().registry.root)
                logger.log(self.step, row)
                bar.update(self.step, row)
                folder.write_status("running", self.step, **self._facts(row, bar))
                self.stop_reason = self._stop_return()
                if self._save_is_due():
                    self._save(logger)
            self.elapsed = before + time.perf_counter() - started
            if self._saved_step != self.step:
                self._save(logger)

    # -- after a failure of the environments or the rollout ranks ---------------------------------------------------

    def _recover(self, error: RlhpcError) -> int:
        """Starts the environment and rollout groups again and goes back to the newest checkpoint; the actors live on.

        Returns:
            The step to go on from.

        Raises:
            RlhpcError: `error`, where it cannot be recovered from: it was another group's, nothing is saved yet, or it
                comes again and again.
        """
        session = Session.running()
        newest = newest_valid(self.folder.paths, checksums=False).path
        if session is None or not session.expendable or newest is None or self.stop.requested:
            raise error
        step = int(newest.name.rpartition("_")[2])
        self._vain = self._vain + 1 if step <= self._recovered_from else 1
        self._recovered_from = step
        if self._vain > self.max_recoveries:
            raise error
        gone = session.recover()
        note(f"{str(error).splitlines()[0]}; {' and '.join(gone)} start again from {newest.name}, the actors stay")
        self.slots = dataclasses.replace(self.slots, token=secrets.token_hex(4))
        for group in (self.rollout, self.env):
            group.relaunch()
        for group in (self.rollout, self.env):
            group.wait_ready()
        facts = self.env.init_worker(self.slots).wait(self.timeout)[0]
        self.rollout.init_worker(self.slots, facts["observation_space"], facts["action_space"]).wait(self.timeout)
        self._connect()
        self.window.clear()
        self._restore(newest)
        self.recoveries += 1
        return self.step

    def _step(self, before: float, started: float) -> dict[str, float]:
        """One step; returns its row of metrics."""
        version, step = self.step, self.step + 1
        timers, begin = PhaseTimers(), time.perf_counter()
        progress = version / max(self.folder.total, 1)
        sync = [self.actor.sync_weights(version), self.rollout.sync_weights()]
        play = [self.rollout.generate(step), self.env.interact(step)]
        receive, update = self.actor.receive(), self.actor.update(step, progress)
        with timers("sync"):
            for handle in sync:
                handle.wait(self.timeout)
        with timers("rollout"):
            episodes = in_order([handle.wait(self.timeout) for handle in play][1])
        with timers("advantage"):
            acted = min(facts["version"] for facts in receive.wait(self.timeout))
        with timers("update"):
            trained = update.wait(self.timeout)[0]
        seconds = time.perf_counter() - begin
        self._steps_s.append(seconds)
        self.step = step
        transitions = self.slots.num_envs * int(self.cfg.algorithm.rollout_steps)
        self.env_steps += transitions
        self._recent.append((seconds, transitions))
        self._count(episodes)
        row: dict[str, float] = {f"train/{name}": value for name, value in trained.items()}
        row.update(self._episode_metrics())
        row["rollout/version"], row["rollout/env_steps"] = acted, self.env_steps
        self._validate(step, row, timers)
        self.elapsed = before + time.perf_counter() - started
        row.update(timers.pop())
        row["time/step_s"], row["time/wall_s"] = seconds, self.elapsed
        row["time/env_steps_per_s"] = sum(n for _, n in self._recent) / sum(s for s, _ in self._recent)
        return row

    def _count(self, episodes: dict[str, np.ndarray]) -> None:
        self.episodes += len(episodes["return"])
        rows = zip(episodes["return"].tolist(), episodes["length"].tolist(), episodes["success"].tolist(), strict=True)
        self.window.extend(rows)

    def _return(self) -> float | None:
        return float(np.mean([row[0] for row in self.window])) if self.window else None

    def _episode_metrics(self) -> dict[str, float]:
        found: dict[str, float] = {"train/episodes": self.episodes}
        if self.window:
            returns, lengths, success = np.asarray(self.window, np.float64).T
            found["train/episode_return"], found["train/episode_length"] = float(returns.mean()), float(lengths.mean())
            if not np.isnan(success).any():
                found["train/success_rate"] = float(success.mean())
        return found

    def _validate(self, step: int, row: dict[str, float], timers: PhaseTimers) -> None:
        every = int(self.cfg.runner.val_check_interval)
        if every <= 0 or step % every:
            return
        with timers("eval"):
            # The rollout ranks still act with the weights of before the update.
            handles = [self.actor.sync_weights(step), self.rollout.sync_weights()]
            result = self.rollout.execute_on(0).evaluate()
            for handle in handles:
                handle.wait(self.timeout)
            row.update({f"eval/{name}": value for name, value in result.wait(self.timeout)[0].items()})

    # -- when to stop ---------------------------------------------------------------------------------------------

    def _stop_return(self) -> str:
        goal, reached = self.cfg.runner.stop_return, self._return()
        full = len(self.window) == WINDOW
        return "stop_return" if goal is not None and full and reached is not None and reached >= float(goal) else ""

    def _check_walltime(self) -> None:
        """Stops while there is still time to save, where the scheduler says when the job ends."""
        end = end_of_job()
        reserve = max(float(self.cfg.runner.save_reserve_s), 2 * _p95(self._saves_s))
        if end is not None and time.time() + _p95(self._steps_s) + reserve > end:
            self.stop.request("the job's walltime leaves no room for another step")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save_is_due(self) -> bool:
        every = int(self.cfg.runner.save_interval)
        return every > 0 and self.step % every == 0

    def _save(self, logger: MetricLogger) -> None:
        """Commits the present step: first its rows, then its checkpoint."""
        begin = time.perf_counter()
        current().registry.check_current()  # a driver that another one has replaced commits nothing any more
        with CheckpointWriter(self.folder.paths, self.step) as writer:
            folder = str(writer.staging)
            for handle in [group.save(folder) for group in (self.actor, self.rollout, self.env)]:
                handle.wait(self.timeout)
            writer.add_bytes("runner.json", json.dumps(self._state(), indent=1).encode() + b"\n")
            writer.add_file("config.yaml", self.folder.paths.config)
            logger.commit()
            writer.commit({"env_steps": self.env_steps, "episode_return": self._return()})
        self._saved_step = self.step
        seconds = time.perf_counter() - begin
        self._saves_s.append(seconds)
        prune(self.folder.paths, int(self.cfg.runner.keep_checkpoints), self._protected(), checksums=False)

    def _protected(self) -> list[int]:
        """Steps at which segments ended: evaluation and conversion may still read them."""
        segments = int(self.cfg.runner.segments)
        planned = [segment_end(self.folder.total, k, segments) for k in range(segments)] if segments > 1 else []
        return [*planned, *self.folder.finished_segments()]

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "window": [[None if value != value else value for value in row] for row in self.window],
            "elapsed_s": self.elapsed,
            "stop_reason": self.stop_reason,
            "seed": int(self.cfg.runner.seed),
        }

    def _facts(self, row: dict[str, float], bar: ProgressBar) -> dict[str, Any]:
        return {
            "return": row.get("train/episode_return"),
            "env_steps": self.env_steps,
            "env_steps_per_s": row["time/env_steps_per_s"],
            "eta_s": bar.eta_s(),
        }
