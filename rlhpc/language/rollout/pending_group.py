"""Life cycle of a prompt group on a rollout rank, as a state machine without engine or channels.

`PendingGroups` handles events: a prompt was leased, an episode has ended, a score or a delayed reward has arrived. It returns
actions, which the rollout worker executes in order. A group is in one of the states of `GroupState` and changes it only along
`TRANSITIONS`. Groups that wait for delayed rewards are set aside, while other prompts use their positions.
"""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from rlhpc.language.agents.episodes import Episode, tokens_of
from rlhpc.language.data.images import PromptImages
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.base import Completion
from rlhpc.language.rewards.pool import Scored

if TYPE_CHECKING:
    import numpy as np

#: Step and position of a prompt.
StepPosition = tuple[int, int]


class GroupState(StrEnum):
    """States of a group on a rollout rank."""

    QUEUED = "queued"
    """The prompt is selected; generation has not started."""
    SAMPLING = "sampling"
    """Members are being generated."""
    SCORING = "scoring"
    """All members have ended; scores or delayed rewards are outstanding."""
    DELAYED = "delayed"
    """The group waits for delayed rewards, and another group uses its position."""
    READY = "ready"
    """All delayed rewards have arrived; the group waits for a position."""
    COMPLETE = "complete"
    """The group has all scores, and a position in a step."""
    DELIVERED = "delivered"
    """The group is trained on; a `Deliver` action sends it to its actor."""
    REFILLED = "refilled"
    """The group is not trained on; another group replaces it at its position."""
    REQUEUED = "requeued"
    """The group was returned to the prompt queue; another rank resumes its partial answers."""


#: Allowed next states of each state.
TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.QUEUED: frozenset({GroupState.SAMPLING}),
    GroupState.SAMPLING: frozenset({GroupState.SCORING, GroupState.REQUEUED}),
    GroupState.SCORING: frozenset({GroupState.COMPLETE, GroupState.DELAYED, GroupState.REQUEUED}),
    GroupState.DELAYED: frozenset({GroupState.READY}),
    GroupState.READY: frozenset({GroupState.COMPLETE, GroupState.REFILLED}),
    GroupState.COMPLETE: frozenset({GroupState.DELIVERED, GroupState.REFILLED}),
    GroupState.DELIVERED: frozenset(),
    GroupState.REFILLED: frozenset(),
    GroupState.REQUEUED: frozenset(),
}


@dataclass(frozen=True)
class PartialGroup:
    """Prompt with the partial answers of a rank that got a notice to leave.

    Attributes:
        position: Position of the prompt in its step.
        attempt: Number of prompts tried before at this position.
        answers: Answers by member of the group; an unfinished answer's `finish_reason` is `abort`.
    """

    position: int
    attempt: int
    answers: Sequence[Completion]


