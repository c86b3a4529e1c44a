"""Actor workers, on-policy and off-policy, that also simulate and act: simulator, policy, replay buffer and update are on one
device, in one process.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhpc.algorithms.nonfinite import nonfinite, skips
from rlhpc.embodied.config import PlayingConfig, PpoConfig, RolloutConfig, SacConfig
from rlhpc.embodied.data.batches import RolloutBatch, RolloutCounts
from rlhpc.embodied.data.mixture import POSITION, DrawOptions, MixtureDraw
from rlhpc.embodied.data.replay_buffer import ReplayBuffer
from rlhpc.embodied.data.tensor_replay import TensorMixture, TensorReplay
from rlhpc.embodied.envs.observations import boxes_of, columns_of, rows_of
from rlhpc.embodied.envs.tensor_env import TensorVectorEnv, choose_rows, map_obs
from rlhpc.embodied.evaluation.episodes import EvaluationRows, evaluation_rows
from rlhpc.embodied.models import build_model
from rlhpc.embodied.models.base import Policy, noise_of_decision
from rlhpc.embodied.models.off_policy import ActorCritic
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.step_outcomes import EpisodeLog, OutcomeShape, next_values, ppo_shape
from rlhpc.embodied.workers.actor import PolicyTrainer, mark_nonfinite
from rlhpc.embodied.workers.env_states import env_seed, episode_seed, read_saved_units, restore_env, save_envs
from rlhpc.embodied.workers.off_policy import OffPolicyActor, choose_actions, num_random_left
from rlhpc.embodied.workers.ppo_actor import EmbodiedActor
from rlhpc.embodied.workers.rollout import build_acting_policy
from rlhpc.runtime.devices import synchronize
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trace_recorder import span

#: Returns the noise of a decision, given its number in the step.
_Noise = Callable[[int], Tensor]
#: Class of the policy that acts.
Acting = TypeVar("Acting", bound=Policy)
Cfg = TypeVar("Cfg", PpoConfig, SacConfig)


class TensorBuffer:
    """Columns of a rollout on the device, `[n, T, ...]`.

    Args:
        num_steps: T, number of decisions.

    Attributes:
        columns: Columns by name.
    """

    def __init__(self, num_steps: int) -> None:
        self._steps = num_steps
        self.columns: dict[str, Tensor] = {}

    def write(self, t: int, **rows: Tensor | None) -> None:
        """Copies the rows `[n, ...]` of decision `t`, except those that are None. A column is 0 until it is written."""
        for name, row in rows.items():
            if row is not None:
                if name not in self.columns:
                    self.columns[name] = row.new_zeros((len(row), self._steps, *row.shape[1:]))
                self.columns[name][:, t] = row


@dataclass(frozen=True)
class PlayedSteps:
    """Decisions that a rollout has played in all its slots.

    Attributes:
        columns: Columns of all decisions, `[n, T, ...]`.
        results: Columns `final_obs`, the observations after each decision and before a reset, and the statistics of the
            episodes.
        last_obs: Observations after the rollout, `[n, ...]`.
    """

    columns: dict[str, Tensor]
    results: dict[str, Tensor]
    last_obs: Any


@dataclass(frozen=True)
class RolloutResults:
    """Transitions of a rollout, and statistics of its episodes, on the device.

    Attributes:
        batch: Transitions, `[n, T, ...]`.
        is_bad: Transitions in which 0 replaced non-finite numbers, bool `[n, T]`.
        is_finite: Whether all numbers of the transitions are finite, bool.
        statistics: Columns `ended`, `returns`, `lengths`, and, if there are any, `successes` and `skipped`, `[n, T]`.
        share: Global slots.
        num_device_messages: Number of observations that stayed on the accelerator.
        busy_s: Seconds of the rollout.
    """

    batch: RolloutBatch[Tensor]
    is_bad: Tensor
    is_finite: Tensor
    statistics: dict[str, Tensor]
    share: range
    num_device_messages: int
    busy_s: float

    def read_report(self) -> dict[str, np.ndarray]:
        """Reads the episodes that ended, and returns their report (`EpisodeLog.report`)."""
        statistics = self.statistics
        final_step, final_slot = statistics["ended"].t().nonzero(as_tuple=True)  # in the order of steps
        returns, episode_lengths = (
            statistics[name][final_slot, final_step].double() for name in ("returns", "lengths")
        )
        successes = torch.full_like(returns, float("nan"))
        if "successes" in statistics:
            successes = statistics["successes"][final_slot, final_step].double()
        no_help = torch.zeros_like(returns)  # a source of interventions does not reach environments of tensors
        rows = [
            final_step.double(),
            final_slot.double() + self.share.start,
            returns,
            episode_lengths,
            successes,
            no_help,
        ]
        num_skipped = statistics["skipped"].sum() if "skipped" in statistics else torch.zeros_like(self.is_finite)
        numbers = torch.cat([torch.stack(rows, 1).flatten(), num_skipped.double()[None]]).cpu().numpy()
        log = EpisodeLog()
        log.add_rows(numbers[:-1].reshape(-1, len(rows)))
        log.num_skipped = int(numbers[-1])
        return log.report(by_device=self.num_device_messages, busy_s=self.busy_s)


class TensorRollout(ABC, Generic[Acting]):
    """Rollout of a policy in environments of tensors. Nothing leaves the device; the host reads the statistics of the episodes
    together with the step's metrics (`RolloutResults.read_report`).

    The transitions equal, bit for bit, those that env and rollout ranks of the same sizes would send to the actor.

    Args:
        cfg: The configuration.
        env: Environments of the slots `share`.
        share: Global slots.
        policy: Policy on the same device.
        shape: Options that determine the columns of the transitions.

    Attributes:
        obs: Current observations of all slots.
    """

    def __init__(
        self, cfg: PlayingConfig, env: TensorVectorEnv, share: range, policy: Acting, shape: OutcomeShape
    ) -> None:
        self._cfg, self._env, self._share, self._policy = cfg, env, share, policy
        self._steps, self._shape = cfg.algorithm.rollout_steps, shape
        self._seed = env_seed(cfg)
        self.obs = env.reset_tensors()

    @abstractmethod
    def act(self, t: int, obs: Any, noise: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Chooses the actions of decision `t`.

        Returns:
            The actions for the environments, and columns of the transitions.
        """

    @abstractmethod
    def transitions(self, played_steps: PlayedSteps) -> RolloutBatch[Tensor]:
        """Returns the transitions of a rollout."""

    def restore(self, obs: Any) -> None:
        """Sets the current observations, arrays `[n, ...]`, after the environments have been restored."""
        self.obs = map_obs(lambda rows: torch.from_numpy(np.array(rows)).to(self._env.device), obs)

    @torch.no_grad()
    def play(self, step: int, draw_noise: _Noise) -> RolloutResults:
        """Plays the decisions of a step in all slots. Waits until the device has played them, and reads nothing."""
        start_time, steps, is_single = time.perf_counter(), self._steps, self._shape.single_episode
        if is_single:
            self.obs = self._env.reset_tensors(episode_seed(self._cfg, self._seed, step))
        transitions, results, device = TensorBuffer(steps), TensorBuffer(steps), self._env.device
        is_alive = previous_alive = torch.ones(len(self._share), dtype=torch.bool, device=device)
        is_bad = torch.zeros((len(self._share), steps), dtype=torch.bool, device=device)
        for t in range(steps):
            obs, bad_obs = _replace_nonfinite(self.obs)
            bad_obs = bad_obs & previous_alive
            is_bad[:, max(t - 1, 0) : t + 1] |= bad_obs[:, None]
            with span("act", "engine", batch=len(self._share)):
                actions, acted_columns = self.act(t, obs, draw_noise(t))
            transitions.write(t, **columns_of("obs", obs), **acted_columns)
            with span("simulate", "simulator", slots=len(self._share)):
                result = self._env.step_tensors(actions)
            per_action = self._shape.reward_per_action and actions.shape[1] > 1
            rewards, bad_rewards = _replace_nonfinite(result.action_rewards if per_action else result.rewards)
            terminations, truncations = result.terminations, result.truncations
            if is_single:
                rewards = choose_rows(is_alive, rewards, torch.zeros_like(rewards))
                terminations, truncations = terminations & is_alive, truncations & is_alive
            has_ended = terminations | truncations
            final_obs, bad_final_obs = _replace_nonfinite(result.final_obs)
            is_bad[:, t] |= (bad_rewards & is_alive) | (bad_final_obs & has_ended)
            transitions.write(
                t,
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
                action_mask=result.executed if self._shape.chunk > 1 else None,
                loss_mask=is_alive if is_single else None,
            )
            results.write(
                t,
                **columns_of("final_obs", final_obs),
                ended=has_ended,
                skipped=(~result.executed).sum(1) if actions.shape[1] > 1 else None,
                returns=result.returns,
                lengths=result.lengths,
                successes=result.success_once,
            )
            if is_single:
                previous_alive, is_alive = is_alive, is_alive & ~has_ended
            self.obs = result.obs
        last_obs, bad_obs = _replace_nonfinite(self.obs)
        is_bad[:, steps - 1] |= bad_obs & is_alive
        statistics = {name: results.columns[name] for name in _STATISTICS if name in results.columns}
        batch = self.transitions(PlayedSteps(transitions.columns, results.columns, last_obs))
        columns: list[Tensor] = [column for column in batch.columns().values() if column.is_floating_point()]
        is_finite = torch.stack([~is_bad.any(), *(column.isfinite().all() for column in columns)]).all()
        synchronize(device.type)
        return RolloutResults(
            batch=replace(batch, version=step - 1),
            is_bad=is_bad,
            is_finite=is_finite,
            statistics=statistics,
            share=self._share,
            num_device_messages=steps if self._env.can_stay_on_device else 0,
            busy_s=time.perf_counter() - start_time,
        )


