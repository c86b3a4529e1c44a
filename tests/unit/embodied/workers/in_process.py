"""An env rank and a rollout rank of a run in one process: links and channels between them are queues."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhpc.embodied.rollout.env_link import EnvLinks
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.work_sharing import FullRollout
from rlhpc.embodied.workers.env import EnvWorker
from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker
from rlhpc.runs.configuration import load_config
from tests.serving import temporary_scratch
from tests.unit.runtime.comm.rank_pairs import rank_pair


class QueueLink:
    """One end of a link."""

    def __init__(self, out: queue.Queue[Any], inbound: queue.Queue[Any]) -> None:
        self._out, self._inbound = out, inbound

    def put(self, rows: Any) -> None:
        self._out.put(rows.copy())

    def get(self) -> Any:
        return self._inbound.get(timeout=20)

    def ready(self) -> bool:
        return not self._inbound.empty()


class QueueChannel:
    """A channel between threads."""

    def __init__(self) -> None:
        self.items: dict[str, queue.Queue[Any]] = defaultdict(queue.Queue)

    def put(self, item: Any, key: str = "", **options: Any) -> None:
        self.items[key].put(item)

    entrust = put

    def get(self, key: str = "", timeout: float | None = None) -> Any:
        return self.items[key].get(timeout=timeout)


class RankPair:
    """An env rank that simulates all slots, and a rollout rank that acts in them.

    Attributes:
        sent: Channel of the transitions to the actors.
    """

    def __init__(self, slots: SlotMap, *overrides: str) -> None:
        words = ["actor.model.hidden_sizes=[8]", f"env.train.num_envs={slots.num_envs}", *overrides]
        self.cfg = load_config("configs/quickstart.yaml", words, check=False)
        self.slots = slots
        self.env, self.rollout = EnvWorker(self.cfg), MultiStepRolloutWorker(self.cfg)  # type: ignore[arg-type]
        facts = self.env.init_worker(slots)
        self.spaces = facts["observation_space"], facts["action_space"]
        self.rollout.init_worker(slots, *self.spaces)
        observations, actions = queue.Queue[Any](), queue.Queue[Any]()
        everything = range(slots.num_envs)
        self.env.links = self._links(self.env, slots.rollout_name, everything, QueueLink(observations, actions))
        self.rollout.links = self._links(self.rollout, slots.env_name, everything, QueueLink(actions, observations))
        self.env.peers = [slots.rollouts_of(0, 0)]
        outcomes, self.sent = QueueChannel(), QueueChannel()
        self.env._outcomes = self.rollout._outcomes = outcomes  # type: ignore[assignment]
        self.rollout._trajectories = self.sent  # type: ignore[assignment]
        self.rollout._watches = {0: lambda: None}

    @staticmethod
    def _links(worker: Any, group: str, slots: range, link: Any) -> EnvLinks:
        return EnvLinks(worker, group, [[(0, slots, link)]])

    def play(self, full_rollout: FullRollout) -> tuple[dict[str, Any], dict[str, float]]:
        """Plays a full rollout on both ranks; returns their reports."""
        reports: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: reports.update(self.env.interact(full_rollout)))
        thread.start()
        acted = self.rollout.generate(full_rollout)
        thread.join(20)
        return reports, acted


@contextmanager
def in_a_run(folder: Path) -> Iterator[None]:
    """Makes this process one of a run, of ranks `left-0` and `right-0`."""
    with temporary_scratch() as scratch, rank_pair(folder, scratch):
        yield