@dataclass
class PendingGroup:
    """Group of a prompt on a rollout rank, until it is delivered.

    Attributes:
        step, position: Step and position of the prompt.
        attempt: Number of prompts tried before at this position.
        prompt, prompt_ids, images: The prompt, its tokens and its images.
        num_refills: Number of prompts tried before at this position whose groups were not trained on.
        group_id: Step, position and attempt at the start; it stays the same if the group gets another position.
        episodes: Finished episodes, by member of the group.
        scores: Scores of the episodes, by member.
        resumed_tokens: Number of tokens that another rank had sampled, by member.
        dropped_tokens: Number of sampled tokens that are not trained on, by reason (`group_builder.REASONS`), including those
            of prompts tried before at the position.
        state: State in the life cycle; `move_to` changes it.
    """

    step: int
    position: int
    attempt: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    episodes: dict[int, Episode] = field(default_factory=dict)
    scores: dict[int, Scored] = field(default_factory=dict)
    resumed_tokens: dict[int, int] = field(default_factory=dict)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    images: PromptImages | None = None
    num_refills: int = 0
    group_id: tuple[int, int, int] = field(init=False)
    state: GroupState = GroupState.QUEUED

    def __post_init__(self) -> None:
        self.group_id = self.step, self.position, self.attempt

    @property
    def step_position(self) -> StepPosition:
        """Step and position of the prompt."""
        return self.step, self.position

    def move_to(self, next_state: GroupState) -> None:
        """Changes the state.

        Raises:
            RuntimeError: `TRANSITIONS` does not allow this change.
        """
        if next_state not in TRANSITIONS[self.state]:
            raise RuntimeError(
                f"step {self.step}, prompt {self.position}: a group that is {self.state} cannot be {next_state}"
            )
        self.state = next_state

    def to_partial(self, episodes: Sequence[Episode]) -> PartialGroup:
        """Returns the group in the form that another rank resumes.

        Args:
            episodes: Episodes of all members, of one turn each, finished or not.
        """
        answers = [
            Completion(i, e.token_ids, e.logprobs, e.versions, e.finish_reason, e.experts)
            for i, e in enumerate(episodes)
        ]
        return PartialGroup(self.position, self.attempt, answers)


@dataclass(frozen=True)
class ScoredGroup:
    """Answers of a prompt with their scores and rewards.

    Attributes:
        episodes: The compared episodes, by member of the group.
        scores: Score of each episode.
        rewards: `[E]` float32.
        trained: Whether each episode is trained on; the other episodes count in no statistic of the group and in no loss.
        rewards_differ: Whether the task rewards of the trained episodes differ.
        drop_reason: Reason why the whole group is not trained on, from `group_builder.REASONS`; otherwise "".
    """

    episodes: dict[int, Episode]
    scores: list[Scored]
    rewards: np.ndarray
    trained: list[bool]
    rewards_differ: bool
    drop_reason: str


def count_trainable_tokens(episodes: Iterable[Episode]) -> int:
    """Returns the number of trainable tokens in the episodes, which the model sampled and the loss mask includes."""
    return sum(tokens_of(episode) for episode in episodes)


def count_dropped_on_refill(group: PendingGroup) -> Counter[str]:
    """Returns the numbers of untrained tokens of a group that is being replaced, by reason (`group_builder.REASONS`)."""
    return group.dropped_tokens + Counter(refilled=count_trainable_tokens(group.episodes.values()))


# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartSampling:
    """Action: start to generate all members of a group; `requests` are the ids of the members' requests."""

    group: PendingGroup
    requests: tuple[int, ...]


@dataclass(frozen=True)
class ResumeSampling:
    """Action: continue answers that another rank started; `requests` are the ids of the members' requests."""

    group: PendingGroup
    requests: tuple[int, ...]
    answers: Sequence[Completion]


@dataclass(frozen=True)
class RequestScore:
    """Action: request the score of an episode of a group."""

    group: PendingGroup
    episode: Episode


@dataclass(frozen=True)
class Deliver:
    """Action: send a group to its actor and to the groups that score tokens, and report its delivery."""

    group: PendingGroup
    scored_group: ScoredGroup


@dataclass(frozen=True)
class Requeue:
    """Action: return a prompt with its partial answers to the prompt queue."""

    group: PendingGroup
    partial: PartialGroup


Action = StartSampling | ResumeSampling | RequestScore | Deliver | Requeue


# -- the machine ------------------------------------------------------------------------------------------------------


class GroupRules(Protocol):
    """Rules that decide whether a group is trained on or replaced (`group_builder.GroupBuilder`)."""

    def has_too_few_members(self, group: PendingGroup) -> bool:
        """Returns whether too few episodes of a group can be compared; failed and too old episodes do not count."""

    def score_group(self, group: PendingGroup, *, may_refill: bool) -> ScoredGroup | None:
        """Returns the group's scores and rewards, or None if the prompt is to be replaced."""


