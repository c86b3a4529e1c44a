"""What travels from rollout ranks to actors: all samples that answer one prompt."""

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
#: Parts in which a step's groups are scored as they come: while the last ones are made, the first are done.
PARTS = 4


@dataclass
class SampleGroup:
    """All episodes that answer one prompt.

    Attributes:
        step, position: Of the prompt.
        batch: Their samples, with the columns `rollout_logprobs`, `versions` and what the algorithm wants of rollout ranks.
        members: `[N]` bool: a sample is trained on, and its episode is compared with the others. The other samples are left
            out: in no statistic, and in no loss.
    """

    step: int
    position: int
    batch: TokenBatch
    members: Tensor

    @cached_property
    def draw(self) -> bytes:
        """Which answers these are: the same for the same tokens. Of a prompt that was drawn again, because who drew it first
        was lost before all had its answers, there may be two: a column is of one of them."""
        found = hashlib.blake2b(self.batch.cu_seqlens.numpy().tobytes(), digest_size=16)
        found.update(self.batch.ids.numpy().tobytes())
        return found.digest()

    def pack(self) -> dict[str, Any]:
        """What goes through the channel."""
        return {"step": self.step, "position": self.position, "members": self.members.numpy(), **self.batch.pack()}

    def bare(self) -> dict[str, Any]:
        """What goes to a group that scores tokens: the tokens."""
        batch = replace(self.batch, columns={})
        return {"step": self.step, "position": self.position, "members": self.members.numpy(), **batch.pack()}

    @classmethod
    def unpack(cls, message: dict[str, Any]) -> SampleGroup:
        """The group in a message that `pack` made."""
        members = torch.from_numpy(np.array(message["members"]))
        return cls(message["step"], message["position"], TokenBatch.unpack(message), members)

    def trained(self) -> TokenBatch:
        """The samples that are trained on and compared."""
        return self.batch if bool(self.members.all()) else self.batch.select(torch.nonzero(self.members).flatten())


def column_message(group: SampleGroup, maker: str, values: Tensor) -> dict[str, Any]:
    """What goes to an actor from a group that scores: a column of one prompt's group.

    Args:
        group: What was scored.
        maker: The group that scored.
        values: `[T]` or `[T, k]` float32.
    """
    about = {"step": group.step, "position": group.position, "draw": group.draw}
    return {**about, "maker": maker, "values": values.numpy()}


def group_of(
    step: int, position: int, episodes: Mapping[int, Episode], rewards: np.ndarray,
    columns: Sequence[Mapping[str, Sequence[float]]], trains: bool | Sequence[bool], size: int,
    agent_weight: float = 0.0, choices: int = 0,
) -> SampleGroup:  # fmt: skip
    """The group of some episodes.

    Args:
        step, position: Of the prompt.
        episodes: By member of the group, those that say something about it.
        rewards: `[E]` float32, of each.
        columns: What the algorithm wants of rollout ranks, of each of the episodes' samples: one value for each of its
            `token_ids`, as the caller has checked.
        trains: Which of them are trained on and compared; all, or none, if it is one word.
        size: G, members of a group.
        choices: Of routers, a token (`SaysExperts`); 0 without.
        agent_weight: Weight of what the agent says in the reward: a role's own counts as much.
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
        pictures=Pictures.of([sample.seen for _, _, sample in samples]),
    )  # fmt: skip
    return SampleGroup(step, position, batch, torch.from_numpy(members[each]))


def columns_of(algorithm: LanguageAlgorithm, sample: Episode, score: Scored) -> dict[str, Sequence[float]]:
    """What an algorithm wants to know of a sample from the rank that has drawn it.

    Raises:
        RlhpcError: The algorithm returned other columns than it asks for, or some of another length.
    """
    made = dict(algorithm.rollout_columns(sample, score))
    wanted = [column.name for column in algorithm.columns if column.by == ROLLOUT]
    lengths = {len(values) for values in made.values()} - {len(sample.token_ids)}
    if sorted(made) != sorted(wanted) or lengths:
        raise RlhpcError(
            f"algorithm.name={algorithm.cfg.algorithm.name}: rollout_columns gave {sorted(made) or 'nothing'}"
            f"{f' of {lengths} values' if lengths else ''}; wanted: {sorted(wanted) or 'nothing'}, one value for each of "
            f"the episode's {len(sample.token_ids)} tokens"
        )
    return made


def _after(prompt: int, values: np.ndarray, before: float) -> np.ndarray:
    return np.concatenate([np.full(prompt, before, values.dtype), values])


def _routed(episode: Episode, tokens: int, choices: int) -> np.ndarray:
    """`[tokens, choices]`: what routers chose, and -1 where nobody knows."""
    found = np.full((tokens, choices), -1, np.int16)
    if episode.experts is not None:
        found[: len(episode.experts)] = episode.experts[:tokens]
    return found


def _joined(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
