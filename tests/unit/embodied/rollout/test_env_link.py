"""Links between an env rank and a rollout rank: mailboxes, channels, and ranks that leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.rollout import env_link
from rlhpc.embodied.rollout.env_link import (
    ChannelLink,
    ClosedLink,
    EnvLinks,
    MailboxLink,
    PeerLeft,
    agree_on_device,
    open_links,
    put_until_left,
)
from rlhpc.embodied.rollout.slot_map import ACTIONS, SlotMap
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.comm.context import Context, install
from rlhpc.runtime.comm.mailbox import Mailbox
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.registry import DEPARTED
from tests.serving import temporary_scratch
from tests.unit.runtime.comm.rank_pairs import rank_pair

ENV, ROLLOUT = "left", "right"
SLOTS, STAGES = 4, 2
BOX = spaces.Box(-1, 1, (3,), np.float32)
PARTS = spaces.Dict({"image": spaces.Box(0, 255, (2, 2, 3), np.uint8), "state": BOX})
LARGE = spaces.Box(0, 255, (600, 600, 3), np.uint8)


class Ranks:
    """An env rank and a rollout rank of this process, with their links."""

    def __init__(self, contexts: tuple[Context, Context], absent: bool = False) -> None:
        self.contexts = dict(zip((ENV, ROLLOUT), contexts, strict=True))
        self.slots = SlotMap(
            SLOTS, STAGES, env_name=ENV, rollout_name=ROLLOUT, token="t", absent=frozenset({0} if absent else ())
        )
        for name, homes in self.slots.playing_channels().items():
            Channel.create(name, home=homes.group, ranks=homes.ranks)

    def at(self, group: str) -> Any:
        """Switches to a rank, and returns its worker."""
        install(self.contexts[group])
        return SimpleNamespace(group_name=group, rank=0, log=logging.getLogger(group), connect_channel=Channel.connect)

    def open(self, space: Any, near: bool = False) -> tuple[EnvLinks, EnvLinks]:
        on_device = [[near]] * STAGES
        return tuple(open_links(self.at(group), self.slots, space, on_device) for group in (ENV, ROLLOUT))  # type: ignore[return-value]

    def leave(self, group: str) -> None:
        """Records that the run continues without a rank."""
        for context in self.contexts.values():
            context.registry.put(DEPARTED, f"{group}-0", {"incarnation": "1"})


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with temporary_scratch() as scratch, rank_pair(tmp_path, scratch) as contexts:
        yield Ranks(contexts)


def observation(space: Any, slots: range) -> Any:
    """Rows of a space whose numbers are those of the slots."""
    if isinstance(space, spaces.Dict):
        return {key: observation(box, slots) for key, box in space.spaces.items()}
    rows = np.zeros((len(slots), *space.shape), space.dtype)
    rows[...] = np.reshape(list(slots), (-1, *[1] * len(space.shape)))
    return rows


@pytest.mark.parametrize(
    ("space", "near", "kind"),
    [(BOX, False, Mailbox), (PARTS, False, MailboxLink), (BOX, True, ChannelLink), (LARGE, False, ChannelLink)],
)
def test_observations_arrive_and_actions_come_back(ranks: Ranks, space: Any, near: bool, kind: type[Any]) -> None:
    env, rollout = ranks.open(space, near)
    assert all(isinstance(link, kind) for stage in env._stages for _, _, link in stage)
    for stage in range(STAGES):
        ranks.at(ENV)
        env.put(stage, lambda slots: observation(space, slots))
        ranks.at(ROLLOUT)
        assert rollout.first([(0, 0), (1, 0)]) == [(stage, 0)]
        [(slots, rows)] = rollout.get(stage)
        assert slots == range(2 * stage, 2 * stage + 2)
        expected = observation(space, slots)
        for key, box in (expected if isinstance(expected, dict) else {"": expected}).items():
            np.testing.assert_array_equal(rows[key] if key else rows, box)
        rollout.put_to(stage, 0, np.full((2, 1, 1), stage, np.float32))
        ranks.at(ENV)
        [(slots, actions)] = env.get(stage)
        assert slots == range(2 * stage, 2 * stage + 2) and (actions == stage).all()


@pytest.mark.parametrize("near", [False, True])
def test_a_rank_that_left_is_lost_at_the_next_exchange(ranks: Ranks, near: bool) -> None:
    env, rollout = ranks.open(BOX, near)
    ranks.at(ENV)
    env.put(0, lambda slots: observation(BOX, slots))
    ranks.leave(ENV)
    ranks.at(ROLLOUT)
    assert rollout.get_from(0, 0) is not None, "the rank sent it before it left"
    assert rollout.get(0) == [(range(2), None)] and rollout.has_gone(0, 0)
    rollout.put(0, lambda slots: np.zeros((2, 1, 1), np.float32))
    assert rollout.first([(0, 0)]) == [(0, 0)], "nothing is waited for"
    assert not rollout.has_gone(1, 0)
    assert rollout.first([(1, 0)]) == [(1, 0)] and rollout.has_gone(1, 0)


def test_an_absent_rank_has_closed_links(ranks: Ranks) -> None:
    ranks.slots = SlotMap(SLOTS, STAGES, env_name=ENV, rollout_name=ROLLOUT, token="t", absent=frozenset({0}))
    links = open_links(ranks.at(ROLLOUT), ranks.slots, BOX, agree_on_device(ranks.at(ROLLOUT), ranks.slots))
    assert links.has_gone(0, 0) and links.get(1) == [(range(2, 4), None)]
    with pytest.raises(PeerLeft):
        ClosedLink().get()


def test_a_wait_for_several_ranks_has_a_deadline(ranks: Ranks) -> None:
    _, rollout = ranks.open(BOX)
    ranks.at(ROLLOUT)
    ranks.contexts[ROLLOUT].wait_deadline = 0.1
    with pytest.raises(DeadlineExceeded, match=r"for observations from left-0"):
        rollout.first([(0, 0), (1, 0)])


@pytest.mark.parametrize(
    ("env_device", "rollout_device", "can_stay", "expected"),
    [
        ("gpu-0", "gpu-0", (True, False), [[True], [False]]),
        ("gpu-0", "gpu-1", (True, True), [[False], [False]]),
        ("", "", (True, True), [[False], [False]]),
    ],
)
def test_observations_stay_on_the_accelerator_that_both_ranks_use(
    ranks: Ranks, env_device: str, rollout_device: str, can_stay: tuple[bool, ...], expected: list[list[bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(env_link, "address", lambda: rollout_device)
    worker = ranks.at(ROLLOUT)
    for stage in range(STAGES):  # what the rollout rank sends first: both ranks wait for one another, in one thread
        message = ranks.contexts[ROLLOUT].host, rollout_device
        put_until_left(worker.connect_channel(ACTIONS), message, ranks.slots.to_env_key(stage, 0, 0), (ENV, 0))
    monkeypatch.setattr(env_link, "address", lambda: env_device)
    assert agree_on_device(ranks.at(ENV), ranks.slots, can_stay) == expected
    monkeypatch.setattr(env_link, "address", lambda: rollout_device)
    assert agree_on_device(ranks.at(ROLLOUT), ranks.slots) == expected
