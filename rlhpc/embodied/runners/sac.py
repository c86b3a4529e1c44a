"""OffPolicyRunner: the loop of off-policy learning in simulators.

A step: `rollout_steps` decisions in every slot, the transitions go into the actors' buffers, and the actors make the updates
that are due. The first `offline_steps` are others: nothing is played, and the actors learn from the demonstrations.
"""

from __future__ import annotations

from typing import Any

from rlhpc.embodied.config import SacConfig
from rlhpc.embodied.roles.outcomes import in_order
from rlhpc.embodied.roles.parts import Turn
from rlhpc.embodied.runners.playing import PlayingRunner
from rlhpc.metrics import PhaseTimers
from rlhpc.runtime.active_time import active_s
from rlhpc.runtime.worker_group import WorkerGroup


class OffPolicyRunner(PlayingRunner[SacConfig]):
    """Trains a policy by SAC and its kin. Batches are drawn from a buffer, so their size need not divide a rollout. Arguments
    as `EmbodiedRunner`'s."""

    receiving = "receive"

    def init_workers(self) -> None:
        """See `Runner.init_workers`."""
        algorithm = self.cfg.algorithm
        self.random_steps = algorithm.replay_buffer.min_buffer_size
        if algorithm.random_steps is not None:
            self.random_steps = algorithm.random_steps
        elif self.cfg.runner.init_from is not None or algorithm.offline_steps:
            self.random_steps = 0  # the policy can act already
        super().init_workers()

    def state(self) -> dict[str, Any]:
        """See `PlayingRunner.state`."""
        return {**super().state(), "random_steps": self.random_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned when the checkpoint was made."""
        super().load_state(state)
        self.random_steps = int(state["random_steps"])

    def one_step(self) -> dict[str, float]:
        """See `PlayingRunner.one_step`."""
        return self._offline_step() if self.step < self.cfg.algorithm.offline_steps else super().one_step()

    def _offline_step(self) -> dict[str, float]:
        """Has the actors learn from the demonstrations alone; the environments stand still."""
        step, timers, begin = self.step + 1, PhaseTimers(), active_s()
        with timers("update"):
            update = self.actor.update_offline(step, self.step / max(self.folder.total, 1))
            trained = update.wait(self.timeout)[0]
        row = self._row(step, begin, trained, in_order([]), 0.0, 0, timers)
        del row["rollout/version"]
        self.players.forget(step)
        return row

    def generate(self, rollout: WorkerGroup, turn: Turn) -> Any:
        """See `PlayingRunner.generate`."""
        return rollout.generate(turn, self._random_until)

    def at_random(self, step: int) -> bool:
        """See `PlayingRunner.at_random`."""
        return (step - 1) * self._decisions < self._random_until

    @property
    def _decisions(self) -> int:
        """Of a step, in all slots."""
        return self.slots.num_envs * self.cfg.algorithm.rollout_steps

    @property
    def _random_until(self) -> int:
        """Decisions of the run up to which actions are drawn at random, as if the first steps had been played, too."""
        return self.random_steps + self.cfg.algorithm.offline_steps * self._decisions if self.random_steps else 0
