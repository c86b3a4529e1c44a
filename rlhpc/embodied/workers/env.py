"""Env workers: they simulate a share of the slots for the rollout ranks that act on the slots. Joined ranks also act."""

from __future__ import annotations

import queue
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from rlhpc.algorithms.nonfinite import nonfinite, skips
from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.state import load_state, set_rng_state
from rlhpc.embodied.config import PlayingConfig, PpoConfig
from rlhpc.embodied.data.batches import RolloutBatch
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.observations import Obs, as_arrays, join, keep_tensors, take
from rlhpc.embodied.models.base import noise_of_decision
from rlhpc.embodied.rollout.env_link import PeerLeft, agree_on_device, open_links, put_until_left
from rlhpc.embodied.rollout.slot_map import OUTCOMES, SlotMap, UnitMap, relative_slice
from rlhpc.embodied.rollout.step_outcomes import EpisodeLog, Outcomes, OutcomeShape, ppo_shape
from rlhpc.embodied.rollout.work_sharing import PARTS, PLAYED, DeliveredShard, FullRollout, RolloutShard
from rlhpc.embodied.workers.env_states import FILE, env_seed, episode_seed, read_saved_units, restore_env, save_envs
from rlhpc.runs.device import set_up_process, worker_device
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.devices import empty_cache
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from rlhpc.runtime.plugins import load_attribute
from rlhpc.runtime.text import format_names
from rlhpc.runtime.trace_recorder import span

if TYPE_CHECKING:
    from rlhpc.embodied.workers.rollout import ActingWorker

Cfg = TypeVar("Cfg", bound=PlayingConfig)


