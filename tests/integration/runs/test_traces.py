"""Traces of runs of each kind: exported, decoded, and held against what the run's metrics say of the same steps."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.extras import need_extra
from tests.trace_decoders import Decoded, Slice, check_metrics, decode, steps, union_s, within

need_extra("llm")

ROOT = Path(__file__).resolve().parents[3]
TRACED = (2, 3, 4)
LAST = 5
RUNNER = """
runner:
  name: run
  run_dir: {folder}
  max_steps: {last}
  segments: 1
  save_interval: 3
  logger: {{logger_backends: [jsonl]}}
  trace: {{steps: "2,3-4"}}
"""
PPO = """
defaults: [{root}/configs/quickstart.yaml]
algorithm: {{rollout_steps: 128, update_epochs: 10}}
actor: {{model: {{hidden_sizes: [512, 512, 512]}}}}
env: {{train: {{wrappers: ["trace_agent:Waiting"]}}, eval: {{num_episodes: 4}}}}
"""
GRPO = """
defaults: [{root}/configs/base/grpo.yaml]
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  max_prompt_tokens: 16
  prompts_per_step: 8
reward: {{terms: [{{name: length, kwargs: {{limit: 8}}}}]}}
algorithm: {{group_size: 4}}
rollout: {{max_new_tokens: 24, max_batch_size: 32}}
actor:
  global_batch_size: 32
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 64, layers: 2, heads: 2}}}}
"""
AGENT = """
cluster: {{component_placement: {{"actor,rollout": 0, agent: "0:0-1"}}}}
agent: {{kind: python, target: "trace_agent:solve", timeout_s: 60, episodes_per_rank: 4}}
"""
AGENT_REWARD = ("reward: {{terms: [{{name: length, kwargs: {{limit: 8}}}}]}}", "reward: {{terms: [{{name: agent}}]}}")
PROGRAM = """
import time
import gymnasium

class Waiting(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.001)
        return self.env.step(action)

def solve(task, model):
    for _ in range(2):
        reply = model.chat(task.messages)
    return len(reply.get("content") or "") / 24
"""


def train(folder: Path, text: str) -> tuple[Decoded, dict[int, dict[str, float]]]:
    """Trains; the exported and decoded trace, and the metrics of each step."""
    config = folder / "run.yaml"
    config.write_text((text + RUNNER).format(root=ROOT, folder=folder, last=LAST))
    (folder / "trace_agent.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "RLHPC_MODELS": str(folder / "models")}
    rlhpc = [sys.executable, "-m", "rlhpc.cli"]
    done = warm.run(
        [*rlhpc, "train", str(config)], env=environment, cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    decoded = []
    for name in ("t.json.gz", "t.pftrace"):
        said = warm.run(
            [*rlhpc, "trace", str(folder / "run"), "-o", str(folder / name)], env=environment, cwd=folder,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert said.returncode == 0 and "steps 2-4, " in said.stdout, said.stdout + said.stderr
        decoded.append(decode(folder / name))
    assert sorted(map(facts, decoded[0].slices)) == sorted(map(facts, decoded[1].slices)), "both formats say the same"
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return decoded[1], {row["step"]: row for row in rows}


def facts(one: Slice) -> tuple[object, ...]:
    return one.process, one.thread, one.name, one.category, one.start_ns, one.end_ns


def alike(traced: float, metric: float) -> bool:
    return traced == pytest.approx(metric, rel=0.02, abs=0.005)  # a call's own arguments and answer take some time, too


def check_phases(trace: Decoded, rows: dict[int, dict[str, float]]) -> None:
    """The driver's steps and phases last as long as the metrics say, and every end of a message is there."""
    assert sorted(steps(trace)) == list(TRACED)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for step in TRACED:
        slices = within(trace.of("driver-0", "phase"), steps(trace)[step])
        phases = {one.name for one in slices}
        assert len(phases) >= 3
        for phase in phases:
            open_s = union_s(one for one in slices if one.name == phase)
            pairs.setdefault(phase, []).append((open_s, rows[step][f"time/{phase}_s"]))
    for phase, times in pairs.items():  # a busy machine may stop the process between the two clocks' readings
        assert any(alike(*pair) for pair in times), (phase, times)
    for source, target in trace.flows():
        assert source.start_ns <= target.end_ns
    assert {one.category for one in trace.of("driver-0")} >= {"step", "phase", "wait", "save"}


