"""Cost of a generated token on the host, outside the engine: processor time of a rollout rank's own code, by stage.

    python -m bench.token_cost                        # this checkout
    python -m bench.token_cost --beside CHECKOUT      # and another one, in turn; `git worktree add CHECKOUT COMMIT` makes it

Finished responses are given in the form in which vLLM returns them. The stages are those of `LanguageRolloutWorker.generate`:
taking the response from the engine's output, the episode, the text for the reward functions, scoring and building of the
sample group, and the message through a channel to a reader in the same process. Prints nanoseconds a token for each stage, a
digest of all messages, which must be equal in both checkouts, and writes bench/results/token_cost.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{name: run, run_dir: {folder}}}
data: {{train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}, max_prompt_tokens: 1024, prompts_per_step: 8}}
reward: {{terms: [{{name: math}}]}}
algorithm: {{group_size: {group}, max_staleness: {staleness}}}
rollout: {{max_new_tokens: {response}}}
actor: {{model: {{model_path: "builtin:tiny"}}}}
"""
#: Tokens of a prompt and of a response, responses of a prompt, and prompts.
PROMPT, RESPONSE, GROUP, PROMPTS = 150, 850, 8, 12
#: Stages, in the order of a response's way.
STAGES = ("engine output", "episode", "text", "score", "build", "message")


class StageClock:
    """Processor time of this process by stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def __call__(self, stage: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Returns the result of a call, and adds its processor time to the stage."""
        start_time = time.process_time()
        result = call(*args, **options)
        self.seconds[stage] += time.process_time() - start_time
        return result


