"""Sample groups: all samples of one prompt, as rollout ranks send them to actors, and the assembly of columns on actors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.agents.episodes import Episode, id_array, logprob_array, token_array
from rlhpc.language.algorithms.base import ROLLOUT, ROLLOUT_LOGPROBS, VERSIONS, LanguageAlgorithm
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.models.moe_routing import EXPERTS
from rlhpc.language.models.token_batch import Pictures, TokenBatch, cumulate
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring.groups import TEACHER_INDEX
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.runtime.worker import Worker

#: Finish reasons of episodes that were not truncated.
FINISHED = ("stop", "turns")
#: Number of batches in which a step's groups are scored on arrival, so that scoring overlaps with generation.
NUM_BATCHES = 4
#: Step and position of a prompt.
_StepPosition = tuple[int, int]


@dataclass
class SampleGroup:
    """Samples of all compared episodes of one prompt.

    Attributes:
        step, position: Step and position of the prompt.
        batch: Samples of the episodes, with the columns `rollout_logprobs`, `versions` and the algorithm's rollout columns.
        members: `[N]` bool: whether each sample is trained on and its episode is compared with the others. False excludes a
            sample from all statistics and losses.
    """

    step: int
    position: int
    batch: TokenBatch
    members: Tensor

    @cached_property
    def answers_digest(self) -> bytes:
        """Digest of the answers' tokens, which assigns columns to answers.

        A prompt may have two sets of answers, if it was sampled again because its rank was lost before all receivers had the
        group.
        """
        digest = hashlib.blake2b(self.batch.cu_seqlens.numpy().tobytes(), digest_size=16)
        digest.update(self.batch.ids.numpy().tobytes())
        return digest.digest()

    def pack(self) -> dict[str, Any]:
        """Returns the message of the group for a channel."""
        return {"step": self.step, "position": self.position, "members": self.members.numpy(), **self.batch.pack()}

    def pack_without_columns(self) -> dict[str, Any]:
        """Returns the message of this group without columns that worker groups do not read, which score tokens."""
        columns = {name: column for name, column in self.batch.columns.items() if name == TEACHER_INDEX}
        return replace(self, batch=replace(self.batch, columns=columns)).pack()

    @classmethod
    def unpack(cls, message: dict[str, Any]) -> SampleGroup:
        """Builds the group from a message of `pack`."""
        members = torch.from_numpy(np.array(message["members"]))
        return cls(message["step"], message["position"], TokenBatch.unpack(message), members)

    def trained_samples(self) -> TokenBatch:
        """Returns the batch of the samples that are trained on."""
        return self.batch if bool(self.members.all()) else self.batch.select(torch.nonzero(self.members).flatten())


def column_message(group: SampleGroup, column_source: str, column_values: Tensor) -> dict[str, Any]:
    """Returns the message with a column of one sample group, which a scoring group sends to an actor.

    Args:
        group: The scored sample group.
        column_source: Name of the worker group that computed the column.
        column_values: `[T]` or `[T, k]` float32, the column.
    """
    return {
        "step": group.step,
        "position": group.position,
        "digest": group.answers_digest,
        "source": column_source,
        "values": column_values.numpy(),
    }


def build_sample_group(
    step: int, position: int, episodes: Mapping[int, Episode], rewards: np.ndarray,
    columns: Sequence[Mapping[str, Sequence[float]]], trained: bool | Sequence[bool], size: int,
    agent_weight: float = 0.0, num_choices: int = 0,
) -> SampleGroup:  # fmt: skip
    """Builds the sample group of a prompt from its episodes.

    Args:
        step, position: Step and position of the prompt.
        episodes: The compared episodes, by member of the group.
        rewards: `[E]` float32, the reward of each episode.
        columns: The algorithm's rollout columns of each sample of the episodes, with one value for each of the sample's
            `token_ids` (`read_rollout_columns`).
        trained: Whether each episode is trained on and compared; one value applies to all.
        size: G, members of a group.
        num_choices: Router choices per token (`RolloutBackend.choices`); 0 if there is no routing replay.
        agent_weight: Weight of the agent's reward, also applied to the rewards of single roles.
    """
    samples = [
        (episode_index, member, sample)
        for episode_index, (member, e) in enumerate(episodes.items())
        for sample in e.samples
    ]
    members = np.broadcast_to(np.asarray(trained, bool), len(episodes))
    ids, masks, turns = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    arrays_by_column: dict[str, list[np.ndarray]] = {
        ROLLOUT_LOGPROBS: [],
        VERSIONS: [],
        **{name: [] for name in columns[0]},
    }
    for (_, _, episode), sample_columns in zip(samples, columns, strict=True):
        prompt = len(episode.prompt_ids)
        ids.append(id_array(*episode.prompt_ids, *episode.token_ids))
        masks.append(_pad_prompt(prompt, token_array(episode.loss_mask, np.bool_), False))
        turns.append(_pad_prompt(prompt, token_array(episode.turn_ids, np.int64), 0))
        arrays_by_column[ROLLOUT_LOGPROBS].append(_pad_prompt(prompt, logprob_array(episode.logprobs), 0.0))
        arrays_by_column[VERSIONS].append(_pad_prompt(prompt, token_array(episode.versions, np.int32), -1))
        if num_choices:
            arrays_by_column.setdefault(EXPERTS, []).append(_pack_expert_choices(episode, len(ids[-1]), num_choices))
        for name, column in sample_columns.items():
            arrays_by_column[name].append(_pad_prompt(prompt, np.asarray(column, np.float32), 0.0))
    members_of_samples = torch.tensor([member for _, member, _ in samples])
    episode_indices = [episode_index for episode_index, _, _ in samples]
    role_rewards = np.asarray([agent_weight * sample.role_reward_offset for _, _, sample in samples], np.float32)
    role = torch.tensor([sample.role for _, _, sample in samples])
    batch = TokenBatch(
        cumulate([len(sample) for sample in ids]), _concatenate(ids), _concatenate(masks), _concatenate(turns),
        position * size + members_of_samples, role, torch.full_like(members_of_samples, position),
        torch.from_numpy(np.asarray(rewards, np.float32)[episode_indices] + role_rewards),
        {name: _concatenate(column) for name, column in arrays_by_column.items()},
        pictures=Pictures.from_images([sample.images for _, _, sample in samples]),
    )  # fmt: skip
    return SampleGroup(step, position, batch, torch.from_numpy(members[episode_indices]))


def read_rollout_columns(
    algorithm: LanguageAlgorithm, sample: Episode, score: Scored, prompt: Prompt | None = None
) -> dict[str, Sequence[float]]:
    """Returns the algorithm's rollout columns of a sample, and those of its prompt.

    Raises:
        RlhpcError: The algorithm returned columns that it does not declare, omitted some, or returned a wrong length.
    """
    columns = dict(algorithm.rollout_columns(sample, score))
    if prompt is not None:
        columns |= {name: [value] * len(sample.token_ids) for name, value in algorithm.prompt_columns(prompt).items()}
    required_names = [column.name for column in algorithm.columns if column.by == ROLLOUT]
    sample_lengths = {len(column_values) for column_values in columns.values()} - {len(sample.token_ids)}
    if sorted(columns) != sorted(required_names) or sample_lengths:
        raise RlhpcError(
            f"algorithm.name={algorithm.cfg.algorithm.name}: rollout_columns gave {sorted(columns) or 'nothing'}"
            f"{f' of {sample_lengths} values' if sample_lengths else ''}; wanted: "
            f"{sorted(required_names) or 'nothing'}, one value for "
            f"each of the episode's {len(sample.token_ids)} tokens"
        )
    return columns


def _pad_prompt(prompt: int, completion_values: np.ndarray, fill_value: float) -> np.ndarray:
    return np.concatenate([np.full(prompt, fill_value, completion_values.dtype), completion_values])


def _pack_expert_choices(episode: Episode, num_tokens: int, num_choices: int) -> np.ndarray:
    """Returns the routers' choices `[tokens, choices]`, int16; unknown choices are -1."""
    expert_ids = np.full((num_tokens, num_choices), -1, np.int16)
    if episode.experts is not None:
        expert_ids[: len(episode.experts)] = episode.experts[:num_tokens]
    return expert_ids


