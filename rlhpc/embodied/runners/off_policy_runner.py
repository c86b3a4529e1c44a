"""Training loops of SAC and other off-policy algorithms: with env and rollout ranks, and with actors that act themselves."""

from __future__ import annotations

from typing import Any

from rlhpc.embodied.config import SacConfig, acts_in_actor
from rlhpc.embodied.rollout.step_outcomes import merge_reports
from rlhpc.embodied.rollout.work_sharing import FullRollout
from rlhpc.embodied.runners.rollout_runner import PlayingRunner, RolloutRunner, TensorRunner
from rlhpc.metrics import PhaseTimers
from rlhpc.metrics.phase_times import active_s
from rlhpc.runtime.worker_group import WorkerGroup


class OffPolicySteps(RolloutRunner[SacConfig]):
    """Base of runners of off-policy algorithms: random actions at the start of a run, and offline steps. A subclass inherits,
    after this class, the runner that plays the rollouts.
    """

    actor: Any

    def build(self) -> None:
        """Sets the number of random steps, then builds the workers."""
        algorithm = self.cfg.algorithm
        self.random_steps = algorithm.replay_buffer.min_buffer_size
        if algorithm.random_steps is not None:
            self.random_steps = algorithm.random_steps
        elif self.cfg.runner.init_from is not None or algorithm.offline_steps:
            self.random_steps = 0  # the policy is already trained
        super().build()

    def state(self) -> dict[str, Any]:
        """Returns the state (`RolloutRunner.state`) and the number of random steps."""
        return {**super().state(), "random_steps": self.random_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `state` returned when the checkpoint was made."""
        super().load_state(state)
        self.random_steps = int(state["random_steps"])

    def one_step(self) -> dict[str, float]:
        """Runs one step (`RolloutRunner.one_step`); the first `algorithm.offline_steps` steps train offline."""
        return self._run_offline_step() if self.step < self.cfg.algorithm.offline_steps else super().one_step()

    def _run_offline_step(self) -> dict[str, float]:
        """Trains on the demonstrations alone, without the environments; returns the step's row of metrics."""
        step, timers, start_s = self.step + 1, PhaseTimers(), active_s()
        with timers("update"):
            train_metrics = self.actor.update_offline(step, self.step / max(self.folder.total, 1)).wait(self.timeout)[0]
        row = self._build_row(step, start_s, train_metrics, merge_reports([]), 0.0, 0, timers)
        del row["rollout/version"]
        self.forget_rollout(step)
        return row

    def forget_rollout(self, step: int) -> None:
        """Forgets the rollout of a step that was not played."""

    @property
    def decisions_per_step(self) -> int:
        """Number of decisions per step, summed over all slots."""
        return self.cfg.env.train.num_envs * self.cfg.algorithm.rollout_steps

    @property
    def num_random_decisions(self) -> int:
        """Number of decisions with random actions at the start of the run; the decisions of offline steps count, too."""
        return (
            self.random_steps + self.cfg.algorithm.offline_steps * self.decisions_per_step if self.random_steps else 0
        )


class OffPolicyRunner(OffPolicySteps, PlayingRunner[SacConfig]):
    """Runner of SAC and other off-policy algorithms. Batches come from a replay buffer, so their size is independent of
    the rollout's size.

    Takes the arguments of `EmbodiedRunner`.
    """

    receive_phase = "receive"

    def forget_rollout(self, step: int) -> None:
        """Forgets the rollout of a step that was not played (`OffPolicySteps.forget_rollout`)."""
        self.sources.forget(step)

    def generate(self, rollout: WorkerGroup, full_rollout: FullRollout) -> Any:
        """Makes the rollout ranks act in a full rollout (`PlayingRunner.generate`). The run's first actions are random."""
        return rollout.generate(full_rollout, self.num_random_decisions)

    def has_random_actions(self, step: int) -> bool:
        """Returns whether all actions of a step are random (`PlayingRunner.has_random_actions`)."""
        return (step - 1) * self.decisions_per_step < self.num_random_decisions


class OffPolicyTensorRunner(OffPolicySteps, TensorRunner[SacConfig]):
    """Runner of off-policy algorithms with environments of tensors, on actor ranks alone (`TensorRunner`)."""

    def play(self, step: int) -> Any:
        """Makes the actors play a step (`TensorRunner.play`). The run's first actions are random."""
        return self.actor.play(step, self.num_random_decisions)


def off_policy_runner(cfg: SacConfig, **groups: Any) -> OffPolicyTensorRunner | OffPolicyRunner:
    """Builds the runner of an off-policy run from its groups, and from the options `run` and `stop`."""
    return OffPolicyTensorRunner(cfg, **groups) if acts_in_actor(cfg) else OffPolicyRunner(cfg, **groups)
