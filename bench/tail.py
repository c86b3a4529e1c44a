"""Idle time due to long answers, which bounds the gain from moving ranks between groups during a step.

    python -m bench.tail --steps 12

The workload is that of `bench.taken`: 64 prompts of 8 answers per step on 2, 4 and 8 rollout ranks, which take prompts from
the prompt queue. Their engines generate 32 sequences at a time at a fixed rate; lengths are log-normal, 20 to 2000 tokens.
An actor trains on each step for as long as its answers would take if all rollout ranks were always busy, so actor and
rollout ranks have the same amount of work. Steps run one after the other (`algorithm.max_staleness: 0`), or rollout ranks
are one or two ahead.

With `--episodes` an answer is an episode: after each 100 tokens a tool works for 0.1 s, while the engine generates other
sequences. The longest episode takes 6 s, including 2 s of the tool. These results are written to results/tail_episodes.json.

`bound_s` is the lower bound for any scheduler that moves ranks to waiting work, even at no cost and at any time: all work
divided by all ranks or, if this is longer, the longest answer, divided by the number of concurrent steps. `gain` is the time
of a step over this bound.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections import deque
from collections.abc import Sequence

from bench.machine import write
from bench.taken import CAPACITY, GROUP, PROMPTS, RANKS, draw_lengths
from rlhpc import Channel, Cluster, NodePlacementStrategy, Session, Worker
from rlhpc.language.rollout.prompt_queue import PromptLeases, PromptTracker
from rlhpc.language.training.prompt_dispatch import DELIVERED, WORK
from rlhpc.runtime.channel import QueueEmpty

TOKEN_S = 0.002
#: Of an episode: tokens of a turn, and seconds of the tool after it.
TURN, TOOL_S = 100, 0.1
OVER = "over"


class TailRollout(Worker):
    """Rollout rank with an engine of fixed speed."""

    def open(self) -> None:
        """Connects to the driver's channels."""
        self.work, self.delivery_channel = self.connect_channel(WORK), self.connect_channel(DELIVERED)
        self.over = self.connect_channel(OVER)

    def generate(self, num_steps: int, max_staleness: int, num_ranks: int, tool_s: float) -> None:
        """Leases prompts of all steps as the driver offers them, until the driver sends the end."""
        leases = PromptLeases(PROMPTS, self.work, self.delivery_channel)
        leases.begin(0, num_ranks)
        sizes = {step: draw_lengths(step) for step in range(1, num_steps + 1)}
        waiting_keys, running_tokens = deque[tuple[int, int, int]](), dict[tuple[int, int, int], int]()
        remaining, next_step, now = dict[tuple[int, int], int](), 1, time.perf_counter()
        tool_calls, preempted_tokens = deque[tuple[float, tuple[int, int, int]]](), dict[tuple[int, int, int], int]()
        while next_step <= num_steps:
            for step in range(next_step, min(num_steps, next_step + max_staleness) + 1):
                while (
                    len(running_tokens) + len(waiting_keys) < CAPACITY and (position := leases.lease(step)) is not None
                ):
                    assert isinstance(position, int), "nobody leaves"
                    remaining[step, position] = GROUP
                    waiting_keys.extend((step, position, member) for member in range(GROUP))
            while tool_calls and tool_calls[0][0] <= now:
                waiting_keys.appendleft(tool_calls.popleft()[1])
            while waiting_keys and len(running_tokens) < CAPACITY:
                sequence_key = waiting_keys.popleft()
                running_tokens[sequence_key] = preempted_tokens.pop(
                    sequence_key, int(sizes[sequence_key[0]][sequence_key[1:]])
                )
            now = max(now + TOKEN_S, time.perf_counter() - TOKEN_S)
            time.sleep(max(0.0, now - time.perf_counter()))
            for sequence_key in list(running_tokens):
                running_tokens[sequence_key] -= 1
                if tool_s and running_tokens[sequence_key] and running_tokens[sequence_key] % TURN == 0:
                    preempted_tokens[sequence_key] = running_tokens.pop(sequence_key)
                    tool_calls.append((now + tool_s, sequence_key))
                elif not running_tokens[sequence_key]:
                    del running_tokens[sequence_key]
                    remaining[sequence_key[:2]] -= 1
                    if not remaining[sequence_key[:2]]:
                        leases.deliver(*sequence_key[:2], {})
            with contextlib.suppress(QueueEmpty):
                next_step = self.over.get_nowait(key=str(self.rank))