def _concatenate(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


class Arrivals:
    """Store of received groups and columns, by step and position; messages may arrive in any order.

    A rollout rank that is lost while it sends a group may have reached only some receivers. The prompt is then sampled again,
    and the new answers may differ if the engine is not batch-invariant. Therefore columns are stored by the digest of their
    answers. The first complete set is trained on; later messages about the prompt are dropped.

    Args:
        sources: Names of the worker groups that each send one column.
    """

    def __init__(self, sources: frozenset[str]) -> None:
        self._sources = sorted(sources)
        self._step = 0
        self._groups: dict[_StepPosition, dict[bytes, SampleGroup]] = {}
        self._columns: dict[_StepPosition, dict[bytes, dict[str, torch.Tensor]]] = {}
        self._delivered_positions: set[_StepPosition] = set()

    def begin(self, step: int) -> None:
        """Starts a step: drops stored and later messages about earlier steps."""
        self._step = step
        self._groups = {key: groups for key, groups in self._groups.items() if key[0] >= step}
        self._columns = {key: columns for key, columns in self._columns.items() if key[0] >= step}
        self._delivered_positions = {key for key in self._delivered_positions if key[0] >= step}

    def add(self, message: Mapping[str, Any]) -> None:
        """Stores a message, unless it is about an earlier step or about a position that was already popped."""
        step_position = message["step"], message["position"]
        if step_position[0] < self._step or step_position in self._delivered_positions:
            return
        if "source" in message:
            columns = self._columns.setdefault(step_position, {}).setdefault(message["digest"], {})
            columns[message["source"]] = torch.from_numpy(np.array(message["values"]))
        else:
            group = SampleGroup.unpack(dict(message))
            self._groups.setdefault(step_position, {}).setdefault(group.answers_digest, group)

    def find_missing_positions(self, step: int, positions: Sequence[int]) -> dict[str, list[int]]:
        """Returns the positions with missing messages, by name of the sending worker group; "" for missing sample groups."""
        positions_by_source: dict[str, list[int]] = {}
        for prompt_position in positions:
            for column_source in self._find_missing_sources((step, prompt_position)):
                positions_by_source.setdefault(column_source, []).append(prompt_position)
        return positions_by_source

    def pop_complete(self, step: int, prompt_position: int) -> tuple[SampleGroup, Mapping[str, torch.Tensor]]:
        """Removes a complete position; returns its sample group, and the columns by name of the worker group."""
        groups, columns = self._groups.pop((step, prompt_position)), self._columns.pop((step, prompt_position), {})
        self._delivered_positions.add((step, prompt_position))
        digest = next(digest for digest in groups if columns.get(digest, {}).keys() >= {*self._sources})
        return groups[digest], columns.get(digest, {})

    def _find_missing_sources(self, step_position: _StepPosition) -> list[str]:
        """Returns the senders of missing messages, for the set of answers that lacks the fewest messages."""
        columns = self._columns.get(step_position, {})
        missing_sources = [
            [column_source for column_source in self._sources if column_source not in columns.get(digest, {})]
            for digest in self._groups.get(step_position, ())
        ]
        if missing_sources:
            return min(missing_sources, key=len)
        return [
            "",
            *(
                column_source
                for column_source in self._sources
                if not any(column_source in by_source for by_source in columns.values())
            ),
        ]


class BlockChannel:
    """Receiver of a channel's messages for all ranks of a model-parallel block.

    All ranks of the block get the same messages in the same order, if they call the methods in the same order.

    Args:
        channel: The channel.
        worker: Worker of this rank.
        sizes: Mesh sizes of the worker's group.

    Attributes:
        key: Key of the block's messages: its data-parallel rank.
    """

    def __init__(self, channel: Channel, worker: Worker, sizes: MeshSizes) -> None:
        self._channel = channel
        self._worker = worker
        self._leader_rank = sizes.first_of(sizes.data_of(worker.rank))
        self._followers = [self._leader_rank + mp_rank for mp_rank in range(1, sizes.block)]
        self.key = str(sizes.data_of(worker.rank))

    def get(self, timeout: float) -> Any:
        """Returns the next message.

        Raises:
            DeadlineExceeded: No message arrived within `timeout` seconds.
        """
        return self._receive_on_block(partial(self._channel.get, key=self.key, timeout=timeout))

    def get_nowait(self) -> Any:
        """Returns the next message without waiting.

        Raises:
            QueueEmpty: The channel has no message for the block.
        """
        return self._receive_on_block(partial(self._channel.get_nowait, key=self.key))

    def _receive_on_block(self, receive: Callable[[], Any]) -> Any:
        """Returns the message that the block's first rank receives, or raises its error, on all ranks of the block."""
        if self._worker.rank == self._leader_rank:
            result: tuple[Any, Exception | None]
            try:
                result = receive(), None
            except (QueueEmpty, DeadlineExceeded) as error:
                result = None, error
            for rank in self._followers:
                self._worker.send(result, self._worker.group_name, rank)
        else:
            result = self._worker.recv(self._worker.group_name, self._leader_rank)
        message, failure = result
        if failure is not None:
            raise failure
        return message
