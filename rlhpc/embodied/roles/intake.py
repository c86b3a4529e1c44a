"""What a trainer's rank takes in of a rollout: the trajectories of its slots, and which of them are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlhpc.algorithms.finite import nonfinite, skips
from rlhpc.embodied.envs.finite import bad_rows, is_finite
from rlhpc.embodied.roles.slots import SlotMap

if TYPE_CHECKING:
    from rlhpc.embodied.config import PpoConfig, SacConfig
    from rlhpc.runtime.channel import Channel


class Intake:
    """The receiving end of the trajectories.

    Args:
        cfg: Configuration.
        slots: Which rank has which slots.
        rank: Rank of the trainer.
    """

    def __init__(self, cfg: PpoConfig | SacConfig, slots: SlotMap, rank: int) -> None:
        self.slots, self.share, self._rank, self._skip = slots, slots.actor_share(rank), rank, skips(cfg)

    def connect(self, trajectories: Channel) -> None:
        """Connects to the channel that it takes from."""
        self._trajectories = trajectories

    def columns(self) -> tuple[dict[str, np.ndarray], int]:
        """This step's trajectories of the rank's slots `[n, T, ...]`, and the oldest version that acted."""
        parts = [
            self._trajectories.get(key=self.slots.to_actor_key(stage, rank, self._rank))
            for stage, rank, _ in self.slots.sources_of(self._rank)
        ]
        version = min(part.pop("version") for part in parts)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, version

    def spoiled(self, step: int, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Which of a step's transitions are not finite, bool `[n, T]`: by what the env ranks say, and by what came.

        Raises:
            NonFinite: There is one, and `runner.on_nonfinite` is stop.
        """
        bad: np.ndarray = columns.pop("nonfinite")
        found = [name for name, column in columns.items() if not is_finite(column)]
        if found and not self._skip:
            rows = [bad_rows(columns[name], 2) for name in found]
            slot, t = (int(index[0]) for index in np.nonzero(np.logical_or.reduce(rows)))
            raise nonfinite(
                f"step {step}, decision {t}: of slot {self.share.start + slot} (actor-{self._rank}) {', '.join(found)} "
                f"{'is' if len(found) == 1 else 'are'} not finite"
            )
        for name in found:
            bad = bad | bad_rows(columns[name], 2)
        return bad
