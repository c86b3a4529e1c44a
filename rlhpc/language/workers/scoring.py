"""Scoring workers: ranks that compute a column of token values for the actor, or rate answers for the reward.

Scoring workers process groups and answers on arrival. Except for the reference, they have no state, so a lost rank is
restarted alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.state import load_tensors, save_tensors
from rlhpc.config.parallel import MeshSizes
from rlhpc.jobs.paths import MODEL
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.registry import engine_preload, is_forkable
from rlhpc.language.models.micro_batching import split_micro_batches, values_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.rollout.sample_group import NUM_BATCHES, BlockChannel, SampleGroup, column_message
from rlhpc.language.scoring.checks import judges, section_of
from rlhpc.language.scoring.groups import REFERENCE, scoring_groups
from rlhpc.language.scoring.logprobs import LogProbs
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.language.training.prompt_dispatch import GROUPS, PromptMap, channel_to, ratings_of
from rlhpc.language.training.weight_sync import reference_sync_of
from rlhpc.runs.device import set_up_process, worker_device
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.devices import empty_cache
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.runtime.trace_recorder import span
from rlhpc.runtime.worker import Worker
from rlhpc.weights import make_sync
from rlhpc.weights.delta import Elements
from rlhpc.weights.verification import UpdateVerification


class GroupInbox:
    """Inbox of a scoring rank for sample groups, with the driver's messages that end a step.

    A prompt may have two groups, if it was sampled again because its rank was lost while sending the first group
    (`SampleGroup.answers_digest`). The actor may have received either group, so both are scored.

    Args:
        channel: Channel of the groups.
        rank_name: Name of the rank, for messages.
        sender: Name of the worker group that sends the groups.
    """

    def __init__(self, channel: BlockChannel, rank_name: str, sender: str) -> None:
        self._channel = channel
        self._rank_name = rank_name
        self._sender = sender
        self._later_groups: list[SampleGroup] = []
        self._ended_step = -1

    def batches(
        self, step: int, positions: Sequence[int], deadline: float, *, only_arrived: bool = False
    ) -> Iterator[list[SampleGroup]]:
        """Yields a step's groups in a few batches, each batch when it is complete.

        Only `positions` determines the groups of a batch, so the order of arrival does not change the last digits of results.
        Second groups of a prompt come last.

        Args:
            step: Step of the run.
            positions: Positions of the rank's groups.
            deadline: Deadline by `time.monotonic`.
            only_arrived: Whether to yield a single batch, after the step has ended.

        Raises:
            DeadlineExceeded: A group did not arrive in time.
        """
        num_batches = 1 if only_arrived else min(NUM_BATCHES, len(positions) or 1)
        missing_batches = [batch.tolist() for batch in np.array_split(np.asarray(positions), num_batches) if len(batch)]
        groups_by_position, second_groups, digests_by_position = (
            dict[int, SampleGroup](),
            list[SampleGroup](),
            dict[int, set[bytes]](),
        )
        while missing_batches or self._ended_step < step:
            for group in self.receive(step, deadline):
                known_digests = digests_by_position.setdefault(group.position, set())
                if not known_digests:
                    groups_by_position[group.position] = group
                elif group.answers_digest not in known_digests:
                    second_groups.append(group)
                known_digests.add(group.answers_digest)
            if only_arrived and self._ended_step < step:
                continue
            for batch in [batch for batch in missing_batches if groups_by_position.keys() >= {*batch}]:
                missing_batches.remove(batch)
                extra_groups, second_groups = (second_groups, []) if only_arrived else ([], second_groups)
                yield [*map(groups_by_position.pop, batch), *extra_groups]
        if second_groups:
            yield second_groups

    def receive(self, step: int, deadline: float) -> list[SampleGroup]:
        """Returns all groups of a step that have arrived; waits for the first group or for the end of the step.

        Raises:
            DeadlineExceeded: No group and no end of the step arrived before the deadline by `time.monotonic`.
        """
        groups, step_ended = [group for group in self._later_groups if group.step == step], False
        self._later_groups = [group for group in self._later_groups if group.step > step]
        while True:
            try:
                message = self._channel.get_nowait()
            except QueueEmpty:
                if groups or step_ended:
                    return groups
                message = self._wait_for_message(step, deadline)
            if "end" in message:
                self._ended_step = max(self._ended_step, message["end"])
                step_ended = True
            elif message["step"] >= step:
                group = SampleGroup.unpack(message)
                (groups if group.step == step else self._later_groups).append(group)

    def _wait_for_message(self, step: int, deadline: float) -> Any:
        try:
            return self._channel.get(max(0.0, deadline - time.monotonic()))
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"step {step}: no groups came from {self._sender} to {self._rank_name} within runner.step_timeout_s"
            ) from None


class _ScorerWorker(Worker):
    """Base class of the scoring and rating workers."""

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.scorer: Any = None

    def close(self) -> None:
        """Ends the processes that the scorer has started."""
        if self.scorer is not None:
            self.scorer.close()

    @classmethod
    def preloads(cls, cfg: GrpoConfig) -> Sequence[str]:
        """Returns the modules that a node imports once for the engine of a teacher, if the run has a teacher."""
        return engine_preload(cfg.teacher.rollout_backend) if cfg.teacher.rollout_backend else ()

    def init_worker(self, prompts: PromptMap) -> None:
        """Loads the scorer."""
        self.prompts = prompts
        set_up_process(self.cfg.runner, self.group_name, self.rank)
        self.group = scoring_groups(self.cfg)[self.group_name]
        self.device = worker_device(self)
        self.scorer = make_scorer(self.cfg, self.device, self.group)
        self.log.info("scores with %s on %s", self.group.model.model_path or self.group.scorer, self.device)

    def _deadline(self) -> float:
        return time.monotonic() + self.cfg.runner.step_timeout_s


class ScoringWorker(_ScorerWorker):
    """Rank of a group with a `Scorer`, which computes a column and sends it to the actors."""

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        channel = BlockChannel(
            self.connect_channel(channel_to(self.group_name)), self, MeshSizes(shard=self.world_size)
        )
        self._inbox = GroupInbox(channel, f"{self.group_name}-{self.rank}", self.prompts.rollout_name)
        self._actors = self.connect_channel(GROUPS)

    def serve(self, step: int) -> dict[str, float]:
        """Scores this rank's share of a step's groups on arrival, and sends the columns to the actors.

        Returns:
            `busy_s`: seconds of scoring; `tokens`: number of tokens.
        """
        busy_s, num_tokens = 0.0, 0
        prompt_positions = self.prompts.share_of(self.group_name, self.rank)
        for groups in self._inbox.batches(step, prompt_positions, self._deadline()):
            start_time = time.perf_counter()
            batch = TokenBatch.joined([group.batch for group in groups])
            with span("score", "judge", tokens=batch.tokens, batch=len(groups)):
                token_scores = values_of(
                    self._score,
                    split_micro_batches(
                        batch,
                        self.group.max_tokens,
                        is_packed=self.scorer.packed,
                        shares_prefixes=self.scorer.shares_prefixes,
                    ),
                    batch,
                    "the scorer",
                )
            send_column(self._actors, self.prompts, groups, self.group_name, token_scores)
            num_tokens += batch.tokens
            busy_s += time.perf_counter() - start_time
        return {"busy_s": busy_s, "tokens": float(num_tokens)}

    def _score(self, batch: TokenBatch) -> torch.Tensor:
        token_scores: torch.Tensor = self.scorer.score(batch.to(self.device))
        return token_scores

    def offload(self) -> None:
        """Frees the accelerator for another group."""
        self.scorer.offload()
        empty_cache()

    def reload(self) -> None:
        """Moves the scorer back to the accelerator after `offload`."""
        self.scorer.reload()


def send_column(
    actors: Channel, prompts: PromptMap, groups: Sequence[SampleGroup], column_source: str, column_values: torch.Tensor
) -> None:
    """Sends a column of some groups' tokens to the actors that train on them.

    Args:
        actors: Channel of the actors.
        prompts: Map of prompts to ranks.
        groups: The groups, in the order of `column_values`.
        column_source: Name of the worker group that computed the column.
        column_values: `[T]` or `[T, k]`, the column of all groups.
    """
    for group, group_column in zip(groups, column_values.split([group.batch.tokens for group in groups]), strict=True):
        message = column_message(group, column_source, group_column)
        actors.put(message, key=str(prompts.actor_of(group.position)))


class RatingWorker(_ScorerWorker):
    """Rank of a group with a `Rater`, which provides a term of the reward."""

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        self._requests = self.connect_channel(channel_to(self.group_name))
        self._ended_phases = set[str]()

    def serve(self, phase: str) -> dict[str, float]:
        """Rates answers on arrival, until the driver ends the phase.

        Args:
            phase: Name of the phase (`prompt_dispatch.training_phase`).

        Returns:
            `busy_s`: seconds of rating; number of `answers`; and the rater's counts as `count/<name>`.
        """
        busy_s, num_answers, deadline = 0.0, 0, self._deadline()
        self.scorer.counts()  # drops the counts of a phase that failed
        while phase not in self._ended_phases:
            requests = self._receive_requests(phase, deadline)
            if not requests:
                continue
            start_time = time.perf_counter()
            for request in requests:
                with span("rate", "judge", answers=len(request["ids"])):
                    self._rate_request(request)
                num_answers += len(request["ids"])
            busy_s += time.perf_counter() - start_time
        self._ended_phases.discard(phase)
        rater_counts = {f"count/{name}": event_total for name, event_total in self.scorer.counts().items()}
        return {"busy_s": busy_s, "answers": float(num_answers), **rater_counts}

    def _receive_requests(self, phase: str, deadline: float) -> list[dict[str, Any]]:
        """Returns all requests that have arrived; waits for the first message, which may end a phase."""
        key, requests = str(self.rank), list[dict[str, Any]]()
        try:
            message = self._requests.get(key=key, timeout=max(0.0, deadline - time.monotonic()))
            while True:
                if "end" in message:
                    self._ended_phases.add(message["end"])
                else:
                    requests.append(message)
                message = self._requests.get_nowait(key=key)
        except QueueEmpty:
            return requests
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"{phase}: {self.prompts.rollout_name} asked {self.group_name}-{self.rank} nothing, and was not done, within "
                "runner.step_timeout_s"
            ) from None

    def _rate_request(self, request: dict[str, Any]) -> None:
        ratings = [
            None if answer_rating is None else float(answer_rating)
            for answer_rating in self.scorer.rate(request["samples"])
        ]
        if len(ratings) != len(request["ids"]):
            raise RlhpcError(f"{self.group.scorer}: rate gave {len(ratings)} numbers for {len(request['ids'])} answers")
        message = {"round": request["round"], "ids": request["ids"], "values": ratings}
        self.notify(message, self.prompts.rollout_name, request["rollout"], ratings_of(self.group_name))


class JudgeWorker(RatingWorker):
    """Rank of a group with an LLM judge."""

    @classmethod
    def forks(cls, cfg: GrpoConfig) -> bool:
        """Returns whether judge ranks may be started by fork: only if the engines of all judges allow it."""
        return all(is_forkable(section_of(cfg, group).rollout_backend) for group in judges(cfg).values())

    @classmethod
    def preloads(cls, cfg: GrpoConfig) -> Sequence[str]:
        """Returns the modules that a node imports once for the engines of LLM judges."""
        engines = {section_of(cfg, group).rollout_backend for group in judges(cfg).values()}
        return [item for engine in sorted(engines) for item in engine_preload(engine)]


class ReferenceWorker(ScoringWorker, SavingWorker):
    """Rank of the reference policy, which scores tokens, receives the actor's weights on a refresh, and checkpoints them."""

    scorer: LogProbs

    def init_worker(self, prompts: PromptMap) -> None:
        """Loads the reference policy, with the weights from before training."""
        super().init_worker(prompts)
        receivers = [(self.group_name, list(range(self.world_size)))]
        self._sync = make_sync(
            reference_sync_of(self.cfg), self, (prompts.actor_name, 0), receivers, "off", complete_updates=True
        )

    def take_weights(self) -> None:
        """Replaces the reference's weights by the weights that the actor sends.

        Raises:
            RlhpcError: A weight does not fit the reference model.
        """
        weight_update = self._sync.receive()
        parameters = self.scorer.model.state_dict()
        with torch.no_grad():
            verification = UpdateVerification(weight_update, f"{self.prompts.actor_name}-0")
            for name, tensor in verification.tensors():
                if isinstance(tensor, Elements) or name not in parameters:
                    raise RlhpcError(f"the actor's weight {name} does not fit the reference's model")
                parameters[name].copy_(tensor)
            verification.check()

    def save(self, folder: str) -> None:
        """Writes the reference's weights on rank 0, because they differ from the actor's weights and the initial weights."""
        if self.rank == 0:
            path = Path(folder) / REFERENCE
            path.mkdir(exist_ok=True)
            weights = {name: parameter.detach().cpu() for name, parameter in self.scorer.model.named_parameters()}
            save_tensors(path / MODEL, weights)

    def load(self, folder: str) -> None:
        """Restores a checkpoint of any world size."""
        self._sync.forget()
        parameters = dict(self.scorer.model.named_parameters())
        with torch.no_grad():
            for name, tensor in load_tensors(Path(folder) / REFERENCE / MODEL).items():
                parameters[name].copy_(tensor)
