"""Sample group: all samples of one prompt, as rollout ranks send them to actors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.algorithms.base import ROLLOUT, ROLLOUT_LOGPROBS, VERSIONS, LanguageAlgorithm
from rlhpc.language.models.moe_routing import EXPERTS
from rlhpc.language.models.token_batch import TokenBatch, cumulated
from rlhpc.language.models.vision import Pictures
from rlhpc.language.rewards.pool import Scored
from rlhpc.runtime.errors import RlhpcError

#: Reasons for the end of an episode other than the length limit.
FINISHED = ("stop", "turns")
#: Number of parts in which a step's groups are scored on arrival, so that scoring overlaps with generation.
PARTS = 4


@dataclass
class SampleGroup:
    """Group of all episodes of one prompt.

    Attributes:
        step, position: Step and position of the prompt.
        batch: Samples of the episodes, with the columns `rollout_logprobs`, `versions` and the algorithm's rollout columns.
        members: `[N]` bool: True for a sample that is trained on, and whose episode is compared with the other ones. The
            remaining samples count in no statistic and in no loss.
    """

    step: int
    position: int
    batch: TokenBatch
    members: Tensor

    @cached_property
    def draw(self) -> bytes:
        """Digest of the answers' tokens. A prompt that was sampled again, because its rank was lost before every
        receiver had the group, may have two sets of answers; a column belongs to one of them."""
        digest = hashlib.blake2b(self.batch.cu_seqlens.numpy().tobytes(), digest_size=16)
        digest.update(self.batch.ids.numpy().tobytes())
        return digest.digest()

    def pack(self) -> dict[str, Any]:
        """Returns the message of the group for a channel."""
        return {"step": self.step, "position": self.position, "members": self.members.numpy(), **self.batch.pack()}

    def bare(self) -> dict[str, Any]:
        """Returns the message for a group that scores tokens: without columns."""
        batch = replace(self.batch, columns={})
        return {"step": self.step, "position": self.position, "members": self.members.numpy(), **batch.pack()}

    @classmethod
    def unpack(cls, message: dict[str, Any]) -> SampleGroup:
        """Builds the group from a message of `pack`."""
        members = torch.from_numpy(np.array(message["members"]))
        return cls(message["step"], message["position"], TokenBatch.unpack(message), members)

    def trained(self) -> TokenBatch:
        """Returns the samples that are trained on and compared."""
        return self.batch if bool(self.members.all()) else self.batch.select(torch.nonzero(self.members).flatten())


def column_message(group: SampleGroup, maker: str, values: Tensor) -> dict[str, Any]:
    """Builds the message with a column of one prompt's group, from a group that scores to an actor.

    Args:
        group: The scored group of samples.
        maker: Name of the worker group that scored it.
        values: `[T]` or `[T, k]` float32.
    """
    about = {"step": group.step, "position": group.position, "draw": group.draw}
    return {**about, "maker": maker, "values": values.numpy()}


def group_of(
    step: int, position: int, episodes: Mapping[int, Episode], rewards: np.ndarray,
    columns: Sequence[Mapping[str, Sequence[float]]], trains: bool | Sequence[bool], size: int,
    agent_weight: float = 0.0, choices: int = 0,
) -> SampleGroup:  # fmt: skip
    """Builds the sample group of some episodes.

    Args:
        step, position: Step and position of the prompt.
        episodes: The compared episodes, by member of the group.
        rewards: `[E]` float32, the reward of each episode.
        columns: The algorithm's rollout columns of each sample of the episodes: one value for each of its `token_ids`, as the
            caller has checked.
        trains: Whether each episode is trained on and compared; one value stands for all.
        size: G, members of a group.
        choices: Router choices a token (`RolloutBackend.choices`); 0 without routing replay.
        agent_weight: Weight of the agent's reward; the reward of a single role has the same weight.
    """
    samples = [(at, member, sample) for at, (member, e) in enumerate(episodes.items()) for sample in e.samples]
    members = np.broadcast_to(np.asarray(trains, bool), len(episodes))
    ids, masks, turns = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    named: dict[str, list[np.ndarray]] = {ROLLOUT_LOGPROBS: [], VERSIONS: [], **{name: [] for name in columns[0]}}
    for (_, _, episode), extra in zip(samples, columns, strict=True):
        prompt = len(episode.prompt_ids)
        ids.append(np.asarray((*episode.prompt_ids, *episode.token_ids), np.int64))
        masks.append(_after(prompt, np.asarray(episode.loss_mask, bool), False))
        turns.append(_after(prompt, np.asarray(episode.turn_ids, np.int64), 0))
        named[ROLLOUT_LOGPROBS].append(_after(prompt, np.asarray(episode.logprobs, np.float32), 0.0))
        named[VERSIONS].append(_after(prompt, np.asarray(episode.versions, np.int32), -1))
        if choices:
            named.setdefault(EXPERTS, []).append(_routed(episode, len(ids[-1]), choices))
        for name, values in extra.items():
            named[name].append(_after(prompt, np.asarray(values, np.float32), 0.0))
    number = torch.tensor([member for _, member, _ in samples])
    each = [at for at, _, _ in samples]
    above = np.asarray([agent_weight * sample.above for _, _, sample in samples], np.float32)
    role = torch.tensor([sample.role for _, _, sample in samples])
    batch = TokenBatch(
        cumulated([len(sample) for sample in ids]), _joined(ids), _joined(masks), _joined(turns),
        position * size + number, role, torch.full_like(number, position),
        torch.from_numpy(np.asarray(rewards, np.float32)[each] + above),
        {name: _joined(values) for name, values in named.items()},
        pictures=Pictures.of([sample.images for _, _, sample in samples]),
    )  # fmt: skip
    return SampleGroup(step, position, batch, torch.from_numpy(members[each]))


def columns_of(algorithm: LanguageAlgorithm, sample: Episode, score: Scored) -> dict[str, Sequence[float]]:
    """Returns the algorithm's rollout columns of a sample.

    Raises:
        RlhpcError: The algorithm returned other columns than it declares, or columns of another length.
    """
    columns = dict(algorithm.rollout_columns(sample, score))
    required = [column.name for column in algorithm.columns if column.by == ROLLOUT]
    lengths = {len(values) for values in columns.values()} - {len(sample.token_ids)}
    if sorted(columns) != sorted(required) or lengths:
        raise RlhpcError(
            f"algorithm.name={algorithm.cfg.algorithm.name}: rollout_columns gave {sorted(columns) or 'nothing'}"
            f"{f' of {lengths} values' if lengths else ''}; wanted: {sorted(required) or 'nothing'}, one value for each of "
            f"the episode's {len(sample.token_ids)} tokens"
        )
    return columns


def _after(prompt: int, values: np.ndarray, before: float) -> np.ndarray:
    return np.concatenate([np.full(prompt, before, values.dtype), values])


def _routed(episode: Episode, tokens: int, choices: int) -> np.ndarray:
    """Returns the routers' choices `[tokens, choices]`, with -1 where they are unknown."""
    expert_ids = np.full((tokens, choices), -1, np.int16)
    if episode.experts is not None:
        expert_ids[: len(episode.experts)] = episode.experts[:tokens]
    return expert_ids


def _joined(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
