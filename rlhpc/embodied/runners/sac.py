"""OffPolicyRunner: the loop of off-policy learning in simulators.

A step: `rollout_steps` decisions in every slot, the transitions go into the actors' buffers, and the actors make the updates
that are due.
"""

from __future__ import annotations

from typing import Any

from rlhpc.embodied.config import SacConfig
from rlhpc.embodied.runners.ppo import PlayingRunner
from rlhpc.runtime.group import WorkerGroup


class OffPolicyRunner(PlayingRunner[SacConfig]):
    """Trains a policy by SAC. Batches are drawn from a buffer, so their size need not divide a rollout. Arguments as
    `EmbodiedRunner`'s."""

    receiving = "receive"

    def init_workers(self) -> None:
        """See `Runner.init_workers`."""
        algorithm = self.cfg.algorithm
        self.random_steps = algorithm.replay_buffer.min_buffer_size
        if algorithm.random_steps is not None:
            self.random_steps = algorithm.random_steps
        elif self.cfg.runner.init_from is not None:
            self.random_steps = 0  # the policy can act already
        super().init_workers()

    def state(self) -> dict[str, Any]:
        """See `PlayingRunner.state`."""
        return {**super().state(), "random_steps": self.random_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned when the checkpoint was made."""
        super().load_state(state)
        self.random_steps = int(state["random_steps"])

    def generate(self, rollout: WorkerGroup, step: int) -> Any:
        """See `PlayingRunner.generate`."""
        return rollout.generate(step, self.random_steps)

    def at_random(self, step: int) -> bool:
        """See `PlayingRunner.at_random`."""
        return (step - 1) * self.slots.num_envs * self.cfg.algorithm.rollout_steps < self.random_steps