class PendingGroups:
    """Groups in flight on a rollout rank.

    Args:
        size: G, members of a group.
        max_refills: Maximum number of replacement prompts at a position (`algorithm.max_refills`).
        max_delayed: Maximum number of groups that are set aside (`agent.feedback_ahead`). At the maximum, further groups keep
            their positions while they wait.
        make_group: Function that makes a new group from step, position and attempt.
        rules: Rules that decide whether a group is trained on or replaced.
    """

    def __init__(
        self,
        size: int,
        max_refills: int,
        max_delayed: int,
        make_group: Callable[[int, int, int], PendingGroup],
        rules: GroupRules,
    ) -> None:
        self._size = size
        self._max_refills = max_refills
        self._max_delayed = max_delayed
        self._make_group = make_group
        self._rules = rules
        self._groups_by_position: dict[StepPosition, PendingGroup] = {}
        self._num_attempts: Counter[StepPosition] = Counter()
        self._members: dict[int, tuple[PendingGroup, int]] = {}  # by the id of their request
        self._last_request = 0
        # By the id of the episode without its reward.
        self._awaited_rewards: dict[int, tuple[PendingGroup, int, Episode]] = {}
        self._num_delayed = 0
        self._ready_groups: collections.deque[PendingGroup] = collections.deque()

    def __len__(self) -> int:
        """Returns the number of positions in flight."""
        return len(self._groups_by_position)

    @property
    def num_awaited_rewards(self) -> int:
        """Number of episodes whose delayed rewards have not arrived."""
        return len(self._awaited_rewards)

    def num_resumed_tokens(self, request_id: int) -> int:
        """Returns the number of tokens of a request's episode that another rank had sampled."""
        group, member = self._members[request_id]
        return group.resumed_tokens.get(member, 0)

    # -- events

    def on_prompt(self, step: int, prompt_position: int) -> list[Action]:
        """Handles the lease of a prompt."""
        return self._deliver_or_refill(self._take_next_group((step, prompt_position), 0, Counter()))

    def on_partial(self, step: int, partial_group: PartialGroup) -> list[Action]:
        """Handles the lease of a group that another rank has requeued.

        Finished answers are scored again, because some raters compare all answers of a group.
        """
        group = self._make_group(step, partial_group.position, partial_group.attempt)
        group.num_refills = partial_group.attempt
        group.resumed_tokens = {
            m: len(answer.token_ids) for m, answer in enumerate(partial_group.answers) if answer.token_ids
        }
        self._num_attempts[group.step_position] = partial_group.attempt + 1
        self._groups_by_position[group.step_position] = group
        return [ResumeSampling(group, self._start_sampling(group), partial_group.answers)]

    def on_episode(self, episode: Episode) -> list[Action]:
        """Handles the end of a member's episode."""
        group, member = self._members[episode.id]
        group.episodes[member] = episode
        actions: list[Action] = []
        if episode.has_delayed_reward:
            self._awaited_rewards[id(episode)] = group, member, episode
        else:
            actions.append(RequestScore(group, episode))
        if len(group.episodes) == self._size:
            group.move_to(GroupState.SCORING)
            actions += self._set_aside(group)
        return actions

    def on_delayed_reward(self, previous_episode: Episode, episode: Episode) -> list[Action]:
        """Handles the delayed reward of an episode.

        Args:
            previous_episode: The episode without its reward.
            episode: The episode with its reward, or failed.
        """
        if id(previous_episode) not in self._awaited_rewards:
            return []
        group, member, _ = self._awaited_rewards.pop(id(previous_episode))
        group.episodes[member] = episode
        return [RequestScore(group, episode)]

    def on_score(self, request: int, scored_answer: Scored) -> list[Action]:
        """Handles the score of a member, by the id of its request."""
        group, member = self._members.pop(request)
        group.scores[member] = scored_answer
        if len(group.scores) < self._size:
            return []
        if group.state is not GroupState.DELAYED:
            group.move_to(GroupState.COMPLETE)
            return self._deliver_or_refill(group)
        group.move_to(GroupState.READY)
        self._num_delayed -= 1
        self._ready_groups.append(group)
        scoring_groups = [
            other_group for other_group in self._groups_by_position.values() if other_group.state is GroupState.SCORING
        ]
        return [action for other_group in scoring_groups for action in self._set_aside(other_group)]

    def on_leave(self, stopped_episodes: Mapping[int, Episode]) -> list[Action]:
        """Handles the request to leave: requeues each group that has a position.

        Args:
            stopped_episodes: Unfinished episodes, by the id of their request.
        """
        requests = {(group.step_position, member): request for request, (group, member) in self._members.items()}
        actions: list[Action] = []
        for prompt_position, group in self._groups_by_position.items():
            episodes = [
                group.episodes.get(m) or stopped_episodes[requests[prompt_position, m]] for m in range(self._size)
            ]
            group.move_to(GroupState.REQUEUED)
            actions.append(Requeue(group, group.to_partial(episodes)))
        self._groups_by_position.clear()
        return actions

    # -- decisions

    def _deliver_or_refill(self, group: PendingGroup) -> list[Action]:
        """Delivers a complete group; if the rules reject it, refills the position until a group is delivered or sampled."""
        while group.state is GroupState.COMPLETE:
            scored_group = self._rules.score_group(group, may_refill=group.num_refills < self._max_refills)
            if scored_group is not None:
                group.move_to(GroupState.DELIVERED)
                del self._groups_by_position[group.step_position], self._num_attempts[group.step_position]
                return [Deliver(group, scored_group)]
            group.move_to(GroupState.REFILLED)
            group = self._take_next_group(group.step_position, group.num_refills + 1, count_dropped_on_refill(group))
        self._num_attempts[group.step_position] += 1
        return [StartSampling(group, self._start_sampling(group))]

    def _take_next_group(
        self, step_position: StepPosition, num_refills: int, dropped_counts: Counter[str]
    ) -> PendingGroup:
        """Returns the next group of a free position: the first ready group that can be trained on, or a new group.

        Args:
            step_position: The position.
            num_refills: Number of prompts tried before at the position whose groups were not trained on.
            dropped_counts: Numbers of tokens of those groups, by reason.
        """
        while self._ready_groups:
            group = self._ready_groups.popleft()
            group.step, group.position = step_position
            if not self._rules.has_too_few_members(group):
                group.move_to(GroupState.COMPLETE)
                break
            group.move_to(GroupState.REFILLED)
            dropped_counts = dropped_counts + count_dropped_on_refill(group)  # the tokens have become too old
        else:
            group = self._make_group(*step_position, self._num_attempts[step_position])
        group.dropped_tokens.update(dropped_counts)
        group.num_refills = num_refills
        self._groups_by_position[step_position] = group
        return group

    def _start_sampling(self, group: PendingGroup) -> tuple[int, ...]:
        """Moves a group to sampling; returns the ids of the requests of its members."""
        group.move_to(GroupState.SAMPLING)
        requests = range(self._last_request + 1, self._last_request + self._size + 1)
        self._last_request += self._size
        self._members |= {request: (group, member) for member, request in enumerate(requests)}
        return tuple(requests)

    def _set_aside(self, group: PendingGroup) -> list[Action]:
        """Sets a group aside if it waits for delayed rewards and the limit allows it.

        Returns:
            The actions of the group that gets the position; [] if the group is not set aside.
        """
        awaits_reward = any(awaited_group is group for awaited_group, *_ in self._awaited_rewards.values())
        if not awaits_reward or not (self._ready_groups or self._num_delayed < self._max_delayed):
            return []
        group.move_to(GroupState.DELAYED)
        self._num_delayed += 1
        return self._deliver_or_refill(self._take_next_group(group.step_position, group.num_refills, Counter()))
