"""EnvWorker: the simulators of a run that learns from rollouts; and whether simulators can be built."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.envs.observations import take
from rlhpc.embodied.models.noise import noise_of_slots
from rlhpc.embodied.rollout.slot_map import SlotMap, UnitMap
from rlhpc.embodied.rollout.step_outcomes import EpisodeLog, OutcomeShape, ppo_shape
from rlhpc.embodied.rollout.work_sharing import PARTS, PLAYED, DeliveredShard, RolloutShard
from rlhpc.embodied.workers.env_base import Cfg, SimulatingWorker
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from rlhpc.runtime.plugins import load_attribute

if TYPE_CHECKING:
    from rlhpc.embodied.workers.rollout import ActingWorker


#: What the actor tells a rank of weights that it sends it.
LENT = "lent"
_LOOK_S = 0.005


def unit_map(slots: SlotMap, rank: int) -> UnitMap:
    """The slots of a rank that has joined: as many as the largest unit has, with numbers that no other rank has."""
    return UnitMap(
        slots.unit, group_size=slots.group_size, actor_name=slots.actor_name, rollout_name=slots.env_name,
        env_name=slots.env_name, first=slots.num_envs + (rank - slots.env_ranks) * slots.unit,
    )  # fmt: skip


def words_of(seed: int, rank: int, begun: int) -> list[int]:
    """What the seeds of a rank follow from that has joined: its slots begin other episodes than those of any other rank, also
    of an earlier start of the run."""
    return [seed, 1, rank, begun]


class Replica:
    """Slots that are played without other ranks.

    Args:
        simulating: This rank, which has built its simulators.
        acting: The policy's side, in the same process.
        slots: Those of the run.
        begun: Steps that were done when it joined.
    """

    def __init__(
        self, simulating: SimulatingWorker[Any], acting: ActingWorker[Any], slots: SlotMap, begun: int
    ) -> None:
        self._simulating, self._acting, self._slots = simulating, acting, slots
        self._words, self._rank = words_of(acting.seed, simulating.rank, begun), simulating.rank
        self._version = -1

    def connect(self) -> None:
        """Connects to the channels; again, after others have failed. Weights come before anything else."""
        self._parts = self._simulating.connect_channel(PARTS)
        self._played = self._simulating.connect_channel(PLAYED)
        self._acting.sync.forget()
        self._version = -1

    def play(self, asked: RolloutShard, random: bool) -> None:
        """Plays a part, and gives it to the actors: all of it, or, if this rank is to leave, what there is by then. Rollouts
        that are whole episodes are given whole or not at all.

        Args:
            asked: The part.
            random: Whether actions are drawn at random, as at the start of off-policy runs.
        """
        rank = self._simulating
        rank.before_leaving(lambda: None)  # from now on it ends after this call, which returns early
        self._take_weights(asked.version)
        self._acting.draws(random)
        made, columns, episodes = self._roll(asked)
        for actor in range(self._slots.actor_ranks if made else 0):
            part = self._slots.unit_for(asked.unit, actor)
            if part.stop > part.start:
                message: dict[str, Any] = {name: column[part] for name, column in columns.items()}
                message["version"] = self._version
                self._parts.entrust(message, key=self._slots.part_key(asked.key, actor))
        self._played.entrust(DeliveredShard(asked.number, asked.key, self._rank, made, self._version, episodes))
        rank.before_leaving(None)

    def _roll(self, asked: RolloutShard) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Decisions that were made, trajectories `[n, T, ...]` and episodes."""
        rank, acting, begun = self._simulating, self._acting, time.perf_counter()
        env, share, whole = rank.envs[0], rank.shares[0], rank.shape().whole
        wanted = len(self._slots.unit_share(asked.unit))  # of what further slots play nothing is taken in
        outcomes, episodes = rank.outcomes_of(asked.step, share), EpisodeLog()
        if whole:
            rank.new_episodes(asked.step)
        made, chosen = 0, list[np.ndarray]()
        while made < asked.decisions and not rank.told_to_leave:
            shown = outcomes.shown(made, rank.obs[0])
            with torch.inference_mode():
                acting.decide(0, [(slice(None), made)], self._noise(asked, made), shown, chosen.append)
            obs, rewards, terminations, truncations, infos = env.chunk_step(chosen.pop())
            rank.obs[0] = obs
            episodes.count_skipped(infos, slice(wanted))
            ended = outcomes.add(made, rewards, terminations, truncations, infos)
            if ended is not None:
                episodes.add(made, share.start, infos, ended[ended < wanted])
            made += 1
        if whole and made < asked.decisions:
            made = 0
            episodes.skipped = 0
        columns: dict[str, np.ndarray] = {}
        if made:
            everything = slice(0, len(share))
            last = take(outcomes.shown(made, rank.obs[0]), everything)
            acting.buffers[0].made = made
            with torch.inference_mode():
                (columns,) = acting.columns([outcomes.part(everything, last, made)])
            acting.cut(columns)
        report = episodes.report(restarts=env.restarts, busy_s=time.perf_counter() - begun, timing=[env.timing])
        return made, columns, report

    def _noise(self, part: RolloutShard, t: int) -> torch.Tensor:
        words, slots = (*self._words, part.number, t), range(len(self._simulating.shares[0]))
        return noise_of_slots(self._acting.policy.sample_noise, words, slots).to(self._acting.device)

    def _take_weights(self, version: int) -> None:
        """Takes in what the actor has sent, and waits for weights that are new enough, unless this rank is to leave.

        Raises:
            DeadlineExceeded: They did not come.
        """
        deadline = time.monotonic() + self._acting.cfg.runner.step_timeout_s
        while True:
            try:
                self._simulating.notice(LENT)
            except queue.Empty:
                if self._version >= version or self._simulating.told_to_leave:
                    return
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the weights of step {version} did not reach {self._simulating.group_name}-{self._rank}"
                    ) from None
                time.sleep(_LOOK_S)
            else:
                self._version = self._acting.sync_weights()


