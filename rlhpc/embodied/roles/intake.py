"""What a trainer's rank takes in of a rollout: the trajectories of its slots, and which of them are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rlhpc.algorithms.finite import nonfinite, skips
from rlhpc.embodied.envs.finite import bad_rows, is_finite
from rlhpc.embodied.roles.slots import SlotMap
from rlhpc.runtime.channel import QueueEmpty

if TYPE_CHECKING:
    from rlhpc.embodied.config import PpoConfig, SacConfig
    from rlhpc.runtime.channel import Channel


class Reducing(Protocol):
    """A rank among others."""

    world_size: int

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The sum over all ranks."""


class Intake:
    """The receiving end of the trajectories.

    Args:
        cfg: Configuration.
        slots: Which rank has which slots.
        rank: Rank of the trainer.
    """

    def __init__(self, cfg: PpoConfig | SacConfig, slots: SlotMap, rank: int) -> None:
        self.slots, self.share, self._rank, self._skip = slots, slots.actor_share(rank), rank, skips(cfg)
        self._ahead = cfg.algorithm.max_staleness > 0

    def connect(self, trajectories: Channel, parts: Channel) -> None:
        """Connects to the channels that it takes from."""
        self._trajectories, self._parts = trajectories, parts

    def columns(self, units: Sequence[Sequence[int]] | None = None) -> tuple[dict[str, np.ndarray], int]:
        """This step's trajectories of the rank's slots `[n, T, ...]`, and the oldest version that acted. `lost [n, T]` is
        among them where env ranks have gone.

        Args:
            units: Of a step that ranks which joined have played: the keys of the parts, in order, of each unit.
        """
        if units is None:
            parts = [
                self._trajectories.get(key=self.slots.to_actor_key(stage, rank, self._rank))
                for stage, rank, _ in self.slots.sources_of(self._rank)
            ]
        else:
            parts = [self._unit(units[unit]) for unit in self.slots.units_of(self._rank)]
        version = min(part.pop("version") for part in parts)
        if any("lost" in part for part in parts):
            for part in parts:
                part.setdefault("lost", np.zeros(part["rewards"].shape[:2], bool))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, version

    def _unit(self, keys: Sequence[int]) -> dict[str, Any]:
        """This rank's slots of a unit: its parts one after the other."""
        parts = [self._parts.get(key=self.slots.part_key(key, self._rank)) for key in keys]
        version = min(part.pop("version") for part in parts)
        joined = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
        return {**joined, "version": version}

    def drop(self, keys: Sequence[int]) -> None:
        """Lets go of parts that will not be taken in, as far as they have come."""
        for key in keys:
            with contextlib.suppress(QueueEmpty):
                self._parts.get_nowait(key=self.slots.part_key(key, self._rank))

    def lost(self, columns: dict[str, np.ndarray]) -> np.ndarray:
        """Takes `lost` out of a step's columns: which transitions went with env ranks, bool `[n, T]`."""
        shape = columns["rewards"].shape[:2]
        found: np.ndarray = columns.pop("lost", np.zeros(shape, bool))
        return found

    def anybody(self, lost: np.ndarray, ranks: Reducing) -> bool:
        """Whether any rank of the group misses transitions; all call it. In synchronous runs none does."""
        if not self._ahead:
            return False
        count = torch.tensor([float(lost.sum())])
        return bool((ranks.all_reduce(count) if ranks.world_size > 1 else count).item())

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
