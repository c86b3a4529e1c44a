"""Rollout workers of embodied runs: they act on a share of the slots and send complete trajectories to the actors."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.state import load_state, rng_state, save_state, set_rng_state
from rlhpc.embodied.config import PlayingConfig, PpoConfig
from rlhpc.embodied.data.batches import RolloutBatch
from rlhpc.embodied.envs.observations import as_arrays, columns_of, count_rows, is_tensor, join, take, zero_obs
from rlhpc.embodied.evaluation.episodes import EvaluationRows, evaluation_rows
from rlhpc.embodied.models import Policy, build_model, policy_section
from rlhpc.embodied.models.base import noise_of_decision
from rlhpc.embodied.rollout.env_link import PeerLeft, agree_on_device, get_until_left, leave_check, open_links
from rlhpc.embodied.rollout.slot_map import OUTCOMES, TRAJECTORIES, SlotMap, relative_slice
from rlhpc.embodied.rollout.step_outcomes import OutcomeShape, SlotOutcomes, next_values, ppo_shape, unknown_outcomes
from rlhpc.embodied.rollout.work_sharing import FullRollout
from rlhpc.runs.device import place_policy, set_up_process, to_tensors, worker_device
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.devices import empty_cache
from rlhpc.runtime.trace_recorder import span
from rlhpc.weights import make_sync
from rlhpc.weights.device_sharing import source_of, spare_bytes
from rlhpc.weights.receiver import TransferTotals, apply

FILE = "rollout-{rank}.pt"
#: All slots of a stage.
ALL_SLOTS = slice(None)
Cfg = TypeVar("Cfg", bound=PlayingConfig)


class StageBuffer:
    """Buffer of one stage's rollout. Time is the first axis, so that every step writes one contiguous row.

    Args:
        share: Global slots of the stage.
        num_steps: T, number of decisions in a complete rollout.

    Attributes:
        num_decisions: Number of decisions in the current rollout, which may be shorter.
    """

    def __init__(self, share: range, num_steps: int) -> None:
        self.share, self.steps, self.num_decisions = share, num_steps, num_steps
        self._rows: dict[str, np.ndarray] = {}

    def write(self, t: int, slots: slice, **rows: Any) -> None:
        """Stores step `t` for `slots`; `rows` are arrays or tensors `[n, ...]` of all slots."""
        for name, row in rows.items():
            if name not in self._rows:
                self._rows[name] = np.empty((self.steps, *row.shape), np.asarray(as_arrays(row[:0])).dtype)
            if is_tensor(row):
                torch.from_numpy(self._rows[name][t, slots]).copy_(row[slots])
            else:
                self._rows[name][t, slots] = row[slots]

    def columns(self) -> dict[str, np.ndarray]:
        """Returns all columns by name, batch first `[n, T, ...]`, contiguous."""
        return {
            name: np.ascontiguousarray(rows[: self.num_decisions].swapaxes(0, 1)) for name, rows in self._rows.items()
        }


class ActingWorker(SavingWorker, Generic[Cfg]):
    """Base of rollout workers; a subclass defines the policy and the columns that are sent."""

    def __init__(self, cfg: Cfg) -> None:
        super().__init__()
        self.cfg: Cfg = cfg
        self.version = 0
        self._wait_s = 0.0
        self._transfers = TransferTotals()

    def init_worker(self, slots: SlotMap, observation_space: Any, action_space: Any) -> None:
        """Builds the policy and the buffers."""
        self.steps = self.cfg.algorithm.rollout_steps
        self.seed = self.cfg.runner.seed
        self.device = worker_device(self)
        set_up_process(self.cfg.runner, "rollout", self.rank)
        self.policy = place_policy(self.build_policy(observation_space, action_space), self.device).eval()
        self.policy.requires_grad_(False)
        self._receivers: tuple[int, ...] = ()
        self._set_slots(slots)

    def _set_slots(self, slots: SlotMap) -> None:
        self.slots = slots
        self.shares = [slots.rollout_share(stage, self.rank) for stage in range(slots.num_stages)]
        self.peers = [slots.envs_of(stage, self.rank) for stage in range(slots.num_stages)]
        self.buffers = [StageBuffer(slots_of_stage, self.steps) for slots_of_stage in self.shares]
        if slots.acting_ranks != self._receivers:
            self._receivers, cfg = slots.acting_ranks, self.cfg.rollout
            receivers = [(slots.rollout_name, list(self._receivers))]
            source_rank = (slots.actor_name, source_of(slots.weight_sources, self.rank))
            self.sync = make_sync(cfg.weight_sync, self, source_rank, receivers, cfg.weight_delta)

    @abstractmethod
    def build_policy(self, observation_space: Any, action_space: Any) -> Policy:
        """Builds the policy with newly initialized weights."""

    def set_random_actions(self, is_random: bool) -> None:
        """Sets whether the next actions are random; only off-policy runs support this."""

    @abstractmethod
    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""

    def connect(self, slots: SlotMap) -> None:
        """Connects to the channels that the driver has created. The driver calls it again with a new map when ranks
        join or leave.
        """
        self._set_slots(slots)
        model, num_slots = self.cfg.actor.model.model_type, sum(map(len, self.shares))
        self.log.info("acts with %s on %s for %d of %d slots", model, self.device, num_slots, slots.num_envs)
        self.links = open_links(self, self.slots, self.policy.observation_space, agree_on_device(self, slots))
        env_ranks = {rank for peers in self.peers for rank, _ in peers} - slots.absent
        self._watches = {rank: leave_check(slots.env_name, rank) for rank in env_ranks}
        self._outcomes = self.connect_channel(OUTCOMES)
        self._trajectories = self.connect_channel(TRAJECTORIES)
        self.stay_until_let_go()  # env ranks wait for this rank's actions, also in steps that the rank has not begun

    def allow_exit(self) -> None:
        """Permits this rank to exit if it has a notice to leave. The driver calls it when no other rank depends on this
        rank.
        """
        self.before_leaving(None)

    def sync_weights(self) -> int:
        """Receives the actor's next version of the weights; returns the version."""
        self.version = apply(self.sync, self._named_weights(), adopt=self.policy, totals=self._transfers)
        return self.version

    def _named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.policy.state_dict().items())

    # -- rollout --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(self, full_rollout: FullRollout) -> dict[str, float]:
        """Acts for the decisions of a full rollout in every slot, then sends the trajectories to the actors.

        Noise is seeded by (seed, step, decision, slot), so that an action depends neither on the acting rank nor on the
        other slots of the batch.

        Returns:
            `busy_s`: seconds in which the rank did not wait for simulators; and the values of `TransferTotals.pop`.
        """
        start_time, self._wait_s, self._full_rollout = time.perf_counter(), 0.0, full_rollout
        for buffer in self.buffers:
            buffer.num_decisions = full_rollout.num_decisions
        if self.cfg.runner.enable_decoupled_mode:
            self._act_on_arrival()
        else:
            for t in range(full_rollout.num_decisions):
                for stage in range(self.slots.num_stages):
                    self._act(stage, t)
        self._send_trajectories()
        return {"busy_s": time.perf_counter() - start_time - self._wait_s, **self._transfers.pop()}

    def _draw_noise(self, t: int, slots: range) -> torch.Tensor:
        """Returns the noise of the full rollout's decision `t` for global slots, on the policy's device."""
        entropy = (self.seed, self._full_rollout.step, self._full_rollout.begin + t)
        return noise_of_decision(self.policy.sample_noise, entropy, slots, self.cfg.env.train, self.device)

    def _act(self, stage: int, t: int) -> None:
        noise = self._draw_noise(t, self.shares[stage])  # while the simulators are busy
        start_time = time.perf_counter()
        with span("observations", "wait"):
            observations = self.links.get(stage)
        self._wait_s += time.perf_counter() - start_time
        observations_by_peer = [self._fill_missing_obs(peer_slots, peer_obs) for peer_slots, peer_obs in observations]

        def send(actions: np.ndarray) -> None:
            self.links.put(stage, lambda slots: actions[relative_slice(slots, self.shares[stage])])

        self.decide(stage, [(ALL_SLOTS, t)], noise, join(observations_by_peer), send)

    def _act_on_arrival(self) -> None:
        """Acts for env ranks in the order in which their observations arrive; each pass serves all observations that
        have arrived.

        A pass always covers all slots of a stage; slots without a request use their last observation. Therefore the
        other slots that a pass serves do not change an action by a single bit.
        """
        latest_obs = [[self._fill_missing_obs(peer_slots, None) for _, peer_slots in peers] for peers in self.peers]
        next_decisions = {(stage, index): 0 for stage, peers in enumerate(self.peers) for index in range(len(peers))}
        while next_decisions:
            start_time = time.perf_counter()
            with span("observations", "wait"):
                ready_peer = self.links.first(next_decisions)
            self._wait_s += time.perf_counter() - start_time
            for stage in sorted({stage for stage, _ in ready_peer}):
                self._act_on_arrival_in_stage(
                    stage, {i: next_decisions[s, i] for s, i in ready_peer if s == stage}, latest_obs[stage]
                )
            for peer_key in ready_peer:
                next_decisions[peer_key] += 1
                if next_decisions[peer_key] == self._full_rollout.num_decisions:
                    del next_decisions[peer_key]

    def _act_on_arrival_in_stage(self, stage: int, decisions: dict[int, int], latest_obs: list[Any]) -> None:
        """Acts in one stage for the env ranks in `decisions` (index → decision); stores their observations in
        `latest_obs`.
        """
        rows = {index: relative_slice(self.peers[stage][index][1], self.shares[stage]) for index in decisions}
        noise_by_peer = {index: self._draw_noise(t, self.peers[stage][index][1]) for index, t in decisions.items()}
        first_noise = next(iter(noise_by_peer.values()))
        # The noise of slots without a request may have any value.
        noise = first_noise.new_zeros(len(self.shares[stage]), *first_noise.shape[1:])
        for index, peer_noise in noise_by_peer.items():
            latest_obs[index] = self._fill_missing_obs(self.peers[stage][index][1], self.links.get_from(stage, index))
            noise[rows[index]] = peer_noise

        def send(actions: np.ndarray) -> None:
            for index in decisions:
                self.links.put_to(stage, index, actions[rows[index]])

        self.decide(stage, [(rows[index], t) for index, t in decisions.items()], noise, join(latest_obs), send)

    def _fill_missing_obs(self, slots: range, obs: Any) -> Any:
        """Returns `obs`, or zeros if it is None because the env rank was lost or has not sent an observation yet."""
        return zero_obs(self.policy.observation_space, len(slots)) if obs is None else obs

    def decide(
        self,
        stage: int,
        requests: Sequence[tuple[slice, int]],
        noise: torch.Tensor,
        obs: Any,
        send: Callable[[np.ndarray], None],
    ) -> None:
        """Chooses actions, sends them, and records observations and actions.

        Args:
            stage: Index of the stage.
            requests: Slots that need an action, and the index of their decision.
            noise: Noise of all slots of the stage.
            obs: Observations of all slots of the stage.
            send: Function that sends the actions of all slots.
        """
        with span("act", "engine", batch=len(noise)):
            actions, action_extras = self._choose_actions(obs, noise, requests)
            actions_array = actions.cpu().numpy()
        send(actions_array)
        # The environments simulate at the same time, so that recording does not delay the rollout.
        columns = {"actions": actions_array} | {name: column.cpu().numpy() for name, column in action_extras.items()}
        for rows, t in requests:
            self.buffers[stage].write(t, rows, **columns_of("obs", obs), **columns)

    def _choose_actions(
        self, obs: Any, noise: torch.Tensor, requests: Sequence[tuple[slice, int]]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns actions, and additional columns of the trajectories."""
        del requests
        actions, action_extras = self.policy.predict_action_batch(self._to_device(obs), mode="train", noise=noise)
        rows = {"logprobs": action_extras["prev_logprobs"], "values": action_extras["prev_values"]}
        return actions, rows | {
            f"inputs.{name}": model_input for name, model_input in action_extras.get("inputs", {}).items()
        }

    def _to_device(self, obs: Any) -> Any:
        """Returns an observation, or another array, as tensors on the policy's device."""
        return to_tensors(obs, self.device)

    def _send_trajectories(self) -> None:
        """Sends every actor rank the transitions of the slots that it trains on."""
        outcomes = [self._merge_outcomes(stage) for stage in range(self.slots.num_stages)]
        for stage, batch in enumerate(self.batches(outcomes)):
            self._send_batch(stage, batch)

    def batches(self, outcomes: list[SlotOutcomes]) -> list[RolloutBatch[np.ndarray]]:
        """Returns the transitions of each stage as the actors receive them.

        If the rollout is shorter than a step, its episodes are marked as truncated at the rollout's end, because
        another rank plays the following decisions.
        """
        return [
            batch.truncate_last_decision() if batch.rewards.shape[1] < self.steps else batch
            for batch in self.transitions(outcomes)
        ]

    def transitions(self, outcomes: list[SlotOutcomes]) -> list[RolloutBatch[np.ndarray]]:
        """Returns the transitions of each stage, with rewards, ends of episodes and next values from its outcomes."""
        batches = []
        # Observations without an action need values, too: observations after the rollout, and final observations of episodes.
        observations = [obs for slot_outcomes in outcomes for obs in (slot_outcomes.last_obs, slot_outcomes.final_obs)]
        predicted_values = np.split(
            self._compute_values(join(observations)), np.cumsum([count_rows(obs) for obs in observations])[:-1]
        )
        for slot_outcomes, buffer, last_values, final_values in zip(
            outcomes, self.buffers, predicted_values[::2], predicted_values[1::2], strict=True
        ):
            columns = buffer.columns()
            columns["next_values"] = next_values(
                columns["values"],
                last_values,
                slot_outcomes.final_slot,
                slot_outcomes.final_step,
                final_values,
                slot_outcomes.executed,
            )
            batches.append(RolloutBatch.from_columns({**columns, **slot_outcomes.transition_columns()}))
        return batches

    def _send_batch(self, stage: int, batch: RolloutBatch[np.ndarray]) -> None:
        """Sends every actor rank the transitions of its slots of a stage. A joined rank may exit before the actors
        receive its transitions, so that it waits until the transitions are stored.
        """
        send = self._trajectories.put if self.rank < self.slots.num_rollout_ranks else self._trajectories.entrust
        for rank, actor_slots in self.slots.actors_of(stage, self.rank):
            message: dict[str, Any] = batch.of_slots(relative_slice(actor_slots, self.shares[stage])).columns()
            message["version"], message["rollout"] = self.version, self._full_rollout.number
            send(message, key=self.slots.to_actor_key(stage, self.rank, rank))

    def _merge_outcomes(self, stage: int) -> SlotOutcomes:
        """Receives and merges the env ranks' outcomes of a stage; slot indices start at this rank's first slot.
        `missing` marks the slots of lost env ranks.
        """
        stage_slots, outcomes_by_peer, is_gone = self.shares[stage], [], []
        for index, (_, peer_slots) in enumerate(self.peers[stage]):
            start_time = time.perf_counter()
            with span("outcomes", "wait"):
                outcomes = self._receive_outcomes(stage, index)
            self._wait_s += time.perf_counter() - start_time
            is_gone.append(outcomes is None)
            if outcomes is None:
                outcomes = unknown_outcomes(
                    peer_slots, self._full_rollout.num_decisions, self.shape(), self._fill_missing_obs(peer_slots, None)
                )
            outcomes_by_peer.append(outcomes.shifted(peer_slots.start - stage_slots.start))
        slot_outcomes = SlotOutcomes.join(outcomes_by_peer)
        if any(is_gone):
            peer_sizes = [len(peer_slots) for _, peer_slots in self.peers[stage]]
            slot_outcomes = replace(
                slot_outcomes,
                missing=np.repeat(np.repeat(is_gone, peer_sizes)[:, None], self._full_rollout.num_decisions, axis=1),
            )
        return slot_outcomes

    def _receive_outcomes(self, stage: int, index: int) -> SlotOutcomes | None:
        """Receives an env rank's outcomes of its slots; returns None if the rank was lost."""
        if self.links.has_gone(stage, index):
            return None
        rank, _ = self.peers[stage][index]
        key = self.slots.to_rollout_key(stage, rank, self.rank)
        try:
            message = get_until_left(self._outcomes, key, (self.slots.env_name, rank), self._watches[rank])
        except PeerLeft:
            self.links.lose(stage, index)
            return None
        return SlotOutcomes.from_columns(message)

    def _compute_values(self, obs: Any) -> np.ndarray:
        """Returns the values of any number of observations, computed in batches of one stage's slots.

        The last batch is filled up, because kernels depend on the size of a batch, and actors that simulate on an accelerator
        do not know how many observations it has (`rlhpc.embodied.workers.tensor_actor`).
        """
        batch_size, num_rows = max([1, *map(len, self.shares)]), count_rows(obs)
        obs_batches = (
            take(obs, np.arange(row_start, row_start + batch_size).clip(max=num_rows - 1))
            for row_start in range(0, num_rows, batch_size)
        )
        with span("values", "engine", batch=num_rows):
            batch_values = [
                self.policy.value(self._to_device(obs_batch)).float().cpu().numpy() for obs_batch in obs_batches
            ]
        return np.concatenate(batch_values)[:num_rows]

    # -- evaluation and checkpoint --------------------------------------------------------------------------------

    def evaluate(self, part: int, num_parts: int) -> EvaluationRows:
        """Plays a part of an evaluation of the current weights, with deterministic actions (`evaluation_rows`)."""
        return evaluation_rows(self.cfg, self.policy, self.seed, self.device, part, num_parts)

    def save(self, folder: str) -> None:
        """Writes `rollout-<rank>.pt`. The actor saves the weights, and noise depends only on seed and step."""
        save_state(Path(folder) / FILE.format(rank=self.rank), {"version": self.version, "rng": rng_state()})

    def load(self, folder: str) -> None:
        """Restores version and random state from a checkpoint; a rank without a file in it keeps its initial state."""
        rank_file = Path(folder) / FILE.format(rank=self.rank)
        if rank_file.is_file():
            rank_state = load_state(rank_file)
            self.version = int(rank_state["version"])
            set_rng_state(rank_state["rng"])

    def release_observations(self) -> None:
        """Releases the shared memory of received observations, so that the env ranks can free it."""
        current().service.device_channel.park()

    def offload(self) -> None:
        """Moves the policy to the host."""
        self.policy.cpu()
        empty_cache()

    def free_beside_update(self) -> float:
        """Returns the bytes that are free on the accelerator beyond those of the offloaded policy and of an update
        (`device_sharing.spare_bytes`); infinite on a CPU.
        """
        if self.device.type == "cpu":
            return math.inf
        tensor_bytes = [tensor.nbytes for _, tensor in self._named_weights() if tensor.is_cpu]
        free_bytes, total_bytes = torch.accelerator.get_memory_info(self.device)
        return float(free_bytes - sum(tensor_bytes) - spare_bytes(max(tensor_bytes, default=0), total_bytes))

    def reload(self) -> None:
        """Moves the policy back to the device after `offload`."""
        self.policy.to(self.device)


def build_acting_policy(
    cfg: PpoConfig, spaces: tuple[Any, Any], device: torch.device, seed: int | None = None
) -> Policy:
    """Builds the policy that acts in an on-policy run, with newly initialized weights, on the host.

    Args:
        cfg: The configuration.
        spaces: Observation space and action space of one slot.
        device: Device on which the policy will compute.
        seed: See `build_model`.
    """
    policy = build_model(policy_section(cfg.actor, device), *spaces, seed=seed)
    policy.set_logprob_type(cfg.algorithm.logprob_type)
    return policy


class MultiStepRolloutWorker(ActingWorker[PpoConfig]):
    """Rollout worker of on-policy runs: acts with the policy whose weights the actor sends."""

    def build_policy(self, observation_space: Any, action_space: Any) -> Policy:
        """Builds the policy with newly initialized weights."""
        return build_acting_policy(self.cfg, (observation_space, action_space), self.device)

    def shape(self) -> OutcomeShape:
        """Returns the options that determine the outcomes' columns."""
        return ppo_shape(self.cfg)
