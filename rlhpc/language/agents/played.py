"""Episodes of environments, in the rollout rank itself: no process and no wire between the model and the world."""

from __future__ import annotations

import asyncio
import collections
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.language.agents.gateway import Gateway
from rlhpc.language.agents.messages import Refused
from rlhpc.language.agents.sessions import OVER
from rlhpc.language.agents.task import Task
from rlhpc.language.agents.threads import Threads
from rlhpc.language.environments.base import Environment
from rlhpc.language.environments.play import play

#: Threads that call environments.
_THREADS = 16


@dataclass(frozen=True)
class World:
    """What is played.

    Attributes:
        environment: Makes the world of an episode.
        episodes: How many are under way at a time.
    """

    environment: Callable[[], Environment]
    episodes: int


class Played:
    """Plays an episode for each ticket, as `Harnesses` run a program for it.

    Args:
        world: What is played.
        gateway: Who answers; the episodes live on its loop.
        done: Is called with the ticket's id and the outcome.
    """

    def __init__(self, world: World, gateway: Gateway, done: Callable[[int, dict[str, Any]], None]) -> None:
        self._world, self._gateway, self._done = world, gateway, done
        self._threads = Threads(_THREADS)
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._running: dict[int, asyncio.Task[None]] = {}

    def run(self, ticket: dict[str, Any]) -> None:
        """Plays an episode, when there is room for one more."""
        self._gateway.loop.call_soon_threadsafe(self._add, ticket)

    def abort(self) -> None:
        """Ends all that are under way, and forgets those that wait; none of them has an outcome."""
        self._gateway.loop.call_soon_threadsafe(self._end)

    def close(self) -> None:
        """Ends everything."""
        self.abort()
        self._threads.close()

    # -- on the gateway's loop ------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._waiting.clear()
        for task in self._running.values():
            task.cancel()
        self._running.clear()

    def _add(self, ticket: dict[str, Any]) -> None:
        self._waiting.append(ticket)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._world.episodes:
            ticket = self._waiting.popleft()
            self._running[ticket["id"]] = self._gateway.loop.create_task(self._episode(ticket))

    async def _episode(self, ticket: dict[str, Any]) -> None:
        try:
            outcome = await asyncio.wait_for(self._outcome(ticket), ticket["timeout_s"])
        except TimeoutError:
            outcome = {"error": f"it took longer than agent.timeout_s ({ticket['timeout_s']:g} s)"}
        except asyncio.CancelledError:
            return
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}{_where(error)}"}
        del self._running[ticket["id"]]
        self._done(ticket["id"], outcome)
        self._fill()

    async def _outcome(self, ticket: dict[str, Any]) -> dict[str, Any]:
        async def ask(role: str, messages: list[dict[str, Any]], tools: Sequence[Any]) -> dict[str, Any] | None:
            try:
                return await self._gateway.chat(ticket["api_key"], role, list(messages), list(tools))
            except Refused as why:
                if why.code == OVER:
                    return None
                raise

        return await play(self._world.environment(), Task(**ticket["task"]), ask, self._threads.call)


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return f" ({Path(last[0].filename).name}, line {last[0].lineno})" if last else ""