class SimulatingWorker(SavingWorker, Generic[Cfg]):
    """Base of env workers; a subclass defines the level (action or chunk) of rewards and log-probabilities."""

    envs: list[VectorEnv]

    def __init__(self, cfg: Cfg) -> None:
        super().__init__()
        self.cfg: Cfg = cfg
        self.envs = []
        self._wait_s = 0.0

    @property
    def run_seed(self) -> int:
        """Seed of the run's environments."""
        return env_seed(self.cfg)

    def init_worker(self, slots: SlotMap, seed: int | None = None) -> dict[str, Any]:
        """Builds the environments and resets them.

        Args:
            slots: Slot map.
            seed: Seed of these environments; None takes the run's seed.

        Returns:
            `observation_space`, `action_space` (of one slot) and `supports_state`.
        """
        cfg = self.cfg.env.train
        self.slots, self.steps = slots, self.cfg.algorithm.rollout_steps
        self.seed = self.run_seed if seed is None else seed
        # Selects the accelerator first, because simulators that find no accelerator silently use the CPU.
        device = worker_device(self)
        set_up_process(self.cfg.runner, "env", self.rank, seed=self.seed)
        self.shares = [slots.env_share(stage, self.rank) for stage in range(slots.num_stages)]
        self.envs = [self._build_env(env_slots, device) for env_slots in self.shares]
        self.obs: list[Obs] = [as_arrays(env.reset()[0]) for env in self.envs]
        #: Slots of each stage whose current episode contains actions that the policy did not choose.
        self._mixed_slots = [np.zeros(len(env_slots), bool) for env_slots in self.shares]
        self.log.info("simulates %d of %d slots of %s", sum(map(len, self.shares)), slots.num_envs, cfg.env_id)
        return {
            "observation_space": self.envs[0].observation_space,
            "action_space": self.envs[0].action_space,
            "supports_state": all(env.supports_state for env in self.envs),
        }

    def _build_env(self, slots: range, device: torch.device) -> VectorEnv:
        """Builds the environments of a share of the slots."""
        cfg = self.cfg.env.train
        env = make_env(cfg, len(slots), slot_offset=slots.start, seed=self.seed, stage="train")
        if cfg.reward_model is not None:
            from rlhpc.embodied.rewards import SuccessRewardEnv

            env = SuccessRewardEnv(env, cfg, device)
        if cfg.intervene.source is not None:
            from rlhpc.embodied.interventions.intervention_env import with_interventions

            env = with_interventions(env, cfg, slots, self.seed)
        return env

    def connect(self, slots: SlotMap) -> None:
        """Connects to the channels that the driver has created. The driver calls it again with a new map when ranks
        join or leave.
        """
        self.slots = slots
        self.peers = [slots.rollouts_of(stage, self.rank) for stage in range(slots.num_stages)]
        device_peers = agree_on_device(self, slots, [env.can_stay_on_device for env in self.envs])
        for env, peers in zip(self.envs, device_peers, strict=True):
            env.on_device = all(peers)
        self.links = open_links(self, self.slots, self.envs[0].observation_space, device_peers)
        if any(env.on_device for env in self.envs):
            self.log.info("observations stay on the accelerator on their way to the policy")
        self._outcomes = self.connect_channel(OUTCOMES)

    def interact(self, full_rollout: FullRollout) -> dict[str, np.ndarray]:
        """Simulates the decisions of a full rollout in every slot.

        While the policy acts on one stage, this rank simulates the other stages. If a rollout rank is lost, its slots
        get copies of other slots' actions for the rest of the step. These transitions are not trained on, and episodes
        with such actions are not reported. A stage without rollout ranks pauses.

        If a rollout is one complete episode per slot, every slot first begins a new episode. The episode's start
        depends only on seed, step and full rollout.

        Returns:
            Report of the episodes that ended, with counts (`EpisodeLog.report`).

        Raises:
            NonFinite: A simulator returned a non-finite number, and `runner.on_nonfinite` is stop.
        """
        stages, start_time, self._wait_s = range(self.slots.num_stages), time.perf_counter(), 0.0
        outcomes = [self.outcomes_of(full_rollout.step, slots) for slots in self.shares]
        if self.shape().single_episode:
            self.new_episodes(full_rollout.step, full_rollout.begin)
        episodes, num_device_messages_before = EpisodeLog(), current().service.device_channel.num_device_messages
        for stage in stages:
            if (refreshed_obs := self.envs[stage].refresh()) is not None:  # a robot may have moved
                self.obs[stage] = refreshed_obs
            self._send_obs(stage, outcomes[stage], 0)
        for t in range(full_rollout.num_decisions):
            for stage in stages:
                env, actions = self.envs[stage], self._receive_actions(stage)
                if actions is None:
                    continue
                with span("simulate", "simulator", slots=len(self.shares[stage])):
                    obs, rewards, terminations, truncations, infos = env.chunk_step(actions)
                self.obs[stage] = obs
                episodes.count_actions(infos)
                if t + 1 < full_rollout.num_decisions:
                    self._send_obs(stage, outcomes[stage], t + 1)
                ended_slots = outcomes[stage].add(t, rewards, terminations, truncations, infos)
                if ended_slots is not None:
                    episodes.add(
                        full_rollout.begin + t,
                        self.shares[stage].start,
                        infos,
                        self._select_policy_slots(stage, ended_slots),
                    )
        for stage in stages:
            self._send_outcomes(stage, outcomes[stage], full_rollout.num_decisions)
        num_device_messages = current().service.device_channel.num_device_messages - num_device_messages_before
        on_accelerator = sum(
            len(peers) for env, peers in zip(self.envs, self.peers, strict=True) if env.can_stay_on_device
        )
        return episodes.report(
            num_restarts=sum(env.restarts for env in self.envs),
            by_device=num_device_messages,
            by_host=max(0, on_accelerator * (full_rollout.num_decisions + 1) - num_device_messages),
            busy_s=time.perf_counter() - start_time - self._wait_s,
            timing=[env.timing for env in self.envs],
        )

    @abstractmethod
    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""

    def outcomes_of(self, step: int, slot_share: range) -> Outcomes:
        """Builds the collector of a step's outcomes for the slots `slot_share`."""
        shape = self.shape()

        def report_spoiled(quantity_name: str, t: int, rows: np.ndarray) -> None:
            if not skips(self.cfg):
                slots_text = format_names((slot_share.start + slot for slot in np.flatnonzero(rows)), limit=5)
                name = self.cfg.env.train.env_id
                raise nonfinite(
                    f"step {step}, decision {t}: the {quantity_name} of slot {slots_text} of {name} "
                    f"(env-{self.rank}) is not finite"
                )

        return Outcomes(
            slot_share,
            self.steps,
            chunk=shape.chunk,
            has_action_rewards=shape.reward_per_action,
            is_single_episode=shape.single_episode,
            interventions=shape.interventions,
            action_shape=shape.action_shape,
            marks=shape.marks,
            report_nonfinite=report_spoiled,
        )

    def new_episodes(self, step: int, first_decision: int = 0) -> None:
        """Begins a new episode in every slot. The episode's start depends only on seed, step, and the step's decisions
        so far.
        """
        seed = episode_seed(self.cfg, self.seed, step, first_decision)
        self.obs = [keep_tensors(env.reset(seed=seed)[0]) for env in self.envs]
        for is_mixed in self._mixed_slots:
            is_mixed[:] = False

    def _send_obs(self, stage: int, outcomes: Outcomes, t: int) -> None:
        obs = outcomes.cleaned_obs(t, self.obs[stage])
        self.links.put(stage, lambda shared_slots: take(obs, relative_slice(shared_slots, self.shares[stage])))

    def _receive_actions(self, stage: int) -> np.ndarray | None:
        """Receives the actions for all slots of a stage; returns None if no rollout rank is left."""
        start_time = time.perf_counter()
        with span("actions", "wait"):
            actions_by_peer = self.links.get(stage)
        self._wait_s += time.perf_counter() - start_time
        first_actions = next((peer_actions for _, peer_actions in actions_by_peer if peer_actions is not None), None)
        if first_actions is None:
            return None
        for slots, peer_actions in actions_by_peer:
            if peer_actions is None:
                self._mixed_slots[stage][relative_slice(slots, self.shares[stage])] = True
        return join(
            [
                np.resize(first_actions, (len(slots), *first_actions.shape[1:]))
                if peer_actions is None
                else peer_actions
                for slots, peer_actions in actions_by_peer
            ]
        )

    def _select_policy_slots(self, stage: int, ended_slots: np.ndarray) -> np.ndarray:
        """Returns those of `ended_slots` in which only the policy chose the ended episode's actions."""
        policy_slots: np.ndarray = ended_slots[~self._mixed_slots[stage][ended_slots]]
        self._mixed_slots[stage][ended_slots] = False
        return policy_slots

    def _send_outcomes(self, stage: int, outcomes: Outcomes, num_decisions: int) -> None:
        """Sends each rollout rank the outcomes of its slots of a stage."""
        last_obs = outcomes.cleaned_obs(num_decisions, self.obs[stage])
        for index, (rank, peer_slots) in enumerate(self.peers[stage]):
            if self.links.has_gone(stage, index):
                continue
            rows, key = (
                relative_slice(peer_slots, self.shares[stage]),
                self.slots.to_rollout_key(stage, self.rank, rank),
            )
            try:
                put_until_left(
                    self._outcomes,
                    outcomes.part(rows, take(last_obs, rows), num_decisions).columns(),
                    key,
                    (self.slots.rollout_name, rank),
                )
            except PeerLeft:
                self.links.lose(stage, index)

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes `env-<rank>.pt`: the slots, simulator state and current observation of each vector environment."""
        save_envs(Path(folder), self.rank, list(zip(self.shares, self.obs, self.envs, strict=True)))

    def load(self, folder: str) -> bool:
        """Restores the slots from the files of all env ranks of a checkpoint; the number of ranks may differ.

        Returns:
            False if some simulators cannot be restored; their episodes start again.
        """
        unit_states = read_saved_units(Path(folder))
        rank_file = Path(folder) / FILE.format(rank=self.rank)
        if rank_file.is_file():
            set_rng_state(load_state(rank_file)["rng"])
        restored_counts = [self._restore(stage, unit_states, Path(folder)) for stage in range(self.slots.num_stages)]
        return all(restored_counts)

    def _restore(self, stage: int, unit_states: list[dict[str, Any]], folder: Path) -> bool:
        obs = restore_env(self.envs[stage], self.shares[stage], unit_states, folder)
        if obs is not None:
            self.obs[stage] = obs
        return obs is not None

    def offload(self) -> None:
        """Releases the accelerator memory of observations in transit. The simulators keep their memory."""
        current().service.device_channel.park()
        empty_cache()

    def close(self) -> None:
        """Closes the simulators."""
        for env in self.envs:
            env.close()


#: Notice that the actor sends to a joined rank before the weights.
WEIGHTS_SENT = "weights sent"
_POLL_S = 0.005


def unit_map(slots: SlotMap, rank: int) -> UnitMap:
    """Returns the slot map of a joined rank. The map has as many slots as the largest unit, with numbers unique to this
    rank.
    """
    return UnitMap(
        slots.unit,
        group_size=slots.group_size,
        actor_name=slots.actor_name,
        rollout_name=slots.env_name,
        env_name=slots.env_name,
        first_slot=slots.num_envs + (rank - slots.num_env_ranks) * slots.unit,
    )


def entropy_of(seed: int, rank: int, start_step: int) -> list[int]:
    """Returns the entropy from which a joined rank's seeds are derived.

    The rank's episodes differ from those of all other ranks, and from those of earlier starts of the run.
    """
    return [seed, 1, rank, start_step]


class JoinedEnvRank:
    """Joined env rank: it simulates and acts without other ranks.

    Args:
        env_worker: Env worker of this rank, which has built its simulators.
        rollout_worker: Rollout worker in the same process, which acts on the slots.
        slots: Slot map of the run.
        start_step: Number of steps that were complete when the rank joined.
    """

    def __init__(
        self, env_worker: SimulatingWorker[Any], rollout_worker: ActingWorker[Any], slots: SlotMap, start_step: int
    ) -> None:
        self._env_worker, self._rollout_worker, self._slots = env_worker, rollout_worker, slots
        self._entropy, self._rank = entropy_of(rollout_worker.seed, env_worker.rank, start_step), env_worker.rank
        self._version = -1

    def connect(self) -> None:
        """Connects to the channels. The driver calls it again after a failure of other ranks; the rank then first
        receives weights.
        """
        self._shard_channel = self._env_worker.connect_channel(PARTS)
        self._report_channel = self._env_worker.connect_channel(PLAYED)
        self._rollout_worker.sync.forget()
        self._version = -1

    def play(self, shard: RolloutShard, is_random: bool) -> None:
        """Plays a shard and sends its transitions to the actors. If this rank is told to leave, it sends only the
        decisions made so far. If rollouts are complete episodes, a leaving rank sends nothing.

        Args:
            shard: Shard to play.
            is_random: True for random actions, as at the start of off-policy runs.
        """
        rank = self._env_worker
        rank.before_leaving(lambda: None)  # a rank that is told to leave now exits after this call, which returns early
        self._receive_weights(shard.version)
        self._rollout_worker.set_random_actions(is_random)
        num_decisions, batch, episodes = self._play_decisions(shard)
        for actor in range(self._slots.num_actor_ranks):
            local_unit = self._slots.unit_for(shard.unit, actor)
            if batch is not None and local_unit.stop > local_unit.start:
                message: dict[str, Any] = batch.of_slots(local_unit).columns()
                message["version"] = self._version
                self._shard_channel.entrust(message, key=self._slots.shard_key(shard.key, actor))
        self._report_channel.entrust(
            DeliveredShard(shard.number, shard.key, self._rank, num_decisions, self._version, episodes)
        )
        rank.before_leaving(None)

    def _play_decisions(
        self, shard: RolloutShard
    ) -> tuple[int, RolloutBatch[np.ndarray] | None, dict[str, np.ndarray]]:
        """Plays a shard. Returns the number of decisions, their transitions (None without decisions), and the report of
        the episodes.
        """
        rank, rollout_worker, start_time = self._env_worker, self._rollout_worker, time.perf_counter()
        env, env_slots, single_episode = rank.envs[0], rank.shares[0], rank.shape().single_episode
        num_slots = len(self._slots.unit_share(shard.unit))  # the actors ignore additional slots
        outcomes, episodes = rank.outcomes_of(shard.step, env_slots), EpisodeLog()
        if single_episode:
            rank.new_episodes(shard.step)
        t, pending_actions = 0, list[np.ndarray]()
        while t < shard.num_decisions and not rank.told_to_leave:
            observation = outcomes.cleaned_obs(t, rank.obs[0])
            with torch.inference_mode():
                rollout_worker.decide(
                    0, [(slice(None), t)], self._draw_noise(shard, t), observation, pending_actions.append
                )
            with span("simulate", "simulator", slots=num_slots):
                obs, rewards, terminations, truncations, infos = env.chunk_step(pending_actions.pop())
            rank.obs[0] = obs
            episodes.count_actions(infos, slice(num_slots))
            ended_slots = outcomes.add(t, rewards, terminations, truncations, infos)
            if ended_slots is not None:
                episodes.add(t, env_slots.start, infos, ended_slots[ended_slots < num_slots])
            t += 1
        if single_episode and t < shard.num_decisions:
            t = episodes.num_skipped = 0
        batch: RolloutBatch[np.ndarray] | None = None
        if t:
            all_rows = slice(0, len(env_slots))
            last_obs = take(outcomes.cleaned_obs(t, rank.obs[0]), all_rows)
            rollout_worker.buffers[0].num_decisions = t
            with torch.inference_mode():
                (batch,) = rollout_worker.batches([outcomes.part(all_rows, last_obs, t)])
        busy_s = time.perf_counter() - start_time
        return t, batch, episodes.report(num_restarts=env.restarts, busy_s=busy_s, timing=[env.timing])

    def _draw_noise(self, shard: RolloutShard, t: int) -> torch.Tensor:
        entropy, slots = (*self._entropy, shard.number, t), range(len(self._env_worker.shares[0]))
        policy, cfg = self._rollout_worker.policy, self._env_worker.cfg.env.train
        return noise_of_decision(policy.sample_noise, entropy, slots, cfg, self._rollout_worker.device)

    def _receive_weights(self, version: int) -> None:
        """Receives weights until their version is at least `version` and no further weights are announced. Returns
        early if this rank is told to leave.

        Raises:
            DeadlineExceeded: The weights did not arrive in time.
        """
        deadline = time.monotonic() + self._rollout_worker.cfg.runner.step_timeout_s
        while True:
            try:
                self._env_worker.notice(WEIGHTS_SENT)
            except queue.Empty:
                if self._version >= version or self._env_worker.told_to_leave:
                    return
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"the weights of step {version} did not reach {self._env_worker.group_name}-{self._rank}"
                    ) from None
                time.sleep(_POLL_S)
            else:
                self._version = self._rollout_worker.sync_weights()


def open_joined_rank(
    env_worker: SimulatingWorker[Any],
    make_rollout_worker: Callable[[], ActingWorker[Any]],
    slots: SlotMap,
    spaces: tuple[Any, Any],
    start_step: int,
) -> JoinedEnvRank:
    """Builds the simulators and the policy of a joined rank.

    Args:
        env_worker: Env worker of this rank.
        make_rollout_worker: Function that builds the acting rollout worker.
        slots: Slot map of the run.
        spaces: Observation space and action space of the run's slots.
        start_step: Number of steps that were complete when the rank joined.

    Raises:
        ConfigError: The environment has different spaces on this node.
    """
    unit_slots = unit_map(slots, env_worker.rank)
    entropy = entropy_of(env_worker.run_seed, env_worker.rank, start_step)
    env_facts = env_worker.init_worker(unit_slots, int(np.random.SeedSequence(entropy).generate_state(1)[0]))
    if (env_facts["observation_space"], env_facts["action_space"]) != spaces:
        raise ConfigError(
            f"on {env_worker.node}, env.train.env_id {env_worker.cfg.env.train.env_id} shows or takes something else than "
            "where the run was started; have the same packages there"
        )
    rollout_worker = make_rollout_worker()
    rollout_worker.init_worker(unit_slots, *spaces)
    return JoinedEnvRank(env_worker, rollout_worker, slots, start_step)


class JoinableEnvWorker(SimulatingWorker[Cfg]):
    """Env worker that also acts on its slots if the rank joined during the run."""

    #: Import path of the rollout worker that acts on a joined rank.
    rollout_worker_path: str = ""
    _joined_rank: JoinedEnvRank | None = None

    def open_joined_rank(self, slots: SlotMap, spaces: tuple[Any, Any], start_step: int) -> None:
        """Builds this joined rank's simulators, and a policy that acts on them."""
        worker_class = load_attribute(self.rollout_worker_path, f"who acts for {type(self).__name__}")
        self._joined_rank = open_joined_rank(self, lambda: worker_class(self.cfg), slots, spaces, start_step)

    def connect_joined_rank(self) -> None:
        """Connects a joined rank to the channels (`JoinedEnvRank.connect`)."""
        assert self._joined_rank is not None
        self._joined_rank.connect()

    def play(self, shard: RolloutShard, is_random: bool) -> None:
        """Plays a shard (`JoinedEnvRank.play`)."""
        assert self._joined_rank is not None
        self._joined_rank.play(shard, is_random)


class EnvWorker(JoinableEnvWorker[PpoConfig]):
    """Env worker of on-policy runs, with one vector environment per pipeline stage."""

    rollout_worker_path = "rlhpc.embodied.workers.rollout:MultiStepRolloutWorker"

    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""
        return ppo_shape(self.cfg)
