"""EmbodiedRunner: the loop of PPO and its relatives, where players and trainers may share accelerators."""

from __future__ import annotations

from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.runners.playing import PlayingRunner
from rlhpc.embodied.update.blueprint import check_backend


class EmbodiedRunner(PlayingRunner[PpoConfig]):
    """Trains a policy in simulators."""

    def check(self) -> None:
        """Refuses what the training backend would refuse."""
        check_backend(self.cfg.actor)

    @property
    def turns(self) -> bool:
        """See `PlayingRunner.turns`: with `actor.enable_offload` or `rollout.enable_offload`."""
        return self.cfg.actor.enable_offload or self.cfg.rollout.enable_offload

    def change_over(self, *, playing: bool) -> None:
        """See `PlayingRunner.change_over`: who has them leaves first. Those who train also save and send, so they have them
        between steps."""
        if not playing:
            self.rest()
        if self.cfg.actor.enable_offload:
            (self.actor.offload() if playing else self.actor.reload()).wait(self.timeout)
        if playing and self.cfg.rollout.enable_offload:
            self.rollout.reload().wait(self.timeout)

    def rest(self) -> None:
        """See `PlayingRunner.rest`."""
        if self.cfg.rollout.enable_offload:
            self.rollout.offload().wait(self.timeout)
        if self.turns:
            self.rollout.let_go().wait(self.timeout)
            self.env.offload().wait(self.timeout)

    def rebuild(self, gone: dict[str, list[int]]) -> None:
        """See `PlayingRunner.rebuild`. Whose turn it was is not known: those who train leave first."""
        if self.cfg.actor.enable_offload:
            self.actor.offload().wait(self.timeout)
        super().rebuild(gone)
        self.change_over(playing=False)
