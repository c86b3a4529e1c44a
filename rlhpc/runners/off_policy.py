"""OffPolicyRunner: the loop of off-policy learning in simulators.

A step: `rollout_steps` decisions in every slot, the transitions go into the actors' buffers, and the actors make the updates
that are due. With `algorithm.max_staleness: k` policy and simulators play up to k steps ahead while the actors train, with
weights at most k versions older than those of the synchronous loop. Before a checkpoint and before an evaluation they
wait, so that a resumed run goes on as the uninterrupted one would.
"""

from __future__ import annotations

import time
from typing import Any

from rlhpc.metrics import PhaseTimers
from rlhpc.roles.outcomes import in_order
from rlhpc.runners.embodied import EmbodiedRunner
from rlhpc.runners.run_folder import note


class OffPolicyRunner(EmbodiedRunner):
    """Trains a policy by SAC. Arguments as `EmbodiedRunner`'s."""

    def check(self) -> None:
        """A batch is drawn, so that it divides nothing."""

    def init_workers(self) -> None:
        """See `Runner.init_workers`."""
        algorithm = self.cfg.algorithm
        self.random_steps = int(algorithm.replay_buffer.min_buffer_size)
        if algorithm.random_steps is not None:
            self.random_steps = int(algorithm.random_steps)
        elif self.cfg.runner.init_from is not None:
            self.random_steps = 0  # it can act already
        super().init_workers()

    def state(self) -> dict[str, Any]:
        """See `EmbodiedRunner.state`."""
        return {**super().state(), "random_steps": self.random_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of `state`."""
        super().load_state(state)
        self.random_steps = int(state["random_steps"])

    def begin(self) -> None:
        """Nothing is under way."""
        self._played: dict[int, tuple[Any, Any]] = {}
        self._next, self._sent = self.step + 1, -1

    def one_step(self) -> dict[str, float]:
        """Rollout, transitions, updates."""
        step, timers, begin = self.step + 1, PhaseTimers(), time.perf_counter()
        sync = []
        if self._sent != self.step:  # the weights that the last update left
            sync = [self.actor.sync_weights(self.step), self.rollout.sync_weights()]
            self._sent = self.step
        while self._next <= min(step + int(self.cfg.algorithm.max_staleness), self._stop_before(step)):
            self._played[self._next] = (
                self.rollout.generate(self._next, self.random_steps),
                self.env.interact(self._next),
            )
            self._next += 1
        progress = self.step / max(self.folder.total, 1)
        receive, update = self.actor.receive(), self.actor.update(step, progress)
        with timers("sync"):
            for handle in sync:
                handle.wait(self.timeout)
        with timers("rollout"):
            episodes = in_order([handle.wait(self.timeout) for handle in self._played.pop(step)][1])
        with timers("receive"):
            acted = min(facts["version"] for facts in receive.wait(self.timeout))
        with timers("update"):
            trained = update.wait(self.timeout)[0]
        return self._row(step, begin, trained, episodes, acted, timers)

    def _stop_before(self, step: int) -> int:
        """The last step that may be played before the weights of a step to come are saved or evaluated."""
        every = (int(self.cfg.runner.save_interval), int(self.cfg.runner.val_check_interval))
        ends = [-(-step // interval) * interval for interval in every if interval > 0]
        return min([self.folder.end_step, *ends])

    def _save(self, logger: Any) -> None:
        if self._played:
            note(
                "the run stops while environments are ahead of the actors: the steps they have played since are played "
                "again after a resume, which so loses nothing but is not bit for bit"
            )
        super()._save(logger)