def test_an_embodied_run(tmp_path: Path) -> None:
    trace, rows = train(tmp_path, PPO)
    check_phases(trace, rows)
    check_metrics(trace, rows, is_embodied=True, tolerance_s=0.005)
    num_decisions = len(TRACED) * 128
    assert len(trace.of("env-0", "simulator")) == len([s for s in trace.of("rollout-0", "engine") if s.name == "act"])
    assert len(trace.of("env-0", "simulator")) % num_decisions == 0
    pairs = {(source.process.split()[0], target.process.split()[0]) for source, target in trace.flows()}
    assert {("env-0", "rollout-0"), ("rollout-0", "env-0"), ("rollout-0", "actor-0"), ("driver-0", "env-0")} <= pairs
    assert {one.name for one in trace.of("actor-0", "save")} and trace.of("rollout-0", "weights")
    assert ("env-0", "memory") in {(process.split()[0], name) for process, name, _ in trace.counters}


def test_a_run_of_a_language_model(tmp_path: Path) -> None:
    trace, rows = train(tmp_path, GRPO)
    check_phases(trace, rows)
    check_metrics(trace, rows, is_embodied=False, tolerance_s=0.005)
    engine = [one for one in trace.of("rollout-0", "engine") if one.name == "engine step"]
    assert sum(one.args["tokens"] for one in engine) > 0 and all(0 < one.args["batch"] <= 32 for one in engine)
    assert len(trace.of("rollout-0", "judge")) == 3 * 32, "an answer each"
    assert any(one.args.get("tokens") for one in trace.of("actor-0", "train") if one.name == "micro-batch")
    pairs = {(source.process.split()[0], target.process.split()[0]) for source, target in trace.flows()}
    assert {("rollout-0", "actor-0"), ("driver-0", "rollout-0"), ("driver-0", "actor-0")} <= pairs
    assert {name for process, name, _ in trace.counters if process.startswith("rollout-0")} >= {"memory", "KV cache"}
    depth = [samples for (process, name, _), samples in trace.counters.items() if name == "queue depth/work"]
    assert depth and all(value >= 0 for _, value in depth[0])


def test_a_run_of_agents(tmp_path: Path) -> None:
    trace, rows = train(tmp_path, GRPO.replace(*AGENT_REWARD) + AGENT)
    check_phases(trace, rows)
    check_metrics(trace, rows, is_embodied=False, tolerance_s=0.005)
    turns, episodes = trace.of("rollout-0", "turn"), [one for n in (0, 1) for one in trace.of(f"agent-{n}", "turn")]
    assert len(turns) == 3 * 32 * 2, "two turns an episode"
    assert len(episodes) == 3 * 32
    assert all(one.args["tokens"] > 0 for one in turns)


#: Nsight Systems' command line, as far as it is used: options, then the program. It fills in the output's name, too.
NSYS = """#!{python}
import os, socket, sys
assert sys.argv[1] == "profile", sys.argv
first = next(i for i, word in enumerate(sys.argv) if i > 1 and not word.startswith("--"))
options = dict(word[2:].partition("=")[::2] for word in sys.argv[2:first])
name = options["output"].replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
open(name + ".nsys-rep", "w").write(" ".join(sys.argv[2:first]))
os.execvp(sys.argv[first], sys.argv[first:])
"""


def test_nsight_systems_starts_the_ranks_of_the_named_groups(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text(NSYS.format(python=sys.executable))
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    rlhpc = [sys.executable, "-m", "rlhpc.cli"]
    words = [
        str(ROOT / "configs/quickstart.yaml"), f"runner.run_dir={tmp_path}", "runner.name=run", "runner.max_steps=2",
        "runner.segments=1", "runner.trace.profile.nsys=[rollout]",
        "runner.trace.profile.nsys_steps=2", "runner.trace.profile.nsys_options={s: cpu, python-backtrace: true}",
        'cluster.component_placement={actor: 0, "rollout,env": "0:0-1"}',
    ]  # fmt: skip
    done = warm.run(
        [*rlhpc, "train", *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    reports = sorted((tmp_path / "run/trace/nsys").iterdir())
    pids = {report.name.removesuffix(".nsys-rep").rpartition("-")[2] for report in reports}
    assert len(pids) == len(reports) == 2 and all(report.name.startswith("rollout-") for report in reports)
    for word in ("--trace=cuda", "--sample=cpu", "--python-backtrace ", "--capture-range=cudaProfilerApi"):
        assert all(word in report.read_text() for report in reports), word
    without = {**environment, "PATH": os.environ["PATH"]}
    done = warm.run(
        [*rlhpc, "train", *words, "runner.name=without"], env=without, cwd=tmp_path, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0 and "there is no nsys on this machine's PATH" in done.stdout + done.stderr