def compute_ideal_s(step: int, num_ranks: int) -> float:
    """Returns the seconds of a step's answers if all ranks are busy all the time."""
    return float(draw_lengths(step).sum()) * TOKEN_S / CAPACITY / num_ranks


def compute_longest_s(step: int, tool_s: float) -> float:
    """Returns the seconds of a step's longest answer."""
    num_tokens = int(draw_lengths(step).max())
    return num_tokens * TOKEN_S + (num_tokens - 1) // TURN * tool_s


def compute_bound_s(step: int, num_ranks: int, max_staleness: int, tool_s: float) -> float:
    """Returns the lower bound of a step's seconds with moving ranks."""
    return max(compute_ideal_s(step, num_ranks), compute_longest_s(step, tool_s) / (1 + max_staleness))


def measure_run(
    num_steps: int, max_staleness: int, num_ranks: int, cluster: Cluster, tool_s: float = 0.0
) -> dict[str, float]:
    """Measures one run; the first two steps and the last two, with less concurrent work, do not count."""
    ledger, over_channel = PromptTracker(PROMPTS), Channel.create(OVER)
    ledger.open(0)
    group = TailRollout.create_group().launch(
        cluster, NodePlacementStrategy([0] * num_ranks), f"tail{num_ranks}{max_staleness}"
    )
    group.open().wait()
    ledger.enqueue(1 + max_staleness)
    making, step_times = group.generate(num_steps, max_staleness, num_ranks, tool_s), [time.perf_counter()]
    for step in range(1, num_steps + 1):
        while not ledger.wait_complete(step, 1.0):
            if time.perf_counter() - step_times[-1] > 300:
                raise SystemExit(f"bench.tail: step {step} is not whole: {ledger.list_missing_positions(step)[:8]}")
        time.sleep(compute_ideal_s(step, num_ranks))  # the actor
        ledger.enqueue(min(num_steps, step + 1 + max_staleness))
        for rank in range(num_ranks):
            over_channel.put(step + 1, key=str(rank))
        step_times.append(time.perf_counter())
    making.wait()
    group.shutdown()
    measured_steps = range(3, num_steps - 1)
    busy_s = statistics.fmean(compute_ideal_s(step, num_ranks) for step in measured_steps)
    answer_s = statistics.fmean(compute_longest_s(step, tool_s) for step in measured_steps)
    tokens = statistics.fmean(float(draw_lengths(step).sum()) for step in measured_steps)
    step_s = (step_times[-3] - step_times[2]) / len(measured_steps)
    min_step_s = statistics.fmean(compute_bound_s(step, num_ranks, max_staleness, tool_s) for step in measured_steps)
    return {
        "ranks": num_ranks, "max_staleness": max_staleness, "step_s": step_s, "bound_s": min_step_s,
        "gain": step_s / min_step_s,
        "rollout ranks idle": 1 - busy_s / step_s, "answers if all were busy, s": busy_s, "longest answer, s": answer_s,
        "tokens_per_s": tokens / step_s,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/tail.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--episodes", action="store_true", help="on 4 ranks, with a tool between turns")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    session, cluster = Session.start(), Cluster.local(1, 0)
    rows = []
    for ranks in (4,) if args.episodes else RANKS:
        for max_staleness in (0, 1, 2):
            rows.append(measure_run(args.steps, max_staleness, ranks, cluster, TOOL_S if args.episodes else 0.0))
            figures = rows[-1]
            print(f"{ranks} ranks, {max_staleness} ahead: {figures['step_s']:.2f} s a step, "
                  f"at least {figures['bound_s']:.2f} s "
                  f"({figures['gain']:.2f} times); rollout idle {figures['rollout ranks idle']:.0%}", flush=True)  # fmt: skip
    session.stop()
    name, options_text = ("tail_episodes", " --episodes") if args.episodes else ("tail", "")
    print(write(name, f"python -m bench.tail --steps {args.steps}{options_text}", {"rows": rows}))


if __name__ == "__main__":
    main()
