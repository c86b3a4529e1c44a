"""OffPolicyRunner: the loop of off-policy learning in simulators.

A step: `rollout_steps` decisions in every slot, the transitions go into the actors' buffers, and the actors make the updates
that are due.
"""

from __future__ import annotations

from typing import Any

from rlhpc.embodied.runners.ppo import EmbodiedRunner


class OffPolicyRunner(EmbodiedRunner):
    """Trains a policy by SAC. Arguments as `EmbodiedRunner`'s."""

    receiving = "receive"

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

    def play(self, step: int) -> tuple[Any, Any]:
        """See `EmbodiedRunner.play`."""
        return self.rollout.generate(step, self.random_steps), self.env.interact(step)