def _iter_arrays(message: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a message with their names, in the order of the names."""
    for name, value in sorted(message.items()):
        if isinstance(value, dict):
            yield from _iter_arrays(value, f"{prefix}{name}/")
        elif hasattr(value, "tobytes"):
            yield prefix + name, value


def _send_and_receive(channel: Any, group: Any) -> Any:
    """Sends a sample group through a channel, and returns the received group."""
    channel.put(group.pack())
    return type(group).unpack(channel.get())


def measure(staleness: int) -> dict[str, Any]:
    """Returns nanoseconds a token by stage, and a digest of the messages.

    Args:
        staleness: With 0, one version of the weights samples a response; with 1, two.
    """
    from rlhpc.language.agents.episodes import EpisodeRunner, sample_of
    from rlhpc.language.algorithms.registry import make_algorithm
    from rlhpc.language.data.prompts import Prompt
    from rlhpc.language.engines.base import Request, SamplingParams
    from rlhpc.language.engines.vllm import VLLMRollout, _RunningRequest
    from rlhpc.language.models.tiny import character_tokenizer
    from rlhpc.language.rewards.pool import Scored
    from rlhpc.language.rollout.group_builder import GroupBuilder
    from rlhpc.language.rollout.pending_group import PendingGroup
    from rlhpc.runs.configuration import load_config
    from rlhpc.runtime.channel import Channel
    from rlhpc.runtime.session import Session

    folder = Path(tempfile.mkdtemp(prefix="rlhpc-token-cost-"))
    text = CONFIG.format(root=ROOT, folder=folder, group=GROUP, response=RESPONSE, staleness=staleness)
    (folder / "run.yaml").write_text(text)
    cfg: Any = load_config(folder / "run.yaml", [])
    tokenizer = character_tokenizer(context=1 << 20)
    generator = random.Random(1)
    builder = GroupBuilder(cfg, make_algorithm(cfg), 0, "rollout-0")
    completions: list[Any] = []
    engine: Any = SimpleNamespace(
        add=lambda requests: None,
        step=lambda: [completions.pop()] if completions else [],
        unfinished=lambda: len(completions),
    )
    session = Session.start()
    channel = Channel.create("groups")
    clock, digest, sampling = StageClock(), hashlib.blake2b(), SamplingParams(max_new_tokens=RESPONSE)
    prompt = Prompt(0, ({"role": "user", "content": "what is it?"},), "4")
    num_tokens = 0
    for position in range(PROMPTS + 1):
        prompt_ids = tuple(generator.randrange(3, 60) for _ in range(PROMPT))
        group = PendingGroup(4, position, 0, prompt, prompt_ids)
        runner = EpisodeRunner(engine, tokenizer)
        episodes: dict[int, Any] = {}
        if position == 1:  # the first one warms up
            clock, num_tokens = StageClock(), 0
        for member in range(GROUP):
            request = Request(member, prompt_ids, sampling, member)
            token_ids = [generator.randrange(3, 60) for _ in range(RESPONSE)]
            logprobs = [-generator.random() for _ in range(RESPONSE)]
            marks = [(RESPONSE // 2, 2)] if staleness else []
            running_requests = {"0": _RunningRequest(request, version_marks=marks)}
            sequence = SimpleNamespace(
                token_ids=token_ids, logprobs=SimpleNamespace(logprobs=logprobs), finish_reason="stop"
            )
            engine_state = SimpleNamespace(_running=running_requests, version=3, num_drawn=0)
            output = SimpleNamespace(request_id="0", finished=True, outputs=[sequence])
            runner.add([request], prompt)
            completions += clock("engine output", VLLMRollout._collect_finished, engine_state, [output])
            [episode] = clock("episode", runner.step)
            clock("text", sample_of, prompt, episode, tokenizer, has_finished=True)
            episodes[member] = episode
            num_tokens += RESPONSE
        group.episodes = episodes
        group.scores = {member: Scored(float(member % 2), {"math": float(member % 2)}) for member in range(GROUP)}
        scored_group = clock("score", builder.score_group, group, may_refill=True)
        sample_group, metrics = clock("build", builder.build, group, scored_group)

        received_group = clock("message", _send_and_receive, channel, sample_group)
        digest.update(received_group.answers_digest + json.dumps(metrics, sort_keys=True).encode())
        for name, value in _iter_arrays(received_group.pack()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
    session.stop()
    figures = {stage: 1e9 * seconds / num_tokens for stage, seconds in clock.seconds.items()}
    return {"ns_a_token": figures, "digest": digest.hexdigest()}


def measure_checkout(checkout: Path, staleness: int) -> dict[str, Any]:
    """Runs `measure` in a new process that imports `rlhpc` of a checkout, and returns its result."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--once", "--staleness", str(staleness)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {checkout}:\n{result.stderr[-3000:]}")
    measurement: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measurement


def main() -> None:
    """Runs `python -m bench.token_cost`."""
    parser = argparse.ArgumentParser(prog="python -m bench.token_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--staleness", type=int, default=0, choices=(0, 1), help="updates during a response")
    parser.add_argument("--once", action="store_true", help="measure in this process and print JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure(options.staleness)))
        return
    from bench.machine import spread, write

    checkouts = {"this checkout": ROOT, **({"beside": options.beside.resolve()} if options.beside else {})}
    runs: dict[str, list[dict[str, Any]]] = {label: [] for label in checkouts}
    for _ in range(options.repeat):
        for label, checkout in checkouts.items():
            runs[label].append(measure_checkout(checkout, options.staleness))
    digests = {run["digest"] for label_runs in runs.values() for run in label_runs}
    if len(digests) > 1:
        raise SystemExit(f"the messages differ: {digests}")
    figures: dict[str, Any] = {
        label: {stage: spread([run["ns_a_token"][stage] for run in label_runs]) for stage in STAGES}
        for label, label_runs in runs.items()
    }
    sums = {label: [sum(run["ns_a_token"].values()) for run in label_runs] for label, label_runs in runs.items()}
    for label, values in sums.items():
        figures[label]["all"] = spread(values)
        medians = {stage: statistics.median(run["ns_a_token"][stage] for run in runs[label]) for stage in STAGES}
        print(f"{label}: " + ", ".join(f"{stage} {value:.0f}" for stage, value in medians.items()), end="")
        print(f", all {statistics.median(values):.0f} ns a token")
    ratios = {}
    if options.beside:
        ratios = {
            stage: statistics.median(
                other_run["ns_a_token"][stage] / here["ns_a_token"][stage]
                for here, other_run in zip(runs["this checkout"], runs["beside"], strict=True)
            )
            for stage in STAGES
        }
        ratios["all"] = statistics.median(
            other_run / here for here, other_run in zip(sums["this checkout"], sums["beside"], strict=True)
        )
        print("beside / this checkout: " + ", ".join(f"{stage} {ratio:.2f}" for stage, ratio in ratios.items()))
    other_checkout = f"--beside {options.beside.name} " if options.beside else ""
    arguments = f"{other_checkout}--repeat {options.repeat} --staleness {options.staleness}"
    name = "token_cost" + ("_stale" if options.staleness else "")
    print(write(name, f"python -m bench.token_cost {arguments}", {"figures": figures, "ratios": ratios}))


if __name__ == "__main__":
    main()
