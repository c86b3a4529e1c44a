"""Env worker of runs that learn from rollouts, and replicas: env ranks that joined and also run the policy."""

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


#: Notice of the actor to a rank to which it sends weights.
LENT = "lent"
_LOOK_S = 0.005


def unit_map(slots: SlotMap, rank: int) -> UnitMap:
    """Returns the slots of a rank that has joined: as many as the largest unit has, with numbers unique to this rank."""
    return UnitMap(
        slots.unit, group_size=slots.group_size, actor_name=slots.actor_name, rollout_name=slots.env_name,
        env_name=slots.env_name, first=slots.num_envs + (rank - slots.env_ranks) * slots.unit,
    )  # fmt: skip


def words_of(seed: int, rank: int, start_step: int) -> list[int]:
    """Returns the words from which the seeds of a rank that has joined are derived.

    Its slots begin other episodes than those of any other rank, also of an earlier start of the run.
    """
    return [seed, 1, rank, start_step]


class Replica:
    """Env rank that joined the run and acts on its slots without other ranks.

    Args:
        simulating: This rank, which has built its simulators.
        acting: Policy's side, in the same process.
        slots: Slot map of the run.
        start_step: Steps that were complete when it joined.
    """

    def __init__(
        self, simulating: SimulatingWorker[Any], acting: ActingWorker[Any], slots: SlotMap, start_step: int
    ) -> None:
        self._simulating, self._acting, self._slots = simulating, acting, slots
        self._words, self._rank = words_of(acting.seed, simulating.rank, start_step), simulating.rank
        self._version = -1

    def connect(self) -> None:
        """Connects to the channels; again after a failure of other ranks. Weights come before anything else."""
        self._parts = self._simulating.connect_channel(PARTS)
        self._played = self._simulating.connect_channel(PLAYED)
        self._acting.sync.forget()
        self._version = -1

    def play(self, shard: RolloutShard, random: bool) -> None:
        """Plays a shard and sends it to the actors: the complete shard, or, if this rank is to leave, the decisions made so
        far.

        Rollouts of one complete episode per slot are sent completely or not at all.

        Args:
            shard: The shard.
            random: Whether actions are drawn at random, as at the start of off-policy runs.
        """
        rank = self._simulating
        rank.before_leaving(lambda: None)  # from now on it ends after this call, which returns early
        self._take_weights(shard.version)
        self._acting.draws(random)
        num_decisions, columns, episodes = self._roll(shard)
        for actor in range(self._slots.actor_ranks if num_decisions else 0):
            part = self._slots.unit_for(shard.unit, actor)
            if part.stop > part.start:
                message: dict[str, Any] = {name: column[part] for name, column in columns.items()}
                message["version"] = self._version
                self._parts.entrust(message, key=self._slots.part_key(shard.key, actor))
        self._played.entrust(
            DeliveredShard(shard.number, shard.key, self._rank, num_decisions, self._version, episodes)
        )
        rank.before_leaving(None)

    def _roll(self, shard: RolloutShard) -> tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the number of decisions made, trajectories `[n, T, ...]` and episodes."""
        rank, acting, start = self._simulating, self._acting, time.perf_counter()
        env, share, single_episode = rank.envs[0], rank.shares[0], rank.shape().single_episode
        num_slots = len(self._slots.unit_share(shard.unit))  # the actors do not use further slots
        outcomes, episodes = rank.outcomes_of(shard.step, share), EpisodeLog()
        if single_episode:
            rank.new_episodes(shard.step)
        t, chosen = 0, list[np.ndarray]()
        while t < shard.decisions and not rank.told_to_leave:
            observation = outcomes.cleaned_obs(t, rank.obs[0])
            with torch.inference_mode():
                acting.decide(0, [(slice(None), t)], self._noise(shard, t), observation, chosen.append)
            obs, rewards, terminations, truncations, infos = env.chunk_step(chosen.pop())
            rank.obs[0] = obs
            episodes.count_skipped(infos, slice(num_slots))
            ended_slots = outcomes.add(t, rewards, terminations, truncations, infos)
            if ended_slots is not None:
                episodes.add(t, share.start, infos, ended_slots[ended_slots < num_slots])
            t += 1
        if single_episode and t < shard.decisions:
            t = 0
            episodes.skipped = 0
        columns: dict[str, np.ndarray] = {}
        if t:
            everything = slice(0, len(share))
            last = take(outcomes.cleaned_obs(t, rank.obs[0]), everything)
            acting.buffers[0].num_decisions = t
            with torch.inference_mode():
                (columns,) = acting.columns([outcomes.part(everything, last, t)])
            acting.cut(columns)
        report = episodes.report(restarts=env.restarts, busy_s=time.perf_counter() - start, timing=[env.timing])
        return t, columns, report

    def _noise(self, part: RolloutShard, t: int) -> torch.Tensor:
        words, slots = (*self._words, part.number, t), range(len(self._simulating.shares[0]))
        return noise_of_slots(self._acting.policy.sample_noise, words, slots).to(self._acting.device)

    def _take_weights(self, version: int) -> None:
        """Receives the weights that the actor has sent, and waits until they are new enough, unless this rank is to leave.

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
    start_step: int,
) -> Replica:
    """Builds simulators and policy of a rank that has joined.

    Args:
        simulating: This rank.
        make: Makes the policy's side.
        slots: Slot map of the run.
        spaces: Observation space and action space of the run's slots.
        start_step: Steps that are complete.

    Raises:
        ConfigError: The environment has other spaces here.
    """
    unit = unit_map(slots, simulating.rank)
    seed = int(np.random.SeedSequence(words_of(simulating.run_seed, simulating.rank, start_step)).generate_state(1)[0])
    facts = simulating.init_worker(unit, seed)
    if (facts["observation_space"], facts["action_space"]) != spaces:
        raise ConfigError(
            f"on {simulating.node}, env.train.env_id {simulating.cfg.env.train.env_id} shows or takes something else than "
            "where the run was started; have the same packages there"
        )
    acting = make()
    acting.init_worker(unit, *spaces)
    return Replica(simulating, acting, slots, start_step)


class JoiningWorker(SimulatingWorker[Cfg]):
    """Env rank that may have joined the run, in which case it also acts on its slots."""

    #: Import path of the rollout worker that acts then.
    acts: str = ""
    _replica: Replica | None = None

    def open_replica(self, slots: SlotMap, spaces: tuple[Any, Any], start_step: int) -> None:
        """Builds this rank's simulators, and a policy that acts on them."""
        acts = load_attribute(self.acts, f"who acts for {type(self).__name__}")
        self._replica = open_replica(self, lambda: acts(self.cfg), slots, spaces, start_step)

    def connect_replica(self) -> None:
        """Connects the replica to the channels (`Replica.connect`)."""
        assert self._replica is not None
        self._replica.connect()

    def play(self, shard: RolloutShard, random: bool) -> None:
        """Plays a shard (`Replica.play`)."""
        assert self._replica is not None
        self._replica.play(shard, random)


class EnvWorker(JoiningWorker[PpoConfig]):
    """Env rank with one vector environment per pipeline stage, for the slots that the `SlotMap` assigns to it."""

    acts = "rlhpc.embodied.workers.rollout:MultiStepRolloutWorker"

    def shape(self) -> OutcomeShape:
        """Returns the shape of the outcomes."""
        return ppo_shape(self.cfg)
