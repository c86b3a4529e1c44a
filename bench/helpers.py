"""Benefit of ranks that join a run: steps with helpers, compared with a run that has the same number of ranks from the start.

    python -m bench.helpers --repeat 3

A GRPO run of 32 prompts with 4 answers each has four rollout ranks from its start; another one has two, and two helpers join
it (`rlhpc join`, on the same host). Only the engine is simulated: it generates eight sequences at a time, one token of each in
ten milliseconds, and sleeps for the remaining time, so the speed of a rank does not depend on the number of ranks on these
cores. The comparison uses the steps after the first step of both helpers. That first step, in which the helpers receive the
weights, is reported separately.

The benchmark also measures the time to a helper's first token from the start of its process, and the time to the first token
of a rank from the start of its run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.machine import spread, write
from rlhpc.language.engines.base import Completion, Request
from rlhpc.language.engines.common import EngineBase
from rlhpc.language.engines.hf import uniforms

ROOT = Path(__file__).parents[1]
ROWS, TOKEN_S, TOKENS = 8, 0.01, 40
#: Steps with helpers, the first of which is left out: somebody joins between two.
STEPS = 8
_PATIENCE_S = 240.0


class Timed(EngineBase):
    """Engine of fixed speed, whose tokens depend only on the request."""

    capacity = ROWS

    def __init__(self, cfg: Any, *, model_path: str, device: object, seed: int = 0) -> None:
        super().__init__()
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path)
        self.context, self.vocabulary = config.max_position_embeddings, config.vocab_size
        self._waiting_requests, self._running_requests = deque[Request](), dict[int, tuple[Request, list[int], int]]()
        self._next_token_at = time.perf_counter()
        self._drawn = False

    def _queue(self, requests: Sequence[Request]) -> None:
        self._waiting_requests.extend(requests)

    def _advance(self) -> list[Completion]:
        now = time.perf_counter()
        self._next_token_at = max(self._next_token_at, now - TOKEN_S) + TOKEN_S
        time.sleep(max(0.0, self._next_token_at - now))
        while self._waiting_requests and len(self._running_requests) < ROWS:
            request = self._waiting_requests.popleft()
            tokens = [4 + int(uniform_draw * (self.vocabulary - 4)) for uniform_draw in uniforms(request, TOKENS)]
            self._running_requests[request.id] = request, tokens[: TOKENS // 2 + tokens[0] % (TOKENS // 2)], 0
        if not self._drawn:
            self._drawn = True
            with (Path(os.environ["RLHPC_BENCH_FIRST"]) / f"{os.getpid()}").open("w") as file:
                file.write(str(time.time()))
        completions = []
        for request_id, (request, tokens, count) in list(self._running_requests.items()):
            self._running_requests[request_id] = request, tokens, count + 1
            if count + 1 == len(tokens):
                del self._running_requests[request_id]
                logprobs_and_versions = [-4.0] * len(tokens), [self.version] * len(tokens)
                completions.append(Completion(request.id, tokens, *logprobs_and_versions, finish_reason="stop"))
        return completions

    def _abort(self) -> list[Completion]:
        aborted_requests = [Completion(request_id, finish_reason="abort") for request_id in [*self._running_requests]]
        aborted_requests += [Completion(request.id, finish_reason="abort") for request in self._waiting_requests]
        self._running_requests.clear()
        self._waiting_requests.clear()
        return aborted_requests

    def update_weights(self, version: int, named_tensors: Iterable[Any], *, complete: bool = True) -> None:
        """Ignores the weights."""
        for _ in named_tensors:
            pass
        self.version = version

    def offload(self) -> None:
        """Does nothing: no memory to offload."""

    def reload(self) -> None:
        """Does nothing: no memory to reload."""

    def close(self) -> None:
        """Drops all requests."""
        self._abort()


class HelperRun:
    """Running `rlhpc train` process that helpers can join.

    Args:
        folder: Folder of this run alone.
        num_ranks: Rollout ranks from its start.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self.folder, self.root = folder, folder / "run"
        self.first_folder = folder / "first"
        self.first_folder.mkdir(parents=True)
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RLHPC_BENCH_FIRST": str(self.first_folder),
            "RLHPC_MODELS": str(folder.parent / "models"), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        overrides = (
            "runner.name=run", f"runner.run_dir={folder}", "runner.segments=1", "runner.max_steps=1000",
            "runner.save_interval=-1", "runner.val_check_interval=-1", "workflow.sft=null",
            f"cluster.component_placement={{actor: '0', rollout: '0:0-{num_ranks - 1}'}}",
            "actor.model.model_path=builtin:tiny", "rollout.rollout_backend=bench.helpers:Timed",
            f"rollout.max_new_tokens={TOKENS}", "data.prompts_per_step=32", "algorithm.group_size=4",
            "actor.global_batch_size=128", "rollout.probe_interval=0", "algorithm.kl_coef=0",
        )  # fmt: skip
        self.start_time = time.time()
        self._log = (folder / "said.txt").open("w")
        self.process = self._start("train", str(ROOT / "configs" / "reasoning" / "demo.yaml"), *overrides)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rlhpc.cli", *arguments]
        return subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=self._log, stderr=self._log)

    def wait_until(self, goal: str, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds; fails if the run ends before."""
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(f"bench.helpers: {goal}: {(self.folder / 'said.txt').read_text()[-2000:]}")
            time.sleep(0.05)

    def read_first_token_times(self) -> list[float]:
        """Returns the time at which each rank drew its first token, for ranks that have drawn one."""
        return sorted(float(path.read_text() or "inf") for path in self.first_folder.iterdir())

    def read_rows(self) -> list[dict[str, float]]:
        """Returns the metrics so far."""
        path = self.root / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def read_step_times(self, behind: int, count: int = STEPS) -> list[float]:
        """Returns the seconds of the steps that follow a given step."""
        self.wait_until("steps", lambda: len(self.read_rows()) >= behind + count)
        return [row["time/step_s"] for row in self.read_rows()[behind : behind + count]]

    def join(self) -> tuple[float, subprocess.Popen[bytes]]:
        """Starts a helper, and returns the time of its start."""
        return time.time(), self._start("join", str(self.root))

    def end(self, *other_processes: subprocess.Popen[bytes]) -> None:
        """Ends the run and the given helpers."""
        for process in (*other_processes, self.process):
            process.terminate()
            process.wait()
        self._log.close()


def measure(folder: Path) -> dict[str, Any]:
    """Measures a run with helpers, and a run with the same number of ranks from the start."""
    static_run = HelperRun(folder / "static", 4)
    static_run.wait_until("first tokens", lambda: len(static_run.read_first_token_times()) == 4)
    cold_s = static_run.read_first_token_times()[0] - static_run.start_time
    static_s = static_run.read_step_times(2)
    static_run.end()
    joined_run = HelperRun(folder / "joined", 2)
    joined_run.wait_until("two steps", lambda: len(joined_run.read_rows()) >= 2)
    alone_s = [row["time/step_s"] for row in joined_run.read_rows()[1:]]
    start_time, first_helper = joined_run.join()
    joined_run.wait_until("the first helper", lambda: len(joined_run.read_first_token_times()) == 3)
    warm_s = joined_run.read_first_token_times()[2] - start_time
    _, second_helper = joined_run.join()
    joined_run.wait_until("the second helper", lambda: len(joined_run.read_first_token_times()) == 4)
    first_s, *joined_s = joined_run.read_step_times(
        len(joined_run.read_rows()), STEPS + 1
    )  # the step under way is the first with both
    joined_run.end(first_helper, second_helper)
    return {
        "static": static_s, "joined": joined_s, "at first": first_s, "alone": alone_s, "cold_s": cold_s, "helper_s": warm_s
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all rounds, and writes `results/helpers.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(args.repeat):
            rounds.append(measure(Path(folder) / f"round{round_number}"))
            round_figures = rounds[-1]
            step = {name: statistics.median(round_figures[name]) for name in ("static", "joined", "alone")}
            print(f"step: {step['static']:.2f} s with four ranks, {step['joined']:.2f} s with two and two helpers (the first "
                  f"{round_figures['at first']:.2f} s), "
                  f"{step['alone']:.2f} s with two; first token: {round_figures['cold_s']:.1f} s after a run's start, "
                  f"{round_figures['helper_s']:.1f} s after a helper's", flush=True)  # fmt: skip
    figures = {
        "step_s, four ranks": spread([step for round_figures in rounds for step in round_figures["static"]]),
        "step_s, two ranks and two helpers": spread(
            [step for round_figures in rounds for step in round_figures["joined"]]
        ),
        "throughput of that": statistics.median(
            statistics.median(round_figures["static"]) / statistics.median(round_figures["joined"])
            for round_figures in rounds
        ),
        "throughput in the first step with both": statistics.median(
            statistics.median(round_figures["static"]) / round_figures["at first"] for round_figures in rounds
        ),
        "first token of a run, s": spread([round_figures["cold_s"] for round_figures in rounds]),
        "first token of a helper, s": spread([round_figures["helper_s"] for round_figures in rounds]),
        "first token, ratio": statistics.median(
            round_figures["helper_s"] / round_figures["cold_s"] for round_figures in rounds
        ),
    }
    print(write("helpers", f"python -m bench.helpers --repeat {args.repeat}", figures))


if __name__ == "__main__":
    main()
