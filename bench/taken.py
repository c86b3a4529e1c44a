"""Time of a step with answers of very different length: leased prompts compared with a fixed assignment to ranks.

    python -m bench.taken --repeat 5

A step has 64 prompts of 8 answers each, on 2, 4 and 8 ranks. Ranks, prompt queue and leases are those of rlhpc; only the
engines are simulated. An engine generates 32 sequences at a time, one token of each in two milliseconds, up to a length that
is drawn in advance (log-normal by prompt and by answer, 20 to 2000 tokens, equal in both modes). In half of the cases one
rank is half as fast as the others. In the fixed assignment, rank r of R has every R-th prompt; sequences beyond the capacity
of its engine wait there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from bench.machine import spread, write
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker, WorkerGroup
from rlhpc.language.rollout.prompt_queue import PromptLeases, PromptTracker
from rlhpc.language.training.prompt_dispatch import DELIVERED, WORK

RANKS, PROMPTS, GROUP, CAPACITY, TOKEN_S = (2, 4, 8), 64, 8, 32, 0.002


def draw_lengths(seed: int) -> np.ndarray:
    """Returns the tokens of each answer, `[PROMPTS, GROUP]`."""
    generator = np.random.default_rng(seed)
    prompt, answer_noise = generator.normal(0.0, 0.8, (PROMPTS, 1)), generator.normal(0.0, 0.4, (PROMPTS, GROUP))
    return np.clip(np.exp(5.0 + prompt + answer_noise), 20, 2000).astype(int)


class LeasedRollout(Worker):
    """Rollout rank with an engine of fixed speed."""

    def open(self) -> None:
        self.work, self.delivery_channel = self.connect_channel(WORK), self.connect_channel(DELIVERED)

    def generate(self, step: int, is_leased: bool, num_ranks: int, is_slow: bool) -> float:
        """Generates this rank's answers of a step; returns the seconds until it is idle."""
        size, token_s = draw_lengths(step), TOKEN_S * (2 if is_slow and self.rank == 0 else 1)
        leases = PromptLeases(PROMPTS, self.work, self.delivery_channel)
        leases.begin(step, num_ranks)
        own_positions = iter(range(self.rank, PROMPTS, num_ranks))
        waiting_keys, running_tokens, remaining = (
            deque[tuple[int, int]](),
            dict[tuple[int, int], int](),
            dict[int, int](),
        )
        start_s = now = time.perf_counter()

        def more() -> Iterator[int]:
            while len(running_tokens) + len(waiting_keys) < CAPACITY or not is_leased:
                position = leases.lease(step) if is_leased else next(own_positions, None)
                if position is None:
                    return
                assert isinstance(position, int), "nobody leaves"
                yield position

        while True:
            for position in more():
                remaining[position] = GROUP
                waiting_keys.extend((position, member) for member in range(GROUP))
            while waiting_keys and len(running_tokens) < CAPACITY:
                sequence_key = waiting_keys.popleft()
                running_tokens[sequence_key] = int(size[sequence_key])
            if not running_tokens:
                break
            now += token_s
            time.sleep(max(0.0, now - time.perf_counter()))
            for sequence_key in list(running_tokens):
                running_tokens[sequence_key] -= 1
                if not running_tokens[sequence_key]:
                    del running_tokens[sequence_key]
                    remaining[sequence_key[0]] -= 1
                    if is_leased and not remaining[sequence_key[0]]:
                        leases.deliver(step, sequence_key[0], {})
        return time.perf_counter() - start_s


def time_step(
    group: WorkerGroup, ledger: PromptTracker, step: int, is_leased: bool, num_ranks: int, is_slow: bool
) -> float:
    """Returns the seconds of a step, until the last rank has finished."""
    ledger.open(step - 1)
    ledger.enqueue(step)
    seconds: list[float] = group.generate(step, is_leased, num_ranks, is_slow).wait()
    assert not is_leased or ledger.wait_complete(step, 10.0)
    return max(seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/taken.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    session, cluster = Session.start(), Cluster.local(1, 0)
    rows = []
    for ranks in RANKS:
        ledger = PromptTracker(PROMPTS)
        ledger.open(0)
        group = LeasedRollout.create_group().launch(cluster, NodePlacementStrategy([0] * ranks), f"makers{ranks}")
        group.open().wait()
        for slow in (False, True):
            times: dict[bool, list[float]] = {True: [], False: []}
            for repeat in range(args.repeat):
                for is_leased in (True, False):
                    times[is_leased].append(time_step(group, ledger, repeat + 1, is_leased, ranks, slow))
            ratios = [leased_s / fixed_s for leased_s, fixed_s in zip(times[True], times[False], strict=True)]
            ideal_times = [
                draw_lengths(r + 1).sum() * TOKEN_S / CAPACITY / (ranks - 0.5 * slow) for r in range(args.repeat)
            ]
            rows.append({
                "ranks": ranks, "one rank half as fast": slow, "taken_s": spread(times[True]), "dealt_s": spread(times[False]),
                "ratio": statistics.median(ratios), "if all were busy all the time, s": statistics.median(ideal_times),
            })  # fmt: skip
            print(f"{ranks} ranks, {'one slow' if slow else 'alike'}: taken {statistics.median(times[True]):.2f} s, dealt "
                  f"{statistics.median(times[False]):.2f} s, ratio {statistics.median(ratios):.2f}", flush=True)  # fmt: skip
        group.shutdown()
    session.stop()
    print(write("taken", f"python -m bench.taken --repeat {args.repeat}", {"rows": rows}))


if __name__ == "__main__":
    main()
