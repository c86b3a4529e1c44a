"""Cost of the gateway for agents: 1000 episodes of 10 turns each, over an engine without cost.

    python -m bench.gateway

The clients run in a separate process. The thread of the gateway measures its processor time; the share of the chat template
and the tokenizer is measured separately. Prints a line for each figure and writes bench/results/gateway.json.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import multiprocessing
import resource
import time
from typing import Any

from bench.machine import goal, write
from rlhpc.language.agents.gateway.output_parsers import Parsers
from rlhpc.language.agents.gateway.server import EngineRequest, Gateway
from rlhpc.language.agents.gateway.sessions import EpisodeLimits, GatewaySession
from rlhpc.language.engines.base import Completion, SamplingParams
from rlhpc.language.models.tiny import character_tokenizer

_TEXT = "the product of these is 84 "


class Counted:
    """Tokenizer that sums the time spent in encoding and in its chat template.

    Args:
        tokenizer: Of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.seconds = tokenizer, 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._tokenizer, name)
        if name not in ("apply_chat_template", "encode", "decode"):
            return attribute

        def counted(*args: Any, **kwargs: Any) -> Any:
            start_time = time.thread_time()
            try:
                return attribute(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start_time

        return counted


async def _run_episode(client: Any, key: str, num_turns: int) -> None:
    messages = [{"role": "user", "content": _TEXT}]
    for _ in range(num_turns):
        head = {"Authorization": f"Bearer {key}"}
        async with client.post("/v1/chat/completions", json={"messages": messages}, headers=head) as response:
            reply = await response.json()
        messages += [reply["choices"][0]["message"], {"role": "user", "content": _TEXT}]


def run_clients(url: str, keys: list[str], num_turns: int, at_once: int) -> None:
    """Runs the episodes, `at_once` at a time."""
    import aiohttp

    async def run() -> None:
        pending_keys = iter(keys)

        async def run_queue(client: Any) -> None:
            for key in pending_keys:
                await _run_episode(client, key, num_turns)

        async with aiohttp.ClientSession(url) as client:
            await asyncio.gather(*[run_queue(client) for _ in range(at_once)])

    asyncio.run(run())


def measure(num_episodes: int, num_turns: int, at_once: int) -> dict[str, float]:
    """Returns seconds and milliseconds a turn, and the growth of memory over the second half of the episodes.

    Args:
        num_episodes, num_turns: Number of episodes, and of turns in each.
        at_once: Episodes under way.
    """
    tokenizer = Counted(character_tokenizer(context=1 << 20))
    gateway = Gateway(tokenizer, Parsers(tokenizer, "hermes", "think"), 1 << 20)
    sampling, limits = SamplingParams(max_new_tokens=64), EpisodeLimits(num_turns, 1 << 20)
    sessions = collections.deque(
        GatewaySession(session_number, sampling, session_number, limits) for session_number in range(num_episodes)
    )
    for session in sessions:
        gateway.open(session)
    del session
    reply = [*tokenizer.encode(_TEXT, add_special_tokens=False), tokenizer.eos_token_id]
    context = multiprocessing.get_context("spawn")
    client_process = context.Process(
        target=run_clients, args=(gateway.url, [s.key for s in sessions], num_turns, at_once)
    )

    async def measure_memory() -> float:
        return time.thread_time()

    def clock() -> float:
        return asyncio.run_coroutine_threadsafe(measure_memory(), gateway.loop).result(60)

    client_process.start()
    num_drawn, start_time, half_memory = 0, 0.0, 0.0
    cpu_s = tokenizing_s = 0.0
    while num_drawn < num_episodes * num_turns:
        drawing: EngineRequest = gateway.engine_queue.get(timeout=60)
        if not num_drawn:
            start_time, cpu_s, tokenizing_s = time.perf_counter(), clock(), tokenizer.seconds
        num_drawn += 1
        drawing.answer(Completion(num_drawn, list(reply), [-1.0] * len(reply), [0] * len(reply), "stop"))
        while sessions and len(sessions[0].tree.turns) == num_turns:  # as a rank does with those that are over
            finished_session = sessions.popleft()
            assert len(finished_session.tree.samples(finished_session.number)) == 1
            gateway.loop.call_soon_threadsafe(gateway.end, finished_session)
        if num_drawn == num_episodes * num_turns // 2:
            half_memory = _read_peak_mib()
    client_process.join(60)
    duration_s, cpu_s, tokenizing_s = (
        time.perf_counter() - start_time,
        clock() - cpu_s,
        tokenizer.seconds - tokenizing_s,
    )
    memory_growth = _read_peak_mib() - half_memory
    gateway.close()
    return {
        "turns": float(num_drawn), "turns_per_s": num_drawn / duration_s, "cpu_ms_a_turn": 1e3 * cpu_s / num_drawn,
        "template_and_tokenizer_ms_a_turn": 1e3 * tokenizing_s / num_drawn,
        "the_rest_ms_a_turn": 1e3 * (cpu_s - tokenizing_s) / num_drawn, "grown_in_second_half_mib": memory_growth,
    }  # fmt: skip


def _read_peak_mib() -> float:
    """Returns the peak memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Runs `python -m bench.gateway`."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=64)
    options = parser.parse_args()
    figures = measure(options.episodes, options.turns, options.at_once)
    for name, value in figures.items():
        print(f"{name}: {value:.3g}")
    goals = [
        goal(
            "a turn, beside template and tokenizer, in a millisecond of processor time",
            figures["the_rest_ms_a_turn"],
            1.0,
        ),
        goal("no memory is kept of episodes that are over (MiB)", figures["grown_in_second_half_mib"], 8.0),
    ]
    size = f"--episodes {options.episodes} --turns {options.turns} --at-once {options.at_once}"
    print(write("gateway", f"python -m bench.gateway {size}", {"figures": figures, "goals": goals}))


if __name__ == "__main__":
    main()
