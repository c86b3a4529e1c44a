"""Connections to the gateway: whoever has many keeps nobody else out."""

from __future__ import annotations

import asyncio

import pytest

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.agents.gateway import connections


class FarTransport(asyncio.Transport):
    """A connection of another host."""

    def __init__(self, host: str) -> None:
        super().__init__({"peername": (host, 9), "sockname": ("192.0.2.1", 8000)})
        self.host, self.is_aborted = host, False

    def abort(self) -> None:
        self.is_aborted = True


def test_a_host_with_many_connections_keeps_no_other_host_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a key are bounded; one that has shown its key stays, and so do those of hosts that have few."""
    monkeypatch.setattr(connections, "_MAX_REMOTE", 8)

    async def come() -> None:
        doors = connections.Connections(asyncio.Protocol)

        def arrive(host: str) -> FarTransport:
            transport = FarTransport(host)
            doors().connection_made(transport)
            return transport

        proven, quiet = arrive("192.0.2.66"), arrive("192.0.2.7")
        doors.authenticate(proven, "a key")
        flood = [arrive("192.0.2.66") for _ in range(30)]
        assert [one.is_aborted for one in flood] == [True] * 23 + [False] * 7
        late = arrive("2001:db8::7")
        assert not any(one.is_aborted for one in (proven, quiet, late)) and flood[23].is_aborted
        doors.remove(quiet)
        doors.remove(late)
        silent = arrive("127.0.0.1")
        assert len(doors._remote_connections) == 6 and not silent.is_aborted
        monkeypatch.setattr(connections, "is_short_of_descriptors", lambda: True)
        assert not arrive("192.0.2.8").is_aborted and all(one.is_aborted for one in flood) and not proven.is_aborted

    asyncio.run(come())


def test_an_episode_with_many_connections_keeps_no_other_episode_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where descriptors are few, it gives up its oldest for whoever comes; an episode with few keeps all."""
    monkeypatch.setattr(connections, "_MIN_PER_EPISODE", 4)

    async def come() -> None:
        doors = connections.Connections(asyncio.Protocol)

        def arrive(key: str = "") -> FarTransport:
            transport = FarTransport("127.0.0.1")
            doors().connection_made(transport)
            if key:
                doors.authenticate(transport, key)
            return transport

        flood, few = [arrive("greedy") for _ in range(9)], [arrive("modest") for _ in range(4)]
        monkeypatch.setattr(connections, "is_short_of_descriptors", lambda: True)
        early = arrive()
        late = [arrive("late") for _ in range(4)]
        doors.authenticate(early, "late")
        assert not early.is_aborted, "it had no time to show its key"
        assert [one.is_aborted for one in flood] == [True] * 5 + [False] * 4
        late = [early, *late]
        assert not any(one.is_aborted for one in (*few, *late[1:])) and len(doors._authenticated_connections) == 13
        assert arrive().is_aborted is False and doors._authenticated_connections.max_per_owner() == 4
        silent = arrive()
        assert not silent.is_aborted and not any(one.is_aborted for one in few)
        doors.remove(silent)
        assert arrive("x").is_aborted, "nobody has many"

    asyncio.run(come())
