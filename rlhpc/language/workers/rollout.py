"""Rollout worker of language models: generates groups, has them scored, and sends each to its actor when complete.

One loop on the main thread does all work: between two steps of the engine it receives announced weights, admits prompts, and
collects scores. Judges run in separate processes, and cheap reward terms run in this process, so a slow sequence delays only
one group. The loop calls the engine through a generation object (`agents.registry.make_generation`); without an agent, each
episode is one request with one answer (`EpisodeRunner`).

Admission bounds the staleness: a prompt of step s starts once the weights have version s − 1 − `max_staleness` or newer, and
the version never decreases. A bound of 0 gives the synchronous loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from rlhpc.language.agents.episodes import sample_of, tokens_of
from rlhpc.language.agents.registry import INLINE, make_generation
from rlhpc.language.algorithms.registry import make_algorithm
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data import PromptSampler
from rlhpc.language.engines import Request, SamplingParams
from rlhpc.language.engines.common import choices_of
from rlhpc.language.engines.registry import engine_preload, is_forkable
from rlhpc.language.preflight import check_inputs_digest, open_prompts
from rlhpc.language.rollout.engine_group import EngineWeights, first_of_engine, leader_only, ranks_of_engine
from rlhpc.language.rollout.group_builder import GroupBuilder, failure_of
from rlhpc.language.rollout.pending_group import (
    Action,
    Deliver,
    PartialGroup,
    PendingGroup,
    PendingGroups,
    RequestScore,
    Requeue,
    ResumeSampling,
    ScoredGroup,
    StartSampling,
)
from rlhpc.language.rollout.prompt_queue import PromptLeases
from rlhpc.language.rollout.sample_group import FINISHED
from rlhpc.language.rollout.validation import Row, Validation
from rlhpc.language.scoring.reward_aggregator import GroupRatingRequests, RewardAggregator
from rlhpc.language.training.prompt_dispatch import DELIVERED, GROUPS, WORK, PromptMap, channel_to, ratings_of, seed_of
from rlhpc.language.workers.agent import address_for_others, connect_agent_ranks, publish_feedback_endpoint
from rlhpc.runs.device import set_up_process, worker_device
from rlhpc.runtime.devices import device_name
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.trace_recorder import IdleSpan, span
from rlhpc.runtime.worker import Worker
from rlhpc.weights.verification import COST

#: Pause in seconds when neither the engine nor the judges returned anything.
_IDLE_S = 0.002


class LanguageRolloutWorker(Worker):
    """Rank of the rollout group: the leader of an engine, with its judges, or a follower (`engine_group`).

    The worker has no state in checkpoints, because its samples depend only on seeds and weights.
    """

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._resources = ExitStack()

    @classmethod
    def forks(cls, cfg: GrpoConfig) -> bool:
        """Returns whether the engine's ranks may be started by fork."""
        return is_forkable(cfg.rollout.rollout_backend)

    @classmethod
    def preloads(cls, cfg: GrpoConfig) -> Sequence[str]:
        """Returns the modules that a node imports once for the engines of its ranks."""
        return engine_preload(cfg.rollout.rollout_backend)

    @classmethod
    def ranks_sharing_devices(cls, cfg: GrpoConfig) -> int:
        """Returns the number of ranks of an engine, which reduce tensors between their accelerators."""
        return ranks_of_engine(cfg)

    def close(self) -> None:
        """Ends the engine, its processes, and the judges."""
        self._resources.close()

    def init_worker(self, prompts: PromptMap, last_step: int, expected_digest: str = "") -> dict[str, Any]:
        """Loads engine, tokenizer, dataset and judges.

        Args:
            prompts: Map of prompts to ranks.
            last_step: Last step whose prompts are admitted.
            expected_digest: Digest of the model and data that the first ranks read (`inputs_digest`); "" on these ranks.

        Returns:
            `digest` of model and data, name of the `device`, and number of `dropped` problems; {} on a follower.

        Raises:
            ConfigError: The digest differs on this rank.
        """
        cfg = self.cfg
        self._max_staleness = cfg.algorithm.max_staleness  # read after each step of the engine
        self.prompts = prompts
        self.last_step = last_step
        # Without overlap of steps, results are bitwise equal for any number of ranks, so prompts are sampled anew instead.
        self.requeues_on_leave = (
            cfg.algorithm.max_staleness > 0 and cfg.rollout.agent is None and cfg.agent.kind == INLINE
        )
        leader_rank = first_of_engine(self.rank, cfg)
        set_up_process(cfg.runner, "rollout", leader_rank)  # one seed for all ranks of an engine
        if self.rank > leader_rank:
            self._build_engine(prompts)
            self.log.info("computes with %s-%d", self.group_name, leader_rank)
            return {}
        path = str(cfg.actor.model.model_path)
        self.tokenizer, self.encoder, self.dataset = open_prompts(cfg)
        digest = check_inputs_digest(cfg, self.tokenizer, self.dataset, expected_digest, self.node)
        self.sampler = PromptSampler(len(self.dataset), prompts.prompts, cfg.runner.seed)
        self.sampling = SamplingParams(
            max_new_tokens=cfg.rollout.max_new_tokens, temperature=cfg.rollout.temperature,
            top_p=cfg.rollout.top_p, top_k=cfg.rollout.top_k,
        )  # fmt: skip
        self._build_engine(prompts)
        self._capacity = self.backend.capacity
        rank_name = f"{self.group_name}-{self.rank}"
        self.group_builder = GroupBuilder(cfg, make_algorithm(cfg), choices_of(cfg, self.backend), rank_name)
        address = address_for_others(cfg)
        self.generation = make_generation(cfg, self.backend, self.tokenizer, connect_agent_ranks(self, cfg), address)
        self._resources.callback(self.generation.close)
        publish_feedback_endpoint(self, self.generation, self._resources)
        self.reward_scorer = RewardAggregator(cfg)
        self._resources.callback(self.reward_scorer.close)
        if cfg.runner.val_check_interval > 0:
            self.validation = Validation(cfg, self.tokenizer)
        COST.pop()
        self.log.info("answers with %s by %s on %s; %d problems", path, cfg.rollout.rollout_backend, worker_device(self),
                      len(self.dataset))  # fmt: skip
        return {
            "digest": digest,
            "device": device_name(worker_device(self)),
            "dropped": self.dataset.dropped,
        }

    def _build_engine(self, prompts: PromptMap) -> None:
        """Builds this rank's engine."""
        self.receiver = EngineWeights(self, self.cfg, prompts)
        self.engine_rank = self.receiver.engine_rank
        self.backend = self.engine_rank.engine
        self._resources.callback(self.backend.close)

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        if self.engine_rank.follows:
            return
        self._groups = self.connect_channel(GROUPS)
        self._work, self._delivery_channel = self.connect_channel(WORK), self.connect_channel(DELIVERED)
        self._scoring = {name: self.connect_channel(channel_to(name)) for name in self.prompts.scoring}
        self._raters = {
            name: GroupRatingRequests(
                self.connect_channel(channel_to(name)), partial(self.notice, ratings_of(name)), self.rank, ranks
            )
            for name, ranks in self.prompts.rating.items()
        }
        self.reward_scorer.connect(self._raters)

    @leader_only
    def begin(self, step: int) -> None:
        """Prepares to continue after `step`: drops all groups in flight; sampling then waits for new weights."""
        self.generation.abort()
        self.reward_scorer.drain()
        self._reset_step(step)

    def forget_sent(self) -> None:
        """Makes the receiver expect complete weights next, because the last update may have been lost."""
        self.receiver.forget()

    @leader_only
    def offload(self) -> None:
        """Frees the accelerator for the actor."""
        self.backend.offload()

    @leader_only
    def reload(self) -> None:
        """Moves the engine's state back to the accelerator after `offload`."""
        self.backend.reload()
        self.receiver.check_deferred_probe()

    @leader_only
    def reload_weights(self) -> None:
        """Moves only the engine's weights back to the accelerator, to receive an update while the actor still occupies the
        accelerator.
        """
        self.backend.reload_weights()

    def _reset_step(self, step: int) -> None:
        self.receiver.forget_version()
        self._last_admitted_step = step
        self._pending_groups = PendingGroups(
            self.prompts.group_size, self.cfg.algorithm.max_refills, self.cfg.agent.feedback_ahead, self._make_group,
            self.group_builder,
        )  # fmt: skip
        self.leases = PromptLeases(self.prompts.prompts, self._work, self._delivery_channel)
        self.before_leaving(None)

    # -- the loop -------------------------------------------------------------------------------------------------

    @leader_only
    def generate(self, step: int, num_ranks: int) -> dict[str, float]:
        """Leases prompts of `step` and generates their groups, until the step's queue is empty and all groups are delivered.

        With `max_staleness`, prompts of later steps are started too.

        Args:
            step: Step of the run.
            num_ranks: Number of engines that take part.

        Returns:
            `seconds` of the call, `busy_s` of the engine, `sync_s` of receiving weights, the number of sampled `tokens`, and
            the values of `Cost.pop` and of `TransferTotals.pop`.

        Raises:
            DeadlineExceeded: Groups were not complete within `runner.step_timeout_s`.
        """
        start_time, busy_s, num_tokens, idle_span = time.perf_counter(), 0.0, 0, IdleSpan("prompts, rewards or weights")
        deadline = start_time + self.cfg.runner.step_timeout_s
        self._last_admitted_step = self.last_step
        eval_interval = self.cfg.runner.val_check_interval
        if eval_interval > 0:  # no group is in flight when the weights of a step are evaluated
            self._last_admitted_step = min(self.last_step, -(-step // eval_interval) * eval_interval)
        self.leases.begin(step, num_ranks)
        while self.leases.num_leased(step) or not self.leases.is_exhausted(step):
            if time.perf_counter() > deadline:
                raise DeadlineExceeded(
                    f"step {step}: {self.leases.num_leased(step)} groups of {self.group_name}-{self.rank} were not whole "
                    f"after runner.step_timeout_s ({self.cfg.runner.step_timeout_s:g} s){self._describe_awaited_rewards()}"
                )
            if self.told_to_leave:
                self._requeue_groups()
                break
            self.receiver.take()
            self._admit(step)
            has_worked = False
            if self.generation.unfinished():
                step_start = time.perf_counter()
                num_episodes = self.generation.unfinished()
                with span("generation", "engine", episodes=num_episodes, capacity=self._capacity) as generating:
                    finished_episodes = self.generation.step()
                    generating.add(finished=len(finished_episodes))
                busy_s += time.perf_counter() - step_start
                for episode in finished_episodes:
                    num_tokens += tokens_of(episode) - self._pending_groups.num_resumed_tokens(episode.id)
                    self._execute_actions(self._pending_groups.on_episode(episode))
                has_worked = True
            for previous_episode, episode in self.generation.delayed_rewards():
                self._execute_actions(self._pending_groups.on_delayed_reward(previous_episode, episode))
            for request, scored_answer in self.reward_scorer.poll():
                self._execute_actions(self._pending_groups.on_score(request, scored_answer))
                has_worked = True
            if has_worked:
                idle_span.end()
            else:
                idle_span.begin()
                time.sleep(_IDLE_S)
        idle_span.end()
        metrics = {
            "seconds": time.perf_counter() - start_time,
            "busy_s": busy_s,
            "sync_s": self.receiver.pop_sync_s(),
            **self.receiver.pop_transfers(),
            "tokens": num_tokens,
            **COST.pop(),
        }
        if not len(self._pending_groups):
            self.before_leaving(None)
        return metrics

    @leader_only
    def evaluate(self, step: int, ranks: Sequence[int]) -> dict[str, list[Row]]:
        """Receives the weights of `step`, then answers this engine's share of the evaluation problems.

        Args:
            step: Step of the run.
            ranks: Ranks that take part: the leaders of the engines.

        Returns:
            See `Validation.rows`.
        """
        self.receiver.await_version(step)
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        rank_and_count = list(ranks).index(self.rank), len(ranks)
        return self.validation.rows(self.generation, self.reward_scorer, rank_and_count, deadline)

    @leader_only
    def sample_probe(self, phase: int) -> dict[str, Any]:
        """Draws samples for random prompts, for the trainer to score (`weight_sync.sample_probe`).

        Args:
            phase: Number of the probe's phase; each phase has different prompts.

        Returns:
            `samples`, the engine's `digests` of its parameters, and its `dtype` and `device` type.
        """
        return {
            "samples": self.receiver.sample_probe(len(self.tokenizer), phase),
            "digests": self.receiver.engine_rank.engine.parameter_digests(),
            **self.receiver.computes(),
        }

    @leader_only
    def take_weights(self, version: int) -> None:
        """Receives weights until the engine has this version or a newer one."""
        self.receiver.await_version(version)

    @leader_only
    def take_update(self, version: int) -> None:
        """Receives the next update, which has the weights of this version."""
        self.receiver.await_update(version)

    def _describe_awaited_rewards(self) -> str:
        reasons = [f"{num_ratings} ratings of {name}" for name, num_ratings in self.reward_scorer.waits_for().items()]
        if num_rewards := self._pending_groups.num_awaited_rewards:
            reasons.append(f"{num_rewards} rewards that come later (agent.feedback_timeout_s)")
        return "; it waits for " + ", ".join(reasons) if reasons else ""

    def _admit(self, first_step: int) -> None:
        if self.receiver.version < 0:
            return
        last_step = min(self.receiver.version + 1 + self._max_staleness, self._last_admitted_step)
        for step in range(first_step, last_step + 1):
            while self.backend.unfinished() < self._capacity:
                prompt_or_group = self.leases.lease(step)
                if prompt_or_group is None:
                    break
                if isinstance(prompt_or_group, PartialGroup):
                    self._execute_actions(self._pending_groups.on_partial(step, prompt_or_group))
                else:
                    self._execute_actions(self._pending_groups.on_prompt(step, prompt_or_group))

    def _make_group(self, step: int, prompt_position: int, attempt: int) -> PendingGroup:
        """Makes the group of a position: from the sampler's prompt at attempt 0, from a random prompt at later attempts."""
        index = self.sampler.at((step - 1) * self.prompts.prompts + prompt_position)
        if attempt:
            generator = np.random.default_rng(seed_of(self.cfg.runner.seed, step, prompt_position, attempt, -1))
            index = int(generator.integers(len(self.dataset)))
        prompt = self.dataset[index]
        ids, image_offsets = self.encoder.encode(prompt) or ((), ())
        return PendingGroup(
            step, prompt_position, attempt, prompt, tuple(ids), images=self.encoder.prompt_images(prompt, image_offsets)
        )

    # -- actions on groups ----------------------------------------------------------------------------------------

    def _execute_actions(self, actions: Iterable[Action]) -> None:
        """Executes actions that `PendingGroups` returned for an event."""
        for action in actions:
            match action:
                case StartSampling(group, ids):
                    self.generation.add(self._requests(group, ids), group.prompt)
                case ResumeSampling(group, ids, answers):
                    for request, answer in zip(self._requests(group, ids), answers, strict=True):
                        self.generation.resume(request, answer, group.prompt)
                case RequestScore(group, episode):
                    is_finished = episode.finish_reason in FINISHED
                    sample = sample_of(group.prompt, episode, self.tokenizer, has_finished=is_finished)
                    self.reward_scorer.submit(episode.id, sample, group.group_id, self.prompts.group_size)
                case Deliver(group, scored):
                    self._deliver(group, scored)
                case Requeue(group, partial_group):
                    self.leases.requeue(group.step, partial_group)

    def _requests(self, group: PendingGroup, ids: Sequence[int]) -> list[Request]:
        """Returns a request for each sample of a group; makes the rank requeue its groups when it leaves the run."""
        if self.requeues_on_leave:
            self.before_leaving(self._requeue_groups)
        seeds = (
            seed_of(self.cfg.runner.seed, group.step, group.position, group.attempt, member)
            for member in range(len(ids))
        )
        return [
            Request(request_id, group.prompt_ids, self.sampling, seed, group.images)
            for request_id, seed in zip(ids, seeds, strict=True)
        ]

    def _deliver(self, pending_group: PendingGroup, scored_group: ScoredGroup) -> None:
        """Sends a group to its actor and to the groups that score tokens, and reports its delivery."""
        group, group_metrics = self.group_builder.build(pending_group, scored_group)
        # A durable put survives the loss of this process.
        self._groups.entrust(group.pack(), key=str(self.prompts.actor_of(group.position)))
        for name, channel in self._scoring.items():
            channel.entrust(group.pack_without_columns(), key=str(self.prompts.scorer_of(name, group.position)))
        self.leases.deliver(group.step, group.position, group_metrics, failure_of(pending_group))

    def _requeue_groups(self) -> None:
        """Requeues all groups in flight with their partial answers, for other ranks to resume."""
        num_pending = len(self._pending_groups)
        self._execute_actions(
            self._pending_groups.on_leave({episode.id: episode for episode in self.generation.abort()})
        )
        self.log.info("leaves, and hands back %d prompts with what there is of the answers", num_pending)
        self.before_leaving(None)