#: Statistics of the episodes of a rollout, `[n, T]`.
_STATISTICS = ("ended", "returns", "lengths", "successes", "skipped")


def _replace_nonfinite(obs: Any) -> tuple[Any, Tensor]:
    """Returns an observation (or another tensor) with 0 in place of non-finite numbers, and a mask of its rows with such
    numbers, bool `[N]`. The host reads nothing.
    """
    if isinstance(obs, dict):
        finite_obs = {key: _replace_nonfinite(tensor) for key, tensor in obs.items()}
        masks = torch.stack([mask for _, mask in finite_obs.values()])
        return {key: tensor for key, (tensor, _) in finite_obs.items()}, masks.any(0)
    if not obs.is_floating_point():
        return obs, torch.zeros(len(obs), dtype=torch.bool, device=obs.device)
    is_bad = ~obs.isfinite()
    return obs.masked_fill(is_bad, 0), is_bad.reshape(len(obs), -1).any(1)


#: Largest number of parameters of a policy that computes values after all decisions, ended or not.
_MAX_UNCOUNTED_PARAMETERS = 1 << 22


class PpoTensorRollout(TensorRollout[Policy]):
    """Rollout of an on-policy run (`TensorRollout`).

    Last observations of episodes need values. How many episodes ended is known on the device alone. A small policy computes
    the values of as many observations as there are decisions, which takes less time than a decision takes to simulate. On a
    CPU, and for policies that are large or see images, the host reads the number of episodes that ended.
    """

    def __init__(
        self, cfg: PlayingConfig, env: TensorVectorEnv, share: range, policy: Policy, shape: OutcomeShape
    ) -> None:
        super().__init__(cfg, env, share, policy, shape)
        has_images = any(len(box.shape) > 2 for box in boxes_of(env.observation_space).values())
        num_parameters = sum(parameter.numel() for parameter in policy.parameters())
        #: Whether the host reads the number of episodes that ended.
        self.counts_ends = env.device.type == "cpu" or has_images or num_parameters > _MAX_UNCOUNTED_PARAMETERS

    def act(self, t: int, obs: Any, noise: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Samples actions; their log-probs and the values of the observations are columns (`TensorRollout.act`)."""
        del t
        actions, action_extras = self._policy.predict_action_batch(obs, mode="train", noise=noise)
        inputs = {f"inputs.{name}": tensor for name, tensor in action_extras.get("inputs", {}).items()}
        logprobs, predicted_values = action_extras["prev_logprobs"], action_extras["prev_values"]
        return actions, {"actions": actions, "logprobs": logprobs, "values": predicted_values, **inputs}

    def transitions(self, played_steps: PlayedSteps) -> RolloutBatch[Tensor]:
        """Returns the transitions with the values of the true next observations (`TensorRollout.transitions`)."""
        columns, has_ended, num_slots = played_steps.columns, played_steps.results["ended"], len(self._share)
        final_obs = rows_of(played_steps.results, "final_obs")
        # Decisions in the order of steps, [T · n]; those that ended an episode come first.
        is_end = has_ended.t().reshape(-1)
        end_order = (~is_end).to(torch.uint8).argsort(stable=True)
        num_batches = -(-int(is_end.sum()) // num_slots) if self.counts_ends else self._steps
        obs_batches = [played_steps.last_obs]
        for decisions in end_order.split(num_slots)[:num_batches]:
            slots, decision_steps = decisions % num_slots, decisions // num_slots
            obs_batches.append(map_obs(lambda rows, at=(slots, decision_steps): rows[at], final_obs))
        # Batches of one size, as rollout ranks compute them, because kernels depend on the size.
        predicted_values = torch.cat([self._policy.value(obs_batch).float() for obs_batch in obs_batches])
        positions = (is_end.cumsum(0) - 1).clamp(min=0).view(self._steps, num_slots).t()
        # Where no episode ended, any value does.
        end_values = predicted_values[positions + (num_slots if num_batches else 0)]
        following_values = _next_values(
            columns["values"], predicted_values[:num_slots], has_ended, end_values, columns.get("action_mask")
        )
        return RolloutBatch.from_columns({**columns, "next_values": following_values})


def _next_values(
    values: Tensor, last_values: Tensor, has_ended: Tensor, end_values: Tensor, is_executed: Tensor | None
) -> Tensor:
    """Returns the value of the true next observation of each transition (`next_values`), of the shape of `values`.

    Args:
        values: Values of the observations that were acted on, `[n, T]`, or `[n, T, C]` with a value per action.
        last_values: Values of the observations after the rollout, `[n]`, or `[n, C]`, of which the first is used.
        has_ended: Decisions that ended an episode, bool `[n, T]`.
        end_values: Values of the last observations of episodes, `[n, T]` or `[n, T, C]`, read where `has_ended`.
        is_executed: Mask of the executed actions, `[n, T, C]`; required for values per action.
    """
    no_rows = has_ended.new_zeros(0, dtype=torch.int64)
    following_values: Tensor = next_values(values, last_values, no_rows, no_rows, end_values[:0, 0], is_executed)
    if values.dim() == 3:
        assert is_executed is not None
        last_executed = is_executed.sum(-1, keepdim=True) - 1
        is_last = torch.arange(values.shape[2], device=values.device) == last_executed
        has_ended, end_values = has_ended[..., None] & is_last, end_values[..., :1]
    return torch.where(has_ended, end_values.to(values.dtype), following_values)


class SimulatingActor(PolicyTrainer[Cfg]):
    """Base of actor workers of runs with `env.train.env_type: tensors` whose placement names only the actor. Each rank
    simulates its share of the slots and acts on it with a copy of the weights that it trains.

    The copy has the memory layout of a rollout rank's policy. On a CPU, products with the trained weights, which are parts of
    one buffer, can differ in the last bit, because kernels depend on the alignment.

    A subclass also inherits, before this class, the actor worker of its algorithm.
    """

    env: TensorVectorEnv
    acting_policy: Policy
    rollout: TensorRollout[Any]
    _share: range
    _restored_episodes = True
    #: Results of the step's rollout, and counts of its transitions, until `read_step` reads them.
    _results: RolloutResults | None = None
    _rollout_counts: RolloutCounts

    @abstractmethod
    def init_worker(self, slots: SlotMap, observation_space: Any, action_space: Any) -> int:
        """Builds networks and optimizers; returns the number of trained parameters."""

    @abstractmethod
    def build_rollout(self, spaces: tuple[Any, Any]) -> TensorRollout[Any]:
        """Builds the policy that acts, as `acting_policy`, and the rollout."""

    def build(self, slots: SlotMap) -> int:
        """Builds environments, policy and optimizer; returns the number of trained parameters."""
        train_env, self._share = self.cfg.env.train, slots.actor_share(self.rank)
        self.set_up_device()
        self.env = TensorVectorEnv(train_env, len(self._share), self._share.start, env_seed(self.cfg), self.device)
        spaces = self.env.observation_space, self.env.action_space
        num_parameters = self.init_worker(slots, *spaces)
        self.rollout = self.build_rollout(spaces)
        self.log.info("simulates %d of %d slots of %s", len(self._share), slots.num_envs, train_env.env_id)
        return num_parameters

    def open_sync(self, slots: SlotMap, rollout: RolloutConfig) -> None:
        """Opens no weight sync, because this rank acts with a copy of its weights."""

    @abstractmethod
    def read_metrics(self) -> dict[str, float]:
        """Reads the metrics of the step's training."""

    def play_rollout(self, step: int) -> RolloutResults:
        """Plays the step's rollout with the current weights (`TensorRollout.play`)."""
        sample = self.acting_policy.sample_noise

        def draw_noise(t: int) -> Tensor:
            return noise_of_decision(sample, (self.seed, step, t), self._share, self.cfg.env.train, self.device)

        self.copy_weights()
        self._results = self.rollout.play(step, draw_noise)
        return self._results

    def has_rows_to_drop(self, results: RolloutResults) -> bool:
        """Returns whether transitions with non-finite numbers must be dropped before the training. The host reads a flag only
        if `runner.on_nonfinite` is skip; otherwise `read_step` ends the run.
        """
        return skips(self.cfg) and not bool(results.is_finite)

    def read_step(self) -> tuple[RolloutCounts, dict[str, np.ndarray], dict[str, float]]:
        """Reads the results of a step: the only copies to the host. Returns the counts of transitions, the report of the
        episodes that ended, and the metrics of the training.

        Raises:
            NonFinite: A value is not finite, and `runner.on_nonfinite` is stop.
        """
        results, self._results = self._results, None
        assert results is not None, "read_step follows play"
        if not skips(self.cfg) and not bool(results.is_finite):
            assert results.batch.version is not None
            self.mark_nonfinite(results.batch, results.is_bad, results.batch.version + 1)
        return self._rollout_counts, results.read_report(), self.read_metrics()

    def mark_nonfinite(self, batch: RolloutBatch[Tensor], is_bad: Tensor, step: int) -> RolloutBatch[np.ndarray]:
        """Returns the transitions as arrays, with those marked that contain non-finite numbers or that `is_bad` marks.

        Raises:
            NonFinite: A value is not finite, and `runner.on_nonfinite` is stop.
        """
        bad_on_host = is_bad.cpu().numpy()
        if bad_on_host.any() and not skips(self.cfg):
            slot, t = (int(index[0]) for index in np.nonzero(bad_on_host))
            raise nonfinite(
                f"step {step}, decision {t}: a reward or an observation of slot {self._share.start + slot} of "
                f"{self.cfg.env.train.env_id} (actor-{self.rank}) is not finite"
            )
        arrays = replace(batch.map(lambda column: column.cpu().numpy()), nonfinite=bad_on_host)
        return mark_nonfinite(arrays, step, self._share, self.rank, skips=skips(self.cfg))

    # -- evaluation and checkpoint --------------------------------------------------------------------------------

    def evaluate(self, part: int, num_parts: int) -> EvaluationRows:
        """Plays a part of an evaluation of the current weights, with deterministic actions (`evaluation_rows`)."""
        self.copy_weights()
        return evaluation_rows(self.cfg, self.acting_policy, self.seed, self.device, part, num_parts)

    def copy_weights(self) -> None:
        """Copies the trained weights that acting needs to the policy that acts, on the device."""
        unknown_names = self.acting_policy.load_state_dict(dict(self.sent_weights(())), strict=False).unexpected_keys
        assert not unknown_names, unknown_names

    def save(self, folder: str) -> None:
        """Writes the actor's state (`PolicyTrainer.save`), and the environments as `env-<rank>.pt`."""
        super().save(folder)
        save_envs(Path(folder), self.rank, [(self._share, self.rollout.obs, self.env)])

    def load(self, folder: str) -> None:
        """Restores a checkpoint (`PolicyTrainer.load`), which env ranks may have written, too."""
        super().load(folder)
        obs = restore_env(self.env, self._share, read_saved_units(Path(folder)), Path(folder))
        self._restored_episodes = obs is not None
        if obs is not None:
            self.rollout.restore(obs)

    def has_restored_episodes(self) -> bool:
        """Returns whether the last `load` restored the episodes in progress."""
        return self._restored_episodes


class TensorActor(EmbodiedActor, SimulatingActor[PpoConfig]):
    """Actor worker of on-policy runs that simulates and acts itself (`SimulatingActor`)."""

    def build_rollout(self, spaces: tuple[Any, Any]) -> PpoTensorRollout:
        """Builds the policy that acts, and the rollout (`SimulatingActor.build_rollout`)."""
        policy = build_acting_policy(self.cfg, spaces, self.device, self.seed)
        self.acting_policy = policy.to(self.device).eval().requires_grad_(False)
        return PpoTensorRollout(self.cfg, self.env, self._share, self.acting_policy, ppo_shape(self.cfg))

    @property
    def may_mask_rows(self) -> bool:
        """Returns whether the loss mask may leave out transitions: non-finite ones, and those after a slot's only episode."""
        return skips(self.cfg) or not self.cfg.env.train.auto_reset

    def play(self, step: int) -> None:
        """Plays the step's rollout, and computes advantages and returns."""
        results = self.play_rollout(step)
        batch = results.batch
        if self.has_rows_to_drop(results):
            # Non-finite numbers are rare, so the host decides what is dropped, by the rules of other runs.
            prepared_batch, self._rollout_counts = self.prepare(self.mark_nonfinite(batch, results.is_bad, step))
            self.batch = prepared_batch.flatten()
            return
        self.batch = self.with_advantages(batch).flatten()
        self._rollout_counts = batch.counts(batch.rewards.shape[0] * batch.rewards.shape[1])


class OffPolicyTensorRollout(TensorRollout[ActorCritic]):
    """Rollout of an off-policy run (`TensorRollout`)."""

    _num_random = 0

    def set_num_random(self, num_random: int) -> None:
        """Sets the number of the next rollout's first transitions whose actions are random."""
        self._num_random = num_random

    def act(self, t: int, obs: Any, noise: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Chooses actions, random ones at the start of a run (`TensorRollout.act`)."""
        is_random = t * self._cfg.env.train.num_envs < self._num_random
        actions = choose_actions(self._policy, obs, noise, random=is_random)
        return self._policy.executed(obs, actions), {"actions": actions}

    def transitions(self, played_steps: PlayedSteps) -> RolloutBatch[Tensor]:
        """Returns the transitions with the true next observations (`TensorRollout.transitions`)."""
        next_obs = columns_of("next_obs", rows_of(played_steps.results, "final_obs"))
        return RolloutBatch.from_columns({**played_steps.columns, **next_obs})


class OffPolicyTensorActor(OffPolicyActor, SimulatingActor[SacConfig]):
    """Actor worker of off-policy runs that simulates and acts itself (`SimulatingActor`). Its device has the replay buffer."""

    rollout: OffPolicyTensorRollout
    replay: TensorReplay

    def build_rollout(self, spaces: tuple[Any, Any]) -> OffPolicyTensorRollout:
        """Builds the policy that acts, and the rollout (`SimulatingActor.build_rollout`)."""
        policy = build_model(self.cfg.actor.model, *spaces, seed=self.seed)
        assert isinstance(policy, ActorCritic)
        self.acting_policy = policy.to(self.device).eval().requires_grad_(False)
        return OffPolicyTensorRollout(self.cfg, self.env, self._share, policy, OutcomeShape())

    def build_replay(self) -> TensorReplay:
        """Builds this rank's part of the replay buffer on the device (`OffPolicyActor.build_replay`)."""
        host = super().build_replay()
        assert isinstance(host, ReplayBuffer)
        return TensorReplay(host, self.device)

    def build_mixture(self, demos: np.ndarray | None, options: DrawOptions) -> None:
        """Builds the sampler of batches on the device (`OffPolicyActor.build_mixture`)."""
        self._tensor_mixture = TensorMixture(
            self.replay,
            demos,
            options,
            device=self.device,
            seed=self.seed,
            rank=self.rank,
            ranks=self.world_size,
        )

    def replace_demos(self, demos: np.ndarray | None) -> None:
        """Refuses labels of interventions, which need simulators on the host (`OffPolicyActor.replace_demos`).

        Raises:
            ConfigError: Always, because environments of tensors store no intervention labels.
        """
        raise ConfigError(
            "env.train.env_type is tensors, and the checkpoint's transitions have labels of interventions; continue the run "
            "with separate ranks"
        )

    def play(self, step: int, random_steps: int = 0) -> None:
        """Plays the step's rollout, and adds its transitions to the buffer.

        Args:
            step: Global step.
            random_steps: Number of the run's first transitions whose actions are random.
        """
        self.rollout.set_num_random(num_random_left(self.cfg, random_steps, step))
        results = self.play_rollout(step)
        batch, has_rows_to_drop = results.batch, self.has_rows_to_drop(results)
        # Non-finite numbers are rare, so the host decides what is dropped, by the rules of other runs.
        marked_batch = self.mark_nonfinite(batch, results.is_bad, step) if has_rows_to_drop else None
        if skips(self.cfg) and self.is_any(has_rows_to_drop):
            arrays = batch.map(lambda column: column.cpu().numpy()) if marked_batch is None else marked_batch
            self._rollout_counts = self.store(arrays)
            return
        columns = batch.transition_columns()
        if self.positions is not None:
            assert batch.truncations is not None
            slot_starts = torch.from_numpy(self.positions.count_without_ends(batch.rewards.shape[1])).to(self.device)
            columns[POSITION] = slot_starts + (batch.terminations | batch.truncations)
        self._rollout_counts = batch.counts(self.add_transitions(columns))

    def draws(self, count: int, *, demos_only: bool) -> Iterator[MixtureDraw[Tensor]]:
        """Yields the batches of the next updates (`OffPolicyActor.draws`)."""
        return self._tensor_mixture.draws(self.off_policy.num_updates, count, demos_only=demos_only)

    def stored_on_host(self) -> ReplayBuffer:
        """Returns the buffer from which `load` restores the one on the device."""
        return self.replay.host