def open_replica(
    simulating: SimulatingWorker[Any],
    make: Callable[[], ActingWorker[Any]],
    slots: SlotMap,
    spaces: tuple[Any, Any],
    begun: int,
) -> Replica:
    """Builds simulators and policy.

    Args:
        simulating: This rank.
        make: Makes the policy's side.
        slots: Those of the run.
        spaces: What its slots show and take.
        begun: Steps that are done.

    Raises:
        ConfigError: The environment is another one here.
    """
    unit = unit_map(slots, simulating.rank)
    seed = int(np.random.SeedSequence(words_of(simulating.given_seed, simulating.rank, begun)).generate_state(1)[0])
    facts = simulating.init_worker(unit, seed)
    if (facts["observation_space"], facts["action_space"]) != spaces:
        raise ConfigError(
            f"on {simulating.node}, env.train.env_id {simulating.cfg.env.train.env_id} shows or takes something else than "
            "where the run was started; have the same packages there"
        )
    acting = make()
    acting.init_worker(unit, *spaces)
    return Replica(simulating, acting, slots, begun)


class JoiningWorker(SimulatingWorker[Cfg]):
    """An env rank that may have joined the run: then it acts on its slots itself."""

    #: Who acts then.
    acts: str = ""
    _replica: Replica | None = None

    def open_replica(self, slots: SlotMap, spaces: tuple[Any, Any], begun: int) -> None:
        """Builds simulators of its own, and a policy that acts on them."""
        acts = load_attribute(self.acts, f"who acts for {type(self).__name__}")
        self._replica = open_replica(self, lambda: acts(self.cfg), slots, spaces, begun)

    def connect_replica(self) -> None:
        """See `Replica.connect`."""
        assert self._replica is not None
        self._replica.connect()

    def play(self, asked: RolloutShard, random: bool) -> None:
        """See `Replica.play`."""
        assert self._replica is not None
        self._replica.play(asked, random)


class EnvWorker(JoiningWorker[PpoConfig]):
    """Owns one vector environment per pipeline stage, with the slots that the `SlotMap` gives it."""

    acts = "rlhpc.embodied.workers.rollout:MultiStepRolloutWorker"

    def shape(self) -> OutcomeShape:
        """Of the outcomes."""
        return ppo_shape(self.cfg)
